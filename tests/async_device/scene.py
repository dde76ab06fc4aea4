"""One training job, run on the device and on the CPU with the same ranks and code.

The host reads nothing during a run: reading a value makes the host wait for the stream, which can
hide a wait that is missing. Batches are on the device before the first step; losses and norms are
read after the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from tests.async_device import device as on
from tests.models import Small, Transformer, token_batch, vector_batch
from tests.reference import Data, OptimizerMaker, full, make_data, sgd

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# The ordinary tests run the last level, ``make test-all`` all of them.
FULL_AND_THOROUGH = [
    *(pytest.param(each, marks=pytest.mark.thorough) for each in LEVELS[:3]),
    LEVELS[3],
]
NUM_STEPS = 3
MAX_NORM = 0.5


@dataclass(frozen=True)
class Job:
    """A model and how it is trained.

    Attributes:
        sizes: sizes of the mesh, (inner,) or (outer, inner).
        num_micro: microbatches of a step; all but the last one run under ``no_sync()``.
        options: further arguments of ``shard``, as (name, value) pairs.
    """

    make_model: Callable[[], nn.Module] = field(default=functools.partial(Transformer, 2))
    make_batch: Callable[[int, int], Any] = token_batch
    pair: tuple[str, str] = ("optim_grads_params", "no_shard")
    sizes: tuple[int, ...] = (2,)
    num_micro: int = 2
    make_optimizer: OptimizerMaker = sgd
    clips: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def shard(self, model: nn.Module, device_type: str) -> fe.Engine:
        """Shards ``model`` on ``device_type``, by default with each block a unit of its own."""
        options = {"min_unit_size": 0, **dict(self.options)}
        return fe.shard(model, mesh_of(device_type, self.sizes), *self.pair, **options)

    def data(self) -> Data:
        """Batches by step, microbatch and rank."""
        return make_data(self.make_batch, NUM_STEPS, self.num_micro, dist.get_world_size())


# Makes a Job of three units with few kernels; accepts the other fields of Job.
small_job = functools.partial(Job, functools.partial(Small, 2), vector_batch)


@dataclass
class Result:
    """The results of a run on this rank."""

    losses: list[float]  # of microbatches
    norms: list[float]  # of steps
    weights: dict[str, Tensor]  # at the end


def mesh_of(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    names = ("outer", "inner")[-len(sizes) :]
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def on_device(batch: Any, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(part.to(device) for part in batch)


def of_this_rank(data: Data, device: torch.device) -> list[list[tuple[Tensor, ...]]]:
    """This rank's batches, by step and microbatch."""
    rank = dist.get_rank()
    return [[on_device(parts[rank], device) for parts in step] for step in data]


@sdpa_kernel(SDPBackend.MATH)  # on the CPU too: the same kernels
def train_with(
    engine: fe.Engine, optimizer: torch.optim.Optimizer, data: Data, clips: bool = True
) -> Result:
    """Trains this rank's part of ``data``."""
    model: Any = engine.model
    losses: list[Any] = []
    norms: list[Any] = []
    for microbatches in of_this_rank(data, engine.mesh.device):
        for index, batch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else engine.no_sync():
                loss = model(*batch) / len(microbatches)
                loss.backward()
            losses.append(loss.detach())
        if clips:
            norms.append(engine.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    losses, norms = [each.item() for each in losses], [each.item() for each in norms]
    return Result(losses, norms, weights_of(engine))


def step_by_step(
    engine: fe.Engine, optimizer: torch.optim.Optimizer, num_steps: int = 4
) -> Callable[[int], None]:
    """Returns ``step(number)``, which trains on one of ``num_steps`` token batches. The batches are
    already on the device, and the host reads nothing."""
    device = engine.mesh.device
    batches = [on_device(token_batch(4, seed), device) for seed in range(num_steps)]
    model: Any = engine.model

    def step(number: int) -> None:
        model(*batches[number]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def weights_of(engine: fe.Engine) -> dict[str, Tensor]:
    """Full parameters, on the CPU; a collective."""
    state = engine.full_state_dict()
    return {name: state[name].cpu() for name, _ in engine.model.named_parameters()}


def state_of(engine: fe.Engine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Full weights and optimizer state, on the CPU; a collective."""
    optimizer.state_dict()  # waits for the last copies of offloaded state
    found = weights_of(engine)
    for name, parameter in engine.model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = full(value).cpu()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(job: Job, device_type: str) -> Result:
    """Makes the model, shards it on ``device_type`` and trains it."""
    torch.manual_seed(1)
    model = job.make_model()
    engine = job.shard(model, device_type)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train_with(engine, job.make_optimizer(parameters), job.data(), job.clips)


_ON_CPU: dict[Any, Result] = {}


def on_cpu(job: Job) -> Result:
    """:func:`train` on the CPU. The result is cached for equal jobs in this process."""
    fields = (getattr(job, each.name) for each in dataclasses.fields(job))
    key = (dist.get_world_size(), *(each if callable(each) else repr(each) for each in fields))
    if key not in _ON_CPU:
        _ON_CPU[key] = train(job, "cpu")
    return _ON_CPU[key]


def differences(found: Result, expected: Result, tolerance: float = 0.0) -> list[str]:
    """Each loss, norm and weight that is off by more than ``tolerance``; NaN always is."""
    lines = []
    for what in ("losses", "norms"):
        mine, theirs = getattr(found, what), getattr(expected, what)
        assert len(mine) == len(theirs)
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not abs(a - b) <= tolerance:
                lines.append(f"{what} {index}: {a}, expected {b}")
    assert found.weights.keys() == expected.weights.keys()
    for name, theirs in expected.weights.items():
        off = (found.weights[name].double() - theirs.double()).abs()
        if not (off <= tolerance).all():
            lines.append(f"{name}: off by {off.max():.1e}")
    return lines


def compare(job: Job, tolerance: float = 0.0, seed: int = 0, delay: float = 2e-4) -> list[str]:
    """Differences between the device, with delays drawn from ``seed``, and the CPU."""
    with random_delays(seed, delay):
        found = train(job, on.NAME)
    expected = on_cpu(job)
    return [f"rank {dist.get_rank()}: {line}" for line in differences(found, expected, tolerance)]


def random_delays(seed: int, delay: float = 2e-4) -> Any:
    """Delays drawn from ``seed`` and the rank, up to ``delay``, and ten times that for
    collectives."""
    seed = seed * dist.get_world_size() + dist.get_rank()
    return on.delays(delay, delay, 10 * delay, delay / 4, seed=seed)
