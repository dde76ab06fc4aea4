"""A training run in one object, compared with one process or with another run.

    run = Scenario(model=odd_model, batch=vector_batch, pair=("optim", "optim")).check()

``check`` trains one process on the batches of all ranks, trains the sharded model, and compares
losses, gradients, norms and weights of every step. ``assert_same_bits`` compares two runs of
sharded models::

    plain = Scenario(optimizer=adamw)
    assert_same_bits(plain.but(options={"checkpointing": True}).sharded(), plain.sharded())

Every rank calls the same. Without a process group there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests import reference
from tests.models import Transformer, token_batch
from tests.reference import BeforeStep, LossOf, OptimizerMaker, Step


@dataclass
class Run:
    """Results of a training run.

    Attributes:
        steps: Loss, gradients, norm and weights of each step; full tensors.
        model, optimizer: Their state after the run.
        engine: None for one process alone.
    """

    steps: list[Step]
    model: Any
    engine: Any
    optimizer: Any

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step.norm for step in self.steps]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Full parameters after the last step, by name."""
        return self.steps[-1].weights

    def state(self) -> dict[str, Tensor]:
        """Full state of the optimizer, as ``NAME.KEY``. A collective."""
        self.optimizer.state_dict()  # offloaded state: waits for copies to the host
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = reference.full(value) if torch.is_tensor(value) else value
        return found


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run.

    Attributes:
        model: Makes the model, after ``torch.manual_seed(seed)``.
        batch: ``batch(rows, seed)`` makes the batch of one rank.
        pair: Inner and outer level.
        mesh: The mesh, or its shape; None: what ``shard`` takes by default.
        options: Other arguments of ``shard``.
        shard: Called as ``fe.shard`` is; returns the engine.
        optimizer: Makes the optimizer from the parameters.
        wrap: Called with the optimizer of the sharded model: ``fe.shard_optimizer`` or ``nothing``.
        steps: Number of steps.
        microbatches: Number of microbatches in each step, or a sequence of numbers by step.
        rows: Rows of a batch.
        max_norm: Gradients are clipped to it.
        loss_of: The loss of a model and a batch.
        before_step: Called with the model and the number of the step.
        around: Makes a context for each microbatch of the sharded model from its engine.
        compute_dtype: Dtype of the one process's compute, or dtypes by parameter name.
        tolerance: Largest error of the first step, relative to the tensor's largest element.
        later: Largest error of the other steps; None: ``tolerance``.
    """

    model: Callable[[], nn.Module] = Transformer
    batch: Callable[[int, int], reference.Batch] = token_batch
    pair: tuple[str, str] = ("optim_grads_params", "no_shard")
    mesh: DeviceMesh | tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shard: Callable[..., Any] = fe.shard
    optimizer: OptimizerMaker = reference.sgd
    wrap: Callable[[torch.optim.Optimizer], Any] = reference.nothing
    steps: int = 2
    microbatches: int | Sequence[int] = 2
    rows: int = 2
    seed: int = 1
    max_norm: float = 1.0
    loss_of: LossOf = reference.loss_of
    before_step: BeforeStep = reference.nothing
    around: Callable[[Any], AbstractContextManager[Any]] = lambda engine: nullcontext()
    compute_dtype: torch.dtype | dict[str, torch.dtype] | None = None
    tolerance: float = 2e-5
    later: float | None = None

    def but(self, **changes: Any) -> Scenario:
        """A copy with other attributes. ``options`` are added to the present ones."""
        if "options" in changes:
            changes["options"] = {**self.options, **changes["options"]}
        return replace(self, **changes)

    def data(self) -> reference.Data:
        """Batches by step, microbatch and rank."""
        _, size = reference.rank_and_size()
        return reference.make_data(self.batch, self.steps, self.microbatches, size, self.rows)

    def made(self) -> nn.Module:
        """The model with its initial values."""
        torch.manual_seed(self.seed)
        return self.model()

    def sharded_model(self) -> tuple[nn.Module, Any]:
        """A new model and its engine."""
        model = self.made()
        inner, outer = self.pair
        engine = self.shard(
            model, self.mesh, strategy=inner, outer_strategy=outer, **dict(self.options)
        )
        return model, engine

    def alone(self) -> Run:
        """One process trains on the batches of all ranks."""
        model = self.made()
        if isinstance(self.compute_dtype, dict):
            model = model.float()
        make = reference.once(self.optimizer)
        steps = reference.train(
            model,
            self.data(),
            make,
            compute_dtype=self.compute_dtype,
            max_norm=self.max_norm,
            loss_of=self.loss_of,
            before_step=self.before_step,
        )
        return Run(steps, model, None, make(()))

    def sharded(self) -> Run:
        """The sharded model is trained, on this rank's batches."""
        model, engine = self.sharded_model()
        return self.train(model, engine)

    def train(self, model: nn.Module, engine: Any) -> Run:
        """Train a model that is sharded already."""
        make = reference.once(self.optimizer)
        steps = reference.train_sharded(
            model,
            engine,
            self.data(),
            make,
            max_norm=self.max_norm,
            wrap_optimizer=self.wrap,
            loss_of=self.loss_of,
            before_step=self.before_step,
            around=lambda: self.around(engine),
        )
        return Run(steps, model, engine, make(()))

    def differences(self, expected: Run | None = None) -> tuple[Run, list[str]]:
        """Run both. Returns the sharded run, and its values that differ from the one process.

        Args:
            expected: The run of the one process; None: it is run.
        """
        expected = expected or self.alone()
        run = self.sharded()
        later = self.tolerance if self.later is None else self.later
        return run, reference.differences(run.steps, expected.steps, later, first=self.tolerance)

    def check(self, expected: Run | None = None) -> Run:
        """Assert that the sharded model trains as one process does; return its run."""
        run, lines = self.differences(expected)
        assert not lines, "\n".join([f"{self.pair}, {self.options}:", *lines[:12]])
        return run


def assert_same_bits(run: Run, expected: Run) -> None:
    """Losses, norms, gradients, weights and optimizer state are equal. A collective."""
    lines = reference.differences(run.steps, expected.steps, 0.0)
    assert not lines, "\n".join(lines[:12])
    found, state = run.state(), expected.state()
    assert found.keys() == state.keys()
    for name, value in state.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, f"{name}: {found[name]}, expected {value}"
