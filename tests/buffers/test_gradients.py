"""Gradients: one place, one scale, accumulation, clearing, and when they are final."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import on_ranks
from tests.reference import full_gradients, full_weights, relative_error


def square_mesh() -> object:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def expected_gradients(
    alone: nn.Module, make_batch: Callable[[int, int], reference.Batch], seeds: list[int]
) -> dict[str, Tensor]:
    """Gradients of the sum over ``seeds`` of the mean over ranks; rank r has ``seed + r``."""
    world = dist.get_world_size()
    alone.zero_grad()
    for seed in seeds:
        for rank in range(world):
            (alone(*make_batch(2, seed + rank)) / world).backward()
    return {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor], label: object) -> None:
    for name, gradient in full_gradients(model).items():
        assert (gradient is None) == (name not in expected), f"{label}: {name}: {gradient}"
        if gradient is not None:
            error = relative_error(gradient, expected[name])
            assert error < 2e-5, f"{label}: {name} is off by {error:.1e}"


CLEAR: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer_to_none": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer_to_zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model_to_none": lambda model, optimizer: model.zero_grad(),
    "model_to_zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by_hand": lambda model, optimizer: (
        [setattr(p, "grad", None) for p in model.parameters()] and None
    ),
}


@pytest.mark.parametrize("way", CLEAR)
@on_ranks(2)
def test_after_clearing_a_backward_overwrites_the_gradients(way: str) -> None:
    for strategy, foreach in itertools.product(LEVELS, (True, False)):
        torch.manual_seed(0)
        model = Transformer(num_blocks=2, tied=True)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=foreach)
        rank = dist.get_rank()
        for seed in (10, 20, 30):
            model(*token_batch(2, seed + rank)).backward()
            expected = expected_gradients(alone, token_batch, [seed])
            assert_gradients(model, expected, (strategy, way, seed))
            optimizer.step()
            CLEAR[way](model, optimizer)
            for name, gradient in full_gradients(model).items():
                if way.endswith("zero"):
                    assert gradient is not None, name
                    assert not gradient.any(), name
                else:
                    assert gradient is None, name


@on_ranks(2)
def test_a_sharded_optimizer_clears_gradients_both_ways() -> None:
    for strategy, to_none in itertools.product(LEVELS, (True, False)):
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        fe.shard_optimizer(optimizer)
        for seed in (10, 20):
            model(*token_batch(2, seed + dist.get_rank())).backward()
            expected = expected_gradients(alone, token_batch, [seed])
            assert_gradients(model, expected, (strategy, to_none, seed))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_microbatches_add_up_to_one_reduced_gradient(strategy: str, outer: str) -> None:
    model = Transformer(num_blocks=2, tied=True)
    alone = copy.deepcopy(model)
    engine = fe.shard(model, square_mesh(), strategy, outer)
    rank = dist.get_rank()
    for seeds in ([10, 20, 30], [40], [50, 60]):
        with engine.no_sync():
            for seed in seeds[:-1]:
                model(*token_batch(2, seed + rank)).backward()
        model(*token_batch(2, seeds[-1] + rank)).backward()
        assert_gradients(model, expected_gradients(alone, token_batch, seeds), seeds)
        model.zero_grad()


@on_ranks(2)
def test_no_sync_nests_and_ends_with_an_exception() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        rank = dist.get_rank()
        with engine.no_sync():
            with engine.no_sync():
                model(*token_batch(2, 10 + rank)).backward()
            model(*token_batch(2, 20 + rank)).backward()
        with pytest.raises(KeyError), engine.no_sync():
            raise KeyError("a user's own")
        model(*token_batch(2, 30 + rank)).backward()
        assert_gradients(model, expected_gradients(alone, token_batch, [10, 20, 30]), strategy)


@pytest.mark.parametrize("fused", [True, False], ids=["div_fused", "div_apart"])
@pytest.mark.parametrize("average", [False, True], ids=["scaled_first", "average_in_collective"])
@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_a_backward_after_the_last_reduction_adds_to_what_is_reduced(
    strategy: str, outer: str, average: bool, fused: bool
) -> None:
    """Exactly: integers, so that no order of summation matters."""
    options = fe.Options(average_in_collective=average, scale_while_copying=fused)
    model = nn.Linear(3, 50, bias=False)
    engine = fe.shard(model, square_mesh(), strategy, outer, options=options)
    inputs = torch.tensor([[1.0, 2.0, 4.0]]) * 4 ** (dist.get_rank() + 1)
    one = torch.tensor([1.0, 2.0, 4.0]) * (4 + 16 + 64 + 256) / 4
    for step in range(2):
        for number in range(3):
            model(inputs).sum().backward()
            gradient = full_gradients(model)["weight"]
            assert gradient is not None
            assert torch.equal(gradient, ((number + 1) * one).expand(50, 3)), (step, number)
        with engine.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        gradient = full_gradients(model)["weight"]
        assert gradient is not None
        assert torch.equal(gradient, (5 * one).expand(50, 3))
        model.zero_grad(set_to_none=step == 1)


@on_ranks(3)
def test_three_ranks_add_to_what_is_reduced() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=1)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        for seed in (10, 20, 30):
            model(*token_batch(2, seed + dist.get_rank())).backward()
        assert_gradients(model, expected_gradients(alone, token_batch, [10, 20, 30]), strategy)


@pytest.mark.parametrize("average", [False, True], ids=["scaled_first", "average_in_collective"])
@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_gradients_are_those_of_the_mean_over_all_ranks(
    strategy: str, outer: str, average: bool
) -> None:
    """Integers, so that every order of summation gives the same and the figure is exact."""
    options = fe.Options(average_in_collective=average)
    model = nn.Linear(3, 5, bias=False)
    fe.shard(model, square_mesh(), strategy, outer, options=options)
    rank = dist.get_rank()
    inputs = torch.tensor([[1.0, 2.0, 4.0]]) * 4 ** (rank + 1)
    model(inputs).sum().backward()
    expected = torch.tensor([1.0, 2.0, 4.0]) * (4 + 16 + 64 + 256) / 4
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    assert torch.equal(gradient, expected.expand(5, 3))


@on_ranks(3)
def test_three_ranks_average_by_three() -> None:
    for strategy, average in itertools.product(LEVELS, (False, True)):
        options = fe.Options(average_in_collective=average)
        model = nn.Linear(3, 5, bias=False)
        fe.shard(model, strategy=strategy, options=options)
        model(torch.full((1, 3), 3.0 * (dist.get_rank() + 1))).sum().backward()
        gradient = full_gradients(model)["weight"]
        assert gradient is not None
        torch.testing.assert_close(gradient, torch.full((5, 3), 6.0))


class Choosing(models.Regression):
    """Every block has two linears and reads the one it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chooser(), Chooser()])

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def choose(self, which: str) -> None:
        for block in self.blocks:
            block.which = which  # type: ignore[assignment]


