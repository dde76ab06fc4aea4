"""``fe.simulate``: runs the engine on a simulated machine.

The model is built (``build_fake_model``), sharded and trained for two steps in this process, with
fake tensors (``FakeTensorMode``: shapes and dtypes without memory) over simulated ranks. Lanes
advance a clock instead of running work, and the machine's figures determine the time of every
operation. Since the engine itself runs, the simulation follows its implementation. The result has
times, exposed communication, memory, and a timeline.

A simulation does not need initial values. Functions of ``torch.nn.init`` that read drawn values get
False or 0, so that they do not draw again. Models also read numbers from generated ranges
(``[x.item() for x in torch.linspace(0, rate, depth)]``); the values of such ranges are computed and
kept in addition to the fake tensors.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.kernel_interface import (
    Engine,
    Options,
    allocator,
    find_module,
    lanes,
    shard,
    shard_optimizer,
)
from fsdp_engine.planner.simulation.clock import Clock, Exposed, Mark, Span, StepPart
from fsdp_engine.planner.simulation.compiled import (
    compile_blocks,
    compiled_modules,
)
from fsdp_engine.planner.simulation.context_parallel import ContextParallel
from fsdp_engine.planner.simulation.device_kernels import device_kernels
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.memory_tracker import KINDS, MemoryTracker
from fsdp_engine.planner.simulation.meshes import data_mesh_beside
from fsdp_engine.planner.simulation.module_names import parents_of
from fsdp_engine.planner.simulation.packed_sequences import masks_of_rows
from fsdp_engine.planner.simulation.records import combined
from fsdp_engine.planner.simulation.simulated_process import SimulatedProcess, simulated_process
from fsdp_engine.planner.simulation.simulation_error import (
    NEEDS_VALUES,
    as_simulation_error,
    check_callable,
    check_count,
)
from fsdp_engine.planner.simulation.step_options import Parallelize, StepOptions
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of, family_of
from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan
from fsdp_engine.planner.state_places import offload_of

_aten = torch.ops.aten
_ROWS = (_aten.linspace.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_READ = _aten._local_scalar_dense.default
_CPU = torch.device("cpu")
_PLAIN = (Tensor, nn.Parameter)


def build_fake_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model, with its tensors on the meta device replaced by fake tensors on the CPU.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
        ValueError: No parameter of the model requires grad.
    """
    model = build_module(build)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "build: expected a model with parameters that require grad; found none among "
            f"{sum(1 for _ in model.parameters())} of {type(model).__name__}"
        )
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = replaced.setdefault(id(tensor), _to_fake_cpu(tensor))
    return model


def build_module(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model under the caller's fake mode and default device.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
    """
    with as_simulation_error("building the model"):
        model = _built_outside_of_modes(build)
        if model is None:
            with _DeepCopies(), _FirstValues():
                model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(
            "build: expected a function that returns a torch.nn.Module; found "
            f"{type(model).__name__}"
        )
    return model


def build_meta_module(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on the meta device.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        return build_module(build)


def to_fake(batch: Any, fake: FakeTensorMode) -> Any:
    """Returns the batch, with fake tensors on the CPU instead of tensors on any device."""

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.device.type != "cpu":
            twin = allocator.empty_like(tensor.detach(), _CPU)
            return twin.requires_grad_(tensor.requires_grad)
        return tensor if _is_fake(tensor) else fake.from_tensor(tensor)

    return tree_map_only(Tensor, converted, batch)


def _built_outside_of_modes(build: Callable[[], nn.Module]) -> Any:
    """Build a model on the meta device without the dispatch modes of the simulation, which would
    take most of the time.

    Returns:
        The model. None if ``build`` uses tensors other than plain ones on the meta device, reads
        values, raises an exception, or makes tensors that the model keeps outside of parameters
        and buffers; the simulation must then run ``build`` itself to count their memory.
    """
    try:
        with _disable_current_modes(), _OnlyMeta() as mode:
            model = build()
    except Exception:
        return None
    if mode.has_refused or not isinstance(model, nn.Module):
        return None
    kept = {key for each in _tensors_of(model) for key in allocator.storage_keys(each)}
    return model if kept.issuperset(mode.storages) else None


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


class _OnlyMeta(TorchDispatchMode):
    """A mode that refuses operations that read values, or that use tensors other than plain ones on
    the meta device.

    Attributes:
        has_refused: Whether an operation was refused. ``build`` may have caught the exception.
        storages: The storages of results by address, until they are freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_refused = False
        self.storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, or raise a RuntimeError."""
        kwargs = kwargs or {}
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        device = kwargs.get("device", None if tensors else _CPU)
        is_elsewhere = device is not None and torch.device(device).type != "meta"
        is_plain = all(each.is_meta and type(each) in _PLAIN for each in tensors)
        if func is _READ or is_elsewhere or not is_plain:
            self.has_refused = True
            raise RuntimeError(f"{func}: expected plain tensors on the meta device")
        out = func(*args, **kwargs)
        for each in _tensors_in((out,)):
            storage = each.untyped_storage()
            self.storages[storage._cdata] = storage
        return out


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors of an operation's arguments or results. ``tree_leaves`` is slower."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors_in(each)


class _DeepCopies(TorchFunctionMode):
    """A mode in which ``copy.deepcopy`` works for fake tensors: ``nn.TransformerEncoder`` copies
    its layer. torch's implementation (2.11, 2.13) reads the data's address, which fake tensors do
    not have, and copies their mode."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy fake leaf tensors; call any other function unchanged."""
        is_copy = func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor)
        if is_copy and args[0].is_leaf:
            return _deepcopied(*args)
        return func(*args, **(kwargs or {}))


