"""Weights that modules write in forward, which are taken into the main weights."""

from __future__ import annotations

from typing import Any

from fsdp_engine.runtime.parameter_watch import register_watches


def register() -> None:
    """Let full parameters be compared before and after modules compute with them."""
    register_watches(_of_unit, _of_model)


def _of_unit(buffers: Any) -> Any:
    from fsdp_engine.extensions.written_weights.written_weights import UnitWrites

    return UnitWrites(buffers)


def _of_model(engine: Any) -> Any:
    from fsdp_engine.extensions.written_weights.written_weights import WrittenWeights

    return WrittenWeights(engine)
