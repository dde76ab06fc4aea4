"""Ranks whose batches differ in number and size: ``even_batches`` and ``mean_loss``.

Training on random epochs is in ``test_uneven_epochs.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests import reference
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.training import mesh_of

WIDTH = 8


class Net(nn.Module):
    """Two blocks and a head, in fp64 so that sums have one result in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().flatten()  # the loss of each sample


def rows(number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)


def assert_equal(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], note: object = ""
) -> None:
    """Weights or gradients by name are equal up to the rounding of fp64."""
    for name, right in expected.items():
        value = found[name]
        assert value is not None
        assert right is not None
        error = reference.relative_error(value, right)
        assert error < 1e-12, (note, name, error)


def sizes_of(rank: int, seed: int) -> list[int]:
    """The sizes of the batches of an epoch, of which each rank has another number."""
    draw = random.Random(1000 * seed + rank)
    return [draw.randint(1, 5) for _ in range(draw.randint(1, 6))]


def loader(rank: int, seed: int) -> Iterator[Tensor]:
    for number, size in enumerate(sizes_of(rank, seed)):
        yield rows(size, 100 * (10 * seed + rank) + number)


def alone(num_ranks: int, seed: int) -> tuple[nn.Module, list[float]]:
    """One process that has the samples of all ranks: its model and losses."""
    model = Net()
    optimizer = reference.adamw(model.parameters())
    epochs = [list(loader(rank, seed)) for rank in range(num_ranks)]
    losses = []
    for number in range(max(map(len, epochs))):
        batch = torch.cat([part for each in epochs for part in each[number : number + 1]])
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# Batches.


def batches_of(rank: int, lengths: tuple[int, ...]) -> Iterator[str]:
    for number in range(lengths[rank]):
        yield f"{rank}.{number}"


def pass_through(lengths: tuple[int, ...], drop_last: bool) -> list[tuple[str, float]]:
    engine = fe.shard(nn.Linear(2, 2))
    batches = batches_of(dist.get_rank(), lengths)
    return list(engine.even_batches(batches, drop_last=drop_last))


def test_a_rank_that_has_run_out_repeats_its_last_batch_with_weight_0(ranks: Ranks) -> None:
    found = ranks.run(pass_through, (1, 3), False, world_size=2)
    assert found[0] == [("0.0", 1.0), ("0.0", 0.0), ("0.0", 0.0)]
    assert found[1] == [("1.0", 1.0), ("1.1", 1.0), ("1.2", 1.0)]


def test_drop_last_ends_with_the_rank_that_has_fewest(ranks: Ranks) -> None:
    found = ranks.run(pass_through, (1, 3), True, world_size=2)
    assert found == [[("0.0", 1.0)], [("1.0", 1.0)]]
    assert ranks.run(pass_through, (0, 3), True, world_size=2) == [[], []]
    assert ranks.run(pass_through, (0, 0), False, world_size=2) == [[], []]


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


@on_ranks(2)
def test_a_batch_that_cannot_be_sent_to_a_rank_without_one_is_an_error_on_all() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    batches = [lambda: None] if dist.get_rank() else []
    with pytest.raises(ValueError, match=r"ranks without one.*a batch of type function"):
        next(engine.even_batches(batches))


@on_ranks(2)
def test_an_error_of_one_loader_is_raised_on_all_after_the_batches_before_it() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    seen: list[int] = []

    def failing() -> Iterator[int]:
        yield 0
        yield 1
        if dist.get_rank() == 1:
            raise OSError("disk on fire")
        yield 2
        yield 3

    with pytest.raises(OSError, match="disk on fire"):
        note_all(engine.even_batches(failing()), seen)
    assert seen == [0, 1]


def note_all(batches: Iterator[tuple[int, float]], seen: list[int]) -> None:
    for batch, _ in batches:
        seen.append(batch)


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
    assert read == [0, 1]  # and its message is sent
    # Another loop in between, as an evaluation within training.
    assert [batch for batch, _ in engine.even_batches("ab")] == ["a", "b"]
    assert [batch for batch, _ in batches] == [1, 2]


@on_few_ranks
def test_one_rank_or_none_has_its_batches_as_they_are() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    assert list(engine.even_batches([5, 6])) == [(5, 1.0), (6, 1.0)]


