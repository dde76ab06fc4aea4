"""Estimates equal the bytes that the engine holds and sends."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.planner.estimates import compare, estimate
from fsdp_engine.strategies import Axis
from tests import models
from tests.messages import watched
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import PAIRS_AND_WAYS
from tests.pool import on_ranks

POLICIES = {
    "fp32": fe.MixedPrecisionPolicy(),
    "bf16": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16 wire": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16 summands": fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
}
# Mesh, policy, budget.
CASES: list[tuple[tuple[int, int], str, int | None]] = [
    *(((2, 2), policy, None) for policy in POLICIES),
    ((2, 2), "fp32", 0),
    ((2, 2), "bf16 wire", 10**9),
    ((4, 1), "bf16", None),
    ((1, 4), "bf16 wire", None),
]
# Each policy once, with two of the meshes and two of the budgets.
FEW_CASES = [CASES[0], CASES[3], CASES[5], CASES[6]]


def rows(name: str, parameter: Tensor) -> int:
    return parameter.shape[-1] if parameter.ndim == 2 and parameter.numel() else 1


def counted(sent: Counter[Any], key: Callable[[Any], Any]) -> Any:
    """Counts sent bytes within the context, by ``key(group)``."""

    def count_send(group: Any, tensor: Tensor) -> None:
        sent[key(group)] += tensor.nbytes

    def count_all_reduce(group: Any, tensor: Tensor, options: Any) -> None:
        if tensor.is_floating_point():  # others are small messages
            sent[key(group)] += round(2 * tensor.nbytes * (group.size() - 1) / group.size())

    return watched(count_send, count_all_reduce)


def train_and_measure(
    model: nn.Module, batch: tuple[Tensor, ...], shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[fe.Engine, dict[str, int], Counter[Axis]]:
    """Bytes that the engine holds and sends in its second step, by the planner's names."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    engine = fe.shard(model, mesh, **options)
    groups = {
        id(group): axis
        for axis in Axis
        for place in [engine.mesh.axis(axis)]
        for group in (place.gather_group, place.reduce_group)
        if group is not None
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent: Counter[Any] = Counter()
    with counted(sent, lambda group: groups[id(group)]):
        for _ in range(2):
            sent.clear()
            engine.peak_memory_bytes(reset=True)
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    held, peak = engine.memory_bytes(), engine.peak_memory_bytes()
    found = {
        "weight_bytes": held.get("main", 0) + held.get("model", 0),
        "grad_bytes": peak.get("grad", 0),  # held until gradients are cleared
        "full_bytes": peak.get("full", 0),
        "staging_bytes": peak.get("staging", 0),
    }
    assert held.keys() <= {"main", "model", "grad"}, held
    return engine, found, sent


def compared(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, ...],
    shape: tuple[int, int] = (2, 2),
    *,
    are_peaks_exact: bool = True,
    sends: bool = True,
    **options: Any,
) -> list[str]:
    """Every difference between the planner and an engine."""
    torch.manual_seed(1)
    model = make()
    planned = estimate(model, world_size=4, outer_size=shape[0], **options)
    engine, found, sent = train_and_measure(model, batch, shape, options)
    if not are_peaks_exact:
        for peak in ("full_bytes", "staging_bytes"):
            found[peak] = max(found[peak], getattr(planned, peak))
    for key, count in described(engine).items():
        found[f"described {key}"] = count
    if sends:
        found["inner_traffic_bytes"] = sent[Axis.INNER]
        found["outer_traffic_bytes"] = sent[Axis.OUTER]
    expected = {key: getattr(planned, key.removeprefix("described ")) for key in found}
    return [
        f"{type(model).__name__}, {shape}, {options}: {key} is {count}, planned {expected[key]}"
        for key, count in found.items()
        if count != expected[key]
    ]


