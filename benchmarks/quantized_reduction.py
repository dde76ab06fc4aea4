"""Step time with sums in few bits where the link between nodes is slow, on two gloo ranks.

    python benchmarks/quantized_reduction.py [--rounds 8]

The GPT of 10M of ``step_time.py``, fp32 weights, replicated by two ranks on the outer axis; AdamW.
The link is emulated: messages are sent one after the other, and the time of each is its size
divided by the table's bandwidth. Meanwhile ranks sleep or compute. Sums are an all-reduce in fp32
or in bf16, or those of ``fe.QuantizedReduction``. "Encoding" is the processor time of a rank to
encode and decode one million fp32 elements, sent to one rank and received from one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import harness
import torch
from step_time import SIZES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.extensions.quantized_reduction.block_codes import BlockCodes
from gpt import GPT

NUM_RANKS = 2
# In Gb/s. None: as this machine has it.
GIGABITS = (None, 1.0, 0.25, 0.1)
WAYS: dict[str, tuple[torch.dtype | None, list[Any]]] = {
    "fp32": (None, []),
    "bf16": (torch.bfloat16, []),
    "8 bits": (None, [fe.QuantizedReduction(8)]),
    "4 bits": (None, [fe.QuantizedReduction(4)]),
    "4 bits, no feedback": (None, [fe.QuantizedReduction(4, error_feedback=False)]),
}


class Link:
    """An emulated link: messages are sent one after the other."""

    def __init__(self) -> None:
        self.gigabits: float | None = None
        self._free_at = 0.0

    def send(self, num_bytes: int) -> Transfer:
        start = max(time.perf_counter(), self._free_at)
        self._free_at = start + (num_bytes * 8e-9 / self.gigabits if self.gigabits else 0.0)
        return Transfer(self._free_at)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which all communicators send over this link."""
        send, all_reduce = Communicator._send, Communicator.all_reduce

        def sent(comm: Communicator, tensor: Tensor, receiver: int, tag: int) -> Any:
            transfer = self.send(tensor.nbytes)
            transfer.work = send(comm, tensor, receiver, tag)
            return transfer

        def reduced(
            comm: Communicator, tensor: Tensor, *, average: bool = False, tag: int = 0
        ) -> Steps:
            # A reduce-scatter and an all-gather.
            transfer = self.send(2 * tensor.nbytes * (comm.size - 1) // comm.size)
            yield from all_reduce(comm, tensor, average=average, tag=tag)
            yield [transfer]

        with (
            mock.patch.object(Communicator, "_send", sent),
            mock.patch.object(Communicator, "all_reduce", reduced),
        ):
            yield


class Transfer:
    """A message on an emulated link."""

    def __init__(self, end: float) -> None:
        self.work: Any = None
        self._end = end

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


def make_step(way: str) -> Callable[[], None]:
    """A step of a fresh model."""
    config, num_sequences = SIZES["10M"]
    reduce_dtype, extensions = WAYS[way]
    torch.manual_seed(0)
    model = GPT(config)
    fe.shard(
        model,
        init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("outer", "inner")),
        "optim_grads_params",
        "no_shard",
        mp_policy=fe.MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        extensions=extensions,
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, config.vocab_size, (num_sequences, config.sequence_length))

    def step() -> None:
        model(tokens, tokens.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step, by bandwidth and way."""
    link, found = Link(), {}
    with link.used():  # before the first step, which binds the functions of communicators
        steps = {way: make_step(way) for way in WAYS}
        for link.gigabits in GIGABITS:
            found[str(link.gigabits)] = harness.interleave(steps, rounds)
    return found


def encoding_seconds(codes: BlockCodes, *, feedback: bool) -> float:
    """Processor time of encoding and decoding a million elements, the least of ten."""
    torch.set_num_threads(1)
    numel = 10**6
    values = torch.randn(1, numel)
    message = torch.empty(1, codes.num_bytes(numel), dtype=torch.uint8)

    def zeros(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    errors = codes.make_errors(1, numel, zeros) if feedback else None
    times = []
    for _ in range(10):
        start = time.process_time()
        codes.encode(values, message, errors)
        codes.decode(message, numel, torch.float32)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    encoding = {
        f"{bits} bits" + ("" if feedback else ", no feedback"): encoding_seconds(
            BlockCodes(bits, 256), feedback=feedback
        )
        for bits in (8, 4)
        for feedback in (True, False)
    }
    rows = [[name, f"{seconds * 1e3:.2f}"] for name, seconds in encoding.items()]
    harness.print_table("Encoding and decoding a million elements", ["bits", "ms"], rows)
    times = harness.run_ranks(measure, NUM_RANKS, args.rounds)
    record: dict[str, Any] = {}
    rows = []
    for gigabits, of_ways in times.items():
        record[gigabits] = {
            way: {
                "seconds": harness.spread(seconds),
                "of fp32": harness.ratios(of_ways, way, "fp32"),
                "of bf16": harness.ratios(of_ways, way, "bf16"),
            }
            for way, seconds in of_ways.items()
        }
        for way, each in record[gigabits].items():
            cells = [harness.show_ratio(each[key]) for key in ("of fp32", "of bf16")]
            rows.append([gigabits, way, f"{each['seconds']['median'] * 1e3:.0f}", *cells])
    columns = ["Gb/s", "sums", "step ms", "of fp32's (quartiles)", "of bf16's"]
    harness.print_table("Two gloo ranks, GPT of 10M", columns, rows)
    harness.write_results("quantized_reduction", {"encoding": encoding, "steps": record})


if __name__ == "__main__":
    main()
