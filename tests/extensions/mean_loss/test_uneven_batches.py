"""Ranks whose batches differ in number and size: ``even_batches`` and ``mean_loss``; at the end,
random epochs are compared with one process that has all batches."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests import reference
from tests.checkpoint.scene import update
from tests.megatron.configs import LEVEL_NAMES
from tests.pairs import PAIRS
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.training import mesh_of

WIDTH = 8


class Net(nn.Module):
    """Blocks, of which batches may leave out one, and a head; in fp64, so that the order of sums
    hardly matters. Returns the loss of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = torch.tanh(block(x))
        losses: Tensor = self.head(x).square().flatten()
        return losses


def rows(number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)


def sharded(level: str = "optim_grads_params") -> tuple[Net, fe.Engine]:
    model = Net()
    return model, fe.shard(model, strategy=level, units="blocks.*")


def add_mean(engine: fe.Engine, seed: int, num: int = 3) -> None:
    engine.mean_loss(engine.model(rows(num, seed)).sum(), num).backward()


def check_mean(
    model: nn.Module, batches: Iterable[Tensor], engine: fe.Engine | None = None, factor: float = 1
) -> None:
    """Gradients are ``factor`` times those of the mean over ``batches``, which is the last mean
    loss of ``engine``."""
    alone = Net()
    loss = alone(torch.cat(list(batches))).mean()
    (factor * loss).backward()
    found, expected = map(reference.full_gradients, (model, alone))
    for name, right in expected.items():
        assert reference.relative_error(found[name], right) < 1e-12, name  # type: ignore[arg-type]
    if engine is not None:
        assert engine.last_mean_loss is not None
        assert engine.last_mean_loss.item() == pytest.approx(loss.item(), rel=1e-12)


def check_seeds(model: nn.Module, seeds: Iterable[int], engine: fe.Engine | None = None) -> None:
    check_mean(model, [rows(3, seed) for seed in seeds], engine)


# Batches.


@pytest.mark.parametrize(
    ("lengths", "drop_last", "expected"),
    [
        # A rank that has run out repeats its last batch with weight 0.
        ((1, 3), False, [[("0.0", 1.0), ("0.0", 0.0), ("0.0", 0.0)], None]),
        ((1, 3), True, [[("0.0", 1.0)], [("1.0", 1.0)]]),
        ((0, 3), True, [[], []]),
        ((0, 0), False, [[], []]),
    ],
)
@on_ranks(2)
def test_batches_of_ranks_that_have_different_numbers(
    lengths: tuple[int, ...], drop_last: bool, expected: list[list[tuple[str, float]] | None]
) -> None:
    engine, rank = fe.shard(nn.Linear(2, 2)), dist.get_rank()
    own = [f"{rank}.{number}" for number in range(lengths[rank])]
    found = list(engine.even_batches(own, drop_last=drop_last))
    right = expected[rank]
    assert found == ([(batch, 1.0) for batch in own] if right is None else right)


@on_ranks(3)
def test_a_rank_without_a_batch_gets_a_copy_of_another_ranks_with_weight_0() -> None:
    engine, rank = fe.shard(nn.Linear(2, 2)), dist.get_rank()
    batches = [{"x": torch.full((2,), 10.0 * rank + number), "n": number} for number in range(2)]
    found = list(engine.even_batches(batches if rank == 1 else ()))
    numbers = [0, 1] if rank == 1 else [0, 0]
    assert [(batch["n"], weight) for batch, weight in found] == [
        (number, float(rank == 1)) for number in numbers
    ]
    assert [batch["x"].tolist() for batch, _ in found] == [[10.0 + each] * 2 for each in numbers]


class LoadedOnRank1:
    """A batch that only rank 1 can load, as if other ranks could not import its class."""

    def __reduce__(self) -> Any:
        return fail_unless_on_rank_1, ()


def fail_unless_on_rank_1() -> None:
    if dist.get_rank() != 1:
        raise ImportError("no such class")


@on_ranks(3)
def test_a_copy_of_a_batch_that_a_rank_cannot_load_fails_on_all() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    batches = [LoadedOnRank1()] if dist.get_rank() == 1 else []
    text = r"loader: .*; found an empty loader, .*: no such class"
    with pytest.raises(ValueError, match=text):
        next(engine.even_batches(batches))


