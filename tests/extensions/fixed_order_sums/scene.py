"""A model with dropout, batch normalization, tied weights and a rarely used weight, trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.training import mesh_of

Values = dict[str, bytes]


class Net(nn.Module):
    """Returns a loss for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5)) for _ in "ab")
        self.rare = nn.Parameter(torch.eye(7))
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, *, is_rare: bool) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.last(x @ self.rare if is_rare else x).square().mean(1)
        return loss


@dataclass(frozen=True)
class Training:
    """A run of steps of ``leaves`` microbatches each.

    Attributes:
        pair: Inner and outer level.
        shape: Sizes of the axes of the mesh; (): the default of ``shard``.
        mp_policy: Dtypes.
        extensions: Makes other extensions.
        has_means: Whether losses are means over samples.
        optimizer: Makes the optimizer.
    """

    pair: tuple[str, str] = ("optim_grads_params", "no_shard")
    shape: tuple[int, ...] = ()
    leaves: int = 12
    mp_policy: fe.MixedPrecisionPolicy | None = None
    extensions: Callable[[], Sequence[fe.EngineExtension]] = tuple
    has_means: bool = False
    optimizer: Callable[[Any], torch.optim.Optimizer] = reference.adamw

    def but(self, **changes: Any) -> Training:
        """Returns this training with other attributes."""
        return replace(self, **changes)

    def start(self) -> Run:
        """Shard a model."""
        torch.manual_seed(0)
        model, sums = Net(), fe.FixedOrderSums(leaves=self.leaves)
        mesh = mesh_of(*self.shape) if self.shape else None
        engine = fe.shard(
            model,
            mesh,
            strategy=self.pair[0],
            outer_strategy=self.pair[1],
            extensions=[sums, *self.extensions()],
            mp_policy=self.mp_policy,
        )
        return Run(self, model, sums, engine, self.optimizer(model.parameters()), [])

    def run(self, steps: int = 3) -> Values:
        """Train, and return the bytes of the results."""
        run = self.start()
        for step in range(steps):
            run.step(step)
        return run.values()


def batch_of(step: int, leaf: int) -> tuple[Tensor, bool]:
    """Returns the samples of a leaf, of which there are three to five."""
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    return torch.randn(3 + leaf % 3, 7, generator=generator), leaf % 5 == 2


@dataclass
class Run:
    """A sharded model and its optimizer."""

    training: Training
    model: nn.Module
    sums: Any
    engine: Any
    optimizer: torch.optim.Optimizer
    norms: list[Tensor]

    def backward(self, step: int, leaf: int) -> None:
        """Run the microbatch of a leaf."""
        x, is_rare = batch_of(step, leaf)
        losses = self.model(x, is_rare=is_rare)
        if self.training.has_means:
            self.sums.mean_loss(self.engine, losses.sum(), len(x)).backward()
        else:
            losses.mean().backward()

    def step(self, step: int) -> None:
        """Run a step, clipped."""
        for leaf in self.sums.microbatches(self.engine, step):
            self.backward(step, leaf)
        self.norms.append(self.engine.clip_grad_norm_(0.1))
        self.optimizer.step()
        self.model.zero_grad()

    def values(self) -> Values:
        """Returns the bytes of weights, buffers, optimizer state and norms. Collective."""
        found: dict[str, Any] = dict(self.engine.full_state_dict())
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}.{key}"] = reference.full(value)
        found["norms"] = torch.stack(self.norms or [torch.zeros(())])
        found["loss"] = self.sums.last_mean_loss(self.engine)
        return {
            key: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for key, value in found.items()
            if isinstance(value, Tensor)
        }
