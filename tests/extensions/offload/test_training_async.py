"""Results of training with offloaded state, compared with the CPU and with the device without an
offload. They are wrong without some waits and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import fsdp_engine as fe
from fsdp_engine.extensions.offload.disk_staging import Staging
from fsdp_engine.extensions.offload.home import HostHome, StagedHome
from fsdp_engine.extensions.offload.offloaded_step import _Chunk
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.extensions.offload.step_beside_forward import StepBesideForward
from fsdp_engine.extensions.offload.thread_lane import ThreadLane
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import differences, on_cpu, random_delays, train
from tests.async_device.waits import memory_is_overwritten
from tests.extensions.offload.device_jobs import (
    REST_ON_DISK,
    REST_ON_HOST,
    STATE,
    job,
    slow_disk,
    small_pieces,
)
from tests.extensions.offload.offloaded import BF16, FULL, LEVELS
from tests.matrices import thorough_but
from tests.optim.optimizers import MAKERS, counting_chunks
from tests.pairs import PAIRS
from tests.pool import on_ranks

ranks = device.ranks

OFFLOADS = [*STATE, *REST_ON_HOST, *REST_ON_DISK]
# Pairs with sharded gradients. Main weights can be offloaded unless they are slices of the compute
# weights. At FP32_PAIRS they are separate tensors even if both are fp32.
SHARDED_PAIRS = [pair for pair in PAIRS if pair[0].startswith("optim_grads")]
FP32_PAIRS = [FULL, ("optim_grads_params", "optim_grads_params")]


def policies_of(place: str, pair: tuple[str, str]) -> tuple[fe.MixedPrecisionPolicy | None, ...]:
    """Policies to try at a place. If it offloads main weights, they must not be slices of the
    compute weights."""
    if place in STATE:
        return (None, BF16)
    return (None,) if pair in FP32_PAIRS else (BF16,)


THOROUGH = pytest.mark.thorough


# Places that offload less or more than the other ones.
VARIANTS = ("rest on the host", "rest on a disk", "gradients on the host")
ORDINARY = [place for place in OFFLOADS if place not in VARIANTS]


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=THOROUGH)])
@pytest.mark.parametrize("place", thorough_but(ORDINARY, OFFLOADS))
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(place: str, every_pair: bool) -> None:
    pairs = PAIRS if place in STATE else SHARDED_PAIRS
    few = [FULL, pairs[2 * OFFLOADS.index(place) % len(pairs)]]
    for seed, pair in enumerate(pairs if every_pair else few):
        for policy in policies_of(place, pair):
            given = job(place, pair, policy, sizes=(1, 2))
            there = place if place in REST_ON_DISK else None  # on disks, norms sum in another order
            expected = on_cpu(job(there, pair, policy, sizes=(1, 2)))
            with counting_chunks() as counts, small_pieces(), random_delays(seed):
                found = train(given, on.NAME)
            assert not differences(found, expected), (pair, policy)
            assert max(counts) == (0 if place == "stepped on the host" else 2)


@pytest.mark.parametrize(
    ("places", "clips"),
    [
        (["beside forward", "all on the host"], True),
        (["rest on a disk, state on the host"], False),
        pytest.param([*STATE, *REST_ON_HOST], True, marks=THOROUGH),
        pytest.param([*REST_ON_DISK], False, marks=THOROUGH),
    ],
)
@on_ranks(2)
def test_microbatches_train_as_without_an_offload(places: list[str], clips: bool) -> None:
    """Compared with the device, since the CPU adds in another order."""
    options: Any = {"sizes": (2,), "num_micro": 3, "clips": clips}
    expected = train(job(None, **options), on.NAME)
    for place in places:
        with random_delays(1), small_pieces():
            assert not differences(train(job(place, **options), on.NAME), expected), place


FEW = ("SGD", "Rprop", "AdamW-fused", "Lion")  # each at another level


@pytest.mark.parametrize("name", thorough_but(FEW, MAKERS))
@on_ranks(1)
def test_every_optimizer_steps_as_with_state_on_the_device(name: str) -> None:
    """At one level. On the CPU each steps at every level in ``test_training_on_disk.py``."""

    def make_optimizer(params: Any) -> Any:
        return fe.shard_optimizer(MAKERS[name](params), elementwise=name == "Lion")

    number = list(MAKERS).index(name)
    level = LEVELS[number % 4]
    policy = BF16 if level == "optim_grads" else None
    options: Any = {"make_optimizer": make_optimizer, "pair": (level, "no_shard"), "policy": policy}
    expected = train(job(None, **options), on.NAME)
    for place in [*STATE, "all on a disk"] if number % 4 > 1 else STATE:
        delays = on.delays(copy=2e-3 * (place == "beside forward"))
        with counting_chunks() as counts, delays, memory_is_overwritten():
            assert not differences(train(job(place, **options), on.NAME), expected)
        assert max(counts) <= 2


@on_ranks(1)
def test_a_slow_disk_and_a_slow_device_change_nothing() -> None:
    expected = on_cpu(job(None, clips=False))
    for disk, delays in ((2e-3, {}), (2e-3, {"copy": 5e-3, "compute": 1e-3})):
        with slow_disk(disk), on.delays(**delays):
            assert not differences(train(job("all on a disk", clips=False), on.NAME), expected)


# Controls: training is wrong without one of these.


def nothing(*args: Any) -> None:
    """Neither waits nor marks."""


def no_steps(*args: Any) -> Iterator[Any]:
    """A copy of nothing."""
    return iter(())


def free_at_once(beside: Any, label: str, storage: Any) -> None:
    storage.free()


LEFT_OUT: dict[tuple[str, str], tuple[type, str, Callable[..., Any]]] = {
    ("state on the host", "wait"): (_Chunk, "wait_for_copies", nothing),
    ("state on the host", "store"): (HostHome, "store", no_steps),
    ("stepped on the host", "wait"): (Offloading, "wait", nothing),
    ("beside forward", "memory of gradients"): (StepBesideForward, "free", free_at_once),
    # A piece is read, or written again, before the device has copied it.
    ("all on a disk", "mark of a piece"): (Staging, "copied", nothing),
    ("all on a disk", "wait for compute"): (ThreadLane, "wait", nothing),
    ("all on a disk", "load"): (StagedHome, "load", no_steps),
}
# The ordinary tests run one control of each place, ``make test-all`` all of them.
FEW_LEFT_OUT = [
    ("state on the host", "store"),
    ("stepped on the host", "wait"),
    ("beside forward", "memory of gradients"),
    ("all on a disk", "load"),
]


@pytest.mark.parametrize("key", thorough_but(FEW_LEFT_OUT, LEFT_OUT), ids=", ".join)
@on_ranks(1)
def test_without_a_wait_or_a_copy_training_is_wrong(key: tuple[str, str]) -> None:
    """A control for the other tests."""
    place, left_out = key
    pair = ("optim", "no_shard") if place == "state on the host" else FULL
    compute = 2e-3 if place == "beside forward" else 0.0
    copy = 5e-2 if left_out == "wait" else 2e-2
    overwritten = memory_is_overwritten if place == "beside forward" else nullcontext
    with (
        pytest.MonkeyPatch.context() as patch,
        on.delays(copy=copy, compute=compute),
        slow_disk(2e-3),
        overwritten(),
    ):
        patch.setattr(*LEFT_OUT[key])
        found = train(job(place, pair, clips=False), on.NAME)
    assert differences(found, on_cpu(job(None, pair, clips=False)))
