"""Offloaded activations in simulations: seconds, bytes and memory against formulas by hand.

Memory is compared with that of a device in ``tests/extensions/activations/test_offload_async.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from fsdp_engine.planner.simulation.machine import TwoWayLink
from tests.planner.simulation.copying import (
    ALONE,
    BLOCKS,
    RANKS,
    ROWS,
    SAVED,
    WIDTH,
    Blocks,
    all_on_host,
    computing,
    machine,
    with_host_rate,
)

ACTIVATION_LANES = names_of_copies("activations")
STATE_LANES = names_of_copies("state")
INTO, OUT = ACTIVATION_LANES


def simulated(
    where: fe.Machine, in_flight: int | None = None, *, num: int = BLOCKS, **options: Any
) -> fe.Simulation:
    given = {
        "checkpointing": fe.OffloadActivations(in_flight),
        "batch": torch.zeros(ROWS, WIDTH),
        "min_unit_size": 0,
        **options,
    }
    return fe.simulate(lambda: Blocks(num), RANKS, machine=where, **given)


def test_a_step_takes_its_copies_if_nothing_hides_them() -> None:
    """The link has no limit of both directions together."""
    found = simulated(machine(host_link=TwoWayLink(ALONE, ALONE, 2 * ALONE)))
    # Of the last block nothing comes back, and compute waits for no copy of it.
    copied = {OUT: BLOCKS * SAVED, INTO: (BLOCKS - 1) * SAVED}
    assert found.copied_bytes == copied
    assert found.seconds == pytest.approx(2 * (BLOCKS - 1) * SAVED / ALONE)
    assert found.exposed_seconds == pytest.approx(found.seconds)
    assert found.message_seconds == pytest.approx({name: n / ALONE for name, n in copied.items()})
    assert set(found.exposed_by_lane) == set(ACTIVATION_LANES)
    names = {event["name"] for event in found.trace()["traceEvents"]}
    assert names >= {"take 0", "bring 2", f"{OUT} of 0", f"{INTO} of 1"}
    # Sizes of blocks of host memory are rounded up, but not powers of two.
    assert found.elsewhere == {"host": BLOCKS * SAVED}


@pytest.mark.parametrize("share", [1.01, 2.0])
def test_copies_that_are_shorter_than_a_forward_are_hidden(share: float) -> None:
    where = computing(share)
    assert simulated(where).seconds == simulated(where, checkpointing=False).seconds


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_a_step_takes_the_longer_of_copies_and_compute(share: float) -> None:
    copy = SAVED / ALONE
    forward = share * copy
    # Copies to the host begin with the end of the first forward, and compute waits for all but the
    # last. Those back run beside the backward of the block behind; the first block's input needs
    # no gradient.
    expected = forward + (BLOCKS - 1) * (copy + max(copy, 2 * forward)) + forward
    found = simulated(computing(share))
    assert found.seconds == pytest.approx(expected)
    link = found.machine.link_to_state("host", RANKS)
    assert found.seconds >= link.least_seconds(*(found.copied_bytes[name] for name in (INTO, OUT)))


@pytest.mark.parametrize("in_flight", [None, 0])
def test_the_device_holds_few_blocks_whatever_their_number(in_flight: int | None) -> None:
    def held(num: int, **options: Any) -> int:
        return simulated(machine(), in_flight, num=num, **options).memory["activations"]

    kept = 2 if in_flight is None else 1
    # Beside them the batch, an output or gradient, the next one, and the gradient of a weight.
    assert held(6) == held(12) <= (kept + 3) * SAVED + 4 * WIDTH * WIDTH + 8
    assert held(12, checkpointing=False) >= 12 * SAVED


def test_copies_of_activations_share_the_link_with_those_of_state() -> None:
    shared = with_host_rate(ALONE)
    alone = [simulated(shared), simulated(shared, checkpointing=False, offload=all_on_host())]
    found = simulated(shared, offload=all_on_host())
    assert found.copied_bytes == alone[0].copied_bytes | alone[1].copied_bytes
    assert found.elsewhere["host"] == sum(each.elsewhere["host"] for each in alone)
    # A rank of a node that shares its memory copies one byte at a time, in either direction.
    assert found.seconds >= sum(found.copied_bytes.values()) / ALONE
    assert found.seconds <= sum(each.seconds for each in alone) * (1 + 1e-9)
    assert {*ACTIVATION_LANES, *STATE_LANES, "copy in"} <= set(found.message_seconds)


def test_nothing_is_copied_where_the_host_computes() -> None:
    found = simulated(machine(host_runs_ahead=False, host_link=None))
    assert (found.copied_bytes, found.elsewhere) == ({}, {})


def test_a_machine_without_figures_of_the_link_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected host_link, since state or activations.*None"):
        simulated(machine(host_link=None))
    with pytest.raises(ValueError, match="checkpointing: expected True, False"):
        simulated(machine(), checkpointing="host")
