"""Measurements of ``calibrate``, and times of a machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.extensions.offload import disk_memory
from fsdp_engine.planner.simulation import calibrate as calibrate_module
from fsdp_engine.planner.simulation import kernels as kernels_module
from fsdp_engine.planner.simulation import state_links
from fsdp_engine.planner.simulation.copies import CopyQueues, Direction
from fsdp_engine.planner.simulation.kernels import Kernels
from fsdp_engine.planner.simulation.machine import Attention, Machine, Processor, TwoWayLink
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_ranks


class TimedBy(Kernels):
    """Kernels in which attention takes the time that ``processor`` computes."""

    def __init__(self, processor: Processor) -> None:
        super().__init__(torch.device("cpu"), 1.0, 0.02, same)
        self._processor, self._shape, self._elements = processor, Attention(0, 0), 512

    def _time(self, action: Any, timed: Any = None) -> float:
        is_backward = action.func is not F.scaled_dot_product_attention
        if not is_backward:
            length, is_causal = action.args[0].shape[2], action.keywords["is_causal"]
            self._shape = Attention(length, length, is_causal)
        shape = dataclasses.replace(self._shape, is_backward=is_backward)
        tokens, heads, size, _ = self._attention
        product = 2 * tokens * heads * shape.num_keys * size
        return self._processor.seconds((5 if is_backward else 2) * product, 0, F32, attention=shape)


class FusedBy(TimedBy):
    """Fused kernels take the time that ``processor`` computes, and are not compiled."""

    def _time(self, action: Any, timed: Any = None) -> float:
        compiled, sets = action.args
        tensors = next(sets)
        name = compiled._torchdynamo_orig_callable.__name__
        num_functions = self._elements if "gelu" in name or "softmax" in name else 0
        num_bytes = sum(each.nbytes for each in tensors)
        return self._processor.fused_seconds(num_bytes, num_functions)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )


ROOT = Path(__file__).parents[3]
F32 = torch.float32
HOST = Processor({F32: 1e9}, 1e8, 1e9, overlap=0.0)


def heads_of(size: int | None) -> dict[str, Any]:
    return {"attention": Attention(64, 64, head_size=size)}


def test_operations_take_the_time_of_the_figures() -> None:
    head: dict[str, Any] = {"attention_head": 64.0}
    elements = 10**9
    for figures, flops, num_bytes, work, seconds in (
        # ``overlap``: the part of the shorter of compute and memory access that runs beside the
        # other.
        ({"overlap": 1.0}, 3e9, 2e8, {}, 3),
        ({"overlap": 0.5}, 3e9, 2e8, {}, 4),
        ({"overlap": 0.5}, 2e9, 3e8, {}, 4),
        ({"overlap": 0.0}, 2e9, 3e8, {}, 5),
        ({"call_seconds": 0.5}, 1, 1, {}, 0.5),
        ({"achievable_flops": 0.5}, 1e9, 0, {}, 2),
        ({"attention_share": 0.5}, 1e9, 0, {}, 1),
        ({"attention_share": 0.5}, 1e9, 0, heads_of(None), 2),
        ({"function_seconds": 1e-9}, 0, 1e8, {"function_elements": elements}, 2),
        ({"irregular_seconds": 1e-9}, 0, 1e8, {"irregular_elements": elements}, 2),
        # n / (n + 64): 2/3 with heads of 128, 1/2 with those of 64.
        (head, 1e9, 0, heads_of(None), 1),
        (head, 1e9, 0, heads_of(128), 1),
        (head, 1e9, 0, heads_of(64), 4 / 3),
        # Attention and copies are not products.
        ({"product_seconds": 1.0}, 1e9, 0, {"product_elements": 500}, 2),
        ({"product_seconds": 1.0}, 1e9, 0, heads_of(None), 1),
        ({"product_seconds": 1.0}, 0, 1e8, {}, 1),
    ):
        processor = dataclasses.replace(HOST, **figures)
        assert processor.seconds(flops, num_bytes, F32, **work) == pytest.approx(seconds)


def test_fused_kernels_have_a_rate_and_functions_of_their_own() -> None:
    processor = dataclasses.replace(HOST, fused_share=0.5, function_seconds=1e-9)
    assert processor.fused_seconds(1e8, 10**9) == pytest.approx(2 + 1)
    processor = dataclasses.replace(processor, fused_function_seconds=3e-9)
    assert processor.fused_seconds(1e8, 10**9) == pytest.approx(2 + 3)


def same(value: Any) -> Any:
    return value


def test_calibration_finds_the_figures_of_attention() -> None:
    figures = {
        "attention_share": 0.75,
        "attention_backward_share": 0.5,
        "attention_length": 96.0,
        "causal_block": 512.0,
    }
    processor = dataclasses.replace(HOST, **figures)
    assert TimedBy(processor).attention(1e9, F32) == pytest.approx(figures)


def measured_on_two_nodes() -> Machine:
    with (
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        # With little memory and few repetitions.
        patch.object(kernels_module, "_CACHES", 2**22),
        patch.object(calibrate_module, "_CACHES", 2**22),
        patch.object(calibrate_module, "_PRODUCTS", 1),
        patch.object(calibrate_module, "_IN_A_ROW", 1),
        patch.object(calibrate_module, "_LEAST", 3),
        patch.object(kernels_module, "_LEAST", 2),
        patch.object(state_links, "_LARGE_ON_DISK", 2**20),
        tempfile.TemporaryDirectory() as folder,
    ):
        machine = fe.planner.simulation.calibrate.calibrate(seconds=0.02, folder=folder)
    assert machine.name == "2 x 2 gloo ranks of 1 thread(s)"
    assert machine.ranks_per_node == 2
    assert not machine.host_runs_ahead
    assert machine.host_link is None  # measured only on a device
    processor, disk = machine.processor, machine.disk
    assert set(processor.matrix_flops) == {torch.float32, torch.bfloat16}
    assert 0 <= processor.overlap <= 1
    assert 0 <= processor.attention_length <= 2048
    assert 0 <= processor.function_seconds < 1e-6
    assert machine.within_node != machine.between_nodes
    for least, found, most in (
        (1e8, processor.memory_bandwidth, 1e12),
        (1e8, processor.matrix_flops[F32], 1e13),
        (0, processor.attention_backward_share, 1),
        (0, processor.attention_share, 1),
        (15, processor.causal_block, 2048),
        (1e-7, machine.host_seconds, 1e-3),
        *((1e5, rate, 1e12) for rate in (disk.into, disk.out, disk.both)),
        (0, disk.latency, 1),
    ):
        assert least < found <= most
    for link in (machine.within_node, machine.between_nodes):
        assert 1e6 < link.bandwidth < 1e12
        assert 0 <= link.latency < 1
        assert 0 < link.processor_share <= 1
    return machine


def test_ranks_measure_together_and_nodes_apart(ranks: Ranks) -> None:
    machine, *others = ranks.run(measured_on_two_nodes, world_size=4)
    assert others == [machine] * 3
    found = fe.simulate(lambda: Transformer(2), 4, batch=token_batch(4, 0), machine=machine)
    assert found.seconds > 0


@on_ranks(4)
def test_nodes_of_different_numbers_of_ranks_are_refused() -> None:
    with (
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "3"}),
        pytest.raises(ValueError, match="same number of ranks on each node; found 4 ranks, 3"),
    ):
        fe.planner.simulation.calibrate.calibrate(seconds=0.02)


def test_ranks_that_share_cores_are_no_other_programs() -> None:
    """Two threads of a core get half of its time each. A thread that gets only a quarter shares the
    core with another program, too."""
    now = time.perf_counter
    for turns, part, expected in ((1.0, 1.0, 0.0), (2.0, 0.5, 0.0), (2.0, 0.25, 0.5)):
        kernels = Kernels(torch.device("cpu"), turns, 0.02, same)
        with patch.object(kernels_module.time, "thread_time", lambda: part * now()):  # noqa: B023
            assert kernels.crowd() == pytest.approx(expected, abs=0.1)


def test_both_directions_are_measured_as_they_are_simulated() -> None:
    # The link computed from simulated copies, alone and in both directions together, equals the
    # simulated link.
    for link in (
        TwoWayLink(10.0, 10.0, 12.0, 0.5),
        TwoWayLink(10.0, 4.0, 14.0, 0.5),
        TwoWayLink(6.0, 9.0, 6.0, 0.5),
    ):
        alone = [
            CopyQueues(link).add(way, 0.0, 90.0).end - link.latency
            for way in (Direction.INTO, Direction.OUT)
        ]
        queues = CopyQueues(link)
        ends = [queues.add(way, 0.0, 90.0) for way in (Direction.INTO, Direction.OUT)]
        both = max(each.end for each in ends) - link.latency
        found = state_links.link_of(90, alone[0], alone[1], both, link.latency)
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(link))


def test_the_memory_of_a_host_is_measured_by_all_ranks_with_their_cores() -> None:
    threads, seconds = set(), iter((9.0, 9.0, 4.0, 1.0, 2.0))

    def timed(action: Any) -> float:
        action()
        threads.add(torch.get_num_threads())
        return next(seconds, 2.0)

    with (
        patch.object(state_links, "_LARGE_ON_HOST", 4096),
        patch.multiple(state_links, _wall_seconds=timed),
    ):
        found = state_links.measure_host_memory(4, 12, 1.0, lambda value: 2 * value)
    # Four ranks read and write 4096 bytes in twice the median of 4, 1, 2, 2, 2 seconds.
    assert found == 4 * 2 * 4096 / 4.0
    assert threads == {3}


SCRIPT = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from fsdp_engine.planner.simulation.calibrate import calibrate

calibrate(seconds=0.01)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
ones = torch.ones(1)
dist.all_reduce(ones)
os.write(1, f"sum {int(ones)} ".encode())  # in one piece, since the other rank writes, too
"""


