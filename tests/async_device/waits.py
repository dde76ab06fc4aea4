"""Leaves out each wait of a steady step in turn, and finds the delays that show it is missing.

A wait orders a stream, the *waiter*, behind the work that another one, its *source*, had when the
event was recorded. The first patterns of delays slow the source alone: then the waiter is ahead of
it. Three measures make a premature access visible:

- Memory that the engine takes or frees is filled with NaN, by a kernel on the model's stream. This
  imitates an activation in that memory before or after the engine's use.
- All blocks have one size, and not all of them are prefetched, so that they reuse memory.
- Delays hold from the step before until the step after, and the host waits for nothing meanwhile.

A wait is *implied* if earlier waits of the waiter cover the same work of the source.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.extensions.written_weights.written_weights import WrittenWeights
from fsdp_engine.memory.allocator import TransientStorage
from tests.async_device import device as on
from tests.async_device.scene import MAX_NORM, Job, mesh_of, of_this_rank, weights_of
from tests.models import Chain, vector_batch

NUM_BLOCKS, DIM = 5, 16
NUM_PATTERNS = 20
COMPUTE = "compute"


class Block(nn.Module):
    """A linear without a bias, and a residual: few kernels, and tensors of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(Chain):
    """Blocks and a head. The gradient of ``shift`` makes backward read the weights of all
    layers."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(NUM_BLOCKS)))
        self.shift = nn.Parameter(torch.zeros(DIM))
        self.head = nn.Linear(DIM, DIM, bias=False)

    def predict(self, x: Tensor) -> Tensor:
        return self.head(super().predict(x + self.shift))


class DecayingModel(Model):
    """Forward scales each layer's weights just before their gather, while the previous layer runs.
    Otherwise only the first gather after an optimizer step would read new weights."""

    def predict(self, x: Tensor) -> Tensor:
        x = x + self.shift
        following = [*(block.linear for block in self.blocks[1:]), self.head]
        for block, layer in zip(self.blocks, following, strict=True):
            with torch.no_grad():
                layer.weight.mul_(0.9)
            x = block(x)
        return self.head(x)


def square_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """As many rows as columns: activations are as large as weights, and may reuse their memory."""
    return vector_batch(DIM, seed, width=DIM)


def config(**fields: Any) -> tuple[str, Any]:
    return ("config", fe.DistributedDataParallelConfig(**fields))


def job(pair: tuple[str, str], num_micro: int = 1, model: Any = Model, **fields: Any) -> Job:
    return Job(model, square_batch, pair, num_micro=num_micro, **fields)


LEVEL_3 = ("optim_grads_params", "no_shard")
TWO_AXES = ("optim_grads_params", "optim")
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
# Description and job of each program. Each runs on two ranks, except the last.
PROGRAMS: dict[str, Job] = {
    "`optim_grads_params`": job(LEVEL_3),
    "two microbatches": job(LEVEL_3, num_micro=2),
    "double buffer": job(LEVEL_3, options=(config(fsdp_double_buffer=True),)),
    "weights and gradients in bf16": job(LEVEL_3, options=(("mp_policy", BF16),)),
    "`optim_grads`, two microbatches": job(("optim_grads", "no_shard"), num_micro=2),
    "`optim`": job(("optim", "no_shard")),
    "`no_shard`": job(("no_shard", "no_shard")),
    "two axes, weights scaled in forward": job(TWO_AXES, sizes=(2, 2), model=DecayingModel),
}


@dataclass(frozen=True)
class Wait:
    """A wait of a steady step."""

    number: int  # its position among the waits of the program
    place: str  # see ``place``
    waiter: str  # name of a lane
    source: str  # name of a lane
    implied: bool  # see the module docstring


class Watch:
    """Notes each wait of the lanes, in ``waits``."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        # By event: the lane, and the number of jobs that its stream had been given.
        self._recorded: dict[Any, tuple[str, int]] = {}
        # By waiting stream and source lane: number of the lane's jobs that the stream has waited
        # for.
        self._reached: dict[tuple[Any, str], int] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record waits within the block."""
        record, wait_of_lane, wait = DeviceLane._record, DeviceLane.wait, on.Stream.wait_event
        lanes: list[DeviceLane] = []

        def recorded(lane: DeviceLane, is_captured: bool) -> Any:
            ticket = record(lane, is_captured)
            self._recorded[ticket.event] = (lane.name, on.num_jobs(ticket.stream))
            return ticket

        def waiting(lane: DeviceLane, *tickets: Any) -> None:
            lanes.append(lane)
            try:
                wait_of_lane(lane, *tickets)
            finally:
                lanes.pop()

        def waited(stream: Any, event: Any) -> None:
            number = on.num_stream_waits()
            wait(stream, event)
            if lanes:
                source, num_jobs = self._recorded[event]
                key = (stream, source)
                reached = self._reached.get(key, -1)
                self._reached[key] = max(reached, num_jobs)
                implied = reached >= num_jobs
                self.waits.append(Wait(number, place(), lanes[-1].name, source, implied))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceLane, "_record", recorded)
            patch.setattr(DeviceLane, "wait", waiting)
            patch.setattr(on.Stream, "wait_event", waited)
            yield


def place() -> str:
    """The innermost engine function in the call stack outside ``comm`` and ``memory``, as
    "file.function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "fsdp_engine" in path.parts and path.parent.name not in ("comm", "memory"):
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "a program"


