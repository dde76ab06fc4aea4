"""State dicts and checkpoints of modules that ``fully_shard`` was called on; conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_engine import fsdp2
from tests.fsdp2.programs import APIS, Model, adamw, batch, loss_of, parallelize, train, whole
from tests.fsdp2.scene import on_meta, seeded
from tests.pool import Ranks, on_ranks


def continued(api_name: str, other_name: str, folder: str) -> Any:
    """Two steps with one, saved with DCP, loaded by the other, two more steps."""
    api = APIS[api_name]
    model = parallelize(api, seeded())
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    other = APIS[other_name]
    model = parallelize(other, on_meta())
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = adamw(model.parameters())
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    log = train(model, optimizer, range(2, 4))
    return log.losses, log.norms, log.weights


@pytest.mark.parametrize("other", APIS)
@pytest.mark.parametrize("api", APIS)
def test_checkpoints_go_from_one_to_the_other(
    api: str, other: str, ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(continued, api, other, str(tmp_path / "a"), world_size=2)[0]
    expected = ranks.run(continued, "fsdp2", "fsdp2", str(tmp_path / "b"), world_size=2)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_state_dicts_are_of_sharded_tensors_and_load() -> None:
    model = parallelize(fsdp2, seeded())
    names = list(seeded().state_dict())
    state = model.state_dict()
    assert list(state) == names
    assert all(isinstance(each, DTensor) for each in state.values())
    loss_of(model, *batch(0, 0, 0)).backward()
    other = parallelize(fsdp2, Model())
    other.load_state_dict(state)
    tokens = batch(0, 0, 0)[0]
    torch.testing.assert_close(other(tokens), model(tokens))
    # Also while full parameters are installed.
    model.set_reshard_after_forward(False)
    loss = loss_of(model, *batch(0, 0, 0))
    assert all(isinstance(each, DTensor) for each in model.state_dict().values())
    loss.backward()


@on_ranks(2)
def test_full_state_dicts_are_loaded_from_the_first_rank() -> None:
    reference = seeded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = parallelize(fsdp2, on_meta())
    model.embeddings.set_modules_to_forward_prefetch([model.layers["0"], model.layers["2"]])
    model.to_empty(device="cpu")
    model.angles.copy_(reference.angles)
    set_model_state_dict(
        model, reference.state_dict() if dist.get_rank() == 0 else {}, options=options
    )
    tokens = batch(0, 0, 0)[0]
    torch.testing.assert_close(model(tokens), reference(tokens))
    found = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, dict(reference.state_dict()))


@on_ranks(2)
def test_conversions() -> None:
    model = parallelize(fsdp2, seeded())
    assert model.to("cpu") is model
    assert model.cpu().float() is model
    weight = model.head.weight
    assert model.float().head.weight is weight
    values = whole(weight.detach())
    model.bfloat16()
    assert model.angles.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(whole(model.head.weight), values.bfloat16())
    with pytest.raises(ValueError, match="meta"):
        model.to("meta")
    model.float()
    assert model.head.weight is weight
    loss_of(model, *batch(0, 0, 0)).backward()
    assert model.head.weight.grad is not None
    assert model.float() is model
    assert model.double().head.weight.grad.dtype == torch.float64
    torch.testing.assert_close(whole(weight.detach()).bfloat16(), values.bfloat16())


@on_ranks(2)
def test_training_continues_in_another_dtype() -> None:
    """Also where it was begun: FSDP2's own gathers fail then, so plain torch has the reference."""

    def script(model: Any) -> list[float]:
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step, dtype in enumerate([torch.float64, torch.float64, torch.float32, torch.float64]):
            model.to(dtype)
            loss = loss_of(model, *batch(step, 0, 0))  # the same on all ranks
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    found = script(parallelize(fsdp2, seeded()))
    torch.testing.assert_close(found, script(seeded()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_meta_parameters_are_looked_at_and_moved() -> None:
    model = parallelize(fsdp2, on_meta())
    sizes = {name: param.shape for name, param in model.named_parameters()}
    assert sizes == {name: param.shape for name, param in Model().named_parameters()}
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert sum(each.numel() for each in model.parameters()) > 0
    with pytest.raises(NotImplementedError, match="meta"):
        model.to("cpu")
    assert all(each.is_meta for each in model.parameters())
    model.to(torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    model.to_empty(device="cpu")
    assert {(each.dtype, each.device.type) for each in model.parameters()} == {
        (torch.bfloat16, "cpu")
    }
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            layer.reset_parameters()
    assert all(bool(whole(each).isfinite().all()) for each in model.head.parameters())


@on_ranks(2)
def test_tensors_are_distributed_by_placements_and_assigned() -> None:
    """Load a full checkpoint into a model on the meta device, as in tutorials."""
    reference = seeded()
    for model in (parallelize(fsdp2, on_meta()), parallelize(fsdp2, Model())):
        state = {
            name: distribute_tensor(value, param.device_mesh, param.placements)
            for (name, param), value in zip(
                model.named_parameters(), reference.state_dict().values(), strict=True
            )
        }
        model.load_state_dict(state, assign=True)
        model.angles = reference.angles
        tokens, targets = batch(0, 0, 0)
        torch.testing.assert_close(model(tokens), reference(tokens))
        loss_of(model, tokens, targets).backward()
        for name, param in model.named_parameters():
            assert isinstance(param.grad, DTensor), name
            whole = reference.get_parameter(name).detach()
            local = distribute_tensor(whole, param.device_mesh, param.placements)
            torch.testing.assert_close(param.to_local(), local.to_local(), rtol=0, atol=0)
            torch.testing.assert_close(local.full_tensor(), whole, rtol=0, atol=0)
