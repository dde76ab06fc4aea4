"""Timings of one rank for ``calibrate``: matrix products, memory, attention, functions, the host.

*Warm* operands are those of the previous call, in caches. *Cold* operands are different in each
call, with a total size that exceeds the caches, as in training, where a step uses every tensor
once.
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

from fsdp_engine.comm.lanes import device_seconds, finish_compute
from fsdp_engine.memory import allocator
from fsdp_engine.simulation.machine import Processor

Action = Callable[[], object]

_CACHES = 2**27  # bytes, more than any cache
_LEAST, _MOST = 5, 200  # repetitions


class Kernels:
    """Times kernels on one device.

    Args:
        device: the device.
        turns: threads of all ranks per core, at least 1.
        seconds: measurement time of each kernel.
        agree: combines the ranks' values, for example by the maximum.
    """

    def __init__(
        self, device: torch.device, turns: float, seconds: float, agree: Callable[[float], float]
    ) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._turns = turns
        self._seconds = seconds
        self._agree = agree
        # Rows, inner and outer size of products, as in small and in large transformers.
        self._sizes = (256, 256, 512) if self._on_host else (8192, 4096, 4096)
        # Batch, heads, sequence, size of heads.
        self._attention = (2, 4, 256, 64) if self._on_host else (4, 16, 2048, 128)
        # Elements of an elementwise operation.
        self._elements = 2**19 if self._on_host else 2**26

    def matrix_flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second of products with warm operands."""
        product = _scaled_product if dtype == torch.float8_e4m3fn else _product
        return self._flops() / self._time(partial(product, *self._operands(dtype)))

    def memory_bandwidth(self) -> float:
        """Bytes per second that copies of cold tensors read and write."""
        seconds = self._time(partial(_with_next, _copy, self._cold(partial(self._matrices, 2))))
        return 2 * 4 * self._elements / seconds

    def overlap(self, flops: float, bandwidth: float) -> float:
        """The overlap of memory access and compute (see :class:`Processor`), from products with
        cold operands in fp32.

        Args:
            flops: floating-point operations per second with warm operands.
            bandwidth: bytes per second of the memory.
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
        """The rate of attention as a fraction of ``flops``, the rate of products."""
        batch, heads, length, size = self._attention
        shape = (batch, heads, length, size)
        query, key, value = (self._random(shape, dtype) for _ in range(3))
        seconds = self._time(lambda: F.scaled_dot_product_attention(query, key, value))
        return min(4 * batch * heads * length**2 * size / seconds / flops, 1.0)

    def function_seconds(self, bandwidth: float) -> float:
        """Seconds per element of functions, in addition to memory access: the mean of gelu, its
        backward and softmax, with cold tensors.

        Args:
            bandwidth: bytes per second of the memory.
        """
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
        """The minimum duration of a kernel in a queue of a device; 0 on a host."""
        if self._on_host:
            return 0.0
        tensor, large, count = self._ones(1), self._ones(2**28), 100

        def small_ones() -> None:
            for _ in range(count):
                tensor.add_(1)

        def all_of_them() -> None:
            large.add_(1)  # a long kernel, so that the host runs ahead
            small_ones()

        return max(self._time(all_of_them) - self._time(lambda: large.add_(1)), 0.0) / count

    def host_seconds(self) -> float:
        """Host time per operation: that of a step of a tiny network with forward, backward and
        AdamW, including modules and autograd, divided by the number of operations."""
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
        """The fraction of a CPU's time that other programs used during products; 0 on a device."""
        if not self._on_host:
            return 0.0
        operands = self._operands(torch.float32)
        wall, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < self._seconds:
            _product(*operands)
        own = time.thread_time() - own
        return self._agree(1.0 - own / (time.perf_counter() - wall))

    def processor(self, dtypes: Sequence[torch.dtype], memory_bytes: float) -> Processor:
        """Measure all figures of the processor.

        Args:
            dtypes: of products; attention is timed in the last one.
            memory_bytes: memory of the rank.
        """
        flops = {dtype: self.matrix_flops(dtype) for dtype in dtypes}
        bandwidth = self.memory_bandwidth()
        # fp32 on a CPU, whose attention kernels do not use matrix units for narrower dtypes.
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
        if dtype == torch.float8_e4m3fn:  # the second operand by columns, the result in bf16
            a, b = (self._random(shape, torch.float32).to(dtype) for shape in shapes[:2])
            out = self._random(shapes[2], torch.bfloat16)
            return [a, b.t().contiguous().t(), self._ones(1), out]
        return [self._random(shape, dtype) for shape in shapes]

    def _matrices(self, count: int) -> list[Tensor]:
        return [self._ones(self._elements).view(-1, 512) for _ in range(count)]

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random values: a GPU multiplies constants faster, since bits that do not change take less
        power."""
        generator = torch.Generator(self._device).manual_seed(0)
        return allocator.zeros(shape, dtype, self._device).normal_(generator=generator)

    def _ones(self, numel: int) -> Tensor:
        return allocator.zeros(numel, torch.float32, self._device) + 1

    def _cold(self, make: Callable[[], list[Tensor]]) -> itertools.cycle[list[Tensor]]:
        """A cycle of operand sets whose total size exceeds the caches."""
        first = make()
        count = math.ceil(_CACHES / sum(each.nbytes for each in first))
        return itertools.cycle([first, *(make() for _ in range(count))])

    def _time(self, action: Action, timed: Callable[[Action], float] | None = None) -> float:
        """The median duration in seconds, combined over the ranks by ``agree``."""
        timed = timed or (self._host_time if self._on_host else self._device_time)
        for _ in range(2):
            action()
        once = self._agree(timed(action))
        count = min(max(round(self._seconds / max(once, 1e-6)), _LEAST), _MOST)
        found = statistics.median(timed(action) for _ in range(count))
        finish_compute(self._device)
        return self._agree(found)

    def _host_time(self, action: Action) -> float:
        # Processor time, to exclude other programs.
        start = time.thread_time()
        action()
        return (time.thread_time() - start) * self._turns

    def _device_time(self, action: Action) -> float:
        return device_seconds(self._device, action)


class _Calls(TorchDispatchMode):
    """Counts the operations that a simulation counts as calls, in ``number``."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _with_next(function: Callable[..., object], operands: Iterator[list[Tensor]]) -> None:
    function(*next(operands))


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _scaled_product(a: Tensor, b: Tensor, scale: Tensor, out: Tensor) -> None:
    torch.ops.aten._scaled_mm.out(a, b, scale, scale, out_dtype=out.dtype, out=out)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _gelu(x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu.out(x, out=out)


def _gelu_backward(gradient: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(gradient, x, grad_input=out)


def _softmax(x: Tensor, out: Tensor) -> None:
    torch.softmax(x, -1, out=out)