@pytest.mark.thorough
def test_a_job_makes_its_process_group_after_torchrun_has_measured(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    for _ in range(3):  # if both groups had the same keys, about one of four runs would fail
        assert torchrun(str(tmp_path / "job.py")).stdout.split() == ["sum", "2", "sum", "2"]


def test_calibration_finds_the_figures_of_fused_kernels() -> None:
    figures = {"fused_share": 0.75, "fused_function_seconds": 2e-9}
    processor = dataclasses.replace(HOST, **figures)
    with patch.object(kernels_module, "_CACHES", 2**22):
        found = FusedBy(processor).fused(HOST.memory_bandwidth)
    assert found == pytest.approx(figures)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_fused_kernels_of_this_machine_are_measured() -> None:
    kernels = Kernels(torch.device("cpu"), 1.0, 0.05, same)
    found = kernels.fused(kernels.memory_bandwidth())
    assert 0.1 < found["fused_share"] < 10
    assert 0 <= found["fused_function_seconds"] < 1e-6


def test_a_slow_disk_is_measured_as_slow(tmp_path: Path) -> None:
    rates = {"read": 8e6, "write": 4e6}

    def slow(name: str) -> Any:
        call = getattr(disk_memory.DiskBlock, name)

        def late(self: Any, tensor: torch.Tensor) -> None:
            call(self, tensor)
            time.sleep(tensor.nbytes / rates[name])

        return patch.object(disk_memory.DiskBlock, name, late)

    with slow("read"), slow("write"), patch.object(state_links, "_LARGE_ON_DISK", 2**18):
        found = state_links.measure_disk(tmp_path, 0.02, same)
    # At most half of a copy's time counts as latency, so the rate is at most twice the real one.
    assert 0 < found.into <= 2 * rates["read"]
    assert 0 < found.out <= 2 * rates["write"]
    assert 0 < found.both <= found.into + found.out


@pytest.mark.thorough
def test_torchrun_measures_its_ranks_and_the_first_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = torchrun("-m", "fsdp_engine", "calibrate", str(path), "--seconds", "0.01")
    machine = Machine.load(path)
    assert machine.name == "this machine, 2 gloo ranks of 1 thread(s)"
    assert done.stdout == path.read_text()
    assert done.stderr.count("GB/s") == 1  # one rank prints progress
    assert "link within a node" in done.stderr
