"""Offloaded state and activations in simulations: seconds, bytes and memory, by hand."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from fsdp_engine.extensions.offload import disk_memory, disk_staging
from fsdp_engine.extensions.offload.places import ROLES
from fsdp_engine.planner.simulation.machine import Machine, Processor, TwoWayLink
from fsdp_engine.strategies import LEVELS
from tests.planner.simulation.copying import (
    ALONE,
    BLOCKS,
    BOTH,
    CHUNK,
    F32,
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
from tests.pool import Ranks

STATE_LANES = names_of_copies("state")
HOST = fe.Offload(optimizer_state="host")
DISK = fe.Offload(optimizer_state="disk", folder="/no/such/folder")


def simulated(
    where: Machine, offload: fe.Offload | None = None, *, num: int = BLOCKS, **options: Any
) -> fe.Simulation:
    given = {"batch": torch.zeros(2, WIDTH), "min_unit_size": 0, **options}
    world_size = given.pop("world_size", RANKS)
    return fe.simulate(lambda: Blocks(num), world_size, machine=where, offload=offload, **given)


def test_a_step_takes_its_copies_of_which_two_overlap() -> None:
    found = simulated(machine(), HOST)
    # Alone on the link are the copy in of the first chunk and the copy out of the last one.
    # Otherwise the copy out of a chunk overlaps with the copy in of a later one.
    shared = CHUNK / (BOTH / 2)
    expected = 2 * CHUNK / ALONE + (BLOCKS - 1) * shared
    assert found.seconds == pytest.approx(expected)
    assert found.copied_bytes == dict.fromkeys(STATE_LANES, BLOCKS * CHUNK)
    assert found.elsewhere == {"host": BLOCKS * CHUNK}
    assert found.exposed_seconds == pytest.approx(expected)
    assert set(found.exposed_by_lane) == set(STATE_LANES)
    assert {each.phase for each in found.exposed} == {"step"}
    busy = found.message_seconds
    assert busy["state in"] == pytest.approx(CHUNK / ALONE + (BLOCKS - 1) * shared)
    assert busy["state out"] == pytest.approx(CHUNK / ALONE + (BLOCKS - 1) * shared)
    bound = found.machine.link_to_state("host", RANKS).least_seconds(*found.copied_bytes.values())
    assert bound == pytest.approx(BLOCKS * shared)
    names = {event["name"] for event in found.trace()["traceEvents"]}
    assert names >= {"bring 0", "return 3", "state in of 0", "state out of 3"}
    assert "host        " in str(found)
    assert "state out" in str(found)


def test_without_offload_nothing_is_copied() -> None:
    """On a machine whose host computes, activations are not copied either."""
    offloaded = simulated(machine(), HOST).memory
    assert offloaded["optimizer"] <= 2 * CHUNK + 64 * BLOCKS  # two chunks at most
    without = machine(host_link=None, disk=None)
    for offload in (None, fe.Offload()):
        found = simulated(without, offload)
        assert found.seconds == 0
        assert (found.copied_bytes, found.elsewhere) == ({}, {})
        assert found.memory["optimizer"] >= BLOCKS * CHUNK
        assert found.memory["weights"] == offloaded["weights"]
    found = stepped(dataclasses.replace(without, host_runs_ahead=False))
    assert (found.copied_bytes, found.elsewhere) == ({}, {})


def test_the_step_of_a_chunk_takes_28_bytes_of_each_element_beside_a_copy() -> None:
    stepping = 0.3 * CHUNK / ALONE
    elements = CHUNK / 8
    processor = Processor({F32: math.inf}, 28 * elements / stepping, 1e12)
    there = simulated(machine(processor=processor), HOST)
    here = simulated(machine(processor=processor), None)
    spans = [each for each in here.spans if each.label == "_fused_adamw_"]
    steps = sum(each.end - each.start for each in spans)
    assert steps == pytest.approx(BLOCKS * stepping, rel=1e-4)
    # While a chunk is stepped, only the copy in of the next one runs; then it overlaps with the
    # copy out of the stepped chunk; then the rest of this copy out runs alone, as long as the step
    # took.
    shared = (CHUNK - stepping * ALONE) / (BOTH / 2)
    chunk = stepping + shared + stepping
    expected = CHUNK / ALONE + (BLOCKS - 1) * chunk + stepping + CHUNK / ALONE
    assert there.seconds == pytest.approx(here.seconds - steps + expected, rel=1e-4)


@pytest.mark.parametrize("slowness", [0.5, 3.0])
def test_a_step_beside_forward_is_hidden_as_far_as_forward_is_longer(slowness: float) -> None:
    shared = CHUNK / (BOTH / 2)
    forward = slowness * shared  # forward of a block
    operations = 2 * 2 * WIDTH * WIDTH
    where = machine(processor=Processor({F32: operations / forward}, math.inf, 1e12))
    here = simulated(where, None)
    after = simulated(where, HOST)
    beside = simulated(where, dataclasses.replace(HOST, overlap_forward=True))
    copies = CHUNK / ALONE + (BLOCKS - 1) * shared
    assert after.seconds == pytest.approx(here.seconds + copies + CHUNK / ALONE, rel=1e-3)
    # The first block waits for its copy. Each later block waits if its copy takes longer than the
    # forward of the previous block. The copy out of the last chunk overlaps with backward.
    expected = CHUNK / ALONE + (BLOCKS - 1) * max(shared - forward, 0.0)
    assert beside.seconds == pytest.approx(here.seconds + expected, rel=1e-3)
    assert beside.exposed_seconds == pytest.approx(expected, rel=1e-3)
    assert beside.copied_bytes == after.copied_bytes
    assert beside.elsewhere == after.elsewhere
    assert beside.peak_bytes <= after.peak_bytes + 2 * CHUNK


def test_ranks_of_a_node_share_its_memory() -> None:
    shared = machine(host_memory_bandwidth=RANKS * ALONE / 2)
    link = shared.link_to_state("host", RANKS)
    assert link == TwoWayLink(ALONE / 2, ALONE / 2, ALONE / 2)
    assert shared.link_to_state("host", 1) == shared.host_link
    found = simulated(shared, HOST)
    assert found.seconds == pytest.approx(2 * BLOCKS * CHUNK / (ALONE / 2))
    # A device copies to its disk through host memory, whose rate and link are limits, too.
    assert shared.link_to_state("disk", RANKS).both == ALONE / 2
    slow = TwoWayLink(ALONE / 4, ALONE / 4, ALONE / 4)
    assert machine(host_link=slow).link_to_state("disk", 1) == slow
    on_cpu = machine(host_link=slow, host_runs_ahead=False)
    assert on_cpu.link_to_state("disk", 1) == on_cpu.disk


# Bytes of a rank's shard of a block's fp32 weights, or of its gradients.
SHARD = CHUNK // 2
# Time of a copy beside one in the other direction, relative to a copy alone. The figures below are
# in this unit.
BESIDE = 2 * ALONE / BOTH
FORWARD = BLOCKS  # copies of weights for gathers, one after the other
# The last block is still gathered: all other blocks' gathers overlap with copies of gradients; the
# last gradients follow.
BACKWARD = (BLOCKS - 1) * BESIDE + 1
# For each block, state (2), weights and gradients are copied in; state and weights are copied out,
# beside the copies in of the next block.
STEP = 4 + (BLOCKS - 1) * (3 * BESIDE + 1) + 3


def test_weights_come_for_gathers_and_gradients_return_beside_them() -> None:
    found = simulated(with_host_rate(1e12), all_on_host())
    alone = SHARD / ALONE
    assert found.seconds == pytest.approx((FORWARD + BACKWARD + STEP) * alone)
    gathers = 2 * BLOCKS - 1
    assert found.copied_bytes == {
        "copy in": gathers * SHARD,
        "state in": 4 * BLOCKS * SHARD,
        "state out": BLOCKS * SHARD + 3 * BLOCKS * SHARD,
    }
    assert found.elsewhere == {"host": 4 * BLOCKS * SHARD}
    assert found.exposed_seconds == pytest.approx(found.seconds)
    assert set(found.exposed_by_lane) == {"copy in", *STATE_LANES}
    busy = found.message_seconds["copy in"]
    assert busy == pytest.approx((BLOCKS + (BLOCKS - 1) * BESIDE) * alone)

    # The second microbatch adds to earlier gradients. From the second last block on, copies in of
    # these gradients and of weights take turns. Each copy out overlaps with the next gather.
    found = simulated(with_host_rate(1e12), all_on_host(), microbatches=2)
    again = (BLOCKS - 1) * BESIDE + 2 + (BLOCKS - 2) + 1
    assert found.seconds == pytest.approx((2 * FORWARD + BACKWARD + again + STEP) * alone)
    assert found.copied_bytes["state in"] == (4 + 1) * BLOCKS * SHARD
    assert found.copied_bytes["state out"] == (3 + 2) * BLOCKS * SHARD


def test_a_step_on_the_host_takes_28_bytes_of_each_element_while_the_device_waits() -> None:
    rate = 2 * ALONE
    found = simulated(with_host_rate(rate), all_on_host("host"))
    counters = 4 * BLOCKS  # how often each parameter was stepped
    stepping = (28 * BLOCKS * SHARD / 4 + counters) / rate
    assert found.seconds == pytest.approx((FORWARD + BACKWARD) * SHARD / ALONE + stepping)
    assert found.message_seconds["host work"] == pytest.approx(stepping)
    assert found.exposed_seconds == pytest.approx(found.seconds - stepping)
    assert found.copied_bytes["state out"] == BLOCKS * SHARD
    assert "state in" not in found.copied_bytes
    # Weights, gradients and two states, which torch makes where weights are.
    assert found.elsewhere == {"host": 4 * BLOCKS * SHARD}
    assert found.memory["optimizer"] <= counters
    assert found.memory["weights"] == 0


@pytest.mark.parametrize("step_on", ["device", "host"])
def test_the_host_casts_weights_for_gathers_once_a_step(step_on: str) -> None:
    rate = ALONE
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = simulated(with_host_rate(rate), all_on_host(step_on), mp_policy=policy, microbatches=2)
    casts = [each for each in found.spans if (each.lane, each.label) == ("host work", "copy_")]
    seconds = (4 + 2) * SHARD / 4 / rate
    copy = SHARD / 2 / ALONE
    # The host casts one block after the other. Each cast shares the host's memory with the copy of
    # the previous block; the copy of the last block follows.
    expected = [seconds, *(BLOCKS - 1) * [seconds + copy]]
    assert [each.end - each.start for each in casts] == pytest.approx(expected)
    first = [each for each in found.spans if (each.lane, each.phase) == ("copy in", "forward")]
    assert first[BLOCKS - 1].end == pytest.approx(sum(expected) + copy)
    sent = SHARD // 2
    assert found.elsewhere == {"host": BLOCKS * (4 * SHARD + sent)}


def test_a_disk_is_read_and_written_beside_a_host_that_computes() -> None:
    found = simulated(machine(host_runs_ahead=False), DISK)
    shared = BOTH / (3 * ALONE)
    both_in, both_out = 2 * ALONE * shared, ALONE * shared
    first = CHUNK / (2 * ALONE)
    # While a chunk is written, the next one is read, which takes less time; then the write
    # continues alone.
    overlap = CHUNK / both_in
    rest = (CHUNK - overlap * both_out) / ALONE
    expected = first + (BLOCKS - 1) * (overlap + rest) + CHUNK / ALONE
    assert found.seconds == pytest.approx(expected)
    assert found.elsewhere == {"disk": BLOCKS * CHUNK}
    assert set(found.exposed_by_lane) == set(STATE_LANES)


def on_disk(roles: Sequence[str], folder: str = "/no/such/folder") -> fe.Offload:
    return fe.Offload(**dict.fromkeys(roles, "disk"), folder=folder)


def peak_of_a_real_run(level: str, roles: Sequence[str]) -> tuple[int, int]:
    """Peak bytes of chunks, and bytes on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        model = Blocks()
        options = fe.Options(min_unit_size=0)
        engine = fe.shard(
            model, strategy=level, options=options, extensions=[on_disk(roles, folder)]
        )
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(2):
            engine.peak_memory_bytes(reset=True)
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        chunks = engine.peak_memory_bytes()["optimizer"]
        return chunks, sum(engine.memory_bytes("disk").values())


