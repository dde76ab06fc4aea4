"""Training scripts of torchtitan's pattern. They get a module with FSDP2's names as an argument:
FSDP2's own, or this package's ``fsdp2``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_engine import fsdp2
from tests.models import Block
from tests.reference import full, nothing, sgd

APIS = {"fsdp2": fsdp, "fsdp_engine": fsdp2}
VOCABULARY, DIM, LENGTH = 37, 24, 6


class Layer(Block):
    """Takes a buffer of the model beside its input."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return super().forward(x + angles.cos().to(x))


class Model(nn.Module):
    """Layers in a dict, and a buffer that is not in state dicts."""

    angles: Tensor

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, DIM)
        self.register_buffer("angles", self._angles(), persistent=False)
        self.layers = nn.ModuleDict({str(index): Layer(DIM) for index in range(num_layers)})
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def _angles(self) -> Tensor:
        return torch.arange(LENGTH * DIM, dtype=torch.float32).view(LENGTH, DIM) / 100

    def init_weights(self) -> None:
        with torch.device(self.angles.device):
            self.angles = self._angles()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding | nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def seeded(make: Callable[[], Model] = Model) -> Any:
    model = make()
    torch.manual_seed(3)
    model.init_weights()
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return Model()


def batch(step: int, index: int, rank: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch of one rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parallelize(api: Any, model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
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


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full(param.grad)
        for name, param in model.named_parameters()
        if param.grad is not None
    }


@dataclass
class Log:
    """Results of a run. Gradients are those of its first step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Log)
        torch.testing.assert_close(self.losses, other.losses, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(self.norms, other.norms, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(self.weights, other.weights, rtol=2e-4, atol=2e-5)
        return True


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    num_microbatches: int = 1,
    before: Callable[[Any, int, bool], object] = nothing,
    max_norm: float = 0.5,
    loss_of: Callable[..., Tensor] = loss_of,
) -> Log:
    """``before`` is called with the model, a microbatch's number and whether it is the last."""
    log, rank, size = Log(), dist.get_rank(), dist.get_world_size()
    for step in steps:
        total = torch.zeros(())
        for index in range(num_microbatches):
            before(model, index, index == num_microbatches - 1)
            loss = loss_of(model, *batch(step, index, rank)) / num_microbatches
            loss.backward()
            total += loss.detach()
        log.gradients = log.gradients or gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        log.norms.append(float(full(norm)))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        log.losses.append(float(total / size))
    log.weights = {name: full(value) for name, value in model.state_dict().items()}
    return log


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training script. Call it with the module that has FSDP2's names.

    Attributes:
        prepare: Changes the model before it is sharded.
        options: Makes options of ``parallelize``.
        set_up: Called with the sharded model, after its optimizer is built.
        loss_of, before, max_norm: Arguments of :func:`train`.
        rounds: Whether results are rounded to bf16. Tolerances of losses and norms are then larger.
        theirs: The program whose results under FSDP2 are expected; None: this program.
    """

    prepare: Callable[[Any], object] = nothing
    options: Callable[[Any], dict[str, Any]] = lambda api: {}
    shard: Callable[..., Any] = parallelize
    set_up: Callable[[Any], object] = nothing
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd
    loss_of: Callable[..., Tensor] = loss_of
    before: Callable[[Any, int, bool], object] = nothing
    steps: int = 2
    microbatches: int = 2
    max_norm: float = 0.5
    rounds: bool = False
    theirs: Program | None = None

    def __call__(self, api: Any) -> Log:
        model = seeded()
        self.prepare(model)
        model = self.shard(api, model, **self.options(api))
        optimizer = self.optimizer([each for each in model.parameters() if each.requires_grad])
        self.set_up(model)
        return train(
            model,
            optimizer,
            range(self.steps),
            num_microbatches=self.microbatches,
            before=self.before,
            max_norm=self.max_norm,
            loss_of=self.loss_of,
        )

    def check(self) -> None:
        """Assert that results are FSDP2's. A collective."""
        ours, theirs = self(fsdp2), _results_of_fsdp2(self.theirs or self)
        if self.rounds:
            torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(ours.norms, theirs.norms, rtol=2e-2, atol=2e-3)
            return
        assert ours == theirs
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-4, atol=1e-6)

    def but(self, **changes: Any) -> Program:
        """A copy with other attributes, for which the results of FSDP2 are the same."""
        return replace(self, theirs=self, **changes)


@functools.cache
def _results_of_fsdp2(program: Program) -> Log:
    return program(fsdp)


def assert_alike(compute: Callable[[Any], Any]) -> None:
    """``compute(api)`` gives the same tensors with FSDP2 and with this package."""
    torch.testing.assert_close(compute(fsdp2), compute(fsdp), rtol=1e-4, atol=1e-6)