def _deepcopied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) in memo:
        copied: Tensor = memo[id(tensor)]
        return copied
    twin = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin)
    twin.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = twin
    if tensor.grad is not None:
        twin.grad = copy.deepcopy(tensor.grad, memo)
    twin.__dict__.update(copy.deepcopy(_user_attributes(tensor, twin), memo))
    return twin


class _FirstValues(TorchDispatchMode):
    """A mode for building a model without initial values; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return values of ranges and of initializers; run any other operation."""
        kwargs = kwargs or {}
        if func is _READ:
            row = self._rows.get(args[0].untyped_storage()._cdata)
            if row is not None:
                with _disable_current_modes():
                    return row[args[0].storage_offset()].item()
            if _is_in_init():
                return False if args[0].dtype == torch.bool else 0
        out = func(*args, **kwargs)
        if func in _ROWS:
            with _disable_current_modes():
                row = func(*args, **{**kwargs, "device": _CPU})
            storage = out.untyped_storage()
            self._rows[storage._cdata] = row
            weakref.finalize(storage, self._rows.pop, storage._cdata, None).atexit = False
        elif func._schema.is_mutable:
            for each in args[:1]:  # mutable operations modify their first argument
                if isinstance(each, Tensor):
                    self._rows.pop(each.untyped_storage()._cdata, None)
        return out