# The mean.


@on_few_ranks
def test_mean_loss_is_that_of_all_samples() -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, expected = Net(), Net()
    engine = fe.shard(model, units="blocks.*", strategy="optim_grads_params")
    assert engine.last_mean_loss is None
    samples = [rows(1 + 3 * each, each) for each in range(size)]
    expected(torch.cat(samples)).mean().backward()
    mine = model(samples[rank])
    # The number of samples as a tensor, as masks give it.
    engine.mean_loss(mine.sum(), torch.ones(len(mine)).sum()).backward()
    assert_equal(reference.full_gradients(model), reference.full_gradients(expected))


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_the_factor_is_not_rounded_where_gradients_are_bf16(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    policy = fe.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, param_dtype=torch.bfloat16)
    engine = fe.shard(model, strategy=level, mp_policy=policy)
    every = [torch.randn(7 + rank, 64) for rank in range(2)]
    mine = every[dist.get_rank()]
    engine.mean_loss(model(mine.bfloat16()).float().sum(), len(mine)).backward()
    expected = torch.cat(every).bfloat16().float().mean(0).expand(64, 64)
    (found,) = reference.full_gradients(model).values()
    assert found is not None
    assert found.dtype == torch.bfloat16
    # Roundings of gradients cancel out; 16 / 15 in bf16 is off by 0.3 %.
    assert abs(found.float().norm() / expected.norm() - 1) < 1.5e-3


@on_ranks(2)
def test_experts_have_the_mean_of_all_samples() -> None:
    model = Net()
    for param in model.blocks[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    experts = mesh_of(2, 1)["inner"]
    engine = fe.shard(model, units="blocks.*", expert_mesh=experts)
    x = rows(1 + 2 * dist.get_rank(), dist.get_rank())
    each = model(x)
    engine.mean_loss(each.sum(), len(x)).backward()
    # Each rank has an expert of its own, whose gradient is that of its own samples, over all.
    expected = Net()
    (expected(x).sum() / 4).backward()
    found = model.blocks[1].weight.grad
    right = expected.blocks[1].weight.grad
    assert found is not None
    assert right is not None
    local = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert reference.relative_error(local, right) < 1e-12


@on_ranks(2)
def test_a_step_without_samples_has_zero_gradients() -> None:
    model = Net()
    engine = fe.shard(model, units="blocks.*")
    engine.mean_loss(0.0 * model(rows(2, 0)).sum(), 0).backward()
    assert all(
        not grad.any() for grad in reference.full_gradients(model).values() if grad is not None
    )
    assert engine.last_mean_loss is not None
    assert engine.last_mean_loss.isnan()


@on_ranks(2)
def test_the_other_loop_of_megatron_has_it_too() -> None:
    expected, losses = alone(2, seed=4)
    model = Net()
    config = fe.DistributedDataParallelConfig(overlap_grad_reduce=True)
    ddp = fe.DistributedDataParallel(model, config)
    optimizer = reference.adamw(model.parameters())
    found = []
    for batch, weight in ddp.engine.even_batches(loader(dist.get_rank(), 4)):
        ddp.zero_grad_buffer()
        loss = ddp.engine.mean_loss(weight * ddp(batch).sum(), weight * len(batch))
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        assert ddp.engine.last_mean_loss is not None
        found.append(ddp.engine.last_mean_loss.item())
    assert found == pytest.approx(losses, rel=1e-6)
    assert_equal(ddp.engine.full_state_dict(), reference.full_weights(expected))


# Errors.


@on_ranks(2)
def test_arguments_are_checked() -> None:
    model = Net()
    engine = fe.shard(model)
    each = model(rows(3, 0))
    with pytest.raises(ValueError, match=r"loss_sum: expected one element.*found shape \(3,\)"):
        engine.mean_loss(each, 3)
    with pytest.raises(ValueError, match=r"loss_sum:.*requires_grad=False"):
        engine.mean_loss(each.sum().detach(), 3)
    for count in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"count: expected a number.*found {count}"):
            engine.mean_loss(each.sum(), count)
    with pytest.raises(ValueError, match=r"count:.*shape \(2,\)"):
        engine.mean_loss(each.sum(), torch.ones(2))


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_gradients_that_are_not_cleared_are_refused(level: str) -> None:
    model = Net()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    for _ in range(2):
        engine.mean_loss(model(rows(3, 0)).sum(), 3).backward()
        model.zero_grad()
    engine.mean_loss(model(rows(3, 0)).sum(), 3).backward()
    kept = reference.full_gradients(model)
    with pytest.raises(RuntimeError, match="expected cleared gradients before a step's first"):
        engine.mean_loss(model(rows(3, 0)).sum(), 3).backward()
    engine.reset()
    model.zero_grad()
    engine.mean_loss(model(rows(3, 0)).sum(), 3).backward()
    for name, grad in reference.full_gradients(model).items():
        right = kept[name]
        assert grad is not None
        assert right is not None
        assert torch.equal(grad, right), name


