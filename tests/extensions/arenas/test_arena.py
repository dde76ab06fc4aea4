"""Storages that are filled from an arena: which are, when it grows, what keeps it alive."""

from __future__ import annotations

import gc
import itertools
import random

import torch

from fsdp_engine.extensions.arenas.arena import ALIGNMENT, aligned
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.memory.allocator import TransientStorage
from tests.torch_versions import plans_addresses

CPU = torch.device("cpu")


def make(*sizes: int, role: str = "full") -> tuple[ArenaMemory, list[TransientStorage]]:
    memory = ArenaMemory(CPU)
    return memory, [memory.transient(size, torch.uint8, role) for size in sizes]


def walk(memory: ArenaMemory, row: list[TransientStorage], *, ends: bool = True) -> list[int]:
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


def arena_bytes(memory: ArenaMemory, role: str = "full") -> int:
    arena = memory.arenas[role].memory
    return 0 if arena is None else arena.numel()


@plans_addresses
def test_an_arena_is_as_long_as_the_first_step_needed_and_later_steps_find_their_ranges() -> None:
    memory, row = make(*[1000] * 5)
    walk(memory, row)
    assert arena_bytes(memory) == 0
    assert memory.ledger.held["full"] == 0
    memory.ledger.reset_peak()
    found = [walk(memory, row) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 2
    assert arena_bytes(memory) == 2 * aligned(1000)
    # The arena is held, in use or not, and nothing beside it.
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
def test_an_arena_grows_after_a_step_that_needed_more_and_keeps_its_length_else() -> None:
    memory, row = make(*[1000] * 4)
    walk(memory, row)
    walk(memory, row)
    arena = memory.arenas["full"].memory
    for order in (row[:2], row[:1], [row[2], row[0], row[1], row[3]]):
        walk(memory, order)
        assert memory.arenas["full"].memory is arena
    for storage in row[:3]:
        storage.fill()
    memory.end_backward()
    assert memory.arenas["full"].memory is arena  # while a storage is filled nothing moves
    kept = row[0].view(0, (1000,)).fill_(7)
    row[3].fill()
    assert int(kept.sum()) == 7000
    for storage in row:
        storage.drain()
    walk(memory, row)
    assert arena_bytes(memory) == 4 * aligned(1000)
    memory.ledger.reset_peak()
    walk(memory, row)
    assert memory.ledger.peak["full"] == arena_bytes(memory)


@plans_addresses
def test_storages_with_memory_never_share_a_byte_whatever_happens() -> None:
    choose = random.Random(11)
    memory, row = make(0, *(choose.randint(1, 3000) for _ in range(12)))
    for event in range(2000):
        storage = choose.choice(row)
        storage.drain() if storage.filled else storage.fill()
        filled = [each for each in row[1:] if each.filled]
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
def test_the_arena_outlives_the_storages_that_are_filled_from_it() -> None:
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
def test_a_rehearsed_step_has_its_arena_before_it_runs_and_keeps_it() -> None:
    memory = ArenaMemory(CPU)
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
    # More than was expected: the arena stays, and others get ordinary memory.
    for _ in range(3):
        memory.ledger.reset_peak()
        for storage in row:
            storage.fill()
        for storage in row:
            storage.drain()
        memory.end_backward()
        assert memory.ledger.peak["full"] == 2 * aligned(1000) + 2 * 1000
    assert memory.arenas["full"].memory is arena