@pytest.mark.parametrize(
    ("level", "size", "roles"), [("no_shard", 2, ROLES[:1]), ("optim_grads_params", 1, ROLES)]
)
def test_simulated_memory_of_chunks_is_the_ledger_of_a_real_run(
    ranks: Ranks, level: str, size: int, roles: Sequence[str]
) -> None:
    # The peak of chunks is in the optimizer step.
    (real, *_) = ranks.run(peak_of_a_real_run, level, roles, world_size=size)
    options = {"batch": torch.ones(1, WIDTH), "strategy": level, "world_size": size}
    found = simulated(machine(host_runs_ahead=False), on_disk(roles), **options)
    counters = 4 * BLOCKS  # how often each parameter was stepped
    assert (found.memory["optimizer"] - counters, found.elsewhere["disk"]) == real


def test_a_device_reaches_a_disk_through_pieces_of_host_memory() -> None:
    """Only the last piece of the first chunk, and the first piece of the last chunk, use the host's
    link while the disk is idle."""
    piece = CHUNK / 4
    fast = TwoWayLink(4 * ALONE, 4 * ALONE, 8 * ALONE, latency=1e-3)
    with patch.object(disk_memory, "PIECE", piece):
        found = simulated(machine(host_link=fast), DISK)
    alone = 1e-3 + piece / (4 * ALONE)
    assert found.elsewhere == {"disk": BLOCKS * CHUNK, "host": disk_staging.NUM_BYTES}
    assert found.copied_bytes == dict.fromkeys(STATE_LANES, BLOCKS * CHUNK)
    disk = simulated(machine(host_runs_ahead=False, host_seconds=0.0), DISK)
    assert found.seconds == pytest.approx(disk.seconds + 2 * alone)


