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
SECONDS_EACH = 1.5  # for each figure
_DTYPES = (torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")
# Of a matrix product: rows, and both of its other sizes, as in a small transformer.
_ROWS, _WIDTH = 512, 768
_LARGE = 2**24  # bytes: more than caches hold, and a unit's worth of message
_SMALL = 2**12


def calibrate(threads: int = 1) -> Machine:
    """Measure this machine as a machine of two gloo ranks of ``threads`` threads each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        mp.spawn(_measure_rank, (port, threads, str(path)), RANKS)
        return Machine.load(path)


def _measure_rank(rank: int, port: int, threads: int, path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",  # it is the cores that are measured
    )
    torch.set_num_threads(threads)
    mesh = DataMesh.create(None, what="calibrate")
    machine = _measure(mesh, threads)
    if rank == 0:
        machine.save(Path(path))
    all_reduce_(memory.zeros(1, torch.float32, _CPU), mesh.control_group)  # both are done
    dist.destroy_process_group()


def _measure(mesh: DataMesh, threads: int) -> Machine:
    group = mesh.inner.gather_group
    assert group is not None
    comm = Communicator(group, _CPU)
    flops = {dtype: 2 * _ROWS * _WIDTH**2 / _seconds(_product(dtype), mesh) for dtype in _DTYPES}
    source, target = (memory.zeros(_LARGE, torch.uint8, _CPU) for _ in range(2))
    bandwidth = 2 * _LARGE / _seconds(lambda: target.copy_(source), mesh)
    large, small = (_seconds(_messages(comm, size), mesh) / 2 for size in (_LARGE, _SMALL))
    # In a message of N bytes over two ranks each sends N / 2, in one hop.
    sent = (_LARGE - _SMALL) * (RANKS - 1) / RANKS
    link_bandwidth = sent / max(large - small, 1e-9)
    latency = max(small - _SMALL * (RANKS - 1) / RANKS / link_bandwidth, 0.0)
    share = _share(comm, large, mesh)
    link = Link(link_bandwidth, latency, processor_share=share)
    processor = Processor(flops, bandwidth, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    name = f"this machine, {RANKS} gloo ranks, {threads} threads each"
    return Machine(name, processor, link, link, RANKS, _seconds(_calls, mesh) / 100, False)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    a = memory.zeros((_ROWS, _WIDTH), dtype, _CPU) + 1
    b = memory.zeros((_WIDTH, _WIDTH), dtype, _CPU) + 1
    return lambda: a @ b


def _calls() -> object:
    """A hundred operations on next to nothing, under autograd."""
    x = torch.ones((), requires_grad=True)
    y: torch.Tensor = x
    for _ in range(100):
        y = y + x
    return y


def _messages(comm: Communicator, num_bytes: int) -> Callable[[], None]:
    """A gather and a reduction, as the engine sends them."""
    full = memory.zeros(num_bytes // 4, torch.float32, _CPU)
    out = memory.zeros(num_bytes // 4 // RANKS, torch.float32, _CPU)

    def send() -> None:
        _run(comm.all_gather(full, out))
        _run(comm.reduce_scatter(full, out))

    return send


def _share(comm: Communicator, message: float, mesh: DataMesh) -> float:
    """How much longer products take while a message is under way, of the message's time."""
    full = memory.zeros(_LARGE // 4, torch.float32, _CPU)
    product = _product(torch.float32)
    count = max(1, round(2 * message / _seconds(product, mesh)))

    def compute() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        steps = comm.all_gather(full)
        works = next(steps)
        compute()
        for work in works:
            work.wait()
        _run(steps)

    alone, together = _seconds(compute, mesh), _seconds(both, mesh)
    return min(max((together - alone) / message, 0.0), 1.0)


def _run(steps: Steps) -> None:
    for works in steps:
        for work in works:
            work.wait()


def _seconds(action: Callable[[], object], mesh: DataMesh) -> float:
    """Median of its time, the longer of both ranks'."""
    for _ in range(2):
        action()
    start = time.perf_counter()
    action()
    once = memory.zeros(1, torch.float64, _CPU) + (time.perf_counter() - start)
    all_reduce_(once, mesh.control_group, "max")
    times = []
    for _ in range(min(max(round(SECONDS_EACH / float(once)), 5), 200)):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    median = memory.zeros(1, torch.float64, _CPU) + statistics.median(times)
    all_reduce_(median, mesh.control_group, "max")
    return float(median)
