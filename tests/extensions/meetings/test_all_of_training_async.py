"""All ways of training on the device, against the lanes of the CPU on the same ranks.

Equal bit for bit where sums have one order: on one rank, and on two where a step has one
microbatch. With more microbatches a sharded gradient may be (a + b) + c or a + (b + c), and on four
ranks gloo adds in an order of its own: there differences stay below ``ROUNDING``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.lanes import LANES
from tests import models
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device import scene
from tests.composition import tensor_parallel
from tests.extensions.pipelines import scene as pipelines
from tests.matrices import thorough_but
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import PAIRS
from tests.pool import Ranks, on_ranks
from tests.reference import adamw, full
from tests.units import experts

ranks = device.ranks

ROUNDING = 2e-7


def check_training(pair: tuple[str, str], sizes: tuple[int, int]) -> None:
    size = dist.get_world_size()
    num_micro = 1 if size == 2 else 3 if 4 in sizes else 2
    found = scene.compare(
        scene.small_job(pair=pair, sizes=sizes, num_micro=num_micro), ROUNDING * (size == 4)
    )
    assert not found


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ranks_train_as_on_the_cpu(
    ranks: Ranks, pair: tuple[str, str], sizes: tuple[int, int]
) -> None:
    ranks.run(check_training, pair, sizes, world_size=sizes[0] * sizes[1])


@on_ranks(2)
def test_the_comparison_sees_one_bit() -> None:
    job = scene.small_job(num_micro=1)
    one, other = scene.train(job, "cpu"), scene.train(job, "cpu")
    assert not scene.differences(one, other)
    weight = other.weights["blocks.1.down.weight"]
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    assert len(scene.differences(one, other)) == 1
    other.weights["last.weight"][2, 0] = float("nan")
    assert len(scene.differences(one, other, tolerance=1.0)) == 1


def policy(**fields: Any) -> tuple[str, Any]:
    return ("mp_policy", fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **fields))


def float8(granularity: Any) -> tuple[str, Any]:
    return ("codec_rules", (fe.Float8(granularity),))


def config(**fields: Any) -> tuple[str, Any]:
    return ("config", fe.DistributedDataParallelConfig(**fields))


def of(make_model: Callable[[], nn.Module], width: int = models.DIM) -> scene.Job:
    return scene.Job(make_model, functools.partial(vector_batch, width=width))


ORDINARY = {
    "bf16": scene.small_job(options=(policy(),)),
    "fp8_gather": scene.small_job(options=(float8("row"), policy())),
    "double_buffer": scene.small_job(options=(config(fsdp_double_buffer=True),)),
    "frozen": of(models.lora_model),
    "no_gradient": of(models.unused_model),
}
FEATURES = {
    **ORDINARY,
    "bf16_reductions": scene.small_job(options=(policy(reduce_dtype=torch.bfloat16),)),
    "bf16_sent": scene.small_job(options=(policy(grad_comm_dtype=torch.bfloat16),)),
    "fp8_gather_by_tensor": scene.small_job(options=(float8("tensor"),)),
    "fp8_gather_by_block": scene.small_job(options=(float8("block"),)),
    "fp8_double_buffer": scene.small_job(options=(float8("row"), config(fsdp_double_buffer=True))),
    "no_prefetch": scene.small_job(options=(config(suggested_communication_unit_size=0),)),
    "large_prefetch": scene.small_job(options=(config(suggested_communication_unit_size=10**6),)),
    "one_unit": scene.small_job(options=(("min_unit_size", None),)),
    "adamw": scene.small_job(make_optimizer=adamw),
    "not_clipped": scene.small_job(clips=False),
    "tied": scene.Job(functools.partial(Transformer, 1, tied=True), token_batch),
    "odd": of(models.odd_model, width=7),
    "frozen_first": of(models.frozen_first_model),
    "mixed_dtypes": of(models.mixed_model),
    "shared": of(models.shared_model),
    "shared_module": of(models.shared_module_model),
    "called_twice": of(models.CalledTwice),
    "encoder_decoder": of(models.EncoderDecoder),
    "nested_units": of(models.NestedUnits),
    "nested_outputs": of(models.NestedModel),
    "in_place": of(models.InPlace),
    "unused_output": of(models.UnusedOutput),
}


def check_feature(feature: str, pair: tuple[str, str], sizes: tuple[int, ...]) -> None:
    job = dataclasses.replace(FEATURES[feature], pair=pair, sizes=sizes, num_micro=len(sizes))
    # A sum in another order may round to the next bf16 number, a relative error of 2^-8.
    rounding = 2e-2 if feature.startswith(("bf16", "fp8", "mixed")) else 2e-6
    assert not scene.compare(job, rounding if sizes == (2, 2) else 0.0)


@pytest.mark.parametrize("feature", thorough_but(ORDINARY, FEATURES))
@pytest.mark.parametrize(
    ("pair", "sizes"),
    [
        *(((level, "no_shard"), (2,)) for level in scene.LEVELS),
        (("optim", "optim"), (2, 2)),
        (("optim_grads_params", "optim_grads"), (2, 2)),
    ],
)
def test_a_feature_gives_the_bits_of_the_cpu(
    ranks: Ranks, feature: str, pair: tuple[str, str], sizes: tuple[int, ...]
) -> None:
    ranks.run(check_feature, feature, pair, sizes, world_size=2 * len(sizes))


def weights_of_mixture(level: str, device_type: str) -> dict[str, torch.Tensor]:
    """Weights of this rank's expert and of the shared layers, after some steps."""
    mesh = dist.init_device_mesh(device_type, (2, 2), mesh_dim_names=("copies", "experts"))
    held = mesh["experts"].get_local_rank()
    model = experts.build([held], mesh["experts"].get_group())
    engine = fe.shard(
        model, mesh._flatten("all"), level, expert_mesh=mesh["copies"], min_unit_size=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scene.train_with(engine, optimizer, [experts.batches(1)] * 3)
    return {name: engine.full_tensor(name).cpu() for name, _ in model.named_parameters()}


def weights_with_tensor_parallelism(level: str, device_type: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = tensor_parallel.Model()
    mesh = dist.init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel.cut(model.to(device_type), mesh["tp"], sequence=True)
    engine = fe.shard(model, mesh["dp"], level, min_unit_size=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens = tensor_parallel.tokens_for
    data: Any = [
        [[(tokens(step, micro, rank // 2),) for rank in range(4)] for micro in (0, 1)]
        for step in range(3)
    ]
    scene.train_with(engine, optimizer, data)
    return {name: full(p).cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("level", scene.FULL_AND_THOROUGH)
@pytest.mark.parametrize(
    ("weights", "tolerance"),
    [(weights_of_mixture, ROUNDING), (weights_with_tensor_parallelism, 2e-6)],
)
@on_ranks(4)
def test_experts_and_tensor_parallelism_train_as_on_the_cpu(
    weights: Callable[[str, str], dict[str, torch.Tensor]], tolerance: float, level: str
) -> None:
    expected = weights(level, "cpu")
    with scene.random_delays(seed=3):
        found = weights(level, on.NAME)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("schedule", pipelines.marked(pipelines.SCHEDULES, default=("1F1B",)))
@on_ranks(4)
def test_a_pipeline_trains_as_on_the_cpu(schedule: str) -> None:
    expected = pipelines.make_pipeline(schedule, "optim_grads")
    pipelines.train(expected, 2)
    found = pipelines.make_pipeline(schedule, "optim_grads", device_type=on.NAME)
    with scene.random_delays(seed=5):
        pipelines.train(found, 2)
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=1e-6
    )
    for mine, theirs in zip(found.engines, expected.engines, strict=True):
        weights = scene.weights_of(theirs)
        for name, weight in scene.weights_of(mine).items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6)


@on_ranks(2)
def test_measure_changes_no_number_and_finds_the_lane_that_is_slow() -> None:
    job = scene.small_job(num_micro=1)
    expected = scene.on_cpu(job)
    torch.manual_seed(1)
    model = job.make_model()
    engine = job.shard(model, on.NAME)
    optimizer = job.make_optimizer(model.parameters())
    with on.delays(collective=5e-3), engine.measure() as measured:
        found = scene.train_with(engine, optimizer, job.data())
    assert not scene.differences(found, expected)
    # Three steps of collectives that take 5 ms each, and kernels that take next to nothing.
    waited = dict.fromkeys(LANES, 0.0)
    for each in measured.waited:
        waited[each.lane] += each.seconds
    assert waited["inner gather"] > 0.03
    assert waited["inner gather"] + waited["inner reduce"] < measured.seconds


@pytest.mark.thorough
@pytest.mark.parametrize("slowest", ["compute", "copy", "collective"])
@on_ranks(2)
def test_60_orders_that_delays_make_give_the_same_bits(slowest: str) -> None:
    delays = {"compute": 1e-4, "copy": 1e-4, "collective": 1e-3, slowest: 3e-3}
    rank = dist.get_rank()
    for seed in range(60):
        sizes = (1, 2) if seed % 20 < 10 else (2, 1)
        job = scene.small_job(pair=PAIRS[seed % len(PAIRS)], sizes=sizes, num_micro=1)
        factor = 0.1 if slowest != "collective" and rank == seed % 2 else 1.0  # on one rank only
        given = {name: seconds * factor for name, seconds in delays.items()}
        with on.delays(**given, host=5e-5, seed=2 * seed + rank):
            found = scene.train(job, on.NAME)
        assert not scene.differences(found, scene.on_cpu(job)), seed
