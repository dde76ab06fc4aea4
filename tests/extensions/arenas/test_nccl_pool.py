"""Memory registered with NCCL, tested on a fake NCCL: calls to the pool and by the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.host_lane import HostLane
from fsdp_engine.extensions.arenas import nccl_pool
from fsdp_engine.memory import allocator
from fsdp_engine.strategies import LEVELS
from tests.extensions.arenas.planned_memory import Order, arenas_of, counting_fills, uneven_model
from tests.models import Chain, Even, Mlp, NestedUnits, lora_model, vector_batch
from tests.pool import on_ranks
from tests.torch_versions import plans_addresses
from tests.training import train

UB = fe.DistributedDataParallelConfig(nccl_ub=True)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


class FakePool:
    """Records the storages that get memory while the pool allocates.

    Attributes:
        ranges: (first byte, number of bytes) by storage.
        num_registered: Number of ranges when the pool was registered.
    """

    def __init__(self, mesh: Any, *, symmetric: bool) -> None:
        self.symmetric = symmetric
        self.takes_more = not symmetric
        self.ranges: dict[int, tuple[int, int]] = {}
        self.num_registered = -1
        self._is_open = False

    @contextmanager
    def allocating(self) -> Iterator[None]:
        assert not self._is_open
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def register(self) -> None:
        assert self.num_registered == -1
        self.num_registered = len(self.ranges)

    def note(self, storage: torch.UntypedStorage) -> None:
        if self._is_open and storage.nbytes():
            self.ranges[storage._cdata] = (storage.data_ptr(), storage.nbytes())

    def range_of(self, tensor: torch.Tensor) -> int | None:
        """Which of its ranges ``tensor`` lies in; None: not in the pool."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for key, (first, num_bytes) in self.ranges.items():
            if first <= start and stop <= first + num_bytes:
                return key
        return None


@contextmanager
def fake_pool() -> Iterator[Any]:
    """Give engines fake pools. Yields the memory that collectives read or write: ``ranges`` of
    the pool, and storages ``elsewhere``, with bytes outside of the pool."""
    sent = SimpleNamespace(ranges=set(), elsewhere=set())
    zeros, empty, resize = allocator.zeros, allocator.empty, torch.UntypedStorage.resize_
    submit = HostLane.submit
    pools: list[FakePool] = []

    def make_pool(mesh: Any, *, symmetric: bool) -> FakePool:
        pools.append(FakePool(mesh, symmetric=symmetric))
        return pools[-1]

    def noting(make: Any) -> Any:
        def make_and_note(*args: Any) -> Any:
            tensor = make(*args)
            if pools:
                pools[-1].note(tensor.untyped_storage())
            return tensor

        return make_and_note

    def noting_resize(storage: Any, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        if pools:
            pools[-1].note(storage)
        return result

    def noting_submit(lane: Any, label: str, *args: Any, **options: Any) -> Any:
        if label.startswith(COLLECTIVES) and pools:
            for tensor in (*options["reads"], *options["writes"]):
                found = pools[-1].range_of(tensor)
                if found is not None:
                    sent.ranges.add(found)
                elif tensor.numel():
                    sent.elsewhere.add(tensor.untyped_storage()._cdata)
        return submit(lane, label, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_pool, "NcclPool", make_pool)
        patch.setattr(nccl_pool, "check_nccl", lambda mesh, *, symmetric: None)
        patch.setattr(allocator, "zeros", noting(zeros))
        patch.setattr(allocator, "empty", noting(empty))
        patch.setattr(torch.UntypedStorage, "resize_", noting_resize, raising=False)
        patch.setattr(HostLane, "submit", noting_submit)
        yield sent


def mains_of(engine: Any) -> set[int]:
    """Main weights in another dtype, which are encoded for the gather."""
    return {
        b.weights.main.tensor.untyped_storage()._cdata
        for b in engine.buffers
        if b.weights.main.tensor.dtype != b.weights.params[0].dtype
    }


@plans_addresses
@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", LEVELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_collectives_read_and_write_lies_in_the_pool_and_nothing_else(
    strategy: str, dtype: torch.dtype | None
) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    with fake_pool() as sent:
        model = Even()
        engine = fe.shard(model, strategy=strategy, mp_policy=policy, config=UB)
        pool: Any = engine._memory._pool
        assert pool.num_registered == len(pool.ranges) > 0  # all of it, before anything runs
        train(model, engine, (2, 1))
        assert len(pool.ranges) == pool.num_registered
        assert sent.elsewhere <= mains_of(engine)
        assert sent.ranges == set(pool.ranges)


MODELS: list[Callable[[], Any]] = [Even, uneven_model, NestedUnits, lora_model]


@plans_addresses
@pytest.mark.parametrize("strategy", LEVELS)
@pytest.mark.parametrize("budget", [0, 1, None, 10**9])
@pytest.mark.parametrize("make", MODELS)
@on_ranks(world_size=2)
def test_a_rehearsed_step_is_the_one_that_runs(
    make: Callable[[], Any], budget: int | None, strategy: str
) -> None:
    """Models whose units run in module order need nothing beside their arenas, ever."""
    config = fe.DistributedDataParallelConfig(
        nccl_ub=True, suggested_communication_unit_size=budget
    )
    with fake_pool():
        model = make()
        engine = fe.shard(model, strategy=strategy, config=config)
        held = engine.memory_bytes()
        with counting_fills(engine) as fills:
            train(model, engine, (2, 1))
        assert fills == []
        assert engine.memory_bytes() == held
        assert engine.peak_memory_bytes() == {**held, "total": sum(held.values())}