@on_ranks(2)
def test_errors_of_one_rank_are_raised_on_all() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    seen: list[tuple[int, float]] = []

    def failing() -> Iterator[int]:
        yield from range(2)
        if dist.get_rank() == 1:
            raise OSError("disk on fire")
        yield from range(2, 4)

    with pytest.raises(OSError, match="disk on fire"):
        seen.extend(engine.even_batches(failing()))
    assert [batch for batch, _ in seen] == [0, 1]  # the batches before it
    batches = [lambda: None] if dist.get_rank() else []
    with pytest.raises(ValueError, match=r"an empty loader, and a batch of type function"):
        next(engine.even_batches(batches))
    model, net = sharded()
    count = torch.tensor(math.nan if dist.get_rank() else 3.0)
    with pytest.raises(ValueError, match="count: expected a number of samples; found nan"):
        net.mean_loss(model(rows(3, 0)).sum(), count)
    net.reset()
    # A step that was cut short does not count in the next one.
    with pytest.raises(OSError, match="disk on fire"), net.no_sync():
        [add_mean(net, batch) for batch, _ in net.even_batches(failing())]
    model.zero_grad()
    add_mean(net, dist.get_rank())
    check_seeds(model, [0, 1], net)


@on_ranks(2)
def test_whether_there_is_another_batch_is_known_without_waiting() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    read: list[int] = []

    def counted() -> Iterator[int]:
        for number in range(3):
            read.append(number)
            yield number

    batches = engine.even_batches(counted())
    assert next(batches) == (0, 1.0)
    assert read == [0, 1]  # whether there is another batch is sent, too
    # Another loop in between, as an evaluation within training.
    assert [batch for batch, _ in engine.even_batches("ab")] == ["a", "b"]
    assert [batch for batch, _ in batches] == [1, 2]


# The mean.


@on_ranks(2)
def test_there_is_no_last_mean_loss_before_a_backward_of_one() -> None:
    model, engine = sharded()
    losses = model(rows(3, dist.get_rank()))
    engine.mean_loss(losses.sum(), 3)  # Its backward does not run.
    losses.mean().backward()
    assert engine.last_mean_loss is None
    model.zero_grad()
    add_mean(engine, dist.get_rank())
    check_seeds(model, [0, 1], engine)


@on_few_ranks
def test_mean_loss_is_that_of_all_samples() -> None:
    rank, size = reference.rank_and_size()
    model, engine = sharded()
    if size == 1:
        assert list(engine.even_batches([5, 6])) == [(5, 1.0), (6, 1.0)]
    assert engine.last_mean_loss is None
    samples = [rows(1 + 3 * each, each) for each in range(size)]
    mine = model(samples[rank])
    # The number of samples as a tensor, as masks give it.
    engine.mean_loss(mine.sum(), torch.ones(len(mine)).sum()).backward()
    check_mean(model, samples, engine)
    model.zero_grad()
    # A loss scale, and clipping, act on the mean.
    mine = model(samples[rank])
    (1024 * engine.mean_loss(mine.sum(), len(mine))).backward()
    check_mean(model, samples, factor=1024)
    alone = Net()
    (1024 * alone(torch.cat(samples)).mean()).backward()
    right = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert abs(engine.clip_grad_norm_(1.0) / right - 1) < 1e-12
    check_mean(model, samples, factor=1024 / (right.item() + 1e-6))


@on_ranks(2)
def test_the_factor_is_not_rounded_where_gradients_are_bf16() -> None:
    policy = fe.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, param_dtype=torch.bfloat16)
    every = [torch.randn(7 + rank, 64) for rank in range(2)]
    mine = every[dist.get_rank()]
    expected = torch.cat(every).bfloat16().float().mean(0).expand(64, 64)
    for level in LEVEL_NAMES:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        engine = fe.shard(model, strategy=level, mp_policy=policy)
        engine.mean_loss(model(mine.bfloat16()).float().sum(), len(mine)).backward()
        (found,) = reference.full_gradients(model).values()
        assert found is not None
        assert found.dtype == torch.bfloat16
        # Rounding errors of elements cancel out in the norm. The factor 2 / 15 in bf16 would be
        # off by 0.3 %.
        assert abs(found.float().norm() / expected.norm() - 1) < 1.5e-3


