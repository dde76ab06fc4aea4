"""``simulate``: the real engine on a machine that is not there.

The model is built, sharded and trained for two steps in this process, with fake tensors
(``FakeTensorMode``: shapes and dtypes without memory) over ranks that do not exist. Lanes advance a
clock instead of doing anything, and every operation costs what the machine's figures say. Since the
engine itself runs, what is found cannot drift from what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fsdp_engine.devices.lanes import lanes_made_by
from fsdp_engine.devices.memory import empty_like
from fsdp_engine.devices.mesh import pretended_ranks
from fsdp_engine.engine import Engine
from fsdp_engine.optimizer import shard_optimizer
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.clock import Clock
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
        RuntimeError: torch.distributed is initialised in this process.
        ValueError: ``mesh`` has not ``world_size`` ranks, or there is no microbatch, or the config
            has values of gradients looked at.
    """
    sizes = (world_size,) if mesh is None else tuple(mesh)
    if math.prod(sizes) != world_size or len(sizes) not in (1, 2):
        raise ValueError(f"mesh: expected one or two sizes of {world_size} ranks; found {sizes}")
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1; found {microbatches}")
    config = options.get("config")
    if config is not None and (config.check_for_nan_in_grad or config.check_for_large_grads):
        raise ValueError(
            "config: expected no check of gradients, whose values are fake; found "
            "check_for_nan_in_grad or check_for_large_grads"
        )
    clock, memory = Clock(machine), MemoryWatch()
    clock.memory_changed = memory.sample
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        pretended_ranks(sizes) as device_mesh,
        lanes_made_by(clock.make_lanes),
        fake,
        Operations(clock, memory, sizes[-1], fake, known or KnownOperations()),
    ):
        model = _built(build)
        # Values are fake: nobody can compare them, and nothing tells ranks apart.
        engine = shard(model, device_mesh, **options, initial_values="rank0")
        trained = (optimizer or _adamw)(model.parameters())
        shard_optimizer(trained)
        inputs = _on_no_device(batch() if callable(batch) else batch, fake)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        memory.watch(engine.memory_bytes, buffers)
        step = _Step(engine, trained, inputs, loss, microbatches)
        for _ in range(STEPS):
            start = clock.finish()
            memory.restart()
            clock.spans.clear()
            clock.exposed.clear()
            step.run(clock, memory)
        seconds = clock.finish() - start
    title = f"{engine.strategy} on {' x '.join(map(str, sizes))} ranks"
    spans = tuple(
        replace(each, start=each.start - start, end=each.end - start) for each in clock.spans
    )
    exposed = tuple(replace(each, start=each.start - start) for each in clock.exposed)
    peak = dict(memory.peak)
    budgets = (engine.budget, engine.staging_budget)
    return Simulation(title, machine, seconds, spans, exposed, peak, *budgets)


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
        self._loss = loss or _loss_in
        self._microbatches = microbatches

    def run(self, clock: Clock, memory: MemoryWatch) -> None:
        """All microbatches, then the optimizer's step."""
        for number in range(self._microbatches):
            is_last = number == self._microbatches - 1
            with nullcontext() if is_last else self._engine.no_sync():
                clock.phase = "forward"
                loss = self._loss(_called(self._engine.model, self._inputs))
                clock.phase = "backward"
                loss.backward()
                del loss
        clock.phase = "step"
        self._optimizer.step()
        memory.optimizer_stepped()
        self._optimizer.zero_grad()


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """The model; what it has on the meta device gets off it, where nothing needs values."""
    model = build()
    made: dict[int, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = made.setdefault(id(tensor), _off_meta(tensor))
    return model


def _off_meta(tensor: Tensor) -> Tensor:
    twin = empty_like(tensor.detach(), torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    # Marks of users; what a fake tensor keeps there itself (torch 2.11: its device, say) stays.
    marks = {key: mark for key, mark in vars(tensor).items() if key not in vars(twin)}
    twin.__dict__.update({key: mark for key, mark in marks.items() if key[0] != "_"})
    return twin


def _on_no_device(batch: Any, fake: FakeTensorMode) -> Any:
    def converted(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta or _is_fake(tensor) else fake.from_tensor(tensor)

    return tree_map_only(Tensor, converted, batch)


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


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
