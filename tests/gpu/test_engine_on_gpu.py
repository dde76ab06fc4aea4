"""The engine on a CUDA device. Collected everywhere, skipped where there is none.

One device is enough: levels run at world size 1 over NCCL, and two ranks share the device over
gloo, whose collectives then go through host memory.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.memory.host_memory import HostBlock
from tests.gpu.scene import (
    LEVEL_3,
    LEVELS,
    ON_GPU,
    WIDTH,
    Batches,
    Model,
    Trained,
    assert_same,
    make_batches,
    make_model,
    make_sgd,
    process_group,
    requested_bytes,
    train_sharded,
)
from tests.pool import Ranks

pytestmark = ON_GPU

BLOCK_ELEMENTS = 2 * WIDTH + 8 * WIDTH**2 + 5 * WIDTH
BLOCK_BYTES = 4 * BLOCK_ELEMENTS
ROOT_BYTES = 4 * (WIDTH**2 + WIDTH)
MIB = 2**20


def train_bare(model: Model, dtype: torch.dtype, batches: Batches) -> Trained:
    optimizer = make_sgd(model)
    losses = []
    for first in range(0, len(batches), 2):
        computing = copy.deepcopy(model).to(dtype)
        for x, target in batches[first : first + 2]:
            loss = computing(x.to(dtype), target.to(dtype)) / 2  # as the engine casts inputs
            loss.backward()
            losses.append(loss.item())
            for weight, computed in zip(model.parameters(), computing.parameters(), strict=True):
                gradient = computed.grad.float()
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
                computed.grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_at_world_size_1_trains_like_a_bare_model(
    mesh: DeviceMesh, level: str, dtype: torch.dtype
) -> None:
    model, batches = make_model(), make_batches(6)
    start = {name: value.cpu() for name, value in model.state_dict().items()}
    expected = train_bare(copy.deepcopy(model), dtype, batches)
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    engine = fe.shard(model, mesh=mesh, strategy=level, mp_policy=policy)
    found = train_sharded(model, engine, batches)
    assert_same(found, expected, tolerance=1e-5)
    assert not torch.equal(found[1]["head.weight"], start["head.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_on_one_device_over_gloo_train_like_one_process(ranks: Ranks, level: str) -> None:
    expected = train_bare(make_model(), torch.float32, make_batches(4))
    results = ranks.run(_train_as_one_of_two, level, world_size=2, timeout=120)
    losses = [sum(pair) / 2 for pair in zip(results[0][0], results[1][0], strict=True)]
    for _, weights in results:
        assert_same((losses, weights), expected, tolerance=2e-5)


def _train_as_one_of_two(level: str) -> Trained:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2,))
    rank = dist.get_rank()
    model = make_model()
    batches = [(x.chunk(2)[rank], target.chunk(2)[rank]) for x, target in make_batches(4)]
    return train_sharded(model, fe.shard(model, mesh=mesh, strategy=level), batches)


def test_the_lanes_are_four_streams_beside_the_current_one(mesh: DeviceMesh) -> None:
    engine = fe.shard(make_model(), mesh=mesh)
    lanes: Any = engine.lanes
    beside = (lanes.inner_gather, lanes.inner_reduce, lanes.outer_gather, lanes.outer_reduce)
    streams = {lane._target().cuda_stream for lane in beside}
    assert len(streams) == 4
    assert torch.cuda.current_stream().cuda_stream not in streams
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert lanes.compute._target() == other
        assert {lane._target().cuda_stream for lane in beside} == streams


def sharded(mesh: DeviceMesh, level: str, budget: int) -> tuple[Model, fe.Engine]:
    """A model and its engine with a prefetch window of ``budget`` elements."""
    model = make_model()
    options = fe.Options(prefetch_window=budget, staging_limit=budget)
    return model, fe.shard(model, mesh=mesh, strategy=level, options=options)


@pytest.mark.parametrize("budget", [0, BLOCK_ELEMENTS])
def test_the_next_unit_is_gathered_while_this_one_computes_unless_the_budget_is_0(
    mesh: DeviceMesh, budget: int
) -> None:
    model, engine = sharded(mesh, LEVEL_3, budget)
    gather: Any = engine.lanes.inner_gather
    full_bytes, overlapped = [], []

    def probe() -> None:
        torch.cuda._sleep(400_000_000)  # some tenths of a second
        full_bytes.append(engine.memory_bytes()["full"])
        gather._target().synchronize()
        # The gather is done, and compute still sleeps.
        overlapped.append(not torch.cuda.current_stream().query())

    x, target = make_batches(1)[0]
    with torch.no_grad():
        model(x, target)
        first: Any = model.blocks[0]
        first.probe = probe
        model(x, target)
    torch.cuda.synchronize()
    # One or two blocks are full: the weights of the root unit are gathered only with its head.
    assert full_bytes == [(2 if budget else 1) * BLOCK_BYTES]
    assert overlapped == [True]


def test_a_step_holds_no_more_full_units_than_the_budget_allows(mesh: DeviceMesh) -> None:
    model, engine = sharded(mesh, LEVEL_3, BLOCK_ELEMENTS)
    for x, target in make_batches(2):
        model(x, target).backward()
        model.zero_grad()
    assert engine.peak_memory_bytes()["full"] == ROOT_BYTES + 2 * BLOCK_BYTES
    assert "full" not in engine.memory_bytes()


@pytest.mark.parametrize("level", LEVELS)
def test_the_allocator_hands_out_what_the_engine_books(mesh: DeviceMesh, level: str) -> None:
    x, target = make_batches(1)[0]
    # Libraries allocate their workspaces here, before the measurement.
    make_model()(x, target).backward()
    torch.cuda.synchronize()
    gc.collect()
    before = requested_bytes("current")
    model, engine = sharded(mesh, level, BLOCK_ELEMENTS)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.peak_memory_bytes(reset=True)
        model(x, target).backward()
        torch.cuda.synchronize()
        model.zero_grad()
    gc.collect()

    rest = requested_bytes("current") - before
    booked = sum(engine.memory_bytes().values())
    assert booked <= rest < booked + MIB
    peak = requested_bytes("peak") - before
    booked_peak = engine.peak_memory_bytes()["total"]
    # Besides the bytes that the engine records, there are the gradient of one parameter, from
    # autograd, and the activations of eight rows.
    assert booked_peak <= peak < booked_peak + 4 * 4 * WIDTH**2 + 2 * MIB


@pytest.mark.parametrize("level", LEVELS)
def test_no_tensor_is_recorded_on_a_stream(mesh: DeviceMesh, level: str) -> None:
    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    model = make_model()
    engine = fe.shard(model, mesh=mesh, strategy=level)
    optimizer = make_sgd(model)
    with Seen():
        for x, target in make_batches(2):
            model(x, target).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert any("addmm" in name for name in names)
    assert not [name for name in names if "record_stream" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_never_makes_the_host_wait_for_the_device(level: str, dtype: torch.dtype) -> None:
    with process_group("fake", 8) as mesh:
        model = make_model()
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        engine = fe.shard(model, mesh=mesh, strategy=level, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        fe.shard_optimizer(optimizer)
        batches = make_batches(2)

        def step() -> None:
            with engine.no_sync():
                model(*batches[0]).backward()
            model(*batches[1]).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_host_memory_of_snapshots_is_pinned_and_given_back() -> None:
    block = HostBlock(3 * MIB, pinned=True)
    piece = block.bytes[: 2 * MIB]
    assert piece.is_pinned()
    piece.copy_(torch.full((2 * MIB,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert bool((piece == 7).all())
    del block
    assert not piece.is_pinned()


def test_reset_after_an_error_in_forward_trains_on(mesh: DeviceMesh) -> None:
    model, batches = make_model(), make_batches(4)
    expected = train_bare(copy.deepcopy(model), torch.float32, batches)
    engine = fe.shard(model, mesh=mesh, strategy=LEVEL_3)

    def fail() -> None:
        raise ArithmeticError("planted")

    last: Any = model.blocks[-1]
    last.probe = fail
    with pytest.raises(ArithmeticError, match="planted"):
        model(*batches[0])
    engine.reset()
    last.probe = None
    assert "full" not in engine.memory_bytes()
    assert_same(train_sharded(model, engine, batches), expected, tolerance=1e-5)
