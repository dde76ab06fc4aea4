"""Plans layouts: which buffer a tensor lies in, where, and how long the shards are. Pure integers.

Without granules tensors keep their order, each starts on the next multiple of 64, and shards are
just long enough: at most 64 elements of padding a rank and 63 a tensor. Where a tensor has 4,096
elements or more, these numbers are 256.

[Note: Blocks]
Optimizers with 8-bit and 4-bit state quantise blocks of 256 or 128 consecutive elements of tensors
of at least 4,096 elements. If no shard boundary divides a block, the optimizer's own step on a
slice computes the codes and scales of the full tensor, and its bits depend neither on the ranks nor
on the level. So a tensor of at least 4,096 elements and granule 1 gets granule 256, where its
buffer is sharded. Larger granules stay as requested.

[Note: Granule placement]
A *granule* is a number of elements of a tensor (a row, a block of 128 rows, the whole tensor) that
no shard boundary may cut. With ``N`` equal shards of ``S`` elements, boundaries lie at multiples
of ``S``. A buffer costs ``N * S``, so the planner looks for the smallest ``S`` at which everything
fits. The rule for a tensor depends on the number of boundaries that hit it:

    none   nothing: the tensor lies inside one shard
    one    its distance from the tensor's start is a multiple of the granule: shift the tensor
    more   the same, and ``S`` itself is a multiple of the granule

Starts and boundaries are multiples of 64 already, so "granule" can be read as *step*, the least
common multiple of the granule and 64; tensors of one step are a *class*. Granule 1 is step 64,
for which every rule above holds by itself: such tensors need no special case, they fill gaps.
Buffers whose steps are all 64 and 256 keep their order, and ``S`` is a multiple of 256.

*Which S.* At least the elements divided by ``N``, and at least the largest granule. A tensor of
more than ``2 S`` elements is hit more than once wherever it lies, so ``S`` is a multiple of the
steps of all tensors that long. As ``S`` grows they become fewer: ``_shard_sizes`` lists the sizes
that are left as a few arithmetic progressions. In each, sizes are tried at growing distance until
one fits, then by bisection back to the first that does.

*Which place.* At a given ``S``, tensors are placed one by one in the shortest free stretch that
holds them, at the first start that the rules allow. Three orders are tried: as registered; large
steps first, since only a change of class wastes anything, less than the step that follows, and
granule 1 fills it; long tensors first, which packs whole-tensor granules well. The rule in common
use, ``S`` a multiple of all steps and tensors in order, bounds the search from above.

*How many buffers.* Where many tensors are long, ``S`` is a multiple of a least common multiple,
which can be far more than a rank's share. Classes are then better kept in buffers of their own.
But one buffer more is one collective more in every gather and reduction. The rule: **an extra
buffer is worth 0.1 % of the unit's elements**. Classes begin in buffers of their own; of all pairs
of buffers the one is joined whose padded elements plus that price shrink most, until none shrinks.
The result is compared with one buffer for all. So a buffer that pads at most 0.1 % is never split,
and a split always pads less than one buffer would. There are never more buffers than classes;
granule 1 gets its own only where it would lengthen every shard by a step.

Worked example, 4 shards: ``a`` (10, 320) and ``b`` (11, 256) with rows as granules, ``c`` (128,)
without. That is 6,144 elements, 1,536 a shard.

- The rule in common use: ``S`` is a multiple of lcm(320, 256) = 1,280, so 2,560: 67 % padding.
- Here: below 1,600 ``a`` (3,200) is longer than ``2 S``, and no multiple of 320 lies in
  1,536..1,599. From 1,600 on nothing is that long. At 1,600 ``a`` lies at 0..3,200, cut after 5
  rows. ``b`` would start at 3,200, but the cut at 4,800 is 6.25 of its rows away; shifted by 64,
  to 3,264, it is cut after 6. ``c`` follows at 6,080. So ``S`` is 1,600, which is no multiple of
  256: 4.2 % padding, and no split saves 0.1 % more.

Of the other kind is a block of Llama-3 8B on 1,024 ranks, with rows of 4,096 and 14,336 elements.
One buffer pads 7.7 %: ``S`` is a multiple of 28,672. Apart, both classes come out even at 38 and 4
rows a rank. The norms' 8,192 elements would cost every rank a row; with their own, 0.12 % is left.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_engine.layout.layout import (
    ALIGNMENT,
    BLOCK,
    MIN_BLOCK_NUMEL,
    Layout,
    TensorSlot,
    round_up,
)

# An extra buffer has to save this part of a unit's elements: see [Note: Granule placement].
PERCENT_PER_BUFFER = 0.1


@dataclass(frozen=True)
class TensorRequest:
    """A tensor to be placed.

    Args:
        name: fully qualified name of the parameter.
        shape: its shape; 0-d and empty tensors are legal.
        granule: elements that stay together, counted from the tensor's start in row-major order.

    Raises:
        TypeError: the granule is not an integer.
        ValueError: the granule is below 1 or does not divide the tensor's elements.
    """

    name: str
    shape: tuple[int, ...]
    granule: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.granule, int):
            raise TypeError(f"granule of {self.name}: expected an integer; found {self.granule!r}")
        if self.granule < 1:
            raise ValueError(f"granule of {self.name}: expected at least 1; found {self.granule}")
        if self.numel % self.granule:
            raise ValueError(
                f"granule of {self.name}: expected a divisor of its {self.numel} elements "
                f"(shape {self.shape}); found {self.granule}"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plan_layouts(
    requests: Sequence[TensorRequest],
    *,
    inner_size: int,
    outer_size: int,
    percent_per_buffer: float = PERCENT_PER_BUFFER,
    shard_multiple: int = ALIGNMENT,
) -> tuple[Layout, ...]:
    """Layouts, mostly one, that hold every request once; see [Note: Granule placement].

    Depends on the arguments only, so every rank plans the same.

    Args:
        requests: in registration order, which is kept where no tensor has a granule.
        inner_size: ranks on the inner axis, 1 where nothing is cut along it.
        outer_size: ranks on the outer axis, 1 where nothing is cut along it.
        percent_per_buffer: what an extra buffer has to save, in percent of all elements.
        shard_multiple: elements of a shard are a multiple of it. One that does not divide
            ``ALIGNMENT`` is the caller's choice of padding: tensors are then kept in order, in
            one buffer.

    Raises:
        ValueError: an axis size is below 1, the price below 0, or two requests have one name.
    """
    _check_arguments(requests, inner_size, outer_size, percent_per_buffer)
    num_shards = inner_size * outer_size
    is_sharded = num_shards > 1
    tensors = [_Tensor.of(k, request, is_sharded) for k, request in enumerate(requests)]
    if not requests:
        plans = []
    elif ALIGNMENT % shard_multiple or all(tensor.step in (ALIGNMENT, BLOCK) for tensor in tensors):
        plans = [_pack_in_order(tensors, num_shards, shard_multiple)]
    else:
        classes = _classes([t for t in tensors if t.numel])
        plans = _choose_buffers(classes, num_shards, percent_per_buffer)
        plans[0].offsets.update((t.position, 0) for t in tensors if not t.numel)  # fits anywhere
    return tuple(_layout(requests, plan, inner_size, outer_size) for plan in plans)


class _Tensor(NamedTuple):
    """A request as the search sees it."""

    position: int  # of its request
    numel: int
    step: int  # lcm of granule and alignment; boundaries that cut the tensor keep to it
    granule: int

    @classmethod
    def of(cls, position: int, request: TensorRequest, is_sharded: bool) -> _Tensor:
        # Nothing cuts an empty tensor, so its granule asks for nothing.
        granule = request.granule if request.numel else 1
        if is_sharded and granule == 1 and request.numel >= MIN_BLOCK_NUMEL:
            granule = BLOCK  # [Note: Blocks]
        return cls(position, request.numel, math.lcm(granule, ALIGNMENT), granule)


class _Class(NamedTuple):
    """Tensors of one step, and all that the choice of ``S`` needs to know of them."""

    step: int
    tensors: tuple[_Tensor, ...]
    num_elements: int  # each tensor rounded up to the alignment
    longest: int  # elements of the longest tensor
    granule: int  # the largest


class _Plan(NamedTuple):
    """One buffer: elements of a shard, and the offset of each tensor by its request's position."""

    shard_numel: int
    num_shards: int
    offsets: dict[int, int]

    @property
    def numel(self) -> int:
        return self.shard_numel * self.num_shards


