"""The clock, the machine's figures, and results of simulations."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.comm.lanes import COPY_IN, LANES, Operation
from fsdp_engine.simulation.calibrate import calibrate
from fsdp_engine.simulation.clock import Clock, axis_of, unit_of
from fsdp_engine.simulation.machine import Link, Machine, Processor
from fsdp_engine.simulation.operations import all_to_all_seconds, message_seconds
from tests.models import VOCABULARY, Transformer, token_batch
from tests.pool import Ranks
from tests.simulation.scene import ROWS, WIDTH, LinearBlock, Tower, machine, network, simulated

PRESETS = [fe.H100, fe.H200, fe.B200]
LEVEL_3 = ("optim_grads_params", "no_shard")


def a_machine(host_seconds: float = 0.0, host_runs_ahead: bool = True) -> Machine:
    link = Link(1e9, 0.0)
    processor = Processor({torch.float32: 1e9}, math.inf, 1e9)
    return Machine("a machine", processor, link, link, 2, host_seconds, host_runs_ahead)


def sending(clock: Clock, seconds: float) -> Operation:
    def steps() -> Any:
        clock.send(0, seconds)
        yield ()

    return steps


def test_lanes_are_concurrent_and_tickets_order_them() -> None:
    clock = Clock(a_machine())
    lanes = clock.make_lanes(torch.device("cpu"))
    first = lanes.inner_gather.submit("all-gather of a", sending(clock, 3.0))
    lanes.inner_gather.submit("all-gather of b", sending(clock, 3.0))
    reduced = lanes.inner_reduce.submit("reduce a", sending(clock, 1.0), after=[first])
    clock.compute("f", 2.0)
    assert clock.finish() == 2.0
    lanes.compute.wait(first)
    lanes.compute.wait(reduced)
    clock.compute("g", 1.0)
    assert clock.finish() == 5.0
    ends = {span.label: (span.start, span.end) for span in clock.spans}
    assert ends["all-gather of b"] == (3.0, 6.0)
    assert ends["g"] == (4.0, 5.0)
    # The gather took long, not the operation after it.
    assert [(e.unit, e.lane, e.seconds) for e in clock.exposed] == [("a", "inner gather", 2.0)]


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
    # It starts at the next submission on its lane, or when it is waited for.
    second = lanes.outer_gather.submit("all-gather of b", sending(clock, 1.0), after=[first])
    clock.compute("f", 2.0)
    lanes.compute.wait(second)
    assert clock.host == 4.0
    # For the first, so that the second can begin; then for the second.
    assert [each.seconds for each in clock.exposed] == [1.0, 1.0]
    assert first.done
    assert second.done


def test_communication_delays_compute_by_its_processor_share() -> None:
    clock = Clock(a_machine(host_runs_ahead=False))
    lanes = clock.make_lanes(torch.device("cpu"))

    def steps() -> Any:
        clock.send(0, 3.0, 1.5)
        yield ()

    ticket = lanes.inner_gather.submit("all-gather of a", steps)
    clock.compute("f", 1.0)
    assert clock.host == 2.5
    lanes.compute.wait(ticket)
    assert clock.host == 3.0


def test_units_are_read_off_labels() -> None:
    labels = ("reduce-scatter of blocks.1 over the inner axis", "encode blocks.1 (buffer 0)")
    assert {unit_of(label) for label in labels} == {"blocks.1"}


@pytest.mark.parametrize(
    ("kind", "figures", "message"),
    [
        (
            Link,
            {"bandwidth": 0.0},
            r"bandwidth: expected a number larger than 0 \(bytes.*50e9\); found 0.0",
        ),
        (
            Link,
            {"bandwidth": "fast"},
            r"bandwidth: expected a number larger than 0 .*; found 'fast'",
        ),
        (
            Link,
            {"latency": -1.0},
            r"latency: expected 0 or a larger number \(seconds.*; found -1.0",
        ),
        (Link, {"achievable": 70}, "achievable: expected a fraction, at most 1, larger than 0"),
        (Link, {"processor_share": math.nan}, "processor_share: expected 0 or a larger number"),
        (Processor, {"matrix_flops": {}}, "matrix_flops: expected torch.float32 among its dtypes"),
        (Processor, {"matrix_flops": {torch.float32: 0.0}}, "of torch.float32: expected a number"),
        (Processor, {"memory_bandwidth": -1.0}, "memory_bandwidth: expected a number larger"),
        (Processor, {"memory_bytes": 0.0}, "memory_bytes: expected a number larger than 0"),
        (Processor, {"achievable_flops": 0}, "achievable_flops: expected a fraction"),
        (Processor, {"overlap": 2}, "overlap: expected a fraction from 0 to 1 .*; found 2"),
        (Processor, {"call_seconds": math.inf}, "call_seconds: expected 0 or a larger number"),
        (Machine, {"ranks_per_node": 0}, "ranks_per_node: expected 1 rank or more.*; found 0"),
        (Machine, {"ranks_per_node": 2.0}, "ranks_per_node: expected 1 rank or more.*; found 2.0"),
        (Machine, {"host_seconds": -1}, "host_seconds: expected 0 or a larger number .*; found -1"),
    ],
)
def test_invalid_figures_of_a_machine_raise(
    kind: type, figures: dict[str, object], message: str
) -> None:
    parts = {Link: fe.H100.within_node, Processor: fe.H100.processor, Machine: fe.H100}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(parts[kind], **figures)


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


@pytest.mark.parametrize(
    ("num_ranks", "stride", "rate", "latency"),
    [
        (4, 1, 100, 1),  # one node
        (2, 2, 100, 1),
        (8, 1, 4 * 20, (6 * 1 + 1 * 3) / 7),  # four rings, a port each
        (64, 1, 4 * 20, (48 * 1 + 15 * 3) / 63),
        (8, 2, 2 * 20, (4 * 1 + 3 * 3) / 7),  # two ranks of each node
        (8, 4, 20, 3),  # one
        (8, 8, 20, 3),
        (6, 1, 2 * 20, (4 * 1 + 1 * 3) / 5),  # the second node has but two of them
        (5, 1, 20, (3 * 1 + 1 * 3) / 4),
        (4, 3, 20, (1 * 1 + 2 * 3) / 3),  # ranks 0 and 3, 6, 9
    ],
)
def test_rings_over_nodes(num_ranks: int, stride: int, rate: float, latency: float) -> None:
    link = NODES_OF_FOUR.link(num_ranks, stride)
    assert (link.rate, link.latency) == (pytest.approx(rate), pytest.approx(latency))


def test_rings_are_no_faster_than_the_link_within_a_node() -> None:
    slow = dataclasses.replace(NODES_OF_FOUR, within_node=Link(bandwidth=30.0, latency=1.0))
    assert slow.link(8, 1).rate == 30
    assert slow.link(8, 4).rate == 20
    assert slow.link(5, 1).rate == 20


@pytest.mark.parametrize(
    ("preset", "rate"), [(fe.A100, 8 * 22.5e9), (fe.H100, 8 * 45e9), (fe.B200, 8 * 45e9)]
)
def test_a_node_of_a_preset_has_a_port_for_each_gpu(preset: Machine, rate: float) -> None:
    assert preset.link(64, 1).rate == pytest.approx(rate)


def test_bytes_without_a_ring_leave_through_the_rank_s_own_port() -> None:
    assert NODES_OF_FOUR.link_to(3) == NODES_OF_FOUR.within_node
    assert NODES_OF_FOUR.link_to(4) == NODES_OF_FOUR.between_nodes
    # Of 800 bytes over 8 ranks 400 leave the node at 20 bytes a second, in four hops.
    assert all_to_all_seconds(NODES_OF_FOUR, 800, 8, 1) == pytest.approx(400 / 20 + 4 * 3)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 4, 1) == pytest.approx(300 / 100 + 3 * 1)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 4, 4) == pytest.approx(300 / 20 + 3 * 3)
    assert all_to_all_seconds(NODES_OF_FOUR, 400, 1, 1) == 0.0


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_a_flat_axis_over_nodes_sends_through_all_ports(on_host: bool) -> None:
    machine = dataclasses.replace(
        NODES_OF_FOUR,
        within_node=Link(1e9, 0.0),
        between_nodes=Link(1e6, 0.0),
        host_runs_ahead=not on_host,
    )

    def gathering(world_size: int, **mesh: Any) -> float:
        found = fe.simulate(
            OneProduct,
            world_size,
            batch=torch.zeros(64, 256),
            machine=machine,
            strategy="optim_grads_params",
            **mesh,
        )
        return sum(each.end - each.start for each in found.spans if each.lane == "inner gather")

    num_bytes = 256 * 256 * 4
    num_gathers = round(gathering(4) / (3 / 4 * num_bytes / 1e9))
    assert num_gathers in (1, 2)
    if on_host:  # gloo's ranks send their part to each other, 12 of 15 to other nodes
        one = 3 / 16 * num_bytes / 1e9 + 12 / 16 * num_bytes / 1e6
    else:
        one = 15 / 16 * num_bytes / 4e6
    assert gathering(16) == pytest.approx(num_gathers * one, rel=0.01)


def test_a_roofline() -> None:
    processor = Processor({torch.float32: 100.0}, 10.0, 1e9, call_seconds=0.5, achievable_flops=0.5)
    assert processor.seconds(1000, 20, torch.float32) == 20.0
    assert processor.seconds(10, 200, torch.float32) == 20.0
    assert processor.seconds(1, 1, torch.float32) == 0.5


@pytest.mark.parametrize("preset", PRESETS, ids=lambda each: each.name)
def test_presets_are_machines_that_can_be_saved(preset: Machine, tmp_path: Path) -> None:
    preset.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == preset
    peak = preset.processor.matrix_flops
    assert peak[torch.bfloat16] > peak[torch.float32]
    assert preset.link(8, 1) == preset.within_node
    assert preset.link(8, 8) == preset.between_nodes


def test_a_file_that_is_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="expected a machine as written by `calibrate`"):
        Machine.load(path)


def small(**options: Any) -> fe.Simulation:
    return fe.simulate(
        lambda: Transformer(2), 8, batch=lambda: token_batch(4, 0), mesh=(2, 4), **options
    )


def test_the_fields_of_a_simulation() -> None:
    result = small(strategy="optim_grads_params", microbatches=2)
    assert result.seconds > 0
    assert set(result.message_seconds) == {"inner gather", "inner reduce", "outer reduce"}
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["step", "compute"]
    assert any(line.startswith("exposed") for line in lines)
    assert "GiB at most" in lines[-2]


def test_joined_units_are_simulated() -> None:
    def labels(least: int) -> list[str]:
        spans = small(strategy="optim_grads_params", min_unit_size=least).spans
        return [span.label for span in spans if span.lane == "inner reduce"]

    one = labels(10**6)
    assert len(one) == 1
    assert "embedding + blocks.0-1 + norm + head" in one[0]
    assert len(labels(0)) == 4


def test_a_trace_has_a_row_for_each_lane(tmp_path: Path) -> None:
    result = simulated(LEVEL_3, network(0.5))
    result.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "compute waits for", "inner gather", "inner reduce"} <= set(rows.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert all(0 <= each["ts"] <= result.seconds * 1e6 for each in spans)
    busy = sum(each["dur"] for each in spans if rows[each["tid"]] == "compute")
    assert busy == pytest.approx(result.compute_seconds * 1e6)
    # Work on one lane is one after the other.
    for row in rows:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_weights_are_cast_on_a_lane_of_its_own_where_the_host_runs_ahead(on_host: bool) -> None:
    """As on a device: a unit is cast while the link is busy with the unit before."""
    link = Link(1e6, 0.0)
    processor = Processor({torch.float32: 1e9, torch.bfloat16: 1e9}, 1e7, 1e12)
    found = fe.simulate(
        lambda: Tower(has_embedding=False),
        2,
        batch=torch.zeros(ROWS, WIDTH),
        machine=Machine("slow", processor, link, link, 2, host_runs_ahead=not on_host),
        units=[LinearBlock],
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        strategy="optim_grads_params",
    )
    casts = [span for span in found.spans if span.lane == "copy in"]
    gathers = [span for span in found.spans if span.lane == "inner gather"]
    assert {span.label.split()[0] for span in gathers} == {"all-gather"}
    if on_host:
        assert not casts
        return
    assert {span.label.split()[0] for span in casts} == {"encode"}
    assert len(casts) == len(gathers)
    assert any(
        cast.start < gather.end and gather.start < cast.end for cast in casts for gather in gathers
    )
    assert set(found.sent_bytes) == {"inner"}


def test_what_is_sent_and_waited_for_while_weights_are_encoded_counts_for_the_inner_axis() -> None:
    found = small(strategy="optim_grads_params", codec_rules=(fe.Float8("tensor"),))
    assert any(span.lane == "copy in" for span in found.spans)
    assert set(found.sent_bytes) == {"inner", "outer"}
    assert [axis_of(lane) for lane in (COPY_IN, *LANES[1:])] == ["inner"] * 3 + ["outer"] * 2


class OneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x)).sum()


def test_flops_and_memory_of_one_product_by_hand() -> None:
    rows, one = 64, 256 * 256 * 4
    result = fe.simulate(
        OneProduct,
        4,
        batch=torch.zeros(rows, 256),
        machine=machine(network(0.5)),
        strategy="optim",
    )
    # Forward, and the weight's gradient; the input needs none.
    assert result.compute_seconds == pytest.approx(2 * 2 * rows * 256 * 256 / 1e9)
    memory = result.memory
    assert memory["weights"] == one
    assert memory["gradients"] == one
    assert memory["optimizer"] == pytest.approx(2 * one / 4, abs=64)  # AdamW, and a count of steps
    # At the peak autograd's gradient of the weight and its buffer exist.
    assert one <= memory["activations"] < 10 * one


def test_attention_has_flops() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    batch, heads, length, size = 2, 3, 16, 8
    result = fe.simulate(
        Attention,
        2,
        batch=torch.zeros(batch, heads, length, size),
        machine=machine(network(0.5)),
        strategy="no_shard",
    )
    product = 2 * batch * heads * length * length * size
    # Two products in forward; backward recomputes one and has four of its own.
    assert result.compute_seconds == pytest.approx((2 + 5) * product / 1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_grouped_matrices_have_flops(dtype: torch.dtype) -> None:
    experts, width, wider, rows = 4, 64, 128, 32

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(experts, width, wider))
            self.down = nn.Parameter(torch.ones(experts, wider, width))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.full((experts,), rows // experts, dtype=torch.int32).cumsum(0).int()
            hidden = F.grouped_mm(x.to(dtype), self.up.to(dtype), offs=ends)
            return F.grouped_mm(hidden, self.down.to(dtype), offs=ends).square().sum()

    one = machine(network(0.5))
    result = fe.simulate(Experts, 2, batch=torch.zeros(rows, width), machine=one, strategy="optim")
    # Each row is multiplied by one expert. The input needs no gradient.
    product = 2 * rows * width * wider
    assert result.model_flops == (2 + 3) * product
    assert result.compute_seconds == pytest.approx((2 + 3) * product / 1e9)


def test_an_lstm_has_flops() -> None:
    rows, length, width, hidden = 4, 8, 32, 64

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(width, hidden, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0].sum()

    result = fe.simulate(Recurrent, 2, batch=torch.zeros(rows, length, width), strategy="optim")
    matrices = 4 * hidden * (width + 3 * hidden)
    assert result.model_flops == 3 * 2 * rows * length * matrices


def test_grouped_matrices_that_do_not_fit_together_are_an_error() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(4, 64, 128))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.zeros(3, dtype=torch.int32)
            return F.grouped_mm(x, self.up, offs=ends).sum()

    with pytest.raises(fe.SimulationError, match=r"found \(32, 64\) and .* in \[4, 3\] groups"):
        fe.simulate(Experts, 2, batch=torch.zeros(32, 64), strategy="optim")


def test_host_bound_steps_take_the_host_s_time() -> None:
    slow = Machine(**{**vars(machine(network(0.5))), "host_seconds": 1e-3, "name": "a slow host"})
    result = small(machine=slow, strategy="optim_grads_params")
    assert result.seconds > 100 * 1e-3
    assert result.exposed_seconds < 1e-3


def test_no_process_group_is_left_and_none_is_taken() -> None:
    small(strategy="no_shard")
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="expected a process without process groups"):
            small(strategy="no_shard")
        # And an engine of flesh is none the worse for those that were simulated.
        model = Transformer(2)
        fe.shard(model)
        model(*token_batch(2, 0)).backward()
    finally:
        dist.destroy_process_group()


def test_a_simulation_leaves_no_state() -> None:
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = Transformer(2)
        built.append(weakref.ref(model))
        return model

    fe.simulate(build, 8, batch=token_batch(4, 0), strategy="optim_grads_params")
    gc.collect()
    assert [model() for model in built] == [None]


def test_many_ranks_cost_no_more_than_few() -> None:
    result = fe.simulate(
        lambda: Transformer(2), 1024, batch=token_batch(4, 0), mesh=(128, 8), strategy="optim"
    )
    assert result.memory["weights"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": (3, 4)}, "mesh: expected one or two sizes of 8 ranks"),
        ({"microbatches": 0}, "microbatches: expected at least 1"),
        ({"strategy": "zero"}, "strategy: expected one of"),
        ({"config": fe.DistributedDataParallelConfig(check_for_nan_in_grad=True)}, "no checks of"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fe.simulate(
            lambda: Transformer(2), 8, batch=token_batch(4, 0), **{"mesh": (2, 4), **options}
        )
    assert not dist.is_initialized()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        found = self.embedding(tokens)
        return [found, found]


class Checkpointed(nn.Module):
    """Linears, two of one bias, run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.blocks[2].bias = self.blocks[1].bias

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Checkpointed()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)},
        {"config": fe.DistributedDataParallelConfig(average_in_collective=True)},
        {"codec_rules": [fe.Float8()]},
        {"mp_policy": fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)},
    ],
    ids=["plain", "double buffer", "average", "fp8", "bf16"],
)
def test_a_simulation_supports_the_features_of_the_engine(options: dict[str, Any]) -> None:
    run = {"batch": torch.zeros(4, 64), "mesh": (2, 4), "strategy": "optim_grads_params"}
    found = fe.simulate(Checkpointed, 8, **run, **options)
    assert found.seconds > 0
    assert found.memory["transient"] > 0
    # Where the model was built makes no difference.
    assert fe.simulate(on_meta, 8, **run, **options).seconds == pytest.approx(found.seconds)


