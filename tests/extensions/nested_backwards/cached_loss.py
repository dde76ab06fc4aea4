"""A cached loss: its backward embeds mini-batches again, each in a backward within the backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests.reference import Batch
from tests.scenario import Scenario

WIDTH = 6


class Encoder(nn.Module):
    """Embeds rows; a row's embedding does not depend on other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: Tensor = self.norm(x)
        return result


class Rows:
    """Batches of a number of rows for each rank."""

    def __init__(self, *num_rows: int) -> None:
        self.num_rows = num_rows

    def __call__(self, rows: int, seed: int) -> Batch:
        num = self.num_rows[(seed % 100 - 1) % len(self.num_rows)]  # see reference.make_data
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(num, WIDTH, generator=generator, dtype=torch.float64),)


def pair_loss(embeddings: Tensor) -> Tensor:
    """A loss of all pairs of embeddings."""
    return (embeddings @ embeddings.T).logsumexp(1).mean() / WIDTH


def cached_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a batch. If sharded, its backward embeds mini-batches of 2 again (GradCache)."""
    if fe.engine.engine_of(model) is None:
        return pair_loss(model(*batch))
    parts = batch[0].split(2)
    with torch.no_grad():
        leaves = [model(part).to(batch[0].dtype) for part in parts]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = pair_loss(torch.cat(leaves))
    loss.backward()
    loss = loss.detach().requires_grad_()

    def embed_again(factor: Tensor) -> None:
        with torch.enable_grad():
            for part, leaf in zip(parts, leaves, strict=True):
                assert leaf.grad is not None
                (factor * (model(part) * leaf.grad).sum()).backward()

    loss.register_hook(embed_again)
    return loss


# One process computes each rank's batch by itself: a loss of pairs is no mean over rows.
cached = Scenario(
    model=lambda: Encoder().double(),
    batch=Rows(4),
    options={"units": "blocks.*"},
    compute_dtype=torch.float64,
    microbatches=(1, 2),
    max_norm=float("inf"),
    loss_of=cached_loss,
    tolerance=1e-9,
)
