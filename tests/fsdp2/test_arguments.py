"""Bad input of ``fully_shard``: errors on all ranks, before anything is changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests.fsdp2.programs import assert_alike, batch, loss_of, parallelize, seeded
from tests.pool import on_ranks


def sharing_memory() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(layer.weight.detach()[0])
    return layer


RESHARD, PLACEMENTS, STRATEGY = "reshard_after_forward", "shard_placement_fn", "strategy"
NOT_THERE = NotImplementedError
BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, f"{RESHARD}: expected a divisor of the 2", {RESHARD: 3}),
    (ValueError, f"{RESHARD}: expected a bool", {RESHARD: "no"}),
    (ValueError, f"{RESHARD}: expected None or False", {RESHARD: True, STRATEGY: "optim"}),
    (ValueError, f"{STRATEGY}: expected one of", {STRATEGY: "zero3"}),
    (ValueError, f"{PLACEMENTS}: expected a dim", {PLACEMENTS: lambda p: Shard(7)}),
    (ValueError, "at least one; found an empty list", {"module": []}),
    (ValueError, "does not support containers", {"module": nn.ModuleList([nn.Linear(3, 4)])}),
    (ValueError, "weight: expected a parameter with memory of its", {"module": sharing_memory()}),
    (TypeError, "offload_policy: expected a torch", {"offload_policy": "cpu"}),
    (TypeError, "mp_policy: expected a torch", {"mp_policy": fe.MixedPrecisionPolicy()}),
    (TypeError, "module: expected a torch.nn.Module", {"module": 3}),
    (NOT_THERE, "dim 1 of weight.* multiple of 2 ranks", {PLACEMENTS: lambda p: Shard(p.ndim - 1)}),
    (NOT_THERE, f"{PLACEMENTS}: expected Shard", {PLACEMENTS: lambda p: "rows"}),
    (NOT_THERE, "dp_mesh_dims: expected None", {"dp_mesh_dims": "dp"}),
]


@on_ranks(2)
def test_bad_arguments_raise_on_all_ranks_and_change_nothing() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(3, 4)
    for kind, message, arguments in BAD:
        arguments = {"module": linear, **arguments}
        params = list(getattr(arguments["module"], "parameters", list)())
        with pytest.raises(kind, match=message):
            fsdp2.fully_shard(**arguments)
        after = getattr(arguments["module"], "parameters", list)()
        assert all(one is other for one, other in zip(params, after, strict=True))
    # Errors are also raised if only one rank's arguments are wrong.
    is_second = dist.get_rank() == 1
    with pytest.raises(ValueError, match="divisor"):
        fsdp2.fully_shard(linear, reshard_after_forward=3 if is_second else True)
    with pytest.raises(ValueError, match="same parameters and options"):
        fsdp2.fully_shard(linear, strategy="optim" if is_second else "optim_grads")
    with torch.device("meta"):
        odd = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="meta device"):
        fsdp2.fully_shard(odd if is_second else nn.Linear(3, 4))
    assert type(linear) is nn.Linear
    assert type(linear.weight) is nn.Parameter
    fsdp2.fully_shard(linear)
    linear(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_order_of_calls() -> None:
    model = parallelize(fsdp2, seeded())
    with pytest.raises((ValueError, AssertionError), match="only be applied to a module once"):
        fsdp2.fully_shard(model)
    with pytest.raises(ValueError, match="that no engine has sharded"):
        fe.shard(model)
    model.layers["0"](torch.ones(2, 6, 24), model.angles)
    with pytest.raises(RuntimeError, match="root module to be called first"):
        model(batch(0, 0, 0)[0])
    plain = seeded()
    fe.shard(plain)
    with pytest.raises(ValueError, match=r"not passed to shard\(\)"):
        fsdp2.fully_shard(plain.head)
    late = seeded()
    fsdp2.fully_shard(late.norm)
    late.norm(torch.ones(2, 24))
    with pytest.raises(ValueError, match="before any forward of its submodules"):
        fsdp2.fully_shard(late)
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    fsdp2.fully_shard([*pair])
    with pytest.raises(RuntimeError, match="expected the root module to be a group of its own"):
        pair[0](torch.ones(1, 2))
    tied = seeded()
    tied.head.weight = tied.embeddings.weight
    fsdp2.fully_shard(tied.embeddings)
    with pytest.raises(ValueError, match=r"head\.weight.*tied.*fully_shard\(\[embedding, head\]\)"):
        fsdp2.fully_shard(tied)
    early = seeded()
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    parallelize(fsdp2, early)
    with pytest.raises(RuntimeError, match="optimizer: expected it to be built after"):
        loss_of(early, *batch(0, 0, 0))
    del optimizer


@pytest.mark.thorough
@on_ranks(4)
def test_a_number_of_ranks_to_reshard_to_is_taken_as_true() -> None:
    model = seeded()
    with pytest.warns(UserWarning, match="reshard_after_forward=2"):
        fsdp2.fully_shard(model, reshard_after_forward=2)
    loss_of(model, *batch(0, 0, 0)).backward()
    mesh = init_device_mesh("cpu", (4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp2.fully_shard(seeded(), reshard_after_forward=4, mesh=mesh)


@on_ranks(2)
def test_replicated_modules_are_left_alone() -> None:
    def script(api: Any) -> Any:
        model = seeded()
        replicate(model.head)
        api.fully_shard(model.layers["0"])
        api.fully_shard(model)
        assert type(model.head.weight) is nn.Parameter
        loss_of(model, *batch(0, 0, dist.get_rank())).backward()
        return model.head.weight.grad.clone(), model.norm.weight.grad.full_tensor()

    assert_alike(script)
    model = seeded()
    fsdp2.fully_shard(model)
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)
