"""Faults of other implementations, each shown to be absent by a test that is named after it.

Gradients are inputs, wherever that is enough (:class:`Dot`): a factor that is lost shows exactly.
Elsewhere: NaN checks that never run for levels 2 and 3 (``tests/extensions/checks``), param groups
that are flattened into one (``tests/optim``).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.strategies import Role, Strategy
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Layers, config_of, train_wrapped
from tests.models import Chain, vector_batch
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.training import mesh_of

NUMEL = 256


class Dot(nn.Module):
    """The gradient of ``weight`` is the input itself."""

    def __init__(self, mark: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))
        for name, value in (mark or {}).items():
            setattr(self.weight, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def values(number: float) -> torch.Tensor:
    """An input that tells ranks apart: powers of two, so that sums are exact."""
    return torch.full((NUMEL,), number * 2.0 ** dist.get_rank()) + torch.arange(NUMEL)


def mean_of(numbers: list[float]) -> torch.Tensor:
    """Sums over microbatches of means over ranks of :func:`values`."""
    size = dist.get_world_size()
    mean = sum(n * 2.0**rank for n in numbers for rank in range(size)) / size
    return torch.full((NUMEL,), mean) + len(numbers) * torch.arange(NUMEL)


def assert_accumulates(
    ddp: fe.DistributedDataParallel, numbers: list[float], timeline: Timeline | None = None
) -> None:
    """A step of one microbatch for each number has the exact gradient, norm and update."""
    (param,) = ddp.parameters()
    before = reference.full(param)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    batches = ((len(numbers) * values(n),) for n in numbers)
    timed_step(ddp, optimizer, timeline or Timeline(), *batches)
    expected = mean_of(numbers)
    assert param.grad is not None
    assert torch.equal(reference.full(param.grad), expected)
    norm = ddp.engine.clip_grad_norm_(float("inf"))
    torch.testing.assert_close(norm, expected.norm(), rtol=1e-6, atol=0.0)
    assert torch.equal(reference.full(param), before - 0.5 * expected)


@on_ranks(world_size=1)
def test_gradients_doubled_per_microbatch_when_a_group_has_one_rank() -> None:
    for level, overlap, mesh in itertools.product(
        LEVEL_NAMES, (False, True), (None, mesh_of(1, 1))
    ):
        ddp = fe.DistributedDataParallel(Dot(), config_of(level, overlap=overlap), mesh)
        for numbers in ([1.0], [1.0, 2.0, 4.0]):
            assert_accumulates(ddp, numbers)


@on_ranks(world_size=2)
def test_gradients_doubled_per_microbatch_when_one_of_two_axes_has_one_rank() -> None:
    for level, shape in itertools.product(LEVEL_NAMES, ((2, 1), (1, 2))):
        ddp = fe.DistributedDataParallel(Dot(), config_of(level), mesh_of(*shape))
        assert_accumulates(ddp, [1.0, 2.0, 4.0])


@on_ranks(world_size=4)
def test_one_over_dp_lost_or_only_the_last_microbatchs_gradient_kept_in_hfsdp() -> None:
    for (inner, outer), overlap in itertools.product(FEW_PAIRS, (False, True)):
        config = config_of(inner, outer, overlap=overlap)
        ddp = fe.DistributedDataParallel(Dot(), config, mesh_of(2, 2))
        assert ddp.engine.strategy == Strategy.from_names(inner, outer)
        num_shards = (inner != "no_shard") + (outer != "no_shard")
        assert ddp.engine.strategy.depth(Role.OPTIM) == num_shards
        for numbers in ([1.0], [1.0, 8.0, 64.0]):
            assert_accumulates(ddp, numbers)


@on_ranks(world_size=4)
def test_hsdp_without_overlap_is_not_reduced_over_the_outer_axis() -> None:
    for inner in LEVEL_NAMES:
        ddp = fe.DistributedDataParallel(Dot(), config_of(inner, overlap=False), mesh_of(2, 2))
        timeline = Timeline()
        assert_accumulates(ddp, [1.0, 1.0], timeline)
        outer = [(phase, what) for phase, what in timeline.events if what.endswith("+outer")]
        # Once, whatever the number of microbatches, when the user asks for final gradients.
        assert outer == [("finish", "all-reduce of the root module+outer")]


@on_ranks(world_size=4)
def test_expert_gradients_scaled_wrongly_when_averaging_in_the_collective() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    experts = DeviceMesh.from_group(group, "cpu")
    mesh = DeviceMesh("cpu", list(range(4)))

    class Both(Dot):
        def __init__(self) -> None:
            super().__init__()
            self.expert = Dot({"allreduce": False})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.expert(x)

    # A rank's loss is a mean over its own tokens, but an expert gets those of two ranks: its
    # gradient is a sum over the two that share it, over all four.
    expected = {
        "weight": (1.0 + 2.0 + 4.0 + 8.0) / 4 * torch.ones(NUMEL),
        "expert.weight": (1.0 + 4.0 if rank % 2 == 0 else 2.0 + 8.0) / 4 * torch.ones(NUMEL),
    }
    for level, average in itertools.product(LEVEL_NAMES, (False, True)):
        config = config_of(level, average_in_collective=average)
        ddp = fe.DistributedDataParallel(Both(), config, mesh, expert_mesh=experts)
        ddp.zero_grad_buffer()
        ddp(torch.full((NUMEL,), 2.0**rank)).backward()
        ddp.finish_grad_sync()
        for name, gradient in reference.full_gradients(ddp.module).items():
            assert gradient is not None
            assert torch.equal(gradient, expected[name]), (level, name, average)


@on_ranks(world_size=2)
def test_optimizer_state_initialised_by_a_fake_step_that_counts() -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, eps=1e-3)

    folder = shared_folder()
    data = reference.make_data(vector_batch, 3, 1, 2)
    for level, wrap in itertools.product(LEVEL_NAMES, (False, True)):
        model = Chain(nn.Linear(12, 12))
        expected = reference.train(copy.deepcopy(model), data, adamw)
        ddp, other = (
            fe.DistributedDataParallel(each, config_of(level))
            for each in (model, Chain(nn.Linear(12, 12)))
        )
        optimizer, fresh = adamw(ddp.parameters()), adamw(other.parameters())
        if wrap:
            fe.shard_optimizer(optimizer)
            fe.shard_optimizer(fresh)
        # Nothing counts before the first step; AdamW's bias correction shows a count that is off.
        assert not dict(optimizer.state)
        for number, step in enumerate(data):
            (found,) = train_wrapped(ddp, [step], lambda _, optimizer=optimizer: optimizer)
            assert not reference.differences([found], [expected[number]], 2e-5)
            steps = {int(state["step"]) for state in optimizer.state.values()}
            assert steps == {number + 1}, (level, wrap)
        path = f"{folder}/{level}-{wrap}"
        fe.save_checkpoint(path, ddp.engine, optimizer)
        fe.load_checkpoint(path, other.engine, fresh)
        assert {int(state["step"]) for state in fresh.state.values()} == {3}


@on_ranks(world_size=2)
def test_one_parameter_without_a_gradient_silently_stops_the_units_reduction() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # All in the root's unit, or in one bucket.
            self.used, self.other = Dot(), Dot()
            self.idle = nn.Parameter(torch.zeros(NUMEL))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.used(x) + (self.other(x) if both else 0.0)

    for level, overlap in itertools.product(LEVEL_NAMES, (False, True)):
        ddp = fe.DistributedDataParallel(Three(), config_of(level, overlap=overlap))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        # `idle` never gets a gradient; `other` does on one rank alone.
        timed_step(ddp, optimizer, Timeline(), (values(1.0), dist.get_rank() == 1))
        grads = reference.full_gradients(ddp.module)
        assert grads.pop("idle") is None
        expected = {
            "used.weight": mean_of([1.0]),
            "other.weight": (torch.full((NUMEL,), 2.0) + torch.arange(NUMEL)) / 2,
        }
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert grad is not None
            assert torch.equal(grad, expected[name]), (level, name, overlap)


@on_ranks(world_size=2)
def test_loaded_weights_that_take_effect_only_after_the_next_step() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    for level, dtype, overlap in itertools.product(
        LEVEL_NAMES, (torch.float32, torch.bfloat16), (False, True)
    ):
        config = config_of(level, overlap=overlap, bucket_size=70)
        ddp, third = (fe.DistributedDataParallel(Layers(8, 3).to(dtype), config) for _ in range(2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, Timeline(), (x.to(dtype),))
        before = ddp(x.to(dtype))
        other = Layers(8, 3).to(dtype)
        expected = other(x.to(dtype))
        assert not torch.equal(before, expected)
        ddp.load_state_dict({name: value.float() for name, value in other.state_dict().items()})
        assert torch.equal(ddp(x.to(dtype)), expected), (level, dtype, overlap)
        # As sharded values, and through the module's own method.
        third(x.to(dtype))
        third.module.load_state_dict(ddp.state_dict())
        assert torch.equal(third(x.to(dtype)), expected), (level, dtype, overlap)
