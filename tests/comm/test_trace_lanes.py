"""The race detector: what it accepts and what it reports."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Lanes
from tests.comm.happens_before import COMPUTE, LANES, Order, RaceError, Span
from tests.comm.trace_lanes import AnnotationError, Tracer

STORAGE = torch.UntypedStorage(16)


def orders() -> tuple[Order, Order]:
    return Order(True, str), Order(False, str)


def span(start: int = 0, stop: int = 8) -> Span:
    return Span(STORAGE, start, stop)


def test_one_thread_is_ordered_and_two_may_read_and_may_write_apart() -> None:
    for order in orders():
        order.note_access(COMPUTE, span(), True, "first")
        order.note_access(COMPUTE, span(), False, "second")
        assert order.num_checks == 1
    for order in orders():
        thread = order.begin("inner_gather", [])
        for each in (COMPUTE, thread):
            order.note_access(each, span(0, 8), False, "reads")
        order.note_access(COMPUTE, span(8, 12), True, "writes")
        order.note_access(thread, span(12, 16), True, "writes")


@pytest.mark.parametrize("writes", [(True, True), (True, False), (False, True)])
def test_two_threads_may_not_touch_what_one_of_them_writes(writes: tuple[bool, bool]) -> None:
    for order in orders():
        thread = order.begin("inner_gather", [])
        order.note_access(COMPUTE, span(0, 8), writes[0], "one")
        with pytest.raises(RaceError, match=r"(?s)bytes 0\.\.8 on compute.*bytes 4\.\.12 on inner"):
            order.note_access(thread, span(4, 12), writes[1], "two")


def test_a_ticket_orders_what_came_before_it_and_nothing_after() -> None:
    for order in orders():
        order.note_access(COMPUTE, span(0, 8), True, "before")
        ticket = order.record(COMPUTE)
        order.note_access(COMPUTE, span(8, 16), True, "after")
        thread = order.begin("inner_gather", [ticket])
        order.note_access(thread, span(0, 8), True, "gather")
        if order.streams:
            with pytest.raises(RaceError):
                order.note_access(thread, span(8, 16), True, "gather")
        else:
            # In host order, the operation starts at its submission, after that write.
            order.note_access(thread, span(8, 16), True, "gather")
    for order in orders():  # the order also holds through a chain of tickets
        first = order.begin("outer_gather", [])
        order.note_access(first, span(), True, "outer")
        second = order.begin("inner_gather", [order.end(first)])
        order.wait(COMPUTE, order.end(second))
        order.note_access(COMPUTE, span(), False, "use")


def test_a_lane_orders_its_operations_on_streams_only() -> None:
    for order in orders():
        first = order.begin("inner_gather", [])
        order.note_access(first, span(), True, "one")
        order.end(first)
        second = order.begin("inner_gather", [])
        if order.streams:
            order.note_access(second, span(), True, "two")
        else:
            with pytest.raises(RaceError, match=r"operation 1(?s:.)*operation 2"):
                order.note_access(second, span(), True, "two")


def test_memory_may_not_be_used_or_freed_after_it_was_freed() -> None:
    for order in orders():
        order.allocate(COMPUTE, span(), "allocate")
        order.free(COMPUTE, span(), "free")
        with pytest.raises(RaceError, match="used after it was freed"):
            order.note_access(COMPUTE, span(), False, "use")
        with pytest.raises(RaceError, match="freed twice"):
            order.free(COMPUTE, span(), "free")
        order.allocate(COMPUTE, span(), "allocate")
        with pytest.raises(RaceError, match="where there is some"):
            order.allocate(COMPUTE, span(), "allocate")


def steps() -> Steps:
    yield from ()


def test_a_tensor_that_is_dropped_while_a_lane_uses_it_is_caught() -> None:
    def drop(waits: bool) -> None:
        with Tracer() as tracer:
            lanes = tracer.lanes()
            scratch = torch.empty(4)
            after = [lanes.compute.record()]
            ticket = lanes.inner_reduce.submit("sum", steps, after=after, writes=[scratch])
            if waits:
                lanes.compute.wait(ticket)
            del scratch
            lanes.compute.record()

    drop(waits=True)
    with pytest.raises(RaceError, match=r"(?s)\[sum\].*its last reference went"):
        drop(waits=False)


def submit_addition(reads: list[slice], writes: list[slice]) -> None:
    """Adds ``y[:2] + 1`` to ``x[:2]``, and names these parts of y and x as read and written."""

    def add() -> Steps:
        x[:2].add_(y[:2] + 1)
        yield from ()

    with Tracer() as tracer:
        x, y = torch.zeros(4), torch.ones(4)
        lanes = tracer.lanes()
        lanes.inner_gather.submit(
            "add",
            add,
            after=[lanes.compute.record()],
            reads=[y[part] for part in reads],
            writes=[x[part] for part in writes],
        )


def test_an_operation_may_touch_only_what_it_names() -> None:
    whole, needed, other = slice(0, 4), slice(0, 2), slice(1, 4)
    assert tuple(field.name for field in fields(Lanes)) == LANES
    submit_addition([whole], [whole])
    submit_addition([needed], [needed])
    for reads, writes in (([needed], []), ([], [needed]), ([needed], [other]), ([other], [needed])):
        with pytest.raises(AnnotationError, match=r"\[add\] (reads|writes) bytes 0\.\.8"):
            submit_addition(reads, writes)
