"""Activations in host memory between forward and backward: numbers, order, memory, waits of the
host. Which tensors move is tested in ``tests/extensions/activations/test_offload.py``."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.extensions.activations.offloaded_activations import ActivationOffload
from fsdp_engine.planner.simulation import operations
from fsdp_engine.terminal import format_bytes
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import Job, differences, on_device, random_delays, step_by_step, train
from tests.models import Transformer, token_batch
from tests.pairs import EVERY_PAIR
from tests.pool import Ranks, on_ranks

ranks = device.ranks


def options(in_flight: int | None = None) -> tuple[tuple[str, Any], ...]:
    return (("checkpointing", fe.OffloadActivations(in_flight, min_bytes=0)),)


def transformer() -> nn.Module:
    return Transformer(3)


def job(pair: tuple[str, str], in_flight: int | None = None, **fields: Any) -> Job:
    return Job(transformer, pair=pair, options=options(in_flight), **{"num_micro": 1, **fields})


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    expected = train(job((inner, outer), sizes=(1, 2)), "cpu")  # where nothing is offloaded
    for seed, in_flight in enumerate((None, 0)):
        with random_delays(seed):
            found = train(job((inner, outer), in_flight, sizes=(1, 2)), on.NAME)
        assert not differences(found, expected), in_flight


@on_ranks(1)
def test_forwards_on_other_streams_than_the_caller_s_are_the_same() -> None:
    """The device has few streams, so the streams used here include those of the lanes."""
    given = job(("optim_grads_params", "no_shard"), sizes=(1,), num_micro=2)
    expected = train(given, "cpu")
    streams: list[torch.Stream] = []
    model_call = Transformer.forward

    def on_another_stream(model: Any, *args: Any) -> Tensor:
        if not streams:
            moves = model.blocks[0].forward._offload
            streams.extend([moves._into._stream, torch.deferred.Stream(), moves._out._stream])
        streams.append(streams.pop(0))
        before = torch.deferred.current_stream()
        streams[0].wait_stream(before)
        with torch.deferred.stream(streams[0]):
            loss = model_call(model, *args)
        before.wait_stream(streams[0])
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "forward", on_another_stream)
        with random_delays(1, 1e-3):
            assert not differences(train(given, on.NAME), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(1)
def test_a_checkpoint_of_more_than_a_block_recomputes(use_reentrant: bool) -> None:
    given = job(("optim_grads_params", "no_shard"), sizes=(1,))
    expected = train(given, "cpu")

    def logits(model: Any, tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        x = checkpoint(nn.Sequential(*model.blocks[:2]), x, use_reentrant=use_reentrant)

        def end(x: Tensor) -> Tensor:
            found: Tensor = model.head(model.norm(model.blocks[2](x)))
            return found

        found: Tensor = checkpoint(end, x, use_reentrant=use_reentrant)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "logits", logits)
        with random_delays(1, 1e-3):
            assert not differences(train(given, on.NAME), expected)


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(1)
def test_activations_are_pinned_on_the_host_which_does_not_wait_for_them(level: str) -> None:
    model = transformer()
    engine = fe.shard(model.to(on.NAME), strategy=level, min_unit_size=0, **dict(options()))
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    step = step_by_step(engine, optimizer)
    for number in range(2):
        step(number)
    [moves] = engine.parts
    idle = moves.pool.idle_bytes
    assert idle > 0
    with on.delays(copy=5e-3), on.count_host_syncs() as syncs:
        step(2)
        step(3)
    assert not syncs
    assert moves.pool.idle_bytes == idle
    assert all(each.bytes.is_pinned() for idle in moves.pool._idle.values() for each, _ in idle)


@on_ranks(1)
def test_the_last_block_is_used_as_it_is_and_the_others_are_copied_once() -> None:
    model, _, x = waves(4)
    lanes = (moves_of(model)._into, moves_of(model)._out)
    before = [on.num_jobs(lane._target()) for lane in lanes]
    model(x).sum().backward()
    found = [on.num_jobs(lane._target()) for lane in lanes]
    copies = [b - a for a, b in zip(before, found, strict=True)]
    assert copies == [3 * SAVED, 4 * SAVED]


@on_ranks(1)
def test_copies_run_beside_compute() -> None:
    """The host submits a block before the copies of the previous block have begun."""
    model, _, x = waves(2)
    model(x).sum().backward()
    moves = moves_of(model)
    torch.accelerator.synchronize()
    with on.held(moves._out._target()):
        y = model[0](x)
        z = model[1].forward.original(y)
        compute = torch.deferred.current_stream()
        while not compute.query():  # it ends, since it waits for no copy
            pass
    assert z.isfinite().all()


WAVES = 2**16
SAVED = 3
BLOCK = SAVED * 4 * WAVES


class Waves(nn.Module):
    """A block that saves ``SAVED`` tensors of ``WAVES`` elements: the outputs of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(SAVED):
            x = torch.tanh(x)
        return x * self.scale


def waves(
    num_blocks: int, in_flight: int | None = None, *, is_offloaded: bool = True
) -> tuple[nn.Sequential, fe.Engine, Tensor]:
    """A model of blocks, its engine, and an input."""
    model = nn.Sequential(*(Waves() for _ in range(num_blocks))).to(on.NAME)
    given = dict(options(in_flight)) if is_offloaded else {}
    engine = fe.shard(model, strategy="no_shard", min_unit_size=0, **given)
    return model, engine, torch.ones(WAVES, device=on.NAME, requires_grad=True)


