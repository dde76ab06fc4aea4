"""Models for benchmarks of planned memory. Tests use only the models of ``memory_models.py``.

``MODELS`` are ten models, including those of the tests. ``HELD_OUT`` are models of other kinds,
written after the planner, which was not tuned on them. The memory of ``WEIGHT_BOUND`` models is
mostly weights, so their peak is at the end of backward. Then reductions are in flight, for which
gloo ranks allocate receive buffers. The peak of other models is mostly at the end of forward,
without such buffers.
"""

# mypy: disable-error-code="no-any-return"
# Calls of modules return Any. Annotating each result is not worthwhile.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.planner.simulation import memory_models, memory_runs
from tests.planner.simulation.memory_models import (
    WORDS,
    Convolutions,
    MemoryModel,
    TokenModel,
    decoder,
    images,
    llama,
    mlp,
    of_transformers,
    tokens,
)


def t5(width: int, inner: int, size: int, depth: int, heads: int, **options: Any) -> nn.Module:
    sizes = {"d_model": width, "d_ff": inner, "d_kv": size, "num_layers": depth}
    options = {"vocab_size": WORDS, "decoder_start_token_id": 0, "num_heads": heads, **options}
    return of_transformers("T5", "ForConditionalGeneration", **sizes, **options)


def vit() -> nn.Module:
    sizes = {"hidden_size": 192, "num_hidden_layers": 5, "intermediate_size": 768}
    sizes |= {"num_attention_heads": 6, "image_size": 64, "patch_size": 8, "num_labels": 10}
    return of_transformers("ViT", "ForImageClassification", hidden_dropout_prob=0.1, **sizes)


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


class Experts(nn.Module):
    """A mixture of experts of which each takes a fixed number of tokens, so that no shape depends
    on values (GShard's dispatch by a one-hot tensor)."""

    def __init__(self, width: int, num_experts: int = 6, capacity: float = 1.25) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.02)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
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


class UNet(nn.Module):
    """Outputs of the way down are concatenated on the way up."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.stem = Convolutions(3, widths[0])
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(Convolutions(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 10, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        kept = [self.stem(pixel_values)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return F.cross_entropy(self.head(x), labels[:, None, None].expand(-1, *x.shape[-2:]))


class RoutedExperts(nn.Module):
    """A loop over experts, weighted by their gates. Only the ``top`` largest gates are not zero."""

    def __init__(self, width: int, num_experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, 2, nn.SiLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gates, chosen = self.gate(normed).topk(self.top, -1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype)
        weights = weights.scatter(-1, chosen, gates.softmax(-1))
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + weights[..., number, None] * expert(normed)
        return x + mixed


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, 4)
        self.experts = RoutedExperts(width, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x + self.attention(self.norm(x), causal=True))


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = SelfAttention(width, heads)
        self.mlp = mlp(width, 4, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class PatchModel(nn.Module):
    """Blocks over patches of images and a class token, which the head reads.

    Args:
        num_positions: Number of learned positions, one for each patch and the token; 0: none. A
            model with positions has a norm before the head.
        is_head_first: Whether the head is registered before the blocks.
    """

    def __init__(
        self,
        width: int,
        patch: int,
        blocks: Iterable[nn.Module],
        head: nn.Module,
        *,
        num_positions: int = 0,
        is_head_first: bool = False,
    ) -> None:
        super().__init__()
        if is_head_first:
            self.head = head
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        positions = nn.Parameter(torch.zeros(1, num_positions, width))
        self.positions = positions if num_positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width) if num_positions else nn.Identity()
        self.head = head

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


def many_classes(width: int = 160) -> nn.Module:
    """The head has more weights than all blocks."""
    blocks = (EncoderBlock(width, 5) for _ in range(4))
    return PatchModel(width, 8, blocks, nn.Linear(width, 16000), num_positions=65)


class ScaledBlock(nn.Module):
    """ConvNeXt's: a depthwise convolution, a norm of channels, products, a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4)]
        for before, width in zip((None, *widths), widths, strict=False):
            if before is not None:
                stages.append(nn.Conv2d(before, width, 2, stride=2))
            stages += [ScaledBlock(width) for _ in range(2)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(pixel_values).mean((2, 3))), labels)


class GatedRecurrence(nn.Module):
    """A diagonal linear recurrence over time, in a loop of Python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        values, decays, gates = self.into(self.norm(x)).chunk(3, -1)
        decays = decays.sigmoid()
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = decays[:, step] * state + values[:, step]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * F.silu(gates))


class Recommender(nn.Module):
    """Tables of categories, their products with each other, and a network on these."""

    def __init__(self, tables: int = 6, rows: int = 4000, width: int = 48) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, width))
        pairs = (tables + 1) * tables // 2
        hidden = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1))
        self.top = nn.Sequential(nn.Linear(width + pairs, 768), nn.ReLU(), *hidden)

    def forward(self, categories: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
        dense = self.dense(numbers)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        rows = torch.stack([dense, *found], 1)
        products = torch.bmm(rows, rows.mT)
        above = torch.triu_indices(rows.shape[1], rows.shape[1], 1)
        x = torch.cat([dense, products[:, above[0], above[1]]], 1)
        return F.binary_cross_entropy_with_logits(self.top(x)[:, 0], labels)


class MessagePassing(nn.Module):
    """Messages along the edges of a graph, summed at their ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, width))
        self.update = nn.Linear(2 * width, width)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.message(torch.cat([nodes[source], nodes[target]], -1))
        summed = torch.zeros_like(nodes).index_add(0, target, sent)
        return nodes + self.norm(self.update(torch.cat([nodes, summed], -1)))


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 40)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x = self.into(nodes)
        for layer in self.layers:
            x = layer(x, source, target)
        return F.cross_entropy(self.head(x), labels)


