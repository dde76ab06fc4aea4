"""State dicts and checkpoints of modules that ``fully_shard`` was called on; conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_engine import fsdp2
from tests.checkpoint.scene import shared_folder
from tests.fsdp2.programs import (
    APIS,
    Log,
    Model,
    adamw,
    batch,
    loss_of,
    on_meta,
    parallelize,
    seeded,
    train,
)
from tests.pool import on_ranks
from tests.reference import full

TOKENS, TARGETS = batch(0, 0, 0)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save(api: Any, folder: str) -> Log:
    """A checkpoint by DCP after two steps; the log of two more."""
    model = parallelize(api, seeded())
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, range(2, 4))


def resume(api: Any, folder: str) -> Log:
    model = parallelize(api, on_meta()).to_empty(device="cpu")
    model.init_weights()
    optimizer = adamw(model.parameters())
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, range(2, 4))


@on_ranks(2)
def test_checkpoints_go_from_one_to_the_other() -> None:
    folder = shared_folder()
    for name, other in (("fsdp2", "fsdp_engine"), ("fsdp_engine", "fsdp2")):
        expected = save(APIS[name], f"{folder}/{name}")
        assert resume(APIS[other], f"{folder}/{name}") == expected


@on_ranks(2)
def test_state_dicts_are_of_sharded_tensors_and_load() -> None:
    model = parallelize(fsdp2, seeded())
    state = model.state_dict()
    assert list(state) == list(seeded().state_dict())
    assert all(isinstance(each, DTensor) for each in state.values())
    loss_of(model, TOKENS, TARGETS).backward()
    other = parallelize(fsdp2, Model())
    other.load_state_dict(state)
    torch.testing.assert_close(other(TOKENS), model(TOKENS))
    # State dicts hold sharded tensors even while modules have full parameters.
    model.set_reshard_after_forward(False)
    loss = loss_of(model, TOKENS, TARGETS)
    assert all(isinstance(each, DTensor) for each in model.state_dict().values())
    loss.backward()


@on_ranks(2)
def test_full_state_dicts_are_loaded_from_the_first_rank() -> None:
    reference = seeded()
    model = parallelize(fsdp2, on_meta())
    model.embeddings.set_modules_to_forward_prefetch([model.layers["0"], model.layers["2"]])
    model.to_empty(device="cpu")
    model.angles.copy_(reference.angles)
    is_first = dist.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, reference.state_dict() if is_first else {}, options=options)
    torch.testing.assert_close(model(TOKENS), reference(TOKENS))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    if is_first:
        torch.testing.assert_close(found, dict(reference.state_dict()))


@on_ranks(2)
def test_conversions() -> None:
    model = parallelize(fsdp2, seeded())
    weight = model.head.weight
    assert model.to("cpu").cpu().float() is model
    assert model.head.weight is weight
    values = full(weight.detach())
    model.bfloat16()
    assert model.angles.dtype == model.head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(full(model.head.weight), values.bfloat16())
    with pytest.raises(ValueError, match="meta"):
        model.to("meta")
    model.float()
    assert model.head.weight is weight
    loss_of(model, TOKENS, TARGETS).backward()
    assert model.head.weight.grad is not None
    assert model.float() is model
    assert model.double().head.weight.grad.dtype == torch.float64
    assert isinstance(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), DTensor)
    loss_of(model, TOKENS, TARGETS).backward()
    torch.testing.assert_close(full(weight.detach()).bfloat16(), values.bfloat16())


@on_ranks(2)
def test_meta_parameters_are_looked_at_and_moved() -> None:
    model = parallelize(fsdp2, on_meta())
    sizes = {name: param.shape for name, param in model.named_parameters()}
    assert sizes == {name: param.shape for name, param in on_meta().named_parameters()}
    assert all(isinstance(each, DTensor) for each in model.parameters())
    with pytest.raises(NotImplementedError, match="meta"):
        model.to("cpu")
    assert all(each.is_meta for each in model.parameters())
    for move, device in (
        (lambda: model.to(torch.bfloat16), "meta"),
        (lambda: model.to_empty(device="cpu"), "cpu"),
    ):
        move()
        found = {(each.dtype, each.device.type) for each in model.parameters()}
        assert found == {(torch.bfloat16, device)}
    model.init_weights()
    assert all(bool(full(each).isfinite().all()) for each in model.parameters())
