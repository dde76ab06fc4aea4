"""Owners with the interfaces of torch around an optimizer."""

from __future__ import annotations

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
from tests.checkpoint.scene import shared_folder
from tests.extensions.whole_tensor_optimizers.owned import (
    CUT,
    MAKERS,
    Coupled,
    Side,
    assert_close,
    inputs,
    matrices,
    mine,
    plain,
    plain_model,
    sharded,
    trained,
    values,
)
from tests.pool import on_ranks

some = pytest.mark.parametrize("name", ["Muon", "Whitening"])


@some
@pytest.mark.parametrize("full_state", [False, True])
@on_ranks(2)
def test_torchs_state_dict_functions(full_state: bool, name: str) -> None:
    side = sharded(MAKERS[name]).train(0, 1)
    options = StateDictOptions(full_state_dict=full_state, cpu_offload=full_state)
    packed = get_optimizer_state_dict(side.model, side.optimizer, options=options)
    weights = get_model_state_dict(side.model, options=options)
    alone = plain(MAKERS[name]).train(0, 1)
    if not full_state or dist.get_rank() == 0:
        expected = get_optimizer_state_dict(alone.model, alone.optimizer)
        assert packed["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            for one, other in zip(leaves_of(packed["state"][key]), leaves_of(state), strict=True):
                if isinstance(other, Tensor):
                    assert_close([reference.full(one)], [other], name)
                else:
                    assert one == other
    again = sharded(MAKERS[name])
    options = StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=full_state)
    set_model_state_dict(again.model, weights, options=options)
    set_optimizer_state_dict(again.model, again.optimizer, packed, options=options)
    assert_close(values(again.train(2, 3).model), trained(name), name)


@some
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_main_weights_of_other_dtypes(main: torch.dtype, name: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=main)
    found = []
    for level in ("no_shard", CUT):
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


@on_ranks(4)
def test_parameters_of_tensor_parallel_and_of_other_ranks_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model[1], mesh["tensor"], ColwiseParallel())
    fe.shard(model, mesh["data"], CUT, min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.weight: expected a parameter that is sharded over"):
        fe.shard_optimizer(torch.optim.Muon(matrices(model)))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    fe.shard(model, strategy=CUT, expert_mesh=mesh["copies"], min_unit_size=0)
    with pytest.raises(ValueError, match=r"1\.\w+: expected a parameter that the same ranks share"):
        fe.shard_optimizer(Coupled(model.parameters()))


@on_ranks(2)
def test_fully_shard() -> None:
    model = plain_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    optimizer = fe.shard_optimizer(MAKERS["Muon"](fully_shard(model)))
    Side(model, optimizer, model).train(*range(4))
    assert_close(values(model), trained("Muon"), "Muon")


@pytest.mark.parametrize("name", ["Muon", "Coupled"])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_is_sharded_with_its_state(name: str) -> None:
    model = plain_model()
    engine = fe.shard(model, None, "no_shard", units=[nn.Linear], min_unit_size=0)
    side = Side(model, MAKERS[name](model), engine).train(0, 1)
    fe.shard_optimizer(side.optimizer)
    assert_close(values(side.train(2, 3).model), trained(name), name)
    if name != "Coupled":
        assert side.optimizer.state_dict()["state"]


def momenta(side: Side) -> list[Tensor]:
    packed = get_optimizer_state_dict(side.model, side.optimizer)["state"]
    return [reference.full(packed[name]["momentum_buffer"]) for name in sorted(packed)]


@on_ranks(2)
def test_checkpoints_of_fsdp2() -> None:
    model = plain_model()
    for module in (*model, model):
        torch_fully_shard(module)
    theirs = Side(model, MAKERS["Muon"](model), model).train(0, 1)
    ours = sharded(MAKERS["Muon"]).train(5)
    folder = shared_folder()

    weights, state = get_state_dict(*theirs[:2])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    fe.load_checkpoint(f"{folder}/theirs", ours.engine, ours.optimizer)
    assert all(map(torch.equal, momenta(ours), momenta(theirs)))
    theirs.train(2)
    ours.train(2)
    assert_close(values(ours.model), values(theirs.model), "Muon")

    fe.save_checkpoint(f"{folder}/ours", ours.engine, ours.optimizer)
    weights, state = get_state_dict(*theirs[:2])
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=f"{folder}/ours")
    set_state_dict(*theirs[:2], model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert all(map(torch.equal, momenta(ours), momenta(theirs)))
