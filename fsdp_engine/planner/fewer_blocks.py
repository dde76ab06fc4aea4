"""Plans of deep models from simulations of fewer blocks.

[Note: Fewer blocks]
A deep model repeats a block. Each further one adds the same operations to forward and backward, the
same messages and the same state. So a step's time, its bytes sent, and its memory at each place of
the program are linear in the number of blocks, once there are a few: a unit is gathered while
another one computes, which the first and the last blocks lack. Such a model is simulated with three
small numbers of blocks. If the third has added as much as the second, all others would; if not, or
if the model does not run with fewer blocks, it is simulated as it is.

The *peak* is not linear, as it may move from one place to another. So the largest memory at each
place (a module, in forward, backward or the step) is continued, and the peak is the largest of
these. Between the first blocks and the last ones, memory changes by the same amount from block to
block, so no block in the middle has more than both ends.

Blocks are alike if their modules have equal classes, shapes and attributes, apart from integers
that count blocks. Every ``period``-th one may be, such as where windows of attention alternate.
``tests/planner/test_fewer_blocks.py`` compares with simulations of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.simulation.alike import is_alike
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.records import combined
from fsdp_engine.planner.simulation.simulate import Simulation

# Alike blocks of the first simulation, at least, and of its beginning: units are gathered ahead
# from block to block.
_LEAST = 6
_AT_START = 3
_MOST_IN_PERIOD = 8
# Relative difference of what blocks add.
_TOLERANCE = 1e-6

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Repeated:
    """Blocks of a model that are alike, up to the end of their list.

    Attributes:
        name: The name of the list.
        before: Blocks of the list before them.
        count: Number of alike blocks.
        period: Each block is like the one so many before it.
    """

    name: str
    before: int
    count: int
    period: int

    @property
    def depths(self) -> tuple[int, int, int]:
        """Three numbers of alike blocks to simulate, a period apart."""
        first = _LEAST + (self.count - _LEAST) % self.period
        return first, first + self.period, first + 2 * self.period

    @property
    def periods(self) -> int:
        """Number of whole periods."""
        return self.count // self.period

    @property
    def is_deep(self) -> bool:
        """Whether all blocks are more than those of :attr:`depths` together."""
        return self.count > sum(self.depths)

    def shorten(self, model: nn.Module, depth: int) -> None:
        """Leave ``depth`` alike blocks in ``model``, numbered from 0 without gaps."""
        modules = model.get_submodule(self.name)._modules
        blocks = list(modules.values())
        start = self.before + _AT_START
        del blocks[start : start + self.count - depth]
        modules.clear()
        modules.update((str(number), block) for number, block in enumerate(blocks))

    def place_of(self, module: str, depth: int) -> str:
        """The name of a module of a model of ``depth`` alike blocks, with the number of its block
        from the end of the list, unless the block is among the first."""
        if not module.startswith(f"{self.name}."):
            return module
        number, *rest = module[len(self.name) + 1 :].split(".")
        if not number.isdecimal() or int(number) < self.before + _AT_START:
            return module
        return ".".join((self.name, str(int(number) - self.before - depth), *rest))


def find_repeated(model: nn.Module) -> Repeated | None:
    """Returns the blocks of the model's longest list of alike ones; None if it has none, or other
    lists as long, whose members may belong to these blocks."""
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
            break  # longer periods are no more
        before = _unlike(blocks, period)
        found.append(Repeated(name, before, len(blocks) - before, period))
    return max(found, key=lambda each: (each.is_deep, each.periods))


def _unlike(blocks: Sequence[Any], period: int) -> int:
    """How many blocks at the start are not alike, as those up to the end are."""
    number = len(blocks) - period
    while number > 0 and is_alike(blocks[number - 1], blocks[number - 1 + period], period):
        number -= 1
    return number


def of_all_blocks(
    repeated: Repeated, simulations: Sequence[Simulation], outcomes: Sequence[Outcome]
) -> Outcome | None:
    """Returns the outcome of the whole model; None if the simulations are not on one line.

    Args:
        repeated: Its blocks.
        simulations, outcomes: The simulations and outcomes of the numbers of blocks of
            ``repeated.depths``.
    """
    more = (repeated.count - repeated.depths[-1]) // repeated.period
    places = [
        _places(repeated, depth, simulation)
        for depth, simulation in zip(repeated.depths, simulations, strict=True)
    ]
    # All of the first simulation's places: the others have these, too, and more in the middle.
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
    """Numbers are not on a line."""


def _continued(more: int, one: float, two: float, three: float) -> float:
    """Three values, continued by ``more`` values."""
    if not abs((three - two) - (two - one)) <= _TOLERANCE * abs(three):
        raise _NotLinearError
    return three + more * (three - two)


def _numbers(outcome: Outcome) -> dict[str, Any]:
    """Everything of an outcome that grows with the model, except for memory."""
    names = ("sent", "elsewhere", "times", "model_flops", "checkpoint_bytes")
    return {name: getattr(outcome, name) for name in names}


_Place = tuple[str, str]


def _places(repeated: Repeated, depth: int, found: Simulation) -> dict[_Place, dict[str, int]]:
    """The largest memory at each place by kind. A place is a phase and a module."""
    return {
        (phase, repeated.place_of(module, depth)): dict(zip(KINDS, sizes, strict=True))
        for (phase, module), sizes in found.memory_by_place.items()
    }
