"""Every place of the engine where a stream waits is needed: without its wait numbers are wrong.

The waits of a steady step are left out in turn, those of one place until one of them gives wrong
weights. What shows them:

- more blocks than are gathered ahead, so that a block's memory is reused while compute may still
  read it: with two blocks the wait before a release changes nothing;
- units of one block each, so that there is more than one gather;
- kernels slow on both ranks, collectives slow on both, and one rank with slow kernels.

A single wait may change nothing where its place does: later work on its stream waits for more, or
its memory is not reused before the next wait.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from fsdp_engine.devices.lanes import DeviceLane
from tests.async_device import device as on
from tests.async_device.scene import MAX_NORM, Job, on_device, weights_of
from tests.models import Transformer
from tests.pool import on_ranks

# Of each rank.
DELAYS: list[list[dict[str, float]]] = [
    [{"compute": 2e-3, "collective": 4e-3}, {"collective": 4e-3}],
    [{"compute": 2e-3, "copy": 2e-3}] * 2,
    [{"collective": 8e-3}] * 2,
]


@contextmanager
def noted(waits: list[tuple[int, str]]) -> Iterator[None]:
    """Notes the number of each wait of a lane, and the function of the engine that asks for it."""
    wait = DeviceLane.wait

    def noting(lane: DeviceLane, ticket: Any) -> None:
        before = on.num_stream_waits()
        wait(lane, ticket)
        if on.num_stream_waits() > before:
            waits.append((before, place()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceLane, "wait", noting)
        yield


def place() -> str:
    """The innermost function of the engine above its lanes, as "file.function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "fsdp_engine" in path.parts and "devices" not in path.parts:
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "a program"


@sdpa_kernel(SDPBackend.MATH)
def run(job: Job, dropped: int, delays: dict[str, float]) -> tuple[Tensor, list[int], Any]:
    """Weights after three steps, the number of waits after each, and the places of the waits."""
    torch.manual_seed(1)
    model: Any = job.make_model()
    engine = job.shard(model, on.NAME)
    optimizer = job.make_optimizer(model.parameters())
    data = [
        [on_device(parts[dist.get_rank()], on.DEVICE) for parts in microbatches]
        for microbatches in job.data()
    ]
    counts: list[int] = []
    waits: list[tuple[int, str]] = []
    with on.delays(**delays), on.without_wait(dropped), noted(waits):
        for microbatches in data:
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with torch.enable_grad() if is_last else engine.no_sync():
                    (model(*batch) / len(microbatches)).backward()
            engine.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(on.num_stream_waits())
    state = weights_of(engine)
    return torch.cat([each.flatten() for each in state.values()]), counts, waits


def is_wrong_without(job: Job, number: int, right: Tensor) -> bool:
    """Whether some delays show that a wait is missing; the same answer on all ranks."""
    for delays in DELAYS:
        found, _, _ = run(job, number, delays[dist.get_rank()])
        is_wrong = torch.tensor(float(not torch.equal(found, right)))
        dist.all_reduce(is_wrong)
        if is_wrong:
            return True
    return False


def config(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return (("config", fe.DistributedDataParallelConfig(**fields)),)


FOUR_BLOCKS = functools.partial(Transformer, 4)
PROGRAMS = {
    "level_3": Job(FOUR_BLOCKS, num_micro=1),
    "level_3_microbatches": Job(FOUR_BLOCKS, num_micro=2),
    "level_3_double_buffer": Job(FOUR_BLOCKS, num_micro=1, options=config(fsdp_double_buffer=True)),
    "level_2": Job(FOUR_BLOCKS, pair=("optim_grads", "no_shard"), num_micro=2),
    "level_1": Job(FOUR_BLOCKS, pair=("optim", "no_shard"), num_micro=1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2, timeout=600)
def test_without_the_wait_of_any_place_weights_are_wrong(program: str) -> None:
    job = PROGRAMS[program]
    right, counts, waits = run(job, -1, {})
    in_step: dict[str, list[int]] = {}
    for number, where in waits:
        if counts[0] <= number < counts[1]:  # the second step; its effect shows in the third
            in_step.setdefault(where, []).append(number)
    assert len(in_step) >= 3, in_step
    never_wrong = {
        where: len(numbers)
        for where, numbers in in_step.items()
        if not any(is_wrong_without(job, number, right) for number in numbers)
    }
    assert not never_wrong, never_wrong
    assert torch.equal(run(job, -1, DELAYS[0][dist.get_rank()])[0], right)
