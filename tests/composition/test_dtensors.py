"""Parameters that are DTensors over other mesh dimensions train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests import reference
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for
from tests.pairs import PAIRS
from tests.pool import Ranks
from tests.scenario import Scenario

NAMES = ("dp", "tp"), ("outer", "dp", "tp")


def scenario(
    sizes: Sequence[int],
    *,
    sequence: bool = False,
    tied: bool = False,
    by_torch: bool = False,
    prepare: Callable[[Any], object] = reference.nothing,
    model: Callable[..., nn.Module] = Model,
    **shape: int,
) -> Scenario:
    """With tensor parallelism along the last dimension.

    Args:
        by_torch: Gradients are clipped by torch's function.
        prepare: Called with the model between tensor parallelism and ``shard``.
    """
    mesh = mesh_of(sizes, NAMES[len(sizes) - 2])

    def batch(rows: int, seed: int) -> tuple[Tensor]:
        # Ranks of one tensor-parallel group get the same.
        steps, rank = divmod(seed - 1, 100)
        return (tokens_for(0, steps, rank // sizes[-1]),)

    def shard(made: Any, data: Any, **options: Any) -> Any:
        cut(made, mesh["tp"], sequence=sequence, tied=tied)
        prepare(made)
        engine: Any = fe.shard(made, data, **options)
        if by_torch:
            engine.clip_grad_norm_ = partial(nn.utils.clip_grad_norm_, list(made.parameters()))
        return engine

    return Scenario(
        model=lambda: model(tied=tied, **shape),
        batch=batch,
        mesh=mesh["dp"] if len(sizes) == 2 else mesh["outer", "dp"],
        shard=shard,
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        max_norm=0.5,
        seed=3,
        later=1e-4,
    )


def check(sizes: Sequence[int], ways: Sequence[tuple[str, str, int, dict[str, Any]]]) -> None:
    for inner, outer, microbatches, options in ways:
        scenario(sizes, **options).but(pair=(inner, outer), microbatches=microbatches).check()


WAYS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("no_shard", "no_shard", 2, {}),
    ("optim", "no_shard", 1, {"sequence": True, "by_torch": True}),
    ("optim_grads", "no_shard", 2, {"tied": True}),
    ("optim_grads_params", "no_shard", 1, {"sequence": True}),
    ("optim_grads_params", "no_shard", 2, {"tied": True, "by_torch": True}),
    # Hidden sizes that two ranks cannot share evenly, so that slices of replicas lie elsewhere.
    ("optim_grads_params", "no_shard", 1, {"hidden": 17, "width": 6, "words": 23}),
]


def test_tensor_parallel_and_one_data_axis(ranks: Ranks) -> None:
    ranks.run(check, (2, 2), WAYS)


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden": 17, "words": 21},
        pytest.param({"hidden": 3}, marks=pytest.mark.thorough),
        pytest.param({"hidden": 5}, marks=pytest.mark.thorough),
    ],
)
def test_uneven_shards_over_four_ranks(ranks: Ranks, shape: dict[str, int]) -> None:
    ways = [(level, "no_shard", 1, shape) for level in ("optim_grads_params", "no_shard")]
    ranks.run(check, (1, 4), ways)


@pytest.mark.thorough
def test_tensor_parallel_and_two_data_axes() -> None:
    pool = Ranks(8)
    try:
        pool.run(check, (2, 2, 2), [(*p, 2, {"sequence": True}) for p in PAIRS], world_size=8)
    finally:
        pool.close()


def with_recomputation(sizes: Sequence[int]) -> None:
    def recompute(model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    scenario(sizes, sequence=True, prepare=recompute).check()


def from_meta(sizes: Sequence[int]) -> None:
    """Values are those that the model without tensor parallelism would get, on any ranks."""
    states = []
    for tensor_parallel in (False, True):
        torch.manual_seed(8)
        mesh = mesh_of(sizes, NAMES[0])
        with torch.device("meta"):
            model = Model(hidden=17)
        if tensor_parallel:
            cut(model, mesh["tp"], sequence=True)
            engine = fe.shard(model, mesh["dp"], "optim_grads_params")
        else:
            engine = fe.shard(model, mesh_of((dist.get_world_size(),), ("all",)))
        states.append(engine.full_state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def from_the_first_rank(sizes: Sequence[int]) -> None:
    """Each place of tensor parallelism gets the values of its first data-parallel rank."""
    mesh = mesh_of(sizes, NAMES[0])

    def change(model: Any) -> None:
        if mesh["dp"].get_local_rank():
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)

    scenario(sizes, prepare=change).but(options={"initial_values": "rank0"}).check()


def with_planned_addresses(sizes: Sequence[int]) -> None:
    config = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
    scenario(sizes, tied=True).but(options={"config": config}).check()


def in_bf16(sizes: Sequence[int]) -> None:
    """Against data parallelism alone in the same dtypes, whose rounding is another."""
    policy = fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with_tensors = scenario(sizes, sequence=True).but(options={"mp_policy": policy})
    (ours, theirs) = (s.sharded() for s in (with_tensors, with_tensors.but(shard=fe.shard)))
    assert ours.losses == pytest.approx(theirs.losses, rel=0.02)
    assert ours.norms == pytest.approx(theirs.norms, rel=0.02)


def with_frozen_weights(sizes: Sequence[int]) -> None:
    def frozen(**options: Any) -> Model:
        model = Model(**options)
        model.embedding.requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        return model

    for level in ("optim", "optim_grads_params"):
        scenario(sizes, sequence=True, model=frozen).but(pair=(level, "no_shard")).check()


OPTIONS = (
    with_recomputation,
    from_meta,
    from_the_first_rank,
    with_planned_addresses,
    in_bf16,
    with_frozen_weights,
)


def in_many_ways(sizes: Sequence[int]) -> None:
    for run in OPTIONS:
        try:
            run(sizes)
        except Exception as error:
            error.add_note(run.__name__)
            raise


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 4), marks=pytest.mark.thorough)])
def test_with_what_else_a_model_has(ranks: Ranks, sizes: tuple[int, int]) -> None:
    ranks.run(in_many_ways, sizes)
