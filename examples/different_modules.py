"""Trains sharded models in which ranks use different modules in the same step.

    torchrun --nproc-per-node 2 examples/different_modules.py [--pattern "layer drop"] [--steps 30]
    python examples/different_modules.py

All ranks take part in each gather of sharded parameters. With other libraries, a rank that skips a
module hangs the others, so scripts send dummy batches through it. Here a step is run within
``engine.together()``. Gradients are those that one process with the batches of all ranks would
have, and a module that no rank used gets none.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe

WIDTH, ROWS = 32, 8


def layer() -> nn.Module:
    """The branch of a residual layer: (rows, width) to the same shape."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


class Towers(nn.Module):
    """A mixture of experts: a batch goes through the tower of its domain."""

    units = "towers.*"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(nn.Sequential(layer(), layer()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        """Returns a prediction for each row, (rows, 1)."""
        result: Tensor = self.head(self.towers[draw.randrange(4)](self.embed(x)))
        return result


class Layers(nn.Module):
    """A stack of layers. Subclasses choose which of them a batch uses."""

    units = "layers.*"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(6))

    def used(self, draw: random.Random) -> list[int]:
        """The layers of this batch."""
        raise NotImplementedError

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        """Returns a prediction for each row, (rows, 1)."""
        used = self.used(draw)
        for number in used:
            x = x + self.layers[number](x)
        result: Tensor = self.heads[used[-1] if used else 0](x)
        return result


class LayerDrop(Layers):
    """Each layer is left out with probability 0.3."""

    def used(self, draw: random.Random) -> list[int]:
        """See :class:`Layers`."""
        return [number for number in range(len(self.layers)) if draw.random() > 0.3]


class EarlyExit(Layers):
    """Each batch stops after a random layer, and uses the head of that layer."""

    def used(self, draw: random.Random) -> list[int]:
        """See :class:`Layers`."""
        return list(range(draw.randrange(1, len(self.layers) + 1)))


class MultiCrop(nn.Module):
    """As DINO: the trunk is called once for each size of crops that a batch has."""

    units = "trunk.*"

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(layer(), layer(), layer())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        """Returns a prediction for each row, (rows, 1)."""
        crops = [self.trunk(x * size) for size in range(1, draw.randrange(2, 5))]
        result: Tensor = self.head(torch.stack(crops).mean(0))
        return result


class Encoder(nn.Module):
    """A decoder, and an encoder that runs first, for some batches only, but is registered last."""

    units = ("decoder.*", "encoder.*")

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(layer(), layer())
        self.head = nn.Linear(WIDTH, 1)
        self.encoder = nn.Sequential(layer(), layer())

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        """Returns a prediction for each row, (rows, 1)."""
        if draw.random() < 0.3:
            x = x + self.encoder(x)
        result: Tensor = self.head(self.decoder(x))
        return result


class VisionLanguage(nn.Module):
    """A language model with a frozen vision tower and a projector; most batches are text only."""

    units = ("vision.*", "language.*")

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(layer(), layer()).requires_grad_(False)
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.language = nn.Sequential(layer(), layer(), layer())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        """Returns a prediction for each row, (rows, 1)."""
        for _ in range(draw.choice([0, 0, 0, 1, 2])):  # images of this batch
            x = x + self.projector(self.vision(x))
        result: Tensor = self.head(self.language(x))
        return result


PATTERNS: dict[str, Callable[[], nn.Module]] = {
    "conditional towers": Towers,
    "layer drop": LayerDrop,
    "early exit": EarlyExit,
    "multi-crop": MultiCrop,
    "encoder for some batches": Encoder,
    "text-only batches": VisionLanguage,
}


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor, random.Random]:
    """Inputs (rows, width), targets (rows, 1), and the generator that selects modules to use."""
    seed = 1000 * step + rank
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(x.sum(1, keepdim=True)), random.Random(seed)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The mean squared error of a rank's batch."""
    x, target, draw = batch_of(step, rank)
    return nn.functional.mse_loss(model(x, draw), target)


def train(pattern: str, steps: int) -> None:
    """Trains a model of ``pattern`` and prints how it went."""
    torch.manual_seed(0)
    model = PATTERNS[pattern]()
    engine = fe.shard(model, units=model.units, options=fe.Options(min_unit_size=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fe.shard_optimizer(optimizer)
    losses, unused = [], 0
    for step in range(steps):
        with engine.together():
            loss = loss_of(model, step, engine.ranks.rank)
            loss.backward()
        losses.append(loss.item())
        unused += sum(param.requires_grad and param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    if engine.ranks.rank == 0:
        third = max(steps // 3, 1)
        first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
        print(
            f"{pattern:26} loss {first:.3f} -> {last:.3f}; "
            f"{unused / steps:.1f} parameters a step were used by no rank"
        )


def main() -> None:
    """Parse the command line, and train each pattern."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pattern", choices=PATTERNS, help="default: all")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    for pattern in [args.pattern] if args.pattern else PATTERNS:
        train(pattern, args.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