def _check_arguments(
    requests: Sequence[TensorRequest], inner_size: int, outer_size: int, percent: float
) -> None:
    for name, size in (("inner_size", inner_size), ("outer_size", outer_size)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1; found {size}")
    if not percent >= 0:
        raise ValueError(f"percent_per_buffer: expected at least 0; found {percent}")
    for name, count in Counter(request.name for request in requests).items():
        if count > 1:
            raise ValueError(f"{name}: expected one request of this name; found {count}")


def _layout(
    requests: Sequence[TensorRequest], plan: _Plan, inner_size: int, outer_size: int
) -> Layout:
    # Empty tensors share their offset with another one and come before it.
    order = sorted(plan.offsets, key=lambda i: (plan.offsets[i], requests[i].numel > 0, i))
    slots = (
        TensorSlot(requests[i].name, requests[i].shape, plan.offsets[i], requests[i].granule)
        for i in order
    )
    return Layout(tuple(slots), plan.numel, inner_size, outer_size)


def _classes(tensors: Sequence[_Tensor]) -> list[_Class]:
    """Tensors by step, the classes with most elements first."""
    by_step: dict[int, list[_Tensor]] = {}
    for tensor in tensors:
        by_step.setdefault(tensor.step, []).append(tensor)
    classes = [
        _Class(
            step,
            tuple(members),
            sum(round_up(tensor.numel, ALIGNMENT) for tensor in members),
            max(tensor.numel for tensor in members),
            max(tensor.granule for tensor in members),
        )
        for step, members in by_step.items()
    ]
    return sorted(classes, key=lambda one: (-one.num_elements, one.step))


def _choose_buffers(classes: Sequence[_Class], num_shards: int, percent: float) -> list[_Plan]:
    """Plans of a grouping of ``classes`` by padded elements and price: classes in buffers of their
    own are joined, the pair first that saves most, until joining saves nothing."""
    price = percent / 100 * sum(one.num_elements for one in classes)
    groups: dict[tuple[_Class, ...], _Plan] = {(one,): _pack([one], num_shards) for one in classes}
    pairs: dict[tuple[_Class, ...], _Plan] = {}

    def cost(plans: Iterable[_Plan]) -> float:
        return sum(plan.numel + price for plan in plans)

    while len(groups) > 1:
        best, saved = None, -math.inf
        for first, second in itertools.combinations(groups, 2):
            apart = cost([groups[first], groups[second]])
            joined = first + second
            if apart - price - _shard_sizes(joined, num_shards)[0][0] * num_shards < max(saved, 0):
                continue  # a lower bound, without packing
            if joined not in pairs:
                pairs[joined] = _pack(joined, num_shards)
            if apart - cost([pairs[joined]]) > saved:
                best, saved = (first, second), apart - cost([pairs[joined]])
        if best is None or saved < 0:
            break
        for each in best:
            del groups[each]
        groups[best[0] + best[1]] = pairs[best[0] + best[1]]
    whole = [_pack(classes, num_shards)]
    plans = min([whole, list(groups.values())], key=cost)
    return sorted(plans, key=lambda plan: min(plan.offsets))


def _shard_sizes(classes: Sequence[_Class], num_shards: int) -> list[range]:
    """Shard sizes that the longest tensors allow, ascending, up to all elements in one shard."""
    high = sum(one.num_elements for one in classes)
    share = -(-high // num_shards)
    smallest = round_up(max(share, max(one.granule for one in classes)), ALIGNMENT)
    step, found = ALIGNMENT, []
    for one in sorted(classes, key=lambda one: -one.longest):
        # From `low` on, neither this class nor those that follow have tensors beyond 2 S.
        low = max(smallest, -(-one.longest // 2))
        found.append(range(round_up(low, step), high + 1, step))
        high = low - 1
        step = math.lcm(step, one.step)
        if max(step, smallest) > high:
            break
    else:
        found.append(range(round_up(smallest, step), high + 1, step))
    return [sizes for sizes in reversed(found) if sizes]


def _pack(classes: Sequence[_Class], num_shards: int) -> _Plan:
    """The buffer with the smallest shards that the search finds."""
    tensors = sorted(tensor for one in classes for tensor in one.tensors)
    fallback = _pack_in_order(tensors, num_shards)
    # Whole steps before others: what follows them needs no shift.
    orders = (
        tensors,
        sorted(tensors, key=lambda t: (-t.step, t.numel % t.step > 0, -t.numel)),
        sorted(tensors, key=lambda t: (-t.numel, -t.step)),
    )
    for sizes in _shard_sizes(classes, num_shards):
        below = range(sizes.start, min(sizes.stop, fallback.shard_numel), sizes.step)
        plan = _first_that_fits(orders, below, num_shards)
        if plan is not None:
            return plan
    return fallback


def _pack_in_order(
    tensors: Sequence[_Tensor], num_shards: int, shard_multiple: int = ALIGNMENT
) -> _Plan:
    """Tensors in order, each on a multiple of its step, and shards a multiple of all steps."""
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.position] = round_up(end, tensor.step)
        end = offsets[tensor.position] + tensor.numel
    step = math.lcm(ALIGNMENT, shard_multiple, *(tensor.step for tensor in tensors))
    return _Plan(round_up(-(-end // num_shards), step), num_shards, offsets)


def _first_that_fits(
    orders: Sequence[Sequence[_Tensor]], sizes: range, num_shards: int
) -> _Plan | None:
    """The plan at the first of ``sizes`` that fits, taken that larger ones then fit as well."""

    def attempt(at: int) -> _Plan | None:
        for order in orders:
            offsets = _place(order, sizes[at], num_shards)
            if offsets is not None:
                return _Plan(sizes[at], num_shards, offsets)
        return None

    if not sizes:
        return None
    failed, at, last = -1, 0, len(sizes) - 1
    while (plan := attempt(at)) is None:
        if at == last:
            return None
        failed, at = at, min(2 * at + 1, last)
    while at - failed > 1:
        middle = (failed + at) // 2
        smaller = attempt(middle)
        if smaller is None:
            failed = middle
        else:
            at, plan = middle, smaller
    return plan


def _place(tensors: Sequence[_Tensor], shard_numel: int, num_shards: int) -> dict[int, int] | None:
    """Offsets by position, each in the shortest free stretch that takes it; None: no room."""
    offsets: dict[int, int] = {}
    free = [(shard_numel * num_shards, 0)]  # (length, start), all multiples of the alignment
    for tensor in tensors:
        for at in range(bisect_left(free, (tensor.numel, 0)), len(free)):
            length, start = free[at]
            offset = _first_start(tensor, start, shard_numel)
            if offset is not None and offset + tensor.numel <= start + length:
                break
        else:
            return None
        del free[at]
        end = round_up(offset + tensor.numel, ALIGNMENT)
        if offset > start:
            insort(free, (offset - start, start))
        if end < start + length:
            insort(free, (start + length - end, end))
        offsets[tensor.position] = offset
    return offsets


def _first_start(tensor: _Tensor, start: int, shard_numel: int) -> int | None:
    """The first offset from ``start`` on at which no boundary cuts a granule, if there is one."""
    room = shard_numel - start % shard_numel
    # If neither the rest of this shard nor a whole one will do, no further one will either.
    for begin, before_cut in ((start, room), (start + room, shard_numel)):
        if tensor.numel <= before_cut:
            return begin
        head = before_cut // tensor.step * tensor.step
        if head and (tensor.numel - head <= shard_numel or shard_numel % tensor.step == 0):
            return begin + before_cut - head
    return None
