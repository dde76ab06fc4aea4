"""A training script of torchtitan's pattern, which runs with FSDP2 and with this package's
``fsdp2``.

It gets a module with FSDP2's names as an argument, and is independent of the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_engine import fsdp2

APIS = {"fsdp2": fsdp, "fsdp_engine": fsdp2}
VOCABULARY, DIM, LENGTH = 37, 24, 6


class Layer(nn.Module):
    """Attention with rotated positions, and an MLP with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.mlp_norm = nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 50, bias=False), nn.Linear(DIM, 50, bias=False)
        self.down = nn.Linear(50, DIM)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = q * angles.cos().to(q), k * angles.cos().to(k)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def init_weights(self) -> None:
        for each in (self.norm, self.mlp_norm):
            each.reset_parameters()
        for each in (self.qkv, self.out, self.gate, self.up, self.down):
            nn.init.trunc_normal_(each.weight, std=0.1)
        nn.init.zeros_(self.down.bias)


class Model(nn.Module):
    """Embeddings, layers in a dict, norm and head; a buffer that no state dict has."""

    angles: Tensor

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, DIM)
        self.register_buffer("angles", self._angles(), persistent=False)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(num_layers)})
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def _angles(self) -> Tensor:
        return torch.arange(LENGTH * DIM, dtype=torch.float32).view(LENGTH, DIM) / 100

    def init_weights(self) -> None:
        """Initialize all parameters, sharded or not."""
        with torch.device(self.angles.device):
            self.angles = self._angles()
        nn.init.normal_(self.embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.head.weight, std=DIM**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.head(self.norm(x))


def batch(step: int, index: int, rank: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch of one rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parallelize(api: Any, model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Shard each layer, then embeddings, then norm and head as one group, then the model."""
    if mesh is not None:
        options["mesh"] = mesh
    for layer in model.layers.values():
        api.fully_shard(layer, **options)
    api.fully_shard(model.embeddings, **options)
    last = {"reshard_after_forward": False} if options.get("strategy", "") == "" else {}
    api.fully_shard([model.norm, model.head], **(options | last))
    api.fully_shard(model, **options)
    return model


@dataclass
class Log:
    """Results of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Log)
        torch.testing.assert_close(self.losses, other.losses, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(self.norms, other.norms, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(self.weights, other.weights, rtol=2e-4, atol=2e-5)
        return True


def whole(tensor: Any) -> Tensor:
    """All of a tensor that may be a DTensor, as a plain one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    num_microbatches: int = 1,
    before: Callable[[Any, int, bool], None] = lambda model, index, is_last: None,
    max_norm: float = 0.5,
) -> Log:
    """Steps of training.

    Args:
        before: called with the model, a microbatch's number and whether it is the step's last.
    """
    log, rank, size = Log(), dist.get_rank(), dist.get_world_size()
    for step in steps:
        total = torch.zeros(())
        for index in range(num_microbatches):
            before(model, index, index == num_microbatches - 1)
            loss = loss_of(model, *batch(step, index, rank)) / num_microbatches
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        log.norms.append(float(whole(norm)))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        log.losses.append(float(total / size))
    log.weights = {name: whole(value) for name, value in model.state_dict().items()}
    return log
