"""Exact bytes at rest and at peak, for every pair of levels; recorded bytes equal the real ones.

Expected bytes are the formulas of ``strategies/`` (the part of each role that a rank holds) times
the elements and padding that ``describe()`` reports.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from curve import memory_in_use
from fsdp_engine.memory.allocator import BACKWARDS_PER_TRIM, Memory, TransientStorage
from fsdp_engine.memory.host_memory import HostBlock
from fsdp_engine.strategies import Axis, Role, Strategy
from tests.models import DIM, NUM_BLOCKS, Even, odd_model, vector_batch
from tests.pairs import PAIRS_AND_WAYS
from tests.pool import on_ranks
from tests.training import POLICIES, mesh_of


def part(strategy: Strategy, role: Role) -> float:
    """The part of ``role`` that one of 2 x 2 ranks holds."""
    return math.prod(strategy.level(axis).fraction(role, 2) for axis in Axis)


def expected_rest(strategy: Strategy, numel: int, policy: str, has_grads: bool) -> dict[str, int]:
    """Bytes by role for ``numel`` elements, padding included."""
    _, compute, main, grad, _ = POLICIES[policy]
    optim, params = part(strategy, Role.OPTIM), part(strategy, Role.PARAM)
    # Compute weights persist if they are the main weights, unsharded, or sharded less than main
    # weights.
    persist = not main or params == 1 or params > optim
    found = {
        "main": main * optim * numel,
        "model": compute * params * numel if persist else 0,
        "grad": grad * part(strategy, Role.GRAD) * numel if has_grads else 0,
    }
    return {role: round(count) for role, count in found.items() if count}


def step(model: nn.Module, engine: Any, optimizer: Any, num_micro: int = 2) -> None:
    for micro in range(num_micro):
        loss = model(*vector_batch(2, 10 * micro + dist.get_rank(), width_of(model)))
        if micro == num_micro - 1:
            loss.backward()
        else:
            with engine.no_sync():
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def width_of(model: nn.Module) -> int:
    return DIM if isinstance(model, Even) else 7


def storages_of(thing: Any) -> Iterator[torch.UntypedStorage]:
    """Every storage that ``thing`` refers to, directly or through its attributes and lists."""
    if isinstance(thing, TransientStorage):
        yield thing._storage
    elif isinstance(thing, Tensor):
        yield (thing.local if isinstance(thing, fe.FlatDTensor) else thing).untyped_storage()
    elif isinstance(thing, list):
        for each in thing:
            yield from storages_of(each)
    elif type(thing).__module__.startswith("fsdp_engine.buffers") and hasattr(thing, "__dict__"):
        for each in vars(thing).values():
            yield from storages_of(each)


def real_bytes(engine: Any) -> int:
    """Bytes of all storages behind the engine's tensors."""
    held = [each for buffer in engine.buffers for each in (buffer.weights, buffer.grads)]
    storages = {s._cdata: s for each in held for s in storages_of(each)}
    transients = engine.buffers[0].context.memory.transients
    # A transient storage is two objects, of which only one has the memory.
    return sum(
        storage.nbytes()
        for key, storage in storages.items()
        if key not in transients or transients[key]._storage._cdata == key
    )


