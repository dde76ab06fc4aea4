"""``fe.FixedOrderSums``: the same bits on any number of ranks, at every level, on every mesh."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.fixed_order_sums.exact_norm import exact_norm
from fsdp_engine.extensions.fixed_order_sums.step_sums import LeafLoop
from fsdp_engine.extensions.fixed_order_sums.tree_sum import TreeSum
from fsdp_engine.strategies import LEVELS
from tests.extensions.fixed_order_sums.scene import Net, Training, Values, batch_of
from tests.pairs import EVERY_PAIR
from tests.pool import Ranks, on_ranks

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def tree(values: list[Tensor]) -> Tensor:
    """The sum by definition. The length of its first part is the largest power of two below
    ``len(values)``."""
    if len(values) == 1:
        return values[0]
    half = 2 ** ((len(values) - 1).bit_length() - 1)
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("num", [4, 12, 20, 28])
def test_partial_sums_of_any_node_give_the_sum_of_the_tree(num: int, count: int) -> None:
    values = list(torch.randn(num, 50))
    found = TreeSum(num)
    for start in range(0, num, count):
        assert not found.is_complete
        found.add(tree(values[start : start + count]), count)
    assert found.is_complete
    total = found.take()
    assert torch.equal(total, tree(values))
    assert not torch.equal(total, torch.stack(values).sum(0)), "another order has other bits"


def test_a_sum_of_zeros_has_a_positive_sign() -> None:
    total = TreeSum(2)
    for _ in range(2):
        total.add(torch.tensor([-0.0]))
    assert not total.take().signbit().any()


@cache
def expected(training: Training) -> Values:
    """The results of one process without a process group, cached in each rank's process."""
    return training.but(shape=(), pair=("no_shard", "no_shard")).run()


def assert_equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if found[key] != wanted[key]] == []


