"""What the host waits for, and which stream does what, while the engine trains on the device.

Streams are held instead of slowed: no test here depends on a clock.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.comm import mesh as mesh_module
from fsdp_engine.comm.collectives import Communicator, all_reduce_
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.memory.host_memory import HostBlock
from fsdp_engine.runtime.unit import State
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import LEVELS
from tests.models import Small, vector_batch
from tests.pool import on_few_ranks, on_ranks

ranks = device.ranks

EACH = fe.Options(min_unit_size=0)


@on_few_ranks
def test_the_engine_without_a_mesh_is_on_the_accelerator_and_its_lanes_are_streams() -> None:
    model = Small(2)
    engine = fe.shard(copy.deepcopy(model), options=EACH)
    assert engine.mesh.device == on.DEVICE
    assert all(isinstance(lane, DeviceLane) for lane in make_lanes(engine.mesh.device).all)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value.cpu(), model.state_dict()[name]), name


@on_ranks(2)
def test_sums_of_host_memory_go_through_a_group_of_the_device_alone() -> None:
    group = dist.new_group(backend=on.NAME)
    host = torch.tensor([dist.get_rank() + 1.0])
    assert all_reduce_(host, group).tolist() == [3.0]
    assert host.tolist() == [3.0]


@on_ranks(2)
def test_the_host_waits_for_nothing_in_a_steady_step() -> None:
    for level in LEVELS:
        model = Small()
        engine = fe.shard(model, strategy=level, options=EACH)
        assert len(engine.units) > 3
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        batch = [part.to(on.DEVICE) for part in vector_batch(2, dist.get_rank())]
        for step in range(3):
            with on.count_host_syncs() as syncs:
                model(*batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert step == 0 or not syncs


class Towers(nn.Module):
    """Towers; each batch uses only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, reached: list[int]) -> Tensor:
        for index in reached:
            x = x + torch.tanh(self.towers[index](x))
        return x.square().mean()


@on_ranks(2)
def test_the_host_waits_for_no_work_of_the_device_where_a_parameter_got_no_gradient() -> None:
    """Tower 0 is reached on all ranks, tower 1 on rank 1 alone, tower 2 on none."""
    x = torch.ones(2, 8, device=on.DEVICE)
    for level in LEVELS:
        model = Towers()
        before = copy.deepcopy(model.state_dict())
        # Where parameters are sharded, all ranks must use the same units.
        units = [] if level == "optim_grads_params" else list(model.towers)
        engine = fe.shard(model, units=units, strategy=level)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5, foreach=False)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(x, [0, 1][: dist.get_rank() + 1]).backward()
            optimizer.step()
            absent = [param.grad is None for param in model.parameters()]
            assert absent == [False] * 4 + [True] * 2
            optimizer.zero_grad()

        for _ in range(2):
            step()
        torch.accelerator.synchronize()
        with on.count_host_syncs() as syncs, on.held():
            step()  # would never end if it waited for the held stream
        # Rank 1 waits for the other host's answer. No rank waits for work of the device.
        assert all(site.startswith("step_message.py") for _, site in syncs), syncs
        assert sum(syncs.values()) <= 1, syncs
        after = engine.full_state_dict()
        same = [torch.equal(after[name].cpu(), old) for name, old in before.items()]
        assert same == [False] * 4 + [True] * 2


def blocks_of(num: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(num)))


