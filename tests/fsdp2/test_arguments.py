"""Bad input of ``fully_shard``: errors on all ranks, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests.fsdp2.programs import batch, loss_of, parallelize
from tests.fsdp2.scene import seeded
from tests.pool import on_ranks

BAD: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "reshard_after_forward: expected a divisor of the 2": (
        ValueError,
        {"reshard_after_forward": 3},
    ),
    "reshard_after_forward: expected a bool": (ValueError, {"reshard_after_forward": "no"}),
    "reshard_after_forward: expected None or False": (
        ValueError,
        {"reshard_after_forward": True, "strategy": "optim"},
    ),
    "offload_policy: expected a torch": (TypeError, {"offload_policy": "cpu"}),
    "mp_policy: expected a torch": (TypeError, {"mp_policy": fe.MixedPrecisionPolicy()}),
    "strategy: expected one of": (ValueError, {"strategy": "zero3"}),
    "shard_placement_fn: expected a dim": (ValueError, {"shard_placement_fn": lambda p: Shard(7)}),
    "shard_placement_fn: expected dim 1 of weight.* multiple of 2 ranks": (
        NotImplementedError,
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    ),
    "shard_placement_fn: expected Shard": (
        NotImplementedError,
        {"shard_placement_fn": lambda p: "rows"},
    ),
    "dp_mesh_dims: expected None": (NotImplementedError, {"dp_mesh_dims": "dp"}),
}


@on_ranks(2)
def test_bad_arguments_raise_and_change_nothing() -> None:
    linear = nn.Linear(3, 4)
    for message, (kind, arguments) in BAD.items():
        with pytest.raises(kind, match=message):
            fsdp2.fully_shard(linear, **arguments)
    assert type(linear) is nn.Linear
    assert type(linear.weight) is nn.Parameter
    calls: dict[str, Callable[[], Any]] = {
        "module: expected a torch.nn.Module": lambda: fsdp2.fully_shard(3),  # type: ignore[type-var]
        "at least one; found an empty list": lambda: fsdp2.fully_shard([]),
        "fully_shard does not support containers": lambda: fsdp2.fully_shard(
            nn.ModuleList([linear])
        ),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()


@on_ranks(2)
def test_an_error_on_one_rank_is_one_on_all() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="divisor"):
        fsdp2.fully_shard(linear, reshard_after_forward=3 if dist.get_rank() else True)
    with pytest.raises(ValueError, match="same parameters and options"):
        fsdp2.fully_shard(linear, strategy="optim" if dist.get_rank() else "optim_grads")
    with torch.device("meta"):
        odd = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="meta device"):
        fsdp2.fully_shard(odd if dist.get_rank() else nn.Linear(3, 4))
    torch.manual_seed(1)
    linear.reset_parameters()
    fsdp2.fully_shard(linear)
    linear(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_order_of_calls() -> None:
    model = parallelize(fsdp2, seeded())
    with pytest.raises((ValueError, AssertionError), match="only be applied to a module once"):
        fsdp2.fully_shard(model)
    with pytest.raises(ValueError, match="not sharded before"):
        fe.shard(model)
    model.layers["0"](torch.ones(2, 6, 24), model.angles)
    with pytest.raises(RuntimeError, match="root module to be called first"):
        model(batch(0, 0, 0)[0])
    plain = seeded()
    fe.shard(plain)
    with pytest.raises(ValueError, match=r"given to shard\(\)"):
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


@on_ranks(2)
def test_an_optimizer_that_was_built_before_raises() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(fsdp2, model)
    with pytest.raises(RuntimeError, match="optimizer: expected it to be built after"):
        loss_of(model, *batch(0, 0, 0))
    del optimizer


@on_ranks(2)
def test_classes() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    assert fsdp2.fully_shard([model[0], model[0], model[1]]) is not None
    assert fsdp2.fully_shard(model) is model
    assert isinstance(model, fsdp2.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[2]) is nn.Linear
    assert type(model[:2]) is nn.Sequential
    assert fsdp2.fully_shard.state(model[0]) is fsdp2.fully_shard.state(model[1])  # type: ignore[attr-defined]
    assert fsdp2.fully_shard.state(model) is not fsdp2.fully_shard.state(model[0])  # type: ignore[attr-defined]
    assert all(isinstance(each, DTensor) for each in model.parameters())


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
    from torch.distributed._composable import replicate

    def script(api: Any) -> Any:
        model = seeded()
        replicate(model.head)
        api.fully_shard(model.layers["0"])
        api.fully_shard(model)
        assert type(model.head.weight) is nn.Parameter
        loss_of(model, *batch(0, 0, dist.get_rank())).backward()
        assert model.head.weight.grad is not None
        assert model.norm.weight.grad is not None
        return model.head.weight.grad, model.norm.weight.grad.full_tensor()

    torch.testing.assert_close(script(fsdp2), script(fsdp), rtol=1e-4, atol=1e-6)
    model = seeded()
    fsdp2.fully_shard(model)
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)
