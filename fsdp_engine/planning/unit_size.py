"""Default units that are too small are joined with their neighbours.

[Note: Size of a unit]
Whatever its size, a unit costs a message for each gather and each reduction, and the host's time
for submissions. What it buys is that messages begin earlier and memory ends earlier. The first
gather and the last reduction are always waited for, and grow with their units. Where the two meet
was measured (``benchmarks/unit_size.py``; tables in docs/benchmarks.md, "Size of a unit"):

- simulated H100s, 8 and 64, 16,384 tokens a rank: up to 3 M elements a block the host bounds a
  step, and joining blocks takes 5 to 15 % off it; from 5 M on compute does, and joining adds up to
  1 % by twos, 3 to 8 % where all sixteen blocks are one unit.
- 1 M elements in bf16, 2 MB, take 44 us on a 400 Gb/s link, a ring's hops over eight nodes 42 us:
  smaller messages are mostly latency.
- two gloo ranks, eight blocks: with all in one unit a step takes 0.60 (level 0) to 0.46 (level 3)
  of one with single units at 33 k elements a block, 0.87 to 0.60 at 526 k.

So default units have at least 1 M elements: far enough below the blocks of usual models (7 M in the
smallest GPT-2) that those stay as they are, in time and in memory. Beside its largest set a joined
unit has less than 1 M elements, and less than 2 M where a small leftover has joined it.

The order is that of modules, first come: a small set takes what follows until it is large enough,
whatever the size of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import nn

from fsdp_engine.buffers.param_record import ParamRecord
from fsdp_engine.planning.assignment import ModuleSet, assign
from fsdp_engine.planning.buckets import split_by_size

# Elements below which a default unit is joined with a neighbour: see [Note: Size of a unit].
MIN_UNIT_SIZE = 1_000_000


def least_size(min_unit_size: object) -> int:
    """The elements that a default unit has at least, if others can be joined with it.

    Raises:
        TypeError: neither an integer nor None, which stands for ``MIN_UNIT_SIZE``.
        ValueError: negative.
    """
    if min_unit_size is None:
        return MIN_UNIT_SIZE
    if isinstance(min_unit_size, bool) or not isinstance(min_unit_size, int):
        raise TypeError(
            "min_unit_size: expected an integer of 0 or more (elements), or None; found "
            f"{min_unit_size!r}"
        )
    if min_unit_size < 0:
        raise ValueError(
            f"min_unit_size: expected 0 or more elements, or None; found {min_unit_size}"
        )
    return min_unit_size


def join_small(
    model: nn.Module, sets: Sequence[ModuleSet], records: Sequence[ParamRecord], least: int
) -> list[ModuleSet]:
    """``sets`` in module order, neighbours joined until each has ``least`` elements.

    Sets that own no parameter stay as they are, and so do those that lie within another or contain
    one: nothing is joined across them.

    Args:
        model: the root.
        sets: the default ones, in module order.
        records: the model's parameters.
        least: elements. 0: nothing is joined.

    Worked example: sets of 2, 3, 9, 1 and 2 elements with ``least=5`` become (2, 3), (9), (1, 2)
    and, since the last is small, (2, 3), (9, 1, 2).
    """
    if least == 0:
        return list(sets)
    owned = assign(model, sets, records)
    sizes = {each.name: sum(r.param.numel() for r in owned[each.name]) for each in sets}
    places = {id(module): place for place, module in enumerate(model.modules())}
    alone = _nested(sets) | {name for name, size in sizes.items() if not size}
    result: list[ModuleSet] = []
    for is_alone, stretch in groupby(sets, lambda each: each.name in alone):
        members = list(stretch)
        if is_alone:
            result += members
            continue
        for run in split_by_least([sizes[each.name] for each in members], least):
            result.append(_joined([members[place] for place in run], places))
    return result


def split_by_least(sizes: Sequence[int], least: int) -> list[range]:
    """Positions of each run: a run ends with the size that brings it to ``least``; the rest at the
    end joins the run before it."""
    runs = split_by_size(sizes, least)
    if len(runs) > 1 and sum(sizes[place] for place in runs[-1]) < least:
        last = runs.pop()
        runs[-1] = range(runs[-1].start, last.stop)
    return runs


def _nested(sets: Sequence[ModuleSet]) -> set[str]:
    """Names of those that lie within another, and of those that contain one."""
    set_of = {id(module): each.name for each in sets for module in each.modules}
    found: set[str] = set()
    for each in sets:
        for module in each.modules:
            inside = (set_of.get(id(inner)) for inner in module.modules() if inner is not module)
            names = {name for name in inside if name is not None}
            if names:
                found |= {each.name, *names}
    return found


def _joined(members: Sequence[ModuleSet], places: dict[int, int]) -> ModuleSet:
    """One set of all their modules, in module order."""
    if len(members) == 1:
        return members[0]
    named = [pair for each in members for pair in zip(each.names, each.modules, strict=True)]
    named.sort(key=lambda pair: places[id(pair[1])])
    loose = tuple(module for each in members for module in each.loose)
    return ModuleSet(tuple(name for name, _ in named), [module for _, module in named], loose)
