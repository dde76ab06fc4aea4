"""Optimizers of whole tensors with torch's state dicts, checkpoints and ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterable

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
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from fsdp_engine.optim.state_leaves import leaves_of
from tests import reference
from tests.checkpoint import moved_state
from tests.checkpoint.scene import shared_folder
from tests.extensions.whole_tensor_optimizers import owned
from tests.pool import on_few_ranks, on_ranks

some = pytest.mark.parametrize("name", ["Muon", "Whitening"])


@some
@pytest.mark.parametrize("full_state", [False, True])
@on_ranks(2)
def test_torchs_state_dict_functions(full_state: bool, name: str) -> None:
    side = owned.sharded(owned.MAKERS[name]).train(0, 1)
    options = StateDictOptions(full_state_dict=full_state, cpu_offload=full_state)
    packed = get_optimizer_state_dict(side.model, side.optimizer, options=options)
    weights = get_model_state_dict(side.model, options=options)
    alone = owned.plain(owned.MAKERS[name]).train(0, 1)
    if not full_state or dist.get_rank() == 0:
        expected = get_optimizer_state_dict(alone.model, alone.optimizer)
        assert packed["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            for one, other in zip(leaves_of(packed["state"][key]), leaves_of(state), strict=True):
                if isinstance(other, Tensor):
                    owned.assert_close([reference.full(one)], [other], name)
                else:
                    assert one == other
    again = owned.sharded(owned.MAKERS[name])
    options = StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=full_state)
    set_model_state_dict(again.model, weights, options=options)
    set_optimizer_state_dict(again.model, again.optimizer, packed, options=options)
    owned.assert_close(owned.values(again.train(2, 3).model), owned.trained(name), name)


@some
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_main_weights_of_other_dtypes(main: torch.dtype, name: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=main)
    found = []
    for level in ("no_shard", owned.CUT):
        model = owned.plain_model(torch.float32)
        fe.shard(model, None, level, units=[nn.Linear], min_unit_size=0, mp_policy=policy)
        optimizer = fe.shard_optimizer(owned.MAKERS[name](model))
        for step in range(3):
            model(owned.mine(owned.inputs(step, torch.float32))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [leaf for leaf in leaves_of(dict(optimizer.state)) if isinstance(leaf, Tensor)]
        assert {leaf.dtype for leaf in states} <= {main}
        found.append([value.float() for value in owned.values(model)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


@on_ranks(4)
def test_parameters_of_tensor_parallel_and_of_other_ranks_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model[1], mesh["tensor"], ColwiseParallel())
    fe.shard(model, mesh["data"], owned.CUT, min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.weight: expected a parameter that is sharded over"):
        fe.shard_optimizer(torch.optim.Muon(owned.matrices(model)))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    fe.shard(model, strategy=owned.CUT, expert_mesh=mesh["copies"], min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.\w+: expected a parameter that the same ranks share"):
        fe.shard_optimizer(owned.Coupled(model.parameters()))


@on_ranks(2)
def test_fully_shard() -> None:
    model = owned.plain_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    optimizer = fe.shard_optimizer(owned.MAKERS["Muon"](fully_shard(model)))
    owned.Side(model, optimizer, model).train(*range(4))
    owned.assert_close(owned.values(model), owned.trained("Muon"), "Muon")


@pytest.mark.parametrize("name", ["Muon", "Coupled"])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_is_sharded_with_its_state(name: str) -> None:
    model = owned.plain_model()
    engine = fe.shard(model, None, "no_shard", units=[nn.Linear], min_unit_size=0)
    side = owned.Side(model, owned.MAKERS[name](model), engine).train(0, 1)
    fe.shard_optimizer(side.optimizer)
    owned.assert_close(owned.values(side.train(2, 3).model), owned.trained(name), name)
    if name != "Coupled":
        assert side.optimizer.state_dict()["state"]


def momenta(side: owned.Side) -> list[Tensor]:
    packed = get_optimizer_state_dict(side.model, side.optimizer)["state"]
    return [reference.full(packed[name]["momentum_buffer"]) for name in sorted(packed)]


@on_ranks(2)
def test_checkpoints_of_fsdp2() -> None:
    model = owned.plain_model()
    for module in (*model, model):
        torch_fully_shard(module)
    theirs = owned.Side(model, owned.MAKERS["Muon"](model), model).train(0, 1)
    ours = owned.sharded(owned.MAKERS["Muon"]).train(5)
    folder = shared_folder()

    weights, state = get_state_dict(*theirs[:2])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    fe.load_checkpoint(f"{folder}/theirs", ours.engine, ours.optimizer)
    assert all(map(torch.equal, momenta(ours), momenta(theirs)))
    theirs.train(2)
    ours.train(2)
    owned.assert_close(owned.values(ours.model), owned.values(theirs.model), "Muon")

    fe.save_checkpoint(f"{folder}/ours", ours.engine, ours.optimizer)
    weights, state = get_state_dict(*theirs[:2])
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=f"{folder}/ours")
    set_state_dict(*theirs[:2], model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert all(map(torch.equal, momenta(ours), momenta(theirs)))


def whole(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return fe.shard_optimizer(optimizer, whole=True)


def nadam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=1e-2)


@moved_state.with_moves
@on_few_ranks
def test_state_follows_its_parameter_into_a_wider_dtype(moves: list[moved_state.Move]) -> None:
    moved_state.check_wider_dtypes(lambda parameters: whole(nadam(parameters)), moves, nadam)


@on_few_ranks
def test_an_optimizer_whose_state_is_a_plain_dict() -> None:
    moved_state.check_plain_dict_state(whole)