def described(engine: fe.Engine) -> dict[str, int]:
    """Sums over the engine's buffers."""
    gradients = (buffer.grads for buffer in engine.buffers)
    return {
        "num_elements": sum(buffer.layout.num_tensor_elements for buffer in engine.buffers),
        "padding": sum(buffer.layout.padding for buffer in engine.buffers),
        "weight_bytes": sum(buffer.weights.rest_bytes for buffer in engine.buffers),
        "grad_bytes": sum(each.rest_bytes for each in gradients if each is not None),
    }


@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
@on_ranks()
def test_an_engine_holds_and_sends_the_planned_bytes(
    strategy: str, outer: str, all_ways: bool
) -> None:
    """On several meshes, dtypes and budgets; also with small units that are joined."""
    pair = {"strategy": strategy, "outer_strategy": outer}
    lines = []
    for shape, name, budget in CASES if all_ways else FEW_CASES:
        config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=budget)
        options = {"mp_policy": POLICIES[name], "config": config, **pair}
        lines += compared(lambda: Transformer(4, tied=True), token_batch(2, 1), shape, **options)
    block = sum(parameter.numel() for parameter in models.Block().parameters())
    for tied, least in ((False, block), (True, 2 * block), (False, 10**6)):
        make = functools.partial(Transformer, 4, tied)
        lines += compared(make, token_batch(2, 1), min_unit_size=least, **pair)
    assert not lines, "\n".join(lines[:10])


@on_ranks()
def test_models_with_habits_are_planned_as_they_are_sharded() -> None:
    """Frozen parameters, mixed dtypes, scalars, granules, chosen units, another communication
    dtype. Sent bytes are compared only for a model with frozen weights."""
    lines = []
    for make, (name, granule), level in itertools.product(
        (models.lora_model, models.mixed_model, models.NestedUnits),
        [("fp32", None), ("bf16 wire", rows)],
        ("optim", "optim_grads_params"),
    ):
        if make is models.mixed_model and name != "fp32":
            continue  # its norm must be in fp32
        options: dict[str, Any] = {"mp_policy": POLICIES[name], "granule": granule}
        if make is models.NestedUnits and granule is None:
            options["units"] = [nn.Linear, models.SequentialBlock]
        given = {"strategy": level, "outer_strategy": level, "are_peaks_exact": False, **options}
        lines += compared(make, vector_batch(2, 1), sends=False, **given)
    for level, outer in (("optim", "no_shard"), ("optim_grads", "optim_grads")):
        given = {"strategy": level, "outer_strategy": outer, "mp_policy": POLICIES["bf16"]}
        lines += compared(models.lora_model, vector_batch(2, 1), are_peaks_exact=False, **given)
    assert not lines, "\n".join(lines[:10])


