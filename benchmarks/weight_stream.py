"""Sending weights to another process: time to assemble them, and to send them.

    python benchmarks/weight_stream.py               # a 0.8 GB GPT on 2 gloo ranks, some minutes
    python benchmarks/weight_stream.py --rounds 10

Level 3, fp32, sent as bf16 over local TCP to a process that reads and discards all bytes.
*Assembling* is the time in which a sender gets the next tensors; *sending* is the time in sockets,
until the receiver acknowledges. Both are those of the slower sender. Every round runs all variants.
MiB is the peak of resident memory of a rank, in addition to its previous memory (its shard, and for
changes the version).

    whole            weight_stream; rank 0 sends
    pieces           weight_stream(pieces=True); each rank sends its own
    changes, 1 %     weight_stream(changed_since=...) after random elements changed
    full_state_dict  of the engine, on rank 0, all of it, then cast and sent
    FSDP2            the same model by fully_shard; for each parameter its shard is cast, then
                     full_tensor(); rank 0 sends
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import pickle
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from gpt import GPT, GPTConfig

MIB = 2**20
BF16 = torch.bfloat16
BUFFER_BYTES = 1 << 20
SHARES = (0.01, 0.1, 1.0)


def read_all(listener: socket.socket, num_ranks: int) -> None:
    """The receiver: reads the bytes of each rank, and acknowledges the last one."""

    def read(connection: socket.socket) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while True:
            head = _exactly(connection, 8)
            if not head:
                return
            (left,) = struct.unpack("!q", head)
            if left < 0:
                connection.sendall(b"!")
                continue
            while left:
                left -= connection.recv_into(buffer[: min(left, BUFFER_BYTES)])

    threads = []
    for _ in range(num_ranks):
        connection, _ = listener.accept()
        threads.append(threading.Thread(target=read, args=(connection,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            return b""
        found += more
    return found


class Sender:
    """A rank's connection to the receiver.

    Attributes:
        num_bytes: Bytes of the sent tensors.
        seconds: Time of sending.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_bytes = 0
        self.seconds = 0.0

    def send(self, item: tuple[Any, ...]) -> None:
        begin = time.perf_counter()
        tensors = [x for x in item if isinstance(x, Tensor)]
        rest = pickle.dumps([x for x in item if not isinstance(x, Tensor)])
        self._message(memoryview(rest))
        for tensor in tensors:
            self._message(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait for the receiver's answer."""
        begin = time.perf_counter()
        self._socket.sendall(struct.pack("!q", -1))
        assert self._socket.recv(1) == b"!"
        self.seconds += time.perf_counter() - begin

    def _message(self, content: memoryview) -> None:
        self._socket.sendall(struct.pack("!q", len(content)))
        self._socket.sendall(content)
        self.num_bytes += len(content)

    def close(self) -> None:
        self._socket.close()


def model_of(layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(num_layers=layers, width=1024, num_heads=16))


def by_fsdp2(layers: int) -> GPT:
    model = model_of(layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def full_tensors(model: GPT) -> Iterator[tuple[Any, ...]]:
    for name, param in model.named_parameters():
        yield name, param.detach().to(BF16).full_tensor()  # type: ignore[attr-defined]


def full_state(engine: fe.Engine) -> Iterator[tuple[Any, ...]]:
    for name, tensor in engine.full_state_dict(rank0_only=True).items():
        yield name, tensor.to(BF16)


def change(engine: fe.Engine, share: float) -> None:
    """Change the sign of random elements of this rank."""
    with torch.no_grad():
        for param in engine.model.parameters():
            local = param.data.local  # type: ignore[attr-defined]
            if share == 1.0:
                local.neg_()
            else:
                where = torch.randint(max(local.numel(), 1), (int(local.numel() * share),))
                local[where] = -local[where]


def _resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _begin_peak() -> float:
    """Return freed memory to the system and reset the peak. Returns resident memory in MiB."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident()


def measured(items: Iterable[tuple[Any, ...]], sender: Sender, *, sends: bool) -> dict[str, float]:
    """Run one variant once."""
    dist.barrier()
    before = _begin_peak()
    sender.num_bytes, sender.seconds = 0, 0.0
    begin = time.perf_counter()
    for item in items:
        if sends:
            sender.send(item)
    if sends:
        sender.finish()
    total = time.perf_counter() - begin
    return {
        "assembling": total - sender.seconds,
        "sending": sender.seconds,
        "sent MiB": sender.num_bytes / MIB,
        "peak MiB": _resident() - before,
    }


def run(port: int, layers: int, rounds: int) -> dict[str, Any]:
    """Run all variants on one rank. Returns the figures of all ranks by round."""
    engine = fe.shard(model_of(layers), strategy="optim_grads_params")
    other = by_fsdp2(layers)
    is_first = dist.get_rank() == 0
    sender = Sender(port)
    stream = fe.weight_stream(engine, BF16)
    pieces = fe.weight_stream(engine, BF16, pieces=True)
    changes = fe.weight_stream(engine, BF16, fe.WeightVersion())
    for _ in changes:
        pass  # afterwards the version counts all weights as received

    def changed(share: float) -> Iterable[tuple[Any, ...]]:
        change(engine, share)
        return changes

    ways: dict[str, tuple[Callable[[], Iterable[tuple[Any, ...]]], bool]] = {
        "whole": (lambda: stream, is_first),
        "pieces": (lambda: pieces, True),
        **{
            f"changes, {share:.0%}": (lambda share=share: changed(share), True)  # type: ignore[misc]
            for share in SHARES
        },
        "full_state_dict": (lambda: full_state(engine), is_first),
        "FSDP2": (lambda: full_tensors(other), is_first),
    }
    draw = random.Random(0)
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in draw.sample(list(ways), len(ways)):
            make, sends = ways[name]
            own = measured(make(), sender, sends=sends)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
            if number:  # the first round warms up
                found[name].append(every)
    sender.close()
    held = sum(param.numel() for param in engine.model.parameters()) * 4 / MIB
    return {"model MiB": held, "ways": found}


def summary(rounds: list[list[dict[str, float]]]) -> dict[str, float]:
    """Medians over rounds of the slowest rank, and the largest memory."""
    senders = [[each for each in ranks if each["sent MiB"]] for ranks in rounds]
    longest = [
        max(ranks, key=lambda each: each["assembling"] + each["sending"]) for ranks in senders
    ]
    return {
        "assembling": statistics.median(each["assembling"] for each in longest),
        "sending": statistics.median(each["sending"] for each in longest),
        "ratio": statistics.median(each["assembling"] / each["sending"] for each in longest),
        "sent MiB": sum(each["sent MiB"] for each in rounds[0]),
        "peak MiB": max(each["peak MiB"] for ranks in rounds for each in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16, help="of the GPT: 50 MB each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    receiver = multiprocessing.get_context("fork").Process(target=read_all, args=(listener, 2))
    receiver.start()
    found = harness.run_ranks(run, 2, port, options.layers, options.rounds)
    receiver.join(60)
    rows = []
    results = {}
    for name, rounds in found["ways"].items():
        each = results[name] = summary(rounds)
        rows.append(
            [
                name,
                f"{each['assembling']:.3f}",
                f"{each['sending']:.3f}",
                f"{each['ratio']:.2f}",
                f"{each['sent MiB']:,.0f}",
                f"{each['peak MiB']:,.0f}",
            ]
        )
    columns = ["way", "assembling, s", "sending, s", "ratio", "sent, MiB", "added peak, MiB"]
    harness.print_table(f"{found['model MiB']:,.0f} MiB in fp32, sent as bf16", columns, rows)
    harness.write_results("weight_stream", {"model MiB": found["model MiB"], "ways": results})


if __name__ == "__main__":
    main()