def _is_in_init() -> bool:
    """Returns whether a function of ``torch.nn.init`` is on the call stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return True
        frame = frame.f_back
    return False


def _to_fake_cpu(tensor: Tensor) -> Tensor:
    twin: Tensor
    source = tensor if type(tensor) in _PLAIN else tensor.detach()
    if type(source) in _PLAIN and source.layout is torch.strided:  # avoids a fake tensor on meta
        twin = allocator.empty_strided_like(source, _CPU)
    elif isinstance(source, DTensor):
        local = allocator.empty_like(source._local_tensor, _CPU)
        twin = DTensor(local, source._spec, requires_grad=False)
    else:
        twin = allocator.empty_like(source, _CPU)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    twin.__dict__.update(_user_attributes(tensor, twin))
    return twin


def _user_attributes(tensor: Tensor, twin: Tensor) -> dict[str, Any]:
    """Returns the user's attributes of ``tensor``, without attributes of fake tensors (such as the
    device in torch 2.11)."""
    marks = {key: mark for key, mark in vars(tensor).items() if key not in vars(twin)}
    return {key: mark for key, mark in marks.items() if key[0] != "_"}


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


_WAITS = "compute waits for"
# Name of the timeline's row of modules.
MODULES = "modules"


@dataclass(frozen=True)
class Simulation:
    """The last simulated training step. Times are in seconds since its start, memory in bytes.

    Attributes:
        title: Strategy and ranks.
        machine: The simulated machine.
        seconds: Seconds from the end of the previous step to the end of this one.
        spans: Operations of each lane.
        exposed: Waits of compute for communication, for other stages of a pipeline, and for copies
            of offloaded state and activations.
        memory: Bytes by kind, at the peak.
        sent_bytes: Bytes that a rank sends, by axis ("inner", "outer", "context", "tensor").
        budget: Number of elements in the engine's prefetch window.
        staging_budget: The engine's limit on gradients in flight.
        elsewhere: Bytes of offloaded state and activations by place ("host", "disk"). ``memory``
            does not include them.
        copied_bytes: Bytes of offloaded state and activations that a rank copies, by lane.
        memory_series: Memory over time: pairs of seconds and bytes by kind in the order of
            ``KINDS``. The time is when compute runs the operations that are issued at that point.
        memory_by_place: The largest memory by kind, in the order of ``KINDS``, at each place. A
            place is a phase and the name of the last module that ran.
        model_flops: Floating-point operations of the model on one rank, without recomputation.
        seconds_at_peak: Time that ``model_flops`` take at the machine's peak.
        checkpoint_bytes: Bytes of all parameters and their optimizer state, over all shards.
        further: Time, traffic and flops that each further microbatch would add to a step of three
            or more microbatches. None: the step has fewer. See [Note: Steps of many microbatches]
            in ``planner/batch_search.py``.
    """

    title: str
    machine: Machine
    seconds: float
    spans: tuple[Span, ...]
    exposed: tuple[Exposed, ...]
    memory: dict[str, int]
    sent_bytes: dict[str, float]
    budget: int
    staging_budget: Any
    elsewhere: dict[str, int] = field(default_factory=dict)
    copied_bytes: dict[str, float] = field(default_factory=dict)
    memory_series: tuple[tuple[float, tuple[int, ...]], ...] = ()
    memory_by_place: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    model_flops: float = 0.0
    seconds_at_peak: float = 0.0
    checkpoint_bytes: int = 0
    further: StepPart | None = None

    @property
    def mfu(self) -> float:
        """Model flops utilization: ``seconds_at_peak`` over ``seconds``; see
        [Note: Model flops] in ``operations.py``."""
        return self.seconds_at_peak / self.seconds

    @property
    def compute_seconds(self) -> float:
        """Busy time of the compute lane."""
        return _busy(self.spans, lanes.COMPUTE)

    @property
    def message_seconds(self) -> dict[str, float]:
        """Busy time of each lane other than compute."""
        names = sorted({span.lane for span in self.spans} - {lanes.COMPUTE})
        return {name: _busy(self.spans, name) for name in names}

    @property
    def exposed_seconds(self) -> float:
        """Total time in which compute waited: the sum of ``exposed``."""
        return sum(each.seconds for each in self.exposed)

    @property
    def exposed_by_lane(self) -> dict[str, float]:
        """Time in which compute waited, by the lane that it waited for."""
        return _by_lane(self.exposed)

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        return sum(self.memory.values())

    @property
    def part(self) -> StepPart:
        """The figures of the whole step."""
        return StepPart(
            self.seconds,
            self.compute_seconds,
            self.exposed_by_lane,
            self.sent_bytes,
            self.copied_bytes,
            self.model_flops,
            self.seconds_at_peak,
        )

    def trace(self) -> dict[str, Any]:
        """Returns the timeline in Chrome's trace event format: a row for each lane, one for the
        modules whose operations compute runs, one for waits, and a counter of bytes by kind."""
        rows = [MODULES, lanes.COMPUTE, _WAITS, *self.message_seconds]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.title}}
        ]
        for row, name in enumerate(rows):
            place: dict[str, Any] = {"ph": "M", "pid": 0, "tid": row}
            events.append({**place, "name": "thread_name", "args": {"name": name}})
            events.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
        for span in self.module_spans():
            event = self._event(rows.index(MODULES), span.module, span.start, span.end)
            events.append({**event, "args": {"phase": span.phase}})
        for span in self.spans:
            event = self._event(rows.index(span.lane), span.label, span.start, span.end)
            module = {"module": span.module} if span.module else {}
            events.append({**event, "args": {"phase": span.phase, **module}})
        for each in self.exposed:
            name = lanes.name_of_wait(each.lane, each.unit)
            event = self._event(rows.index(_WAITS), name, each.start, each.start + each.seconds)
            events.append({**event, "args": {"phase": each.phase}})
        for time, sizes in self.memory_series:
            named = dict(zip(KINDS, sizes, strict=True))
            counter = {"ph": "C", "pid": 0, "name": "memory (bytes)", "ts": time * 1e6}
            events.append({**counter, "args": named})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def module_spans(self) -> list[Span]:
        """Returns the time intervals of modules on the compute lane. An interval spans successive
        operations of a module and its submodules. Outer modules are before inner ones. The lane of
        each interval is "modules"."""
        found: list[Span] = []
        running: list[int] = []  # indices of the open intervals, the outermost module first
        for span in self.spans:
            if span.lane != lanes.COMPUTE or not span.module:  # the engine's own operation
                continue
            names = parents_of(span.module)
            depth = 0
            for number, name in zip(running, names, strict=False):
                if (found[number].module, found[number].phase) != (name, span.phase):
                    break
                depth += 1
            del running[depth:]
            for number in running:
                found[number] = replace(found[number], end=span.end)
            for name in names[depth:]:
                running.append(len(found))
                found.append(Span(MODULES, name, span.phase, span.start, span.end, name))
        return found

    def save_trace(self, path: str | Path) -> None:
        """Write the trace as JSON, for Perfetto (ui.perfetto.dev)."""
        Path(path).write_text(json.dumps(self.trace()))

    def __str__(self) -> str:
        lines = [f"{self.title}, {self.machine.name}", f"step        {_ms(self.seconds)}"]
        lines.append(f"compute     {_ms(self.compute_seconds)}")
        lines += [f"{name:<12}{_ms(busy)}" for name, busy in self.message_seconds.items()]
        lines.append(f"exposed     {_ms(self.exposed_seconds)}{self._worst()}")
        kinds = ", ".join(f"{kind} {_gib(n)}" for kind, n in self.memory.items() if n)
        size = _gib(self.machine.processor.memory_bytes)
        lines.append(f"memory      {_gib(self.peak_bytes)} of {size} at most: {kinds}")
        lines += [f"{place:<12}{_gib(n)}" for place, n in self.elsewhere.items()]
        lines.append(accuracy_of(family_of(self.machine)).sentence(self.seconds))
        return "\n".join(lines)

    def _worst(self) -> str:
        sums: dict[tuple[str, str, str], float] = {}
        for each in self.exposed:
            key = (each.unit, each.phase, each.lane)
            sums[key] = sums.get(key, 0.0) + each.seconds
        worst = sorted(sums.items(), key=lambda item: -item[1])[:3]
        return "".join(
            f"\n  {unit}, {phase}, {lane}: {_ms(seconds).strip()}"
            for (unit, phase, lane), seconds in worst
        )

    def _event(self, row: int, name: str, start: float, end: float) -> dict[str, Any]:
        micro = 1e6
        return {
            "ph": "X",
            "pid": 0,
            "tid": row,
            "name": name,
            "ts": start * micro,
            "dur": (end - start) * micro,
        }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f} ms"


# Microbatches of the steps before the one that is returned. The first step records the order of
# units, and the second prefetches in that order. A third step, or more microbatches in the first,
# would change nothing: `test_more_first_steps_add_nothing`. (The optimizer's first step has no
# state to copy, so one more step runs first if forward overlaps the previous optimizer step.)
FIRST_STEPS = (1,)


def simulate(
    build: Callable[[], nn.Module],
    world_size: int,
    *,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    options: StepOptions | Options | None = None,
    **given: Any,
) -> Simulation:
    """Simulate a training step: its time, exposed communication and memory.

    The simulation runs in this process, with fake tensors and without communication.

    Args:
        build: Returns the model, on any device.
        world_size: Number of ranks. Parameters may be DTensors over a mesh that ``build`` creates
            by ``init_device_mesh``; the other dimensions of this mesh are data-parallel.
        batch: The model's inputs on one rank, or on one group of context-parallel ranks: a tuple of
            arguments, a dict of keyword arguments, a single argument, or a function that returns
            one of these. Only the shapes and dtypes of tensors are used.
        loss: Computes the loss from the model's output. None: the output, or its attribute
            ``loss``, summed if it has several elements.
        options: A ``StepOptions`` with the other options. None: they are keyword arguments. An
            ``fe.Options`` is instead passed on as the ``options`` argument of ``fe.shard``.
        **given: Fields of ``StepOptions``: ``mesh``, ``machine``, ``optimizer``,
            ``microbatches``, ...; and arguments of ``fe.shard``: ``strategy``, ``outer_strategy``,
            ``units``, ``mp_policy``, ``options``, ``extensions``, ...

    Raises:
        SimulationError: The model, the loss or the optimizer cannot run with fake tensors (for
            example, because they read values), or raised an exception; the message names the line.
        RuntimeError: torch.distributed is initialized in this process.
        TypeError: ``build`` does not return a module, its forward does not accept ``batch``, or an
            argument has a wrong type.
        ValueError: An argument is invalid. ``mesh`` does not have the data-parallel ranks;
            ``tensor_parallel`` does not divide ``world_size`` or the model's heads;
            ``context_parallel`` does not divide the inner axis or half of a sequence, or the model
            or the machine does not allow torch's ring attention; there is no microbatch; an
            extension checks values of gradients; there are no blocks to compile; the machine's link
            to offloaded tensors is unknown; no parameter requires grad; or there is no loss that
            requires grad.
    """
    check_count("world_size", world_size, "1 rank or more")
    check_callable("build", build, "a function that returns a torch.nn.Module")
    if loss is not None:
        check_callable("loss", loss, "a function, or None")
    asked = StepOptions.of(options, given)
    machine, tensor_parallel = asked.machine, asked.tensor_parallel
    context_parallel = asked.context_parallel
    sizes = asked.sizes(world_size)
    is_one_axis = asked.mesh is None
    asked.check_shard(world_size)
    clock = Clock(machine, world_size)
    with (
        simulated_process(
            clock,
            sizes,
            known=asked.known,
            context_parallel=context_parallel,
            tensor_parallel=tensor_parallel,
        ) as process,
        ExitStack() as stack,
    ):
        device_mesh, memory = process.device_mesh, process.memory
        model = build_fake_model(build)
        signature = _signature(model)
        if tensor_parallel > 1:
            parallelize_model(model, asked.parallelize, device_mesh._get_root_mesh()["tp"])
        elif is_one_axis and context_parallel == 1:
            device_mesh = data_mesh_beside(model, device_mesh)
            sizes = tuple(device_mesh.shape)
        (engine,), trained = sharded(process, stack, model, [model], device_mesh, asked)
        with as_simulation_error("making the batch"):
            inputs = to_fake(batch() if callable(batch) else batch, process.fake)
        memory.made([leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)])
        _check_call(signature, inputs, model)
        stack.enter_context(masks_of_rows(inputs))
        context = context_of(process, asked)
        if context is not None:
            context.check_batch(inputs)
        step = _Step(process, engine, trained, inputs, loss, context)
        for count in FIRST_STEPS + (1,) * offload_of(engine).overlap_forward:
            step.run(count)
        start = clock.finish()
        process.restart()
        marks = step.run(asked.microbatches)
        seconds = clock.finish() - start
        checkpoint_bytes = checkpoint_bytes_of(model, trained)
    title = f"{engine.strategy} on {' x '.join(map(str, sizes))} ranks"
    if context_parallel > 1:
        title += f" in context-parallel groups of {context_parallel}"
    if math.prod(sizes) < world_size:
        title += f", tensor parallelism over {world_size // math.prod(sizes)} ranks"
    found = simulation_of(title, clock, memory, [engine], start, seconds, checkpoint_bytes)
    return replace(
        found, further=part_between(clock, *marks[-3:-1]) if asked.microbatches > 2 else None
    )


def sharded(
    process: SimulatedProcess,
    stack: ExitStack,
    model: nn.Module,
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    step: StepOptions,
) -> tuple[list[Engine], torch.optim.Optimizer]:
    """Shard the modules of a simulated rank, and make their optimizer.

    Args:
        process: The process of the rank.
        stack: Receives the contexts in which the modules run.
        model: The module that contains ``modules``.
        modules: The modules to shard.
        mesh: The mesh of the data-parallel axes.
        step: Options of the step.

    Returns:
        The engines and the optimizer.
    """
    process.names.set_model(model)
    if step.compile:
        for each in modules:
            compile_blocks(each, step.shard.get("units"))
    on_device = step.machine.host_runs_ahead
    stack.enter_context(compiled_modules(model, process.names, on_device=on_device))
    if on_device:
        stack.enter_context(device_kernels())
    engines = [shard_fake(each, mesh, step) for each in modules]
    process.operations.data_ranks = frozenset(ranks_of(mesh))
    process.memory.watch(partial(_held_bytes, engines))
    with as_simulation_error("making the optimizer"):
        optimizer = (step.optimizer or make_adamw)(model.parameters())
    shard_optimizer_of(optimizer)
    process.memory.assign_kind("optimizer")
    return engines, optimizer


def shard_fake(module: nn.Module, mesh: DeviceMesh, step: StepOptions) -> Engine:
    """Shard a fake module. The ranks do not compare or broadcast initial values, since fake tensors
    have none."""
    values = "same" if find_module("initial_values") is None else "rank0"
    return shard(module, mesh, **step.shard, initial_values=values)


@_disable_current_modes()
def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks of a mesh."""
    return list(mesh.mesh.flatten().tolist())