@on_ranks()
def test_a_buffer_describes_its_staging() -> None:
    """The last reduction needs a converted copy of the accumulation buffer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    linear = nn.Linear(16, 16, bias=False)
    engine = fe.shard(linear, mesh, "optim_grads", "no_shard", mp_policy=POLICIES["bf16 wire"])
    linear(torch.ones(2, 16)).sum().backward()
    (buffer,) = engine.buffers
    assert buffer.grads is not None
    assert buffer.grads.transient_bytes == 256 * 2 + 128 * 2
    assert engine.peak_memory_bytes()["staging"] == buffer.grads.transient_bytes


@on_ranks(3)
def test_an_all_reduce_of_narrow_summands_carries_wide_sums() -> None:
    summands = fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    sums = fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sent: Counter[str] = Counter()

    for rows, is_unit, policy, itemsizes, rest in (
        (3, False, summands, 2 + 4, 0),
        (48, True, summands, 2 + 4, 0),  # a unit of 192 elements
        (3, True, summands, 2 + 4, 1),  # 64 elements, not divisible by three ranks
        (3, False, sums, 2 + 2, 0),
    ):
        options: dict[str, Any] = {"strategy": "no_shard", "mp_policy": policy}
        model: nn.Module = nn.Linear(4, rows, bias=False)
        if is_unit:
            model, options["units"] = nn.Sequential(model), [nn.Linear]
        planned = estimate(model, world_size=3, **options)
        engine = fe.shard(model, init_device_mesh("cpu", (3,)), **options)
        sent.clear()
        with counted(sent, lambda group: "bytes"):
            model(torch.ones(2, 4)).sum().backward()
            engine.finish_grad_sync()
        numel = planned.num_elements + planned.padding
        assert numel % 3 == rest
        # An all-reduce sends 2/3 of all elements twice; those beyond a multiple of 3 as fp32 sums.
        expected = round(2 / 3 * ((numel - rest) * itemsizes + rest * (4 + 4)))
        assert sent["bytes"] == planned.inner_traffic_bytes == expected, (rows, is_unit, policy)


@pytest.mark.parametrize("world_size", [1, 3, 64, 1000])
def test_bytes_at_rest_follow_the_formulas_of_the_levels(world_size: int) -> None:
    """Without padding: P(m+g+s), P(p+g+(m+s)/n), P(p+(g+m+s)/n), P(m+g+s)/n; fp32, where the main
    weights cost nothing beside the compute weights."""
    elements = 32 * 64 * 96000  # every shard of every unit is a multiple of 256
    expected = {
        "no_shard": elements * (4 + 4 + 8),
        "optim": elements * (4 + 4) + elements * 8 / world_size,
        "optim_grads": elements * 4 + elements * (4 + 8) / world_size,
        "optim_grads_params": elements * (4 + 4 + 8) / world_size,
    }
    for each in compare(elements, world_size=world_size):
        assert each.padding == 0
        assert each.rest_bytes == expected[each.strategy.inner.name]
        assert each.outer_traffic_bytes == 0
    assert (world_size == 1) == (each.inner_traffic_bytes == 0)


def test_microbatches_multiply_only_the_traffic_of_each() -> None:
    for once, thrice in zip(
        compare(10**8, world_size=8), compare(10**8, world_size=8, num_microbatches=3), strict=True
    ):
        traffic = once.strategy.inner.traffic(8)
        per_step = traffic.params_per_step + traffic.grads_per_step
        per_microbatch = traffic.params_per_microbatch + traffic.grads_per_microbatch
        ratio = (per_step + 3 * per_microbatch) / (per_step + per_microbatch)
        assert math.isclose(thrice.inner_traffic_bytes / once.inner_traffic_bytes, ratio)
        assert thrice.peak_bytes == once.peak_bytes


class WithoutReset(nn.Module):
    """Has a parameter of its own and no ``reset_parameters``, so it cannot be built from meta."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 20, 1024))
        self.layers = nn.ModuleList([nn.Linear(1 << 16, 1 << 16) for _ in range(3)])


def test_a_model_on_the_meta_device_is_planned_for_thousands_of_ranks() -> None:
    with torch.device("meta"):
        model = WithoutReset()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    each = estimate(model, world_size=4096, outer_size=64, outer_strategy="optim_grads_params")
    assert each.num_elements == (1 << 30) + 3 * ((1 << 32) + (1 << 16))
    assert each.rest_bytes == (each.num_elements + each.padding) * 16 // 4096
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_estimate_is_printed_in_one_sentence() -> None:
    found = fe.estimate(1 << 20, world_size=8, outer_size=2, num_units=1, outer_strategy="optim")
    assert str(found) == (
        "1.05M parameters, optim_grads_params on 4 ranks, optim over 2 groups of them: at most "
        "11.0 MiB of a rank, without activations (weights 1.0 MiB, gradients 1.0 MiB, optimizer "
        "state 1.0 MiB, full parameters 4.0 MiB, staging 4.0 MiB); sent per step: 6.0 MiB (inner "
        "axis), 1.0 MiB (outer axis)"
    )
    one_axis = str(fe.estimate(1 << 20, world_size=8))
    assert "optim_grads_params on 8 ranks: at most" in one_axis
    assert "outer" not in one_axis