@on_ranks(2)
def test_experts_have_the_mean_of_all_samples() -> None:
    model = Net()
    for param in model.blocks[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    experts = mesh_of(2, 1)["inner"]
    engine = fe.shard(model, units="blocks.*", expert_mesh=experts)
    x = rows(1 + 2 * dist.get_rank(), dist.get_rank())
    engine.mean_loss(model(x).sum(), len(x)).backward()
    # Each rank has its own expert. Its gradient is the sum over the rank's samples, divided by 4,
    # the number of all samples.
    expected = Net()
    (expected(x).sum() / 4).backward()
    found, right = (each.blocks[1].weight.grad for each in (model, expected))
    assert reference.relative_error(reference.full(found), right) < 1e-12  # type: ignore[arg-type]


@on_ranks(2)
def test_a_step_without_samples_has_zero_gradients() -> None:
    model, engine = sharded()
    engine.mean_loss(0.0 * model(rows(2, 0)).sum(), 0).backward()
    gradients = reference.full_gradients(model).values()
    assert not any(grad is None or grad.any() for grad in gradients)
    assert engine.last_mean_loss is not None
    assert engine.last_mean_loss.isnan()


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_the_loop_of_megatron(overlap: bool) -> None:
    """Also with ranks that have no microbatch; without overlap they may skip the backward."""
    model, rank = Net(), dist.get_rank()
    config = fe.DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    ddp = fe.DistributedDataParallel(model, config)
    for batch, weight in ddp.engine.even_batches([10] if rank else [20, 30]):
        ddp.zero_grad_buffer()
        x = rows(2 + rank, batch)
        ddp.engine.mean_loss(weight * ddp(x).sum(), weight * len(x)).backward()
        ddp.finish_grad_sync()
        right = [rows(2, 20), rows(3, 10)] if batch != 30 and weight else [rows(2, 30)]
        check_mean(model, right, ddp.engine)
    for step in range(0 if overlap else 3):
        ddp.zero_grad_buffer()
        if rank == 0 or step == 0:
            add_mean(ddp.engine, rank)
        ddp.finish_grad_sync()
        check_seeds(model, [0, 1] if step == 0 else [0], ddp.engine)
    # And a step without a mean, as ever.
    ddp.zero_grad_buffer()
    ddp(rows(3, 0)).mean().backward()
    ddp.finish_grad_sync()
    check_seeds(model, [0])


@on_ranks(2)
def test_backwards_from_cached_representations_belong_to_their_loss() -> None:
    for level in LEVEL_NAMES:
        (model, engine), rank = sharded(level), dist.get_rank()
        halves = [rows(2, rank), rows(2, 2 + rank)]
        with torch.no_grad():
            cached = [model(half).requires_grad_() for half in halves]
        engine.mean_loss(torch.cat(cached).sum(), 4).backward()
        with engine.no_sync():
            model(halves[0]).backward(cached[0].grad)
        model(halves[1]).backward(cached[1].grad)
        check_mean(model, [rows(2, each) for each in range(4)])


@on_ranks(2)
def test_microbatches_that_the_user_drops_do_not_count() -> None:
    rank = dist.get_rank()
    for level, to_none in itertools.product(LEVEL_NAMES, (True, False)):
        model, engine = sharded(level)
        for begin in (0, 10):
            engine.mean_loss(model(rows(3, 77)).sum(), 3)  # no backward runs with it
            with engine.no_sync():
                add_mean(engine, 99)
            model.zero_grad(set_to_none=to_none)  # an incomplete accumulation
            with engine.no_sync():
                add_mean(engine, begin + rank)
            add_mean(engine, begin + 2 + rank)
            check_seeds(model, range(begin, begin + 4), engine)
            model.zero_grad(set_to_none=to_none)


# Errors.


@on_ranks(1)
def test_arguments_are_checked() -> None:
    model, engine = sharded()
    each = model(rows(3, 0))
    for loss, count, words in (
        (each, 3, r"loss_sum: expected one element.*found shape \(3,\)"),
        (each.sum().detach(), 3, r"loss_sum:.*requires_grad=False"),
        (each.sum(), -1, "count: expected a number.*found -1"),
        (each.sum(), math.inf, "count: expected a number.*found inf"),
        (each.sum(), math.nan, "count: expected a number.*found nan"),
        (each.sum(), torch.ones(2), r"count:.*shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.mean_loss(loss, count)


def mean_of(engine: fe.Engine) -> Tensor:
    return engine.mean_loss(engine.model(rows(3, 0)).sum(), 3)


def after(end: str, engine: fe.Engine) -> None:
    loss = mean_of(engine)
    getattr(engine, end)()
    loss.backward()


def twice(engine: fe.Engine) -> None:
    loss = mean_of(engine)
    loss.backward(retain_graph=True)
    loss.backward()


def add_two(engine: fe.Engine) -> None:
    add_mean(engine, 0)
    add_mean(engine, 0)


def add_another(engine: fe.Engine) -> None:
    with engine.no_sync():
        add_mean(engine, dist.get_rank())
    engine.model(rows(3, 0)).mean().backward()


def another_on_rank_1(engine: fe.Engine) -> None:
    (engine.model(rows(3, 0)).mean() if dist.get_rank() else mean_of(engine)).backward()


def add_penalty(engine: fe.Engine) -> None:
    penalty = sum(param.square().sum() for param in engine.model.parameters())
    engine.mean_loss(engine.model(rows(3, 0)).sum() + penalty, 3).backward()


REFUSED: dict[Callable[[fe.Engine], None], str] = {
    add_two: "expected cleared gradients before a step's first",
    add_another: r"expected a result of mean_loss.*found another loss",
    another_on_rank_1: r"expected results of mean_loss.* on all ranks, or",
    add_penalty: r"found a gradient of the sharded parameter .*weight_decay",
    partial(after, "zero_grad_buffer"): "found one of a step that is over",
    partial(after, "reset"): "found one of a step that is over",
    twice: "found one of a step that is over",
}


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_what_is_no_mean_of_all_samples_is_refused_and_the_next_steps_are_right(level: str) -> None:
    rank, (model, engine) = dist.get_rank(), sharded(level)
    for refused, message in REFUSED.items():
        if refused is add_penalty and level == "no_shard":
            continue
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                refused(engine)
            engine.reset()
            model.zero_grad()
            # The next step may have either kind of loss.
            model(rows(3, rank)).mean().backward()
            check_seeds(model, [0, 1])
            model.zero_grad()
            add_mean(engine, 2 + rank)
            check_seeds(model, [2, 3], engine)
            model.zero_grad()


@on_ranks(2)
def test_another_loss_in_a_step_of_its_own_is_not_divided() -> None:
    rank = dist.get_rank()
    for level, to_none in itertools.product(LEVEL_NAMES, (True, False)):
        model, engine = sharded(level)
        with engine.no_sync():
            add_mean(engine, rank)
        model.zero_grad(set_to_none=to_none)
        model(rows(3, rank)).mean().backward()  # a step of its own, like one after a reduction
        check_seeds(model, [0, 1])
        engine.reset()
        model.zero_grad()
        add_mean(engine, rank)
        model(rows(3, rank)).mean().backward()
        check_mean(model, [rows(3, 0), rows(3, 1)], factor=2)


@on_ranks(2)
def test_no_other_loss_is_added_to_a_result() -> None:
    (model, engine), rank = sharded(), dist.get_rank()
    out = model(rows(3, rank))
    loss, other = engine.mean_loss(out.sum(), 3), out.square().mean()
    for combine in (
        lambda: loss + other,
        lambda: other + 0.1 * loss,
        lambda: sum([loss / 2, other]),
        lambda: torch.stack([loss, other]).sum(),
        lambda: other.add_(loss),
    ):
        with pytest.raises(RuntimeError, match=r"expected a result of mean_loss.*loss_sum"):
            combine()
    assert type(loss.detach() + other) is torch.Tensor, "a value can be logged"
    with pytest.raises(ValueError, match="no sharded parameters in inputs="):
        loss.backward(inputs=list(model.parameters()))
    (2 * loss / 2 + torch.tensor(1.0)).backward()
    check_seeds(model, [0, 1])


@on_ranks(2)
def test_units_that_are_not_reduced_are_refused() -> None:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.blocks[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    model(rows(1, 0))  # makes the engine
    engine = fe.engine.engine_of(model)
    assert engine is not None
    loss = engine.mean_loss(model(rows(3, 0)).sum(), 3)
    with pytest.raises(RuntimeError, match=r"expected the last microbatch to reduce.*blocks\.0"):
        loss.backward()


# Number of cases for each pair of levels and shape; all cases take about five minutes.
NUM_CASES = int(os.environ.get("FSDP_ENGINE_EPOCHS", "20"))


@dataclass(frozen=True)
class Batch:
    """A batch of ``size`` samples; a batch of 0 samples does not count."""

    seed: int
    size: int
    left_out: int

    def loss_sum(self, model: nn.Module) -> Tensor:
        losses: Tensor = model(rows(max(1, self.size), self.seed), self.left_out)
        return losses.sum() * (self.size > 0)


# By epoch and rank.
Epochs = list[list[list[Batch]]]


def draw_epochs(draw: random.Random, num_ranks: int, leaves_out: bool) -> Epochs:
    smallest, shortest = int(draw.random() > 0.3), int(draw.random() > 0.4)
    return [
        [
            [
                Batch(
                    seed=1000 * epoch + 100 * rank + number,
                    size=draw.randint(smallest, 5),
                    left_out=draw.randint(-1, 2) if leaves_out else -1,
                )
                for number in range(draw.randint(shortest, 6))
            ]
            for rank in range(num_ranks)
        ]
        for epoch in range(draw.randint(1, 3))
    ]


def batches_by_number(epoch: list[list[Batch]]) -> list[list[Batch]]:
    """Batches of all ranks. Repeated ones have size 0: these do not count, but a parameter that
    only they use has a gradient of zero, not None."""
    first = next((each[0] for each in epoch if each), None)
    return [
        [
            each[number] if number < len(each) else replace((each or [first])[-1], size=0)  # type: ignore[type-var]
            for each in epoch
        ]
        for number in range(max(map(len, epoch)))
    ]


def train_alone(epochs: Epochs, accumulate: int) -> tuple[nn.Module, list[float]]:
    model, losses = Net(), []
    optimizer = reference.adamw(model.parameters())
    for epoch in epochs:
        numbers = batches_by_number(epoch)
        for begin in range(0, len(numbers), accumulate):
            step = list(itertools.chain(*numbers[begin : begin + accumulate]))
            count = sum(batch.size for batch in step)
            total = torch.stack([batch.loss_sum(model) for batch in step]).sum()
            # A step without samples has gradients of zero.
            update(total / max(1, count), optimizer)
            losses.append(total.item() / count if count else math.nan)
    return model, losses


def check_epochs(seeds: Iterable[int], shape: tuple[int, ...], pair: tuple[str, str]) -> None:
    for seed in seeds:
        draw = random.Random(f"{seed} {shape}")
        accumulate, leaves_out = draw.randint(1, 3), draw.random() < 0.4
        epochs = draw_epochs(draw, math.prod(shape), leaves_out)
        expected, losses = train_alone(epochs, accumulate)
        outer = pair[1] if len(shape) > 1 else None
        engine = fe.shard(Net(), mesh_of(*shape), pair[0], outer, units="blocks.*")
        optimizer = reference.adamw(engine.model.parameters())
        found: list[float] = []
        for epoch in epochs:
            num, batches = max(map(len, epoch)), engine.even_batches(epoch[dist.get_rank()])
            for number, (batch, weight) in enumerate(batches, 1):
                is_last = number % accumulate == 0 or number == num
                with (
                    nullcontext() if is_last else engine.no_sync(),
                    engine.together() if leaves_out else nullcontext(),
                ):
                    loss = weight * batch.loss_sum(engine.model)
                    engine.mean_loss(loss, weight * batch.size).backward()
                if is_last:
                    found.append(engine.last_mean_loss.item())  # type: ignore[union-attr]
                    optimizer.step()
                    optimizer.zero_grad()
        assert found == pytest.approx(losses, rel=1e-6, nan_ok=True), (seed, epochs)
        weights = engine.full_state_dict()
        for name, right in expected.state_dict().items():
            assert reference.relative_error(weights[name], right) < 1e-11, (seed, epochs, name)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_epochs_of_random_lengths_train_as_one_process(ranks: Ranks, level: str) -> None:
    ranks.run(check_epochs, range(2), (2,), (level, "no_shard"), world_size=2)
    ranks.run(check_epochs, range(4, 5), (3,), (level, "no_shard"), world_size=3)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_random_epochs(ranks: Ranks, pair: tuple[str, str]) -> None:
    for first in range(0, NUM_CASES, 10):
        seeds = range(100 + first, 110 + first)
        for shape in ((2, 2), (2,), (3,), (4,)):
            ranks.run(check_epochs, seeds, shape, pair, world_size=math.prod(shape))
