"""Offloaded state of optimizers that step whole tensors, with an asynchronous device."""

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
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import differences, train
from tests.extensions.whole_tensor_optimizers.owned import LEVELS, job, make_optimizer
from tests.matrices import thorough_but
from tests.pool import on_ranks

ranks = device.ranks


def make_reset_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimizer whose state is reset after its first step."""
    optimizer = make_optimizer(params)
    resets = [optimizer.state.clear]
    optimizer.register_step_post_hook(lambda *args: resets.pop()() if resets else None)
    return optimizer


def late(call: Callable[..., Steps], seconds: float) -> Callable[..., Steps]:
    """``call``, an operation of a lane, with copies that begin after ``seconds``. The host does not
    wait for them."""

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
        for name, seconds in (("load", 2e-2), ("store", 4e-2)):
            patch.setattr(HostHome, name, late(getattr(HostHome, name), seconds))
        found = train(given, on.NAME)
    return differences(found, expected)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("level", thorough_but(["optim", "optim_grads_params"], LEVELS))
@on_ranks(2)
def test_state_that_lies_elsewhere_may_be_reset(level: str, place: str) -> None:
    assert not differences_after_a_reset((level, "no_shard"), place)


@pytest.mark.thorough
@on_ranks(2)
def test_new_state_is_wrong_where_old_bytes_are_not_awaited() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateHome, "wait_for_copies", lambda self: None)
        pair = "optim_grads_params", "no_shard"
        assert differences_after_a_reset(pair, "host")
