"""Names of the kernel (the package without its extensions) that the planner uses.

The planner imports no other names, so it does not depend on how the kernel is divided into files.
``tests/test_architecture.py`` checks this. The names are:

- the backend with its lanes and allocations, which a simulation replaces, and the hardware, on
  which measurements run;
- arguments of :func:`~fsdp_engine.shard`, engines, and functions that build them;
- plans with the sizes of their units, and the formulas of strategies, which are computed without
  ranks;
- extensions by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from fsdp_engine.backend import Backend as Backend
from fsdp_engine.comm import lanes as lanes
from fsdp_engine.comm.groups import default_group, timeout_of_group
from fsdp_engine.comm.mesh import device_of, ranks_that_meet
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.deprecated_arguments import replaced
from fsdp_engine.engine import Engine as Engine
from fsdp_engine.engine_extension import EngineExtension as EngineExtension
from fsdp_engine.extension_list import find_module as find_module
from fsdp_engine.hardware import Hardware as Hardware
from fsdp_engine.memory import allocator as allocator
from fsdp_engine.optim import shard_optimizer as shard_optimizer
from fsdp_engine.options import Options as Options
from fsdp_engine.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_engine.runtime.not_compiled import not_compiled as not_compiled
from fsdp_engine.runtime.rehearsal import Rehearsal as Rehearsal
from fsdp_engine.sharding import check_extensions, check_policy_and_options
from fsdp_engine.sharding import shard as shard
from fsdp_engine.strategies import Axis as Axis
from fsdp_engine.strategies import Role as Role
from fsdp_engine.strategies import Strategy as Strategy
from fsdp_engine.units.assignment import UnitSelector, collect_records
from fsdp_engine.units.blocks import find_blocks as find_blocks
from fsdp_engine.units.dtensors import set_spreads
from fsdp_engine.units.plan import AxisPlan, AxisPlans, Plan, PlanSettings, plan_units
from fsdp_engine.units.plan import PlannedBuffer as PlannedBuffer

T = TypeVar("T")


def checked_arguments(
    given: Mapping[str, Any], what: str, *, stacklevel: int = 3
) -> dict[str, Any]:
    """Returns checked arguments of :func:`shard`, in which deprecated arguments are replaced.

    Args:
        given: The arguments by name.
        what: The name of the function that the user has called, for messages.
        stacklevel: Number of frames from this function to the user's call, for warnings.

    Raises:
        TypeError, ValueError: A deprecated argument, ``mp_policy``, ``options`` or ``extensions``
            is invalid.
    """
    found = replaced(given, what, stacklevel=stacklevel + 2)
    check_policy_and_options(found.get("mp_policy"), found.get("options"))
    if "extensions" in found:
        found["extensions"] = check_extensions(found["extensions"] or ())
    return found


def on_all_ranks(what: str, function: Callable[[int], T], note: Callable[[T], str] = str) -> T:
    """Call a function on all ranks, and wait until each of them has called it. Collective.

    Args:
        what: The name of the operation, for error messages.
        function: The function, which is called with the number of ranks.
        note: Returns a text for the result of ``function``. It must be equal on all ranks.

    Raises:
        Exception: The error that ``function`` raised on this rank. For the errors of the other
            ranks see :func:`~.rendezvous.meet`.
    """
    with reporting(what, ranks := ranks_that_meet(None)):
        found = function(len(ranks))
    timeout = timeout_of_group(default_group(), device_of(None))
    meet(what, ranks, timeout, note=note(found))
    return found


def unchecked_plan(
    model: nn.Module,
    sizes: dict[Axis, int],
    strategy: Strategy,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    options: Options | None = None,
    extensions: Sequence[EngineExtension] = (),
) -> tuple[Plan, PlanSettings]:
    """Returns the plan of a model that will not be sharded, and the settings of the plan. Unlike
    ``shard``, this function does not check that the parameters can be sharded, share no memory, and
    are held by no optimizer.

    Args:
        model: The model, on any device.
        sizes: Number of ranks on each axis. These ranks need not exist.
        strategy: The levels of both axes.
        units, mp_policy, options, extensions: See :func:`~fsdp_engine.shard`.

    Raises:
        ValueError: ``units`` or a granule is invalid, or the model has no parameters.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    axes = AxisPlans(AxisPlan(sizes, strategy))
    settings = PlanSettings(policy, options or Options(), axes, extensions)
    records = collect_records(model)
    if not records:
        raise ValueError(f"model: expected parameters; found none in {type(model).__name__}")
    set_spreads(records)
    return Plan(plan_units(model, records, units, settings), records, on_meta=True), settings
