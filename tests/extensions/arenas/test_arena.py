"""Storages that are filled from an arena never share memory, and keep the arena alive."""

from __future__ import annotations

import gc
import itertools
import random

import torch

from fsdp_engine.extensions.arenas.arena import aligned
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.memory.allocator import TransientStorage
from tests.torch_versions import plans_addresses


def make(*sizes: int) -> tuple[ArenaMemory, list[TransientStorage]]:
    memory = ArenaMemory(torch.device("cpu"))
    return memory, [memory.transient(size, torch.uint8, "full") for size in sizes]


def arena_bytes(memory: ArenaMemory) -> int:
    arena = memory.arenas["full"].memory
    return 0 if arena is None else arena.numel()


@plans_addresses
def test_storages_share_no_byte_and_their_views_stay_valid_whatever_happens() -> None:
    choose = random.Random(11)
    memory, row = make(*(choose.randint(1, 3000) for _ in range(12)))
    for storage in row:
        storage.fill()
    views = [storage.view(0, (storage.num_bytes,)) for storage in row]
    versions = [view._version for view in views]
    num_writes = [0] * len(row)
    for event in range(2000):
        number = choose.randrange(len(row))
        storage, view = row[number], views[number]
        before = memory.arenas["full"].memory
        if storage.filled and num_writes[number]:
            assert view.eq(number).all()
            storage.free()
        else:
            storage.fill()
            view.fill_(number)
            num_writes[number] += 1
        assert view._version == versions[number] + num_writes[number]
        filled = [each for each in row if each.filled]
        if before is not None and before is not memory.arenas["full"].memory:
            # The arena grows when no storage uses its memory.
            first, stop = before.data_ptr(), before.data_ptr() + before.numel()
            others = [each._storage.data_ptr() for each in filled if each is not storage]
            assert not any(first <= place < stop for place in others)
        spans = sorted((each._storage.data_ptr(), each.num_bytes) for each in filled)
        for (start, length), (following, _) in itertools.pairwise(spans):
            assert start + length <= following
        assert all(each._storage.nbytes() == each.num_bytes * each.filled for each in row)
        if event % choose.randint(20, 60) == 0:
            memory.end_backward()
    for storage in row:
        storage.free()
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
            first.free()
            second.free()
    assert arena_bytes(memory) == 2 * aligned(100_000)
    view.fill_(5)
    del memory, first, second
    gc.collect()
    taken = [torch.full((100_000,), 9, dtype=torch.uint8) for _ in range(20)]
    assert int(view.sum()) == 500_000
    assert all(int(each.sum()) == 900_000 for each in taken)
