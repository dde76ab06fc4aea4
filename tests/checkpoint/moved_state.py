"""One job saves an optimizer's state and another loads it; one process is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint import folder as folder_module
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from tests import reference
from tests.checkpoint.scene import refused, shared_folder, update
from tests.models import Mlp

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# The level and dtype of the job that saves, and of the one that loads.
Move = tuple[str, torch.dtype, str, torch.dtype]
MOVES: list[Move] = [
    ("no_shard", BF16, "no_shard", FP32),
    ("optim", BF16, "optim_grads_params", FP64),
    ("optim_grads_params", FP32, "optim", FP64),
    ("optim_grads_params", FP32, "optim", FP32),
]
EVERY_MOVE: list[Move] = [
    (level, narrow, level, wide)
    for level in ("no_shard", "optim", "optim_grads_params")
    for narrow, wide in ((BF16, FP32), (BF16, FP64), (FP32, FP64))
]
with_moves = pytest.mark.parametrize(
    "moves",
    [
        pytest.param(MOVES, id="some"),
        pytest.param(EVERY_MOVE, marks=pytest.mark.thorough, id="every"),
    ],
)
Maker = Callable[[Any], Any]


def make(
    maker: Maker, dtype: torch.dtype, level: str, **options: Any
) -> tuple[Mlp, fe.Engine, Any]:
    torch.manual_seed(0)
    model = Mlp().to(dtype)
    policy = fe.MixedPrecisionPolicy(own_dtypes=True)
    engine = fe.shard(model, strategy=level, mp_policy=policy, **options)
    return model, engine, maker(model.parameters())


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    dtype = next(model.parameters()).dtype
    for number in numbers:
        torch.manual_seed(number)
        update(model(torch.randn(4, model.up.in_features, dtype=dtype)).square().mean(), optimizer)


def state_dtypes(optimizer: Any) -> set[torch.dtype]:
    return {
        value.dtype
        for state in optimizer.state_dict()["state"].values()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.ndim and name != "step"
    }


def check_wider_dtypes(
    maker: Maker, moves: Sequence[Move], alone_maker: Maker | None = None, **options: Any
) -> None:
    """State follows its parameter into a wider dtype. ``options`` are those of ``fe.shard``."""
    folder = shared_folder()
    for number, (level, narrow, other, wide) in enumerate(moves):
        model, engine, optimizer = make(maker, narrow, level, **options)
        steps(model, optimizer, range(2))
        save_checkpoint(f"{folder}/{number}", engine, optimizer)

        alone = Mlp().to(wide)
        alone.load_state_dict(
            {key: value.to(wide) for key, value in reference.full_weights(model).items()}
        )
        own = (alone_maker or maker)(alone.parameters())
        packed = optimizer.state_dict()
        for state in packed["state"].values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = reference.full(value)
        own.load_state_dict(packed)  # torch converts to the parameter's dtype

        model, engine, optimizer = make(maker, wide, other, **options)
        load_checkpoint(f"{folder}/{number}", engine, optimizer)
        assert state_dtypes(optimizer) == {wide}
        steps(model, optimizer, range(2, 4))
        steps(alone, own, range(2, 4))
        reference.assert_same_weights(model, alone, rtol=1e-5, atol=1e-6)


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


def check_plain_dict_state(wrap: Callable[[Any], Any], **options: Any) -> None:
    """State in a plain dict is saved and resumed, before the first step and after two steps."""
    folder = shared_folder()
    torch.manual_seed(0)
    alone = Mlp()
    steps(alone, PlainState(alone.parameters()), range(4))

    def sharded() -> tuple[Mlp, fe.Engine, Any]:
        torch.manual_seed(0)
        model = Mlp()
        engine = fe.shard(model, **options)
        return model, engine, wrap(PlainState(model.parameters()))

    model, engine, optimizer = sharded()
    save_checkpoint(f"{folder}/0", engine, optimizer)
    steps(model, optimizer, range(2))
    save_checkpoint(f"{folder}/2", engine, optimizer)
    steps(model, optimizer, range(2, 4))
    reference.assert_same_weights(model, alone)
    for start in (0, 2):
        model, engine, optimizer = sharded()
        load_checkpoint(f"{folder}/{start}", engine, optimizer)
        steps(model, optimizer, range(start, 4))
        reference.assert_same_weights(model, alone)


def without(key: str) -> Any:
    """A ``write_entries`` that leaves out one state of one parameter."""
    write = folder_module.write_entries

    def write_others(entries: dict[str, Any], *rest: Any) -> None:
        entries["optimizer"]["state"]["up.weight"].pop(key, None)
        write(entries, *rest)

    return write_others


def check_missing_state(
    maker: Maker, key: str, *, keeps_optimizer: bool = True, **options: Any
) -> None:
    """Loading a state without ``key`` raises an error that names the parameter."""
    folder = shared_folder()
    model, engine, optimizer = make(maker, FP32, "optim_grads_params", **options)
    steps(model, optimizer, range(2))
    with patch.object(folder_module, "write_entries", without(key)):
        save_checkpoint(folder, engine, optimizer)
    for number in (0, 1):  # an optimizer that has not stepped, and one that has
        model, engine, optimizer = make(maker, FP32, "optim_grads_params", **options)
        steps(model, optimizer, range(number))
        part = "missing optimizer.state.up.weight: expected the"
        with refused(model, part, optimizer=optimizer if keeps_optimizer else None):
            load_checkpoint(folder, engine, optimizer)
