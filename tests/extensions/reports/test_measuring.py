"""``engine.measure()``: waits and memory; outside of it nothing is measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.comm import host_lane, lanes
from fsdp_engine.comm.lanes import LANES, name_of_wait
from tests.models import Small, vector_batch
from tests.pool import on_few_ranks, on_ranks
from tests.reference import rank_and_size

LATE_SECONDS = 0.3


def sharded(*levels: str, **options: Any) -> tuple[Small, Any, Callable[[], None]]:
    model = Small()
    engine = fe.shard(model, None, *levels, min_unit_size=0, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    fe.shard_optimizer(optimizer)

    def step() -> None:
        model(*vector_batch(2, rank_and_size()[0])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, engine, step


@on_ranks(2)
def test_who_waits_for_a_late_rank_sees_whose_gather_it_was() -> None:
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)
    model, engine, step = sharded("optim_grads_params", config=config)
    step()

    if dist.get_rank() == 1:
        model.blocks[0].register_forward_hook(lambda *_: time.sleep(LATE_SECONDS))
    with engine.measure() as measured:
        step()
        step()
    assert measured.num_steps == 2
    assert measured.seconds >= 2 * LATE_SECONDS
    assert {each.lane for each in measured.waited} <= set(LANES[1:])
    assert measured.waited_seconds == pytest.approx(sum(each.seconds for each in measured.waited))
    if dist.get_rank() == 0:
        longest = measured.waited[0]
        found = (longest.unit, longest.lane, longest.phase)
        assert found == ("blocks.1", "inner gather", "forward")
        assert longest.seconds >= 1.8 * LATE_SECONDS
        assert longest.count >= 2
        assert measured.by_unit()["blocks.1"]["inner gather"] >= longest.seconds
        text = str(engine.describe())
        assert "longest for the inner gather of blocks.1 in forward" in text
        assert "2 steps" in text
        assert "Held at most" in text


@on_ranks(2)
def test_what_was_held_is_of_the_moment_when_most_was() -> None:
    for levels in (("no_shard",), ("optim",), ("optim_grads_params",)):
        _, engine, step = sharded(*levels)
        engine.peak_memory_bytes(reset=True)
        with engine.measure() as measured:
            step()
            step()
        peak = engine.peak_memory_bytes()
        kinds = measured.memory
        assert sum(kinds.values()) - kinds["optimizer"] == peak["total"]
        assert kinds["weights"] == sum(row.weight_bytes for row in engine.describe().rows)
        shards = sum(
            param.to_local().nbytes if isinstance(param, fe.FlatDTensor) else param.nbytes
            for param in engine.model.parameters()
        )
        assert kinds["optimizer"] >= 2 * shards  # AdamW's two moments, and step counters
        assert kinds["optimizer"] <= 2 * shards + 4 * len(list(engine.model.parameters()))
        assert "activations" not in kinds


@contextmanager
def profiled_ranges() -> Iterator[list[str]]:
    """Names of the ranges that a profiler would see. torch's own profilers are not used: in a
    few percent of processes they corrupt the heap while gloo's threads finish works."""
    names: list[str] = []

    def note(name: str) -> nullcontext[None]:
        names.append(name)
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        for module in (lanes, host_lane):
            patch.setattr(module, "is_profiled", lambda: True)
        patch.setattr(torch.profiler, "record_function", note)
        yield names


@on_ranks(2)
def test_names_are_those_of_the_profiler_and_of_a_simulation() -> None:
    _, engine, step = sharded("optim_grads_params")
    step()
    with engine.measure() as measured, profiled_ranges() as ranges:
        step()
    prefix = "fsdp_engine: compute waits for "
    seen = Counter(each.removeprefix(prefix) for each in ranges if each.startswith(prefix))
    noted: Counter[str] = Counter()
    for each in measured.waited:
        noted[name_of_wait(each.lane, each.unit)] += each.count
    assert seen == noted
    assert seen
    units = {unit.label for unit in engine.units if unit.buffers}
    assert {each.unit for each in measured.waited} <= units
    assert {each.phase for each in measured.waited} <= {"forward", "backward", "step"}


def test_a_simulation_names_what_it_exposes_as_a_measurement_does() -> None:
    link = type(fe.H100.within_node)(1e6, 1e-3)
    slow = fe.Machine("slow links", fe.H100.processor, link, link, ranks_per_node=2)
    batch, level = vector_batch(2, 0), "optim_grads_params"
    found = fe.simulate(Small, 2, batch=batch, machine=slow, strategy=level, min_unit_size=0)
    assert found.exposed
    names = {name_of_wait(each.lane, each.unit) for each in found.exposed}
    trace = {event["name"] for event in found.trace()["traceEvents"]}
    assert names <= trace
    assert {each.lane for each in found.exposed} <= set(LANES[1:])
    assert "inner gather of blocks.1" in names


@on_few_ranks
def test_measurements_nest_and_each_sees_what_came_while_it_was_open() -> None:
    model, engine, step = sharded("optim_grads_params")
    step()

    def fail() -> None:
        with engine.measure():
            step()
            raise KeyError("a bad sample")

    with engine.measure() as outer:
        step()
        with engine.measure() as inner:
            with engine.no_sync():
                model(*vector_batch(2, 0)).backward()
            step()
            assert (outer.num_steps, inner.num_steps) == (2, 1)
        assert engine.describe().measured is inner
        step()
    assert (outer.num_steps, inner.num_steps) == (3, 1)
    assert inner.seconds < outer.seconds
    assert inner.waited_seconds <= outer.waited_seconds
    assert sum(each.count for each in outer.waited) >= 2 * sum(e.count for e in inner.waited)
    with pytest.raises(KeyError, match="a bad sample"):
        fail()
    failed = engine.describe().measured
    step()
    assert (outer.num_steps, failed.num_steps) == (3, 1)
    assert "1 steps" in str(failed)
    assert not any(lane.meters for lane in engine.lanes.all)
    assert not engine._memory.ledger.watchers


@on_ranks(1)
def test_one_rank_waits_for_nobody() -> None:
    for levels in (("no_shard",), ("optim_grads_params",)):
        _, engine, step = sharded(*levels)
        with engine.measure() as measured:
            step()
        assert (measured.num_steps, measured.waited, measured.by_unit()) == (1, (), {})
        assert "waited 0.0% of it for communication." in str(measured)


@on_ranks(2)
def test_only_what_waits_for_messages_counts_at_the_lowest_level() -> None:
    _, engine, step = sharded("no_shard")
    with engine.measure() as measured:
        step()
    assert {each.lane for each in measured.waited} <= {"inner reduce"}
    with engine.measure() as measured, torch.no_grad():
        engine.model(*vector_batch(2, 0))
    assert (measured.num_steps, measured.waited) == (0, ())
    assert "0 steps" in str(measured)


@on_ranks(1)
def test_memory_of_an_unknown_place_is_an_error() -> None:
    engine = fe.shard(Small())
    assert engine.memory_bytes("device") == engine.memory_bytes()
    with pytest.raises(ValueError, match=r"place: expected one of .*'host'.*; found 'tape'"):
        engine.memory_bytes("tape")