class ModulatedBlock(nn.Module):
    """A block of a diffusion transformer: norms without weights, modulated by the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, 6)
        self.mlp = mlp(width, 4, nn.GELU(approximate="tanh"))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(time))[:, None]
        shift, scale, gate, other_shift, other_scale, other_gate = modulation.chunk(6, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self.attention(normed)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + other_scale) + other_shift
        return x + other_gate * self.mlp(normed)


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 192, num_blocks: int = 4) -> None:
        super().__init__()
        self.width = width
        self.into = nn.Conv2d(3, width, 4, stride=4)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width) for _ in range(num_blocks))
        self.out = nn.Linear(width, 3 * 4 * 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = labels[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.into(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, time)
        target = F.pixel_unshuffle(pixel_values, 4).flatten(2).transpose(1, 2)
        return F.mse_loss(self.out(x), target)


def clicks(rows: int) -> dict[str, Tensor]:
    return {
        "categories": torch.randint(4000, (rows, 6, 4)),
        "numbers": torch.randn(rows, 16),
        "labels": torch.ones(rows),
    }


def graph(nodes: int, edges: int) -> dict[str, Tensor]:
    return {
        "nodes": torch.randn(nodes, 16),
        "source": torch.randint(nodes, (edges,)),
        "target": torch.randint(nodes, (edges,)),
        "labels": torch.randint(40, (nodes,)),
    }


HELD_OUT = {
    "U-Net": MemoryModel(UNet, lambda: images(4, 64)),
    "routed experts": MemoryModel(
        lambda: TokenModel(128, (ExpertBlock(128) for _ in range(3)), bias=False),
        lambda: tokens(4, 64),
    ),
    "grouped experts": MemoryModel(
        lambda: decoder("Mixtral", 128, 256, 3, 4, 2, num_local_experts=8), lambda: tokens(2, 128)
    ),
    "many classes": MemoryModel(many_classes, lambda: images(8, 64)),
    "Qwen3": MemoryModel(
        lambda: decoder("Qwen3", 192, 512, 4, 6, 2, head_dim=64, tie_word_embeddings=True),
        lambda: tokens(2, 128),
    ),
    "gated T5": MemoryModel(
        lambda: t5(
            *(160, 448, 40, 4, 4), feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
        lambda: tokens(4, 64),
    ),
    "ConvNeXt": MemoryModel(ConvNeXt, lambda: images(4, 96)),
    "recurrence": MemoryModel(
        lambda: TokenModel(224, (GatedRecurrence(224) for _ in range(4)), is_tied=True),
        lambda: tokens(32, 16),
    ),
    "recommender": MemoryModel(Recommender, lambda: clicks(512)),
    "graph network": MemoryModel(GraphNetwork, lambda: graph(512, 2048)),
    "diffusion": MemoryModel(DiffusionTransformer, lambda: images(4, 48)),
}


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        conv = nn.Conv2d(width, outputs, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class StagedUNet(nn.Module):
    """Stages are attributes, and not in a list."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = _stage(3, width)
        self.down = _stage(width, 2 * width)
        self.middle = _stage(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge = _stage(4 * width, 2 * width)
        self.last_up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = _stage(2 * width, width)
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        first = self.enter(pixel_values)
        second = self.down(F.max_pool2d(first, 2))
        x = self.up(self.middle(F.max_pool2d(second, 2)))
        x = self.last_up(self.merge(torch.cat([x, second], 1)))
        x = self.head(self.leave(torch.cat([x, first], 1)))
        return F.cross_entropy(x, labels[:, None, None].expand(-1, *x.shape[-2:]))


def small_vit(width: int = 160) -> nn.Module:
    """torch's encoder layers; the head is registered first."""
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4))
    return PatchModel(width, 16, layers, nn.Linear(width, 10), is_head_first=True)


MODELS = {
    **memory_models.MODELS,
    "grouped heads": MemoryModel(lambda: llama(8, 2), lambda: tokens(2, 128)),
    "encoder-decoder": MemoryModel(
        lambda: t5(192, 512, 32, 3, 6, tie_word_embeddings=True), lambda: tokens(4, 64)
    ),
    "mixture of experts": MemoryModel(
        lambda: TokenModel(160, (Experts(160) for _ in range(3))), lambda: tokens(4, 128)
    ),
    "ViT": MemoryModel(vit, lambda: images(8, 64)),
    "convolution net": MemoryModel(
        lambda: memory_models.ConvolutionNet(batch=False), lambda: images(4, 128)
    ),
    "LoRA": MemoryModel(lora, lambda: tokens(2, 128)),
}
del MODELS["weighted experts"]
WEIGHT_BOUND = {
    "staged U-Net": MemoryModel(StagedUNet, lambda: images(2, 32)),
    "weighted experts": memory_models.MODELS["weighted experts"],
    "small ViT": MemoryModel(small_vit, lambda: images(2, 64)),
}
memory_runs.MODELS.update({**MODELS, **HELD_OUT, **WEIGHT_BOUND})
