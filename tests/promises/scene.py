"""Where a trial on a whole model takes place: in plain torch with all rows, or sharded with some.

A trial is a function of one :class:`Scene`. It is called twice, and what it returns must be the
same; so must be the parameters, gradients and buffers that it leaves, and one more step of
training on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests.promises.trial import Outcome, Verdict, judge, outcome_of

ROWS = 3  # of each rank
WIDTH = 12


class Block(nn.Module):
    """A unit: a matrix that is cut in the middle of a row, a norm, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    """Two units, a parameter of the root's, and a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 7)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(x)


@dataclass
class Scene:
    """One side of a trial.

    Attributes:
        model: plain, or sharded.
        x: (rows, ``WIDTH``): all ranks' rows, or this rank's.
        engine: None in plain torch.
        rank: whose rows are compared.
        size: number of ranks.
    """

    model: Any
    x: Tensor
    engine: fe.Engine | None
    rank: int
    size: int

    def rows(self, y: Tensor) -> Tensor:
        """This rank's rows of ``y``."""
        return y if self.engine is not None else y.tensor_split(self.size)[self.rank]

    def per_row(self, gradient: Tensor) -> Tensor:
        """This rank's rows of a gradient by row, for a mean over this rank's rows alone."""
        return gradient if self.engine is not None else self.rows(gradient) * self.size

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks of a number that each computed from its rows."""
        value = value.detach().clone()
        if self.engine is not None:
            dist.all_reduce(value)
            value /= self.size
        return value

    def loss(self, x: Tensor | None = None) -> Tensor:
        """The mean over rows; its gradients are averaged over ranks."""
        return self.model(self.x if x is None else x).square().mean()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step of training; the loss."""
        loss = self.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return self.mean(loss)

    def sgd(self) -> torch.optim.SGD:
        """An optimizer of all parameters."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def full(self, tensor: Tensor) -> Tensor:
        """A whole tensor. Every rank must call."""
        return tensor.full_tensor() if isinstance(tensor, fe.FlatDTensor) else tensor


Trial = Callable[[Scene], Any]


@dataclass(frozen=True)
class Entry:
    """One trial of the catalogue.

    Attributes:
        name: what is tried, as users write it.
        trial: how; None: it does not apply.
        why: why it does not apply.
        goes_on: afterwards the model is trained one step more.
        make: the model, before it is sharded.
    """

    name: str
    trial: Trial | None
    why: str = ""
    goes_on: bool = True
    make: Callable[[], nn.Module] = Model


@dataclass
class Catalogue:
    """Trials of one kind, by the namespace that they cover."""

    entries: list[Entry]

    def tries(
        self,
        *names: str,
        goes_on: bool = True,
        make: Callable[[], nn.Module] = Model,
    ) -> Callable[[Trial], Trial]:
        """Enters a trial under one or several names."""

        def enter(trial: Trial) -> Trial:
            for name in names:
                self.entries.append(Entry(name, trial, goes_on=goes_on, make=make))
            return trial

        return enter

    def excludes(self, why: str, *names: str) -> None:
        """Enters names that do not apply."""
        self.entries += [Entry(name, None, why) for name in names]


def _state(scene: Scene) -> dict[str, Any]:
    model = scene.model
    named = dict(model.named_parameters())
    return {
        "parameters": named,
        "requires_grad": {name: p.requires_grad for name, p in named.items()},
        "gradients": {name: p.grad for name, p in named.items()},
        "buffers": dict(model.named_buffers()),
    }


def _goes_on(scene: Scene) -> dict[str, Any]:
    model = scene.model
    model.zero_grad()
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = scene.step(optimizer)
    return {"one more loss": loss, "after one more step": dict(model.named_parameters())}


def perform(entry: Entry, mesh: DeviceMesh, level: str) -> Outcome:
    """One trial at one level. Every rank must call alike.

    Returns:
        The worst of all ranks' outcomes.
    """
    assert entry.trial is not None
    rank, size = mesh.get_local_rank(), mesh.size()
    sides = []
    for sharded in (False, True):
        torch.default_generator.manual_seed(0)
        model = entry.make()
        x = torch.randn(size * ROWS, WIDTH)
        engine = fe.shard(model, mesh, level) if sharded else None
        if sharded:
            x = x.tensor_split(size)[rank].clone()
        sides.append(Scene(model, x, engine, rank, size))
    alone, ours = sides
    steps: list[Callable[[Scene], Any]] = [entry.trial, _state]
    outcome = Outcome(Verdict.RIGHT)
    for number, step in enumerate([*steps, _goes_on] if entry.goes_on else steps):
        outcome, ends = _agreed(_one_step(step, alone, ours), mesh)
        if ends:
            return Outcome(Verdict.RIGHT) if number else outcome
        if outcome.verdict is not Verdict.RIGHT:
            if number and outcome.verdict is Verdict.WRONG:
                return Outcome(Verdict.WRONG, f"afterwards: {outcome.note}")
            break
    return outcome


def _one_step(step: Callable[[Scene], Any], alone: Scene, ours: Scene) -> tuple[Outcome, bool]:
    """Its outcome, and whether plain torch refuses it."""
    sides = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scene in (alone, ours):
            torch.default_generator.manual_seed(1)
            sides.append(outcome_of(partial(step, scene)))
    return judge(*sides), sides[0][1] is not None


def _agreed(own: tuple[Outcome, bool], mesh: DeviceMesh) -> tuple[Outcome, bool]:
    """The worst of all ranks' outcomes: all go on, or none."""
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, own, group=mesh.get_group())
    worst: Outcome = max((outcome for outcome, _ in found), key=lambda each: each.verdict)
    verdicts = [outcome.verdict for outcome, _ in found]
    if worst.verdict is not Verdict.WRONG and len(set(verdicts)) > 1:
        names = ", ".join(each.name for each in verdicts)
        worst = Outcome(Verdict.WRONG, f"ranks differ: {names}: {worst.note}")
    return worst, own[1]