class Chooser(nn.Module):
    which = "both"

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(models.DIM, models.DIM)
        self.right = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.which != "right":
            x = x + torch.tanh(self.left(x))
        if self.which != "left":
            x = x + torch.tanh(self.right(x))
        return x


@on_ranks(2)
def test_a_rank_without_a_gradient_contributes_zeros() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Choosing()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        rank, world = dist.get_rank(), dist.get_world_size()
        for step in range(2):
            model.choose("left" if rank == step else "right")
            model(*vector_batch(2, 10 * step + rank)).backward()
            alone.zero_grad()
            for each in range(world):
                alone.choose("left" if each == step else "right")
                (alone(*vector_batch(2, 10 * step + each)) / world).backward()
            expected = {name: p.grad for name, p in alone.named_parameters()}
            assert_gradients(model, expected, (strategy, step))  # type: ignore[arg-type]
            model.zero_grad(set_to_none=step == 0)


@on_ranks(2)
def test_without_a_gradient_on_any_rank_grad_is_none() -> None:
    for strategy in LEVELS:
        model = Choosing()
        fe.shard(model, strategy=strategy)
        model.choose("left")
        model(*vector_batch(2, dist.get_rank())).backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == ("right" in name), f"{strategy}: {name}"


@pytest.mark.parametrize("order", ["left right", "right left", "both left", "left both"])
@on_ranks(2)
def test_a_gradient_in_one_microbatch_only_is_kept(order: str) -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Choosing()
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        rank, world = dist.get_rank(), dist.get_world_size()
        for turn in range(2):
            first, second = order.split()
            model.choose(first)
            with engine.no_sync():
                model(*vector_batch(2, 10 + turn + rank)).backward()
            model.choose(second)
            model(*vector_batch(2, 20 + turn + rank)).backward()
            alone.zero_grad()
            for which, seed in ((first, 10 + turn), (second, 20 + turn)):
                alone.choose(which)
                for each in range(world):
                    (alone(*vector_batch(2, seed + each)) / world).backward()
            expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            assert_gradients(model, expected, (strategy, order, turn))
            model.zero_grad(set_to_none=turn == 1)


