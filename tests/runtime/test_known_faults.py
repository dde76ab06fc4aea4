"""Ten faults of other implementations, each shown to be absent by a test that is named after it.

Gradients are inputs, wherever that is enough (:class:`Dot`): a factor that is lost shows exactly.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.strategies import Role, Strategy
from tests import reference
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Layers, config_of, train_wrapped
from tests.models import DIM, Regression, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
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


def gradient_of(ddp: fe.DistributedDataParallel) -> torch.Tensor:
    (param,) = ddp.parameters()
    assert param.grad is not None
    return reference.full(param.grad)


def values(number: float) -> torch.Tensor:
    """An input that tells ranks apart: powers of two, so that sums are exact."""
    return torch.full((NUMEL,), number * 2.0 ** dist.get_rank()) + torch.arange(NUMEL)


def accumulate(ddp: fe.DistributedDataParallel, numbers: list[float]) -> None:
    """A step of one microbatch for each number."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    timed_step(ddp, optimizer, Timeline(), *((len(numbers) * values(n),) for n in numbers))


def mean_of(numbers: list[float], world_size: int) -> torch.Tensor:
    """What :func:`accumulate` must give: sums over microbatches of means over ranks."""
    ranks = range(world_size)
    mean = sum(n * 2.0**rank for n in numbers for rank in ranks) / world_size
    return torch.full((NUMEL,), mean) + len(numbers) * torch.arange(NUMEL)


@on_ranks(world_size=1)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_gradients_doubled_per_microbatch_when_a_group_has_one_rank(level: str) -> None:
    for overlap, mesh in itertools.product((False, True), (None, mesh_of(1, 1))):
        ddp = fe.DistributedDataParallel(Dot(), config_of(level, overlap=overlap), mesh)
        for numbers in ([1.0], [1.0, 2.0, 4.0]):
            accumulate(ddp, numbers)
            assert torch.equal(gradient_of(ddp), mean_of(numbers, 1)), (overlap, numbers)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_gradients_doubled_per_microbatch_when_one_of_two_axes_has_one_rank(level: str) -> None:
    for shape in ((2, 1), (1, 2)):
        ddp = fe.DistributedDataParallel(Dot(), config_of(level), mesh_of(*shape))
        accumulate(ddp, [1.0, 2.0, 4.0])
        assert torch.equal(gradient_of(ddp), mean_of([1.0, 2.0, 4.0], 2)), shape


@on_ranks(world_size=4)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_expert_gradients_scaled_wrongly_when_averaging_in_the_collective(level: str) -> None:
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
    for average in (False, True):
        config = config_of(level, average_in_collective=average)
        ddp = fe.DistributedDataParallel(Both(), config, mesh, expert_mesh=experts)
        ddp.zero_grad_buffer()
        ddp(torch.full((NUMEL,), 2.0**rank)).backward()
        ddp.finish_grad_sync()
        for name, param in ddp.module.named_parameters():
            assert param.grad is not None
            assert torch.equal(reference.full(param.grad), expected[name]), (name, average)