WAYS = {
    "fp32": Training(),
    "bf16, means over samples": Training(mp_policy=BF16, has_means=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_any_number_of_ranks_gives_the_same_bits(ranks: Ranks, level: str, way: str) -> None:
    training = WAYS[way].but(pair=(level, "no_shard"))
    (wanted,) = ranks.run(expected, WAYS[way], world_size=1, group=False)
    assert_equal(ranks.run(training.run, world_size=1, group=False)[0], wanted)
    for world_size in (1, 2, 3, 4):
        for found in ranks.run(training.run, world_size=world_size):
            assert_equal(found, wanted)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
def test_any_mesh_and_pair_give_the_same_bits(
    ranks: Ranks, inner: str, outer: str, shape: tuple[int, int]
) -> None:
    (wanted,) = ranks.run(expected, Training(), world_size=1, group=False)
    training = Training(pair=(inner, outer), shape=shape)
    assert_equal(ranks.run(training.run)[0], wanted)


def test_gradients_are_the_mean_over_leaves_of_one_process(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model, gradients = Net(), []
    statistics = {key: value.clone() for key, value in model.named_buffers()}
    after = []
    for leaf in range(12):
        for key, value in model.named_buffers():
            value.copy_(statistics[key])
        x, is_rare = batch_of(0, leaf)
        model.zero_grad()
        torch.manual_seed(leaf)
        model(x, is_rare=is_rare).mean().backward()
        gradients.append([each.grad for each in model.parameters()])
        after.append(model.norm.running_var.double())
    wanted = [
        tree([torch.zeros(7, 7) if each is None else each for each in parts]) / 12
        for parts in zip(*gradients, strict=True)
        if parts[0] is None or parts[0].shape == (7, 7)
    ]
    for found, variance in ranks.run(gradients_of_leaves, world_size=3):
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(variance, (tree(after) / 12).float())


def gradients_of_leaves() -> tuple[list[Tensor], Tensor]:
    run = Training().start()
    for leaf in run.sums.microbatches(run.engine, 0):
        torch.manual_seed(leaf)
        run.backward(0, leaf)
    matrices = [each for each in run.model.parameters() if each.shape == (7, 7)]
    grads = [each.grad.full_tensor() for each in matrices]  # type: ignore[union-attr]
    return grads, run.model.norm.running_var


def half(folder: str, *, is_second: bool) -> Values | None:
    """Two steps and a checkpoint, or the third step after loading it."""
    run = Training().start()
    checkpointer = fe.Checkpointer(folder, run.engine, run.optimizer)
    if is_second:
        checkpointer.load()
        run.step(2)
        values = run.values()
        del values["norms"]
        return values
    for step in range(2):
        run.step(step)
    checkpointer.save(2)
    return None


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_training_resumed_on_other_ranks_has_the_same_bits(
    ranks: Ranks, before: int, after: int
) -> None:
    (wanted,) = ranks.run(expected, Training(), world_size=1, group=False)
    folder = tempfile.mkdtemp()
    ranks.run(_first, folder, world_size=before)
    for found in ranks.run(_second, folder, world_size=after):
        assert found is not None
        assert_equal(found, {key: value for key, value in wanted.items() if key != "norms"})


def _first(folder: str) -> None:
    half(folder, is_second=False)


def _second(folder: str) -> Values | None:
    return half(folder, is_second=True)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


@pytest.mark.parametrize("is_held", [False, True])
@on_ranks(2)
def test_a_step_begins_anew_after_an_exception_and_a_reset(is_held: bool) -> None:
    wanted = Training().run(1)
    run = Training().start()
    leaves = run.sums.microbatches(run.engine, 0)
    run.backward(0, next(leaves))
    x, is_rare = batch_of(0, next(leaves))
    with pytest.raises(ArithmeticError):
        Fails.apply(run.model(x, is_rare=is_rare)).mean().backward()
    if not is_held:
        leaves.close()
    run.engine.reset()
    for leaf in run.sums.microbatches(run.engine, 0):
        if is_held and leaf > 4:  # as if a traceback had kept the first loop until now
            leaves.close()
        run.backward(0, leaf)
    run.norms.append(run.engine.clip_grad_norm_(0.1))
    run.optimizer.step()
    assert_equal(run.values(), wanted)


@on_ranks(2)
def test_a_loop_that_is_left_after_its_last_leaf_is_complete() -> None:
    wanted = Training().run(1)
    run = Training().start()
    for _, leaf in zip(range(6), run.sums.microbatches(run.engine, 0), strict=False):
        run.backward(0, leaf)
    run.norms.append(run.engine.clip_grad_norm_(0.1))
    run.optimizer.step()
    assert_equal(run.values(), wanted)


class RareNorm(nn.Module):
    """Has a batch normalization that some leaves use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor, *, is_used: bool) -> Tensor:
        x = self.linear(x)
        return (self.norm(x) if is_used else x).square().mean()


def with_a_rare_norm() -> tuple[Tensor, Tensor]:
    """The statistics after a step. The model is in eval mode when the loop begins."""
    torch.manual_seed(0)
    model, sums = RareNorm().eval(), fe.FixedOrderSums(leaves=12)
    engine = fe.shard(model, strategy="optim_grads", extensions=[sums])
    for leaf in sums.microbatches(engine, 0):
        model.train()
        model(torch.randn(4, 3), is_used=leaf % 5 == 0).backward()
    counter = model.norm.num_batches_tracked
    assert model.norm.running_var is not None
    assert counter is not None
    return model.norm.running_var, counter


def test_statistics_that_some_leaves_update_are_those_of_one_rank(ranks: Ranks) -> None:
    ((wanted, count),) = ranks.run(with_a_rare_norm, world_size=1)
    assert count == 1
    assert not torch.equal(wanted, torch.ones(3))
    for variance, found_count in ranks.run(with_a_rare_norm, world_size=4):
        assert torch.equal(variance, wanted)
        assert found_count == 1


@pytest.mark.parametrize("order", [1, -1])
@on_ranks(2)
def test_a_nan_of_any_leaf_is_reported_by_checks(order: int) -> None:
    sums = fe.FixedOrderSums(leaves=4)
    model = nn.Linear(3, 3)
    engine = fe.shard(model, extensions=[sums, fe.GradientChecks()][::order])
    leaves = sums.microbatches(engine, 0)
    next(leaves)
    with pytest.raises(RuntimeError, match="gradient"):
        (model(torch.ones(2, 3)) * math.nan).sum().backward()


@on_ranks(2)
def test_the_callers_random_numbers_continue() -> None:
    run = Training().start()
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    run.step(0)
    assert torch.equal(torch.rand(2), wanted)


def _step_early(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        run.backward(0, leaf)
        run.optimizer.step()


def _without_backward(run: Any) -> None:
    list(run.sums.microbatches(run.engine, 0))


def _no_sync(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        with run.engine.no_sync():
            run.backward(0, leaf)
            run.backward(0, leaf)


def _no_clearing(run: Any) -> None:
    for step in range(2):
        for leaf in run.sums.microbatches(run.engine, step):
            run.backward(step, leaf)


def _outside(run: Any) -> None:
    run.backward(0, 0)


def _unfinished(run: Any) -> None:
    next(leaves := run.sums.microbatches(run.engine, 0))
    run.backward(0, 0)
    leaves.close()
    run.step(0)


def _some_means(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        losses = run.model(batch_of(0, leaf)[0], is_rare=False)
        loss = run.sums.mean_loss(run.engine, losses.sum(), 1) if leaf < 5 else losses.sum()
        loss.backward()


def _no_samples(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        losses = run.model(batch_of(0, leaf)[0], is_rare=False)
        run.sums.mean_loss(run.engine, 0 * losses.sum(), 0).backward()


def _mean_of_the_engine(run: Any) -> None:
    losses = run.model(batch_of(0, 0)[0], is_rare=False)
    run.engine.mean_loss(losses.sum(), 1)


def _norm(run: Any) -> None:
    run.step(0)
    run.engine.clip_grad_norm_(1.0, 3.0)


def _vector(run: Any) -> None:
    run.sums.mean_loss(run.engine, torch.zeros(2), 1)


def _vector_of_counts(run: Any) -> None:
    run.sums.mean_loss(run.engine, torch.zeros(()), torch.ones(2))


def _penalty(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        x, is_rare = batch_of(0, leaf)
        penalty = sum(each.square().sum() for each in run.model.parameters())
        (run.model(x, is_rare=is_rare).mean() + penalty).backward()


def _graph(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        x, is_rare = batch_of(0, leaf)
        run.model(x, is_rare=is_rare).mean().backward(create_graph=True)


def _buffer(run: Any) -> None:
    run.model.register_buffer("centre", torch.zeros(1))
    for leaf in run.sums.microbatches(run.engine, 0):
        run.model.centre.add_(1)
        run.backward(0, leaf)


def _mean_twice(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        losses = run.model(batch_of(0, leaf)[0], is_rare=False)
        for _ in range((1, 2, 0)[leaf % 3]):
            run.sums.mean_loss(run.engine, losses.sum(), 1)
        losses.sum().backward()


def _other_steps(run: Any) -> None:
    run.step(run.engine.mesh.rank)


def _no_backward_of_the_last(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        if leaf < 10:
            run.backward(0, leaf)


def _norm_early(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        run.backward(0, leaf)
        run.engine.clip_grad_norm_(1.0)


def _finish_early(run: Any) -> None:
    next(run.sums.microbatches(run.engine, 0))
    run.engine.finish_grad_sync()


def _after_a_reset(run: Any) -> None:
    for leaf in run.sums.microbatches(run.engine, 0):
        run.backward(0, leaf)
        run.engine.reset()


def _converted(run: Any) -> None:
    run.model.double()
    next(run.sums.microbatches(run.engine, 0))


MISUSES: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "step": (_step_early, RuntimeError, r"AdamW\.step: expected 6 reduced .*; found 1"),
    "no backward": (_without_backward, RuntimeError, "one backward of leaf .; found 0"),
    "no_sync": (_no_sync, RuntimeError, r"Do not use no_sync\(\)"),
    "zero_grad": (_no_clearing, RuntimeError, r"then zero_grad\(\); found gradients of the last"),
    "outside": (_outside, RuntimeError, r"within the loop of FixedOrderSums\.microbatches"),
    "unfinished": (_unfinished, RuntimeError, "expected a new step; found 1 of 6"),
    "some means": (
        _some_means,
        RuntimeError,
        "one call for each of 12 leaves, .* found 0 to 1 calls",
    ),
    "no samples": (_no_samples, RuntimeError, "found 1 to 1 calls and 0 samples"),
    "engine.mean_loss": (
        _mean_of_the_engine,
        RuntimeError,
        "extensions that reduce gradients again",
    ),
    "norm": (_norm, ValueError, "norm_type: expected 2 or inf"),
    "counts": (_vector_of_counts, ValueError, r"count: expected one element; found .* \(2,\)"),
    "penalty": (_penalty, RuntimeError, r"rare: .* found one of a penalty"),
    "create_graph": (_graph, RuntimeError, "expected no create_graph=True"),
    "buffer": (_buffer, RuntimeError, "centre: expected a buffer that forward does not change"),
    "mean twice": (_mean_twice, RuntimeError, "found 0 to 2 calls"),
    "other steps": (_other_steps, RuntimeError, "the same step on all ranks; found 0 and 1"),
    "last": (_no_backward_of_the_last, RuntimeError, r"one backward of leaf 1\d; found 0"),
    "norm early": (_norm_early, RuntimeError, r"clip_grad_norm_: expected 6 .*; found 1"),
    "finish early": (_finish_early, RuntimeError, "expected the backward of a leaf first"),
    "reset": (_after_a_reset, RuntimeError, r"found that engine\.reset\(\)"),
    "double": (_converted, ValueError, r"rare: expected gradients .* found torch\.float64"),
    "vector": (_vector, ValueError, r"loss_sum: expected one element; found a shape of \(2,\)"),
}


@pytest.mark.parametrize("name", MISUSES)
@on_ranks(2)
def test_a_misuse_raises_on_all_ranks(name: str) -> None:
    misuse, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        misuse(Training().start())


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "kind of leaves": (lambda: fe.FixedOrderSums(leaves=0), "leaves: expected a positive number"),
    "seed": (lambda: fe.FixedOrderSums(leaves=1, seed="a"), "seed: expected an integer"),  # type: ignore[arg-type]
    "leaves": (lambda: Training(leaves=6).start(), "a multiple of 4, .* found 6.*are 4 or 8"),
    "few leaves": (lambda: Training(leaves=3).start(), "a multiple of 4, .* The nearest are 4"),
    "dtypes": (
        lambda: Training(mp_policy=fe.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)).start(),
        "rare: expected gradients that are sent, summed, .* found torch.bfloat16",
    ),
    "two of them": (
        lambda: Training(extensions=lambda: [fe.QuantizedReduction()]).start(),
        "one that replaces reductions; found FixedOrderSums, QuantizedReduction",
    ),
    "SyncBatchNorm": (
        lambda: fe.shard(
            nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            extensions=[fe.FixedOrderSums(leaves=4)],
        ),
        "1: expected no SyncBatchNorm",
    ),
    "another engine": (
        lambda: next(fe.FixedOrderSums(leaves=4).microbatches(fe.shard(nn.Linear(2, 2)), 0)),
        "engine: expected one with FixedOrderSums",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@on_ranks(4)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, text = REFUSALS[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_an_inner_axis_of_three_is_refused_on_two_axes() -> None:
    axes = {"inner": SimpleNamespace(size=3), "outer": SimpleNamespace(size=2)}
    setup: Any = SimpleNamespace(data=SimpleNamespace(size=6, **axes))
    with pytest.raises(ValueError, match=r"mesh: expected an inner axis .* power of two"):
        fe.FixedOrderSums(leaves=6).check(setup)


def test_a_leaf_seeds_only_the_generators_that_its_loop_restores() -> None:
    engine: Any = SimpleNamespace(
        model=nn.Linear(2, 2), mesh=SimpleNamespace(device=torch.device("cpu"))
    )
    loop = LeafLoop(engine, 2, 0, 0)
    with mock.patch.object(torch.cuda, "manual_seed_all") as all_devices:
        loop.begin_leaf(0)
        all_devices.assert_not_called()
        expected = torch.initial_seed()
        loop._device = mock.Mock()
        loop.begin_leaf(0)
    loop._device.manual_seed.assert_called_once_with(expected)
    loop._device = None
    loop.end()


def norm_of(*shards: Tensor, order: float = 2.0) -> Tensor:
    return exact_norm(list(shards), order, None, torch.device("cpu"))


def test_the_norm_does_not_depend_on_the_shards_and_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-60, 60, (1000,), generator=generator)
    values = torch.ldexp(torch.randn(1000, generator=generator), powers)
    wanted = norm_of(values)
    squares = (each * each for each in values.double().tolist())
    assert float(wanted) == float(torch.tensor(math.sqrt(math.fsum(squares))).float())
    for _ in range(20):
        order = torch.randperm(1000, generator=generator)
        parts = values[order].split([1, 499, 0, 500])
        assert torch.equal(norm_of(*parts), wanted)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.0, -0.0], 0.0),
        ([1.4e-45], 1.4e-45),  # the smallest fp32 number
        ([3e-45, 4e-45], 4e-45),
        ([1e38, 1e38], 1.4142135e38),
        ([3.4e38, 3.4e38], math.inf),
        ([1.0, -math.inf], math.inf),
        ([math.inf, math.nan], math.nan),
    ],
)
def test_the_norm_of_extreme_values(values: list[float], wanted: float) -> None:
    found = norm_of(torch.tensor(values))
    torch.testing.assert_close(found, torch.tensor(wanted), equal_nan=True, rtol=1e-6, atol=1.5e-45)
    largest = norm_of(torch.tensor(values), order=math.inf)
    assert torch.equal(largest.nan_to_num(-1), torch.tensor(values).abs().max().nan_to_num(-1))