@contextmanager
def memory_is_overwritten() -> Iterator[None]:
    """Within the block the engine fills memory that it takes or frees with NaN, on the current
    stream."""
    fill, free = TransientStorage.fill, TransientStorage.free

    def overwrite(storage: TransientStorage) -> None:
        if storage.num_bytes:
            memory = torch.empty(0, dtype=torch.uint8, device=on.DEVICE)
            memory.set_(storage._storage).fill_(255)

    def taken(storage: TransientStorage) -> None:
        is_new = not storage.filled
        fill(storage)
        if is_new:
            overwrite(storage)

    def freed(storage: TransientStorage) -> None:
        if storage.filled:
            overwrite(storage)
        free(storage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransientStorage, "fill", taken)
        patch.setattr(TransientStorage, "free", freed)
        yield


def unchecked(watch: WrittenWeights, *, ranks_differ: bool) -> None:
    """Replacement of ``WrittenWeights.check`` that resets the watch and compares nothing."""
    del ranks_differ
    watch.reset()


Delays = dict[str, Any]


def patterns(wait: Wait, rank: int) -> Iterator[Delays]:
    """Delays of this rank. The first patterns detect most missing waits. A dict with ``lane`` slows
    each job of that lane by ``seconds``; any other holds arguments of ``delays``."""
    # Before an event there are many jobs on the model's stream, but only one or two on other lanes.
    seconds = 1e-3 if wait.source == COMPUTE else 6e-3
    yield {"lane": wait.source, "seconds": seconds}
    yield {"lane": wait.source, "seconds": seconds * (rank % 2 == 0)}
    yield {"lane": wait.source, "seconds": seconds * (rank % 2 == 1)}
    yield {"lane": wait.source, "seconds": 15 * seconds}  # for slow collectives
    yield {"collective": 6e-3, "compute": 1e-3 * (rank % 2)}
    for seed in range(NUM_PATTERNS - 5):
        yield {"compute": 1e-3, "copy": 1e-3, "collective": 8e-3, "seed": 4 * seed + rank}


class Program:
    """A job that is run again and again on the device, with fresh weights."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._mesh = mesh_of(on.NAME, job.sizes)
        self._data = of_this_rank(job.data(), on.DEVICE)
        self.right, counts, waits = self.run()
        again, _, _ = self.run()
        assert torch.equal(again, self.right)
        assert self.right.isfinite().all()
        # Waits of the second step: their effect shows in the third.
        self.waits = [wait for wait in waits if counts[0] <= wait.number < counts[1]]

    def run(
        self, dropped: int = -1, delays: Delays | None = None
    ) -> tuple[Tensor, list[int], list[Wait]]:
        """Weights after three steps, the number of waits after each, and the waits of the lanes."""
        job, watch = self._job, Watch()
        torch.manual_seed(1)
        model: Any = job.make_model()
        options = {"min_unit_size": 0, **dict(job.options)}
        engine = fe.shard(model, self._mesh, *job.pair, **options)
        optimizer = job.make_optimizer(model.parameters())
        counts: list[int] = []
        with ExitStack() as stack:
            stack.enter_context(memory_is_overwritten())
            # Wrong values must show in the final weights, so the engine must not raise an error
            # before.
            stack.enter_context(mock.patch.object(WrittenWeights, "check", unchecked))
            stack.enter_context(on.without_wait(dropped))
            stack.enter_context(watch.noting())
            stack.enter_context(on.delays(**_on_streams(engine, delays or {})))
            for microbatches in self._data:
                for index, batch in enumerate(microbatches):
                    is_last = index == len(microbatches) - 1
                    with torch.enable_grad() if is_last else engine.no_sync():
                        (model(*batch) / len(microbatches)).backward()
                engine.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                counts.append(on.num_stream_waits())
        weights = torch.cat([each.flatten() for each in weights_of(engine).values()])
        return weights, counts, watch.waits

    def first_pattern(self, wait: Wait) -> int | None:
        """Index of the first pattern of delays with which a run without ``wait`` gives wrong
        weights on any rank; None if all are right."""
        for number, delays in enumerate(patterns(wait, dist.get_rank())):
            found, _, _ = self.run(wait.number, delays)
            is_wrong = torch.tensor(float(not torch.equal(found, self.right)))
            dist.all_reduce(is_wrong)
            if is_wrong:
                return number
        return None

    def is_right_with(self, delays: Delays) -> bool:
        """Whether a run with all waits gives the right weights in spite of ``delays``."""
        return torch.equal(self.run(-1, delays)[0], self.right)


def _on_streams(engine: fe.Engine, delays: Delays) -> Delays:
    if "lane" not in delays:
        return delays
    ids = {lane.name: lane._target().stream_id for lane in engine.lanes.all}
    return {"streams": {ids[delays["lane"]]: delays["seconds"]}}


def sweep(name: str) -> list[dict[str, Any]]:
    """Each wait of a program as a dict, with the pattern that shows it is needed. Collective."""
    program = Program(PROGRAMS[name])
    found = []
    for wait in program.waits:
        pattern = None if wait.implied else program.first_pattern(wait)
        found.append({**dataclasses.asdict(wait), "pattern": pattern})
    for source in sorted({wait.source for wait in program.waits}):
        wait = Wait(-1, "", "", source, False)
        assert program.is_right_with(next(patterns(wait, dist.get_rank()))), source
    return found


def num_ranks(name: str) -> int:
    return math.prod(PROGRAMS[name].sizes)