@on_ranks(2)
def test_activations_reuse_the_memory_of_full_parameters_that_are_freed() -> None:
    model = blocks_of(1)
    engine = fe.shard(model, units=list(model), strategy="optim_grads_params")
    (buffer,) = engine.buffers
    addresses: list[int] = []

    def note(module: nn.Module, args: object) -> None:
        addresses.append(buffer.full_params[0].data_ptr())

    model[0].register_forward_pre_hook(note)
    with torch.no_grad():
        model(torch.ones(2, 64, device=on.DEVICE))
    activation = torch.empty(buffer.weights.transient_bytes // 4, device=on.DEVICE)
    assert activation.data_ptr() == addresses[0]


@on_ranks(2)
def test_a_unit_is_cast_while_the_link_is_busy_with_another() -> None:
    model = blocks_of(3)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine = fe.shard(model, units=list(model), strategy="optim_grads_params", mp_policy=policy)
    first, second = (unit for unit in engine.units if unit.name in ("0", "1"))
    link, copy_in = (lane._stream for lane in (engine.lanes.inner_gather, engine.lanes.copy_in))
    ended: list[bool] = []

    def before(module: nn.Module, args: object) -> None:
        """The gathers of two units are issued, and the stream of gathers is held."""
        states = {(unit.state is State.GATHERING, unit.uses > 0) for unit in (first, second)}
        assert states == {(True, False), (False, True)}
        copy_in.synchronize()
        ended.append(link.query())

    with torch.no_grad():  # the first forward has a host sync, since it compares values
        model(torch.ones(2, 64, device=on.DEVICE))
    model[0].register_forward_pre_hook(before)
    torch.accelerator.synchronize()
    with on.held(link), torch.no_grad():
        model(torch.ones(2, 64, device=on.DEVICE))
    assert ended == [False]


def train_on(
    model: nn.Module, rows: slice, forward: torch.Stream | None, backward: torch.Stream | None
) -> None:
    """Two steps of two microbatches: forwards on one stream, backwards on another."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    for step in range(2):
        for part in range(2):
            with torch.deferred.stream(forward):
                batch = (each[rows].to(device) for each in vector_batch(4, 2 * step + part))
                loss = model(*batch)
            if backward is not None:
                backward.wait_stream(forward)
            with torch.deferred.stream(backward):
                loss.backward()
        with torch.deferred.stream(backward):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if forward is not None:
            forward.wait_stream(backward)


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_training_on_other_streams_than_that_of_shard_is_right(level: str) -> None:
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    model = Small(2)
    models = [copy.deepcopy(model) for _ in range(2)]
    mesh = dist.init_device_mesh("cpu", (2,))
    expected = fe.shard(model, mesh, level, options=EACH)
    train_on(model, rows, None, None)
    first, second = torch.deferred.Stream(), torch.deferred.Stream()
    for on_device, backward in zip(models, (first, second), strict=True):
        engine = fe.shard(on_device, strategy=level, options=EACH)
        for stream in (first, backward):
            stream.wait_stream(torch.deferred.current_stream())
        # The stream of shard() is slow, which reveals work of training that runs on it by mistake.
        with on.delays(compute=2e-4, collective=1e-3, streams={0: 3e-3}), warnings.catch_warnings():
            warnings.filterwarnings("error", "The AccumulateGrad node's stream does not match")
            train_on(on_device, rows, first, backward)
        with torch.deferred.stream(backward):
            found = {name: value.cpu() for name, value in engine.full_state_dict().items()}
        torch.testing.assert_close(found, dict(expected.full_state_dict()), rtol=0, atol=1e-6)


class OfAnotherBackend:
    """A group whose backend is not the device's own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.are_async: list[bool] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "ucc")

    def all_gather_single(self, full: Tensor, source: Tensor, options: Any) -> Any:
        self.are_async.append(options.asyncOp)
        return self._group.all_gather_single(full, source, options)

    _allgather_base = all_gather_single  # torch 2.11

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@on_ranks(2)
def test_collectives_of_a_backend_that_is_not_the_devices_own_are_waited_for() -> None:
    group: Any = OfAnotherBackend(dist.group.WORLD)
    comm = Communicator(group, on.DEVICE)
    lanes = make_lanes(on.DEVICE)
    full = torch.zeros(6, device=on.DEVICE)
    comm.part(full).fill_(dist.get_rank() + 1.0)
    with on.delays(collective=5e-3):
        ticket = lanes.inner_gather.submit(
            "gather", partial(comm.all_gather, full), after=[lanes.compute.record()]
        )
        lanes.compute.wait(ticket)
        assert full.tolist() == [1.0] * 3 + [2.0] * 3
    assert group.are_async == [True]


@on_ranks(2)
def test_a_mesh_whose_collectives_do_not_wait_for_streams_is_refused() -> None:
    """Only the backend's name is patched: torch's MPI needs a special build of torch."""
    model = blocks_of(1)
    refuses = pytest.raises(ValueError, match=r"expected a backend for deferred tensors .* MPI")
    with patch.object(mesh_module, "name_of_backend", return_value="mpi"), refuses:
        fe.shard(model)
    fe.shard(model)


class Allocations(TorchDispatchMode):
    """Notes how much memory each operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_bytes.append(result.untyped_storage().nbytes())
        return result


@on_ranks(1)
def test_a_block_of_pinned_memory_is_allocated_once() -> None:
    with Allocations() as allocations:
        block = HostBlock(1000, pinned=True)
    assert block.bytes.is_pinned()
    assert allocations.num_bytes == [1000]


@on_ranks(2)
def test_all_communicators_are_made_by_shard_and_none_in_training() -> None:
    connected: list[dist.ProcessGroup] = []

    def note(tensor: Tensor, group: Any, op: str = "sum", what: str = "") -> Tensor:
        connected.append(group)
        return all_reduce_(tensor, group, op, what)

    with patch.object(mesh_module, "all_reduce_", note):
        mesh = fe.shard(blocks_of(2)).mesh
        fe.shard(blocks_of(2))  # reuses the communicators
    ends = [mesh.inner.gather_group, mesh.inner.reduce_group]
    assert connected == [*ends, mesh.message_group]
    assert mesh.control_group in ends
    assert mesh.message_group not in ends


@on_ranks(4)
def test_backward_goes_on_while_the_outer_axis_is_reduced() -> None:
    """Only reductions along the inner axis read staging buffers, so outer reductions do not block
    these buffers."""
    mesh = init_device_mesh(on.NAME, (2, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    engine = fe.shard(model, mesh, "optim_grads_params", "optim", units=list(model))
    x = torch.ones(4, 16, device=on.DEVICE, requires_grad=True)
    reached = torch.deferred.Event()
    x.register_hook(lambda _: reached.record())
    torch.accelerator.synchronize()
    with on.held(engine.lanes.outer_reduce._stream):
        model(x).sum().backward()
        reached.synchronize()  # would never end if compute waited for the held stream
    assert x.grad is not None
    assert model[0].weight.grad is not None