@on_ranks(2)
def test_ranks_may_skip_different_units_where_parameters_are_whole() -> None:
    for strategy in ("no_shard", "optim", "optim_grads"):
        torch.manual_seed(0)
        model = models.Skipping()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        rank, world = dist.get_rank(), dist.get_world_size()
        for step in range(3):
            model.skip = rank == step % 2
            model(*vector_batch(2, 10 * step + rank)).backward()
            for each in range(world):
                alone.skip = each == step % 2
                (alone(*vector_batch(2, 10 * step + each)) / world).backward()
            expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            assert_gradients(model, expected, (strategy, step))
            for each_optimizer in (optimizer, alone_optimizer):
                each_optimizer.step()
                each_optimizer.zero_grad()


@on_ranks(2)
def test_gradients_of_a_unit_lie_in_one_flat_buffer() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=2)
        fe.shard(model, strategy=strategy)
        model(*token_batch(2, dist.get_rank())).backward()
        for block in model.blocks:
            gradients = [parameter.grad for parameter in block.parameters()]
            assert all(gradient is not None for gradient in gradients)
            parts = [local(gradient) for gradient in gradients if gradient is not None]
            storages = {p.untyped_storage().data_ptr() for p in parts if p.numel()}
            assert len(storages) == 1, strategy


@on_ranks(2)
def test_the_gradient_of_a_full_parameter_is_dropped_as_soon_as_it_is_written() -> None:
    for strategy in LEVELS:
        model = models.Chain(*(models.Mlp() for _ in range(4)))
        fe.shard(model, strategy=strategy)
        full, alive = watch_full_gradients(model)
        x, y = vector_batch(2, dist.get_rank())
        x.requires_grad_()
        # The last event of backward: the gradients of all parameters have come.
        x.register_hook(lambda gradient, alive=alive: alive())
        model(x, y).backward()
        assert len(full) == 16
        assert alive.counts == [0], strategy


