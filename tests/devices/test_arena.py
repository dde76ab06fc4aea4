"""Storages that are filled from planned addresses: who is served, what moves, what lives on."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_engine.devices import memory as memory_module
from fsdp_engine.devices.address_plan import ALIGNMENT, SLACK, aligned
from fsdp_engine.devices.memory import Memory, TransientStorage
from tests.torch_versions import plans_addresses

CPU = torch.device("cpu")


def make(*sizes: int, role: str = "full") -> tuple[Memory, list[TransientStorage]]:
    memory = Memory(CPU, plans_addresses=True)
    return memory, [memory.transient(size, torch.uint8, role) for size in sizes]


def walk(memory: Memory, row: list[TransientStorage], *, ends: bool = True) -> list[int]:
    """Fill each while the one before is there, forth and back; returns where they were."""
    seen = []
    for direction in (row, row[::-1]):
        for before, storage in zip([None, *direction], direction, strict=False):
            storage.fill()
            if before is not None:
                before.drain()
            seen.append(storage._storage.data_ptr())
        direction[-1].drain()
    if ends:
        memory.end_backward()
    return seen


def arena_bytes(memory: Memory, role: str = "full") -> int:
    arena = memory.arenas[role].memory
    return 0 if arena is None else arena.numel()


@plans_addresses
def test_a_step_is_recorded_and_the_next_one_finds_its_addresses() -> None:
    memory, row = make(*[1000] * 5)
    walk(memory, row)
    assert arena_bytes(memory) == 0
    assert memory.ledger.held["full"] == 0
    memory.ledger.reset_peak()
    found = [walk(memory, row) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0][:5] == found[0][5:][::-1]  # a storage has one address
    assert len(set(found[0])) == 2
    assert arena_bytes(memory) == 2 * aligned(1000)
    # What is held is the arena, in use or not, and nothing beside it.
    assert memory.ledger.held["full"] == memory.ledger.peak["full"] == 2 * aligned(1000)
    assert memory.idle_bytes == 0


@plans_addresses
def test_views_stay_valid_while_the_memory_behind_them_moves() -> None:
    memory, (first, second) = make(8, 8)
    with first.while_filled():
        view = first.view(4, (2, 2))
        version = view._version
    storage = view.untyped_storage()
    for _ in range(3):
        first.fill()
        second.fill()
        view.copy_(torch.tensor([[1, 2], [3, 4]]))
        assert first.view(4, (4,)).tolist() == [1, 2, 3, 4]
        assert view.untyped_storage()._cdata == storage._cdata
        assert view.untyped_storage().nbytes() == 8
        first.drain()
        second.drain()
        assert view.untyped_storage().nbytes() == 0
        memory.end_backward()
    assert arena_bytes(memory) == 2 * ALIGNMENT
    assert view._version == version + 3  # its own writes alone


@plans_addresses
def test_who_meets_another_at_its_address_gets_ordinary_memory() -> None:
    memory, row = make(*[1000] * 4)
    walk(memory, row)
    walk(memory, row)
    first, _, third, _ = row
    third.fill()
    first.fill()  # they share an address, since they were never filled together
    assert memory.ledger.held["full"] == arena_bytes(memory) + 1000
    views = [each.view(0, (1000,)).fill_(value) for each, value in ((first, 1), (third, 3))]
    assert [int(view.sum()) for view in views] == [1000, 3000]
    first.drain()
    third.drain()
    assert memory.ledger.held["full"] == arena_bytes(memory)


@plans_addresses
def test_a_step_that_leaves_the_plan_makes_a_new_one_and_a_known_step_none() -> None:
    memory, row = make(*[1000] * 4)
    arena = memory.arenas["full"]
    walk(memory, row)
    walk(memory, row)
    plan = arena.plan
    walk(memory, row[:2])  # units that are skipped meet nobody new
    walk(memory, row[:1])
    assert arena.plan is plan
    other = [row[2], row[0], row[1], row[3]]
    walk(memory, other)
    assert arena.plan is plan  # while it is in use nothing moves
    walk(memory, other)
    assert arena.plan is not plan
    plan = arena.plan
    memory.ledger.reset_peak()
    for order in (other, row, other, row):  # the first one is not forgotten
        walk(memory, order)
    assert arena.plan is plan
    assert memory.ledger.peak["full"] == arena_bytes(memory) <= SLACK * 2 * aligned(1000)


@plans_addresses
def test_a_plan_waits_until_nobody_is_at_an_address() -> None:
    memory, row = make(*[1000] * 4)
    stays = memory.transient(1000, torch.uint8, "full")
    walk(memory, row)
    stays.fill()
    walk(memory, [stays, *row][1:])
    plan = memory.arenas["full"].plan
    walk(memory, row[::2])  # meets whom it did not meet: a plan is due
    kept = stays.view(0, (1000,)).fill_(7)
    walk(memory, row)
    assert int(kept.sum()) == 7000
    stays.drain()
    walk(memory, row)
    assert memory.arenas["full"].plan is not plan


@plans_addresses
def test_plans_become_rare_where_steps_never_agree() -> None:
    choose = random.Random(3)
    memory, row = make(*[ALIGNMENT] * 12)
    plans = set()
    for _ in range(64):
        walk(memory, choose.sample(row, 12))
        plans.add(id(memory.arenas["full"].plan))
        assert arena_bytes(memory) <= SLACK * 2 * ALIGNMENT
        assert memory.ledger.held["full"] == arena_bytes(memory)
    assert memory.arenas["full"]._num_left == 64
    assert len(plans) <= 1 + 4 + 4  # the first few, and after 8, 16, 32, 64


@plans_addresses
def test_storages_with_memory_never_share_a_byte_whatever_happens() -> None:
    choose = random.Random(11)
    sizes = [choose.randint(1, 3000) for _ in range(12)]
    memory, row = make(*sizes)
    for event in range(4000):
        storage = choose.choice(row)
        storage.drain() if storage.filled else storage.fill()
        filled = [each for each in row if each.filled]
        spans = sorted((each._storage.data_ptr(), each.num_bytes) for each in filled)
        for (start, length), (following, _) in itertools.pairwise(spans):
            assert start + length <= following
        assert all(each._storage.nbytes() == each.num_bytes * each.filled for each in row)
        if event % choose.randint(20, 60) == 0:
            memory.end_backward()
    for storage in row:
        storage.drain()
    assert memory.ledger.held["full"] == arena_bytes(memory) > 0


@plans_addresses
def test_the_arena_outlives_whoever_is_filled_from_it() -> None:
    memory, (first, second) = make(100_000, 100_000)
    for _ in range(2):
        first.fill()
        second.fill()
        view = first.view(0, (100_000,))
        memory.end_backward()
        if _ == 0:
            first.drain()
            second.drain()
    assert arena_bytes(memory) == 2 * aligned(100_000)
    view.fill_(5)
    del memory, first, second
    gc.collect()
    taken = [torch.full((100_000,), 9, dtype=torch.uint8) for _ in range(20)]
    assert int(view.sum()) == 500_000
    assert all(int(each.sum()) == 900_000 for each in taken)


@plans_addresses
def test_roles_have_arenas_of_their_own() -> None:
    """On CUDA they are filled on different lanes."""
    memory = Memory(CPU, plans_addresses=True)
    full = memory.transient(10, torch.float32, "full")
    staging = memory.transient(10, torch.bfloat16, "staging")
    for _ in range(2):
        for storage in (full, staging):
            with storage.while_filled():
                pass
        memory.end_backward()
    assert memory.ledger.held == {"full": ALIGNMENT, "staging": ALIGNMENT}


@plans_addresses
def test_a_rehearsed_step_has_its_arena_before_it_runs_and_keeps_it() -> None:
    memory = Memory(CPU, plans_addresses=True)
    row = []
    for _ in range(4):
        memory.begin_unit()
        row.append(memory.transient(1000, torch.uint8, "full"))
    memory.expect({"full": [[0, 1], [1, 2], [2, 3]], "staging": []})
    arena = memory.arenas["full"].memory
    assert arena is not None
    assert memory.ledger.held["full"] == memory.ledger.peak["full"] == 2 * aligned(1000)
    walk(memory, row)
    assert memory.ledger.peak["full"] == 2 * aligned(1000)
    # More than was expected: the arena stays, and who has no room in it lies elsewhere.
    for _ in range(3):
        memory.ledger.reset_peak()
        for storage in row:
            storage.fill()
        for storage in row:
            storage.drain()
        memory.end_backward()
        assert memory.ledger.peak["full"] == 2 * aligned(1000) + 2 * 1000
    assert memory.arenas["full"].memory is arena


@plans_addresses
def test_storages_of_no_bytes_have_no_address() -> None:
    memory, (nothing, something) = make(0, 5)
    for _ in range(3):
        nothing.fill()
        something.fill()
        nothing.drain()
        something.drain()
        memory.end_backward()
    assert arena_bytes(memory) == ALIGNMENT


def test_no_addresses_are_planned_where_memory_cannot_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        assert Memory(CPU, plans_addresses=True).arenas == {}
    assert Memory(CPU).arenas == {}
    monkeypatch.setattr(memory_module, "_CAN_SWAP", False)
    memory, row = make(*[1000] * 4)
    assert memory.arenas == {}
    for _ in range(3):
        walk(memory, row)
    assert memory.ledger.peak["full"] == 2000
    assert memory.ledger.held["full"] == 0
