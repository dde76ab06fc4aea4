"""Ranks that share the cores of a host compute with their share of threads."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.comm import host_threads
from tests.models import Transformer
from tests.pool import Ranks

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
TOO_MANY = 8 * (os.cpu_count() or 1)


def shard_with_many_threads(
    variable: str, has_own_core: bool, is_default: bool = True
) -> tuple[int, list[str], int]:
    """The number of threads and warnings after ``shard``; cores that this rank may use."""
    environment = {name: os.environ.pop(name, None) for name in VARIABLES}
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        if variable:
            os.environ[variable] = str(TOO_MANY)
        if has_own_core:
            os.sched_setaffinity(0, {sorted(cores)[dist.get_rank()]})
        torch.set_num_threads(TOO_MANY)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if is_default:
                patch.setattr(host_threads, "_AT_IMPORT", TOO_MANY)
            fe.shard(Transformer(), strategy="optim")
        messages = [str(each.message) for each in caught if "get_num_threads" in str(each.message)]
        return torch.get_num_threads(), messages, len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, cores)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def test_ranks_share_the_cores(ranks: Ranks) -> None:
    for world_size in (2, 4):
        found = ranks.run(shard_with_many_threads, "", False, world_size=world_size)
        num_cores = found[0][2]
        share = max(1, num_cores // world_size)
        assert [num for num, _, _ in found] == [share] * world_size
        (message,) = found[0][1]
        assert f"at most {share}, since {world_size} ranks share {num_cores} cores" in message
        assert f"found {TOO_MANY}, and reduced it to {share}" in message
        assert not any(messages for _, messages, _ in found[1:])


@pytest.mark.parametrize(
    ("variable", "is_default", "world_size"),
    [("OMP_NUM_THREADS", True, 2), ("MKL_NUM_THREADS", True, 2), ("", False, 2), ("", True, 1)],
    ids=["in OpenMP's variable", "in MKL's", "set by the user", "of a rank alone"],
)
def test_a_number_stays(ranks: Ranks, variable: str, is_default: bool, world_size: int) -> None:
    found = ranks.run(shard_with_many_threads, variable, False, is_default, world_size=world_size)
    assert [each[:2] for each in found] == [(TOO_MANY, [])] * world_size


def test_ranks_with_cores_of_their_own_share_none(ranks: Ranks) -> None:
    assert len(os.sched_getaffinity(0)) >= 2
    found = ranks.run(shard_with_many_threads, "", True, world_size=2)
    assert [num for num, _, _ in found] == [1, 1]
