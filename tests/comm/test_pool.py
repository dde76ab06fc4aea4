"""The pool of ranks itself: what it returns, and that no failure outlives its test."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.pool import RankError, Ranks, on_ranks, wait_for_groups


def world_and_sum(value: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + value)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a planted failure")
    dist.all_reduce(torch.zeros(1))


def change_process() -> None:
    os.environ["RANK"] = "7"
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def groups_and_resources() -> tuple[int, int]:
    wait_for_groups()
    group = dist.new_group(range(dist.get_world_size()))
    dist.all_reduce(torch.ones(1), group=group)
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def leave_rubbish(folder: str) -> None:
    """Change settings of the process, and leave groups, hooks and a collective behind."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    random.seed(7)
    torch.manual_seed(7)
    os.chdir(folder)
    warnings.simplefilter("error")
    nn.modules.module.register_module_forward_hook(_fail)
    nn.modules.module.register_module_full_backward_hook(_fail)
    register_optimizer_step_pre_hook(_fail)
    register_optimizer_step_post_hook(_fail)
    group = dist.new_group(range(dist.get_world_size()))
    dist.all_reduce(torch.ones(3, device="cpu"), group=group, async_op=True)


def _fail(*_: object) -> None:
    raise AssertionError("a hook of an earlier call")


def read_defaults() -> tuple[object, ...]:
    """Settings of the process, after a step of training."""
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    warnings.warn("not an error", stacklevel=1)
    return (
        layer.weight.dtype,
        layer.weight.device.type,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.rand(()).item(),
        random.random(),
        os.getcwd(),
        dist.get_world_size(),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_of_the_asked_world_runs_and_returns_its_value(
    ranks: Ranks, world_size: int
) -> None:
    total = float(sum(range(world_size)) + 3 * world_size)
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert ranks.run(world_and_sum, 3, world_size=world_size) == expected


def test_calls_share_processes_and_see_nothing_that_earlier_calls_left(
    ranks: Ranks, tmp_path: Path
) -> None:
    first = ranks.run(os.getpid)
    before = ranks.run(read_defaults)
    ranks.run(leave_rubbish, str(tmp_path))
    assert ranks.run(read_defaults) == before
    assert before[0][:5] == (torch.float32, "cpu", 1, False, False)
    assert ranks.run(os.getpid) == first


def environment() -> dict[str, str]:
    return dict(os.environ)


def test_environment_and_stacks_survive_a_call_that_changes_them(ranks: Ranks) -> None:
    before = ranks.run(environment)
    ranks.run(change_process)
    assert ranks.run(environment) == before
    ranks.run(change_process)
    with pytest.raises(RankError, match=r"(?s)did not answer.*in hang_on"):
        ranks.run(hang_on, 1, timeout=1.0)


def test_a_failing_rank_is_named_and_its_peers_do_not_wait_for_it(ranks: Ranks) -> None:
    ranks.run(os.getpid)
    starts = ranks.num_starts
    with pytest.raises(RankError, match=r"fail_on failed on rank 2") as caught:
        ranks.run(fail_on, 2)
    assert caught.value.rank == 2
    assert "ValueError: a planted failure" in caught.value.failures[2]
    assert "in fail_on" in caught.value.failures[2]
    assert len(ranks.run(os.getpid)) == 4
    assert ranks.num_starts == starts, "expected no restart: a failed rank's peers fail, too"


def test_a_hanging_rank_is_named_with_its_stack_and_the_pool_starts_again(ranks: Ranks) -> None:
    before = ranks.run(os.getpid)
    starts = ranks.num_starts
    with pytest.raises(RankError, match=r"no answer from ranks \[1\]") as caught:
        ranks.run(hang_on, 1, timeout=2.0)
    assert "in hang_on" in caught.value.failures[1]
    assert caught.value.failures[0] == "returned"
    assert ranks.run(world_and_sum, 0)[3] == (3, 4, 6.0)
    assert ranks.num_starts == starts + 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_a_dying_rank_is_named_with_its_exit_code_and_the_pool_starts_again(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 3") as caught:
        ranks.run(die_on, 3)
    assert caught.value.failures[3] == "died with exit code 7"
    assert ranks.run(world_and_sum, 0, world_size=2) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_many_calls_leave_no_descriptors_and_no_threads_behind(ranks: Ranks) -> None:
    for world_size in (4, 2):
        ranks.run(groups_and_resources, world_size=world_size)
    early = ranks.run(groups_and_resources)
    for call in range(30):
        ranks.run(groups_and_resources, world_size=(4, 2, 1)[call % 3])
    late = ranks.run(groups_and_resources)
    for (fds_early, tasks_early), (fds_late, tasks_late) in zip(early, late, strict=True):
        assert fds_late <= fds_early + 4
        assert tasks_late <= tasks_early + 2


@on_ranks(2)
def _fails_on_the_ranks() -> None:
    assert dist.get_rank() == 1


def test_a_test_on_ranks_fails_where_its_body_fails(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0") as caught:
        _fails_on_the_ranks(ranks=ranks)
    assert set(caught.value.failures) == {0}
    assert "assert dist.get_rank() == 1" in caught.value.failures[0]