@plans_addresses
@on_ranks(world_size=2)
def test_steps_that_were_not_rehearsed_are_served_by_ordinary_memory_too() -> None:
    with fake_pool():
        states = []
        for config in (None, UB):
            torch.manual_seed(0)
            model = Order(4, 2, 0, 1, 3)
            engine = fe.shard(model, config=config)
            arenas = [arena.memory for arena in arenas_of(engine).values()]
            train(model, engine, (2, 1))
            model.order = (1, 3, 0, 1)
            train(model, engine, (1, 1))
            states.append(engine.full_state_dict())
        pool: Any = engine._memory._pool
        assert len(pool.ranges) == pool.num_registered
        assert len(arenas) == 2
        for before, arena in zip(arenas, arenas_of(engine).values(), strict=True):
            assert arena.memory is before is not None
    torch.testing.assert_close(*states, rtol=0, atol=0)


@on_ranks(world_size=2)
@pytest.mark.parametrize("plain", [False, True])
def test_without_addresses_transient_memory_comes_from_a_pool_that_may_grow(plain: bool) -> None:
    config = fe.DistributedDataParallelConfig(nccl_ub=True, disable_symmetric_registration=plain)
    with fake_pool() as sent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "CAN_SWAP", False)
        model = Even()
        engine = fe.shard(model, config=config)
        pool: Any = engine._memory._pool
        assert pool.symmetric is not plain
        train(model, engine, (2, 1))
        assert bool(sent.elsewhere - mains_of(engine)) is not plain
        # All ranks register windows at one moment: nothing may be added later.
        assert plain or len(pool.ranges) == pool.num_registered


@on_ranks(world_size=2)
def test_groups_without_nccl_are_refused_on_all_ranks_before_anything_is_changed() -> None:
    model = Chain(Mlp(), Mlp())
    before = list(model.parameters())
    with pytest.raises(ValueError, match=r"nccl_ub: expected .* NCCL .* found gloo for cpu"):
        fe.shard(model, config=UB)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model(*vector_batch(2, dist.get_rank())).backward()
    fe.shard(Chain(Mlp()))  # nothing is in the way of another engine


def backend(calls: list[Any], *, has_windows: bool = True, has_multicast: bool = True) -> Any:
    """Stands in for NCCL's backend object, and notes ``calls``."""

    def register(pool: Any, **options: Any) -> None:
        assert has_windows or not options
        calls.append((pool, options))

    register.__doc__ = "(pool, symm: bool = False)" if has_windows else "(pool)"
    return SimpleNamespace(
        mem_allocator="NCCL's allocator",
        supports_tensor_alloc=lambda device: has_multicast,
        register_mem_pool=register,
    )


def mesh_over(backend: Any, groups: Sequence[Any], patch: pytest.MonkeyPatch) -> Any:
    """A mesh whose groups are names; all of them run over ``backend``."""
    patch.setattr(nccl_pool, "backend_of", lambda group, device: backend)
    inner, outer = (
        SimpleNamespace(gather_group=gather, reduce_group=reduce)
        for gather, reduce in (groups[:2], groups[2:])
    )
    device_mesh = SimpleNamespace(get_group=lambda place: "the user's")
    device = torch.device("cpu")
    return SimpleNamespace(inner=inner, outer=outer, device_mesh=device_mesh, device=device)


ALONE, GROUPS = (None,) * 4, ("g", "r", "og", "or")


@pytest.mark.parametrize("groups", [ALONE, GROUPS])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_pool_is_registered_with_every_group_after_its_first_collective(
    symmetric: bool, groups: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    log: list[Any] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        log.append((group, len(calls)))
        return tensor

    @contextmanager
    def use(pool: Any, device: Any) -> Iterator[None]:
        log.append(("enter", pool))
        yield
        log.append(("leave", pool))

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(nccl_pool, "all_reduce_", all_reduce)
    mesh = mesh_over(backend(calls), groups, monkeypatch)
    nccl_pool.check_nccl(mesh, symmetric=symmetric)
    pool = nccl_pool.NcclPool(mesh, symmetric=symmetric)
    assert pool.takes_more is not symmetric
    with pool.allocating():
        pass
    pool.register()
    name = "pool of NCCL's allocator"
    assert log[:2] == [("enter", name), ("leave", name)]
    # Each group's communicator is there before the pool is registered with it.
    num_groups = sum(group is not None for group in groups)
    assert log[2:] == [(group, number) for number, group in enumerate(groups[:num_groups])]
    assert calls == [(name, {"symm": True} if symmetric else {})] * num_groups


@pytest.mark.parametrize(
    ("nccl", "words", "also_plain"),
    [
        (backend([], has_windows=False), "Use disable_symmetric_registration=True", False),
        (backend([], has_multicast=False), r"nccl_ub: .* multicast, .*does not on cpu", True),
        (None, "nccl_ub: .*NCCL.*found nothing for cpu", True),
    ],
    ids=["without windows", "without multicast", "none"],
)
def test_what_cannot_register_is_refused(
    nccl: Any, words: str, also_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_over(nccl, GROUPS, monkeypatch)
    with pytest.raises(ValueError, match=words):
        nccl_pool.check_nccl(mesh, symmetric=True)
    with pytest.raises(ValueError, match=words) if also_plain else nullcontext():
        nccl_pool.check_nccl(mesh, symmetric=False)
