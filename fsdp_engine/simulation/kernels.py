"""What ``calibrate`` times of one rank: products, memory, attention, functions, the host.

*Warm* operands are those of the call before, in caches; *cold* ones are others in each call, of
more memory than caches hold, as in training, where a step comes past every tensor once.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.devices import memory
from fsdp_engine.devices.lanes import device_seconds, finish_compute
from fsdp_engine.simulation.machine import Processor

Action = Callable[[], object]

_CACHES = 2**27  # bytes that no caches hold
_LEAST, _MOST = 5, 200  # repetitions


class Kernels:
    """Times kernels on one device.

    Args:
        device: which.
        turns: threads of all ranks for each core, at least 1: they wait for their turns.
        seconds: how long to time each kernel.
        agree: what all ranks take for the value of each; the largest, say.
    """

    def __init__(
        self, device: torch.device, turns: float, seconds: float, agree: Callable[[float], float]
    ) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._turns = turns
        self._seconds = seconds
        self._agree = agree
        # Rows, inner and outer size of products: those of small transformers, of large ones.
        self._sizes = (256, 256, 512) if self._on_host else (8192, 4096, 4096)
        # Batch, heads, sequence, size of heads.
        self._attention = (2, 4, 256, 64) if self._on_host else (4, 16, 2048, 128)
        # Elements of an elementwise operation.
        self._elements = 2**19 if self._on_host else 2**26

    def matrix_flops(self, dtype: torch.dtype) -> float:
        """A second, of products with warm operands."""
        return self._flops() / self._time(partial(_product, *self._operands(dtype)))

    def memory_bandwidth(self) -> float:
        """Bytes a second that copies of cold tensors read and write."""
        seconds = self._time(partial(_with_next, _copy, self._cold(partial(self._matrices, 2))))
        return 2 * 4 * self._elements / seconds

    def overlap(self, flops: float, bandwidth: float) -> float:
        """Of moving operands, beside computing, of products with cold operands in fp32.

        Args:
            flops: a second, of warm ones.
            bandwidth: bytes a second of the memory.
        """
        if not self._on_host:
            return 1.0
        sets = self._cold(partial(self._operands, torch.float32))
        computing = self._flops() / flops
        rows, inner, columns = self._sizes
        moving = 4 * (rows * inner + inner * columns + rows * columns) / bandwidth
        hidden = computing + moving - self._time(partial(_with_next, _product, sets))
        return min(max(hidden / min(computing, moving), 0.0), 1.0)

    def attention_share(self, flops: float, dtype: torch.dtype) -> float:
        """What attention reaches of products' ``flops`` a second."""
        batch, heads, length, size = self._attention
        shape = (batch, heads, length, size)
        query, key, value = (memory.zeros(shape, dtype, self._device) + 1 for _ in range(3))
        seconds = self._time(lambda: F.scaled_dot_product_attention(query, key, value))
        return min(4 * batch * heads * length**2 * size / seconds / flops, 1.0)

    def function_seconds(self, bandwidth: float) -> float:
        """Of one element: the mean of gelu, its backward and softmax, of cold tensors, beyond what
        moving takes. ``bandwidth``: bytes a second of the memory."""
        if not self._on_host:
            return 0.0
        found = []
        for num_tensors, function in ((2, _gelu), (3, _gelu_backward), (2, _softmax)):
            sets = self._cold(partial(self._matrices, num_tensors))
            seconds = self._time(partial(_with_next, function, sets))
            moving = num_tensors * 4 * self._elements / bandwidth
            found.append(max(seconds - moving, 0.0) / self._elements)
        return statistics.mean(found)

    def call_seconds(self) -> float:
        """The least that a kernel takes on a device, behind others; 0 on a host."""
        if self._on_host:
            return 0.0
        tensor, large, count = self._ones(1), self._ones(2**28), 100

        def small_ones() -> None:
            for _ in range(count):
                tensor.add_(1)

        def all_of_them() -> None:
            large.add_(1)  # while this goes on the host gets ahead
            small_ones()

        return max(self._time(all_of_them) - self._time(lambda: large.add_(1)), 0.0) / count

    def host_seconds(self) -> float:
        """Of one operation's call: the host's time of a step of a tiny network, forward, backward
        and AdamW, modules and autograd included, over its operations."""
        layers = [each for _ in range(16) for each in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())]
        model = nn.Sequential(*layers).to(self._device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = self._ones(16).view(2, 8)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with _Calls() as calls:  # type: ignore[no-untyped-call]
            step()
        seconds: float = self._time(step, self._host_time) / calls.number
        return seconds

    def crowd(self) -> float:
        """The share of a CPU's time that other programs took from products; 0 on a device."""
        if not self._on_host:
            return 0.0
        operands = self._operands(torch.float32)
        wall, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < self._seconds:
            _product(*operands)
        own = time.thread_time() - own
        return self._agree(1.0 - own / (time.perf_counter() - wall))

    def processor(self, dtypes: Sequence[torch.dtype], memory_bytes: float) -> Processor:
        """All of them.

        Args:
            dtypes: of products; attention is timed in the last.
            memory_bytes: how much memory the rank has.
        """
        flops = {dtype: self.matrix_flops(dtype) for dtype in dtypes}
        bandwidth = self.memory_bandwidth()
        # Attention of a CPU in fp32: its kernels have no matrix units for narrower dtypes.
        dtype = torch.float32 if self._on_host else dtypes[-1]
        return Processor(
            flops,
            bandwidth,
            memory_bytes,
            call_seconds=self.call_seconds(),
            overlap=self.overlap(flops[torch.float32], bandwidth),
            attention_share=self.attention_share(flops[dtype], dtype),
            function_seconds=self.function_seconds(bandwidth),
        )

    def _flops(self) -> float:
        return 2.0 * math.prod(self._sizes)

    def _operands(self, dtype: torch.dtype) -> list[Tensor]:
        rows, inner, columns = self._sizes
        shapes = ((rows, inner), (inner, columns), (rows, columns))
        return [memory.zeros(shape, dtype, self._device) + 1 for shape in shapes]

    def _matrices(self, count: int) -> list[Tensor]:
        return [self._ones(self._elements).view(-1, 512) for _ in range(count)]

    def _ones(self, numel: int) -> Tensor:
        return memory.zeros(numel, torch.float32, self._device) + 1

    def _cold(self, make: Callable[[], list[Tensor]]) -> itertools.cycle[list[Tensor]]:
        """Sets of operands, in turn, so many that none is in a cache when its turn comes."""
        first = make()
        count = math.ceil(_CACHES / sum(each.nbytes for each in first))
        return itertools.cycle([first, *(make() for _ in range(count))])

    def _time(self, action: Action, timed: Callable[[Action], float] | None = None) -> float:
        """Median of its seconds; the longest of all ranks'."""
        timed = timed or (self._host_time if self._on_host else self._device_time)
        for _ in range(2):
            action()
        once = self._agree(timed(action))
        count = min(max(round(self._seconds / max(once, 1e-6)), _LEAST), _MOST)
        found = statistics.median(timed(action) for _ in range(count))
        finish_compute(self._device)
        return self._agree(found)

    def _host_time(self, action: Action) -> float:
        # The processor's time: what other programs take is none of this machine's.
        start = time.thread_time()
        action()
        return (time.thread_time() - start) * self._turns

    def _device_time(self, action: Action) -> float:
        return device_seconds(self._device, action)


class _Calls(TorchDispatchMode):
    """Counts what a simulation counts as calls; ``number``: so far."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _with_next(function: Callable[..., object], operands: Iterator[list[Tensor]]) -> None:
    function(*next(operands))


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _gelu(x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu.out(x, out=out)


def _gelu_backward(gradient: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(gradient, x, grad_input=out)


def _softmax(x: Tensor, out: Tensor) -> None:
    torch.softmax(x, -1, out=out)
