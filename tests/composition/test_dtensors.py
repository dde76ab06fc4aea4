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
from tests.pool import Ranks, on_ranks
from tests.scenario import Scenario

NAMES = ("dp", "tp"), ("outer", "dp", "tp")
THOROUGH = pytest.mark.thorough


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
        # Ranks of one tensor-parallel group get the same batch.
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


Way = tuple[str, str, int, dict[str, Any]]
LEVEL_3 = ("optim_grads_params", "no_shard")
# Levels, microbatches, and arguments of ``scenario``.
WAYS: list[Way] = [
    ("no_shard", "no_shard", 2, {}),
    ("optim", "no_shard", 1, {"sequence": True, "by_torch": True}),
    ("optim_grads", "no_shard", 2, {"tied": True}),
    (*LEVEL_3, 1, {"sequence": True}),
    (*LEVEL_3, 2, {"tied": True, "by_torch": True}),
    # Two ranks cannot share these sizes evenly, so offsets of slices differ between them.
    (*LEVEL_3, 1, {"hidden": 17, "width": 6, "words": 23}),
]


def check(sizes: Sequence[int], ways: Sequence[Way]) -> None:
    for inner, outer, microbatches, options in ways:
        scenario(sizes, **options).but(pair=(inner, outer), microbatches=microbatches).check()


@on_ranks(4)
def test_tensor_parallel_and_one_data_axis() -> None:
    check((2, 2), WAYS)


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden": 17, "words": 21},
        *(pytest.param({"hidden": n}, marks=THOROUGH) for n in (3, 5)),
    ],
)
@on_ranks(4)
def test_uneven_shards_over_four_ranks(shape: dict[str, int]) -> None:
    check((1, 4), [(level, "no_shard", 1, shape) for level in ("optim_grads_params", "no_shard")])


@THOROUGH
def test_tensor_parallel_and_two_data_axes() -> None:
    pool = Ranks(8)
    try:
        pool.run(check, (2, 2, 2), [(*p, 2, {"sequence": True}) for p in PAIRS], world_size=8)
    finally:
        pool.close()


def with_recomputed_and_frozen_weights(sizes: Sequence[int]) -> None:
    def prepare(model: Any) -> None:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def frozen(**options: Any) -> Model:
        model = Model(**options)
        model.embedding.requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        return model

    scenario(sizes, sequence=True, prepare=prepare).check()
    for level in ("optim", "optim_grads_params"):
        scenario(sizes, sequence=True, model=frozen).but(pair=(level, "no_shard")).check()


def from_meta(sizes: Sequence[int]) -> None:
    """Initial values on any mesh equal those of the model without tensor parallelism."""
    mesh, states = mesh_of(sizes, NAMES[0]), []
    for is_sharded in (False, True):
        torch.manual_seed(8)
        with torch.device("meta"):
            model = Model(hidden=17)
        if is_sharded:
            cut(model, mesh["tp"], sequence=True)
        data = mesh["dp"] if is_sharded else mesh_of((dist.get_world_size(),), ("all",))
        states.append(fe.shard(model, data).full_state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def from_the_first_rank(sizes: Sequence[int]) -> None:
    """Each tensor-parallel rank gets the values of its first data-parallel rank."""
    mesh = mesh_of(sizes, NAMES[0])

    def change(model: Any) -> None:
        if mesh["dp"].get_local_rank():
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)

    scenario(sizes, prepare=change).but(options={"initial_values": "rank0"}).check()


def in_bf16(sizes: Sequence[int]) -> None:
    """Compared with data parallelism alone in the same dtypes; the two round differently."""
    policy = fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with_tensors = scenario(sizes, sequence=True).but(options={"mp_policy": policy})
    (ours, theirs) = (s.sharded() for s in (with_tensors, with_tensors.but(shard=fe.shard)))
    assert ours.losses == pytest.approx(theirs.losses, rel=0.02)
    assert ours.norms == pytest.approx(theirs.norms, rel=0.02)


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 4), marks=THOROUGH)])
@on_ranks(4)
def test_with_what_else_a_model_has(sizes: tuple[int, int]) -> None:
    with_recomputed_and_frozen_weights(sizes)
    from_meta(sizes)
    from_the_first_rank(sizes)
    in_bf16(sizes)
