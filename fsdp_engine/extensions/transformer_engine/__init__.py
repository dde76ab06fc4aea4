"""Gathers weights that Transformer Engine has quantized, as bytes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fsdp_engine.codecs.base import CodecRule, ParamClass, add_param_class
from fsdp_engine.engine_extension import EngineExtension

__all__ = ["TransformerEngine", "TransformerEngineCodec"]


def __getattr__(name: str) -> Any:
    """Returns an object of ``quantized_codec.py``, which is imported at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_codec(), name)


def _codec() -> Any:
    """Import the module of the codec, at its first use."""
    return importlib.import_module(f"{__name__}.quantized_codec")


def is_quantized(param: Tensor) -> bool:
    """Returns whether ``param`` is one of TE's quantized tensors. Does not import TE."""
    packages = (kind.__module__.partition(".")[0] for kind in type(param).__mro__)
    return "transformer_engine" in packages


class QuantizedTensors(ParamClass):
    """Tensor classes of Transformer Engine. See :class:`ParamClass`."""

    def takes(self, param: Tensor) -> bool:
        """See :class:`ParamClass`."""
        return is_quantized(param)

    def rule(self, extensions: Sequence[EngineExtension]) -> CodecRule:
        """See :class:`ParamClass`."""
        rule: CodecRule = _codec().TransformerEngine.of(extensions)
        return rule

    def extra_tensors(self, module: nn.Module) -> Mapping[str, Tensor]:
        """See :class:`ParamClass`. Returns amaxes and scales of delayed scaling, which depend on
        past steps. Transformer Engine saves them as a pickle, which it does not load by default."""
        meta = getattr(module, "fp8_meta", None)
        if not isinstance(meta, dict) or not getattr(module, "primary_weights_in_fp8", False):
            return {}
        return {
            f"{direction}.{name}": tensor
            for direction in ("scaling_fwd", "scaling_bwd")
            for name in ("scale", "amax_history")
            if isinstance(tensor := getattr(meta.get(direction), name, None), Tensor)
        }


def register() -> None:
    """Register the class, so that engines can shard such weights."""
    add_param_class(QuantizedTensors())
