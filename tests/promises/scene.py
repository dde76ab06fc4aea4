"""Scenes of trials on a model: plain torch with all ranks' rows, or sharded with this rank's rows.

A trial is a function of one :class:`Scene`. It is called twice, and what it returns must be the
same; so must be the parameters, gradients and buffers that it leaves, and one more step of
training on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests.promises.trial import Outcome, Verdict, judge, outcome_of

FOLDER = Path(__file__).parents[2]
ROWS = 3  # of each rank
WIDTH = 12


def names(space: str, *names: str) -> list[str]:
    """The names in a namespace."""
    return [f"{space}.{name}" for name in names]


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
    """One side of a trial: plain torch on all ranks' rows, or an engine on this rank's rows."""

    model: Any
    x: Tensor
    engine: fe.Engine | None
    rank: int
    size: int

    def rows(self, y: Tensor) -> Tensor:
        """This rank's rows of ``y``."""
        return y if self.engine is not None else y.tensor_split(self.size)[self.rank]

    def per_row(self, gradient: Tensor) -> Tensor:
        """This rank's rows of a per-row gradient, scaled to the mean over these rows alone."""
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
        return self.train(optimizer, 1)[0]

    def backward(self, x: Tensor | None = None) -> None:
        """Backward of the loss."""
        self.loss(x).backward()

    def mean_loss(self) -> Tensor:
        """The loss of all ranks' rows."""
        return self.mean(self.loss())

    def sgd(self) -> torch.optim.SGD:
        """An optimizer of all parameters."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        steps: int = 2,
        loss: Callable[[], Tensor] | None = None,
    ) -> list[Tensor]:
        """Steps of training, by default with SGD of trainable parameters; returns their losses."""
        if optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        losses = []
        for _ in range(steps):
            found = self.loss() if loss is None else loss()
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(self.mean(found))
        return losses

    def full(self, tensor: Tensor) -> Tensor:
        """A whole tensor. Every rank must call."""
        return tensor.full_tensor() if isinstance(tensor, fe.FlatDTensor) else tensor


Trial = Callable[[Scene], Any]
Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One trial of the catalogue."""

    name: str  # the expression, as users write it
    trial: Trial | None  # None: the name does not apply, or a test has the trial
    why: str = ""  # why the name does not apply, or the outcome and its test
    goes_on: bool = True  # whether the model is trained one step more afterwards
    make: Callable[[], nn.Module] = Model


@dataclass
class Catalogue:
    """Trials of one kind."""

    entries: list[Entry]

    def tries(self, *names: str, **options: Any) -> Callable[[Trial], Trial]:
        """Enters a trial under several names; ``options`` are other fields of entries."""

        def enter(trial: Trial) -> Trial:
            self.entries += [Entry(name, trial, **options) for name in names]
            return trial

        return enter

    def table(self, trials: Mapping[Names, Trial], **options: Any) -> None:
        """Enters trials by name, or by several names."""
        for names, trial in trials.items():
            self.tries(*([names] if isinstance(names, str) else names), **options)(trial)

    def changes(self, changes: Mapping[Names, Trial], **options: Any) -> None:
        """Enters trials of a change, after which the loss is compared."""

        def after(change: Trial) -> Trial:
            return lambda scene: (change(scene), scene.mean_loss())[1]

        self.table({names: after(change) for names, change in changes.items()}, **options)

    def trains(self, models: Mapping[Names, Callable[[], nn.Module]]) -> None:
        """Enters models that are trained for two steps, with one more backward at the end."""
        for names, make in models.items():
            self.table({names: lambda scene: (scene.train(), scene.backward())[0]}, make=make)

    def excludes(self, why: str, *names: str) -> None:
        """Enters names that do not apply."""
        self.entries += [Entry(name, None, why) for name in names]

    def elsewhere(self, test: str, *names: str, outcome: str = "right") -> None:
        """Enters names whose ``outcome`` the file ``test`` proves at every level."""
        assert (FOLDER / test).exists(), test
        self.excludes(f"{outcome} | `{test}`", *names)


def _state(scene: Scene) -> dict[str, Any]:
    named = dict(scene.model.named_parameters())
    return {
        "parameters": named,
        "requires_grad": {name: p.requires_grad for name, p in named.items()},
        "gradients": {name: p.grad for name, p in named.items()},
        "buffers": dict(scene.model.named_buffers()),
    }


def _goes_on(scene: Scene) -> dict[str, Any]:
    model = scene.model
    model.zero_grad()
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = scene.step(optimizer)
    return {"one more loss": loss, "after one more step": dict(model.named_parameters())}


def perform(entry: Entry, mesh: DeviceMesh, levels: Sequence[str]) -> dict[str, Outcome]:
    """One trial at several levels: by level, the worst of all ranks' outcomes. A collective."""
    alone = _scene(entry, mesh, None)
    ours = {level: _scene(entry, mesh, level) for level in levels}
    found: dict[str, Outcome] = {}
    assert entry.trial is not None
    for step in (entry.trial, _state, *([_goes_on] if entry.goes_on else [])):
        expected = _run(step, alone)
        if step is not entry.trial and expected[1] is not None:
            break  # plain torch cannot continue either
        for level, scene in list(ours.items()):
            outcome = _agreed(judge(expected, _run(step, scene)), mesh)
            if step is not entry.trial and outcome.verdict is Verdict.WRONG:
                outcome = Outcome(Verdict.WRONG, f"afterwards: {outcome.note}")
            found[level] = outcome
            if outcome.verdict is not Verdict.RIGHT:
                del ours[level]
    return found


def _scene(entry: Entry, mesh: DeviceMesh, level: str | None) -> Scene:
    rank, size = mesh.get_local_rank(), mesh.size()
    torch.default_generator.manual_seed(0)
    model = entry.make()
    x = torch.randn(size * ROWS, WIDTH)
    if level is None:
        return Scene(model, x, None, rank, size)
    engine = fe.shard(model, mesh, level)
    return Scene(model, x.tensor_split(size)[rank].clone(), engine, rank, size)


def _run(step: Trial, scene: Scene) -> tuple[Any, BaseException | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(1)
        return outcome_of(lambda: _kept(step(scene)))


def _kept(value: Any) -> Any:
    """``value`` with lists for iterators: it is compared several times."""
    if isinstance(value, Iterator):
        return [_kept(each) for each in value]
    if type(value) in (list, tuple):
        return type(value)(_kept(each) for each in value)
    return value


def _agreed(own: Outcome, mesh: DeviceMesh) -> Outcome:
    """The worst of all ranks' outcomes: all continue, or none."""
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, own, group=mesh.get_group())
    worst: Outcome = max(found, key=lambda each: each.verdict)
    if worst.verdict is not Verdict.WRONG and len({each.verdict for each in found}) > 1:
        names = ", ".join(each.verdict.name for each in found)
        return Outcome(Verdict.WRONG, f"ranks differ: {names}: {worst.note}")
    return worst
