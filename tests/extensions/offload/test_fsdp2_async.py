"""FSDP2's offload policy on the device: the engine's ``fully_shard`` against torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from fsdp_engine import fsdp2
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.fsdp2_model import OnDevice
from tests.async_device.scene import random_delays
from tests.fsdp2 import programs
from tests.pool import on_ranks

ranks = device.ranks


def offloaded(
    api: Any, offloads: str, on_meta: bool, pins: bool
) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer. The layers, or the whole model, have FSDP2's offload."""
    torch.manual_seed(3)
    on_cpu = programs.Model()
    on_cpu.init_weights()
    with torch.device("meta" if on_meta else "cpu"):
        model = OnDevice()
    if not on_meta:
        model.load_state_dict(on_cpu.state_dict())
        model.to(on.DEVICE)
    mesh = dist.init_device_mesh(on.NAME, (dist.get_world_size(),))
    policy = fsdp.CPUOffloadPolicy(pin_memory=pins)
    for layer in model.layers.values():
        api.fully_shard(layer, mesh=mesh, offload_policy=policy)
    rest = {"offload_policy": policy} if offloads == "all" else {}
    api.fully_shard(model, mesh=mesh, **rest)
    if on_meta:
        model.to_empty(device="cpu")
        for module, there in zip(model.modules(), on_cpu.modules(), strict=True):
            for name, buffer in there._buffers.items():
                assert buffer is not None
                module._buffers[name] = buffer.to(on.DEVICE)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, on_cpu.state_dict(), options=options)
    # One parameter group for each device, as torch's foreach steps need.
    params = sorted(model.parameters(), key=lambda param: param.device.type)
    groups = itertools.groupby(params, lambda param: param.device.type)
    return model, torch.optim.AdamW([{"params": list(each)} for _, each in groups], lr=1e-2)


@pytest.mark.parametrize(
    ("offloads", "on_meta", "pins"),
    [
        ("all", True, False),
        ("layers", False, True),
        *(
            pytest.param("all", *each, marks=pytest.mark.thorough)
            for each in ((False, True), (False, False), (True, True))
        ),
    ],
)
@on_ranks(2)
def test_fsdp2s_offload_trains_as_torchs(offloads: str, on_meta: bool, pins: bool) -> None:
    logs = []
    for api in (fsdp2, fsdp):
        with random_delays(seed=1):
            model, optimizer = offloaded(api, offloads, on_meta, pins)
            logs.append(programs.train(model, optimizer, range(3)))
            saved = get_model_state_dict(model)
        for name, param in model.named_parameters():
            is_offloaded = offloads == "all" or "layers" in name
            assert param.device.type == ("cpu" if is_offloaded else on.NAME)
            assert saved[name].device.type == param.device.type
            if is_offloaded:
                assert param.to_local().is_pinned() == pins
        for state in optimizer.state.values():
            assert state["exp_avg"].device.type in ("cpu", on.NAME)
    assert logs[0] == logs[1]


@on_ranks(2)
def test_a_change_of_what_was_on_the_meta_device_waits_for_gathers() -> None:
    found = []
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else on.DEVICE):
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = dist.init_device_mesh(on.NAME, (2,))
        fsdp2.fully_shard(model, mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy())
        if on_meta:
            model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
        x = torch.ones(2, 4).to(on.DEVICE)
        model(x)
        with on.delays(copy=2e-2):
            output = model(x)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2.0)
        found.append(output.detach().cpu())
    assert torch.equal(*found)


@on_ranks(2)
def test_fsdp2s_offload_needs_sharded_parameters() -> None:
    linear = nn.Linear(4, 4).to(on.NAME)
    mesh = dist.init_device_mesh(on.NAME, (2,))
    policy = fsdp.CPUOffloadPolicy()
    with pytest.raises(ValueError, match=r"offload.main_weights: .*of Linear that are not part"):
        fsdp2.fully_shard(linear, mesh=mesh, offload_policy=policy, strategy="optim_grads")
    assert type(linear) is nn.Linear
