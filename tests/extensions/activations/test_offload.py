"""Activations on the host: which tensors move, and that nothing but memory is different.

The CPU serves as the device here: copies stay within host memory, and are counted. Their order is
tested in ``tests/extensions/activations/test_offload_async.py``.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.extensions.activations import host_pool
from fsdp_engine.extensions.activations.host_pool import HostPool
from fsdp_engine.extensions.activations.offloaded_activations import ActivationOffload
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.units.blocks import find_blocks
from tests.models import Transformer, token_batch
from tests.pool import on_ranks

ALL = fe.OffloadActivations(min_bytes=0)
CPU = torch.device("cpu")
Function = Callable[[Tensor], Tensor]


def test_memory_that_cannot_be_allocated_is_not_counted() -> None:
    pool = HostPool(lambda: None, lambda block: None)
    block, _ = pool.take(64)
    with (
        mock.patch.object(host_pool, "HostBlock", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        pool.take(1 << 20)
    assert pool.bytes_in_use == 64
    pool.put(block, None)
    pool.take(128)
    # The limit is the peak, 128 bytes: the idle block is freed.
    assert pool.idle_bytes == 0


class Block(nn.Module):
    """A block that calls a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        # Only modules with parameters are blocks.
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.scale


def blocks(*functions: Function) -> nn.Sequential:
    return nn.Sequential(*map(Block, functions))


def offload(
    model: nn.Module, options: fe.OffloadActivations = ALL, memory: Memory | None = None
) -> ActivationOffload:
    """Offloads a model that is not sharded."""
    memory = Memory(CPU) if memory is None else memory
    found = ActivationOffload(memory, make_lanes(CPU).compute, options)
    found.install(find_blocks(model, None))
    return found


def cube(x: Tensor) -> Tensor:
    return x * x * x


