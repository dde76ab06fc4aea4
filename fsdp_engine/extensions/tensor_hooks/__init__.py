"""Parameters of tensor classes with FSDP2's all-gather hooks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from torch import Tensor

from fsdp_engine.codecs.base import CodecRule
from fsdp_engine.codecs.param_class import ParamClass, add_param_class

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class TensorsWithHooks(ParamClass):
    """See :class:`ParamClass`: classes that have one of the hooks."""

    def takes(self, param: Tensor) -> bool:
        """See :class:`ParamClass`."""
        return hasattr(type(param), PRE) or hasattr(type(param), POST)

    def rule(self, config: Any) -> CodecRule:
        """See :class:`ParamClass`."""
        rule: CodecRule = _codec().tensor_hooks
        return rule

    def check(self, name: str, param: Tensor, *, is_in_dtensor: bool) -> None:
        """See :class:`ParamClass`."""
        _codec().check_hooks(name, param, is_in_dtensor=is_in_dtensor)

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """See :class:`ParamClass`."""
        marks: dict[str, Any] = _codec().marks_of(param)
        return marks

    def made_of(self, param: Tensor, values: Tensor) -> Tensor:
        """See :class:`ParamClass`."""
        made: Tensor = _codec().with_values(param, values)
        return made

    def any_marked(self, tensors: Iterable[Tensor]) -> bool:
        """See :class:`ParamClass`: whether any has a hook as its own attribute. One pass in C."""
        return any(map(hasattr, tensors, repeat(PRE)))

    def refuse_marked(self, name: str, param: Tensor) -> None:
        """See :class:`ParamClass`: hooks that were set on a tensor instead of its class.

        Raises:
            ValueError: ``param``, or its slice, has one; names it.
        """
        for owner, tensor in (
            ("it", param),
            ("its _local_tensor", getattr(param, "_local_tensor", None)),
        ):
            if tensor is not None and hasattr(tensor, PRE):
                raise ValueError(
                    f"{name}: expected a tensor class with {PRE} and {POST}, before the parameter "
                    f"is sharded; found {PRE} set on {owner}, which no gather calls. Make the "
                    "parameter one of such a class, or pass a codec to fe.shard (codec_rules)"
                )


def _codec() -> Any:
    """The module of the codec, which is imported for the first such parameter."""
    return importlib.import_module(f"{__name__}.hooks_codec")


def register() -> None:
    """Let engines shard such parameters."""
    add_param_class(TensorsWithHooks())
