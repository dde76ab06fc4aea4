"""The engine's groups can be created whatever other groups a rank is in. Tests of ``meet``."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from fsdp_engine.comm import activity, groups, rendezvous
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.comm.rendezvous import meet, report_error
from fsdp_engine.extensions.stall_monitor.stall_monitor import StallMonitor
from fsdp_engine.megatron.finalize_model_grads import finalize_model_grads
from fsdp_engine.megatron.process_groups import ModelParallelGroups, spanned_group
from tests.megatron.configs import Chunk
from tests.pool import Ranks, on_ranks

# A group that cannot be created waits for 60 s; others take a tenth of a second.
LIMIT = 30.0


def trains(mesh: DeviceMesh | None = None, strategy: str = "optim_grads_params") -> None:
    """Compute gradients on ``mesh``, and their norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = fe.shard(model, mesh, strategy)
    model(torch.ones(2, 4)).sum().backward()
    assert engine.clip_grad_norm_(1.0) > 0


def a_group_of_the_first_rank_alone() -> None:
    dist.new_group([0])
    trains()


def a_group_of_the_last_rank_alone_and_two_axes() -> None:
    dist.new_group([dist.get_world_size() - 1])
    trains(init_device_mesh("cpu", (2, dist.get_world_size() // 2)))


def two_ranks_and_then_all() -> None:
    pair = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        trains(pair)
    trains()
    trains(strategy="no_shard")


def columns_after_a_subset() -> None:
    subset = DeviceMesh("cpu", list(range(dist.get_world_size() - 1)))
    grid = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("row", "column")
    )
    if subset.get_coordinate() is not None:
        trains(subset)
    for axis in ("row", "column"):
        trains(grid[axis])
    trains(grid)


def token_counts_over_pipeline_and_data() -> None:
    # Stages of one pipeline are far apart, data ranks are neighbours, as in Megatron-Core.
    half = dist.get_world_size() // 2
    me = dist.get_rank()
    pipelines = [dist.new_group([place, place + half]) for place in range(half)]
    stages = [dist.new_group(range(stage * half, (stage + 1) * half)) for stage in range(2)]
    groups = ModelParallelGroups(pipeline=pipelines[me % half], data=stages[me // half])
    if me == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = nn.Linear(3, 1, bias=False)
    chunk = Chunk(model, DeviceMesh.from_group(stages[me // half], "cpu"), "optim_grads")
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        finalize_model_grads([chunk], 2, groups=groups)
        grad = chunk.engine.full_tensor("weight")  # this is a collective over the same ranks
        assert grad.shape == (1, 3)
        local = model.weight.grad.local  # type: ignore[union-attr]
        assert torch.equal(local, torch.ones_like(local))
        model.zero_grad()


CASES = [
    a_group_of_the_first_rank_alone,
    a_group_of_the_last_rank_alone_and_two_axes,
    two_ranks_and_then_all,
    columns_after_a_subset,
    token_counts_over_pipeline_and_data,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_groups_of_four_ranks_come_about_after(case: Callable[[], None], ranks: Ranks) -> None:
    ranks.run(case, world_size=4, timeout=LIMIT)


@pytest.mark.thorough
def test_groups_of_eight_ranks_come_about_after_them() -> None:
    eight = Ranks(8)
    for case in CASES:
        eight.run(case, world_size=8, timeout=LIMIT)
    eight.close()


@on_ranks(4, timeout=LIMIT)
def test_ranks_of_a_mesh_may_be_in_any_order() -> None:
    mesh = DeviceMesh("cpu", [[3, 0], [2, 1]])
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    engine = fe.shard(model, mesh, "optim_grads_params", "optim_grads_params")
    assert torch.equal(engine.full_tensor("weight"), weight)
    model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, fe.FlatDTensor)
    assert torch.equal(grad.full_tensor(), torch.full((4, 4), 1.5))


@on_ranks(2)
def test_what_groups_span_is_forgotten_with_them() -> None:
    both = dist.new_group([0, 1])
    again = dist.new_group([0, 1])
    assert spanned_group(torch.device("cpu"), both, again) is both
    gone = weakref.ref(both)
    dist.destroy_process_group(both)
    del both
    gc.collect()
    assert gone() is None


# --- meetings ---

SOON = timedelta(seconds=3)
LATE = timedelta(seconds=LIMIT)


@on_ranks(4, timeout=LIMIT)
def test_a_meeting_names_who_did_not_come_and_those_learn_of_it_later() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() in (1, 3):
        store.wait(["over"], timedelta(seconds=LIMIT))
    with pytest.raises(RuntimeError, match=r"tea: .* ranks \[1, 3\] did not call within \d+ s"):
        meet("tea", range(4), SOON)
    store.set("over", "")
    # After the failure, all ranks agree on the number of the next meeting.
    assert not meet("tea", range(4), LATE).all_have


@pytest.mark.parametrize("why", ["has ended", "has destroyed its process groups"])
@pytest.mark.parametrize("has_groups", [False, True])
@on_ranks(2, timeout=LIMIT)
def test_a_meeting_does_not_wait_for_a_rank_that_has_left(why: str, has_groups: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    activity.start_monitor()
    monitor = activity.monitor()
    assert isinstance(monitor, StallMonitor)
    if dist.get_rank() == 1:
        monitor._over.set()
        monitor._publish_end(why)
        store.wait(["over"], timedelta(seconds=LIMIT))
        return
    with (
        patch.object(rendezvous, "FIRST_CHECK_SECONDS", 0.1),
        patch.object(activity, "PATIENCE_SECONDS", 1.0),
        pytest.raises(RuntimeError, match=rf"tea: .* rank 1 {why}"),
    ):
        meet("tea", range(2), LATE, groups=[groups.default_group()] if has_groups else ())
    store.set("over", "")


@on_ranks(3, timeout=LIMIT)
def test_the_error_of_one_rank_is_raised_on_all_at_once() -> None:
    for attempt in range(3):
        if dist.get_rank() == attempt:
            report_error("tea", range(3), KeyError("leaves"))
            continue
        with pytest.raises(RuntimeError, match=f"tea failed on rank {attempt}: KeyError: 'leaves'"):
            meet("tea", range(3), LATE)
    assert meet("tea", range(3), LATE, has=True).all_have
    assert not meet("tea", range(3), LATE, has=dist.get_rank() == 0).all_have


@on_ranks(2, timeout=LIMIT)
def test_ranks_that_come_for_different_things_are_told_of_both() -> None:
    with pytest.raises(ValueError, match=r"tea: .*rank \d \[\w+\] and on rank \d \[\w+\]"):
        meet("tea", [0, 1], LATE, note=("green", "black")[dist.get_rank()])
    meet("tea", [0, 1], LATE, note="green")
    assert meet("tea", [dist.get_rank()], SOON, has=True).all_have  # alone


@on_ranks(4, timeout=LIMIT)
def test_ranks_that_wait_for_each_other_in_different_places_are_told_so_soon() -> None:
    pair = DeviceMesh("cpu", [0, 1])
    mesh = pair if dist.get_rank() == 0 else None
    began = time.monotonic()
    text = r"rank 1 in shard\(\) over ranks \[0, 1, 2, 3\]|rank 0 in shard\(\) over ranks \[0, 1\],"
    with pytest.raises(RuntimeError, match=text):
        fe.shard(nn.Linear(2, 2), mesh)
    assert time.monotonic() - began < 20
    assert not meet("tea", range(4), timedelta(seconds=20)).all_have


class NcclOptions:
    """As ``ProcessGroupNCCL.Options``, which torch has on CUDA only."""

    def __init__(self) -> None:
        self.config: dict[str, int] = {}
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)


@on_ranks(2)
def test_groups_of_the_engine_have_the_options_of_the_meshs_group() -> None:
    options = NcclOptions()
    options.config = {"max_ctas": 4, "cga_cluster_size": 2}
    options.is_high_priority_stream = True
    options._timeout = timedelta(seconds=77)
    given: list[NcclOptions] = []
    make, backend_of = distributed_c10d._new_process_group_helper, groups.backend_of

    def helper(*args: Any, backend_options: Any = None, timeout: timedelta, **kwargs: Any) -> Any:
        given.append(backend_options)
        assert backend_options._timeout == timeout  # torch warns where they differ
        return make(*args, timeout=timeout, **kwargs)

    try:
        distributed_c10d._new_process_group_helper = helper  # type: ignore[assignment]
        groups.backend_of = lambda group, device: SimpleNamespace(options=options)
        DataMesh.create(init_device_mesh("cpu", (2,)))
    finally:
        distributed_c10d._new_process_group_helper = make
        groups.backend_of = backend_of
    ours = given[-2:]  # for gathers and for reductions
    assert [each.config for each in ours] == [options.config] * 2
    assert all(each.is_high_priority_stream for each in ours)
    assert all(each._timeout == timedelta(seconds=77) for each in ours)
    # Each has its own object, since torch writes the group's name into it.
    assert len({id(each) for each in (options, *ours)}) == 3


def free_a_group_in(folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = groups.new_group([0], timedelta(seconds=60), "freed", backend="gloo")
    of_default = distributed_c10d._world.pg_map[groups.default_group()][1]
    within = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group.group_name}/", of_default))
    assert within.check(["0/0"])
    groups.free_gloo_group(group)
    assert not within.check(["0/0"])


def test_a_group_over_a_file_store_is_freed(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(free_a_group_in, str(tmp_path), world_size=1, group=False, timeout=60)


@on_ranks(2)
def test_a_backend_without_options_has_torchs_timeout() -> None:
    class WithoutOptions:
        @property
        def options(self) -> Any:
            raise RuntimeError("Backend own does not implement getBackendOptions.")  # torch 2.14

    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "backend_of", lambda group, device: WithoutOptions())
        found = groups.timeout_of_group(group, torch.device("cpu"))
    assert found == distributed_c10d._get_default_timeout(dist.Backend("gloo"))