def check_mean(
    model: nn.Module, engine: fe.Engine | None, expected: nn.Module, seeds: list[int]
) -> None:
    """Gradients are those of ``expected`` with a batch of 3 samples for each seed; and so is the
    last mean loss of ``engine``, if it is given."""
    expected.zero_grad()
    loss = expected(torch.cat([rows(3, seed) for seed in seeds])).mean()
    loss.backward()
    assert_equal(reference.full_gradients(model), reference.full_gradients(expected))
    if engine is None:
        return
    assert engine.last_mean_loss is not None
    assert engine.last_mean_loss.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("to_none", [True, False])
@on_ranks(2)
def test_microbatches_that_the_user_drops_do_not_count(level: str, to_none: bool) -> None:
    model = Net()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    rank = dist.get_rank()
    for begin in (0, 10):
        engine.mean_loss(model(rows(3, 77)).sum(), 3)  # no backward runs with it
        with engine.no_sync():
            engine.mean_loss(model(rows(3, 99)).sum(), 3).backward()
        model.zero_grad(set_to_none=to_none)  # an incomplete accumulation
        with engine.no_sync():
            engine.mean_loss(model(rows(3, begin + rank)).sum(), 3).backward()
        engine.mean_loss(model(rows(3, begin + 2 + rank)).sum(), 3).backward()
        check_mean(model, engine, Net(), [begin + each for each in range(4)])
        model.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_another_loss_in_the_step_is_refused_or_not_divided(level: str) -> None:
    model, seed = Net(), dist.get_rank()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    for to_none in (True, False):
        with engine.no_sync():
            engine.mean_loss(model(rows(3, seed)).sum(), 3).backward()
        with pytest.raises(
            RuntimeError, match=r"expected a result of mean_loss.*found another loss"
        ):
            model(rows(3, seed)).mean().backward()
        engine.reset()
        with engine.no_sync():
            engine.mean_loss(model(rows(3, seed)).sum(), 3).backward()
        model.zero_grad(set_to_none=to_none)
        model(rows(3, seed)).mean().backward()  # a step of its own, as is one after a reduction
        expected = Net()
        expected(torch.cat([rows(3, 0), rows(3, 1)])).mean().backward()
        assert_equal(reference.full_gradients(model), reference.full_gradients(expected))
        engine.reset()
        model.zero_grad()
        engine.mean_loss(model(rows(3, seed)).sum(), 3).backward()
        model(rows(3, seed)).mean().backward()
        doubled = {
            n: None if g is None else g / 2 for n, g in reference.full_gradients(model).items()
        }
        assert_equal(doubled, reference.full_gradients(expected))
        model.zero_grad()


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_another_loss_on_some_ranks_is_refused_on_all(level: str) -> None:
    model, seed = Net(), dist.get_rank()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    engine.mean_loss(model(rows(3, seed)).sum(), 3).backward()
    model.zero_grad()
    for _ in range(2):
        loss = model(rows(3, seed))
        with pytest.raises(RuntimeError, match=r"expected results of mean_loss.* on all ranks, or"):
            (engine.mean_loss(loss.sum(), 3) if seed == 0 else loss.mean()).backward()
        engine.reset()
        model.zero_grad()
        for begin in (0, 2):  # the next steps are right, with either kind
            loss = model(rows(3, begin + seed))
            (engine.mean_loss(loss.sum(), 3) if begin else loss.mean()).backward()
            check_mean(model, engine if begin else None, Net(), [begin, begin + 1])
            model.zero_grad()


