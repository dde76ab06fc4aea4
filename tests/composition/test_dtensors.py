"""Parameters that are DTensors over other mesh dimensions train as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_engine as fe
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for, whole
from tests.pairs import PAIRS
from tests.pool import Ranks

NUM_STEPS, MAX_NORM = 3, 0.5
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NAMES = ("dp", "tp"), ("outer", "dp", "tp")


@dataclass
class Steps:
    """What training gave: of each step the loss (mean over microbatches and ranks), the norm and
    all gradients; and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def alone(model: Model, num_ranks: int, num_micro: int) -> Steps:
    """Plain torch on all ranks' data."""
    steps = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(NUM_STEPS):
        total = 0.0
        for micro in range(num_micro):
            for rank in range(num_ranks):
                loss = model(tokens_for(step, micro, rank)) / (num_ranks * num_micro)
                loss.backward()
                total += loss.item()
        steps.losses.append(total)
        steps.grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        steps.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    steps.weights = {name: whole(p) for name, p in model.named_parameters()}
    return steps


def sharded(engine: fe.Engine, rank: int, num_ranks: int, num_micro: int, by_torch: bool) -> Steps:
    steps = Steps()
    model: Any = engine.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(NUM_STEPS):
        total = 0.0
        for micro in range(num_micro):
            with engine.no_sync() if micro < num_micro - 1 else torch.enable_grad():
                loss = model(tokens_for(step, micro, rank)) / num_micro
                loss.backward()
            total += loss.item()
        mean = torch.tensor(total)
        if num_ranks > 1:
            dist.all_reduce(mean, group=engine.mesh.control_group)
        steps.losses.append(mean.item() / num_ranks)
        steps.grads.append({name: whole(p.grad) for name, p in model.named_parameters()})
        if by_torch:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            norm = engine.clip_grad_norm_(MAX_NORM)
        steps.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    steps.weights = {name: whole(p) for name, p in model.named_parameters()}
    return steps


def differences(found: Steps, expected: Steps, tolerance: float = 2e-5) -> list[str]:
    lines = []
    for step in range(NUM_STEPS):
        for what in ("losses", "norms"):
            mine, theirs = getattr(found, what)[step], getattr(expected, what)[step]
            if abs(mine - theirs) > tolerance * abs(theirs):
                lines.append(f"step {step}: {what} {mine} instead of {theirs}")
    pairs = [
        (f"gradient {step}", a, b)
        for step, (a, b) in enumerate(zip(found.grads, expected.grads, strict=True))
    ]
    for what, mine, theirs in [*pairs, ("weight", found.weights, expected.weights)]:
        lines += [
            f"{what} of {name}: {(mine[name] - theirs[name]).abs().max()}"
            for name in theirs
            if not torch.allclose(mine[name], theirs[name], rtol=1e-3, atol=tolerance)
        ]
    return lines


def trained_as_alone(
    sizes: Sequence[int],
    strategy: str,
    outer: str,
    num_micro: int = 1,
    *,
    sequence: bool = False,
    tied: bool = False,
    by_torch: bool = False,
    **shape: int,
) -> list[str]:
    """Differences to one process, with tensor parallelism along the last dimension."""
    torch.manual_seed(3)
    model = Model(tied=tied, **shape)
    num_data = dist.get_world_size() // sizes[-1]
    expected = alone(copy.deepcopy(model), num_data, num_micro)
    names = NAMES[len(sizes) - 2]
    mesh = mesh_of(sizes, names)
    cut(model, mesh["tp"], sequence=sequence, tied=tied)
    data = mesh["dp"] if len(sizes) == 2 else mesh["outer", "dp"]
    engine = fe.shard(model, data, strategy, outer)
    return differences(sharded(engine, engine.mesh.rank, num_data, num_micro, by_torch), expected)


def in_ways(sizes: Sequence[int], ways: Sequence[tuple[Any, ...]]) -> list[str]:
    found = []
    for strategy, outer, num_micro, options in ways:
        lines = trained_as_alone(sizes, strategy, outer, num_micro, **options)
        found += [f"{strategy} / {outer}, {num_micro}, {options}: {line}" for line in lines]
    return found


WAYS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("no_shard", "no_shard", 3, {}),
    ("optim", "no_shard", 1, {"sequence": True, "by_torch": True}),
    ("optim_grads", "no_shard", 3, {"tied": True}),
    ("optim_grads_params", "no_shard", 1, {"sequence": True}),
    ("optim_grads_params", "no_shard", 3, {"tied": True, "by_torch": True}),
    # Hidden sizes that two ranks cannot share evenly, so that slices of replicas lie elsewhere.
    ("optim_grads_params", "no_shard", 1, {"hidden": 17, "width": 6, "words": 23}),
]


def test_tensor_parallel_and_one_data_axis(ranks: Ranks) -> None:
    for lines in ranks.run(in_ways, (2, 2), WAYS):
        assert not lines, lines


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden": 17, "words": 21},
        pytest.param({"hidden": 3}, marks=pytest.mark.thorough),
        pytest.param({"hidden": 5}, marks=pytest.mark.thorough),
    ],
)
def test_uneven_shards_over_four_ranks(ranks: Ranks, shape: dict[str, int]) -> None:
    ways = [("optim_grads_params", "no_shard", 1, shape), ("no_shard", "no_shard", 1, shape)]
    for lines in ranks.run(in_ways, (1, 4), ways):
        assert not lines, lines


