"""Plans layouts: the buffer and the offset of each tensor, and the shard size. Pure integers.

Without granules tensors keep their order, each starts on the next multiple of 64, and shards have
the smallest size at which all tensors fit. Padding is at most 64 elements for each rank and 63 for
each tensor. If a tensor has 4,096 elements or more, both limits are 256.

[Note: Blocks]
Optimizers with 8-bit and 4-bit state quantise blocks of 256 or 128 consecutive elements of tensors
of at least 4,096 elements. If no shard boundary is inside a block, the optimizer's own step on a
slice computes the codes and scales of the full tensor, and its bits depend neither on the number of
ranks nor on the level. A tensor of at least 4,096 elements and granule 1 therefore gets granule 256
if its buffer is sharded. Larger granules are used as requested.

[Note: Granule placement]
A *granule* is a number of elements of a tensor (a row, a block of 128 rows, the full tensor) that
no shard boundary may separate. With ``N`` equal shards of ``S`` elements, boundaries are at
multiples of ``S``. A buffer takes ``N * S`` elements, so the planner finds the smallest ``S`` at
which all tensors fit. The rule for a tensor depends on the number of boundaries inside it:

    none   no condition: the tensor is inside one shard
    one    its distance from the tensor's start is a multiple of the granule: shift the tensor
    more   the same, and ``S`` itself is a multiple of the granule

Starts and boundaries are multiples of 64 in any case, so the rules use the *step* instead of the
granule: the least common multiple of the granule and 64. Tensors with the same step form a *class*.
Granule 1 has step 64, for which the rules always hold: such tensors fill the space between others.
Buffers in which all steps are 64 or 256 keep their order, and ``S`` is a multiple of 256.

*Choice of S.* ``S`` is at least the number of elements divided by ``N``, and at least the largest
granule. A tensor of more than ``2 S`` elements contains several boundaries at any offset, so ``S``
is a multiple of the steps of all such tensors. With larger ``S`` there are fewer such tensors.
The sizes that these rules allow form a few arithmetic progressions (``_shard_sizes``). In each,
sizes are tried at growing distance until one fits; bisection then finds the first that fits.

*Choice of offsets.* For a given ``S``, tensors are placed one by one in the shortest free range
that holds them, at the first start that the rules allow. Three orders are tried. The first is the
registration order. The second has large steps first: padding is then needed only between classes,
it is less than one step, and tensors of granule 1 fill it. The third has large tensors first, which
packs full-tensor granules well. The rule in common use (``S`` is a multiple of all steps, and
tensors are in order) is an upper bound for ``S``.

*Number of buffers.* If many tensors are long, ``S`` is a multiple of a least common multiple, which
can be far more than ``1 / N`` of the elements. Separate buffers for the classes are then better.
But each additional buffer is an additional collective in every gather and reduction. The rule: **an
additional buffer has to save 0.1 % of the unit's elements**. So the *cost* of a buffer is its
number of elements plus this price of 0.1 %. At first each class has its own buffer. Then the
planner joins the two buffers whose joining lowers the total cost most, and repeats this until no
pair lowers it. The result is compared with a single buffer. Therefore a buffer with at most 0.1 %
of padding is never split, and a split always has less padding than a single buffer. There are never
more buffers than classes; tensors of granule 1 have their own buffer only if they would lengthen
every shard of another buffer by a step.

Worked example, 4 shards: ``a`` (10, 320) and ``b`` (11, 256) with rows as granules, ``c`` (128,)
without. These are 6,144 elements, 1,536 for each shard.

- The rule in common use: ``S`` is a multiple of lcm(320, 256) = 1,280, so 2,560: 67 % padding.
- Here: if ``S`` < 1,600, ``a`` (3,200) is longer than ``2 S``, but [1536, 1600) has no multiple of
  320. If ``S`` >= 1,600, no tensor is that long. At 1,600 ``a`` has elements [0, 3200), with a
  boundary after 5 rows. ``b`` would start at 3,200, but the boundary at 4,800 would be after 6.25
  of its rows; shifted by 64, to 3,264, it has the boundary after 6 rows. ``c`` follows at 6,080.
  So ``S`` is 1,600, which is no multiple of 256: 4.2 % padding, and no split saves 0.1 % more.

A block of Llama-3 8B on 1,024 ranks, with rows of 4,096 and 14,336 elements, is an example of a
split. A single buffer has 7.7 % of padding: ``S`` is a multiple of 28,672. In separate buffers both
classes need no padding, with 38 and 4 rows per rank. In one of these buffers, the 8,192 elements of
the norms would lengthen each shard by a row; with a buffer of their own, 0.12 % of padding remains.
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

# Number of elements that an additional buffer has to save, in percent of the unit's elements: see
# [Note: Granule placement].
PERCENT_PER_BUFFER = 0.1


@dataclass(frozen=True)
class TensorRequest:
    """A tensor to be placed.

    Args:
        name: Fully qualified name of the parameter.
        shape: Its shape. 0-d and empty tensors are legal.
        granule: Number of consecutive elements, counted in row-major order from the tensor's start,
            that no shard boundary may separate.

    Raises:
        TypeError: The granule is not an integer.
        ValueError: The granule is below 1 or does not divide the number of elements.
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
    """Returns layouts, usually one, that hold every request once; see [Note: Granule placement].

    The result depends on the arguments only, so all ranks compute the same layouts.

    Args:
        requests: The tensors in registration order, which is kept if none has a granule.
        inner_size: Number of ranks on the inner axis, 1 if no role is sharded along it.
        outer_size: Number of ranks on the outer axis, 1 if no role is sharded along it.
        percent_per_buffer: Number of elements that an additional buffer has to save, in percent of
            the elements of all tensors.
        shard_multiple: The size of a shard is a multiple of this number. If it does not divide
            ``ALIGNMENT``, tensors are placed in order in one buffer.

    Raises:
        ValueError: An axis size is below 1, ``percent_per_buffer`` is below 0, or two requests have
            the same name.
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
    """A request with the numbers that the search needs."""

    position: int  # index of the request
    numel: int
    step: int  # lcm of granule and alignment; boundaries inside the tensor are at multiples of it
    granule: int

    @classmethod
    def of(cls, position: int, request: TensorRequest, is_sharded: bool) -> _Tensor:
        # No boundary is inside an empty tensor, so its granule has no effect.
        granule = request.granule if request.numel else 1
        if is_sharded and granule == 1 and request.numel >= MIN_BLOCK_NUMEL:
            granule = BLOCK  # [Note: Blocks]
        return cls(position, request.numel, math.lcm(granule, ALIGNMENT), granule)


class _Class(NamedTuple):
    """Tensors of one step, with the numbers from which ``S`` is chosen."""

    step: int
    tensors: tuple[_Tensor, ...]
    num_elements: int  # sum over tensors, each rounded up to the alignment
    longest: int  # elements of the longest tensor
    granule: int  # the largest granule


class _Plan(NamedTuple):
    """One buffer: size and number of shards, and offsets of tensors by the index of the request."""

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
    # An empty tensor may have the same offset as another one, and then precedes it.
    order = sorted(plan.offsets, key=lambda i: (plan.offsets[i], requests[i].numel > 0, i))
    slots = (
        TensorSlot(requests[i].name, requests[i].shape, plan.offsets[i], requests[i].granule)
        for i in order
    )
    return Layout(tuple(slots), plan.numel, inner_size, outer_size)


def _classes(tensors: Sequence[_Tensor]) -> list[_Class]:
    """Returns the classes of ``tensors``. The class with most elements is the first."""
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
    """Group classes into buffers of low cost: elements with padding, plus a price per buffer.

    At first each class has its own buffer. The pair of buffers that saves most is joined, until no
    pair saves anything.
    """
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
                continue  # a lower bound shows, without packing, that the pair is not the best
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
    """Returns the shard sizes that the longest tensors allow, in ascending order."""
    high = sum(one.num_elements for one in classes)
    share = -(-high // num_shards)
    smallest = round_up(max(share, max(one.granule for one in classes)), ALIGNMENT)
    step, found = ALIGNMENT, []
    for one in sorted(classes, key=lambda one: -one.longest):
        # From `low` on, no tensor of this class or of a later one is longer than 2 S.
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
    """Returns the buffer with the smallest shards that the search finds."""
    tensors = sorted(tensor for one in classes for tensor in one.tensors)
    fallback = _pack_in_order(tensors, num_shards)
    # Among tensors of one step, those whose size is a multiple of the step are first: the tensor
    # after them needs no shift.
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
    """Returns a buffer of the tensors in order.

    Each offset is a multiple of the tensor's step, and the shard size is a multiple of all steps.
    """
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.position] = round_up(end, tensor.step)
        end = offsets[tensor.position] + tensor.numel
    step = math.lcm(ALIGNMENT, shard_multiple, *(tensor.step for tensor in tensors))
    return _Plan(round_up(-(-end // num_shards), step), num_shards, offsets)


def _first_that_fits(
    orders: Sequence[Sequence[_Tensor]], sizes: range, num_shards: int
) -> _Plan | None:
    """Returns the plan at the smallest of ``sizes`` that fits, or None.

    The bisection assumes that if a size fits, all larger sizes fit.
    """

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
    """Returns the offset of each tensor by position, or None if the tensors do not fit.

    Each tensor is placed in the shortest free range that holds it.
    """
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
    """Returns the first offset from ``start`` on with no boundary inside a granule, or None."""
    room = shard_numel - start % shard_numel
    # Starts in later shards are like those in the next one, so two shards are enough.
    for begin, before_cut in ((start, room), (start + room, shard_numel)):
        if tensor.numel <= before_cut:
            return begin
        head = before_cut // tensor.step * tensor.step
        if head and (tensor.numel - head <= shard_numel or shard_numel % tensor.step == 0):
            return begin + before_cut - head
    return None
