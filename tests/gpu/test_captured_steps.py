"""A training step that is captured into a CUDA graph: see [Note: Captured graphs]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests.gpu.scene import LEVELS, ON_GPU, Trained, assert_same, make_batches, make_model

pytestmark = ON_GPU

BF16 = torch.bfloat16


class Training:
    """A model, its engine, and a step of two microbatches whose inputs stay in the same memory."""

    def __init__(
        self, mesh: DeviceMesh, level: str, dtype: torch.dtype, extensions: Sequence[Any] = ()
    ) -> None:
        self.model = make_model()
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        self.engine = fe.shard(
            self.model, mesh=mesh, strategy=level, mp_policy=policy, extensions=extensions
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-2, fused=True, capturable=True
        )
        fe.shard_optimizer(self.optimizer)
        self.inputs = make_batches(2)
        self.losses: list[float] = []

    def give(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        for static, new in zip(self.inputs, batches, strict=True):
            for tensor, values in zip(static, new, strict=True):
                tensor.copy_(values)

    def step(self) -> Tensor:
        with self.engine.no_sync():
            first = self.model(*self.inputs[0])
            first.backward()
        second = self.model(*self.inputs[1])
        second.backward()
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([first.detach(), second.detach()])

    def run(self, step: Callable[[], Tensor], batches: list[tuple[Tensor, Tensor]]) -> None:
        self.give(batches)
        self.losses += step().tolist()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.model(*self.inputs[0]).item())

    def captured(self) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = self.step()

        def replay() -> Tensor:
            graph.replay()
            return losses

        return replay

    def result(self) -> Trained:
        return self.losses, self.engine.full_state_dict()


def trained(training: Training, *, captures: bool) -> Trained:
    """Steps outside of a graph, replays, an evaluation, a replay, and a step outside again."""
    data = make_batches(14)
    batches = [data[i : i + 2] for i in range(0, len(data), 2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for each in batches[:2]:
            training.run(training.step, each)
    torch.cuda.current_stream().wait_stream(side)
    step = training.captured() if captures else training.step
    for each in batches[2:4]:
        training.run(step, each)
    training.evaluate()
    training.run(step, batches[4])
    training.evaluate()
    training.run(training.step, batches[5])
    training.run(step, batches[6])
    return training.result()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("level", LEVELS)
def test_replays_of_a_captured_step_train_like_steps(
    mesh: DeviceMesh, level: str, dtype: torch.dtype
) -> None:
    expected = trained(Training(mesh, level, dtype), captures=False)
    found = trained(Training(mesh, level, dtype), captures=True)
    assert_same(found, expected, tolerance=1e-6)


EXTENSIONS = {
    "fp8, level 1": (LEVELS[1], [fe.Float8()]),
    "fp8, level 3": (LEVELS[3], [fe.Float8()]),
    "recomputation": (LEVELS[3], [fe.Recompute()]),
}


@pytest.mark.parametrize("case", EXTENSIONS)
def test_a_captured_step_has_what_extensions_add(mesh: DeviceMesh, case: str) -> None:
    level, extensions = EXTENSIONS[case]
    expected = trained(Training(mesh, level, BF16, extensions=extensions), captures=False)
    found = trained(Training(mesh, level, BF16, extensions=extensions), captures=True)
    assert_same(found, expected, tolerance=1e-6)
