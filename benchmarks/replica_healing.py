"""Rate at which a replica that starts gets its state, against plain sockets on loopback.

    python benchmarks/replica_healing.py [--gigabytes 1.0] [--rounds 7] [--pairs 1 2]

A pair is a rank of a living replica and the same rank of one that starts: two processes and one
connection. The state is that of AdamW, in 96 tensors. "plain sockets" send as many bytes from one
tensor by ``sendall`` and receive them by ``recv_into`` into memory that has been used before;
"plain sockets, new memory" receive into memory fresh from the system, as a process that starts has
to. torchft's HTTP transport is the default of its Manager. The time is that of the slowest
receiver, until it has the state. Memory is the growth of the largest resident set of a process
while it sends or receives.
"""

from __future__ import annotations

import argparse
import random
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor
from torchft.checkpointing import HTTPTransport

from fsdp_engine.integrations.state_transport import StateTransport

TENSORS, TIMEOUT, CHUNK = 96, 60.0, 1 << 22
PLAIN, FRESH, ENGINE, HTTP = (
    "plain sockets",
    "plain sockets, new memory",
    "engine",
    "torchft HTTP",
)


def resident(field: str) -> int:
    """Bytes of this process: ``VmRSS``, or the largest of them so far, ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_growth(function: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of ``function``, and by how much the largest resident set grew."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    result = function()
    seconds = time.perf_counter() - start
    del result
    return seconds, resident("VmHWM") - before


class Plain:
    """Sockets without anything else, with the two methods of a transport that are timed."""

    def __init__(self, num_bytes: int, *, new_memory: bool) -> None:
        self._num_bytes, self._new_memory = num_bytes, new_memory
        self._server = socket.create_server(("", 0))
        self._memory = torch.empty(0 if new_memory else num_bytes, dtype=torch.uint8).fill_(1)

    def address(self) -> str:
        return f"localhost:{self._server.getsockname()[1]}"

    def send(self, source: Tensor) -> None:
        connection, _ = self._server.accept()
        with connection:
            connection.sendall(memoryview(source.numpy()))  # type: ignore[arg-type]

    def receive(self, address: str) -> Tensor:
        host, port = address.split(":")
        memory = self._memory
        if self._new_memory:
            memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        view: memoryview = memoryview(memory.numpy())  # type: ignore[arg-type]
        with socket.create_connection((host, int(port))) as connection:
            done = 0
            while done < len(view):
                done += connection.recv_into(view[done : done + CHUNK])
        return memory


def measure(num_bytes: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measures the rate of all pairs in bytes per second, and memory, by way and round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_sender = rank % 2 == 0
    numel = num_bytes // 4 // TENSORS
    state: dict[str, Any] = {}
    if is_sender:
        state = {"tensors": [torch.full((numel,), float(i)) for i in range(TENSORS)]}
    num_bytes = 4 * numel * TENSORS
    flat = torch.ones(num_bytes if is_sender else 0, dtype=torch.uint8)
    ways: dict[str, Any] = {
        PLAIN: Plain(0 if is_sender else num_bytes, new_memory=False),
        FRESH: Plain(num_bytes, new_memory=True),
        ENGINE: StateTransport(TIMEOUT),
        HTTP: HTTPTransport(timedelta(seconds=TIMEOUT), num_chunks=0),
    }
    draw, names = random.Random(0), list(ways)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    wait = timedelta(seconds=TIMEOUT)
    for step in range(rounds + 1):
        draw.shuffle(names)
        for name in names:
            way = ways[name]
            is_plain = isinstance(way, Plain)
            addresses: list[Any] = [None] * size
            dist.all_gather_object(addresses, way.address() if is_plain else way.metadata())
            source = addresses[rank - 1]
            dist.barrier()
            if is_sender:

                def send(way: Any = way, is_plain: bool = is_plain, step: int = step) -> None:
                    if is_plain:
                        way.send(flat)
                    else:
                        way.send_checkpoint([1], step, state, wait)
                    dist.barrier()
                    if not is_plain:
                        way.disallow_checkpoint()

                seconds, grown = peak_growth(send)
                seconds = 0.0
            else:

                def receive(
                    way: Any = way, is_plain: bool = is_plain, step: int = step, at: str = source
                ) -> Any:
                    return way.receive(at) if is_plain else way.recv_checkpoint(0, at, step, wait)

                seconds, grown = peak_growth(receive)
                dist.barrier()
            results: list[Any] = [None] * size
            dist.all_gather_object(results, (seconds, grown))
            if step > 0:
                rate = num_bytes * (size // 2) / max(each for each, _ in results)
                sender = max(grown for _, grown in results[::2]) / num_bytes
                receiver = max(grown for _, grown in results[1::2]) / num_bytes
                found[name].append({"rate": rate, "sender": sender, "receiver": receiver})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    record: dict[str, Any] = {"bytes": int(args.gigabytes * 1e9), "rounds": args.rounds}
    for pairs in args.pairs:
        found = harness.run_ranks(measure, 2 * pairs, record["bytes"], args.rounds)
        rates = {name: [each["rate"] for each in rounds] for name, rounds in found.items()}
        ways = {
            name: {
                "rate": harness.spread(rates[name]),
                **{base: harness.ratios(rates, name, base) for base in (PLAIN, FRESH)},
                "sender": harness.spread([each["sender"] for each in rounds]),
                "receiver": harness.spread([each["receiver"] for each in rounds]),
            }
            for name, rounds in found.items()
        }
        rows = [
            [
                name,
                f"{each['rate']['median'] / 1e9:.2f}",
                harness.show_ratio(each[PLAIN]),
                harness.show_ratio(each[FRESH]),
                f"{each['sender']['median']:.2f}",
                f"{each['receiver']['median']:.2f}",
            ]
            for name, each in ways.items()
        ]
        columns = ["way", "GB/s", f"/ {PLAIN}", f"/ {FRESH}", "memory of sender", "of receiver"]
        harness.print_table(f"{pairs} pairs; memory over the size of the state", columns, rows)
        record[str(pairs)] = ways
    harness.write_results("replica_healing", record)


if __name__ == "__main__":
    main()