class CountAlive:
    """Notes how many of some parameters hold a gradient, whenever it is called."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.counts: list[int] = []

    def __call__(self) -> None:
        self.counts.append(sum(p.grad is not None for p in self.parameters))


def watch_full_gradients(model: models.Chain) -> tuple[list[Tensor], CountAlive]:
    """The parameters that blocks compute with, as their own forward hooks see them."""
    full: list[Tensor] = []

    def collect(module: nn.Module, args: object, output: object) -> None:
        full.extend(module.parameters())

    for block in model.blocks:
        block.register_forward_hook(collect, prepend=True)
    return full, CountAlive(full)


@on_ranks(2)
def test_a_frozen_parameter_has_no_gradient_and_does_not_change() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.lora_model()
        engine = fe.shard(model, strategy=strategy)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert len(frozen) == 6
        before = full_weights(model)
        data = reference.make_data(vector_batch, 2, 2, dist.get_world_size())
        steps = reference.train_sharded(model, engine, data, reference.adamw)
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, before[name]) == (name in frozen), name
            assert (steps[0].gradients[name] is None) == (name in frozen), name


@on_ranks(2)
def test_the_gradient_of_an_input_is_that_of_the_plain_model() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.EncoderDecoder()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        x, y = vector_batch(2, dist.get_rank())
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(ours, y).backward()
        alone(theirs, y).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@on_ranks(2)
def test_two_forwards_may_come_before_their_backwards() -> None:
    for strategy, swapped in itertools.product(LEVELS, (False, True)):
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        rank = dist.get_rank()
        losses = [model(*token_batch(2, seed + rank)) for seed in (10, 20)]
        first, second = reversed(losses) if swapped else losses
        with engine.no_sync():
            first.backward()
        second.backward()
        expected = expected_gradients(alone, token_batch, [10, 20])
        assert_gradients(model, expected, (strategy, swapped))


@on_ranks(2)
def test_one_backward_through_the_sum_of_two_forwards_adds_both() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        rank = dist.get_rank()
        (model(*token_batch(2, 10 + rank)) + model(*token_batch(2, 20 + rank))).backward()
        assert_gradients(model, expected_gradients(alone, token_batch, [10, 20]), strategy)


@on_ranks(2)
def test_a_retained_graph_may_be_run_twice() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        loss = model(*token_batch(2, 10 + dist.get_rank()))
        with engine.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        expected = expected_gradients(alone, token_batch, [10])
        assert_gradients(model, {n: 2 * g for n, g in expected.items()}, strategy)


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_the_gradient_norm_counts_every_element_once(strategy: str, outer: str) -> None:
    model = Transformer(num_blocks=2, tied=True)
    alone = copy.deepcopy(model)
    engine = fe.shard(model, square_mesh(), strategy, outer)
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        model(*token_batch(2, 10 + dist.get_rank())).backward()
        for name, gradient in expected_gradients(alone, token_batch, [10]).items():
            dict(alone.named_parameters())[name].grad = gradient
        ours = engine.clip_grad_norm_(0.1, norm_type=norm_type)
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type=norm_type)
        assert type(ours) is Tensor
        assert ours.shape == ()
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0.0)
        clipped = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        assert_gradients(model, clipped, norm_type)
        gathered = [torch.empty(()) for _ in range(4)]
        dist.all_gather(gathered, ours)
        assert all(torch.equal(each, ours) for each in gathered)
        model.zero_grad()


@on_ranks(2)
def test_a_norm_below_the_maximum_leaves_gradients_as_they_are() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=1)
        engine = fe.shard(model, strategy=strategy)
        model(*token_batch(2, dist.get_rank())).backward()
        before = full_gradients(model)
        norm = engine.clip_grad_norm_(1e6)
        after = full_gradients(model)
        assert 0 < norm.item() < 1e6
        assert all(torch.equal(after[n], before[n]) for n in before)  # type: ignore[arg-type]


@on_ranks(2)
def test_the_norm_without_any_gradient_is_zero() -> None:
    for strategy in LEVELS:
        engine = fe.shard(Transformer(num_blocks=1), strategy=strategy)
        assert engine.clip_grad_norm_(1.0).item() == 0.0


@on_ranks(2)
def test_the_norm_leaves_out_parameters_without_a_gradient() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Choosing()
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        x, y = vector_batch(2, seed=3)
        for which in ("both", "left"):
            model.choose(which)
            alone.choose(which)
            model(x, y).backward()
            alone(x, y).backward()
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            torch.testing.assert_close(engine.clip_grad_norm_(1.0), expected)
            model.zero_grad()
            alone.zero_grad()


@on_ranks(2)
def test_the_norm_of_torch_is_the_same_norm() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        model(*token_batch(2, 10 + dist.get_rank())).backward()
        expected = expected_gradients(alone, token_batch, [10])
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
        ours = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, norm)
        clipped = {name: gradient * 0.1 / (norm + 1e-6) for name, gradient in expected.items()}
        assert_gradients(model, clipped, strategy)


@on_ranks(2)
def test_gradients_may_be_scaled_in_place_before_a_step() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=1)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        model(*token_batch(2, 10 + dist.get_rank())).backward()
        expected = expected_gradients(alone, token_batch, [10])
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        assert_gradients(model, {n: g * 0.25 for n, g in expected.items()}, strategy)


@on_ranks(2)
def test_a_gradient_divisor_of_a_parameter_is_applied_once() -> None:
    for strategy, average in itertools.product(LEVELS, (False, True)):
        options = fe.Options(average_in_collective=average)
        torch.manual_seed(0)
        model = models.Chain(models.Mlp(), models.Mlp())
        alone = copy.deepcopy(model)
        expert = model.blocks[1].up.weight  # type: ignore[union-attr]
        expert.gradient_divisor = 8.0  # type: ignore[union-attr]
        fe.shard(model, strategy=strategy, options=options)
        model(*vector_batch(2, 10 + dist.get_rank())).backward()
        expected = expected_gradients(alone, vector_batch, [10])
        expected["blocks.1.up.weight"] /= 8
        assert_gradients(model, expected, (strategy, average))


@on_ranks(2)
def test_a_penalty_on_the_parameters_adds_to_their_gradients() -> None:
    """A term of the loss that reads parameters outside forward, where they are sharded."""
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        tokens, targets = token_batch(2, seed=3)
        for turn in range(2):
            for each in (model, alone):
                penalty = sum(parameter.square().sum() for parameter in each.parameters())
                (each(tokens, targets) + 0.1 * penalty).backward()
            expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            assert_gradients(model, expected, (strategy, turn))
            model.zero_grad()
            alone.zero_grad()


@on_ranks(2)
def test_a_parameter_frozen_after_sharding_gets_no_gradient() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.Chain(models.Mlp(), models.Mlp())
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        batch = vector_batch(2, seed=3)
        for frozen in (False, True, False):
            for each in (model, alone):
                each.blocks[0].up.requires_grad_(not frozen)  # type: ignore[union-attr, operator]
                each(*batch).backward()
            expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            assert ("blocks.0.up.weight" in expected) != frozen
            assert_gradients(model, expected, (strategy, frozen))
            model.zero_grad()
            alone.zero_grad()
