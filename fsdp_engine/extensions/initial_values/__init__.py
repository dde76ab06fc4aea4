"""Initial values that ranks have not built: of models on the meta device, and of the first rank."""

from __future__ import annotations

from typing import Any

from fsdp_engine.units.build import register_initial_values


def register() -> None:
    """Let ``shard`` take other values of ``initial_values``, and models on the meta device."""
    register_initial_values(("rank0", "empty"), _load)


def _load() -> Any:
    from fsdp_engine.extensions.initial_values.given_values import GivenValues

    return GivenValues
