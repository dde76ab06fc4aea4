"""``simulate``: the real engine on a machine that is not there.

The model is built, sharded and trained for two steps in this process, with fake tensors
(``FakeTensorMode``: shapes and dtypes without memory) over ranks that do not exist. Lanes advance a
clock instead of doing anything, and every operation costs what the machine's figures say. Since the
engine itself runs, what is found cannot drift from what it does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices.lanes import lanes_made_by
from fsdp_engine.devices.mesh import simulated_ranks
from fsdp_engine.engine import Engine
from fsdp_engine.optimizer import shard_optimizer
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.arguments import (
    check_callable,
    check_count,
    check_sizes,
    check_type,
    listed,
)
from fsdp_engine.simulation.building import built, on_no_device
from fsdp_engine.simulation.clock import Clock
from fsdp_engine.simulation.errors import explained
from fsdp_engine.simulation.known_operations import KnownOperations
from fsdp_engine.simulation.machine import H100, Machine
from fsdp_engine.simulation.memory_watch import MemoryWatch
from fsdp_engine.simulation.operations import Operations
from fsdp_engine.simulation.result import Simulation

# The first records the order of units, in the second weights are gathered along it. A third is like
# the second: `test_a_third_step_adds_nothing`.
STEPS = 2

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def simulate(
    build: Callable[[], nn.Module],
    world_size: int,
    *,
    batch: Any,
    mesh: Sequence[int] | None = None,
    machine: Machine = H100,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    microbatches: int = 1,
    known: KnownOperations | None = None,
    **options: Any,
) -> Simulation:
    """A step of training, simulated: its time, what communication it exposes, its memory.

    One process, without process groups of its own; nothing is allocated or sent.

    Args:
        build: makes the model, on no device in particular.
        world_size: data-parallel ranks.
        batch: what the model is called with on one rank: a tuple of arguments, a dict of named
            ones, or a single one. Of tensors only shapes and dtypes count. A function is called
            for it.
        mesh: ranks on each axis, (inner,) or (outer, inner). None: all on one.
        machine: what it would run on.
        loss: makes the loss from what the model returns. None: that is the loss, or has it as
            ``loss``; else its sum is.
        optimizer: makes the optimizer from the sharded parameters. None: AdamW.
        microbatches: forwards and backwards in a step, all but the last under ``no_sync``.
        known: operations worked out in earlier simulations, which those of this one join; saves
            time where there are many. None: none.
        **options: of :func:`~fsdp_engine.sharding.shard`: ``strategy``, ``outer_strategy``,
            ``units``, ``mp_policy``, ``config``, ...

    Raises:
        SimulationError: the model, the loss or the optimizer cannot be run with fake tensors (they
            read values, say), or raised anything themselves; names the line.
        RuntimeError: torch.distributed is initialised in this process.
        TypeError: ``build`` makes no module, its forward does not take ``batch``, or an argument is
            of another type.
        ValueError: ``mesh`` has not ``world_size`` ranks, or there is no microbatch, or the config
            has values of gradients looked at, or nothing is trained, or there is no loss, or none
            that requires grad.
    """
    check_count("world_size", world_size, "1 rank or more")
    check_count("microbatches", microbatches, "at least 1")
    check_callable("build", build, "a function that makes a torch.nn.Module")
    check_type("machine", machine, Machine, "a Machine, such as fe.H100")
    for name, function in (("loss", loss), ("optimizer", optimizer)):
        if function is not None:
            check_callable(name, function, "a function, or None")
    if known is not None:
        check_type("known", known, KnownOperations, "KnownOperations, or None")
    expected = f"one or two sizes of {world_size} ranks"
    sizes = (world_size,) if mesh is None else tuple(listed("mesh", mesh, expected))
    check_sizes("mesh", sizes, expected)
    if math.prod(sizes) != world_size or len(sizes) not in (1, 2) or min(sizes) < 1:
        raise ValueError(f"mesh: expected one or two sizes of {world_size} ranks; found {sizes}")
    config = options.get("config")
    if config is not None:
        check_type(
            "config", config, DistributedDataParallelConfig, "a DistributedDataParallelConfig"
        )
    if config is not None and (config.check_for_nan_in_grad or config.check_for_large_grads):
        raise ValueError(
            "config: expected no check of gradients, whose values are fake; found "
            "check_for_nan_in_grad or check_for_large_grads"
        )
    clock, memory = Clock(machine), MemoryWatch()
    clock.memory_changed = memory.sample
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        simulated_ranks(sizes, on_host=not machine.host_runs_ahead) as device_mesh,
        lanes_made_by(clock.make_lanes),
        fake,
        Operations(clock, memory, sizes[-1], fake, known or KnownOperations()),
    ):
        model = built(build)
        signature = _signature(model)
        # Values are fake: nobody can compare them, and nothing tells ranks apart.
        engine = shard(model, device_mesh, **options, initial_values="rank0")
        memory.watch(lambda: _held_by(engine))
        with explained("making the optimizer"):
            trained = (optimizer or _adamw)(model.parameters())
        shard_optimizer(trained)
        memory.settle("optimizer")
        with explained("making the batch"):
            inputs = on_no_device(batch() if callable(batch) else batch, fake)
        memory.made([leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)])
        _check_call(signature, inputs, model)
        step = _Step(engine, trained, inputs, loss, microbatches)
        for _ in range(STEPS):
            start = clock.finish()
            memory.restart()
            clock.spans.clear()
            clock.exposed.clear()
            clock.sent_bytes.clear()
            step.run(clock, memory)
        seconds = clock.finish() - start
    title = f"{engine.strategy} on {' x '.join(map(str, sizes))} ranks"
    spans = tuple(
        replace(each, start=each.start - start, end=each.end - start) for each in clock.spans
    )
    exposed = tuple(replace(each, start=each.start - start) for each in clock.exposed)
    peak = dict(memory.peak)
    budgets = (engine.budget, engine.staging_budget)
    sent = dict(clock.sent_bytes)
    return Simulation(title, machine, seconds, spans, exposed, peak, sent, *budgets)


class _Step:
    """One step of training.

    Args:
        engine: of the sharded model.
        optimizer, inputs, loss, microbatches: see :func:`simulate`.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        inputs: Any,
        loss: Callable[[Any], Tensor] | None,
        microbatches: int,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._inputs = inputs
        self._loss = loss
        self._microbatches = microbatches

    def run(self, clock: Clock, memory: MemoryWatch) -> None:
        """All microbatches, then the optimizer's step."""
        for number in range(self._microbatches):
            is_last = number == self._microbatches - 1
            with nullcontext() if is_last else self._engine.no_sync():
                clock.phase = "forward"
                with explained("forward"):
                    output = _called(self._engine.model, self._inputs)
                loss = self._loss_of(output)
                del output
                clock.phase = "backward"
                with explained("backward"):
                    loss.backward()
                del loss
        clock.phase = "step"
        before = memory.known()
        with explained("the optimizer's step"):
            self._optimizer.step()
        memory.settle("optimizer", but=before)
        self._optimizer.zero_grad()

    def _loss_of(self, output: Any) -> Tensor:
        """The loss of the model's ``output``.

        Raises:
            ValueError: there is none, or it needs no gradient.
            SimulationError: the user's function raised.
        """
        if self._loss is None:
            found = _loss_in(output)
        else:
            with explained("the loss"):
                found = self._loss(output)
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise ValueError(
                    "loss: expected a function that makes a tensor of one element; found "
                    f"{_described(found)}"
                )
        if not found.requires_grad:
            raise ValueError(
                "loss: expected one that requires grad; found one that no parameter of "
                f"{type(self._engine.model).__name__} takes part in (detached, within no_grad(), "
                "or of frozen parameters alone)"
            )
        return found


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _held_by(engine: Engine) -> dict[str, int]:
    """Bytes by role, with what the engine keeps to fill transient storages from."""
    return {**engine.memory_bytes(), "idle": engine.idle_memory_bytes}


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Of its forward; None: hooks of the user's may change what it is called with."""
    return inspect.signature(model.forward) if not model._forward_pre_hooks else None


def _check_call(signature: inspect.Signature | None, inputs: Any, model: nn.Module) -> None:
    if signature is None:
        return
    named = inputs if isinstance(inputs, dict) else {}
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        signature.bind(*(() if isinstance(inputs, dict) else given), **named)
    except TypeError as error:
        found = ", ".join(map(str, named)) if named else f"{len(given)} without names"
        raise TypeError(
            f"batch: expected arguments of {type(model).__name__}.forward("
            f"{', '.join(signature.parameters)}); found {found}: {error}"
        ) from None


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss_in(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            "loss: expected a function that makes the loss, or a model that returns a tensor or "
            f"something with a tensor `loss`; found a {type(output).__name__}"
        )
    return found if found.ndim == 0 else found.sum()


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)
