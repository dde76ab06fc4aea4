"""Owners on an asynchronous device: bits of the CPU, and wrong ones where compute does not wait."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.offload.home import HostHome, Steps
from fsdp_engine.extensions.offload.owned_homes import StateHome
from fsdp_engine.optim.owned_params import Chunk
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import Job, compare, differences, random_delays, train
from tests.extensions.whole_tensor_optimizers.owned import Whitening
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks

ranks = device.ranks


class DeviceWhitening(Whitening):
    """State on the parameter's device, and no value that the host reads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.view(p.shape[0], -1)
                if not state:
                    state["grams"] = [rows.new_zeros(n, n) for n in rows.shape]
                left, right = state["grams"]
                left.add_(rows @ rows.T)
                right.add_(rows.T @ rows)
                update = rows / (left.norm().sqrt() + right.norm().sqrt() + 1e-6)
                p.sub_(update.view_as(p), alpha=group["lr"])


def make_reset_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Its state is reset after its first step."""
    optimizer = make_optimizer(params)
    resets = [optimizer.state.clear]
    optimizer.register_step_post_hook(lambda *args: resets.pop()() if resets else None)
    return optimizer


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(DeviceWhitening(params))


def job(pair: tuple[str, str], **options: Any) -> Job:
    return Job(pair=pair, **{"make_optimizer": make_optimizer, "num_micro": 1, **options})


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_engine.optim.owned_step._CHUNK_ELEMENTS", 1)
        given = job((inner, outer), sizes=(1, 2))
        expected = train(given, "cpu")
        for seed in range(2):
            with random_delays(seed):
                assert not differences(train(given, on.NAME), expected)


@pytest.mark.thorough
@on_ranks(2)
def test_weights_are_wrong_where_compute_does_not_wait_for_them() -> None:
    def no_wait(chunk: Chunk) -> None:
        chunk._returned = None
        chunk.drop_messages()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_engine.optim.owned_step._CHUNK_ELEMENTS", 1)
        patch.setattr(Chunk, "await_weights", no_wait)
        given = job(("optim_grads_params", "no_shard"))
        found = [compare(given, seed=seed, delay=2e-3) for seed in (0, 1)]
        assert any(found)


def late(call: Callable[..., Steps], seconds: float) -> Callable[..., Steps]:
    """The same operation of a lane, whose copies begin after ``seconds``. The host does not wait
    for them."""

    def steps(*args: Any) -> Steps:
        on._ext().set_delays(0.0, seconds, 0.0, 0.0, {}, False, 0)
        try:
            yield from call(*args)
        finally:
            on._ext().set_delays(0.0, 0.0, 0.0, 0.0, {}, False, 0)

    return steps


def differences_after_a_reset(pair: tuple[str, str], place: str) -> list[str]:
    offload = fe.Offload(place, folder=tempfile.gettempdir())
    options = (("offload", offload),)
    given = job(pair, sizes=(2,), make_optimizer=make_reset_optimizer, options=options)
    expected = train(given, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (("bring", 2e-2), ("take", 4e-2)):
            patch.setattr(HostHome, name, late(getattr(HostHome, name), seconds))
        found = train(given, on.NAME)
    return differences(found, expected)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_state_that_lies_elsewhere_may_be_reset(level: str, place: str) -> None:
    assert not differences_after_a_reset((level, "no_shard"), place)


@pytest.mark.thorough
@on_ranks(2)
def test_new_state_is_wrong_where_old_bytes_are_not_awaited() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateHome, "await_brought", lambda self: None)
        pair = "optim_grads_params", "no_shard"
        assert differences_after_a_reset(pair, "host")
