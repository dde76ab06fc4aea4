"""Optimizers that need whole tensors, a model, and its training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.whole_tensor_optimizers.owned_step import OwnedStep
from fsdp_engine.optim.shadow import step_hook_of
from fsdp_engine.optim.state_leaves import leaves_of
from tests import reference
from tests.async_device.scene import Job
from tests.models import Transformer

SIZES = (33, 40, 48, 7)
LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
CUT = LEVELS[-1]


class Whitening(torch.optim.Optimizer):
    """Multiplies gradients of matrices with roots of their Gram matrices, as Shampoo does; its
    state has a list of matrices of another shape and, unless it is told otherwise, numbers that the
    host reads; and it counts steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.02, has_numbers: bool = True) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})
        self.fails, self.has_numbers = False, has_numbers

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.fails and p.shape == (48, 40):
                    raise ZeroDivisionError("the step fails")
                state = self.state[p]
                rows = p.grad.view(p.shape[0], -1)
                if not state:
                    state["grams"] = [rows.new_zeros(n, n) for n in rows.shape]
                    if self.has_numbers:
                        state["num"], state["flag"], state["rate"] = 0, True, 0.5
                left, right = state["grams"]
                left += rows @ rows.T
                right += rows.T @ rows
                update = rows / (left.norm().sqrt() + right.norm().sqrt() + 1e-6)
                if self.has_numbers:
                    state["num"] += 1
                    state["rate"] *= 0.9
                    update += rows * state["rate"]
                p.sub_(update.view_as(p), alpha=group["lr"])
        return loss


class WhitensOrAverages(torch.optim.Optimizer):
    """Steps each group by one of two rules, like optimizers that contain Muon and AdamW."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "whitens": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.sub_(mean / (1 + mean.norm() * group["whitens"]), alpha=group["lr"])


class Coupled(torch.optim.Optimizer):
    """Divides by the norm of all gradients, which it keeps in its first group."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "norm": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = sum((float(p.grad.double().square().sum()) for p in params), 0.0) ** 0.5
        for group in self.param_groups:
            group["norm"] = 0.5 * group["norm"] + 0.5 * total
        for p in params:
            p.sub_(p.grad / max(self.param_groups[0]["norm"], 1e-9), alpha=0.02)


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.02, momentum=0.9),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02),
    "Whitening": lambda m: Whitening(m.parameters()),
    "Coupled": lambda m: Coupled(m.parameters()),
}


def plain_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(SIZES):
        layers += [nn.Linear(before, after, bias=after != 48), nn.Tanh()]
    return nn.Sequential(*layers).to(dtype)


def inputs(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(12, SIZES[0], generator=torch.Generator().manual_seed(step)).to(dtype)


def mine(batch: Tensor) -> Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    return batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]


def values(model: nn.Module) -> list[Tensor]:
    return [reference.full(param) for param in model.parameters()]


class Side(NamedTuple):
    """A model and its optimizer: sharded, or in one process, where ``engine`` is None."""

    model: Any
    optimizer: Any
    engine: Any = None

    def loss(self, step: int) -> Tensor:
        batch = inputs(step)
        loss: Tensor = self.model(batch if self.engine is None else mine(batch)).square().mean()
        return loss

    def train(self, *steps: int) -> Side:
        for step in steps:
            self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def closure(self, step: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss

        return closure


Maker = Callable[[Any], torch.optim.Optimizer]


def plain(maker: Maker, model: Callable[[], Any] = plain_model) -> Side:
    made = model()
    return Side(made, maker(made))


def sharded(
    maker: Maker,
    level: str = CUT,
    model: Callable[[], Any] = plain_model,
    *,
    mesh: Any = None,
    outer: str = "no_shard",
    extensions: Sequence[Any] = (),
    **options: Any,
) -> Side:
    """``options`` are those of ``shard_optimizer``."""
    made = model()
    engine = fe.shard(
        made,
        mesh,
        level,
        outer,
        units=[nn.Linear],
        options=fe.Options(min_unit_size=0),
        extensions=extensions,
    )
    return Side(made, fe.shard_optimizer(maker(made), **options), engine)


@functools.cache
def trained(name: str, num_steps: int = 4) -> list[Tensor]:
    return values(plain(MAKERS[name]).train(*range(num_steps)).model)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], name: str = "") -> None:
    # Muon's iterations run in bf16, where rounding of the gradients' sums becomes larger.
    tolerance = 1e-2 if name == "Muon" else 1e-9
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def assert_alike(body: Callable[[Side], Any], maker: Maker, level: str = CUT) -> None:
    """``body`` leaves the same weights of a sharded model and of one process, and returns the same
    tensors, if any."""
    found = []
    for side in (sharded(maker, level), plain(maker)):
        more = body(side)
        found.append([*values(side.model), *(more or ())])
    assert_close(*found)


def is_mine(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    step = step_hook_of(optimizer, OwnedStep)
    assert step is not None
    target = step.target_of(param, (3,), torch.float32)
    assert isinstance(target, fe.FlatDTensor)
    return target.local.numel() == 3


RESETS: dict[str, Callable[[Any], Any]] = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "loaded": lambda optimizer: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
    "of each": lambda optimizer: [optimizer.state[p].clear() for p in params_of(optimizer)],
    "of some": lambda optimizer: [optimizer.state.pop(p, None) for p in params_of(optimizer)[::2]],
}


def tensors_of(state: Any) -> list[Tensor]:
    leaves = leaves_of(state)
    return [leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf) for leaf in leaves]


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# On the asynchronous device.


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(Whitening(params, has_numbers=False))


def job(pair: tuple[str, str], **options: Any) -> Job:
    given = {"make_optimizer": make_optimizer, "num_micro": 1, **options}
    return Job(functools.partial(Transformer, 1), pair=pair, **given)


@contextmanager
def small_chunks() -> Iterator[pytest.MonkeyPatch]:
    """A context in which each chunk has one parameter per rank."""
    module = "fsdp_engine.extensions.whole_tensor_optimizers.owned_step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}._CHUNK_ELEMENTS", 1)
        yield patch
