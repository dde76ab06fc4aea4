"""Five small models of different kinds whose memory is planned and measured, and parts of them.

Models for benchmarks only are in ``benchmarks/_planner_models.py``. All models run on fake tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 2048


class MemoryModel(NamedTuple):
    """Makes a model, and its keyword arguments."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    found = torch.randint(WORDS, (rows, length))
    return {"input_ids": found, "labels": found}


def images(rows: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows) % 10}


def of_transformers(kind: str, head: str = "ForCausalLM", **options: Any) -> nn.Module:
    """A model of transformers by its kind and the options of its config."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(**options)
    model: nn.Module = getattr(transformers, kind + head)(config)
    return model


def decoder(
    kind: str, width: int, inner: int, depth: int, heads: int, kv_heads: int, **options: Any
) -> nn.Module:
    """A decoder of transformers by its sizes."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return of_transformers(kind, **sizes, **attention, **{"vocab_size": WORDS, **options})


def llama(heads: int, kv_heads: int) -> nn.Module:
    return decoder("Llama", 256, 704, 4, heads, kv_heads)


def mlp(width: int, times: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, times * width), activation, nn.Linear(times * width, width)
    )


class TokenModel(nn.Module):
    """Blocks between an embedding and a head, which may be tied to it.

    A block that returns a tuple gets a residual connection.
    """

    def __init__(
        self, width: int, blocks: Iterable[nn.Module], *, bias: bool = True, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = None if is_tied else nn.Linear(width, WORDS, bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            y = block(x)
            x = y[0] + x if isinstance(y, tuple) else y
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Two convolutions with a norm each. Between equal widths they may have a residual."""

    def __init__(
        self, inputs: int, width: int, norm: Any = nn.BatchNorm2d, *, is_residual: bool = False
    ) -> None:
        super().__init__()
        bias = norm is not nn.BatchNorm2d
        self.first = nn.Conv2d(inputs, width, 3, padding=1, bias=bias)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.norms = nn.ModuleDict({name: norm(width) for name in ("first", "second")})
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms["first"](self.first(x)))
        y = self.norms["second"](self.second(y))
        return F.relu(x + y if self.is_residual else y)


class ConvolutionNet(nn.Module):
    """Group norms, or with ``batch`` batch norms, which keep statistics in buffers."""

    def __init__(self, batch: bool, width: int = 128, num_blocks: int = 3) -> None:
        super().__init__()
        norm: Any = nn.BatchNorm2d if batch else lambda width: nn.GroupNorm(8, width)
        blocks = (Convolutions(width, width, norm, is_residual=True) for _ in range(num_blocks))
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 10)
        self.register_buffer("scale", torch.ones(width, 64, 64) if batch else None)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        if self.scale is not None:
            x = x * self.scale[:, : x.shape[-2], : x.shape[-1]]
        x = self.pool(F.max_pool2d(self.blocks(x), 2)).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class Squashed(torch.autograd.Function):
    """Keeps its input and a byte mask; backward makes a tensor that is freed at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        mask = x > 0
        ctx.save_for_backward(x, mask, scale)
        return torch.where(mask, x * scale, 0.1 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, mask, scale = ctx.saved_tensors
        slope = torch.where(mask, scale, 0.1)
        return grad * slope, (grad * x * mask).sum((0, 1))


class CustomBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.scale = nn.Parameter(torch.ones(4 * width))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Squashed.apply(self.up(self.norm(x)), self.scale)
        return x + F.dropout(self.down(hidden), 0.1, self.training)


class WeightedExperts(nn.Module):
    """Every expert computes every token; gates weight their outputs."""

    def __init__(self, width: int, num_experts: int = 6) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(width, 3, nn.GELU()) for _ in range(num_experts))
        self.gate = nn.Linear(width, num_experts)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gates = self.gate(normed).softmax(-1)
        made = torch.stack([expert(normed) for expert in self.experts], -1)
        return x + (made * gates[..., None, :]).sum(-1)


MODELS = {
    "decoder": MemoryModel(lambda: llama(8, 8), lambda: tokens(2, 128)),
    "LSTM": MemoryModel(
        lambda: TokenModel(224, (nn.LSTM(224, 224, batch_first=True) for _ in range(2))),
        lambda: tokens(4, 64),
    ),
    # Batch norms, and a large buffer.
    "buffers": MemoryModel(lambda: ConvolutionNet(batch=True), lambda: images(4, 128)),
    # An autograd.Function and dropout.
    "custom function": MemoryModel(
        lambda: TokenModel(192, (CustomBlock(192) for _ in range(4))), lambda: tokens(4, 128)
    ),
    # Its peak is at the end of backward.
    "weighted experts": MemoryModel(
        lambda: TokenModel(128, (WeightedExperts(128) for _ in range(4))), lambda: tokens(2, 16)
    ),
}