def context_of(process: SimulatedProcess, step: StepOptions) -> ContextParallel | None:
    """Returns the context-parallel group of a rank. None: sequences are not sharded."""
    if step.context_parallel == 1:
        return None
    mesh = process.device_mesh._get_root_mesh()["cp"]
    process.operations.context_ranks = ranks_of(mesh)
    return ContextParallel(mesh, process.operations)


def simulation_of(
    title: str,
    clock: Clock,
    memory: MemoryTracker,
    engines: Sequence[Engine],
    start: float,
    seconds: float,
    checkpoint_bytes: int,
) -> Simulation:
    """Returns the simulation of one step.

    Args:
        title: The title of the simulation.
        clock, memory: The clock and memory of the rank, which recorded the step.
        engines: The engines of the rank's models; their prefetch windows are added up.
        start, seconds: The start of the step and its duration.
        checkpoint_bytes: See :class:`Simulation`.
    """
    spans, exposed = since(start, clock)
    series = [(time - start, sizes) for time, sizes in memory.series]
    series.append((seconds, series[-1][1]))
    return Simulation(
        title,
        clock.machine,
        seconds,
        spans,
        exposed,
        dict(memory.peak),
        dict(clock.sent_bytes),
        sum(engine.budget for engine in engines),
        engines[0].staging_budget,
        {place: n for place, n in memory.elsewhere.items() if n},
        dict(clock.copied_bytes),
        tuple(series),
        dict(memory.by_place),
        clock.model_flops,
        clock.seconds_at_peak,
        checkpoint_bytes,
    )