@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
@on_ranks(4)
def test_bytes_at_rest_are_those_of_the_formulas(strategy: str, outer: str, all_ways: bool) -> None:
    levels = Strategy.from_names(strategy, outer)
    for number, (name, (policy, *_)) in enumerate(POLICIES.items()):
        for make in (Even, odd_model) if all_ways else ((Even, odd_model)[number % 2],):
            model = make()
            engine = fe.shard(model, mesh_of(2, 2), strategy, outer, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            layouts = [buffer.layout for buffer in engine.buffers]
            numel = sum(layout.numel for layout in layouts)
            num_elements = sum(p.numel() for p in model.parameters())
            assert sum(layout.num_tensor_elements for layout in layouts) == num_elements
            # Each buffer has less padding than 64 elements for each rank and each tensor.
            assert numel < num_elements + 64 * (4 + len(list(model.parameters()))) * len(layouts)
            for num_steps in range(3):
                # Sharded gradients are freed when they are cleared.
                stays = num_steps > 0 and part(levels, Role.OPTIM) == 1
                expected = expected_rest(levels, numel, name, has_grads=stays)
                assert engine.memory_bytes() == expected, (name, num_steps)
                assert real_bytes(engine) == sum(expected.values()), (name, num_steps)
                step(model, engine, optimizer)
            weights = expected_rest(levels, numel, name, False)
            assert sum(each.weights.rest_bytes for each in engine.buffers) == sum(weights.values())
            grads = expected_rest(levels, numel, name, True).get("grad", 0)
            assert sum(each.grads.rest_bytes for each in engine.buffers) == grads


def expected_peak(
    strategy: Strategy, root: int, block: int, budget: int, policy: str
) -> dict[str, int]:
    """Most bytes during a step of one microbatch, for ``root`` and ``block`` elements a unit."""
    _, compute, _, _, wire = POLICIES[policy]
    rest = expected_rest(strategy, root + NUM_BLOCKS * block, policy, True)
    kept = POLICIES[policy][3] * part(strategy, Role.GRAD)  # bytes of gradients by element
    is_sharded = strategy.shards(Role.GRAD, Axis.INNER)
    # At the first gradient of each block, in backward order, and at the end of backward.
    moments = []
    for done in range(NUM_BLOCKS + 1):
        # Blocks that are reduced; if gradients are not sharded, also the block that is being
        # written.
        num_kept = done if is_sharded else min(done + 1, NUM_BLOCKS)
        moment = {"full": 0, "staging": 0, "grad": round(kept * num_kept * block)}
        if not is_sharded or done == NUM_BLOCKS:
            moment["grad"] += round(kept * root)  # written first, reduced last
        if part(strategy, Role.OPTIM) == 1:
            moment["grad"] = rest["grad"]
        if strategy.shards(Role.PARAM, Axis.INNER):
            # The root, the block in use, and those gathered ahead while they are below the budget.
            num_ahead = min(-(-budget // block), NUM_BLOCKS - 1 - done)
            moment["full"] = compute * (root + (1 + num_ahead) * block)
        if is_sharded:
            # The root's gradients are written first and stay in staging, in addition to those
            # within the budget.
            num_staged = min(max(budget // block, 1), 1 + done, NUM_BLOCKS)
            moment["staging"] = wire * (root + num_staged * block)
        moments.append(moment)
    peak = {role: max(moment[role] for moment in moments) for role in ("full", "staging")}
    weights = sum(rest.values()) - rest["grad"]
    peak["total"] = weights + max(sum(moment.values()) for moment in moments)
    return {**rest, **{role: count for role, count in peak.items() if count}}


@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
@on_ranks(4)
def test_bytes_at_peak_follow_from_levels_and_budget(
    strategy: str, outer: str, all_ways: bool
) -> None:
    ahead = {"fp32": (0, 2), "bf16": (1, 100)}
    for name in ("fp32", "bf16"):
        for num_blocks_ahead in (0, 1, 2, 100) if all_ways else ahead[name]:
            model = Even()
            budget = num_blocks_ahead * sum(p.numel() for p in model.blocks[0].parameters())
            engine = fe.shard(
                model,
                mesh_of(2, 2),
                strategy,
                outer,
                units="blocks.*",
                mp_policy=POLICIES[name][0],
                options=fe.Options(prefetch_window=budget, staging_limit=budget),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            root, *blocks = (unit.num_elements for unit in engine.units)
            assert set(blocks) == {blocks[0]}
            step(model, engine, optimizer)
            engine.peak_memory_bytes(reset=True)
            step(model, engine, optimizer, num_micro=1)
            levels = Strategy.from_names(strategy, outer)
            expected = expected_peak(levels, root, blocks[0], budget, name)
            assert engine.peak_memory_bytes() == expected, (name, num_blocks_ahead)


@on_ranks(world_size=2)
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_books_equal_the_storages_at_every_moment_of_a_step(policy: str) -> None:
    model = Even()
    engine = fe.shard(model, mp_policy=POLICIES[policy][0])
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        seen.append((sum(engine.memory_bytes().values()), real_bytes(engine)))

    for block in model.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, engine, optimizer)
    assert len(seen) == 2 * 2 * 2 * NUM_BLOCKS
    assert all(booked == real for booked, real in seen)
    assert len(set(seen)) > 3  # memory was allocated and freed
    look()
    assert seen[-1][0] == min(booked for booked, _ in seen[-4 * NUM_BLOCKS :])


@on_ranks(world_size=2)
def test_frozen_weights_have_no_gradients_and_no_second_copy() -> None:
    model = Even()
    model.blocks.requires_grad_(False)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine = fe.shard(model.bfloat16(), units="blocks.*", mp_policy=policy)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    step(model, engine, optimizer)
    root, *blocks = (unit.num_elements for unit in engine.units)
    rest = {"main": 4 * root // 2, "model": 2 * sum(blocks) // 2}
    assert engine.memory_bytes() == rest
    model(*vector_batch(2, dist.get_rank(), DIM)).backward()
    assert engine.memory_bytes() == {**rest, "grad": 4 * root // 2}


def test_views_outlive_the_memory_behind_them_and_see_the_next() -> None:
    memory = Memory(torch.device("cpu"))
    storage = memory.transient(6, torch.float32, "full")
    with storage.while_filled():
        view, whole = storage.view(2, (2, 2)), storage.view(0, (6,))
        version = view._version
    assert view.untyped_storage().nbytes() == 0
    storage.fill()
    whole.copy_(torch.arange(6.0))
    assert view.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert view._version == version  # autograd must not count a refill as an in-place change
    storage.free()
    with pytest.raises(AssertionError, match="storage has no memory"):
        storage.view(0, (6,))


def test_transient_storages_never_share_memory_and_idle_memory_has_a_bound() -> None:
    choose = random.Random(5)
    memory = Memory(torch.device("cpu"))
    storages = [memory.transient(size, torch.uint8, "full") for size in (64, 64, 64, 128, 4096)]
    most = 0
    for _ in range(400):
        storage = choose.choice(storages)
        storage.free() if storage.filled else storage.fill()
        filled = [each for each in storages if each.filled]
        in_use = sum(each.num_bytes for each in filled)
        most = max(most, in_use)
        assert memory.ledger.held["full"] == in_use
        assert all(each._storage.nbytes() == each.num_bytes * each.filled for each in storages)
        assert len({each._storage.data_ptr() for each in filled}) == len(filled)
        assert memory.idle_bytes + in_use <= most
    memory.release_idle()
    assert memory.idle_bytes == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_pages_between_small_allocations_are_handed_back_after_so_many_backwards() -> None:
    books = Memory(torch.device("cpu"))
    # Allocations of this size are on glibc's heap; larger ones may be mapped individually.
    kept, size = [], 100 * 1024
    freed = []
    for _ in range(1000):
        freed.append(torch.ones(size, dtype=torch.uint8))
        kept.append(torch.ones(64, dtype=torch.uint8))
    held = memory_in_use(torch.device("cpu"))
    freed.clear()
    for _ in range(BACKWARDS_PER_TRIM):
        books.end_backward()
    assert memory_in_use(torch.device("cpu")) < held - 900 * size
    assert all(int(each.sum()) == 64 for each in kept)


class FakeRuntime:
    """CUDA's runtime, for pinning only: the pinned ranges by address."""

    def __init__(self, code: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._code = code

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self._code == 0:
            self.pinned[address] = num_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_host_memory_is_as_large_as_asked_and_goes_with_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = HostBlock(1000, pinned=True)
    piece = block.bytes[:10]
    assert runtime.pinned == {block.bytes.data_ptr(): 1000}
    del block
    assert runtime.pinned == {}
    assert piece.fill_(3).sum() == 30  # a view keeps the memory, which is no longer pinned
    assert HostBlock(0, pinned=True).bytes.numel() == 0


def test_host_memory_that_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's error is cleared; otherwise torch would raise it after its next kernel."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code=2))
    taken: list[str] = []
    runtime = SimpleNamespace(cudaGetLastError=lambda: taken.append("error"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)
    with pytest.warns(UserWarning, match=r"1000 bytes of host memory: expected to pin them"):
        block = HostBlock(1000, pinned=True)
    assert block.bytes.numel() == 1000
    assert taken == ["error"]
