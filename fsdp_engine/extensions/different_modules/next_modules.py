"""Names the modules that a rank uses next: ``engine.will_use(modules)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.extensions.different_modules.gather_rounds import GatherRounds
from fsdp_engine.runtime.hooks import outside_checkpoints
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.passes import in_backward


class _UnitsOfModules:
    """Finds the units of modules."""

    def __init__(self, engine: Engine) -> None:
        self._own = {module: unit.index for unit in engine.units for module in unit.modules}
        self._found: dict[nn.Module, Sequence[int]] = {}

    def find(self, module: nn.Module) -> Sequence[int]:
        """Returns the indices of the units of ``module`` and its descendants, in module order."""
        found = self._found.get(module)
        if found is None:
            units = [self._own[each] for each in module.modules() if each in self._own]
            found = self._found[module] = tuple(dict.fromkeys(units))
        return found


@not_compiled
def will_use(
    engine: Engine, modules: Iterable[nn.Module], *, max_elements: int | None = None
) -> None:
    """Name the modules that this rank calls next, so that they are gathered at once.

    Call it in forward, as soon as the modules are known: in a mixture of experts, after the router
    has chosen them. Ranks may name different modules, and any number of them. Within
    :func:`together` a rank then votes for all of them in one message instead of one message for
    each, in forward and in backward. A module that is named and not called costs its gather. A
    module that is called and not named is gathered when it is called. Modules that an earlier call
    has named, and that were not called yet, are no longer named.

    Does nothing outside of ``together``, with a prefetch window of 0, at levels below
    ``optim_grads_params``, and for modules that are not units and contain none, because the unit
    that contains them has their parameters.

    Example::

        experts = [self.experts[index] for index in chosen.unique().tolist()]
        engine.will_use(experts)

    Args:
        engine: The engine of the model.
        modules: Modules of the model, in the order in which they are called.
        max_elements: The number of elements of their units to gather at once, at least one unit.
            None: all of them. A rank holds up to so many full parameters before it uses them, and
            up to twice as many if it waits for reductions or calls modules in another order.

    Raises:
        TypeError: ``modules`` is not an iterable of modules, or ``max_elements`` is not an integer.
        ValueError: A module belongs to another model or to none, or ``max_elements`` is not
            positive.
        RuntimeError: The call is within ``together``, but not within a forward or backward. Or
            another rank raised an exception.
    """
    units = _units_of(engine, modules)
    if max_elements is not None:
        if isinstance(max_elements, bool) or not isinstance(max_elements, int):
            raise TypeError(
                "will_use(max_elements=): expected a number of elements, or None; found "
                f"{type(max_elements).__name__}"
            )
        if max_elements < 1:
            raise ValueError(
                "will_use(max_elements=): expected a positive number, or None; found "
                f"{max_elements}"
            )
    _name(engine, units, max_elements)


def _units_of(engine: Engine, modules: object) -> list[int]:
    if not isinstance(modules, Iterable):
        raise TypeError(
            "will_use(modules): expected an iterable of modules; found "
            f"{type(modules).__name__}. Put a single module into a list"
        )
    finder = engine.extension(_UnitsOfModules)
    units: dict[int, None] = {}
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"will_use(modules): expected modules; found {type(module).__name__} at position "
                f"{number}"
            )
        if engine_of(module) is not engine:
            other = "another engine" if engine_of(module) is not None else "no engine"
            raise ValueError(
                "will_use(modules): expected modules of the model given to shard(); found a "
                f"{type(module).__name__} at position {number}, which belongs to {other}"
            )
        units.update(dict.fromkeys(finder.find(module)))
    return list(units)


@outside_checkpoints
def _name(engine: Engine, units: Sequence[int], max_elements: int | None) -> None:
    scheduler = engine.scheduler
    if not isinstance(scheduler.schedule, GatherRounds):
        return
    if scheduler.is_at_rest and not in_backward():
        raise RuntimeError(
            "will_use(): expected a call within a forward of the model; found no forward running. "
            "Call it where the model has chosen the modules, as after a router"
        )
    if scheduler.prefetches:
        scheduler.schedule.will_use(units, max_elements)
