"""Owners with the interfaces of torch around an optimizer."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_engine as fe
from fsdp_engine.checkpoint.joint_optimizer import join_optimizers
from fsdp_engine.fsdp2 import fully_shard
from fsdp_engine.optim.state_leaves import leaves_of
from tests.extensions.whole_tensor_optimizers.owned import (
    MAKERS,
    Coupled,
    Whitening,
    assert_close,
    inputs,
    make,
    matrices,
    mine,
    plain_model,
    train,
    trained,
    values,
)
from tests.pool import on_few_ranks, on_ranks

LEVEL = ("optim_grads_params", "no_shard")
SOME = ["Muon", "Whitening"]


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("full_state", [False, True])
@on_ranks(2)
def test_torchs_state_dict_functions(full_state: bool, name: str) -> None:
    model, _, optimizer = make(LEVEL, name)
    train(model, optimizer, range(2), sharded=True)
    options = StateDictOptions(full_state_dict=full_state, cpu_offload=full_state)
    packed = get_optimizer_state_dict(model, optimizer, options=options)
    weights = get_model_state_dict(model, options=options)
    reference = plain_model()
    plain = MAKERS[name](reference)
    train(reference, plain, range(2), sharded=False)
    if not full_state or dist.get_rank() == 0:
        expected = get_optimizer_state_dict(reference, plain)
        assert packed["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            found = [full(leaf) for leaf in leaves_of(packed["state"][key])]
            for one, other in zip(found, leaves_of(state), strict=True):
                if isinstance(other, Tensor):
                    assert_close([one], [other], name)
                else:
                    assert one == other
    again, _, other = make(LEVEL, name)
    options = StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=full_state)
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, other, packed, options=options)
    train(again, other, range(2, 4), sharded=True)
    assert_close(values(again), trained(name), name)


@pytest.mark.parametrize("name", SOME)
@on_few_ranks
def test_a_grad_scaler_unscales_and_skips(name: str) -> None:
    found = []
    for sharded in (True, False):
        if sharded:
            model, _, optimizer = make(LEVEL, name)
        else:
            model = plain_model()
            optimizer = MAKERS[name](model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            batch = mine(inputs(step)) if sharded else inputs(step)
            loss = model(batch).square().mean()
            if step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
        found.append(values(model))
    assert_close(found[0], found[1], name)


@pytest.mark.parametrize("name", SOME)
@on_few_ranks
def test_groups_are_added_and_parameters_frozen(name: str) -> None:
    found = []
    for sharded in (True, False):
        model = plain_model()
        if sharded:
            fe.shard(model, None, *LEVEL, units=[nn.Linear], min_unit_size=0)
        weights = matrices(model)
        kind: Callable[..., Any] = torch.optim.Muon if name == "Muon" else Whitening
        optimizer = kind(weights[:1], lr=0.02)
        if sharded:
            fe.shard_optimizer(optimizer)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": weights[1:], "lr": 0.01})
            weights[0].requires_grad_(step != 4)
            train(model, optimizer, [step], sharded=sharded)
        found.append(values(model))
        states = optimizer.state_dict()["state"]
        assert len(states) == len(weights)
    assert_close(found[0], found[1], name)


@pytest.mark.parametrize("name", SOME)
@on_ranks(2)
def test_state_dicts_are_pickled_and_optimizers_copied(name: str) -> None:
    model, _, optimizer = make(LEVEL, name)
    train(model, optimizer, range(2), sharded=True)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    again, _, other = make(LEVEL, name)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(loaded)
    train(again, other, range(2, 4), sharded=True)
    assert_close(values(again), trained(name), name)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@on_few_ranks
def test_main_weights_of_other_dtypes(main: torch.dtype, name: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=main)
    found = []
    for level in ("no_shard", "optim_grads_params"):
        model = plain_model(torch.float32)
        fe.shard(model, None, level, units=[nn.Linear], min_unit_size=0, mp_policy=policy)
        optimizer = fe.shard_optimizer(MAKERS[name](model))
        for step in range(3):
            model(mine(inputs(step, torch.float32))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [leaf for leaf in leaves_of(dict(optimizer.state)) if isinstance(leaf, Tensor)]
        assert {leaf.dtype for leaf in states} <= {main}
        found.append([value.float() for value in values(model)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


@on_ranks(2)
def test_tensor_parallel_parameters_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model[1], mesh["tensor"], ColwiseParallel())
    fe.shard(model, mesh["data"], "optim_grads_params", min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.weight: expected a parameter that is sharded over"):
        fe.shard_optimizer(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]))


@on_ranks(2)
def test_fully_shard() -> None:
    model = plain_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = fe.shard_optimizer(MAKERS["Muon"](model))
    train(model, optimizer, range(4), sharded=True)
    assert_close(values(model), trained("Muon"), "Muon")


@pytest.mark.parametrize("name", ["Muon", "Whitening", "Coupled"])
@on_few_ranks
def test_an_optimizer_that_has_stepped_is_sharded(name: str) -> None:
    """Its state, of one process, is taken over."""
    model, _, _ = make(("no_shard", "no_shard"), name)
    optimizer = MAKERS[name](model)
    train(model, optimizer, range(2), sharded=True)
    fe.shard_optimizer(optimizer)
    train(model, optimizer, range(2, 4), sharded=True)
    assert_close(values(model), trained(name), name)
    if name != "Coupled":
        assert optimizer.state_dict()["state"]


@on_few_ranks
def test_memory_of_state_is_reported() -> None:
    model, engine, optimizer = make(LEVEL, "Whitening")
    train(model, optimizer, [0], sharded=True)
    held = sum(leaf.nbytes for leaf in leaves_of(dict(optimizer.state)) if isinstance(leaf, Tensor))
    with engine.measure() as measured:
        train(model, optimizer, [1], sharded=True)
    assert held
    assert measured.memory["optimizer"] >= held


@on_ranks(4)
def test_parameters_of_other_ranks_are_not_stepped_at_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    fe.shard(model, strategy="optim_grads_params", expert_mesh=mesh["copies"], min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.\w+: expected a parameter that the same ranks share"):
        fe.shard_optimizer(Coupled(model.parameters()))


def _two(model: nn.Module) -> list[Any]:
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices(model), lr=0.02)
    return [fe.shard_optimizer(each) for each in (muon, torch.optim.Adafactor(others, lr=0.02))]


@on_ranks(2)
def test_two_optimizers_in_one_checkpoint() -> None:
    found = []
    folder = tempfile.mkdtemp()
    shared = [folder]
    dist.broadcast_object_list(shared)
    for resumes in (False, True):
        model = plain_model()
        engine = fe.shard(model, None, *LEVEL, units=[nn.Linear], min_unit_size=0)
        optimizers = _two(model)
        if resumes:
            fe.load_checkpoint(shared[0], engine, join_optimizers(optimizers))
        for step in range(2 if resumes else 0, 4):
            model(mine(inputs(step))).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            if step == 1 and not resumes:
                fe.save_checkpoint(shared[0], engine, join_optimizers(optimizers))
        found.append(values(model))
    assert_close(found[0], found[1], "Muon")


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_model()
    for module in (*model, model):
        torch_fully_shard(module)
    return model, MAKERS["Muon"](model)


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    packed = get_optimizer_state_dict(model, optimizer)["state"]
    return [full(packed[name]["momentum_buffer"]) for name in sorted(packed)]


@on_ranks(2)
def test_checkpoints_of_fsdp2() -> None:
    theirs, their_optimizer = fsdp2()
    train(theirs, their_optimizer, range(2), sharded=True)
    ours, engine, optimizer = make(LEVEL, "Muon")
    train(ours, optimizer, range(5, 6), sharded=True)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    weights, state = get_state_dict(theirs, their_optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder[0]}/theirs")
    fe.load_checkpoint(f"{folder[0]}/theirs", engine, optimizer)
    assert all(map(torch.equal, momenta(ours, optimizer), momenta(theirs, their_optimizer)))
    for model, each in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, each, range(2, 3), sharded=True)
    assert_close(values(ours), [full(param.detach()) for param in theirs.parameters()], "Muon")

    fe.save_checkpoint(f"{folder[0]}/ours", engine, optimizer)
    weights, state = get_state_dict(theirs, their_optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=f"{folder[0]}/ours")
    set_state_dict(
        theirs, their_optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    assert all(map(torch.equal, momenta(ours, optimizer), momenta(theirs, their_optimizer)))
