"""Ten small models whose memory is planned and measured.

Weights, optimizer state and activations of each are of one order, some megabytes, and each has a
habit that matters to memory: see ``MODELS``. Everything they do can be done with fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 2048


@dataclass(frozen=True)
class MemoryModel:
    """One model.

    Attributes:
        what: the feature that it covers.
        build: returns the model.
        batch: returns its keyword arguments.
    """

    what: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    found = torch.randint(WORDS, (rows, length))
    return {"input_ids": found, "labels": found}


def images(rows: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows) % 10}


def llama(heads: int, kv_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=WORDS,
    )
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(  # type: ignore[call-arg]
        vocab_size=WORDS, d_model=192, d_ff=512, d_kv=32, num_layers=3, num_heads=6,
        tie_word_embeddings=True, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(  # type: ignore[call-arg]
        hidden_size=192, num_hidden_layers=5, num_attention_heads=6, intermediate_size=768,
        image_size=64, patch_size=8, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


class Experts(nn.Module):
    """A mixture of experts of which each takes a fixed number of tokens: nothing depends on values
    (GShard's dispatch by a one-hot tensor)."""

    def __init__(self, width: int, num_experts: int, capacity: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.02)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        num_experts = self.up.shape[0]
        room = int(self.capacity * flat.shape[0] / num_experts)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        mask = F.one_hot(chosen, num_experts)
        place = (mask.cumsum(0) * mask).sum(-1) - 1
        slot = F.one_hot(place.clamp(max=room), room + 1)[:, :room]
        dispatch = (mask.unsqueeze(-1) * slot.unsqueeze(1)).to(x.dtype)
        given = torch.einsum("tec,tw->ecw", dispatch, flat)
        hidden = F.gelu(torch.bmm(given, self.up))
        made = torch.bmm(hidden, self.down)
        combined = torch.einsum("tec,ecw->tw", dispatch * weight[:, None, None], made)
        return x + combined.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int = 160, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Experts(width, 6, 1.25) for _ in range(num_blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ConvolutionBlock(nn.Module):
    """Convolutions and norms that keep no statistics, or (``batch``) some in buffers."""

    def __init__(self, width: int, batch: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=not batch)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=not batch)
        norm: Any = nn.BatchNorm2d if batch else lambda w: nn.GroupNorm(8, w)
        self.norms = nn.ModuleDict({"first": norm(width), "second": norm(width)})

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms["first"](self.first(x)))
        return F.relu(x + self.norms["second"](self.second(y)))


class ConvolutionNet(nn.Module):
    def __init__(self, batch: bool, width: int = 128, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(ConvolutionBlock(width, batch) for _ in range(num_blocks)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 10)
        self.register_buffer("scale", torch.ones(width, 64, 64) if batch else None)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        if self.scale is not None:
            x = x * self.scale[:, : x.shape[-2], : x.shape[-1]]
        x = self.pool(F.max_pool2d(self.blocks(x), 2)).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class LSTMModel(nn.Module):
    def __init__(self, width: int = 224, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)[0] + x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """A frozen linear plus a trained product of two thin ones."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(self.dropout(x)))


def lora() -> nn.Module:
    model = llama(8, 8)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if hasattr(module, name):
                setattr(module, name, Adapted(getattr(module, name)))
    return model


class Squashed(torch.autograd.Function):
    """Keeps its input and a mask of bytes, and makes something in backward that goes at once."""

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


class CustomFunction(nn.Module):
    def __init__(self, width: int = 192, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(CustomBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MODELS = {
    "decoder": MemoryModel("Llama, all heads alike", lambda: llama(8, 8), lambda: tokens(2, 128)),
    "grouped heads": MemoryModel(
        "Llama, four query heads for one of keys", lambda: llama(8, 2), lambda: tokens(2, 128)
    ),
    "encoder-decoder": MemoryModel("T5, embeddings and head tied", t5, lambda: tokens(4, 64)),
    "mixture of experts": MemoryModel(
        "capacity for each expert, dispatch by one-hot", MixtureOfExperts, lambda: tokens(4, 128)
    ),
    "ViT": MemoryModel("images in patches, dropout", vit, lambda: images(8, 64)),
    "convolution net": MemoryModel(
        "group norms", lambda: ConvolutionNet(batch=False), lambda: images(4, 128)
    ),
    "LSTM": MemoryModel("recurrent layers", LSTMModel, lambda: tokens(4, 64)),
    "LoRA": MemoryModel("adapters in a frozen Llama", lora, lambda: tokens(2, 128)),
    "buffers": MemoryModel(
        "batch norms, and a large buffer",
        lambda: ConvolutionNet(batch=True),
        lambda: images(4, 128),
    ),
    "custom function": MemoryModel(
        "autograd.Function, dropout", CustomFunction, lambda: tokens(4, 128)
    ),
}
