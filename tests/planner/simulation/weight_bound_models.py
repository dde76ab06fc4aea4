"""Models whose weights are most of their memory, so that the peak is at the end of backward.

There reductions are in flight, which ranks over gloo receive into memory of their own. Peaks of
other models are mostly where forward ends, and have none of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.planner.simulation.heldout_models import PatchModel
from tests.planner.simulation.memory_models import MemoryModel, TokenModel, images, mlp, tokens


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


def small_vit(width: int = 160) -> nn.Module:
    """torch's encoder layers; the head is registered first."""
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4))
    return PatchModel(width, 16, layers, nn.Linear(width, 10), is_head_first=True)


WEIGHT_BOUND = {
    "staged U-Net": MemoryModel(StagedUNet, lambda: images(2, 32)),
    "weighted experts": MemoryModel(
        lambda: TokenModel(128, (WeightedExperts(128) for _ in range(4))), lambda: tokens(2, 16)
    ),
    "small ViT": MemoryModel(small_vit, lambda: images(2, 64)),
}
