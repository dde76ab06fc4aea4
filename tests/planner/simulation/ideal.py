"""The minimum exposed communication of a schedule, computed from the order of uses alone.

Uses only the table of levels of the engine. A model is a sequence of units, and a microbatch the
sequence of their uses: forward in order, backward in reverse. The schedule:

- Compute runs one use after the other, as soon as its inputs are available.
- Each axis has a lane for gathers and one for reductions, and each lane is a FIFO.
- At the start of a use its own weights are requested, then those of the following uses of the same
  forward or backward, while the prefetched elements are below the budget. Forward prefetches
  nothing for backward: the loss between them has the peak memory of the step, and a prefetch would
  add a full unit to it. Sharded weights are freed after a use, unless the next use is of the same
  unit. Weights that are not sharded but were changed by the optimizer are gathered once per step:
  at its start or, without prefetch (budget 0), when they are used.
- A unit's gradients are reduced after its backward. If they are sharded, a second budget limits the
  gradients in flight: a unit's first gradient waits until they are within it. A unit larger than
  the budget may be in flight alone, and a fixed number of the latest reductions may always be in
  flight. If an axis is reduced on the last microbatch alone, its reductions work in place: only the
  optimizer waits for them.
- Reductions of a microbatch are complete before the next one's first gradient.
- The optimizer waits for all reductions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fsdp_engine.strategies import Role, Strategy

INNER, OUTER = 0, 1


@dataclass(frozen=True)
class IdealUnit:
    """A unit of a model, and seconds of its computation."""

    numel: int
    forward: float
    until_first: float  # from the start of backward until the first gradient
    backward: float  # the whole backward
    reads_in_backward: bool = True  # whether backward reads the weights


@dataclass(frozen=True)
class Network:
    """Ranks on each axis, (inner, outer), and bytes a second of the links along it."""

    sizes: tuple[int, int]
    bandwidth: tuple[float, float]

    def ring(self, numel: float, axis: int, times: int = 1) -> float:
        """Seconds for ``times`` passes of ``numel`` fp32 elements around a ring."""
        n = self.sizes[axis]
        return times * 4 * numel * (n - 1) / n / self.bandwidth[axis]


class Ideal:
    """The ideal step: its ``seconds``, and the seconds ``exposed`` in which compute waits.

    Args:
        units: In the order of forward.
        budgets: Prefetched elements; elements of gradients in flight, and the number of reductions
            that may always be in flight.
    """

    def __init__(
        self,
        units: list[IdealUnit],
        strategy: Strategy,
        network: Network,
        budgets: tuple[int, tuple[int, int]],
        microbatches: int,
    ) -> None:
        self._units = units
        self._depths = {role: strategy.depth(role) for role in Role}
        self._network = network
        self._budget, (self._staging_budget, self._least) = budgets
        self.seconds = self.exposed = 0.0
        self._free = {(kind, axis): 0.0 for kind in "gr" for axis in (INNER, OUTER)}
        # When a unit's weights are ready; sharded weights are requested for each use.
        self._there: dict[int, float] = {}
        self._stale = set(range(len(units)))
        self._last: dict[int, float] = {}
        self._in_flight: deque[tuple[int, float]] = deque()
        self._left = 0
        self._run(microbatches)

    def _run(self, microbatches: int) -> None:
        count = len(self._units)
        order = [*range(count), *reversed(range(count))]
        if self._depths[Role.PARAM] == 0 and self._budget > 0:
            for unit in range(count):
                self._ask_for(unit)
        for number in range(microbatches):
            self._left = len(self._in_flight)
            self._there = {} if self._depths[Role.PARAM] else self._there
            for place, unit in enumerate(order):
                reads = place < count or self._units[unit].reads_in_backward
                later = [
                    each
                    for other, each in enumerate(order[place + 1 :], place + 1)
                    if other < count or self._units[each].reads_in_backward
                ]
                if reads:
                    # Uses of backward are not prefetched in forward.
                    num_same = count - place - 1 if place < count else len(later)
                    self._begin_use(unit, later[:num_same])
                self._compute(unit, place >= count, number == microbatches - 1)
                if reads and self._depths[Role.PARAM] and later[:1] != [unit]:
                    del self._there[unit]
        for _, done in self._in_flight:
            self._wait_until(done)
        for done in self._last.values():
            self._wait_until(done)

    def _begin_use(self, unit: int, following: list[int]) -> None:
        """Request the weights of ``unit``, prefetch those of ``following``, and wait for ``unit``.

        ``following`` are the units of the next uses of the same forward or backward.
        """
        self._ask_for(unit)
        ahead = 0
        for each in following:
            if ahead >= self._budget or not self._depths[Role.PARAM]:
                break
            ahead += self._units[each].numel
            self._ask_for(each)
        self._wait_until(self._there[unit])

    def _ask_for(self, unit: int) -> None:
        if unit in self._there:
            return
        start = self.seconds
        highest = self._depths[Role.OPTIM] if unit in self._stale else self._depths[Role.PARAM]
        self._stale.discard(unit)
        for axis in reversed(range(highest)):
            start = self._send("g", axis, start, self._ring(unit, axis, axis))
        self._there[unit] = start

    def _compute(self, unit: int, is_backward: bool, is_last: bool) -> None:
        each = self._units[unit]
        if not is_backward:
            self.seconds += each.forward
            return
        self.seconds += each.until_first
        grad = self._depths[Role.GRAD]
        if grad:
            for _ in range(self._left):
                self._wait_until(self._in_flight.popleft()[1])
            self._left = 0
            limit = max(self._staging_budget, each.numel)
            while (
                len(self._in_flight) > self._least
                and each.numel + sum(n for n, _ in self._in_flight) > limit
            ):
                self._wait_until(self._in_flight.popleft()[1])
        self.seconds += each.backward - each.until_first
        done = self.seconds
        for axis in range(grad):
            done = self._send("r", axis, done, self._ring(unit, axis, axis))
        if grad:
            self._in_flight.append((each.numel, done))
        depth = grad
        for axis in range(grad, 2) if is_last else ():
            scatters = self._depths[Role.OPTIM] > axis
            done = self._send("r", axis, done, self._ring(unit, axis, depth, 2 - scatters))
            depth += scatters
        if is_last:
            self._last[unit] = done

    def _ring(self, unit: int, axis: int, depth: int, times: int = 1) -> float:
        """Seconds for ``times`` passes of ``unit``'s part at ``depth`` around ``axis``'s ring."""
        numel: float = self._units[unit].numel
        for cut in range(depth):
            numel /= self._network.sizes[cut]
        return self._network.ring(numel, axis, times)

    def _send(self, kind: str, axis: int, start: float, seconds: float) -> float:
        lane = (kind, axis)
        self._free[lane] = max(start, self._free[lane]) + seconds
        return self._free[lane]

    def _wait_until(self, moment: float) -> None:
        if moment > self.seconds:
            self.exposed += moment - self.seconds
            self.seconds = moment
