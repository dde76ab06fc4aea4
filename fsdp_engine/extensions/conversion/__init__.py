"""Conversions of sharded models to other dtypes: ``model.to(dtype)``, ``model.half()``."""

from __future__ import annotations

from typing import Any

from fsdp_engine.runtime.parameter_guard import register_conversion


def register() -> None:
    """Let :func:`convert` convert the modules of sharded models."""
    register_conversion(convert)


def convert(engine: Any, module: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
    """See :class:`~.parameter_guard.Converts`: parameters are converted, too."""
    from fsdp_engine.extensions.conversion.dtype_conversion import Conversions

    engine.extension(Conversions).convert(module, fn, *args, **kwargs)
