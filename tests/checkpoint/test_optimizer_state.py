"""Optimizer state that differs from what the loading job would make."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint import folder as folder_module
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.models import Mlp
from tests.pool import on_few_ranks, on_ranks

LEVELS = ("no_shard", "optim", "optim_grads_params")
MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "wrapped": lambda p: fe.shard_optimizer(torch.optim.AdamW(p, lr=1e-2)),
    "offloaded": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "owners": lambda p: fe.shard_optimizer(torch.optim.NAdam(p, lr=1e-2), whole=True),
}


def make(name: str, dtype: torch.dtype, level: str) -> tuple[Mlp, fe.Engine, Any]:
    torch.manual_seed(0)
    model = Mlp().to(dtype)
    options = {"offload": fe.Offload(optimizer_state="host")} if name == "offloaded" else {}
    policy = fe.MixedPrecisionPolicy(own_dtypes=True)
    engine = fe.shard(model, strategy=level, mp_policy=policy, **options)
    optimizer = MAKERS[name](model.parameters())
    if name == "offloaded":
        fe.shard_optimizer(optimizer)
    return model, engine, optimizer


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    dtype = next(model.parameters()).dtype
    for number in numbers:
        torch.manual_seed(number)
        model(torch.randn(4, model.up.in_features, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_dtypes(optimizer: Any) -> set[torch.dtype]:
    states = (state for state in optimizer.state_dict()["state"].values())
    return {
        value.dtype
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and value.ndim and name != "step"
    }


@pytest.mark.parametrize("name", list(MAKERS))
@on_few_ranks
def test_state_follows_its_parameter_into_a_wider_dtype(name: str) -> None:
    folder = shared_folder()
    for level in LEVELS if name != "adafactor" else ("no_shard",):
        for narrow, wide in itertools.combinations(
            (torch.bfloat16, torch.float32, torch.float64), 2
        ):
            model, engine, optimizer = make(name, narrow, level)
            steps(model, optimizer, range(3))
            fe.save_checkpoint(f"{folder}/{level}-{narrow}", engine, optimizer)

            alone = Mlp().to(wide)
            alone.load_state_dict(
                {key: value.to(wide) for key, value in reference.full_weights(model).items()}
            )
            plain = {"wrapped": "adamw", "offloaded": "adamw"}.get(name, name)
            own = torch.optim.NAdam(alone.parameters(), lr=1e-2)
            own = own if name == "owners" else MAKERS[plain](alone.parameters())
            packed = optimizer.state_dict()
            for state in packed["state"].values():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        state[key] = reference.full(value)
            own.load_state_dict(packed)  # torch converts to the parameter's dtype

            model, engine, optimizer = make(name, wide, level)
            fe.load_checkpoint(f"{folder}/{level}-{narrow}", engine, optimizer)
            assert state_dtypes(optimizer) == {wide}
            steps(model, optimizer, range(3, 6))
            steps(alone, own, range(3, 6))
            reference.assert_same_weights(model, alone, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_state_that_was_wider_than_its_parameter_stays_wide() -> None:
    folder = shared_folder()
    model, engine, optimizer = make("sgd", torch.bfloat16, "optim_grads_params")
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = param.detach().float()
    fe.save_checkpoint(folder, engine, optimizer)
    for dtype in (torch.bfloat16, torch.float64):
        model, engine, optimizer = make("sgd", dtype, "optim_grads_params")
        fe.load_checkpoint(folder, engine, optimizer)
        assert state_dtypes(optimizer) == {torch.float32}


@on_few_ranks
def test_a_group_without_parameters_gets_its_hyperparameters_back() -> None:
    folder = shared_folder()
    for position in (0, 1, 2):
        engines = []
        for lr in (1e-2, 1.0):
            model = Mlp()
            engine = fe.shard(model)
            groups = [{"params": [p], "lr": lr} for p in (model.up.weight, model.down.weight)]
            groups.insert(position, {"params": [], "lr": lr / 7, "betas": (0.5, 0.6)})
            groups.append({"params": [], "lr": lr / 3})
            engines.append((engine, torch.optim.AdamW(groups)))
        saved, loaded = (optimizer for _, optimizer in engines)
        fe.save_checkpoint(f"{folder}/{position}", engines[0][0], saved)
        fe.load_checkpoint(f"{folder}/{position}", engines[1][0], loaded)
        for one, other in zip(saved.param_groups, loaded.param_groups, strict=True):
            assert {**one, "params": 0} == {**other, "params": 0}


def without(key: str) -> Any:
    """``write_entries`` that leaves a state of one parameter out."""
    write = folder_module.write_entries

    def write_others(entries: dict[str, Any], *rest: Any) -> None:
        entries["optimizer"]["state"]["up.weight"].pop(key, None)
        write(entries, *rest)

    return write_others


@pytest.mark.parametrize(
    ("name", "key"),
    [("adamw", "exp_avg"), ("wrapped", "exp_avg_sq"), ("offloaded", "exp_avg"), ("adamw", "step")],
)
@on_few_ranks
def test_state_without_one_of_its_tensors_is_refused_by_name(name: str, key: str) -> None:
    folder = shared_folder()
    model, engine, optimizer = make(name, torch.float32, "optim_grads_params")
    steps(model, optimizer, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "write_entries", without(key))
        fe.save_checkpoint(folder, engine, optimizer)
    for number in (0, 1):  # an optimizer that has not stepped, and one that has
        model, engine, optimizer = make(name, torch.float32, "optim_grads_params")
        steps(model, optimizer, range(number))
        before = reference.full_weights(model)
        with pytest.raises(ValueError, match=r"missing optimizer\.state\.up\.weight: expected the"):
            fe.load_checkpoint(folder, engine, optimizer)
        for found, wanted in zip(reference.full_weights(model).values(), before.values(), strict=1):
            assert torch.equal(found, wanted)


@on_few_ranks
def test_state_that_an_optimizer_does_not_have_yet_is_not_missed() -> None:
    folder = shared_folder()
    model, engine, optimizer = make("adamw", torch.float32, "optim_grads_params")
    model.up(torch.ones(2, model.up.in_features)).sum().backward()  # down has no gradient
    optimizer.step()
    fe.save_checkpoint(folder, engine, optimizer)
    model, engine, _ = make("adamw", torch.float32, "optim_grads_params")
    # The saved hyperparameter says that there is no third moment.
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    fe.load_checkpoint(folder, engine, optimizer)
    assert len(optimizer.state_dict()["state"]) == 2
    steps(model, optimizer, range(1))


class PlainState(torch.optim.Optimizer):
    """Keeps its state in a plain dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state = {}  # type: ignore[assignment]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state = dict(self.state)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state.setdefault(param, {})
            if not state:
                state["average"] = torch.zeros_like(param)
            state["average"].lerp_(param.grad, 0.5)
            param.sub_(state["average"], alpha=self.param_groups[0]["lr"])


