"""The device's process group: what each collective does, and that the host does not wait for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.comm.collectives import all_reduce_
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.pool import on_ranks

ranks = device.ranks


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """rank + 1, everywhere."""
    return torch.full(shape, dist.get_rank() + 1.0, device=on.DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_reductions_and_gathers_give_what_their_names_say(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    with on.count_host_syncs() as syncs:
        total, mean = mine(4, dtype=dtype), mine(4, dtype=dtype)
        dist.all_reduce(total)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        scaled = mine(4, dtype=dtype)
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
        gathered = torch.empty(6, device=on.DEVICE, dtype=dtype)
        dist.all_gather_into_tensor(gathered, mine(3, dtype=dtype))
        parts = [torch.empty(n, device=on.DEVICE, dtype=dtype) for n in (3, 3)]
        dist.all_gather(parts, mine(3, dtype=dtype))
        whole = torch.arange(6.0, device=on.DEVICE, dtype=dtype)
        share = torch.empty(3, device=on.DEVICE, dtype=dtype)
        dist.reduce_scatter_tensor(share, whole)
        of_list = torch.empty(2 - rank, device=on.DEVICE, dtype=dtype)
        dist.reduce_scatter(of_list, [mine(2, dtype=dtype), mine(1, dtype=dtype)])
        sent = mine(2, dtype=dtype)
        dist.broadcast(sent, 1)
    assert not syncs
    assert total.tolist() == [3] * 4
    assert mean.tolist() == [1.5] * 4
    assert scaled.tolist() == [1.5] * 4
    assert gathered.tolist() == [1, 1, 1, 2, 2, 2]
    assert [part.tolist() for part in parts] == [[1] * 3, [2] * 3]
    assert share.tolist() == ([0, 2, 4] if rank == 0 else [6, 8, 10])
    assert whole.tolist() == list(range(6))
    assert of_list.tolist() == [3] * (2 - rank)
    assert sent.tolist() == [2, 2]


@on_ranks(2)
def test_sums_of_host_memory_go_through_a_group_of_the_device_alone() -> None:
    group = dist.new_group(backend=on.NAME)
    host = torch.tensor([dist.get_rank() + 1.0])
    assert all_reduce_(host, group).tolist() == [3.0]
    assert host.tolist() == [3.0]


@on_ranks(2)
def test_messages_between_ranks_arrive_where_they_belong() -> None:
    rank = dist.get_rank()
    swapped = torch.empty(70_000, device=on.DEVICE)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine(70_000), 1 - rank),
            dist.P2POp(dist.irecv, swapped, 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    single = torch.empty(3, device=on.DEVICE)
    if rank == 0:
        dist.send(mine(3), 1)
    else:
        dist.recv(single, 0)
        assert single.tolist() == [1] * 3
    assert (swapped == 2 - rank).all()
    out = torch.empty(4, device=on.DEVICE)
    dist.all_to_all_single(out, mine(4))
    assert out.tolist() == [1, 1, 2, 2]
    outs = [torch.empty(n, device=on.DEVICE) for n in (rank + 1, rank + 1)]
    dist.all_to_all(outs, [mine(1), mine(2)])
    assert [each.tolist() for each in outs] == [[1] * (rank + 1), [2] * (rank + 1)]
    collected = [torch.empty(2, device=on.DEVICE) for _ in range(2)]
    dist.gather(mine(2), collected if rank == 0 else None)
    if rank == 0:
        assert [each.tolist() for each in collected] == [[1, 1], [2, 2]]
    dist.scatter(single, [mine(3), mine(3) * 5] if rank == 0 else None)
    assert single.tolist() == [1 if rank == 0 else 5] * 3


@on_ranks(2)
def test_a_barrier_makes_the_host_wait_and_a_callback_runs_behind_the_collective() -> None:
    x = mine(4)
    with on.delays(collective=0.02), on.count_host_syncs() as syncs:
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert not syncs
        dist.barrier(device_ids=[0])
    assert "barrier" in {reason for reason, _ in syncs}
    assert doubled.wait().tolist() == [6] * 4


@on_ranks(2)
def test_coalesced_collectives_are_one_job() -> None:
    x, y = mine(4), mine(2)
    with dist._coalescing_manager(device=on.DEVICE, async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert x.tolist() == [3] * 4
    assert y.tolist() == [3] * 2
