"""Gradients: their exact scale, their norm, and how long they are held.

What programs do with gradients between calls is in ``tests/runtime``.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import on_ranks
from tests.reference import full, full_gradients, relative_error
from tests.training import mesh_of


def backward_alone(alone: nn.Module, seed: int) -> dict[str, Tensor]:
    """Gradients of the mean loss of all ranks; rank r has the batch of ``seed + r``."""
    make_batch = token_batch if isinstance(alone, Transformer) else vector_batch
    alone.zero_grad()
    for rank in range(dist.get_world_size()):
        (alone(*make_batch(2, seed + rank)) / dist.get_world_size()).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor], label: object) -> None:
    for name, gradient in full_gradients(model).items():
        assert (gradient is None) == (name not in expected), f"{label}: {name}: {gradient}"
        if gradient is not None:
            error = relative_error(gradient, expected[name])
            assert error < 2e-5, f"{label}: {name} is off by {error:.1e}"


def gradient_of(model: nn.Module) -> Tensor:
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("fused", [True, False], ids=["div_fused", "div_apart"])
@pytest.mark.parametrize("average", [False, True], ids=["scaled_first", "average_in_collective"])
@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_each_backward_adds_the_mean_over_all_ranks_to_what_is_reduced(
    strategy: str, outer: str, average: bool, fused: bool
) -> None:
    """Exact: gradients are integers, so that the order of sums does not matter."""
    options = fe.Options(average_in_collective=average, scale_while_copying=fused)
    model = nn.Linear(3, 50, bias=False)
    engine = fe.shard(model, mesh_of(2, 2), strategy, outer, options=options)
    inputs = torch.tensor([[1.0, 2.0, 4.0]]) * 4 ** (dist.get_rank() + 1)
    one = torch.tensor([1.0, 2.0, 4.0]) * (4 + 16 + 64 + 256) / 4
    for step in range(2):
        for number in range(3):
            model(inputs).sum().backward()
            assert torch.equal(gradient_of(model), ((number + 1) * one).expand(50, 3)), step
        with engine.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        assert torch.equal(gradient_of(model), (5 * one).expand(50, 3))
        model.zero_grad(set_to_none=step == 1)


@on_ranks(3)
def test_three_ranks_average_by_three() -> None:
    for strategy, average in itertools.product(LEVELS, (False, True)):
        options = fe.Options(average_in_collective=average)
        model = nn.Linear(3, 5, bias=False)
        fe.shard(model, strategy=strategy, options=options)
        for number in (1, 2):
            model(torch.full((1, 3), 3.0 * (dist.get_rank() + 1))).sum().backward()
            torch.testing.assert_close(gradient_of(model), torch.full((5, 3), 6.0 * number))


@on_ranks(2)
def test_a_gradient_divisor_of_a_parameter_is_applied_once() -> None:
    for strategy, average in itertools.product(LEVELS, (False, True)):
        model = models.Chain(models.Mlp(), models.Mlp())
        alone = copy.deepcopy(model)
        expert = model.blocks[1].up.weight  # type: ignore[union-attr]
        expert.gradient_divisor = 8.0  # type: ignore[union-attr]
        fe.shard(model, strategy=strategy, options=fe.Options(average_in_collective=average))
        model(*vector_batch(2, 10 + dist.get_rank())).backward()
        expected = backward_alone(alone, 10)
        expected["blocks.1.up.weight"] /= 8
        assert_gradients(model, expected, (strategy, average))


@on_ranks(2)
def test_the_gradient_of_an_input_is_that_of_the_plain_model() -> None:
    for strategy in LEVELS:
        model = models.EncoderDecoder()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        x, y = vector_batch(2, dist.get_rank())
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(ours, y).backward()
        alone(theirs, y).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@on_ranks(2)
def test_the_gradient_of_a_full_parameter_is_dropped_as_soon_as_it_is_written() -> None:
    for strategy in LEVELS:
        model = models.Chain(*(models.Mlp() for _ in range(4)))
        fe.shard(model, strategy=strategy)
        seen: list[Tensor] = []  # the parameters that blocks compute with, as their hooks see them
        alive: list[int] = []
        for block in model.blocks:
            block.register_forward_hook(
                lambda module, *_, seen=seen: seen.extend(module.parameters()), prepend=True
            )
        x, y = vector_batch(2, dist.get_rank())
        x.requires_grad_()
        # The input's gradient is the last of backward: all parameters have got theirs.
        x.register_hook(
            lambda _, seen=seen, alive=alive: alive.append(sum(p.grad is not None for p in seen))
        )
        model(x, y).backward()
        assert (len(seen), alive) == (16, [0]), strategy


# Norms.


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_the_gradient_norm_counts_every_element_once(strategy: str, outer: str) -> None:
    model = Transformer(num_blocks=2, tied=True)
    alone = copy.deepcopy(model)
    engine = fe.shard(model, mesh_of(2, 2), strategy, outer)
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        model(*token_batch(2, 10 + dist.get_rank())).backward()
        expected = backward_alone(alone, 10)
        ours = engine.clip_grad_norm_(0.1, norm_type=norm_type)
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type=norm_type)
        assert type(ours) is Tensor
        assert ours.shape == ()
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0.0)
        assert_gradients(model, expected, norm_type)
        gathered = [torch.empty(()) for _ in range(4)]
        dist.all_gather(gathered, ours)
        assert all(torch.equal(each, ours) for each in gathered)
        model.zero_grad()


@on_ranks(2)
def test_the_norm_leaves_out_what_has_no_gradient_and_large_maxima_change_nothing() -> None:
    for strategy in LEVELS:
        model = models.unused_model()
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        assert engine.clip_grad_norm_(1.0).item() == 0.0
        model(*vector_batch(2, 10 + dist.get_rank())).backward()
        expected = backward_alone(alone, 10)
        norm = nn.utils.get_total_norm(list(expected.values()))
        before = full_gradients(model)
        torch.testing.assert_close(engine.clip_grad_norm_(1e6), norm)
        after = full_gradients(model)
        assert all(before[n] is after[n] or torch.equal(before[n], after[n]) for n in before)  # type: ignore[arg-type]
        # Torch's own function gives the same.
        ours = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(full(ours), norm)
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert_gradients(model, expected, strategy)
