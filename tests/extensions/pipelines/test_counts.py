"""Collectives and memory in a step of a pipeline."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import fsdp_engine as fe
from fsdp_engine.pipelining import PipelineStage
from tests import reference
from tests.extensions.pipelines import scene
from tests.messages import GATHERS, REDUCTIONS, Messages
from tests.pool import on_ranks

# How many of the four forwards of a stage are directly followed by a backward, by schedule and
# pipeline rank. The last unit stays full in between.
TURNS = {
    "GPipe": (1, 1),  # F0 F1 F2 F3 B0 ..: the last forward only
    "1F1B": (3, 4),  # F0 F1 B0 F2 B1 F3 B2 B3, and F0 B0 F1 B1 ..
}


def counted(pipeline: scene.Pipeline) -> Counter[str]:
    """Collectives of the second step. In the first, shapes and the order of uses are recorded."""
    optimizers = [reference.sgd(module.parameters()) for module in pipeline.modules]
    messages = Messages()
    for number, (x, y) in zip(range(2), scene.batches(2), strict=False):
        with messages.counting():
            pipeline.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            messages.operations.clear()
    found = messages.operations
    return Counter({k: v for k, v in found.items() if k.startswith(GATHERS + REDUCTIONS)})


@pytest.mark.parametrize("schedule", scene.SINGLE)
@on_ranks(4)
def test_collectives_of_whole_backwards(schedule: str) -> None:
    num_micro = scene.NUM_MICROBATCHES
    # GPipe gathers as often as 1F1B, except for TURNS.
    for level in scene.LEVELS if schedule == "1F1B" else scene.LEVELS[::3]:
        pipeline = scene.make_pipeline(schedule, level)
        (engine,) = pipeline.engines
        found = counted(pipeline)
        wanted: Counter[str] = Counter()
        for unit in engine.units:
            what = f"of {unit.label}"
            num_stayed = TURNS[schedule][pipeline.indices[0]] if unit is engine.units[-1] else 0
            if unit is engine.units[0]:
                # The root ends each forward and begins each backward, so it stays full.
                num_stayed = num_micro
            if unit.reshards:
                wanted[f"all-gather {what}"] = 2 * num_micro - num_stayed
            elif unit.needs_refresh:
                wanted[f"all-gather {what}"] = 1
            reduce = "reduce-scatter" if unit.needs_refresh or unit.reshards else "all-reduce"
            cut = unit.buffers[0].spec.grad_depth > 0
            wanted[f"{reduce} {what}"] = num_micro if cut else 1
        assert found == wanted, f"{level} {pipeline.indices} {found - wanted} {wanted - found}"


@pytest.mark.parametrize(
    "schedule",
    scene.marked(["InterleavedZeroBubble", "ZBVZeroBubble"], default=["InterleavedZeroBubble"]),
)
@on_ranks(4)
def test_collectives_of_split_backwards(schedule: str) -> None:
    num_micro = scene.NUM_MICROBATCHES
    for level in scene.LEVELS:
        pipeline = scene.make_pipeline(schedule, level)
        found = counted(pipeline)
        gathers = {k: v for k, v in found.items() if k.startswith(GATHERS)}
        reductions = {k: v for k, v in found.items() if k.startswith(REDUCTIONS)}
        unit = pipeline.engines[0].units[1]
        # Two stages of a rank have units of the same names.
        per_step = num_micro if unit.buffers[0].spec.grad_depth else 1
        assert set(reductions.values()) == {2 * per_step}, level
        if unit.reshards:
            assert max(gathers.values()) <= 2 * 3 * num_micro, gathers
        else:
            assert set(gathers.values()) <= {2}, level


@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble"])
@on_ranks(4)
def test_no_more_is_staged_than_where_each_forward_has_its_backward_at_once(
    schedule: str, level: str
) -> None:
    pipeline = scene.make_pipeline(schedule, level, what="deep")
    x, y = next(scene.batches(2))
    for engine, module in zip(pipeline.engines, pipeline.modules, strict=True):
        for _ in range(2):
            engine.peak_memory_bytes(reset=True)
            module(x[0]).sum().backward()
        at_once = engine.peak_memory_bytes(reset=True)["staging"]
        assert at_once < 0.6 * sum(4 * unit.num_staged for unit in engine.units)
    pipeline.step(x, y)
    for engine in pipeline.engines:
        assert engine.peak_memory_bytes()["staging"] <= at_once


# Size of one microbatch.
NUM_BYTES = scene.ROWS * scene.DIM * 4


class WatchedStage(PipelineStage):
    """Records how many received tensors exist at the start of each forward and backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._noted(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._noted(super().get_bwd_recv_ops(bwd_chunk_id))

    def _noted(self, operations: list[Any]) -> list[Any]:
        self.received += [weakref.ref(each.tensor) for each in operations]
        return operations

    def count(self) -> int:
        return sum(each() is not None for each in self.received)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.alive.append(self.count())
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.alive.append(self.count())
        super().backward_one_chunk(*args, **kwargs)


def stages_of(pipeline: scene.Pipeline) -> list[WatchedStage]:
    schedule = pipeline.schedule
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


# Largest number of received tensors in each stage. With 1F1B the second stage has one input, and
# the first stage one gradient. torch also holds a message until the next of its kind is received.
MOST = {"1F1B": (2, 2), "GPipe": (2, scene.NUM_MICROBATCHES)}


SEVERAL = ("Interleaved1F1B", "ZBVZeroBubble")


@pytest.mark.parametrize(
    "schedule", scene.marked([*MOST, *SEVERAL], default=[*MOST, "Interleaved1F1B"])
)
@on_ranks(4)
def test_only_microbatches_in_flight_have_received_tensors(schedule: str) -> None:
    pipeline = scene.make_pipeline(schedule, "optim_grads", stage_class=WatchedStage)
    stages = stages_of(pipeline)
    for x, y in scene.batches(2):
        for stage in stages:
            stage.received.clear()
            stage.alive.clear()
        pipeline.step(x, y)
        assert all((stage.count(), stage.received_bytes) == (0, 0) for stage in stages)
    if schedule in SEVERAL:
        return
    (stage,) = stages
    assert len(stage.received) == scene.NUM_MICROBATCHES
    assert 1 <= max(stage.alive) <= MOST[schedule][stage.stage_index]
    x, y = next(scene.batches(2))
    with torch.inference_mode():
        pipeline.schedule.eval(*[x[pipeline.data_rank]] * stage.is_first, target=y[0])
    assert stage.received_bytes == 0
    pipeline.step(x, y)
    # State after a step that failed in its first forward or backward.
    given = stage.get_bwd_recv_ops(0) if stage.is_first else stage.get_fwd_recv_ops(0)
    assert stage.received_bytes == NUM_BYTES
    del given
    stage.clear_runtime_states()
    assert (stage.count(), stage.received_bytes) == (0, 0)


class TwoInputs(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.is_last, self.linear = index == 1, nn.Linear(scene.DIM, scene.DIM)

    def forward(self, x: Tensor, steps: Tensor | None = None) -> Any:
        if steps is None:
            steps = torch.arange(scene.ROWS)
        y = self.linear(x) * steps[:, None]
        return y if self.is_last else (y, steps + 1)


@pytest.mark.skipif(
    not hasattr(PipelineStage, "_warmup_forward_vote"), reason="torch wants gradients of all inputs"
)
@on_ranks(4)
def test_messages_that_need_no_gradient() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "d"))
    index = mesh.get_local_rank("p")
    module = TwoInputs(index)
    fe.shard(module, mesh["d"], "no_shard")
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("p"))
    schedule = Schedule1F1B(stage, 4, loss_fn=scene.loss_of)
    x, y = next(scene.batches(2))
    schedule.step(*[x[0]] * (index == 0), **({"target": y[0]} if index else {}))
    assert stage.received_bytes == 0

    alone = nn.ModuleList(TwoInputs(index) for index in range(2))
    total = torch.zeros(())
    for inputs, targets in zip(x[0].chunk(4), y[0].chunk(4), strict=True):
        total += scene.loss_of(alone[1](*alone[0](inputs)), targets) / 4
    total.backward()
    torch.testing.assert_close(module.linear.weight.grad, alone[index].linear.weight.grad)
