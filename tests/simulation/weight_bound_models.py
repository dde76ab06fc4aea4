"""Models whose weights are most of their memory, so that the peak is at the end of backward.

There reductions are in flight, which ranks over gloo receive into memory of their own. Peaks of
other models are mostly where forward ends, and have none of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.simulation.memory_models import WORDS, MemoryModel, images, tokens


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


class WeightedExperts(nn.Module):
    """Every expert computes every token; gates weight their outputs."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(num_experts)
        )
        self.gate = nn.Linear(width, num_experts)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gates = self.gate(normed).softmax(-1)
        made = torch.stack([expert(normed) for expert in self.experts], -1)
        return x + (made * gates[..., None, :]).sum(-1)


class ExpertsModel(nn.Module):
    def __init__(self, width: int = 128, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(WeightedExperts(width, 6) for _ in range(num_blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SmallViT(nn.Module):
    """torch's encoder layers, over patches and a token of classes."""

    def __init__(self, width: int = 160, num_blocks: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            for _ in range(num_blocks)
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


WEIGHT_BOUND = {
    "staged U-Net": MemoryModel("stages as attributes", StagedUNet, lambda: images(2, 32)),
    "weighted experts": MemoryModel("a sum of all experts", ExpertsModel, lambda: tokens(2, 16)),
    "small ViT": MemoryModel("a head registered first", SmallViT, lambda: images(2, 64)),
}