WRAPPERS: dict[str, Any] = {
    "none": lambda optimizer: optimizer,
    "shard": fe.shard_optimizer,
    "elementwise": lambda optimizer: fe.shard_optimizer(optimizer, elementwise=True),
    "whole": lambda optimizer: fe.shard_optimizer(optimizer, whole=True),
    "offload": fe.shard_optimizer,
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
@on_few_ranks
def test_an_optimizer_whose_state_is_a_plain_dict(wrapper: str) -> None:
    folder = shared_folder()
    torch.manual_seed(0)
    alone = Mlp()
    steps(alone, PlainState(alone.parameters()), range(4))
    options = {"offload": fe.Offload(optimizer_state="host")} if wrapper == "offload" else {}

    def sharded() -> tuple[Mlp, fe.Engine, Any]:
        torch.manual_seed(0)
        model = Mlp()
        engine = fe.shard(model, **options)
        return model, engine, WRAPPERS[wrapper](PlainState(model.parameters()))

    model, engine, optimizer = sharded()
    fe.save_checkpoint(f"{folder}/0", engine, optimizer)
    steps(model, optimizer, range(2))
    fe.save_checkpoint(f"{folder}/2", engine, optimizer)
    steps(model, optimizer, range(2, 4))
    reference.assert_same_weights(model, alone)
    for start in (0, 2):
        model, engine, optimizer = sharded()
        fe.load_checkpoint(f"{folder}/{start}", engine, optimizer)
        steps(model, optimizer, range(start, 4))
        reference.assert_same_weights(model, alone)
