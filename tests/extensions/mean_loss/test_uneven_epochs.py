"""Epochs in which ranks have random numbers of batches of random sizes, in fp64, beside one process
with the batches of all."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests import reference
from tests.extensions.mean_loss.scene import Net, rows
from tests.megatron.configs import LEVEL_NAMES
from tests.pairs import PAIRS
from tests.pool import Ranks
from tests.training import mesh_of

# Cases of each pair of levels, times 2.5: 500 in all, in some five minutes.
NUM_CASES = int(os.environ.get("FSDP_ENGINE_EPOCHS", "20"))


@dataclass(frozen=True)
class Batch:
    """Of ``size`` samples; 0: a batch that does not count."""

    seed: int
    size: int
    left_out: int

    def loss_sum(self, model: nn.Module) -> Tensor:
        losses: Tensor = model(rows(max(1, self.size), self.seed), self.left_out)
        return losses.sum() * (self.size > 0)


@dataclass(frozen=True)
class Epoch:
    """An epoch of all ranks: batches by rank; ``failing``: the rank whose loader raises after its
    batches."""

    batches: list[list[Batch]]
    drop_last: bool
    failing: int | None

    @property
    def num_steps(self) -> int:
        """Batches that each rank takes."""
        lengths = [len(each) for each in self.batches]
        if self.failing is None:
            return min(lengths) if self.drop_last else max(lengths)
        others = [length for rank, length in enumerate(lengths) if rank != self.failing]
        failure = lengths[self.failing]
        return min([failure, *others]) if self.drop_last else failure

    @property
    def fails(self) -> bool:
        """Whether the loader that raises is read so far."""
        return self.failing is not None and self.num_steps == len(self.batches[self.failing])

    def steps(self) -> list[list[Batch]]:
        """Batches of all ranks by step, repeated ones with size 0: these do not count, but a
        parameter that only they use has a gradient of zero, not None."""
        first = next((each[0] for each in self.batches if each), None)
        return [
            [
                each[number] if number < len(each) else replace((each or [first])[-1], size=0)  # type: ignore[type-var]
                for each in self.batches
            ]
            for number in range(self.num_steps)
        ]

    def loader(self, rank: int) -> Iterator[Batch]:
        yield from self.batches[rank]
        if rank == self.failing:
            raise OSError(f"the disk of rank {rank} is on fire")


@dataclass(frozen=True)
class Case:
    epochs: list[Epoch]
    accumulate: int
    leaves_out: bool


def draw_case(draw: random.Random, num_ranks: int) -> Case:
    leaves_out = draw.random() < 0.4
    smallest = 0 if draw.random() < 0.3 else 1
    epochs = []
    for epoch in range(draw.randint(1, 3)):
        shortest = 0 if draw.random() < 0.4 else 1
        lengths = [draw.randint(shortest, 6) for _ in range(num_ranks)]
        batches = [
            [
                Batch(
                    seed=1000 * epoch + 100 * rank + number,
                    size=draw.randint(smallest, 5),
                    left_out=draw.randint(-1, 2) if leaves_out else -1,
                )
                for number in range(length)
            ]
            for rank, length in enumerate(lengths)
        ]
        failing = draw.randrange(num_ranks) if draw.random() < 0.25 else None
        epochs.append(Epoch(batches, drop_last=draw.random() < 0.25, failing=failing))
    return Case(epochs, draw.randint(1, 3), leaves_out)


def steps_alone(case: Case) -> Iterator[list[Batch]]:
    """Batches of each optimizer step, of all ranks. A step whose microbatches a loader that raises
    has cut short is not taken."""
    for epoch in case.epochs:
        steps = epoch.steps()
        for begin in range(0, len(steps), case.accumulate):
            microbatches = steps[begin : begin + case.accumulate]
            if len(microbatches) == case.accumulate or not epoch.fails:
                yield [batch for each in microbatches for batch in each]


def train_alone(case: Case) -> tuple[nn.Module, list[float]]:
    """One process: its model, and the mean loss of each step."""
    model, losses = Net(), []
    optimizer = reference.adamw(model.parameters())
    for step in steps_alone(case):
        count = sum(batch.size for batch in step)
        total = torch.stack([batch.loss_sum(model) for batch in step]).sum()
        # A step without samples has gradients of zero.
        (total / max(1, count)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count if count else math.nan)
    return model, losses


def train_epoch(engine: fe.Engine, optimizer: Any, epoch: Epoch, case: Case) -> Iterator[float]:
    """The mean loss of each step."""
    batches = engine.even_batches(epoch.loader(dist.get_rank()), drop_last=epoch.drop_last)
    for number, (batch, weight) in enumerate(batches, 1):
        is_last = number % case.accumulate == 0
        if number == epoch.num_steps and not epoch.fails:
            is_last = True
        with (
            contextlib.nullcontext() if is_last else engine.no_sync(),
            engine.together() if case.leaves_out else contextlib.nullcontext(),
        ):
            loss = weight * batch.loss_sum(engine.model)
            engine.mean_loss(loss, weight * batch.size).backward()
        if is_last:
            yield engine.last_mean_loss.item()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def check_cases(seeds: range, shape: tuple[int, ...], pair: tuple[str, str]) -> None:
    mesh = mesh_of(*shape)
    for seed in seeds:
        case = draw_case(random.Random(f"{seed} {shape}"), math.prod(shape))
        try:
            check(case, mesh, pair)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {shape}, {pair}: {case}") from error


def check(case: Case, mesh: DeviceMesh, pair: tuple[str, str]) -> None:
    expected, losses = train_alone(case)
    outer = pair[1] if mesh.ndim > 1 else None
    engine = fe.shard(Net(), mesh, pair[0], outer, units="blocks.*")
    optimizer = reference.adamw(engine.model.parameters())
    found: list[float] = []
    for epoch in case.epochs:
        raises = pytest.raises(OSError, match=f"the disk of rank {epoch.failing} is on fire")
        with raises if epoch.fails else contextlib.nullcontext():
            for loss in train_epoch(engine, optimizer, epoch, case):
                found.append(loss)
        optimizer.zero_grad()  # of a step that was cut short
    assert found == pytest.approx(losses, rel=1e-6, nan_ok=True)
    weights = engine.full_state_dict()
    for name, right in expected.state_dict().items():
        assert reference.relative_error(weights[name], right) < 1e-11, name


def run_cases(ranks: Ranks, seeds: range, shape: tuple[int, ...], pair: tuple[str, str]) -> None:
    for first in range(0, len(seeds), 10):
        given = seeds[first : first + 10]
        ranks.run(check_cases, given, shape, pair, world_size=math.prod(shape))


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_epochs_of_random_lengths_train_as_one_process(ranks: Ranks, level: str) -> None:
    run_cases(ranks, range(4), (2,), (level, "no_shard"))
    run_cases(ranks, range(4, 6), (3,), (level, "no_shard"))


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_random_epochs(ranks: Ranks, pair: tuple[str, str]) -> None:
    run_cases(ranks, range(100, 100 + NUM_CASES), (2, 2), pair)
    run_cases(ranks, range(10000, 10000 + NUM_CASES // 2), (2,), (pair[0], "no_shard"))
    run_cases(ranks, range(20000, 20000 + NUM_CASES // 2), (3,), (pair[0], "no_shard"))
    run_cases(ranks, range(30000, 30000 + NUM_CASES // 2), (4,), (pair[0], "no_shard"))


def test_cases_have_each_kind_of_epoch() -> None:
    cases = [draw_case(random.Random(f"{seed} (2,)"), 2) for seed in range(4)]
    cases += [draw_case(random.Random(f"{seed} (3,)"), 3) for seed in range(4, 6)]
    epochs = [epoch for case in cases for epoch in case.epochs]
    assert any(epoch.fails for epoch in epochs)
    assert any(epoch.drop_last for epoch in epochs)
    assert any(not each and epoch.num_steps for epoch in epochs for each in epoch.batches)
    assert any(case.accumulate > 1 for case in cases)
    assert any(case.leaves_out for case in cases)
    assert any(batch.size == 0 for epoch in epochs for each in epoch.batches for batch in each)
