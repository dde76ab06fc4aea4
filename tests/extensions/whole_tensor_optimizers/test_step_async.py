"""Owners on an asynchronous device: results equal the CPU's, and are wrong without waits."""

from __future__ import annotations

import pytest

from fsdp_engine.extensions.whole_tensor_optimizers.owned_params import Chunk
from tests.async_device import ranks as device
from tests.async_device.scene import compare
from tests.extensions.whole_tensor_optimizers.owned import job, small_chunks
from tests.matrices import thorough_but
from tests.pairs import PAIRS
from tests.pool import on_ranks

ranks = device.ranks


ORDINARY = [("optim_grads_params", "optim_grads")]


@pytest.mark.parametrize("levels", thorough_but(ORDINARY, PAIRS), ids="-".join)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(levels: tuple[str, str]) -> None:
    with small_chunks():
        assert not compare(job(levels, sizes=(1, 2)), seed=1)


@pytest.mark.thorough
@on_ranks(2)
def test_weights_are_wrong_where_compute_does_not_wait_for_them() -> None:
    def no_wait(chunk: Chunk) -> None:
        chunk._returned = None
        chunk.drop_messages()

    with small_chunks() as patch:
        patch.setattr(Chunk, "await_weights", no_wait)
        given = job(("optim_grads_params", "no_shard"))
        assert any(compare(given, seed=seed, delay=2e-3) for seed in (0, 1))
