"""Trials find whether a step needs elements, tensors, groups or all parameters together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.whole_tensor_optimizers.behaviour import Needs, Trials
from fsdp_engine.extensions.whole_tensor_optimizers.owned_step import OwnedStep
from fsdp_engine.optim.shadow import step_hook_of
from tests.pool import on_ranks


class Rule(torch.optim.Optimizer):
    """Updates all parameters by one function."""

    def __init__(self, params: Any, rule: Callable[..., None], **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.01, "step": 0, **defaults})
        self.rule = rule
        if rule is counts_in_state:
            self.state["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
        self.rule(self)

    def members(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        return [
            (g, p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]


def by_element(self: Rule) -> None:
    for group, p, grad in self.members():
        state = self.state[p]
        average = state.setdefault("average", torch.zeros_like(p))
        average.lerp_(grad, 0.1)
        p.sub_(average / (1 + average.abs()), alpha=group["lr"])


def in_train_mode(self: Rule) -> None:
    assert all(group.get("train_mode") for group in self.param_groups)
    by_element(self)


def counts_in_state(self: Rule) -> None:
    """As SPAM, whose state has had the counter since its construction."""
    self.state["count"] += 1  # type: ignore[operator]
    by_element(self)


def by_row(self: Rule) -> None:
    for group, p, grad in self.members():
        p.sub_(grad / grad.flatten(-1).norm(dim=-1, keepdim=True), alpha=group["lr"])


def sums_now_for_later(self: Rule) -> None:
    """As Prodigy: its sum over all parameters changes the learning rate after many steps."""
    first = self.param_groups[0]
    for _, p, grad in self.members():
        first["sum"] = first.get("sum", 0.0) + float((grad * p).abs().sum())
        p.sub_(grad.sign(), alpha=first["lr"] * max(1.0, first["sum"] * 1e-30))


def sums_of_groups(self: Rule) -> None:
    for group in self.param_groups:
        total = sum(float(p.grad.square().sum()) for p in group["params"])
        group["rate"] = 0.9 * group.get("rate", 0.0) + total
        for p in group["params"]:
            p.sub_(p.grad.sign(), alpha=group["lr"])


def sums_of_state(self: Rule) -> None:
    """As SWATS: after many steps, a number in each tensor's state decides when the rule changes."""
    for group, p, grad in self.members():
        state = self.state[p]
        state["dot"] = state.get("dot", torch.zeros(())) + (p * grad).sum()
        p.sub_(grad.sign(), alpha=group["lr"])


def weakly_coupled(self: Rule) -> None:
    """As AdamS: the norm of all gradients changes weight decay, a small part of the update."""
    norm = sum(float(grad.square().sum()) for _, _, grad in self.members()) ** 0.5
    for group, p, grad in self.members():
        p.mul_(1 - 1e-3 * group["lr"] / (1 + norm))
        p.sub_(grad.sign(), alpha=group["lr"])


def by_own_norm(self: Rule) -> None:
    """As Adafactor, which cannot step an empty slice."""
    for group, p, grad in self.members():
        p.sub_(grad.sign(), alpha=group["lr"] * float(p.norm()) / p.numel())


RULES = {
    by_element: Needs.ELEMENT,
    in_train_mode: Needs.ELEMENT,
    counts_in_state: Needs.ELEMENT,
    by_row: Needs.TENSOR,
    by_own_norm: Needs.TENSOR,
    sums_of_state: Needs.TENSOR,
    sums_of_groups: Needs.GROUP,
    sums_now_for_later: Needs.ALL,
    weakly_coupled: Needs.ALL,
}


def made(rule: Callable[..., None], shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Rule:
    params = [nn.Parameter(torch.randn(tuple(shape)).to(dtype)) for shape in shapes]
    return Rule(params, rule, **({"train_mode": False} if rule is in_train_mode else {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(300,), (33, 20), (4, 3, 5, 2)])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_a_step_needs(
    rule: Callable[..., None], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    optimizer = made(rule, [shape, (3,)], dtype)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert Trials(optimizer, torch.device("cpu")).find(0, shape, dtype).needs == RULES[rule]
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    assert optimizer.state == ({"count": 0} if rule is counts_in_state else {})
    assert optimizer.param_groups[0]["step"] == 0


def outer_products(self: Rule) -> None:
    """As Adafactor."""
    for group, p, grad in self.members():
        rows, columns = grad.square().mean(1, keepdim=True), grad.square().mean(0, keepdim=True)
        p.sub_(grad * (rows @ columns).rsqrt(), alpha=group["lr"])


def gram_matrices(self: Rule) -> None:
    """As Muon."""
    for group, p, grad in self.members():
        p.sub_(grad @ grad.mT @ grad, alpha=group["lr"])


@pytest.mark.parametrize(
    ("rule", "multiplies"), [(by_row, 0), (outer_products, 0), (gram_matrices, 1)]
)
def test_whether_matrices_are_multiplied(rule: Callable[..., None], multiplies: int) -> None:
    trials = Trials(made(rule, [(40, 300)], torch.float32), torch.device("cpu"))
    assert trials.find(0, (40, 300), torch.float32) == (Needs.TENSOR, multiplies)


@pytest.mark.parametrize(("rule", "needs"), [(by_element, 0), (by_row, 1)])
@on_ranks(2)
def test_an_empty_parameter_has_its_dims(rule: Callable[..., None], needs: int) -> None:
    model = nn.Linear(8, 8)
    model.nothing = nn.Parameter(torch.empty(0, 3))
    fe.shard(model, None, "optim_grads_params", options=fe.Options(min_unit_size=0))
    shapes = []

    def noting(self: Rule) -> None:
        shapes.extend(tuple(p.shape) for _, p, _ in self.members() if not p.numel())
        rule(self)

    optimizer = fe.shard_optimizer(Rule(model.parameters(), noting))
    step = step_hook_of(optimizer, OwnedStep)
    assert (0 if step is None else step.needs["nothing"]) == needs
    shapes.clear()
    (model(torch.ones(2, 8)).sum() + model.nothing.sum()).backward()
    optimizer.step()
    assert ((0, 3) in shapes) <= bool(needs)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, (0, 3) in shapes)
    assert any(everywhere) == bool(needs)


def communicates(self: Rule) -> None:
    for group, p, grad in self.members():
        dist.all_reduce(grad)
        p.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("rule", [by_element, by_own_norm])
def test_a_parameter_of_one_element_may_have_empty_slices(
    rule: Callable[..., None], shape: tuple[int, ...]
) -> None:
    trials = Trials(made(rule, [shape], torch.float32), torch.device("cpu"))
    assert trials.find(0, shape, torch.float32).needs == RULES[rule]


@on_ranks(2)
def test_a_step_that_communicates_is_refused() -> None:
    model = nn.Linear(8, 8)
    fe.shard(model, None, "optim_grads_params", options=fe.Options(min_unit_size=0))
    optimizer = Rule(model.parameters(), communicates)
    with pytest.raises(ValueError, match=r"weight, .*Rule raises RuntimeError: expected a step"):
        fe.shard_optimizer(optimizer)
