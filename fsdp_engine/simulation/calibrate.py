"""This machine, measured: two ranks on its cores, each with so many threads, over gloo.

Both ranks measure at the same time, since in training both compute at the same time. What is taken
is the median of repetitions. Half a minute in all.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import Communicator, Steps, all_reduce_
from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.simulation.machine import Link, Machine, Processor

RANKS = 2
_DTYPES = (torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")
# Of a matrix product: rows, and both of its other sizes, as in a small transformer.
_ROWS, _WIDTH = 512, 768
_LARGE = 2**24  # bytes: more than caches hold, and a unit's worth of message
_SMALL = 2**12
_NUM_CALLS = 100


def calibrate(threads: int = 1, *, seconds: float = 1.5) -> Machine:
    """Measure this machine as a machine of two gloo ranks.

    Args:
        threads: of each rank.
        seconds: how long to measure each of its figures.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        mp.spawn(_measure_rank, (port, threads, seconds, str(path)), RANKS)
        return Machine.load(path)


def _measure_rank(rank: int, port: int, threads: int, seconds: float, path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",  # it is the cores that are measured
    )
    torch.set_num_threads(threads)
    meter = _Meter(DataMesh.create(None, what="calibrate"), seconds)
    machine = meter.measure(threads)
    if rank == 0:
        machine.save(Path(path))
    meter.agree(0.0)  # both are done
    dist.destroy_process_group()


class _Meter:
    """Measures one rank's share of this machine, while the other does the same.

    Args:
        mesh: both ranks.
        seconds: how long to measure each figure.
    """

    def __init__(self, mesh: DataMesh, seconds: float) -> None:
        group = mesh.inner.gather_group
        assert group is not None
        self._group = group
        self._comm = Communicator(group, _CPU)
        self._seconds = seconds

    def measure(self, threads: int) -> Machine:
        """All figures."""
        work = 2 * _ROWS * _WIDTH**2
        flops = {dtype: work / self.time(_product(dtype)) for dtype in _DTYPES}
        source, target = (memory.zeros(_LARGE, torch.uint8, _CPU) for _ in range(2))
        bandwidth = 2 * _LARGE / self.time(lambda: target.copy_(source))
        large, small = (self.time(self._messages(size)) / 2 for size in (_LARGE, _SMALL))
        # In a message of N bytes over two ranks each sends N / 2, in one hop.
        share_sent = (RANKS - 1) / RANKS
        link_bandwidth = (_LARGE - _SMALL) * share_sent / max(large - small, 1e-9)
        latency = max(small - _SMALL * share_sent / link_bandwidth, 0.0)
        link = Link(link_bandwidth, latency, processor_share=self._processor_share(large))
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(
            f"this machine, {RANKS} gloo ranks of {threads} thread(s)",
            Processor(flops, bandwidth, num_bytes / RANKS),
            link,
            link,
            ranks_per_node=RANKS,
            host_seconds=self.time(_calls) / _NUM_CALLS,
            host_runs_ahead=False,
        )

    def time(self, action: Callable[[], object]) -> float:
        """Median of its seconds, the longer of both ranks'."""
        for _ in range(2):
            action()
        once = self.agree(_timed(action))
        count = min(max(round(self._seconds / once), 5), 200)
        return self.agree(statistics.median(_timed(action) for _ in range(count)))

    def agree(self, value: float) -> float:
        """The larger of both ranks'."""
        found = memory.zeros(1, torch.float64, _CPU).fill_(value)
        return float(all_reduce_(found, self._group, "max"))

    def _messages(self, num_bytes: int) -> Callable[[], None]:
        """A gather and a reduction, as the engine sends them."""
        full = memory.zeros(num_bytes // 4, torch.float32, _CPU)
        part = memory.zeros(num_bytes // 4 // RANKS, torch.float32, _CPU)

        def send() -> None:
            _run(self._comm.all_gather(full, part))
            _run(self._comm.reduce_scatter(full, part))

        return send

    def _processor_share(self, message: float) -> float:
        """How much longer products take while a message is under way, of the message's time."""
        full = memory.zeros(_LARGE // 4, torch.float32, _CPU)
        product = _product(torch.float32)
        count = max(1, round(2 * message / self.time(product)))

        def compute() -> None:
            for _ in range(count):
                product()

        def both() -> None:
            for works in self._comm.all_gather(full):
                compute()
                for work in works:
                    work.wait()

        return min(max((self.time(both) - self.time(compute)) / message, 0.0), 1.0)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    a = memory.zeros((_ROWS, _WIDTH), dtype, _CPU) + 1
    b = memory.zeros((_WIDTH, _WIDTH), dtype, _CPU) + 1
    return lambda: a @ b


def _calls() -> object:
    """Operations on next to nothing, under autograd."""
    x = torch.ones((), requires_grad=True)
    y: torch.Tensor = x
    for _ in range(_NUM_CALLS):
        y = y + x
    return y


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _run(steps: Steps) -> None:
    for works in steps:
        for work in works:
            work.wait()
