"""Modules of ``fully_shard`` in programs that test for torch's own classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp_engine import fsdp2
from tests.pool import Ranks, on_ranks


def test_every_method_of_torchs_class_is_overridden() -> None:
    own = vars(fsdp2.FSDPModule)
    missing = [
        name
        for name, value in vars(torch_fsdp.FSDPModule).items()
        if callable(value) and name not in own
    ]
    assert missing == []


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
def test_isinstance_holds_for_torchs_class(ranks: Ranks, world_size: int) -> None:
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


@on_ranks(2)
def test_functions_of_torch_take_the_modules() -> None:
    """``register_fsdp_forward_method`` and ``share_comm_ctx``, imported from torch."""
    found = []
    for shard in (torch_fsdp.fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        model.logits = lambda x, model=model: model[1](model[0](x)) * 2
        shard(model[0])
        shard(model, mp_policy=torch_fsdp.MixedPrecisionPolicy(output_dtype=torch.float64))
        torch_fsdp.share_comm_ctx([model, model[0]])
        torch_fsdp.register_fsdp_forward_method(model, "logits")
        for _ in range(2):
            output = model.logits(torch.ones(1, 8))
            output.sum().backward()
        found.append([output, *(param.grad.full_tensor() for param in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
