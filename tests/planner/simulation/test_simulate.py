"""The clock, the machine's figures, results of simulations, and their traces."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import weakref
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.comm.lanes import COMPUTE, Operation
from fsdp_engine.planner.simulation.clock import Clock
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.operations import all_to_all_seconds, message_seconds
from tests.models import (
    CalledTwice,
    Chain,
    EncoderDecoder,
    Mlp,
    Transformer,
    token_batch,
    vector_batch,
)
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.scene import ROWS, WIDTH, LinearBlock, Tower, plain_machine


def a_machine(**options: Any) -> Machine:
    return plain_machine(Link(1e9, 0.0), Link(1e9, 0.0), 2, **options)


def sending(clock: Clock, seconds: float) -> Operation:
    def steps() -> Any:
        clock.send(0, seconds)
        yield ()

    return steps


def test_a_host_that_runs_ahead_hides_waits() -> None:
    clock = Clock(a_machine(host_seconds=1.0))
    lanes = clock.make_lanes(torch.device("cpu"))
    ticket = lanes.inner_gather.submit("all-gather of a", sending(clock, 0.5))
    for _ in range(5):
        clock.compute("f", 0.1)
    lanes.compute.wait(ticket)
    assert clock.exposed == []
    # A submission takes the host as long as 15 operations, and a wait as long as 6. In between are
    # the message and five operations.
    assert clock.finish() == pytest.approx(15 + 1 + 5 + 6)
    lanes.compute.manage("b", lambda: None, None)
    clock.compute("g", 0.1)
    assert clock.finish() == pytest.approx(27 + 4 + 1 + 0.1)


def test_where_the_host_computes_it_blocks() -> None:
    clock = Clock(a_machine(host_runs_ahead=False))
    lanes = clock.make_lanes(torch.device("cpu"))
    first = lanes.inner_gather.submit("all-gather of a", sending(clock, 3.0))
    # The second one starts at the next submission on its lane, or when it is waited for.
    second = lanes.outer_gather.submit("all-gather of b", sending(clock, 1.0), after=[first])
    clock.compute("f", 2.0)
    lanes.compute.wait(second)
    assert clock.host == 4.0
    # Compute waits for the first, so that the second can begin, and then for the second.
    assert [each.seconds for each in clock.exposed] == [1.0, 1.0]
    assert first.done
    assert second.done


def test_rings() -> None:
    link = Link(bandwidth=100.0, latency=1.0, achievable=0.5)
    # Three quarters of 400 bytes at 50 bytes a second, in three hops.
    assert message_seconds(link, 400, 4) == pytest.approx(300 / 50 + 3)
    assert message_seconds(link, 400, 4, ring=2) == pytest.approx(2 * (300 / 50 + 3))
    assert message_seconds(link, 400, 1) == 0.0


NODES_OF_FOUR = dataclasses.replace(
    a_machine(),
    within_node=Link(bandwidth=100.0, latency=1.0),
    between_nodes=Link(bandwidth=40.0, latency=3.0, achievable=0.5),
    ranks_per_node=4,
)


def test_rings_over_nodes() -> None:
    for num_ranks, stride, rate, latency in (
        (4, 1, 100, 1),  # one node
        (2, 2, 100, 1),
        (8, 1, 4 * 20, (6 * 1 + 1 * 3) / 7),  # four rings, a port each
        (64, 1, 4 * 20, (48 * 1 + 15 * 3) / 63),
        (8, 2, 2 * 20, (4 * 1 + 3 * 3) / 7),  # two ranks of each node
        (8, 4, 20, 3),  # one rank of each node
        (8, 8, 20, 3),
        (6, 1, 2 * 20, (4 * 1 + 1 * 3) / 5),  # the second node has only two of the ranks
        (5, 1, 20, (3 * 1 + 1 * 3) / 4),
        (4, 3, 20, (1 * 1 + 2 * 3) / 3),  # ranks 0 and 3, 6, 9
    ):
        link = NODES_OF_FOUR.link(num_ranks, stride)
        assert (link.rate, link.latency) == (pytest.approx(rate), pytest.approx(latency))
    # A ring is not faster than the link within a node.
    slow = dataclasses.replace(NODES_OF_FOUR, within_node=Link(bandwidth=30.0, latency=1.0))
    assert [slow.link(*each).rate for each in ((8, 1), (8, 4), (5, 1))] == [30, 20, 20]


def test_bytes_without_a_ring_leave_through_the_rank_s_own_port() -> None:
    assert NODES_OF_FOUR.link_to(3) == NODES_OF_FOUR.within_node
    assert NODES_OF_FOUR.link_to(4) == NODES_OF_FOUR.between_nodes
    # Each of 8 ranks has 800 bytes. 400 of them leave the node, at 20 bytes a second in four hops.
    assert all_to_all_seconds(NODES_OF_FOUR, 800, 8, 1) == pytest.approx(400 / 20 + 4 * 3)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 4, 1) == pytest.approx(300 / 100 + 3 * 1)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 4, 4) == pytest.approx(300 / 20 + 3 * 3)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 1, 1) == 0.0


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_a_flat_axis_over_nodes_sends_through_all_ports(on_host: bool) -> None:
    links = {"within_node": Link(1e9, 0.0), "between_nodes": Link(1e6, 0.0)}
    machine = dataclasses.replace(NODES_OF_FOUR, **links, host_runs_ahead=not on_host)

    def gathering(world_size: int) -> float:
        build, batch = partial(nn.Linear, 256, 256, bias=False), torch.zeros(64, 256)
        found = fe.simulate(build, world_size, batch=batch, loss=Tensor.sum, machine=machine)
        return sum(each.end - each.start for each in found.spans if each.lane == "inner gather")

    num_bytes = 256 * 256 * 4
    num_gathers = round(gathering(4) / (3 / 4 * num_bytes / 1e9))
    assert num_gathers in (1, 2)
    one = 15 / 16 * num_bytes / 4e6
    if on_host:  # gloo's ranks send to all others: 3 in the same node, 12 in other nodes
        one = 3 / 16 * num_bytes / 1e9 + 12 / 16 * num_bytes / 1e6
    assert gathering(16) == pytest.approx(num_gathers * one, rel=0.01)


def test_presets_are_machines_that_can_be_saved(tmp_path: Path) -> None:
    for preset, port in ((fe.A100, 22.5e9), (fe.H100, 45e9), (fe.H200, 45e9), (fe.B200, 45e9)):
        preset.save(tmp_path / "machine.json")
        assert Machine.load(tmp_path / "machine.json") == preset
        assert preset.link(64, 1).rate == pytest.approx(8 * port)  # one for each GPU of a node
        seconds = partial(preset.processor.seconds, dtype=torch.bfloat16)
        both = max(seconds(1e15, 0), seconds(0, 1e12))
        assert seconds(1e15, 1e12) == pytest.approx(both, rel=1e-12)


def test_weights_are_cast_on_a_lane_of_its_own_where_the_host_runs_ahead() -> None:
    """A unit is cast while the link is busy with the unit before."""
    link = Link(1e6, 0.0)
    processor = Processor({torch.float32: 1e9, torch.bfloat16: 1e9}, 1e7, 1e12)

    def simulated(**options: Any) -> fe.Simulation:
        return fe.simulate(
            partial(Tower, has_embedding=False),
            2,
            batch=torch.zeros(ROWS, WIDTH),
            machine=Machine("slow", processor, link, link, 2, **options),
            units=[LinearBlock],
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )

    on_host, found = simulated(host_runs_ahead=False), simulated()
    assert not [span for span in on_host.spans if span.lane == "copy in"]
    casts = [span for span in found.spans if span.lane == "copy in"]
    gathers = [span for span in found.spans if span.lane == "inner gather"]
    assert len(casts) == len(gathers) > 0
    assert any(
        cast.start < gather.end and gather.start < cast.end for cast in casts for gather in gathers
    )
    assert set(found.sent_bytes) == {"inner"}


class GroupedExperts(nn.Module):
    """Two products of grouped matrices. ``ends``: the number of groups of rows."""

    def __init__(self, dtype: torch.dtype = torch.float32, ends: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.ones(4, 2 * WIDTH, WIDTH))
        self.dtype, self.ends = dtype, ends

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.full((self.ends,), 8, dtype=torch.int32).cumsum(0).int()
        hidden = F.grouped_mm(x.to(self.dtype), self.up.to(self.dtype), offs=ends)
        return F.grouped_mm(hidden, self.down.to(self.dtype), offs=ends).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_grouped_matrices_have_flops(dtype: torch.dtype) -> None:
    options = {"batch": torch.zeros(ROWS, WIDTH), "machine": plain_machine(), "strategy": "optim"}
    result = fe.simulate(lambda: GroupedExperts(dtype), 2, **options)
    # Each row is multiplied by one expert. The input needs no gradient.
    product = 2 * ROWS * WIDTH * 2 * WIDTH
    assert result.model_flops == (2 + 3) * product
    assert result.compute_seconds == pytest.approx((2 + 3) * product / 1e9)
    # torch itself refuses products in bf16.
    message = r"found \(32, 64\) and .* in \[4, 3\] groups|matrix batch sizes have to match"
    with pytest.raises(fe.SimulationError, match=message):
        fe.simulate(lambda: GroupedExperts(dtype, 3), 2, **options)


def test_an_lstm_has_flops() -> None:
    rows, length, width, hidden = 4, 8, 32, 64
    result = fe.simulate(
        lambda: nn.LSTM(width, hidden, num_layers=2, batch_first=True),
        2,
        batch=torch.zeros(rows, length, width),
        loss=lambda output: output[0].sum(),
        strategy="optim",
    )
    matrices = 4 * hidden * (width + 3 * hidden)
    assert result.model_flops == 3 * 2 * rows * length * matrices


def test_a_simulation_leaves_no_state_and_takes_no_process_group() -> None:
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = Transformer(2)
        built.append(weakref.ref(model))
        return model

    # Simulating 1,024 ranks is as fast as simulating a few.
    options: dict[str, Any] = {"batch": token_batch(4, 0), "mesh": (128, 8)}
    assert fe.simulate(build, 1024, **options).memory["weights"] > 0
    gc.collect()
    assert [model() for model in built] == [None]
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="expected a process without process groups"):
            fe.simulate(build, 1024, **options)
        # A real engine works after simulations.
        model = Transformer(2)
        fe.shard(model)
        model(*token_batch(2, 0)).backward()
    finally:
        dist.destroy_process_group()


class Encoder(nn.Module):
    """torch's stack of deep copies of one layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        layer.linear1.weight.mark = ["a user's"]  # type: ignore[attr-defined]
        layer.linear1.bias.requires_grad_(False)
        layer.self_attn.out_proj.bias = layer.linear2.bias
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).sum()


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_a_model_that_deep_copies_its_layers_is_simulated(level: str) -> None:
    built: list[Encoder] = []

    def build() -> nn.Module:
        built.append(Encoder())
        return built[0]

    found = fe.simulate(build, 2, batch=torch.zeros(2, 4, 16), strategy=level, machine=a_machine())
    assert found.memory["weights"] > 0
    shapes = [param.shape for param in Encoder().parameters()]
    assert [param.shape for param in built[0].parameters()] == shapes
    layers = list(built[0].encoder.layers)
    for layer in layers:
        assert layer.self_attn.out_proj.bias is layer.linear2.bias  # tied within each copy
        assert not layer.linear1.bias.requires_grad
        assert layer.linear1.weight.mark == ["a user's"]
    assert len({id(layer.linear1.weight.mark) for layer in layers}) == 3


