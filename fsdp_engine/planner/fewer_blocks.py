"""Plans of deep models from simulations of fewer blocks.

[Note: Fewer blocks]
A deep model repeats a block. Each further block adds the same operations to forward and backward,
the same communication and the same state. So the step time, the bytes sent, and the memory at each
place of the program are linear in the number of blocks, once there are a few. (The first and last
blocks differ: their units are not gathered while another block computes.) Such a model is simulated
with three small numbers of blocks, a constant number of blocks apart. If the third simulation adds
as much to the second as the second adds to the first, further blocks would add the same. If not, or
if the model does not run with fewer blocks, all blocks are simulated.

The *peak* is not linear, as it may move from one place to another. So the largest memory at each
place (a module, in forward, backward or the step) is extrapolated, and the peak is the largest of
these. Between the first and the last blocks, memory changes by the same amount from block to block,
so no block in the middle has more memory than both ends.

Two blocks are equal if their modules have equal classes, shapes and attributes, apart from integers
that count blocks. In some models only every ``period``-th block is equal, for example if layers
with and without a window of attention alternate. ``tests/planner/test_fewer_blocks.py`` compares
the results with simulations of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.simulation.equal_structure import have_equal_structure
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.records import combined
from fsdp_engine.planner.simulation.simulate import Simulation

# Smallest number of equal blocks to simulate, and the number of these before the removed blocks.
# Units are prefetched from block to block, so the first blocks differ from those in the middle.
_LEAST = 6
_AT_START = 3
# Largest distance between equal blocks.
_MOST_IN_PERIOD = 8
# Relative tolerance between the amounts that successive blocks add.
_TOLERANCE = 1e-6

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Repeated:
    """The equal blocks at the end of a list of the model's blocks.

    Attributes:
        name: The name of the list.
        before: Number of blocks in the list before the equal ones.
        count: Number of equal blocks.
        period: Distance between blocks that are equal to each other.
    """

    name: str
    before: int
    count: int
    period: int

    @property
    def depths(self) -> tuple[int, int, int]:
        """Three numbers of equal blocks to simulate, a period apart."""
        first = _LEAST + (self.count - _LEAST) % self.period
        return first, first + self.period, first + 2 * self.period

    @property
    def periods(self) -> int:
        """Number of whole periods."""
        return self.count // self.period

    @property
    def is_deep(self) -> bool:
        """Whether the model has more blocks than the simulations of :attr:`depths` together."""
        return self.count > sum(self.depths)

    def shorten(self, model: nn.Module, depth: int) -> None:
        """Remove blocks so that ``depth`` equal ones stay in ``model``, and renumber the list."""
        modules = model.get_submodule(self.name)._modules
        blocks = list(modules.values())
        start = self.before + _AT_START
        del blocks[start : start + self.count - depth]
        modules.clear()
        modules.update((str(number), block) for number, block in enumerate(blocks))

    def place_of(self, module: str, depth: int) -> str:
        """Returns the name of a module in a model of ``depth`` equal blocks. The number of its
        block is counted from the end of the list, except for the first blocks."""
        if not module.startswith(f"{self.name}."):
            return module
        number, *rest = module[len(self.name) + 1 :].split(".")
        if not number.isdecimal() or int(number) < self.before + _AT_START:
            return module
        return ".".join((self.name, str(int(number) - self.before - depth), *rest))


def find_repeated(model: nn.Module) -> Repeated | None:
    """Returns the equal blocks at the end of the model's longest list. :attr:`Repeated.is_deep` is
    True if there are enough of them for simulations of fewer blocks. None if no list has more than
    ``_LEAST`` modules, if the list is a ``ModuleDict`` whose keys are not numbers in order, or if
    another list is as long, since the members of both lists may be parts of the same blocks."""
    lists: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, _LISTS) and not is_within and len(module._modules) > _LEAST:
            lists.append((name, module))
    lengths = [len(module._modules) for _, module in lists]
    if not lists or lengths.count(max(lengths)) > 1:
        return None
    name, longest = max(lists, key=lambda each: len(each[1]._modules))
    if isinstance(longest, nn.ModuleDict) and list(longest) != list(map(str, range(len(longest)))):
        return None
    blocks = list(longest._modules.values())
    found: list[Repeated] = []
    for period in range(1, _MOST_IN_PERIOD + 1):
        if any(each.is_deep and each.periods >= len(blocks) // period for each in found):
            break  # longer periods cannot have more periods
        before = _unlike(blocks, period)
        found.append(Repeated(name, before, len(blocks) - before, period))
    return max(found, key=lambda each: (each.is_deep, each.periods))


def _unlike(blocks: Sequence[Any], period: int) -> int:
    """Returns the number of leading blocks that differ from the rest."""
    number = len(blocks) - period
    while number > 0 and have_equal_structure(
        blocks[number - 1], blocks[number - 1 + period], period
    ):
        number -= 1
    return number


def of_all_blocks(
    repeated: Repeated, simulations: Sequence[Simulation], outcomes: Sequence[Outcome]
) -> Outcome | None:
    """Returns the outcome of the full model; None if the simulations are not linear in the depth.

    Args:
        repeated: The model's equal blocks.
        simulations, outcomes: The simulations with the depths of ``repeated.depths``, and their
            outcomes.
    """
    more = (repeated.count - repeated.depths[-1]) // repeated.period
    places = [
        _places(repeated, depth, simulation)
        for depth, simulation in zip(repeated.depths, simulations, strict=True)
    ]
    # The deeper models must have all places of the shallowest one. They also have further places in
    # the middle.
    if any(place not in each for each in places for place in places[0]):
        return None
    try:
        numbers = combined(partial(_continued, more), *map(_numbers, outcomes))
        held = [
            combined(partial(_continued, more), *(each[place] for each in places))
            for place in places[0]
        ]
    except _NotLinearError:
        return None
    return replace(outcomes[-1], memory=max(held, key=lambda each: sum(each.values())), **numbers)


class _NotLinearError(ValueError):
    """The numbers do not grow linearly."""


def _continued(more: int, one: float, two: float, three: float) -> float:
    """Returns the last value, extrapolated by ``more`` further steps."""
    if not abs((three - two) - (two - one)) <= _TOLERANCE * abs(three):
        raise _NotLinearError
    return three + more * (three - two)


def _numbers(outcome: Outcome) -> dict[str, Any]:
    """Returns the figures of an outcome that grow with the model, except for memory."""
    names = ("sent", "elsewhere", "times", "model_flops", "checkpoint_bytes")
    return {name: getattr(outcome, name) for name in names}


_Place = tuple[str, str]


def _places(repeated: Repeated, depth: int, found: Simulation) -> dict[_Place, dict[str, int]]:
    """Returns the largest memory by kind at each place. A place is a phase and a module."""
    return {
        (phase, repeated.place_of(module, depth)): dict(zip(KINDS, sizes, strict=True))
        for (phase, module), sizes in found.memory_by_place.items()
    }