def test_a_model_without_a_loss_raises() -> None:
    tokens, _ = token_batch(4, 0)
    with pytest.raises(ValueError, match="loss: expected a function that returns the loss"):
        fe.simulate(TwoOutputs, 2, batch=tokens)
    result = fe.simulate(TwoOutputs, 2, batch=tokens, loss=lambda found: found[1].sum())
    assert result.seconds > 0


@pytest.mark.thorough
def test_calibration_measures_something() -> None:
    is_of_this_machine(calibrate(seconds=0.01))


def test_calibration_measures_on_both_of_two_ranks(ranks: Ranks) -> None:
    found, other = ranks.run(measured, world_size=2)
    is_of_this_machine(found)
    assert other == found  # the longer of both ranks' times


def measured() -> Machine:
    return calibrate(seconds=0.01)


def is_of_this_machine(found: Machine) -> None:
    assert found.processor.matrix_flops[torch.float32] > 1e8
    assert found.within_node.bandwidth > 1e6
    assert found.host_seconds > 0
    assert not found.host_runs_ahead
    assert small(machine=found, strategy="optim_grads_params").seconds > 0


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


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_model_that_deep_copies_its_layers_is_simulated(level: str) -> None:
    built: list[Encoder] = []

    def build() -> nn.Module:
        built.append(Encoder())
        return built[0]

    found = fe.simulate(build, 2, batch=torch.zeros(2, 4, 16), strategy=level, machine=a_machine())
    layers = list(built[0].encoder.layers)
    assert found.memory["weights"] > 0
    real = sum(each.numel() for each in Encoder().parameters())
    assert sum(math.prod(each.shape) for each in built[0].parameters()) == real
    for layer in layers:
        assert layer.self_attn.out_proj.bias is layer.linear2.bias  # tied within each copy
        assert not layer.linear1.bias.requires_grad
    marks = [layer.linear1.weight.mark for layer in layers]
    assert marks == [["a user's"]] * 3
    assert len({id(mark) for mark in marks}) == 3


def test_a_model_that_deep_copies_its_layers_is_planned() -> None:
    planning = fe.plan(
        Encoder, torch.zeros(2, 4, 16), world_size=2, checkpointing=(False,), machine=a_machine()
    )
    assert [each.fits for each in planning.outcomes] == [True] * 4