PROCESSOR = Processor({torch.float32: 1e9}, 1e9, 1e12)
NARROW = Machine("narrow", PROCESSOR, Link(1e6, 1e-6), Link(3e5, 2e-6), 4)
QUICK = [
    ("optim_grads_params", "no_shard", fe.H100),
    ("optim_grads", "no_shard", NARROW),
    ("optim", "optim", HOST),
    ("no_shard", "no_shard", fe.H100),
]


@pytest.mark.parametrize(("inner", "outer", "on"), QUICK)
@pytest.mark.parametrize("build", [EncoderDecoder, CalledTwice])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_more_first_steps_add_nothing(
    inner: str,
    outer: str,
    on: Machine,
    build: type[nn.Module],
    microbatches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = importlib.import_module("fsdp_engine.planner.simulation.simulate")
    options = {"strategy": inner, "outer_strategy": outer, "mesh": (2, 4), "min_unit_size": 0}
    simulate = partial(fe.simulate, build, 8, batch=vector_batch(8, 0), machine=on, **options)
    found = simulate(microbatches=microbatches)
    monkeypatch.setattr(simulation, "FIRST_STEPS", (microbatches, microbatches))
    more = simulate(microbatches=microbatches)
    assert found.seconds == pytest.approx(more.seconds, rel=1e-9)
    assert found.exposed_seconds == pytest.approx(more.exposed_seconds, abs=1e-9 * more.seconds)
    assert found.memory == more.memory
    assert [(s.lane, s.label) for s in found.spans] == [(s.lane, s.label) for s in more.spans]


TRACED_WIDTH = 256
PRODUCTS = ("mm", "addmm")


def build_traced() -> nn.Module:
    """Three blocks of two linears, and a linear."""
    blocks = (Mlp(TRACED_WIDTH, 3 * TRACED_WIDTH) for _ in range(3))
    return Chain(*blocks, nn.Linear(TRACED_WIDTH, TRACED_WIDTH))


@cache
def traced(checkpointing: bool | str = False, *, on_host: bool = False) -> fe.Simulation:
    return fe.simulate(
        build_traced,
        2,
        batch=vector_batch(64, 0, TRACED_WIDTH),
        machine=HOST if on_host else fe.H100,
        strategy="optim_grads_params",
        checkpointing=checkpointing,
        options=fe.Options(min_unit_size=0),
    )


def products(phase: str) -> list[str]:
    """Modules of the matrix products of a phase."""
    spans = (s for s in traced().spans if (s.lane, s.phase) == (COMPUTE, phase))
    return [s.module for s in spans if s.label in PRODUCTS]


FORWARD = [*(f"blocks.{n}.{part}" for n in range(3) for part in ("up", "down")), "blocks.3"]


def test_operations_have_their_modules_in_forward_and_in_backward() -> None:
    assert products("forward") == FORWARD
    # Two products in backward: for the input and for the weight. The first layer's input needs no
    # gradient.
    backward = [name for name in reversed(FORWARD) for _ in range(2)][:-1]
    assert products("backward") == backward
    spans = traced().spans
    by_label = {(s.label, s.phase): s.module for s in spans if s.module.startswith("blocks.1")}
    assert by_label["tanh", "forward"] == by_label["tanh_backward", "backward"] == "blocks.1"
    assert {s.module for s in spans if s.phase == "step"} == {""}
    assert {s.module for s in spans if s.lane != COMPUTE} == {""}


@pytest.mark.parametrize(
    ("checkpointing", "on_host"), [(False, False), (True, True), ("offload", False)]
)
def test_memory_over_time_has_the_peak(checkpointing: bool | str, on_host: bool) -> None:
    found = traced(checkpointing, on_host=on_host)
    series = found.memory_series
    assert all(a[0] <= b[0] for a, b in pairwise(series))
    assert 0 <= series[0][0] <= series[-1][0] == found.seconds
    sums = [sum(sizes) for _, sizes in series]
    assert max(sums) == found.peak_bytes
    assert dict(zip(KINDS, series[sums.index(max(sums))][1], strict=True)) == found.memory
    # Between steps there are no full weights, and the batch is the only activation.
    last = dict(zip(KINDS, series[-1][1], strict=True))
    assert last["transient"] == 0
    assert last["activations"] < 0.5 * found.memory["activations"]


def test_the_trace_has_a_counter_and_rows_of_lanes_and_modules(tmp_path: Path) -> None:
    found = traced(False)
    found.save_trace(tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory (bytes)"}
    assert [[*event["args"]] for event in counters] == [[*KINDS]] * len(counters)
    assert max(sum(event["args"].values()) for event in counters) == found.peak_bytes
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in rows.values()}
    for event in events:
        if event["ph"] == "X":
            spans[rows[event["tid"]]].append(event)
            assert 0 <= event["ts"] <= found.seconds * 1e6
    assert spans.keys() >= {"compute", "compute waits for", "inner gather", "inner reduce"}
    busy = sum(event["dur"] for event in spans["compute"])
    assert busy == pytest.approx(found.compute_seconds * 1e6)
    modules = spans["modules"]
    assert {e["name"] for e in modules} == {*FORWARD, "blocks.0", "blocks.1", "blocks.2"}
    for name in ("blocks.1", "blocks.1.up"):
        phases = [e["args"]["phase"] for e in modules if e["name"] == name]
        assert phases == ["forward", "backward"]
    for row, slices in spans.items():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            # Slices do not overlap, but those of modules may be nested.
            assert not open_until or (row == "modules" and end <= open_until[-1] + 1e-6), row
            open_until.append(end)
    named = [e["args"].get("module") for e in spans["compute"] if e["name"] in PRODUCTS]
    assert named[: len(FORWARD)] == FORWARD
