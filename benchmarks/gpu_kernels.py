"""Seconds and temporary memory of single operations on a GPU.

    python benchmarks/gpu_kernels.py                     # half a minute

Products, attention, elementwise operations and reductions of sizes that transformers have. Their
operands together mostly exceed the caches. Temporary memory is what an operation has allocated at
its peak beyond its results. From these figures the model of kernels in ``planner/simulation``
was made. Without a CUDA device the script runs tiny sizes and writes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from _gpu_models import card, mark, milliseconds, on_cuda, synchronize, the_device
from torch import Tensor
from torch.nn import functional as F

Kernel = Callable[[], Any]
BF16, FP32 = torch.bfloat16, torch.float32
REPETITIONS = 9
# A CPU runs tiny ones, to test the script.
TOKENS, WIDTH, INNER, VOCABULARY = (8192, 4096, 14336, 32000) if on_cuda() else (512, 256, 512, 64)
LARGE = 2**27 if on_cuda() else 2**12
# Output and inner sizes of products, and rows of products of WIDTH x WIDTH.
MATRICES = (256, 512, 768, 1024, 2048, 4096, 8192, 14336) if on_cuda() else (256,)
ROWS = (64, 256, 1024, 2048, 4096, 16384, 65536) if on_cuda() else (64,)
# Heads, size of heads, length.
SHAPES = ((32, 64, 2048), (32, 128, 512), (32, 128, 2048), (32, 128, 8192), (16, 256, 2048))
ATTENTION = SHAPES if on_cuda() else ((2, 16, 64),)


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=the_device(), dtype=torch.float32).to(dtype)


def products() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for size in MATRICES:
        x, weight = random(TOKENS, size), random(size, size)
        grad = random(TOKENS, size)
        found[f"product {TOKENS} x {size} x {size}"] = partial(F.linear, x, weight)
        found[f"product {TOKENS} x {size} x {size}, gradient of x"] = partial(
            torch.mm, grad, weight
        )
        found[f"product {TOKENS} x {size} x {size}, of weight"] = partial(torch.mm, grad.t(), x)
    for rows in ROWS:
        x, weight = random(rows, WIDTH), random(WIDTH, WIDTH)
        found[f"product {rows} x {WIDTH} x {WIDTH}"] = partial(F.linear, x, weight)
    return found


def attention() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for heads, size, length in ATTENTION:
        shape = (2 * TOKENS // length, heads, length, size)
        inputs = query, key, value = [random(*shape).requires_grad_() for _ in range(3)]
        for causal in (False, True):
            forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
            out = forward()
            grad = torch.randn_like(out)
            name = f"attention {length} long, heads of {size}{', causal' if causal else ''}"
            found[name] = forward
            found[f"{name}, backward"] = partial(
                torch.autograd.grad, out, inputs, grad, retain_graph=True
            )
    return found


def pointwise() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for dtype, label in ((BF16, "bf16"), (FP32, "fp32")):
        x, y, out = (random(TOKENS, WIDTH, dtype=dtype) for _ in range(3))
        row, column = random(WIDTH, dtype=dtype), random(TOKENS, 1, dtype=dtype)
        heads = x.view(4, TOKENS // 4, 32, WIDTH // 32)
        rotation = random(1, TOKENS // 4, 1, WIDTH // 32, dtype=dtype)
        found |= {
            f"x * y, {label}": partial(torch.mul, x, y),
            f"x + y, {label}": partial(torch.add, x, y),
            f"x + y in place, {label}": partial(out.add_, y),
            f"2 x, {label}": partial(torch.mul, x, 2.0),
            f"x * row, {label}": partial(torch.mul, x, row),
            f"x * column, {label}": partial(torch.mul, x, column),
            f"x * rotation, heads transposed, {label}": partial(
                torch.mul, heads.transpose(1, 2), rotation.transpose(1, 2)
            ),
            f"x + y, x transposed, {label}": partial(
                torch.add, heads.transpose(1, 2), y.view(4, 32, TOKENS // 4, WIDTH // 32)
            ),
            f"copy, {label}": partial(out.copy_, y),
            f"contiguous, heads transposed, {label}": heads.transpose(1, 2).contiguous,
            f"contiguous, transposed, {label}": x.t().contiguous,
            f"negation of halves, {label}": partial(torch.neg, heads[..., :64]),
            f"concatenation of halves, {label}": partial(
                torch.cat, (heads[..., :64], heads[..., 64:]), -1
            ),
            f"zeros, {label}": partial(torch.zeros_like, x),
            f"pow 2, {label}": partial(torch.pow, x, 2),
            f"sum of rows, {label}": partial(torch.sum, x, 0),
            f"sum of columns, {label}": partial(torch.sum, x, 1),
            f"mean of columns, {label}": partial(torch.mean, x, 1, True),
            f"softmax, {label}": partial(torch.softmax, x, -1),
        }
        wide, other = (random(TOKENS, INNER, dtype=dtype) for _ in range(2))
        found |= {
            f"silu, wide, {label}": partial(F.silu, wide),
            f"gelu, wide, {label}": partial(F.gelu, wide),
            f"x * y, wide, {label}": partial(torch.mul, wide, other),
            f"silu backward, wide, {label}": partial(torch.ops.aten.silu_backward, wide, other),
            f"gelu backward, wide, {label}": partial(torch.ops.aten.gelu_backward, wide, other),
        }
    large = random(LARGE, dtype=FP32)
    narrow = large.to(BF16)
    found |= {
        "bf16 of fp32": partial(large.to, BF16),
        "fp32 of bf16": partial(narrow.to, FP32),
        "copy bf16 into fp32": partial(large.copy_, narrow),
        "copy fp32 into bf16": partial(narrow.copy_, large),
        "zero, large": large.zero_,
    }
    x = random(TOKENS, WIDTH, dtype=BF16)
    found["bf16 + fp32"] = partial(torch.add, x, x.float())
    return found


def layers() -> dict[str, Kernel]:
    x, grad = random(TOKENS, WIDTH).requires_grad_(), random(TOKENS, WIDTH)
    weight, bias = (random(WIDTH).requires_grad_() for _ in range(2))
    found: dict[str, Kernel] = {}

    def add(name: str, forward: Kernel, inputs: list[Tensor], grad: Tensor) -> None:
        out = forward()
        found[name] = forward
        found[f"{name}, backward"] = partial(
            torch.autograd.grad, out, inputs, grad, retain_graph=True
        )

    add("layer_norm", partial(F.layer_norm, x, [WIDTH], weight, bias), [x, weight, bias], grad)
    add("rms_norm", partial(F.rms_norm, x, [WIDTH], weight, 1e-5), [x, weight], grad)
    add("dropout", partial(F.dropout, x, 0.1), [x], grad)
    logits = random(TOKENS, VOCABULARY, dtype=FP32).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device=the_device())
    one = torch.ones((), device=the_device())
    add("cross_entropy", partial(F.cross_entropy, logits, labels), [logits], one)
    table = random(VOCABULARY, WIDTH).requires_grad_()
    add("embedding", partial(F.embedding, labels, table), [table], grad)
    shapes = [(WIDTH, WIDTH), (WIDTH,), (INNER, WIDTH), (WIDTH, INNER)]
    params = [random(*shape, dtype=FP32).requires_grad_() for shape in shapes]
    grads = [torch.randn_like(each) for each in params]
    for each, its_grad in zip(params, grads, strict=True):
        each.grad = its_grad
    for fused in (True, False):
        optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)
        optimizer.step()
        found[f"AdamW, {'fused' if fused else 'foreach'}"] = optimizer.step
    found["norms of gradients"] = partial(torch._foreach_norm, grads)
    return found


GROUPS = (products, attention, pointwise, layers)


def seconds_of(kernel: Kernel) -> float:
    """The median time on the device."""
    found = []
    for _ in range(2 + REPETITIONS):
        begin = mark()
        kernel()
        end = mark()
        synchronize()
        found.append(milliseconds(begin, end) / 1e3)
    return statistics.median(found[2:])


def temporary_bytes(kernel: Kernel) -> int:
    """Bytes at the peak of an operation beyond those of its results."""
    synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    out = kernel()
    stats = torch.cuda.memory_stats()
    peak: int = stats["requested_bytes.all.peak"]
    held: int = stats["requested_bytes.all.current"]
    del out
    return peak - max(held, int(before))


def measure() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        for name, kernel in group().items():
            kernel()
            found = {"seconds": seconds_of(kernel)}
            if on_cuda():
                found["temporary bytes"] = temporary_bytes(kernel)
            results[name] = found
    return results


def main() -> None:
    results = measure()
    if on_cuda():
        harness.write_results(f"gpu_kernels_{card()}", results)


if __name__ == "__main__":
    main()