@pytest.mark.parametrize(
    ("place", "fields", "missing"),
    [
        (HOST, {"host_link": None}, "host_link.*calibrate"),
        (DISK, {"disk": None, "host_runs_ahead": False}, "disk.*calibrate"),
        (DISK, {"disk": None}, "disk.*calibrate"),
        (DISK, {"host_link": None}, "host_link.*calibrate"),
        (all_on_host(), {}, "host_memory_bandwidth"),
        (all_on_host("host"), {}, "host_memory_bandwidth"),
    ],
)
def test_a_machine_without_figures_of_a_link_or_of_memory_is_an_error(
    place: fe.Offload, fields: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ValueError, match=rf"machine: expected {missing}"):
        simulated(machine(**fields), place)
    with pytest.raises(ValueError, match=r"expected host_link, since state or activations.*None"):
        stepped(machine(host_link=None))


BYTES_OF_STATE = {"Adam": 8, "SGD": 4, "Adagrad": 4, "RMSprop": 4}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "num_bytes"), BYTES_OF_STATE.items())
def test_state_of_elementwise_optimizers_is_copied_at_every_level(
    level: str, name: str, num_bytes: int
) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(params, lr=0.1, **options)

    levels = {"strategy": level, "mesh": (2, 2), "outer_strategy": "no_shard"}
    found = simulated(machine(), HOST, optimizer=make, **levels)
    share = 1 if level == "no_shard" else 2
    assert found.elsewhere == {"host": num_bytes * BLOCKS * WIDTH * WIDTH // share}
    assert found.copied_bytes["state in"] == found.elsewhere["host"]


def test_an_optimizer_that_reads_values_is_an_error_that_says_so() -> None:
    with pytest.raises(fe.SimulationError, match=r"the optimizer's step failed.*reads a value"):
        simulated(machine(), HOST, optimizer=torch.optim.ASGD)


ACTIVATION_LANES = names_of_copies("activations")
INTO, OUT = ACTIVATION_LANES


def stepped(where: fe.Machine, in_flight: int | None = None, **options: Any) -> fe.Simulation:
    given = {"checkpointing": fe.OffloadActivations(in_flight), "batch": torch.zeros(ROWS, WIDTH)}
    return simulated(where, **given | options)


def test_a_step_takes_its_copies_of_activations_if_nothing_hides_them() -> None:
    """The link has no limit on both directions together."""
    found = stepped(machine(host_link=TwoWayLink(ALONE, ALONE, 2 * ALONE)))
    # The last block's activations are not copied back, and compute does not wait for their copy
    # out.
    copied = {OUT: BLOCKS * SAVED, INTO: (BLOCKS - 1) * SAVED}
    assert found.copied_bytes == copied
    assert found.seconds == pytest.approx(2 * (BLOCKS - 1) * SAVED / ALONE)
    assert found.exposed_seconds == pytest.approx(found.seconds)
    assert found.message_seconds == pytest.approx({name: n / ALONE for name, n in copied.items()})
    assert set(found.exposed_by_lane) == set(ACTIVATION_LANES)
    names = {event["name"] for event in found.trace()["traceEvents"]}
    assert names >= {"take 0", "bring 2", f"{OUT} of 0", f"{INTO} of 1"}
    # Blocks of host memory are rounded up, but not to powers of two.
    assert found.elsewhere == {"host": BLOCKS * SAVED}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 1.01, 2.0])
