"""Owners on an asynchronous device: bits of the CPU, and wrong ones where compute does not wait."""

from __future__ import annotations

import pytest

from fsdp_engine.extensions.whole_tensor_optimizers.owned_params import Chunk
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import compare, differences, random_delays, train
from tests.extensions.whole_tensor_optimizers.device_steps import job
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks

ranks = device.ranks


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fsdp_engine.extensions.whole_tensor_optimizers.owned_step._CHUNK_ELEMENTS", 1
        )
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
        patch.setattr(
            "fsdp_engine.extensions.whole_tensor_optimizers.owned_step._CHUNK_ELEMENTS", 1
        )
        patch.setattr(Chunk, "await_weights", no_wait)
        given = job(("optim_grads_params", "no_shard"))
        found = [compare(given, seed=seed, delay=2e-3) for seed in (0, 1)]
        assert any(found)