def since(start: float, clock: Clock) -> tuple[tuple[Span, ...], tuple[Exposed, ...]]:
    """Returns the operations and waits of a clock, with times relative to ``start``."""
    return (
        tuple(
            replace(each, start=each.start - start, end=each.end - start) for each in clock.spans
        ),
        tuple(replace(each, start=each.start - start) for each in clock.exposed),
    )


def part_between(clock: Clock, start: Mark, end: Mark) -> StepPart:
    """Returns the part of a step that the clock has recorded between two marks."""
    spans = clock.spans[start.num_spans : end.num_spans]
    return replace(
        combined(sub, end.part, start.part),
        compute_seconds=_busy(spans, lanes.COMPUTE),
        exposed_by_lane=_by_lane(clock.exposed[start.num_exposed : end.num_exposed]),
    )


def _busy(spans: Iterable[Span], lane: str) -> float:
    return sum(each.end - each.start for each in spans if each.lane == lane)


def _by_lane(exposed: Iterable[Exposed]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for each in exposed:
        sums[each.lane] = sums.get(each.lane, 0.0) + each.seconds
    return sums


def parallelize_model(
    model: nn.Module, parallelize: Parallelize | None, tp_mesh: DeviceMesh
) -> None:
    """Apply tensor parallelism, by the user's function or by the model's ``tp_plan``.

    Raises:
        SimulationError: The function raised an exception.
        ValueError: No parameter became a DTensor; see also :func:`apply_tp_plan`.
    """
    if parallelize is None:
        apply_tp_plan(model, tp_mesh)
        return
    with as_simulation_error("parallelizing the model"):
        parallelize(model, tp_mesh)
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        raise ValueError(
            "parallelize: expected a function that replaces parameters by DTensors in place, as "
            "parallelize_module does; found no DTensor"
        )


def checkpoint_bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the parameters and of their optimizer state, counted over all ranks'
    shards."""
    tensors: list[Tensor] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [each for each in tree_leaves(state) if isinstance(each, Tensor)]
    return sum(each.numel() * each.itemsize for each in tensors)


def shard_optimizer_of(optimizer: torch.optim.Optimizer) -> None:
    """Call ``shard_optimizer``, whose trial steps for offloaded state may read values of tensors.

    Raises:
        SimulationError: A trial step reads values.
        ValueError: See :func:`~fsdp_engine.optim.shard_optimizer`.
    """
    try:
        shard_optimizer(optimizer)
    except ValueError as error:
        if isinstance(error.__cause__, NEEDS_VALUES):
            with as_simulation_error("the optimizer's step"):
                raise error.__cause__ from None
        raise


class _Step:
    """Runs training steps of a simulated rank.

    Args:
        process: The process of the rank.
        engine: The engine of the sharded model.
        optimizer, inputs, loss: See :func:`simulate`.
        context: The context-parallel group. None: sequences are not sharded.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        inputs: Any,
        loss: Callable[[Any], Tensor] | None,
        context: ContextParallel | None = None,
    ) -> None:
        self._process = process
        self._engine = engine
        self._optimizer = optimizer
        self._inputs = inputs
        self._loss = loss
        self._context = context

    def run(self, microbatches: int) -> list[Mark]:
        """Run all microbatches, then the optimizer's step; return the end of each microbatch."""
        ends = []
        context, clock = self._context, self._process.clock
        for number in range(microbatches):
            is_last = number == microbatches - 1
            clock.phase = "forward"
            sync = nullcontext() if is_last else self._engine.no_sync()
            with sync, nullcontext() if context is None else context.shards(self._inputs):
                with as_simulation_error("forward"):
                    output = _call(self._engine.model, self._inputs)
                loss = self._loss_of(output)
                del output
                clock.phase = "backward"
                with as_simulation_error("backward"):
                    loss.backward()
                del loss
            ends.append(clock.mark())
        self._process.step(self._optimizer)
        return ends

    def _loss_of(self, output: Any) -> Tensor:
        """Returns the loss for the model's ``output``.

        Raises:
            ValueError: There is no loss, or it does not require grad.
            SimulationError: The user's function raised an exception.
        """
        if self._loss is None:
            found = _loss_of_output(output)
        else:
            with as_simulation_error("the loss"):
                found = self._loss(output)
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise ValueError(
                    "loss: expected a function that returns a tensor of one element; found "
                    f"{_describe(found)}"
                )
        if not found.requires_grad:
            raise ValueError(
                "loss: expected a loss that requires grad; found one that does not depend on "
                f"trainable parameters of {type(self._engine.model).__name__} (detached, within "
                "no_grad(), or all parameters frozen)"
            )
        return found


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _held_bytes(engines: Iterable[Engine]) -> Counter[str]:
    """Returns the bytes of engines by role, including their idle memory for transient storages."""
    found = Counter[str]()
    for engine in engines:
        found.update({**engine.memory_bytes(), "idle": engine.idle_memory_bytes})
    return found


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Returns the signature of forward; None if the user's pre-hooks may change the arguments."""
    return inspect.signature(model.forward) if not model._forward_pre_hooks else None


def _check_call(signature: inspect.Signature | None, inputs: Any, model: nn.Module) -> None:
    if signature is None:
        return
    named = inputs if isinstance(inputs, dict) else {}
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        signature.bind(*(() if isinstance(inputs, dict) else given), **named)
    except TypeError as error:
        found = f"{len(given)} positional argument{'s' * (len(given) != 1)}"
        if isinstance(inputs, dict):
            found = ", ".join(map(str, named)) or "no arguments"
        raise TypeError(
            f"batch: expected arguments of {type(model).__name__}.forward("
            f"{', '.join(signature.parameters)}); found {found}: {error}"
        ) from None


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss_of_output(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            "loss: expected a function that returns the loss, or a model that returns a tensor or "
            f"an object with a tensor `loss`; found a {type(output).__name__}"
        )
    return found if found.ndim == 0 else found.sum()


def make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an AdamW optimizer. DTensors have a group of their own, because torch's fused step
    does not accept DTensors and plain tensors in one group."""
    every = list(parameters)
    groups = [
        [each for each in every if isinstance(each, DTensor) is kind] for kind in (False, True)
    ]
    return torch.optim.AdamW([{"params": each} for each in groups if each], fused=True)
