"""Measures this machine on the ranks of torchrun, on GPUs or CPU cores. Without torchrun, measures
two gloo ranks.

All ranks measure at the same time, since all compute at the same time in training; each figure is
that of the slowest rank. All measurements take about half a minute. ``kernels.py`` times the
operations of one rank. Links are timed with the engine's own collectives. If other programs use the
processor, they delay collectives. The processor time of collectives is then used instead of the
elapsed time.

[Note: Compute time of communication]
If one processor computes and communicates, the calling thread's part of a collective (issuing,
copies, sums) always delays compute. The time of the backend's threads delays compute only if these
threads have no cores of their own: all of it for 2 ranks on 2 cores, none of it on 4 cores. Both
are processor times, on which other programs have little influence. They are measured twice: without
other work, and concurrently with matrix products, where threads are preempted and data arrives in
smaller pieces. The longer time is used.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from fsdp_engine.kernel_interface import Axis, Hardware, allocator
from fsdp_engine.planner.simulation.kernels import Kernels
from fsdp_engine.planner.simulation.machine import Link, Machine, TwoWayLink
from fsdp_engine.planner.simulation.state_links import (
    measure_disk,
    measure_host_link,
    measure_host_memory,
)

_Gather = Callable[[Tensor], Iterator[Sequence[Any]]]

RANKS = 2
_LARGE = {"cpu": 2**22, "cuda": 2**27}  # bytes, about the size of a unit
_SMALL = 2**12
_CACHES = 2**27
_LEAST, _MOST = 8, 100  # numbers of repetitions
_PRODUCTS, _IN_A_ROW = 4, 4
_SECONDS_BESIDE = 0.1
_CROWDED = 0.1  # fraction of processor time that other programs use
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}
_WITH_FP8 = (8, 9)  # the lowest compute capability with fp8


def calibrate(
    threads: int = 1,
    *,
    seconds: float = 1.0,
    verbose: bool = False,
    folder: str | Path | None = None,
    compile: bool = False,
) -> Machine:
    """Measure this machine.

    Under torchrun all ranks must call this function. All return the same machine, with the link
    within a node, and the link between nodes if there are several nodes. Ranks with GPUs measure
    the GPUs and NCCL. Without torchrun, two gloo ranks are started on this machine's CPU.

    Args:
        threads: Number of threads of each rank on a CPU.
        seconds: Measurement time of each figure.
        verbose: Whether the first rank prints progress to stderr.
        folder: A folder of a local disk to measure. None: the disk remains unknown.
        compile: Whether to measure kernels of ``torch.compile``. False: plans use the rates of
            other operations for them.

    Raises:
        RuntimeError: With ``compile``, there is no C++ compiler, or compilation failed.
        ValueError: The nodes have different numbers of ranks.
        OSError: The folder cannot be written, or has too little space.
    """
    if dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return _measure(threads, seconds, verbose, folder, compile)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "machine.json"
        arguments = (port, threads, seconds, verbose, folder, compile, str(path))
        mp.spawn(_measure_spawned, arguments, RANKS)
        return Machine.load(path)


def _measure_spawned(
    rank: int,
    port: int,
    threads: int,
    seconds: float,
    verbose: bool,
    folder: str | Path | None,
    compiled: bool,
    path: str,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",  # measure the CPU
    )
    machine = _measure(threads, seconds, verbose, folder, compiled)
    if rank == 0:
        machine.save(Path(path))


def _measure(
    threads: int, seconds: float, verbose: bool, folder: str | Path | None, compiled: bool
) -> Machine:
    is_guest = dist.is_initialized()
    num_ranks = dist.get_world_size() if is_guest else int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_ranks % per_node:
        raise ValueError(
            f"calibrate: expected the same number of ranks on each node; found {num_ranks} ranks, "
            f"{per_node} of them on this node"
        )
    hardware = Hardware.of_all_ranks(num_ranks // per_node, "calibrate")
    if hardware.is_host:
        torch.set_num_threads(threads)
    machine = _Meter(hardware, threads, seconds, verbose, folder, compiled).measure()
    hardware.agree(0.0)  # a barrier
    if not is_guest:
        dist.destroy_process_group()
    return machine


class _Meter:
    """Measures one rank's share of this machine, concurrently with the other ranks.

    Args:
        hardware: The hardware of all ranks.
        threads: Number of threads of each rank on a CPU.
        seconds: Measurement time of each figure.
        verbose: Whether to print progress.
        folder: A folder of a disk to measure, or None.
        compiled: Whether to measure kernels of ``torch.compile``.
    """

    def __init__(
        self,
        hardware: Hardware,
        threads: int,
        seconds: float,
        verbose: bool,
        folder: str | Path | None = None,
        compiled: bool = False,
    ) -> None:
        self._folder = folder
        self._compiled = compiled
        self._hardware = hardware
        self._agree = hardware.agree
        self._device = hardware.device
        self._threads = threads
        self._seconds = seconds
        self._prints = verbose and hardware.rank == 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._cores = cores or 1
        self._is_crowded = False

    def measure(self) -> Machine:
        """Measure all figures, and return the machine."""
        nodes, ranks = self._hardware.num_nodes, self._hardware.ranks_per_node
        on_host = self._hardware.is_host
        kind = f"gloo ranks of {self._threads} thread(s)"
        if not on_host:
            kind = torch.get_device_module(self._device).get_device_name(self._device)
        self._say(f"{nodes} x {ranks} {kind}: products, memory, attention, functions, calls")
        turns = max(ranks * self._threads / self._cores, 1.0) if on_host else 1.0
        kernels = Kernels(self._device, turns, self._seconds, self._agree)
        if turns > 1:
            self._say(f"  ranks share cores: {ranks * self._threads} threads, {self._cores} cores")
        processor = kernels.processor(
            _dtypes_of(self._device), self._memory_bytes(ranks), self._compiled
        )
        for dtype, flops in processor.matrix_flops.items():
            self._say(
                f"  products, {str(dtype).removeprefix('torch.')}: {flops / 1e9:,.1f} GFLOP/s"
            )
        self._say(f"  memory: {processor.memory_bandwidth / 1e9:,.1f} GB/s")
        self._say(f"  overlap of memory access and compute: {processor.overlap:.0%}")
        self._say(
            f"  attention: {processor.attention_share:.0%} of the rate of products, in backward "
            f"{processor.attention_backward_share:.0%}; half of that rate is reached with "
            f"{processor.attention_length:.0f} keys; half of the rate of very large heads is "
            f"reached with heads of {processor.attention_head:.0f} elements; causal attention "
            f"skips keys in blocks of {processor.causal_block:.0f} queries"
        )
        self._say(
            f"  functions: {processor.function_seconds * 1e9:.2f} ns per element; irregular "
            f"access: {processor.irregular_seconds * 1e12:.2f} ps"
        )
        if self._compiled:
            functions = processor.fused_function_seconds
            if functions is None:
                functions = processor.function_seconds
            self._say(
                f"  fused kernels: {processor.fused_share:.0%} of the rate of others, functions "
                f"{functions * 1e9:.2f} ns per element"
            )
        host = kernels.host_seconds()
        self._say(f"  host time per call: {host * 1e6:.1f} us")
        self._is_crowded = (crowd := kernels.crowd()) > _CROWDED
        if self._is_crowded:
            self._say(
                f"  other programs use {crowd:.0%} of the processor; communication is therefore "
                "measured by processor time only. Measure without other programs if possible"
            )
        alone = Link(processor.memory_bandwidth / 2, 0.0)  # for a single rank
        within = self._link("within a node", Axis.INNER, ranks) or alone
        between = self._link("between nodes", Axis.OUTER, nodes) or within
        host_link = disk = host_memory = None
        if not on_host:
            self._say("link to the host's memory, and that memory")
            host_link = measure_host_link(self._device, self._seconds, self._agree)
            self._say_link(host_link)
            host_memory = measure_host_memory(ranks, self._cores, self._seconds, self._agree)
            self._say(f"  {host_memory / 1e9:,.1f} GB/s of a node")
        if self._folder is not None:
            self._say(f"disk of {self._folder}")
            disk = measure_disk(Path(self._folder), self._seconds, self._agree)
            self._say_link(disk)
        return Machine(
            f"this machine, {nodes * ranks} {kind}" if nodes == 1 else f"{nodes} x {ranks} {kind}",
            processor,
            within if ranks > 1 else between,
            between,
            ranks_per_node=ranks,
            host_seconds=host,
            host_runs_ahead=not on_host,
            host_link=host_link,
            disk=disk,
            host_memory_bandwidth=host_memory,
        )

    def _memory_bytes(self, ranks: int) -> float:
        if not self._hardware.is_host:
            return float(torch.accelerator.get_memory_info(self._device)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks

    def _link(self, what: str, axis: Axis, size: int) -> Link | None:
        """Returns the link between the ``size`` ranks of one axis, measured on all rows or columns
        of the mesh at once. None for one rank."""
        gather = self._hardware.gather(axis)
        if gather is None:
            return None
        self._say(f"link {what}: gathers of {size} ranks")
        large_bytes = _LARGE.get(self._device.type, _LARGE["cuda"])
        small, _ = self._message(gather, _SMALL)
        large, busy = self._message(gather, large_bytes)
        if self._hardware.is_host:
            busy = max(busy, self._beside_compute(gather, large_bytes))
            large = max(large, busy)
        # In an all-gather of N bytes over n ranks each sends (n - 1) / n of N, in n - 1 hops. The
        # time of small messages, which may have been delayed, is at most half that of large ones.
        small = min(small, large / 2)
        hops = size - 1
        sent = [num_bytes * hops / size for num_bytes in (large_bytes, _SMALL)]
        bandwidth = (sent[0] - sent[1]) / (large - small)
        latency = max(small - sent[1] / bandwidth, 0.0) / hops
        share = min(busy / large, 1.0)
        self._say(f"  {bandwidth / 1e6:,.0f} MB/s, {latency * 1e6:,.0f} us per hop")
        if self._hardware.is_host:
            self._say(f"  {share:.0%} of communication time delays compute")
        return Link(bandwidth, latency, processor_share=share)

    def _message(self, gather: _Gather, num_bytes: int) -> tuple[float, float]:
        """Returns the seconds of an all-gather, in place as in the engine, and the seconds by which
        it delays compute. (Sums of reductions are separate operations.) As after the computation
        of a model, the data is not in caches."""
        send = partial(_send, gather, self._messages(num_bytes))
        others = [allocator.zeros(_LARGE["cpu"], torch.float32, self._device) for _ in range(2)]
        for _ in range(3):
            send()
        once = self._agree(self._hardware.seconds(send))
        found = []
        for _ in range(min(max(round(self._seconds / once), _LEAST), _MOST)):
            others[0].copy_(others[1])
            self._agree(0.0)  # a barrier
            thread, process = time.thread_time(), time.process_time()
            elapsed = self._hardware.seconds(send)
            own = time.thread_time() - thread
            found.append((elapsed, own + self._stolen(time.process_time() - process - own)))
        # If a rank is late, threads of the others poll. The fastest repetitions have no polling.
        low, busy = (
            statistics.quantiles(each, n=10, method="inclusive")[0]
            for each in zip(*found, strict=True)
        )
        if not self._hardware.is_host:
            busy = 0.0
        elif self._is_crowded:
            low = busy
        return self._agree(low), self._agree(busy)

    def _beside_compute(self, gather: _Gather, num_bytes: int) -> float:
        """Returns the seconds by which an all-gather delays concurrent matrix products if there are
        no spare cores. Threads preempted by the products receive data in smaller pieces."""
        messages = self._messages(num_bytes)
        operands = [allocator.zeros((512, 512), torch.float32, self._device) + 1 for _ in range(3)]

        def compute() -> None:
            for _ in range(_PRODUCTS):
                torch.mm(operands[0], operands[1], out=operands[2])

        def both() -> None:
            for works in gather(next(messages)):
                compute()
                for work in works:
                    work.wait()

        found: dict[Callable[[], None], list[float]] = {compute: [], both: []}
        for _ in range(_LEAST + round(self._seconds / _SECONDS_BESIDE)):
            for action, seconds in found.items():
                self._agree(0.0)
                thread, process = time.thread_time(), time.process_time()
                for _ in range(_IN_A_ROW):
                    action()
                own = time.thread_time() - thread
                seconds.append(own + self._stolen(time.process_time() - process - own))
        alone, together = (statistics.quantiles(found[each], n=4)[0] for each in (compute, both))
        return self._agree(max(together - alone, 0.0) / _IN_A_ROW)

    def _messages(self, num_bytes: int) -> Iterator[Tensor]:
        """Returns a cycle of tensors of ``num_bytes``. The total size of large ones exceeds the
        caches."""
        count = min(max(_CACHES // num_bytes, 2), 64)
        return itertools.cycle(
            [allocator.zeros(num_bytes // 4, torch.float32, self._device) for _ in range(count)]
        )

    def _stolen(self, of_other_threads: float) -> float:
        """Returns the part of the backend threads' time that delays compute; see
        [Note: Compute time of communication]."""
        spare = self._cores / self._hardware.ranks_per_node - self._threads
        return of_other_threads * (1.0 - min(max(spare, 0.0), 1.0))

    def _say_link(self, link: TwoWayLink) -> None:
        into, out, both = (each / 1e9 for each in (link.into, link.out, link.both))
        self._say(f"  {into:,.2f} GB/s in, {out:,.2f} GB/s out, {both:,.2f} GB/s both at once")

    def _say(self, text: str) -> None:
        if self._prints:
            print(text, file=sys.stderr, flush=True)


def _dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the dtypes whose products are measured."""
    dtypes = _DTYPES.get(device.type, _DTYPES["cuda"])
    # AMD's GPUs have other fp8 formats.
    has_formats = device.type == "cuda" and torch.version.hip is None
    if has_formats and torch.get_device_module(device).get_device_capability(device) >= _WITH_FP8:
        return (torch.float8_e4m3fn, *dtypes)
    return dtypes


def _send(gather: _Gather, messages: Iterator[Tensor]) -> None:
    for works in gather(next(messages)):
        for work in works:
            work.wait()
