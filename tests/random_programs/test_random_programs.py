"""Random programs have the same results as in one process of plain torch.

To run one by hand: ``run_and_compare(seed, folder)`` of ``programs.py`` within a process group.
"""

from __future__ import annotations

import os
import tempfile

import pytest
import torch.distributed as dist

from tests.pool import Ranks
from tests.random_programs.programs import run_and_compare

# Other programs: FSDP_ENGINE_TEST_SEED=... in the environment.
FIRST_SEED = int(os.environ.get("FSDP_ENGINE_TEST_SEED", "0"))


def run_many(first: int, num: int) -> dict[int, str]:
    """Differences of the programs that failed, by seed."""
    failed = {}
    for seed in range(first, first + num):
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        if lines := run_and_compare(seed, str(shared[0])):
            failed[seed] = "\n".join(lines[:6])
    return failed


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3))]
)
def test_random_programs(ranks: Ranks, world_size: int, part: int) -> None:
    num = 5 if part == 0 else 25
    first = FIRST_SEED + 1000 * world_size + 100 * part
    failed = ranks.run(run_many, first, num, world_size=world_size)[0]
    assert not failed, "\n".join(f"seed {seed}: {lines}" for seed, lines in failed.items())