@on_ranks(world_size=4)
@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_one_over_dp_lost_in_hfsdp(inner: str, outer: str) -> None:
    ddp = fe.DistributedDataParallel(Dot(), config_of(inner, outer), mesh_of(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    expected = mean_of([1.0], 4)
    timed_step(ddp, optimizer, Timeline(), (values(1.0),))
    assert torch.equal(gradient_of(ddp), expected)
    norm = ddp.engine.clip_grad_norm_(float("inf"))
    torch.testing.assert_close(norm, expected.norm(), rtol=1e-6, atol=0.0)
    assert torch.equal(ddp.engine.full_tensor("weight"), -0.5 * expected)


@on_ranks(world_size=4)
@pytest.mark.parametrize("inner", LEVEL_NAMES)
def test_hsdp_without_overlap_is_not_reduced_over_the_outer_axis(inner: str) -> None:
    ddp = fe.DistributedDataParallel(Dot(), config_of(inner, overlap=False), mesh_of(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    timeline = Timeline()
    timed_step(ddp, optimizer, timeline, (values(1.0),), (values(1.0),))
    assert torch.equal(gradient_of(ddp), 0.5 * mean_of([1.0, 1.0], 4))
    outer = [(phase, what) for phase, what in timeline.events if what.endswith("+outer")]
    # Once, whatever the number of microbatches, when the user asks for final gradients.
    assert outer == [("finish", "all-reduce of the root module+outer")]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
def test_nan_checks_that_never_run_for_levels_2_and_3(level: str) -> None:
    for overlap, position in itertools.product((False, True), range(2)):
        config = config_of(level, overlap=overlap, check_for_nan_in_grad=True)
        ddp = fe.DistributedDataParallel(Dot(), config)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        batches = [(values(1.0),), (values(1.0),)]
        if dist.get_rank() == 1:
            batches[position][0][-1] = float("nan")
        with pytest.raises(RuntimeError, match=r"weight \(data-parallel rank 1\)"):
            timed_step(ddp, optimizer, Timeline(), *batches)
        assert not ddp.engine.full_tensor("weight").any()


def step_counter(folder: str) -> None:
    data = reference.make_data(vector_batch, 3, 1, 2)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, eps=1e-3)

    class Linear(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    for level, wrap in itertools.product(LEVEL_NAMES, (False, True)):
        model = Linear()
        expected = reference.train(copy.deepcopy(model), data, adamw)
        ddp = fe.DistributedDataParallel(model, config_of(level))
        optimizer = adamw(ddp.parameters())
        if wrap:
            fe.shard_optimizer(optimizer)
        # Nothing counts before the first step; AdamW's bias correction shows a count that is off.
        assert not dict(optimizer.state)
        for number, step in enumerate(data):
            (found,) = train_wrapped(ddp, [step], lambda _, optimizer=optimizer: optimizer)
            assert not reference.differences([found], [expected[number]], 2e-5)
            steps = {int(state["step"]) for state in optimizer.state.values()}
            assert steps == {number + 1}, (level, wrap)
        path = f"{folder}/{level}-{wrap}"
        fe.save_checkpoint(path, ddp.engine, optimizer)
        other = fe.DistributedDataParallel(Linear(), config_of(level))
        fresh = adamw(other.parameters())
        if wrap:
            fe.shard_optimizer(fresh)
        fe.load_checkpoint(path, other.engine, fresh)
        assert {int(state["step"]) for state in fresh.state.values()} == {3}
        # An optimizer that has never stepped is saved and loaded as one.
        unused = adamw(other.parameters())
        fe.save_checkpoint(path, other.engine, unused)
        fe.load_checkpoint(path, ddp.engine, optimizer)
        assert not [s for s in optimizer.state.values() if int(s.get("step", 0))]


def test_optimizer_state_initialised_by_a_fake_step_that_counts(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(step_counter, str(tmp_path), world_size=2)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_optimizer_param_groups_flattened_into_one(level: str) -> None:
    def grouped(module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.3},
                {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.5},
            ],
            lr=0.01,
        )

    for wrap in (False, True):
        model = Layers(8, 2)
        alone = copy.deepcopy(model)
        plain = grouped(alone)
        ddp = fe.DistributedDataParallel(model, config_of(level))
        optimizer = grouped(ddp.module)
        if wrap:
            fe.shard_optimizer(optimizer)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            timed_step(ddp, optimizer, Timeline(), (x,))
            plain.zero_grad()
            alone(x).backward()
            plain.step()
            plain.param_groups[1]["lr"] *= 2.0  # a scheduler, group by group
            optimizer.param_groups[1]["lr"] *= 2.0
        found = ddp.engine.full_state_dict()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-5)
        keys = ("lr", "weight_decay")
        hyper = [[group[key] for key in keys] for group in optimizer.param_groups]
        assert hyper == [[0.3, 0.0], [0.04, 0.5]]
        saved = optimizer.state_dict()["param_groups"]
        assert [[group[key] for key in keys] for group in saved] == hyper
        assert [len(group["params"]) for group in saved] == [2, 2]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_one_parameter_without_a_gradient_silently_stops_the_units_reduction(level: str) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # All in the root's unit, or in one bucket.
            self.used, self.other = Dot(), Dot()
            self.idle = nn.Parameter(torch.zeros(NUMEL))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.used(x) + (self.other(x) if both else 0.0)

    for overlap in (False, True):
        ddp = fe.DistributedDataParallel(Three(), config_of(level, overlap=overlap))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        # `idle` never gets a gradient; `other` does on one rank alone.
        timed_step(ddp, optimizer, Timeline(), (values(1.0), dist.get_rank() == 1))
        grads = dict(ddp.module.named_parameters())
        assert grads["idle"].grad is None
        for name, expected in (
            ("used.weight", mean_of([1.0], 2)),
            ("other.weight", (torch.full((NUMEL,), 2.0) + torch.arange(NUMEL)) / 2),
        ):
            grad = grads[name].grad
            assert grad is not None
            assert torch.equal(reference.full(grad), expected), (name, overlap)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_loaded_weights_that_take_effect_only_after_the_next_step(level: str) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    for dtype, overlap in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        ddp = fe.DistributedDataParallel(
            Layers(8, 3).to(dtype), config_of(level, overlap=overlap, bucket_size=70)
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, Timeline(), (x.to(dtype),))
        before = ddp(x.to(dtype))
        other = Layers(8, 3).to(dtype)
        expected = other(x.to(dtype))
        assert not torch.equal(before, expected)
        ddp.load_state_dict({name: value.float() for name, value in other.state_dict().items()})
        assert torch.equal(ddp(x.to(dtype)), expected), (dtype, overlap)
        # As sharded values, and through the module's own method.
        loaded = ddp.state_dict()
        third = fe.DistributedDataParallel(
            Layers(8, 3).to(dtype), config_of(level, overlap=overlap, bucket_size=70)
        )
        third(x.to(dtype))
        third.module.load_state_dict(loaded)
        assert torch.equal(third(x.to(dtype)), expected), (dtype, overlap)


@on_ranks(world_size=4)
@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_only_the_last_microbatchs_gradient_kept_under_hybrid_sharding(
    inner: str, outer: str
) -> None:
    numbers = [1.0, 8.0, 64.0]
    for overlap in (False, True):
        config = config_of(inner, outer, overlap=overlap)
        ddp = fe.DistributedDataParallel(Dot(), config, mesh_of(2, 2))
        assert ddp.engine.strategy == Strategy.from_names(inner, outer)
        assert ddp.engine.strategy.depth(Role.OPTIM) == (inner != "no_shard") + (
            outer != "no_shard"
        )
        accumulate(ddp, numbers)
        assert torch.equal(gradient_of(ddp), mean_of(numbers, 4)), overlap