def moves_of(model: Any) -> ActivationOffload:
    found: ActivationOffload = model[0].forward._offload
    return found


def peak(num_blocks: int, in_flight: int | None, *, is_offloaded: bool = True) -> int:
    """Most bytes on the device in the second step, above those between steps."""
    model, _, x = waves(num_blocks, in_flight, is_offloaded=is_offloaded)
    model(x).sum().backward()
    gc.collect()  # objects of earlier tests would be freed while memory is measured
    torch.deferred.reset_peak_memory_stats()
    before = torch.deferred.memory_allocated()
    model(x).sum().backward()
    return int(torch.deferred.max_memory_allocated() - before)


@on_ranks(1)
def test_the_device_holds_one_block_and_those_in_flight() -> None:
    tensor = 4 * WAVES
    plain = peak(12, None, is_offloaded=False)
    assert plain >= 12 * BLOCK
    for num_blocks in (6, 12):
        for in_flight in (0, BLOCK, 3 * BLOCK):
            found = peak(num_blocks, in_flight)
            # The device also holds an input and an output, or else three gradients.
            assert found <= BLOCK + in_flight + 3 * tensor + 2**12, (num_blocks, in_flight, found)
        assert abs(peak(num_blocks, None) - peak(num_blocks, BLOCK)) <= 2**12


@on_ranks(1)
def test_nothing_stays_on_the_device_after_errors_and_graphs_that_are_dropped() -> None:
    model, engine, x = waves(6)

    def fail(*_: Any) -> None:
        raise ValueError("as planned")

    def measured() -> int:
        engine.reset()
        assert not moves_of(model).pool.bytes_in_use
        x.grad = None
        return int(torch.deferred.memory_allocated())

    model(x).sum().backward()
    expected = x.grad
    before = measured()
    with on.delays(copy=1e-2):
        model(x)
        assert measured() == before
        handle = model[3].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="as planned"):
            model(x)
        assert measured() == before
        handle.remove()
        y = model[:3](x)
        y.register_hook(fail)
        with pytest.raises(ValueError, match="as planned"):
            model[3:](y).sum().backward()
        del y
        assert measured() == before
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)
    assert measured() == before


@sdpa_kernel(SDPBackend.MATH)
def held_by_a_real_run(level: str, in_flight: int | None) -> tuple[int, dict[str, int], str]:
    model = simulated_gpt().to(on.NAME)
    engine = fe.shard(model, strategy=level, min_unit_size=0, **dict(options(in_flight)))
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    batch = on_device(token_batch(64, 0), engine.mesh.device)
    for _ in range(2):
        torch.deferred.reset_peak_memory_stats()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = int(torch.deferred.max_memory_allocated())
    return peak, engine.memory_bytes("host"), str(engine.describe())


def simulated_gpt() -> nn.Module:
    return Transformer(6, dim=64)


@pytest.mark.parametrize("level", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize("in_flight", [0, None])
def test_simulated_memory_is_that_of_the_device(
    ranks: Ranks, level: str, in_flight: int | None
) -> None:
    ((peak, host, described), _) = ranks.run(held_by_a_real_run, level, in_flight, world_size=2)
    # Kernels of this device are the CPU's, whose sums over rows need no memory.
    without_sums = patch.object(operations, "_WITH_SCRATCH", set())
    with sdpa_kernel(SDPBackend.MATH), without_sums:
        found = fe.simulate(
            simulated_gpt,
            2,
            batch=token_batch(64, 0),
            optimizer=torch.optim.AdamW,
            strategy=level,
            min_unit_size=0,
            **dict(options(in_flight)),
        )
    assert found.elsewhere == {"host": host["activations"]}
    assert f"On the host: activations {format_bytes(host['activations'])}" in described
    # The device rounds each tensor up to 512 bytes.
    assert found.peak_bytes <= peak <= 1.01 * found.peak_bytes


@on_ranks(1)
def test_waits_for_copies_are_measured_by_block() -> None:
    model, engine, x = waves(4, 0)
    delay = 1e-2
    with on.delays(copy=delay), engine.measure() as measured:
        model(x).sum().backward()
    waits = {(each.lane, each.unit): each.seconds for each in measured.waited}
    assert waits[("activations out", "3")] >= delay
    assert waits[("activations in", "0")] >= delay
    assert "copies of activations" in str(measured)
    assert "activations in" in str(measured)


@pytest.mark.parametrize("restored", [False, True])
@on_ranks(1)
def test_without_waits_for_copies_training_is_wrong(restored: bool) -> None:
    """A control for the other tests: memory is freed before it is copied, or read before it is
    copied back."""
    given = job(("no_shard", "no_shard"), sizes=(1,))
    expected = train(given, "cpu")
    waits = ActivationOffload._wait

    def some_waits(offload: Any, moved: Any) -> None:
        waits(offload, [each for each in moved if each.is_restored != restored])

    with on.delays(copy=1e-2):
        assert not differences(train(given, on.NAME), expected)
    with on.delays(copy=1e-2), patch.object(ActivationOffload, "_wait", some_waits):
        assert differences(train(given, on.NAME), expected)