@pytest.mark.thorough
def test_tensor_parallel_and_two_data_axes() -> None:
    pool = Ranks(8)
    ways = [(*pair, 3, {"sequence": True}) for pair in PAIRS]
    try:
        for lines in pool.run(in_ways, (2, 2, 2), ways, world_size=8):
            assert not lines, lines
    finally:
        pool.close()


def in_many_ways(sizes: Sequence[int]) -> list[str]:
    """Mixed precision, recomputation, the meta device, frozen weights, planned addresses."""
    found = []
    for name in OPTIONS:
        lines = OPTIONS[name](sizes)
        found += [f"{name}: {line}" for line in lines]
    return found


def prepared(sizes: Sequence[int], **options: Any) -> tuple[Steps, Model, Any]:
    torch.manual_seed(3)
    model = Model(**options)
    expected = alone(copy.deepcopy(model), sizes[0], 2)
    return expected, model, mesh_of(sizes, NAMES[0])


def with_recomputation(sizes: Sequence[int]) -> list[str]:
    expected, model, mesh = prepared(sizes)
    cut(model, mesh["tp"], sequence=True)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    engine = fe.shard(model, mesh["dp"], "optim_grads_params")
    found = sharded(engine, engine.mesh.rank, sizes[0], 2, False)
    for values in (*found.grads, found.weights):
        for name in list(values):
            values[name.replace("_checkpoint_wrapped_module.", "")] = values.pop(name)
    return differences(found, expected)


def from_meta(sizes: Sequence[int]) -> list[str]:
    """Values are those that the model without tensor parallelism would get, on any ranks."""
    torch.manual_seed(8)
    with torch.device("meta"):
        lone: Any = Model(hidden=17)
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
    assert lone.embedding.weight.is_meta
    return [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]


def from_the_first_rank(sizes: Sequence[int]) -> list[str]:
    """Each place of tensor parallelism gets the values of its first data-parallel rank."""
    expected, model, mesh = prepared(sizes)
    if mesh["dp"].get_local_rank():
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    cut(model, mesh["tp"])
    engine = fe.shard(model, mesh["dp"], "optim_grads_params", initial_values="rank0")
    return differences(sharded(engine, engine.mesh.rank, sizes[0], 2, False), expected)


def with_planned_addresses(sizes: Sequence[int]) -> list[str]:
    expected, model, mesh = prepared(sizes, tied=True)
    cut(model, mesh["tp"], tied=True)
    config = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
    engine = fe.shard(model, mesh["dp"], "optim_grads_params", config=config)
    return differences(sharded(engine, engine.mesh.rank, sizes[0], 2, False), expected)


def in_bf16(sizes: Sequence[int]) -> list[str]:
    """Against data parallelism alone in the same dtypes, whose rounding is another."""
    losses = []
    for tensor_parallel in (False, True):
        torch.manual_seed(3)
        model, mesh = Model(), mesh_of(sizes, NAMES[0])
        if tensor_parallel:
            cut(model, mesh["tp"], sequence=True)
        policy = fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        engine = fe.shard(model, mesh["dp"], "optim_grads_params", mp_policy=policy)
        steps = sharded(engine, engine.mesh.rank, sizes[0], 2, False)
        losses.append([*steps.losses, *steps.norms])
    pairs = zip(*losses, strict=True)
    return [f"{a} and {b}" for a, b in pairs if abs(a - b) > 0.02 * abs(a)]


def with_frozen_weights(sizes: Sequence[int]) -> list[str]:
    expected_model = prepared(sizes)[1]
    for each in (expected_model,):
        each.embedding.requires_grad_(False)
        each.blocks[1].up.weight.requires_grad_(False)
    found = []
    for level in ("optim", "optim_grads_params"):
        model, mesh = copy.deepcopy(expected_model), mesh_of(sizes, NAMES[0])
        cut(model, mesh["tp"], sequence=True)
        engine = fe.shard(model, mesh["dp"], level)
        twin = copy.deepcopy(expected_model)
        loss = sum(twin(tokens_for(0, 0, rank)) for rank in range(sizes[0])) / sizes[0]
        loss.backward()
        engine.model(tokens_for(0, 0, engine.mesh.rank)).backward()
        theirs = dict(twin.named_parameters())
        for name, param in model.named_parameters():
            grad = theirs[name].grad
            if (grad is None) != (param.grad is None):
                found.append(f"{level}: {name} {grad is None}")
            elif grad is not None and not torch.allclose(whole(param.grad), grad, atol=1e-5):
                found.append(f"{level}: gradient of {name}")
    return found


OPTIONS: dict[str, Callable[[Sequence[int]], list[str]]] = {
    "recomputation": with_recomputation,
    "meta": from_meta,
    "rank0": from_the_first_rank,
    "planned addresses": with_planned_addresses,
    "bf16": in_bf16,
    "frozen": with_frozen_weights,
}


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 4), marks=pytest.mark.thorough)])
def test_with_what_else_a_model_has(ranks: Ranks, sizes: tuple[int, int]) -> None:
    for lines in ranks.run(in_many_ways, sizes):
        assert not lines, lines
