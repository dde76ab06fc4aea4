"""Arenas and memory registered with NCCL on a CUDA device. Skipped where there is none; tests of
NCCL's memory are also skipped on devices without multicast, such as a single one outside a switch.

One rank sends nothing, so its engine's pool is registered with no group. Its memory still comes
from NCCL's allocator, and a test registers it with the group of the one rank.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.extensions.arenas.nccl_pool import NcclPool
from tests.extensions.arenas.planned_memory import arenas_of
from tests.gpu.scene import (
    LEVEL_3,
    LEVELS,
    ON_GPU,
    WIDTH,
    assert_same,
    make_batches,
    make_model,
    requested_bytes,
    train_sharded,
)
from tests.torch_versions import plans_addresses

pytestmark = ON_GPU


def nccl_allocates(mesh: DeviceMesh) -> bool:
    device = torch.device("cuda", 0)
    backend: Any = mesh.get_group(0)._get_backend(device)
    return bool(backend.supports_tensor_alloc(device))


def need_nccl_memory(mesh: DeviceMesh) -> None:
    if not nccl_allocates(mesh):
        pytest.skip("needs a device with multicast; NCCL allocates no memory on this one")


def test_registered_memory_is_refused_where_nccl_has_none(mesh: DeviceMesh) -> None:
    config = fe.DistributedDataParallelConfig(nccl_ub=True)
    if nccl_allocates(mesh):
        pytest.skip("needs a device without multicast")
    with pytest.raises(ValueError, match=r"nccl_ub: .*multicast"):
        fe.shard(make_model(), mesh=mesh, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("field", ["fsdp_double_buffer", "nccl_ub"])
def test_training_gives_what_it_gives_with_ordinary_memory(
    mesh: DeviceMesh, field: str, level: str, dtype: torch.dtype
) -> None:
    found = []
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    batches = make_batches(6)
    if field == "nccl_ub":
        need_nccl_memory(mesh)
    for value in (False, True):
        model: Any = make_model()
        config = fe.DistributedDataParallelConfig(**{field: value})  # type: ignore[arg-type]
        engine = fe.shard(model, mesh=mesh, strategy=level, mp_policy=policy, config=config)
        found.append(train_sharded(model, engine, batches))
    held = engine.memory_bytes()
    assert ("full" in held) == (level == LEVEL_3 and bool(arenas_of(engine)))
    assert_same(found[1], found[0], tolerance=1e-6)


@plans_addresses
def test_communication_buffers_lie_in_segments_of_the_pool(mesh: DeviceMesh) -> None:
    need_nccl_memory(mesh)
    model = make_model()
    config = fe.DistributedDataParallelConfig(nccl_ub=True)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine = fe.shard(model, mesh=mesh, strategy=LEVEL_3, mp_policy=policy, config=config)
    pool: Any = engine._memory._pool
    segments = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in pool._pool.snapshot()
    ]

    def lies_in_pool(tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() in segment for segment in segments)

    arenas = arenas_of(engine)
    assert all(lies_in_pool(arena.memory) for arena in arenas.values() if arena.memory.numel())
    full: list[bool] = []
    for block in model.blocks:
        block.probe = lambda block=block: full.append(lies_in_pool(block.up.weight))
    train_sharded(model, engine, make_batches(2))
    assert full
    assert all(full)
    for buffer in engine.buffers:
        assert buffer.grads is not None
        assert lies_in_pool(buffer.grads.main_grads().tensor)
        assert not lies_in_pool(buffer.weights.main.tensor)


def test_a_pool_is_registered_with_a_group_and_used_by_its_collectives(mesh: DeviceMesh) -> None:
    need_nccl_memory(mesh)
    group = mesh.get_group(0)
    ours = SimpleNamespace(gather_group=group, reduce_group=None)
    none = SimpleNamespace(gather_group=None, reduce_group=None)
    device = torch.device("cuda", torch.cuda.current_device())
    axes: Any = SimpleNamespace(inner=ours, outer=none, device_mesh=mesh, device=device)
    pool = NcclPool(axes, symmetric=False)
    with pool.allocating():
        tensor = torch.arange(2**20, dtype=torch.float32, device=device)
    pool.register()
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor.cpu(), torch.arange(2**20, dtype=torch.float32))


@plans_addresses
def test_nothing_is_asked_of_the_allocator_for_full_parameters_in_a_step(mesh: DeviceMesh) -> None:
    model: Any = make_model()
    config = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
    engine = fe.shard(model, mesh=mesh, strategy=LEVEL_3, config=config)
    batches = make_batches(4)
    train_sharded(model, engine, batches)  # a step is recorded
    x, target = batches[0]
    with torch.no_grad():
        model(x, target)
        torch.cuda.synchronize()
        before = requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        engine.peak_memory_bytes(reset=True)
        model(x, target)
        torch.cuda.synchronize()
    # Activations of eight rows, and no weights.
    assert requested_bytes("peak") - before < 4 * WIDTH**2
    held = engine.memory_bytes()
    assert engine.peak_memory_bytes() == {**held, "total": sum(held.values())}


@plans_addresses
def test_pieces_of_an_arena_on_the_device_keep_it_alive_and_can_be_swapped() -> None:
    memory = ArenaMemory(torch.device("cuda", torch.cuda.current_device()))
    first, second = (memory.transient(1000, torch.float32, "full") for _ in range(2))
    for number in range(3):
        first.fill()
        second.fill()
        views = [each.view(0, (1000,)) for each in (first, second)]
        views[0].fill_(number)
        views[1].fill_(10 + number)
        assert [float(view.sum()) for view in views] == [1000 * number, 1000 * (10 + number)]
        first.free()
        second.free()
        memory.end_backward()
    arena = memory.arenas["full"].memory
    assert arena is not None
    assert arena.is_cuda
    first.fill()
    view = first.view(0, (1000,)).fill_(4)
    del memory, arena, first, second
    torch.zeros(10**6, device="cuda")
    assert float(view.sum()) == 4000