class Keeps(torch.autograd.Function):
    """Saves the tensors that ``choose`` makes of its input; backward records the saved tensors."""

    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, choose: Callable[[Tensor], list[Tensor]]) -> Tensor:
        ctx.save_for_backward(*choose(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Keeps.seen.append(ctx.saved_tensors)
        return grad * 2, None


def keeping(*choices: Callable[[Tensor], Tensor]) -> Function:
    return lambda x: Keeps.apply(x, lambda x: [choose(x) for choose in choices])  # type: ignore


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x.detach(),
    "transposed": lambda x: x.detach().t(),
    "a row": lambda x: x.detach()[3],
    "every third column, from the second": lambda x: x.detach()[:, 1::3],
    "expanded": lambda x: x.detach()[:, :1].expand(8, 7),
    "overlapping windows": lambda x: x.detach().as_strided((5, 4), (3, 2), 7),
    "of no elements": lambda x: x.detach()[:0],
    "one element": lambda x: x.detach()[2, 3],
    "bytes": lambda x: x.detach().view(torch.uint8)[:, 5:],
    "complex": lambda x: torch.view_as_complex(x.detach().view(8, 6, 2)),
    "conjugate": lambda x: torch.view_as_complex(x.detach().view(8, 6, 2)).conj(),
    "bfloat16": lambda x: x.detach().bfloat16(),
    "booleans": lambda x: (x > 0).t(),
    "integers": lambda x: x.argsort(dim=0)[1:],
}


@pytest.mark.parametrize("names", [*([name] for name in CHOICES), list(CHOICES)])
def test_a_tensor_comes_back_as_it_was(names: list[str]) -> None:
    choices = [CHOICES[name] for name in names]
    model = blocks(keeping(*choices), cube, cube)
    found = offload(model)
    x = torch.randn(8, 12, requires_grad=True)
    Keeps.seen.clear()
    loss = model(x).sum()
    expected = [choose(x) for choose in choices]
    assert found.pool.bytes_in_use
    loss.backward()
    for one, other in zip(Keeps.seen.pop(), expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert one.is_conj() == other.is_conj()


def test_a_storage_moves_once_and_views_of_it_share_memory() -> None:
    names = ["itself", "transposed", "a row"]
    model = blocks(keeping(*(CHOICES[name] for name in names)), cube, cube)
    found = offload(model)
    x = torch.randn(64, 64, requires_grad=True)
    y = model[0](x)
    # The block's input, the product that is multiplied by the scale, and the scale.
    assert 2 * x.nbytes <= found.pool.bytes_in_use <= 2 * x.nbytes + 64
    Keeps.seen.clear()
    model[2](model[1](y)).sum().backward()
    assert len({each.untyped_storage().data_ptr() for each in Keeps.seen[0]}) == 1


def test_a_tensor_of_a_subclass_stays_as_it_is() -> None:
    pair = TwoTensor(torch.randn(64), torch.randn(64))
    model = blocks(keeping(lambda x: pair), keeping(lambda x: x.detach()), cube)
    found = offload(model, fe.OffloadActivations(0, min_bytes=0))
    x = torch.randn(64, requires_grad=True)
    loss = model[0](x).sum()
    assert x.nbytes <= found.pool.bytes_in_use < 2 * x.nbytes
    Keeps.seen.clear()
    loss.backward()
    assert type(Keeps.seen[0][0]) is TwoTensor
    assert torch.equal(Keeps.seen[0][0].a, pair.a)


def test_tensors_that_several_blocks_save_move_once() -> None:
    mask = torch.randn(64, 64)
    model = blocks(*(lambda x: x * mask for _ in range(4)))
    found = offload(model)
    x = torch.randn(64, 64, requires_grad=True)
    loss = model(x).sum()
    # A product for each block, and the mask.
    assert 5 * x.nbytes <= found.pool.bytes_in_use <= 5 * x.nbytes + 5 * 64
    loss.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, mask**4)


def test_of_a_large_storage_the_range_that_is_saved_moves_and_small_ranges_stay() -> None:
    data = torch.randn(100_000)
    for num, min_bytes, most in ((64, 0, 1024), (64, 4 * 64, 1024), (63, 4 * 64, 0)):
        model = blocks(lambda x: x * data[640 : 640 + len(x)])
        found = offload(model, fe.OffloadActivations(min_bytes=min_bytes))
        loss = model(torch.randn(num, requires_grad=True)).sum()
        # The ranges of `data` and of the product have 256 bytes each.
        assert (0 < found.pool.bytes_in_use <= most) if most else not found.pool.bytes_in_use
        loss.backward()


def test_memory_of_the_engine_and_buffers_stay() -> None:
    memory = Memory(CPU)
    full = memory.transient(4096, torch.float32, "full")
    with full.while_filled():
        weight = full.view(0, (64, 64)).fill_(2)
        main = memory.persistent(4096, torch.float32, "main").view(64, 64)
        model = blocks(lambda x: x * weight, lambda x: x * main[:, :], lambda x: x)
        mask = torch.ones(64, 64)
        model[2].register_buffer("mask", mask)
        model[2].function = lambda x: x * mask.t()
        found = offload(model, memory=memory)
        x = torch.randn(64, 64, requires_grad=True)
        loss = model(x).sum()
        # Each block saves the product that is multiplied by the scale.
        assert 3 * x.nbytes <= found.pool.bytes_in_use <= 3 * x.nbytes + 3 * 64
        loss.backward()
    assert not memory.owns(x)
    memory.unregister(main, "main")
    assert not memory.owns(main)


def changing(rows: slice | None) -> Function:
    def change(x: Tensor) -> Tensor:
        y = x * 1
        z = y * y
        (y if rows is None else y[rows]).add_(1)
        return z

    return change


CHANGING = {"within": changing(None), "of a part": changing(slice(1)), "after it": cube}


@pytest.mark.parametrize("min_bytes", [0, 2**20])
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("when", CHANGING)
def test_a_saved_tensor_that_is_changed_in_place_raises_as_in_torch(
    when: str, is_offloaded: bool, min_bytes: int
) -> None:
    model = blocks(CHANGING[when], cube, cube)
    if is_offloaded:
        offload(model, fe.OffloadActivations(min_bytes=min_bytes))
    x = torch.randn(16, requires_grad=True) * 1
    y = model(x)
    if when == "after it":
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("in_flight", [0, None, 10**9])
def test_a_saved_output_that_the_next_block_changes_raises(in_flight: int | None) -> None:
    class Bare(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.function(x * self.scale)

    model = nn.Sequential(Bare(torch.exp), Bare(torch.exp), Bare(torch.exp))
    offload(model, fe.OffloadActivations(in_flight, min_bytes=0))
    y = model[0](torch.randn(16, requires_grad=True))
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(16,\) .* at version 0; found it at version 1"):
        model[2](model[1](y)).sum().backward()


def test_a_change_before_a_tensor_is_saved_again_is_seen() -> None:
    model = blocks(lambda x: x.detach() * x, lambda x: x)
    shared = torch.ones(16)
    Keeps.seen.clear()
    model[0].function = model[1].function = lambda x: Keeps.apply(x, lambda x: [shared])
    offload(model)
    y = model[0](torch.ones(16, requires_grad=True))
    shared.mul_(3)
    model[1](y.detach().requires_grad_()).sum().backward()
    assert torch.equal(Keeps.seen[0][0], torch.full((16,), 3.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def gradients(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Tensor]:
    model.zero_grad()
    run(model)
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def plainly(model: Any) -> None:
    model(*token_batch(2, 0)).backward()


def keeping_the_graph(model: Any) -> None:
    loss = model(*token_batch(2, 0))
    loss.backward(retain_graph=True)
    loss.backward()


def of_three_forwards(model: Any, in_order: Callable[[list[Tensor]], Any]) -> None:
    for loss in in_order([model(*token_batch(2, seed)) for seed in range(3)]):
        loss.backward()


def after_other_forwards(model: Any) -> None:
    model(*token_batch(2, 1))  # its backward is never called
    loss = model(*token_batch(2, 0))
    with torch.no_grad():
        model(*token_batch(2, 1))
    loss.backward()


def of_some_gradients(model: Any) -> None:
    loss = model(*token_batch(2, 0))
    torch.autograd.grad(loss, list(model.blocks[2].parameters()), retain_graph=True)
    loss.backward()


def of_gradients(model: Any) -> None:
    # From torch 2.14 on, attention over three dims takes a fused kernel on a CPU, too, which has no
    # second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(*token_batch(2, 0))
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.stack([each.square().sum() for each in first]).sum().backward()


def with_frozen(model: Any, *modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)
    plainly(model)


def under_autocast(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*token_batch(2, 0))
    loss.backward()


def checkpointed_around(model: Any, use_reentrant: bool) -> None:
    tokens, targets = token_batch(2, 0)
    x = model.embedding(tokens)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    nn.functional.cross_entropy(model.head(x).flatten(0, 1), targets.flatten()).backward()


def checkpointed_within(model: Any, use_reentrant: bool) -> None:
    for block in model.blocks:
        up = type(block.up).forward.__get__(block.up)
        block.up.forward = lambda x, up=up: checkpoint(up, x, use_reentrant=use_reentrant)
    plainly(model)


RUNS: dict[str, Callable[[Any], None]] = {
    "plainly": plainly,
    "keeping the graph": keeping_the_graph,
    "in order": lambda model: of_three_forwards(model, list),
    "in reverse": lambda model: of_three_forwards(model, lambda losses: losses[::-1]),
    "together": lambda model: of_three_forwards(model, lambda losses: [torch.stack(losses).sum()]),
    "after other forwards": after_other_forwards,
    "of some gradients": of_some_gradients,
    "of gradients": of_gradients,
    "a frozen block": lambda model: with_frozen(model, model.blocks[1]),
    "frozen below": lambda model: with_frozen(model, model.embedding, model.blocks[:2]),
    "under autocast": under_autocast,
    **{
        f"{run.__name__}, reentrant {reentrant}": functools.partial(run, use_reentrant=reentrant)
        for run in (checkpointed_around, checkpointed_within)
        for reentrant in (False, True)
    },
}


@pytest.mark.parametrize("in_flight", [0, None, 10**9])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_the_same_to_the_last_bit(name: str, in_flight: int | None) -> None:
    found = []
    for is_offloaded in (False, True):
        torch.manual_seed(1)
        model = Transformer(3)
        if is_offloaded:
            moves = offload(model, fe.OffloadActivations(in_flight, min_bytes=0))
        found.append([gradients(model, RUNS[name]) for _ in range(2)])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)
    loss = model(*token_batch(2, 0))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert not moves._arrived
    # Until drain(), forwards that still hold device memory also use host memory.
    moves.drain()
    gc.collect()
    assert not moves.pool.bytes_in_use
    assert not moves._by_storage


def test_graphs_and_originals_are_freed_without_the_collector() -> None:
    model = blocks(torch.tanh, torch.exp, cube, cube)
    moves = offload(model, fe.OffloadActivations(0, min_bytes=0))
    references = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        references.append(StorageWeakRef(output.untyped_storage()))

    for block in model[:3]:
        block.register_forward_hook(note)
    gc.disable()
    try:
        loss = model(torch.randn(64, requires_grad=True)).sum()
        assert all(each.expired() for each in references)
        assert moves.pool.bytes_in_use
        del loss
        assert not moves.pool.bytes_in_use
    finally:
        gc.enable()


def test_host_memory_is_reused_and_bounded() -> None:
    model = Transformer(3)
    moves = offload(model)
    plainly(model)
    held = moves.pool.idle_bytes
    model(*token_batch(2, 0)).backward()
    assert moves.pool.idle_bytes == held
    rows = [5, 1, 4, 2, 3, 5]
    for num in rows:
        model(*token_batch(num, 0)).backward()
    most = moves.pool._most_in_use
    assert moves.pool.idle_bytes <= most < 4 * held


@on_ranks(1)
def test_on_a_cpu_nothing_changes() -> None:
    model = Transformer(2)
    engine = fe.shard(model, checkpointing="offload")
    assert not engine.parts
    assert "forward" not in vars(model.blocks[0])


@on_ranks(2)
def test_bad_arguments_raise_on_all_ranks() -> None:
    given = "host" if torch.distributed.get_rank() else False
    with pytest.raises((ValueError, RuntimeError), match="checkpointing: expected True, False"):
        fe.shard(Transformer(2), checkpointing=given)
    for wrong in ({"in_flight": "1GiB"}, {"in_flight": True}, {"min_bytes": None}):
        ((name, value),) = wrong.items()
        with pytest.raises(TypeError, match=f"{name}: expected .*; found {value!r}"):
            fe.OffloadActivations(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_flight: expected 0 or more; found -1"):
        fe.OffloadActivations(in_flight=-1)
    with pytest.raises(TypeError, match=r"min_bytes: expected an integer of 0 or more; found 0\.5"):
        fe.OffloadActivations(min_bytes=0.5)  # type: ignore[arg-type]
