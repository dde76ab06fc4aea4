"""When gradients are held: from a unit's first reduction until they are cleared, and no longer.

Gradients that the user has stored elsewhere do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import Transformer, token_batch
from tests.pool import on_ranks
from tests.reference import full_weights

CUT = [name for name in LEVELS if name != "no_shard"]
Clear = Callable[[nn.Module, torch.optim.Optimizer], object]


CLEARS: dict[str, Clear] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


def make(strategy: str, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    engine = fe.shard(model, strategy=strategy, **options)
    return model, engine, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, number: int = 0) -> None:
    model(*token_batch(2, 10 * number + dist.get_rank())).backward()


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def held(engine: Any) -> int:
    return int(engine.memory_bytes().get("grad", 0))


@on_ranks(world_size=2)
@pytest.mark.parametrize("clear", list(CLEARS))
@pytest.mark.parametrize("strategy", LEVELS)
def test_between_steps_as_much_is_held_as_before_the_first(strategy: str, clear: str) -> None:
    model, engine, optimizer = make(strategy)
    rest = sum(buffer.grads.rest_bytes for buffer in engine.buffers)
    before = engine.memory_bytes()
    if strategy == "no_shard":  # unsharded gradients stay allocated after the first step
        before["grad"] = rest
    for number in range(3):
        backward(model, number)
        assert held(engine) == rest
        optimizer.step()
        CLEARS[clear](model, optimizer)
        assert engine.memory_bytes() == before, number


@on_ranks(world_size=2)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=str)
def test_a_sharded_optimizer_holds_no_gradients_that_are_cleared(options: dict[str, bool]) -> None:
    model, engine, _ = make("optim_grads_params")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    fe.shard_optimizer(optimizer)
    for number in range(3):
        backward(model, number)
        locals_ = [param.grad.to_local() for param in model.parameters()]
        storages = [local.untyped_storage() for local in locals_ if local.numel()]
        del locals_
        step(optimizer)
        assert storages
        assert not any(storage.nbytes() for storage in storages), number
        assert held(engine) == 0


@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", CUT)
def test_zeros_are_held_and_a_microbatch_is_until_it_is_cleared(strategy: str) -> None:
    model, engine, optimizer = make(strategy)
    backward(model)
    rest = held(engine)
    optimizer.zero_grad(set_to_none=False)
    assert held(engine) == rest
    optimizer.zero_grad()
    assert held(engine) == 0
    with engine.no_sync():
        backward(model)
    engine.zero_grad_buffer(zero=True)
    assert held(engine) == rest
    assert engine.buffers[0].grads.optim_grads.abs().max() == 0
    for clear in (optimizer.zero_grad, lambda: engine.zero_grad_buffer(zero=False), engine.reset):
        with engine.no_sync():
            backward(model)
        assert held(engine) == rest
        clear()
        assert held(engine) == 0


@on_ranks(world_size=2)
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("strategy", LEVELS)
def test_main_grad_stays_where_it_is(strategy: str, zero: bool) -> None:
    torch.manual_seed(0)
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True
    )
    ddp = fe.DistributedDataParallel(Transformer(), config)
    full_params = [param for buffer in ddp.engine.buffers for param in buffer.full_params]
    mains = [getattr(param, "main_grad", None) for param in full_params]
    places = [main.data_ptr() for main in mains if main is not None]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(2):
        ddp.zero_grad_buffer(zero)
        backward(ddp, number)
        ddp.finish_grad_sync()
        step(optimizer)
        # Unsharded gradients: main_grad is published, and holds the accumulated gradient.
        assert bool(places) == (strategy in ("no_shard", "optim"))
        assert [main.data_ptr() for main in mains if main is not None] == places
        assert all(main.isfinite().all() for main in mains if main is not None)


def local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, fe.FlatDTensor) else tensor


KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "the gradient": lambda grad: grad,
    "its slice": local,
    "a view of it": lambda grad: local(grad)[:1],
    "detached": lambda grad: grad.detach(),
}


@on_ranks(world_size=2)
@pytest.mark.parametrize("how", list(KEEPS))
@pytest.mark.parametrize("strategy", LEVELS)
def test_what_users_keep_of_cleared_gradients_stays_as_it_is(strategy: str, how: str) -> None:
    model, engine, optimizer = make(strategy)
    plain, _, other = make(strategy)
    kept, copies = [], []
    for number in range(3):
        backward(model, number)
        backward(plain, number)
        for param in model.parameters():
            assert param.grad is not None
            kept.append(KEEPS[how](param.grad))
            copies.append(local(kept[-1]).clone())
        step(optimizer, other)
        if strategy != "no_shard":
            assert held(engine) == 0  # the user's tensors have their own memory
    assert all(torch.equal(local(one), two) for one, two in zip(kept, copies, strict=True))
    found, expected = full_weights(model), full_weights(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(world_size=2)
def test_a_graph_that_saved_gradients_has_them_when_they_are_cleared() -> None:
    model, _, optimizer = make("optim_grads_params")
    backward(model)
    param = next(iter(model.parameters()))
    expected = local(param.grad).clone()
    weight = torch.ones(expected.shape, requires_grad=True)
    loss = (weight * local(param.grad)).sum()
    optimizer.zero_grad()
    backward(model, 1)
    loss.backward()
    assert torch.equal(weight.grad, expected)


@on_ranks(world_size=2)
@pytest.mark.parametrize("grads", [None, torch.bfloat16])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_nothing_is_made_anew_while_nobody_keeps_anything(
    is_sharded: bool, grads: torch.dtype | None
) -> None:
    policy = fe.MixedPrecisionPolicy(main_grads_dtype=grads)
    model, engine, optimizer = make("optim_grads_params", mp_policy=policy)
    if is_sharded:
        fe.shard_optimizer(optimizer)
    seen = set()
    for number in range(3):
        backward(model, number)
        grads = [param.grad for param in model.parameters()]
        seen.add(tuple(id(grad) for grad in grads))
        del grads
        step(optimizer)
    assert len(seen) == 1
    assert held(engine) == 0


@on_ranks(world_size=2)
def test_each_unit_loses_them_with_its_own() -> None:
    model, engine, _ = make("optim_grads_params")
    backward(model)
    total = held(engine)
    for unit in engine.units:
        for buffer in unit.buffers:
            before = held(engine)
            for param in buffer.sharded_params:
                param.grad = None
            assert held(engine) == before - buffer.grads.rest_bytes
    assert total > 0
    assert held(engine) == 0
    assert engine.clip_grad_norm_(1.0) == 0
