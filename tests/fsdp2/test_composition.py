"""``fully_shard`` with activation checkpointing, other meshes, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh

from fsdp_engine import fsdp2
from tests.fsdp2.programs import Layer, Log, batch, loss_of, parallelize, sgd, train, whole
from tests.fsdp2.scene import assert_alike, both, gradients, seeded
from tests.pool import on_ranks


@pytest.mark.parametrize("how", ["composable", "wrapper"])
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2)
def test_activation_checkpoints(how: str, reshards: bool) -> None:
    def script(api: Any) -> Log:
        model = seeded()
        if how == "wrapper":
            apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Layer))
        else:
            for layer in model.layers.values():
                checkpoint(layer)
        for layer in model.layers.values():
            api.fully_shard(layer, reshard_after_forward=reshards)
        api.fully_shard(model, reshard_after_forward=reshards)
        return train(model, sgd(model.parameters()), range(3), num_microbatches=2)

    both(script)


class Experts(nn.Module):
    """An expert of this rank and a layer that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.shared(x)))


@pytest.mark.thorough
@on_ranks(4)
def test_modules_of_one_model_on_other_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everybody = init_device_mesh("cpu", (4,))

    def script(api: Any) -> Any:
        torch.manual_seed(1)
        model = Experts()
        torch.manual_seed(2 + mesh.get_local_rank("ep"))
        model.expert.reset_parameters()
        api.fully_shard(model.expert, mesh=mesh["dp"])
        api.fully_shard(model, mesh=everybody)
        optimizer = sgd(model.parameters())
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(3, 8, generator=generator)).pow(2).mean().backward()
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert_alike(script)


@on_ranks(2)
def test_units_of_two_models_share_lanes_but_no_collective() -> None:
    """Teacher and student in one loss, with other units in between."""

    def script(api: Any) -> Any:
        teacher, student = seeded(), seeded()
        api.fully_shard(teacher.head)
        parallelize(api, student)
        api.fully_shard(teacher)
        tokens, targets = batch(0, 0, dist.get_rank())
        loss = (teacher(tokens) * student(tokens)).mean() + loss_of(student, tokens, targets)
        loss.backward()
        return gradients(teacher), gradients(student)

    assert_alike(script)
    tags = [
        buffer.spec.tag
        for model in (parallelize(fsdp2, seeded()), parallelize(fsdp2, seeded()))
        for module in model.modules()
        if (group := fsdp2.fully_shard.state(module)) is not None  # type: ignore[attr-defined]
        for buffer in group.unit.buffers
    ]
    assert len(set(tags)) == len(tags) - 2  # norm and head are two modules of one group


@pytest.mark.thorough
@on_ranks(2)
def test_compiled_layers() -> None:
    def script(api: Any) -> Any:
        model = seeded()
        for layer in model.layers.values():
            layer.compile(backend="eager")
        parallelize(api, model)
        for step in range(2):
            loss_of(model, *batch(step, 0, dist.get_rank())).backward()
        return {name: whole(param.grad) for name, param in model.named_parameters()}

    torch.testing.assert_close(script(fsdp2), script(fsdp), rtol=1e-4, atol=1e-6)
