"""Values that are assigned to sharded parameters: ``module.weight = nn.Parameter(...)``,
``load_state_dict(assign=True)``."""

from __future__ import annotations

from typing import Any

from fsdp_engine.runtime.parameter_guard import register_assigned_values


def register() -> None:
    """Let sharded parameters take assigned values."""
    register_assigned_values(_make)


def _make(owners: Any) -> Any:
    from fsdp_engine.extensions.assigned_values.assigned_values import TakenValues

    return TakenValues(owners)