def test_a_step_takes_the_longer_of_copies_and_compute(share: float) -> None:
    """Copies that are shorter than a forward are hidden."""
    copy = SAVED / ALONE
    forward = share * copy
    # Copies to the host begin at the end of the first forward, and compute waits for all but the
    # last. Each copy back overlaps with the backward of the following block; the first block's
    # input needs no gradient.
    expected = forward + (BLOCKS - 1) * (max(copy, forward) + max(copy, 2 * forward)) + forward
    found = stepped(computing(share))
    assert found.seconds == pytest.approx(expected)
    link = found.machine.link_to_state("host", RANKS)
    assert found.seconds >= link.least_seconds(*(found.copied_bytes[name] for name in (INTO, OUT)))


@pytest.mark.parametrize("in_flight", [None, 0])
def test_the_device_holds_few_blocks_whatever_their_number(in_flight: int | None) -> None:
    def held(num: int, **options: Any) -> int:
        return stepped(machine(), in_flight, num=num, **options).memory["activations"]

    kept = 2 if in_flight is None else 1
    # Also held: the batch, two successive outputs or gradients, and the gradient of a weight.
    assert held(6) == held(12) <= (kept + 3) * SAVED + 4 * WIDTH * WIDTH + 8
    assert held(12, checkpointing=False) >= 12 * SAVED


def test_copies_of_activations_share_the_link_with_those_of_state() -> None:
    shared = with_host_rate(ALONE)
    alone = [stepped(shared), stepped(shared, checkpointing=False, offload=all_on_host())]
    found = stepped(shared, offload=all_on_host())
    assert found.copied_bytes == alone[0].copied_bytes | alone[1].copied_bytes
    assert found.elsewhere["host"] == sum(each.elsewhere["host"] for each in alone)
    # The ranks of a node share its memory, so both directions together have the rate of one copy.
    assert found.seconds >= sum(found.copied_bytes.values()) / ALONE
    assert found.seconds <= sum(each.seconds for each in alone) * (1 + 1e-9)
    assert {*ACTIVATION_LANES, *STATE_LANES, "copy in"} <= set(found.message_seconds)
