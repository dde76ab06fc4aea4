"""Timings of one rank for ``calibrate``: matrix products, memory, attention, functions, the host.

*Warm* operands are the operands of the previous call, which are in caches. *Cold* operands differ
in each call, and their total size exceeds the caches, as in training, where a step uses every
tensor once.
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

from fsdp_engine.kernel_interface import Hardware, allocator
from fsdp_engine.planner.simulation.machine import Processor

Action = Callable[[], object]

_CACHES = 2**27  # bytes; larger than any cache
_LEAST, _MOST = 5, 200  # numbers of repetitions


class Kernels:
    """Times kernels on one device.

    Args:
        device: The device.
        turns: Number of threads of all ranks per core, at least 1. Threads that share a core
            compute in turns.
        seconds: Measurement time of each kernel.
        agree: Combines the ranks' values, for example by the maximum.
    """

    def __init__(
        self, device: torch.device, turns: float, seconds: float, agree: Callable[[float], float]
    ) -> None:
        self._device = device
        self._hardware = Hardware(device)
        self._on_host = self._hardware.is_host
        self._turns = turns
        self._seconds = seconds
        self._agree = agree
        # Rows, inner size and columns of products, as in small and in large transformers.
        self._sizes = (256, 256, 512) if self._on_host else (8192, 4096, 4096)
        # Number of tokens, number of heads, size of heads, lengths of sequences.
        self._attention = (
            (2048, 4, 64, (128, 2048)) if self._on_host else (16384, 16, 128, (512, 8192))
        )
        # Elements of an elementwise operation.
        self._elements = 2**19 if self._on_host else 2**26

    def matrix_flops(self, dtype: torch.dtype) -> float:
        """Returns the floating-point operations per second of products with warm operands."""
        product = _scaled_product if dtype == torch.float8_e4m3fn else _product
        return self._flops() / self._time(partial(product, *self._operands(dtype)))

    def memory_bandwidth(self) -> float:
        """Returns the bytes per second of copies of cold tensors. On a device, sums of two tensors
        are measured instead, since they are more frequent there than copies, and slower."""
        count, action = (2, _copy) if self._on_host else (3, _sum)
        seconds = self._time(
            partial(_with_next, action, self._cold(partial(self._matrices, count)))
        )
        return count * 4 * self._elements / seconds

    def overlap(self, flops: float, bandwidth: float) -> float:
        """Returns the overlap of memory access and compute (see :class:`Processor`), measured by
        products with cold operands in fp32.

        Args:
            flops: Floating-point operations per second with warm operands.
            bandwidth: Bytes per second of the memory.
        """
        if not self._on_host:
            return 1.0
        sets = self._cold(partial(self._operands, torch.float32))
        computing = self._flops() / flops
        rows, inner, columns = self._sizes
        moving = 4 * (rows * inner + inner * columns + rows * columns) / bandwidth
        hidden = computing + moving - self._time(partial(_with_next, _product, sets))
        return min(max(hidden / min(computing, moving), 0.0), 1.0)

    def attention(self, flops: float, dtype: torch.dtype) -> dict[str, float]:
        """Returns the figures of attention in :class:`Processor`, by name, measured with forward
        and backward on short and long sequences, and with causal attention on long sequences.

        Args:
            flops: Floating-point operations per second of products.
            dtype: The dtype of the sequences.
        """
        tokens, heads, size, (short, long) = self._attention
        of_short_ones, of_long_ones, of_causal_ones = (
            self._attention_seconds((tokens // length, heads, length, size), dtype, is_causal)
            for length, is_causal in ((short, False), (long, False), (long, True))
        )
        # The time per key is that of very long sequences times 1 + attention_length / length.
        of_short, of_long = sum(of_short_ones) / short, sum(of_long_ones) / long
        extra = max(of_short - of_long, 0.0) / (1 / short - 1 / long)
        attention_length = min(extra / max(of_long - extra / long, 1e-30), float(long))
        # Attention has two products in forward, and five in backward.
        product = 2 * tokens * heads * long * size
        slowdown = (1 + attention_length / long) / flops
        of_forward, of_backward = of_long_ones
        # With n blocks, causal attention computes (n + 1) / 2n of the products.
        block = (2 * sum(of_causal_ones) / sum(of_long_ones) - 1) * long
        return {
            "attention_share": min(2 * product / of_forward * slowdown, 1.0),
            "attention_backward_share": min(5 * product / of_backward * slowdown, 1.0),
            "attention_length": attention_length,
            "causal_block": min(max(block, 16.0), float(long)),
        }

    def function_seconds(self, bandwidth: float) -> float:
        """Returns the seconds per element of functions, in addition to memory access: the mean of
        gelu, its backward and softmax, with cold tensors.

        Args:
            bandwidth: Bytes per second of the memory.
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

    def irregular_seconds(self, bandwidth: float) -> float:
        """Returns the seconds per element of operations that do not stream through memory, in
        addition to memory access: the mean of a product with a broadcast row, a copy of transposed
        heads, and a cast to a wider dtype. 0 on a host.

        Args:
            bandwidth: Bytes per second of the memory.
        """
        if self._on_host:
            return 0.0
        x = self._random((self._elements // 4096, 4096), torch.bfloat16)
        row, heads = x[0].clone(), x.view(-1, 64, 32, 128).transpose(1, 2)
        found = []
        for action, num_bytes in (
            (partial(torch.mul, x, row), 4),
            (heads.contiguous, 4),
            (partial(x.to, torch.float32), 6),
        ):
            seconds = self._time(action)
            found.append(max(seconds / x.numel() - num_bytes / bandwidth, 0.0))
        return statistics.mean(found)

    def fused(self, bandwidth: float) -> dict[str, Any]:
        """Returns the figures of :class:`Processor` for kernels that ``torch.compile`` fuses, by
        name, measured with cold tensors: the mean rate of a norm and of a product with a sum, as a
        fraction of ``bandwidth``; and on a host the seconds of functions as in
        :meth:`function_seconds`.

        Args:
            bandwidth: Bytes per second of the memory.

        Raises:
            RuntimeError: The compiler found no C++ compiler, or failed.
        """

        def seconds(function: Callable[..., None], num_tensors: int) -> float:
            compiled = torch.compile(function, dynamic=False)
            sets = self._cold(partial(self._matrices, num_tensors))
            return self._time(partial(_with_next, compiled, sets))

        tensor_bytes = 4 * self._elements
        plain = ((_product_and_sum, 4), (_norm, 2))
        rates = [num * tensor_bytes / seconds(function, num) for function, num in plain]
        rate = statistics.mean(rates)
        if not self._on_host:
            return {"fused_share": rate / bandwidth}
        functions = ((_gelu_of, 2), (_gelu_backward_of, 3), (_softmax_of, 2))
        found = [
            max(seconds(function, num) - num * tensor_bytes / rate, 0.0) / self._elements
            for function, num in functions
        ]
        return {
            "fused_share": rate / bandwidth,
            "fused_function_seconds": statistics.mean(found),
        }

    def attention_head(self, dtype: torch.dtype) -> float:
        """Returns ``attention_head`` of :class:`Processor`, from heads of full and half size; 0 on
        a host.

        Args:
            dtype: The dtype of the sequences.
        """
        if self._on_host:
            return 0.0
        tokens, heads, size, (_, long) = self._attention
        of_full, of_half = (
            sum(
                self._attention_seconds((tokens // long, heads * parts, long, size // parts), dtype)
            )
            for parts in (1, 2)  # both have the same flops
        )
        # The ratio of the times is (1 + 2 h / n) / (1 + h / n), for the figure h and the size n.
        ratio = min(max(of_half / of_full, 1.0), 1.9)
        return size * (ratio - 1) / (2 - ratio)

    def call_seconds(self) -> float:
        """Returns the minimum duration of a kernel in a device's queue; 0 on a host."""
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
        """Returns the host time per operation: the time of a step of a tiny network with forward,
        backward and AdamW, including modules and autograd, divided by the number of operations."""
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
        """Returns the fraction of this thread's turns on a CPU in which it could not compute
        products, since other programs used the CPU; 0 on a device."""
        if not self._on_host:
            return 0.0
        operands = self._operands(torch.float32)
        wall, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < self._seconds:
            _product(*operands)
        own = time.thread_time() - own
        return self._agree(max(1.0 - self._turns * own / (time.perf_counter() - wall), 0.0))

    def processor(
        self, dtypes: Sequence[torch.dtype], memory_bytes: float, compiled: bool = False
    ) -> Processor:
        """Measure all figures of the processor.

        Args:
            dtypes: The dtypes of products. On a device, attention is timed in the last one.
            memory_bytes: Memory of the rank.
            compiled: Whether to measure the figures of fused kernels, too.
        """
        flops = {dtype: self.matrix_flops(dtype) for dtype in dtypes}
        bandwidth = self.memory_bandwidth()
        # On a CPU attention is timed in fp32, since its attention kernels do not use matrix units
        # for narrower dtypes.
        dtype = torch.float32 if self._on_host else dtypes[-1]
        return Processor(
            flops,
            bandwidth,
            memory_bytes,
            call_seconds=self.call_seconds(),
            overlap=self.overlap(flops[torch.float32], bandwidth),
            function_seconds=self.function_seconds(bandwidth),
            irregular_seconds=self.irregular_seconds(bandwidth),
            attention_head=self.attention_head(dtype),
            **self.attention(flops[dtype], dtype),
            **(self.fused(bandwidth) if compiled else {}),
        )

    def _attention_seconds(
        self, shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool = False
    ) -> tuple[float, float]:
        """Returns the seconds of forward and of backward. ``shape`` is (rows, heads, length,
        size)."""
        query, key, value = inputs = [self._random(shape, dtype).requires_grad_() for _ in range(3)]
        forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=is_causal)
        out, grad = forward(), self._random(shape, dtype)
        backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
        return self._time(forward), self._time(backward)

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
        """Returns random values. A GPU multiplies constants faster, since bits that do not change
        take less power."""
        generator = torch.Generator(self._device).manual_seed(0)
        return allocator.zeros(shape, dtype, self._device).normal_(generator=generator)

    def _ones(self, numel: int) -> Tensor:
        return allocator.zeros(numel, torch.float32, self._device) + 1

    def _cold(self, make: Callable[[], list[Tensor]]) -> itertools.cycle[list[Tensor]]:
        """Returns a cycle of operand sets whose total size exceeds the caches."""
        first = make()
        count = math.ceil(_CACHES / sum(each.nbytes for each in first))
        return itertools.cycle([first, *(make() for _ in range(count))])

    def _time(self, action: Action, timed: Callable[[Action], float] | None = None) -> float:
        """Returns the median duration in seconds, combined over the ranks by ``agree``."""
        timed = timed or (self._host_time if self._on_host else self._hardware.seconds)
        for _ in range(2):
            action()
        once = self._agree(timed(action))
        count = min(max(round(self._seconds / max(once, 1e-6)), _LEAST), _MOST)
        found = statistics.median(timed(action) for _ in range(count))
        self._hardware.finish()
        return self._agree(found)

    def _host_time(self, action: Action) -> float:
        if not self._on_host:
            # The backward of a device runs in a thread of its own, and this thread waits for it.
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        # Processor time, to exclude other programs.
        start = time.thread_time()
        action()
        return (time.thread_time() - start) * self._turns


class _Calls(TorchDispatchMode):
    """Counts in ``number`` the operations that a simulation counts as calls."""

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


def _sum(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


def _gelu(x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu.out(x, out=out)


def _gelu_backward(gradient: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(gradient, x, grad_input=out)


def _softmax(x: Tensor, out: Tensor) -> None:
    torch.softmax(x, -1, out=out)


# Functions that ``torch.compile`` compiles to one kernel each.


def _product_and_sum(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> None:
    out.copy_(x * y + z)


def _norm(x: Tensor, out: Tensor) -> None:
    out.copy_(F.rms_norm(x, x.shape[-1:]))


def _gelu_of(x: Tensor, out: Tensor) -> None:
    out.copy_(F.gelu(x))


def _gelu_backward_of(gradient: Tensor, x: Tensor, out: Tensor) -> None:
    out.copy_(torch.ops.aten.gelu_backward(gradient, x))


def _softmax_of(x: Tensor, out: Tensor) -> None:
    out.copy_(torch.softmax(x, -1))
