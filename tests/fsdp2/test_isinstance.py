"""Modules of ``fully_shard`` beside programs that test for torch's own classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp_engine import fsdp2
from tests.pool import Ranks


def test_every_public_method_of_torchs_class_is_overridden() -> None:
    own = vars(fsdp2.FSDPModule)
    missing = [
        name
        for name, value in vars(torch_fsdp.FSDPModule).items()
        if callable(value) and name not in own
    ]
    assert missing == ["_get_fsdp_state"]


def _gradients_without_division() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    found = 0
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            found += 1
    assert found == 2
    assert type(model)(nn.ReLU()).__class__ is nn.Sequential
    model(torch.ones(1, 8)).sum().backward()
    return model[1].bias.grad.full_tensor().item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_programs_that_ask_for_torchs_class_find_the_modules(ranks: Ranks, world_size: int) -> None:
    found = ranks.run(_gradients_without_division, world_size=world_size)
    assert found == [float(world_size)] * world_size


def _handle_is_torchs() -> bool:
    model = nn.Linear(8, 8)
    fsdp2.fully_shard(model)
    handle = model.unshard(async_op=True)
    handle.wait()
    return isinstance(handle, torch_fsdp.UnshardHandle)


def test_the_handle_of_unshard_is_one_of_torchs(ranks: Ranks) -> None:
    assert all(ranks.run(_handle_is_torchs, world_size=2))
