"""Parameters of tensor classes with FSDP2's all-gather hooks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from torch import Tensor

from fsdp_engine.codecs.base import CodecRule, ParamClass, add_param_class

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class TensorsWithHooks(ParamClass):
    """Tensor classes that have one of the hooks. See :class:`ParamClass`."""

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
        """See :class:`ParamClass`. Checks in C whether any tensor has the pre hook, which its class
        lacks."""
        return any(map(hasattr, tensors, repeat(PRE)))

    def refuse_marked(self, name: str, param: Tensor) -> None:
        """See :class:`ParamClass`. Refuses hooks that were set on a tensor instead of its class.

        Raises:
            ValueError: ``param`` or its slice has such a hook; names the parameter.
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
    """Import the module of the codec, at its first use."""
    return importlib.import_module(f"{__name__}.hooks_codec")


def register() -> None:
    """Register the class, so that engines can shard such parameters."""
    add_param_class(TensorsWithHooks())