@on_ranks(2)
def test_no_other_loss_is_added_to_a_result() -> None:
    model, seed = Net(), dist.get_rank()
    engine = fe.shard(model, strategy="optim_grads_params", units="blocks.*")
    out = model(rows(3, seed))
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
    expected = Net()
    expected(torch.cat([rows(3, 0), rows(3, 1)])).mean().backward()
    assert_equal(reference.full_gradients(model), reference.full_gradients(expected))


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_backwards_from_cached_representations_belong_to_their_loss(level: str) -> None:
    model, seed = Net(), dist.get_rank()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    halves = [rows(2, seed), rows(2, 2 + seed)]
    with torch.no_grad():
        cached = [model(half).requires_grad_() for half in halves]
    engine.mean_loss(torch.cat(cached).sum(), 4).backward()
    with engine.no_sync():
        model(halves[0]).backward(cached[0].grad)
    model(halves[1]).backward(cached[1].grad)
    expected = Net()
    expected(torch.cat([rows(2, each) for each in range(4)])).mean().backward()
    assert_equal(reference.full_gradients(model), reference.full_gradients(expected))


@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
@on_ranks(2)
def test_penalties_on_sharded_parameters_are_refused(level: str) -> None:
    model = Net()
    engine = fe.shard(model, strategy=level, units="blocks.*")
    penalty = sum(param.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"found one of .*weight_decay"):
        engine.mean_loss(model(rows(3, 0)).sum() + penalty, 3).backward()
    engine.reset()
    model.zero_grad()
    engine.mean_loss(model(rows(3, dist.get_rank())).sum(), 3).backward()
    check_mean(model, engine, Net(), [0, 1])


@on_ranks(2)
def test_a_rank_without_a_microbatch_has_the_mean_of_the_others() -> None:
    model, expected = Net(), Net()
    config = fe.DistributedDataParallelConfig(overlap_grad_reduce=False)
    ddp = fe.DistributedDataParallel(model, config)
    for step in range(3):
        ddp.zero_grad_buffer()
        if dist.get_rank() == 0 or step == 0:
            ddp.engine.mean_loss(ddp(rows(3, dist.get_rank())).sum(), 3).backward()
        ddp.finish_grad_sync()
        check_mean(model, ddp.engine, expected, [0, 1] if step == 0 else [0])
    # And a step without a mean, as ever.
    ddp.zero_grad_buffer()
    ddp(rows(3, 0)).mean().backward()
    ddp.finish_grad_sync()
    check_mean(model, ddp.engine, expected, [0])


@on_ranks(2)
def test_a_wrong_first_count_of_one_rank_is_raised_on_all() -> None:
    engine = fe.shard(Net())
    count = torch.tensor(math.nan if dist.get_rank() else 3.0)
    with pytest.raises(ValueError, match="count: expected a number of samples; found nan"):
        engine.mean_loss(engine.model(rows(3, 0)).sum(), count)


@on_ranks(2)
def test_a_result_of_a_step_that_is_over_is_refused() -> None:
    model = Net()
    engine = fe.shard(model, units="blocks.*")
    for end in (engine.zero_grad_buffer, engine.reset):
        loss = engine.mean_loss(model(rows(3, 0)).sum(), 3)
        end()
        with pytest.raises(RuntimeError, match="found one of a step that is over"):
            loss.backward()
        engine.reset()
    loss = engine.mean_loss(model(rows(3, 0)).sum(), 3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="found one of a step that is over"):
        loss.backward()


@on_ranks(2)
def test_a_loss_scale_and_clipping_act_on_the_mean() -> None:
    model, expected = Net(), Net()
    engine = fe.shard(model, units="blocks.*", strategy="optim_grads")
    rank = dist.get_rank()
    samples = [rows(1 + 3 * each, each) for each in range(2)]
    (1024 * expected(torch.cat(samples)).mean()).backward()
    loss = engine.mean_loss(model(samples[rank]).sum(), len(samples[rank]))
    (1024 * loss).backward()
    norm = engine.clip_grad_norm_(1.0)
    right = nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    assert abs(norm / right - 1) < 1e-12
    assert_equal(reference.full_gradients(model), reference.full_gradients(expected))


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
