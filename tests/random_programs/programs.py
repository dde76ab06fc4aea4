"""Random training programs: models, their use, and the comparison with one process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.pairs import PAIRS
from tests.random_programs import blocks
from tests.reference import full, mean_over_ranks, relative_error

ROWS = 2  # rows of each rank in a microbatch
# (kind, arguments): see Runner.
Operation = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    """A training run."""

    seed: int  # seed of the model, its values and the data
    width: int  # of the model's tensors
    dtype: torch.dtype  # of parameters
    wider: bool  # whether a part of the model is in fp64
    autocast: bool  # whether microbatches run in ``torch.autocast`` in bf16
    adam: bool  # AdamW, not SGD
    # Arguments of ``fe.shard``: at first, and when a checkpoint is loaded into a new model.
    shards: list[dict[str, Any]]
    operations: list[Operation] = field(default_factory=list)

    def model(self) -> blocks.Root:
        """The model, with the same values on every call."""
        torch.manual_seed(self.seed)
        draw = random.Random(self.seed)
        made = blocks.random_model(draw, self.width, wider=self.wider)
        return made.double() if self.dtype == torch.float64 else made


def random_program(seed: int, world_size: int) -> Program:
    """The program of a seed."""
    draw = random.Random(f"program {seed}")
    autocast = draw.random() < 0.15
    fp64 = not autocast and draw.random() < 0.5
    program = Program(
        seed=seed,
        width=draw.randint(1, 9),
        dtype=torch.float64 if fp64 else torch.float32,
        wider=not autocast and not fp64 and draw.random() < 0.2,
        autocast=autocast,
        adam=fp64 and draw.random() < 0.5,  # AdamW enlarges rounding of small gradients
        shards=[],
    )
    program.shards.extend(_sharding(draw, world_size, program) for _ in range(2))
    names = [name for name, _ in program.model().named_parameters()]
    # A backward through two re-entrant checkpoints of one block is refused.
    is_reentrant = any(
        isinstance(each, blocks.Recomputed) and each.how for each in program.model().modules()
    )
    do = program.operations.append
    if draw.random() < 0.4:
        for name in draw.sample(names, min(2, len(names))):
            do(("hook", (name, draw.choice([0.5, 3.0, -1.0]))))
    num_steps = draw.randint(2, 3)
    for step in range(num_steps):
        if draw.random() < 0.3:
            do(("freeze", (_some(draw, names), draw.random() < 0.5)))
        if draw.random() < 0.3:
            do(("switch", (draw.random() < 0.5,)))
        num = draw.randint(1, 3)
        for index in range(num):
            if draw.random() < 0.15:
                do(("evaluate", (draw.choice(["no_grad", "inference_mode"]),)))
            kinds = ["plain"] * 4 + ["two", "two reversed", "evaluated", "toggled"]
            kind = draw.choice(kinds if is_reentrant else [*kinds, "summed"])
            sync = index == num - 1 or draw.random() < 0.4
            do(("microbatch", (kind, sync, _some(draw, names))))
        do(("gradients", ()))
        if draw.random() < 0.6:
            do(("clip", (draw.choice([0.1, 1.0, 1e6]),)))
        do(("step", ()))
        do(("zero", (draw.random() < 0.6,)))
        if draw.random() < 0.15:
            do(("zero", (True,)))
            do(("fail", ()))
        if step == 0 and draw.random() < 0.3:
            do(("zero", (True,)))
            do(("reload", ()))
    do(("weights", ()))
    return program


def _some(draw: random.Random, names: list[str]) -> list[str]:
    return draw.sample(names, draw.randint(1, max(len(names) // 2, 1)))


def _sharding(draw: random.Random, world_size: int, program: Program) -> dict[str, Any]:
    # Classes of the model's modules that have parameters.
    classes = dict.fromkeys(
        type(each)
        for each in program.model().modules()
        if type(each) not in (blocks.Root, nn.ModuleList) and any(True for _ in each.parameters())
    )
    units = draw.sample(list(classes), min(draw.randint(1, 2), len(classes)))
    units = draw.choice([None, units])
    strategy, outer = draw.choice(PAIRS)
    rows = draw.choice([rows for rows in (1, 2, 4) if world_size % rows == 0])
    return {
        "strategy": strategy,
        "outer_strategy": outer,
        "mesh": (rows, world_size // rows),
        "min_unit_size": draw.choice([0, 0, None, 100]) if units is None else None,
        "units": units,
        "config": fe.DistributedDataParallelConfig(
            bucket_size=draw.choice([None, None, 64]),
            overlap_grad_reduce=True,
        ),
    }


class Runner:
    """Runs a program by plain torch on all ranks' data, and notes what it observes in ``found``."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.program, self.world_size = program, world_size
        self.found: list[tuple[str, Any]] = []
        self._num_batches = 0
        self.model: blocks.Root
        self.optimizer: torch.optim.Optimizer
        self._build(program.model())

    def run(self) -> list[tuple[str, Any]]:
        for number, (kind, arguments) in enumerate(self.program.operations):
            getattr(self, f"do_{kind}")(f"{number} {kind}", *arguments)
        return self.found

    # --- Methods that ShardedRunner overrides ---

    def _build(self, model: blocks.Root) -> None:
        self.model = model
        parameters = model.parameters()
        if self.program.adam:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def _part(self, whole: Tensor) -> Tensor:
        return whole

    def _note(self, label: str, value: Any) -> None:
        self.found.append((label, value))

    def _no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def _reset(self) -> None:
        """Called after an error."""

    def do_reload(self, label: str) -> None:
        self.model.load_state_dict(self.model.state_dict())
        for param in self.model.parameters():
            param._backward_hooks = None

    # --- Methods that both runners share ---

    def _loss(self) -> Tensor:
        self._num_batches += 1
        generator = torch.Generator().manual_seed(1000 * self.program.seed + self._num_batches)
        rows = ROWS * self.world_size
        x = torch.randn(rows, self.program.width, generator=generator).to(self.program.dtype)
        y = torch.randn(rows, 2, generator=generator).to(self.program.dtype)
        with self._autocast():
            loss: Tensor = self.model(self._part(x), self._part(y))
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.program.autocast)

    def _evaluate(self, label: str, how: Callable[[], Any] = torch.no_grad) -> None:
        with how():
            self._note(label, self._loss().item())

    def do_hook(self, label: str, name: str, factor: float) -> None:
        self.model.get_parameter(name).register_hook(lambda grad: grad * factor)

    def do_freeze(self, label: str, names: list[str], thaw: bool) -> None:
        for name in names:
            self.model.get_parameter(name).requires_grad_(thaw)

    def do_switch(self, label: str, on: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, blocks.Switch):
                module.is_on = on

    def do_evaluate(self, label: str, how: str) -> None:
        self.model.eval()
        self._evaluate(label, getattr(torch, how))
        self.model.train()

    def do_microbatch(self, label: str, kind: str, sync: bool, names: list[str]) -> None:
        with nullcontext() if sync else self._no_sync(), self._autocast():
            losses = [self._loss()]
            if kind == "evaluated":
                self._evaluate(label)
            if kind == "toggled":
                params = [self.model.get_parameter(name) for name in names]
                trained = [param for param in params if param.requires_grad]
                for param in trained:
                    param.requires_grad_(False)
                self._evaluate(label)
                for param in trained:
                    param.requires_grad_(True)
            if kind in ("two", "two reversed", "summed"):
                losses.append(self._loss())
            if kind == "two reversed":
                losses.reverse()
            if kind == "summed":
                losses = [losses[0] + losses[1]]
            for loss in losses:
                self._note(label, loss.item())
                if loss.requires_grad:
                    loss.backward()

    def do_gradients(self, label: str) -> None:
        for name, param in self.model.named_parameters():
            self._note(f"{label} {name}", None if param.grad is None else param.grad.clone())

    def do_weights(self, label: str) -> None:
        for name, param in self.model.named_parameters():
            self._note(f"{label} {name}", param.detach().clone())

    def do_clip(self, label: str, max_norm: float) -> None:
        if any(param.grad is not None for param in self.model.parameters()):
            self._note(label, self._clip(max_norm))

    def do_step(self, label: str) -> None:
        self.optimizer.step()

    def do_zero(self, label: str, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def do_fail(self, label: str) -> None:
        failing = [each for each in self.model.modules() if isinstance(each, blocks.MayFail)]
        for module in failing:
            module.fails = True
        try:
            self._note(label, self._loss().item())
        except blocks.BlockError:
            self._note(label, "raised")
        for module in failing:
            module.fails = False
        self._reset()


class ShardedRunner(Runner):
    """Runs a program with the engine on this rank's data."""

    def __init__(self, program: Program, world_size: int, folder: str) -> None:
        self._shards, self._folder = iter(program.shards), folder
        super().__init__(program, world_size)

    def _build(self, model: blocks.Root) -> None:
        self.engine = fe.shard(model, **next(self._shards))
        super()._build(model)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.world_size)[dist.get_rank()]

    def _note(self, label: str, value: Any) -> None:
        value = full(value) if isinstance(value, Tensor) else value
        super()._note(label, mean_over_ranks(value) if isinstance(value, float) else value)

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()

    def _clip(self, max_norm: float) -> Tensor:
        return self.engine.clip_grad_norm_(max_norm)

    def _reset(self) -> None:
        self.engine.reset()

    def do_reload(self, label: str) -> None:
        before = self.model
        fe.save_checkpoint(self._folder, self.engine, self.optimizer)
        model = self.program.model()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        for old, new in zip(before.modules(), model.modules(), strict=True):
            if isinstance(old, blocks.Switch):
                new.is_on = old.is_on
        self._build(model)
        for old, new in zip(before.parameters(), model.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        fe.load_checkpoint(self._folder, self.engine, self.optimizer)


def run_and_compare(seed: int, folder: str) -> list[str]:
    """Differences from one process: a line for each."""
    world_size = dist.get_world_size()
    program = random_program(seed, world_size)
    limit = 5e-2 if program.autocast else 1e-9 if program.dtype == torch.float64 else 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = Runner(program, world_size).run()
        except RuntimeError as error:
            if "this checkpoint() is not necessary" not in str(error):
                raise
            return []  # torch refuses re-entrant checkpoints of frozen blocks
        found = ShardedRunner(program, world_size, folder).run()
    if [label for label, _ in found] != [label for label, _ in expected]:
        return [f"other observations: {found}; expected {expected}"]
    # Gradients that cancel out are rounding errors only.
    largest = max(_largest(value) for _, value in expected) * (0.1 if program.autocast else 0.01)
    lines = []
    for (label, ours), (_, theirs) in zip(found, expected, strict=True):
        error = _error(ours, theirs, largest)
        if not error <= limit:
            lines.append(f"{label}: off by {error:.2e}, limit {limit:.0e}")
    return lines


def _largest(value: Any) -> float:
    return value.abs().max().item() if isinstance(value, Tensor) and value.numel() else 0.0


def _error(ours: Any, theirs: Any, scale: float) -> float:
    """The largest difference, relative to the largest element, or to ``scale`` if it is larger."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return relative_error(torch.tensor(ours), torch.tensor(theirs))
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return 0.0 if ours == theirs else float("inf")
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    return _largest(ours - theirs) / max(scale, _largest(theirs)) if ours.numel() else 0.0
