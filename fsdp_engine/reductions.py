"""When: which unit's gradients are reduced next, how many at once, and what users see after.

[Note: Order of reductions]
Reductions must be issued in one order on all ranks, but ranks may finish units in different
orders (a rank's batch may not reach an expert, say). So they are issued strictly in the reverse of
the *canonical order*: a unit that is ready early waits for those before it, and what autograd
never reached is closed, with zeros, when backward ends. The canonical order is the module order
until all ranks agree on a better one: the order of the last forward. They compare it, by a digest,
in the message of [Note: Who got a gradient], and only if all digests are equal all of them adopt
it.

[Note: Who got a gradient]
A parameter that got no gradient on any rank must keep ``.grad`` None, or weight decay would move
it; one that got a gradient elsewhere must get the sum. Each rank sends a byte for every parameter,
and the elementwise maximum tells who was used: one small all-reduce per step, started after the
last reduction. Its result is read, which costs a synchronisation, only by a rank that misses a
gradient or has seen a new order; others never wait for it.

[Note: Who has the slot]
Where staging lies in slots ([Note: Slots] in ``memory.py``), a unit that needs one waits for the
reduction of the unit that has it. That one may not be reduced yet: it waits for its turn (see
[Note: Order of reductions]), or for the rest of its gradients (it was called twice, and each time
used other weights). Then what it staged is set aside, in ordinary memory, until its next gradient
or its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from fsdp_engine import collectives
from fsdp_engine.lanes import Lanes, Ticket
from fsdp_engine.order import order_digest
from fsdp_engine.unit import Unit


class Reductions:
    """Issues reductions in canonical order within a memory budget.

    Attributes:
        sync: this backward is the last microbatch of a step.
        canonical_order: units in forward order, the same on all ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        root: Unit,
        lanes: Lanes,
        group: ProcessGroup | None,
        device: torch.device,
        budget: int,
    ) -> None:
        self._units = tuple(units)
        self._root = root
        self._lanes = lanes
        self._group = group
        self._device = device
        self._budget = budget
        self.sync = True
        self._seen_order = [unit.index for unit in units]
        self.canonical_order = self._seen_order
        self._trainable = [unit for unit in units if unit.trainable]
        self._num_params = sum(unit.num_trainable for unit in units)
        self._queue = self._make_queue()
        self._next = 0
        self._ready: set[int] = set()
        self._in_flight: deque[tuple[Unit, list[Ticket]]] = deque()
        self._num_staged = 0
        self._is_final = False
        self._pending_work: Any = None

    def order_seen(self, order: list[int]) -> None:
        """Forward has recorded an order of all units."""
        self._seen_order = order

    def begin_backward(self) -> None:
        """A backward begins.

        Raises:
            RuntimeError: gradients were reduced already and not cleared since.
        """
        if self._pending_work is not None:
            self._pending_work.wait()
            self._pending_work = None
        if self._is_final:
            for unit in self._trainable:
                for buffer in unit.trainable:
                    name = buffer.stale_gradient()
                    if name is not None:
                        raise RuntimeError(
                            f"backward after the gradients were reduced: expected .grad of {name} "
                            "to be cleared by zero_grad() first; found it set. To accumulate over "
                            "microbatches, run all but the last under engine.no_sync()"
                        )
        self._is_final = False
        for unit in self._trainable:
            for buffer in unit.trainable:
                buffer.begin_backward()

    def open_unit(self, unit: Unit) -> None:
        """The unit's first gradient of this backward is about to be written."""
        if unit.has_open_grads:
            return
        if unit.is_reduced:
            raise RuntimeError(
                f"a gradient for unit {unit.label} came after its reduction had started: expected "
                "one gradient per parameter and backward; found a second one (a parameter that is "
                "used in several re-entrant checkpoints?). Put the modules that share it into one "
                "unit, or use checkpoint(..., use_reentrant=False)"
            )
        limit = max(self._budget, unit.num_staged)
        while self._in_flight and self._num_staged + unit.num_staged > limit:
            self._retire_oldest()
        if unit.place is not None and unit.num_staged:
            self._take_slot(unit)
        self._num_staged += unit.num_staged
        unit.has_open_grads = True
        for buffer in unit.trainable:
            assert buffer.grads is not None
            buffer.grads.begin()

    def unit_is_ready(self, unit: Unit) -> None:
        """All gradients of the unit that this backward brings have come."""
        if unit is self._root or not unit.trainable:
            return  # the root's own come in to the very end
        self._ready.add(unit.index)
        while self._next < len(self._queue) and self._queue[self._next].index in self._ready:
            self._reduce(self._queue[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for all of it, show the gradients."""
        for unit in self._queue[self._next :]:
            self._reduce(unit)
        self._next = 0
        self._ready.clear()
        exchange = self._start_exchange() if self.sync and self._group is not None else None
        while self._in_flight:
            self._retire_oldest()
        if self.sync:
            self._publish(exchange)
        else:
            self._publish_partial()
        for unit in self._trainable:
            unit.is_reduced = False
        self._is_final = self.sync

    def reset(self) -> None:
        """Forget this backward and all accumulated gradients."""
        self._next = 0
        self._ready.clear()
        self._in_flight.clear()
        self._num_staged = 0
        self._is_final = False
        self._pending_work = None
        for unit in self._trainable:
            for buffer in unit.trainable:
                buffer.discard_gradients()

    def _make_queue(self) -> list[Unit]:
        """Trainable units in the order of their reductions; the root's come last."""
        order = [self._units[index] for index in reversed(self.canonical_order)]
        order = [unit for unit in order if unit.trainable and unit is not self._root]
        return [*order, self._root] if self._root.trainable else order

    def _reduce(self, unit: Unit) -> None:
        """Issue what this backward has to reduce of ``unit``."""
        always = any(b.grads.writes_to_staging for b in unit.trainable if b.grads is not None)
        if not unit.has_open_grads:
            if not self.sync and not always:
                return  # nothing came, nothing travels: what was accumulated stays
            self.open_unit(unit)
        if unit.place is not None:
            self._take_slot(unit)  # copies for the wire may come next
        tickets = []
        for buffer in unit.trainable:
            assert buffer.grads is not None
            buffer.note_used()
            buffer.grads.finish_writing()
            ticket = buffer.grads.reduce(last=self.sync)
            if ticket is not None:
                tickets.append(ticket)
        unit.has_open_grads = False
        unit.is_reduced = True
        self._in_flight.append((unit, tickets))

    def _retire_oldest(self) -> None:
        unit, tickets = self._in_flight.popleft()
        for ticket in tickets:
            self._lanes.compute.wait(ticket)
        self._num_staged -= unit.num_staged
        for buffer in unit.trainable:
            assert buffer.grads is not None
            buffer.grads.release()

    def _take_slot(self, unit: Unit) -> None:
        """See [Note: Who has the slot]."""
        assert unit.place is not None
        while (rival := unit.place.rival("staging")) is not None:
            holder = self._units[rival]
            if not holder.has_open_grads:
                self._retire_oldest()
                continue
            for buffer in holder.trainable:
                assert buffer.grads is not None
                buffer.grads.set_aside()
            holder.has_open_grads = False
            self._num_staged -= holder.num_staged

    def _start_exchange(self) -> torch.Tensor:
        """[Note: Who got a gradient]: start the message; returns what will hold the result."""
        flags = bytearray()
        for unit in self._trainable:
            for buffer in unit.trainable:
                flags += bytes(buffer.used)
        digest = order_digest(self._seen_order)
        flags += digest + bytes(255 - byte for byte in digest)
        message = torch.frombuffer(flags, dtype=torch.uint8).to(self._device)
        assert self._group is not None
        self._pending_work = collectives.start_all_reduce_max(message, self._group)
        return message

    def _publish_partial(self) -> None:
        """Between microbatches: ``.grad`` is there wherever something is accumulated, on any rank,
        so that the user's clearing it can be seen."""
        for unit in self._trainable:
            if unit.is_reduced:
                for buffer in unit.trainable:
                    buffer.publish_gradients([True] * len(buffer.used))

    def _publish(self, exchange: torch.Tensor | None) -> None:
        missing = not all(all(b.used) for unit in self._trainable for b in unit.trainable)
        new_order = self._seen_order != self.canonical_order
        result: list[int] | None = None
        if exchange is not None and (missing or new_order):
            self._pending_work.wait()
            self._pending_work = None
            result = exchange.tolist()
            if new_order:
                digest, complement = result[-16:-8], result[-8:]
                if all(a + b == 255 for a, b in zip(digest, complement, strict=True)):
                    self.canonical_order = self._seen_order
                    self._queue = self._make_queue()
        offset = 0
        for unit in self._trainable:
            for buffer in unit.trainable:
                count = len(buffer.used)
                used: Sequence[Any] = buffer.used
                if result is not None:
                    used = result[offset : offset + count]
                offset += count
                buffer.publish_gradients(used)
