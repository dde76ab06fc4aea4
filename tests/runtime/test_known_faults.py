"""Faults of other implementations of the wrapper, each shown to be absent by a test named after it.

Others: gradients of one rank alone (``tests/megatron``), of experts and of parameters without a
gradient (``tests/units``), optimizer state made by a fake step (``tests/optim``).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from tests import reference
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Layers, config_of
from tests.models import Dot
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.training import mesh_of

NUMEL = 256


def assert_accumulates(ddp: fe.DistributedDataParallel, *numbers: float) -> None:
    """A step of one microbatch for each number has the exact gradient, norm and update."""
    (param,) = ddp.parameters()
    before = reference.full(param)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    # Inputs tell ranks apart: powers of two, so that sums are exact.
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [(len(numbers) * (n * 2.0**rank + torch.arange(NUMEL)),) for n in numbers]
    timed_step(ddp, optimizer, Timeline(), *batches)
    mean = sum(n * 2.0**each for n in numbers for each in range(size)) / size
    expected = mean + len(numbers) * torch.arange(NUMEL)
    assert param.grad is not None
    assert torch.equal(reference.full(param.grad), expected)
    norm = ddp.engine.clip_grad_norm_(float("inf"))
    torch.testing.assert_close(norm, expected.norm(), rtol=1e-6, atol=0.0)
    assert torch.equal(reference.full(param), before - 0.5 * expected)


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(4)
def test_one_over_dp_lost_or_only_the_last_microbatchs_gradient_kept_in_hfsdp(
    overlap: bool,
) -> None:
    for pair in FEW_PAIRS:
        config = config_of(*pair, overlap=overlap)
        ddp = fe.DistributedDataParallel(Dot(NUMEL), config, mesh_of(2, 2))
        assert_accumulates(ddp, 1.0)
        assert_accumulates(ddp, 1.0, 8.0, 64.0)
    for shape in ((4, 1), (1, 4)):  # gradients doubled on an axis of one rank
        config = config_of("optim_grads_params", overlap=overlap)
        ddp = fe.DistributedDataParallel(Dot(NUMEL), config, mesh_of(*shape))
        assert_accumulates(ddp, 1.0, 2.0, 4.0)


@on_ranks(2)
def test_loaded_weights_that_take_effect_only_after_the_next_step() -> None:
    for level, dtype, overlap in itertools.product(
        LEVEL_NAMES, (torch.float32, torch.bfloat16), (False, True)
    ):
        x = torch.randn(2, 8).to(dtype)
        config = config_of(level, overlap=overlap, bucket_size=70)
        ddp, third = (fe.DistributedDataParallel(Layers(8, 3).to(dtype), config) for _ in range(2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, Timeline(), (x,))
        before = ddp(x)
        other = Layers(8, 3).to(dtype)
        expected = other(x)
        assert not torch.equal(before, expected)
        ddp.load_state_dict({name: value.float() for name, value in other.state_dict().items()})
        assert torch.equal(ddp(x), expected), (level, dtype, overlap)
        # As sharded values, and through the module's own method.
        third(x)
        third.module.load_state_dict(ddp.state_dict())
        assert torch.equal(third(x), expected), (level, dtype, overlap)
