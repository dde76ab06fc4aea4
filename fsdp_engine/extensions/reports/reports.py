"""``engine.measure()`` measures memory and the time that compute waits for other lanes;
``engine.describe()`` returns a table with a row for each unit.

Nothing is measured outside of ``measure()``. [Note: Waits of compute] in ``comm/lanes.py``
describes how waits are recorded. Lanes, units, phases and kinds of memory have the same names as in
a simulation (``fe.Simulation.exposed``) and in profiler ranges. The memory of activations is known
only on CUDA, where torch's allocator counts it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_engine.comm.copy_lanes import copied_on
from fsdp_engine.comm.lanes import COPY_IN, LANES, name_of_wait, unit_of
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.engine import Engine
from fsdp_engine.extension_list import implementation
from fsdp_engine.extensions.reports.peaks import Peak, begin_device_peak, device_peak
from fsdp_engine.extensions.reports.wait_meter import WaitMeter
from fsdp_engine.memory.allocator import KIND_OF_ROLE
from fsdp_engine.optim.shadow import describe_steps
from fsdp_engine.optim.state_leaves import leaves_of
from fsdp_engine.optim.step_placement import StepPlacement
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.terminal import fold_name, format_bytes, import_rich, table_text
from fsdp_engine.units.assignment import expect

# Width of a table in characters, unless the name of a module is too long for it.
_WIDTH = 132
# Characters of padding and border of each column.
_BORDER = 3


@dataclass(frozen=True)
class Waited:
    """Time during which compute was idle, waiting for communication or for copies of offloaded
    state or activations.

    Attributes:
        unit: Label of the unit; "the root module" for the root. For activations, the block.
        lane: Lane that compute waited for: "inner gather", "inner reduce", "outer gather", "outer
            reduce", "state in", "state out", "activations in" or "activations out".
        phase: The phase of the program: "forward", "backward" or "step".
        seconds: Total time of the waits in all steps.
        count: Number of waits.
    """

    unit: str
    lane: str
    phase: str
    seconds: float
    count: int


class Measurement:
    """Results of one ``engine.measure()`` on this rank, also while it runs; ``str`` gives a table.

    Measuring does not change how steps run, and causes no host sync, but it resets torch's peak of
    allocated memory on CUDA. Several measurements may be open at the same time and may start at any
    time; each counts from its own start. Not collective: a single rank may measure.

    Args:
        engine: The engine to measure.
    """

    def __init__(self, engine: Engine) -> None:
        self._units = [unit.label for unit in engine.units]
        self._memory = memory = engine.memory
        # None after the measurement, so that the result does not keep the engine alive.
        self._scheduler: Scheduler | None = engine.scheduler
        self._peak = Peak(memory.ledger)
        self._meter = WaitMeter(self._phase)
        self._allocated: int | None = None
        self._optimizers: dict[int, int] = {}  # bytes of state by id of the optimizer
        self._began = time.perf_counter()
        self._first_step = engine.reductions.num_steps
        self._seconds = 0.0
        self._steps = 0

    @contextmanager
    def measuring(self, engine: Engine) -> Iterator[Measurement]:
        """Context within which ``engine`` is measured."""

        def stepped(optimizer: torch.optim.Optimizer, *args: object) -> None:
            if engine.is_stepped_by(optimizer):
                self._optimizers[id(optimizer)] = _state_bytes(optimizer)

        ledger, meter, peak = self._memory.ledger, self._meter, self._peak
        lanes = [*engine.lanes.all, *(lane for part in engine.parts for lane in part.lanes)]
        begin_device_peak(self._memory.device)
        ledger.watchers = (*ledger.watchers, peak)
        for lane in lanes:
            lane.meters = (*lane.meters, meter)
        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield self
        finally:
            hook.remove()
            for lane in lanes:
                lane.meters = tuple(each for each in lane.meters if each is not meter)
            ledger.watchers = tuple(each for each in ledger.watchers if each is not peak)
            self._look()
            self._scheduler = None

    @property
    def num_steps(self) -> int:
        """Number of steps whose last reductions are done or submitted."""
        self._look()
        return self._steps

    @property
    def seconds(self) -> float:
        """Wall-clock time for which the measurement was open."""
        self._look()
        return self._seconds

    @property
    def waited(self) -> tuple[Waited, ...]:
        """Waits of compute, longest first. On CUDA, reading it waits for the last of them."""
        self._meter.read(wait=True)
        sums: dict[tuple[str, str, str], list[float]] = {}
        for (lane, label, phase), waits in self._meter.found.items():
            both = sums.setdefault((unit_of(label), lane, phase), [0.0, 0.0])
            both[0] += waits.seconds
            both[1] += waits.count
        found = (Waited(*key, seconds, int(count)) for key, (seconds, count) in sums.items())
        return tuple(sorted(found, key=lambda each: -each.seconds))

    @property
    def waited_seconds(self) -> float:
        """Seconds that compute waited for communication and copies, in all steps."""
        return sum(each.seconds for each in self.waited)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind at the engine's peak: "weights", "gradients", "transient" (full parameters
        and gradients in staging buffers) and "optimizer" (optimizer state).

        On CUDA also "activations": torch's peak of allocated memory minus the other kinds. This is
        a lower bound, and includes all other tensors on the device.
        """
        kinds = dict.fromkeys(("weights", "gradients", "optimizer", "transient"), 0)
        for role, count in self._peak.held.items():
            kinds[KIND_OF_ROLE.get(role, "weights")] += count
        kinds["optimizer"] += sum(self._optimizers.values())
        self._look()
        if self._allocated is not None:
            kinds["activations"] = max(self._allocated - sum(kinds.values()), 0)
        return kinds

    @property
    def peak_bytes(self) -> int:
        """Sum of ``memory`` over all kinds."""
        return sum(self.memory.values())

    def by_unit(self) -> dict[str, dict[str, float]]:
        """Returns seconds waited, in all steps, by unit and lane. Units without waits are
        omitted."""
        sums: dict[str, dict[str, float]] = {}
        for each in self.waited:
            lanes = sums.setdefault(each.unit, {})
            lanes[each.lane] = lanes.get(each.lane, 0.0) + each.seconds
        order = {name: place for place, name in enumerate(self._units)}
        return {unit: sums[unit] for unit in sorted(sums, key=lambda u: order.get(u, len(order)))}

    def __str__(self) -> str:
        units = self.by_unit()
        found = {lane for each in units.values() for lane in each}
        known = (*LANES, COPY_IN)
        lanes = [*(lane for lane in known if lane in found), *sorted(found.difference(known))]
        columns = []
        for lane in lanes:
            in_lane = sum(each.get(lane, 0.0) for each in units.values())
            cells = [self._ms(each[lane]) if lane in each else "" for each in units.values()]
            columns.append((lane, cells, self._ms(in_lane)))
        sums = [self._ms(sum(each.values())) for each in units.values()]
        columns.append(("ms", sums, self._ms(self.waited_seconds)))
        tables = [_table("waited for", list(units), columns)] if units else []
        return "\n".join([self._title(), *tables, self._held()])

    def _title(self) -> str:
        share = self.waited_seconds / self.seconds if self.seconds else 0.0
        of_step = f", {self._ms(self.seconds)} ms a step" if self.num_steps else ""
        copied = {what for each in self.waited if (what := copied_on(each.lane))}
        names = " and ".join(sorted(copied))
        text = (
            f"Measured: {self.num_steps} steps in {self.seconds:.3f} s{of_step}. Compute waited "
            f"{share:.1%} of it for communication{f' and copies of {names}' if names else ''}"
        )
        if not self.waited:
            return f"{text}."
        most = self.waited[0]
        name = name_of_wait(most.lane, most.unit)
        how = "Milliseconds of a step" if self.num_steps else "Milliseconds in all"
        return f"{text}, longest for the {name} in {most.phase}. {how}:"

    def _held(self) -> str:
        kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in self.memory.items() if n)
        known = "" if self._allocated is not None else "; activations are not measured on a CPU"
        return f"Held at most: {format_bytes(self.peak_bytes)}: {kinds}{known}"

    def _ms(self, seconds: float) -> str:
        return f"{seconds * 1e3 / max(self.num_steps, 1):.3f}"

    def _phase(self) -> str:
        return self._scheduler.phase if self._scheduler is not None else "step"

    def _look(self) -> None:
        """Update time, step count and device peak while the measurement is open."""
        if self._scheduler is not None:
            self._seconds = time.perf_counter() - self._began
            self._steps = self._scheduler.reductions.num_steps - self._first_step
            self._allocated = device_peak(self._memory.device)


def _table(
    heading: str,
    names: Sequence[str],
    columns: Sequence[tuple[str, Sequence[str], str]],
    title: str | None = None,
) -> str:
    """Returns a table with a row for each unit, and a last row for all of them.

    Args:
        heading: The heading of the first column, which has the names.
        names: The name of each row. Names of deep modules differ at their ends, so long names are
            folded and not truncated.
        columns: For each other column: the heading, the cells, and the cell of the last row.
        title: The title of the table.
    """
    import_rich()  # here, since most training runs print no table
    from rich.table import Table

    used = sum(max(map(len, (top, *cells, last))) + _BORDER for top, cells, last in columns)
    room = _WIDTH - used - _BORDER - 1
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column(heading, footer="all", no_wrap=True)
    for top, _, last in columns:
        table.add_column(top, footer=last, justify="right", no_wrap=True)
    for index, name in enumerate(names):
        table.add_row(fold_name(name, room), *(cells[index] for _, cells, _ in columns))
    return table_text(table)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of this rank's shard of the optimizer state, without offloaded state."""
    storages = {}
    is_elsewhere = implementation(StepPlacement).is_elsewhere
    for param, state in optimizer.state.items():
        for value in leaves_of(state):
            if isinstance(value, Tensor) and not (value.ndim and is_elsewhere(param)):
                local = value.to_local() if isinstance(value, DTensor) else value
                storage = local.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class UnitRow:
    """Row of one unit on this rank.

    Attributes:
        name: Fully qualified name; "" for the root.
        num_parameters: Number of parameters.
        num_elements: Number of elements of the parameters.
        padding: Number of padding elements in the flat buffers.
        weight_bytes: Bytes of main and compute weights while the unit is not in use.
        grad_bytes: Bytes of gradients between their first reduction and their clearing.
        full_bytes: Additional bytes of full parameters while the unit is in use.
        staging_bytes: Additional bytes of full gradients until they are reduced.
        num_gathers: Parameter collectives per step of one microbatch.
        num_reductions: Gradient collectives per step of one microbatch.
    """

    name: str
    num_parameters: int
    num_elements: int
    padding: int
    weight_bytes: int
    grad_bytes: int
    full_bytes: int
    staging_bytes: int
    num_gathers: int
    num_reductions: int


@dataclass(frozen=True)
class Description:
    """Rows and totals; ``str`` gives a table.

    Attributes:
        title: The title of the table.
        rows: A row for each unit.
        measured: Result of the latest ``engine.measure()``, shown as a second table. None: there
            was none.
        elsewhere: Bytes of offloaded state and activations on this rank, by place ("host",
            "disk") and role.
        optimizers: One line for each optimizer that steps full parameters.
    """

    title: str
    rows: tuple[UnitRow, ...]
    measured: Measurement | None = None
    elsewhere: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = (
            ("parameters", "num_parameters", _count),
            ("elements", "num_elements", _count),
            ("padding", "padding", _count),
            ("weights", "weight_bytes", format_bytes),
            ("gradients", "grad_bytes", format_bytes),
            ("+ full", "full_bytes", format_bytes),
            ("+ staging", "staging_bytes", format_bytes),
            ("gathers", "num_gathers", _count),
            ("reductions", "num_reductions", _count),
        )
        total, runs, labels = _total(self.rows), _runs(self.rows), []
        for first, last, row in runs:
            name = row.name or "(root)"
            labels.append(name if first == last else f"{name} .. {self.rows[last].name}")
        columns = []
        for heading, name, show in shown:
            footer = "" if name in ("full_bytes", "staging_bytes") else show(getattr(total, name))
            columns.append((heading, [show(getattr(row, name)) for _, _, row in runs], footer))
        described = _table("unit", labels, columns, self.title)
        for place, held in self.elsewhere.items():
            kinds = ", ".join(f"{role} {format_bytes(n)}" for role, n in held.items())
            described += f"\nOn the {place}: {kinds}"
        described = "\n".join([described, *self.optimizers])
        return described if self.measured is None else f"{described}\n{self.measured}"


class _Latest:
    """Holds the latest measurement of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.measured: Measurement | None = None


@contextmanager
def measure(engine: Engine) -> Iterator[Measurement]:
    """Context that measures how long compute waits for gathers, reductions and copies of offloaded
    state and activations, and the bytes that the engine holds. See ``Measurement``. ``describe``
    shows the latest measurement."""
    measured = engine.extension(_Latest).measured = Measurement(engine)
    with measured.measuring(engine):
        yield measured


def describe(engine: Engine) -> Description:
    """Returns, for each unit, the bytes it holds and its number of collectives; also the bytes of
    offloaded state and activations, and the latest measurement. ``print`` shows a table."""
    units, strategy, mesh = engine.units, engine.strategy, engine.mesh
    title = (
        f"{strategy.on_ranks(mesh.inner.size, mesh.outer.size)}; up to {engine.budget:,} elements "
        "are prefetched. Bytes are those of this rank; gathers and reductions are collectives per "
        "step of one microbatch."
    )
    expected = expect(units[0].modules[0], [unit.modules for unit in units])
    # The root is omitted if it has no parameters of its own.
    shown = [unit for unit in units if unit.buffers] or units[:1]
    if len(shown) == 1 and len(shown[0].modules) > 1:
        title += (
            " All modules are one unit, because small units are joined "
            "(fe.Options(min_unit_size=0) keeps them apart)."
        )
    rows = (_row(unit, strategy, mesh, expected.num_gathers(unit.index)) for unit in shown)
    ids = [id(p) for unit in units for buffer in unit.trainable for p in buffer.sharded_params]
    held = {place: engine.memory_bytes(place) for place in engine.memory.elsewhere}
    elsewhere = {place: by_role for place, by_role in held.items() if by_role}
    measured = engine.extension(_Latest).measured
    return Description(title, tuple(rows), measured, elsewhere, tuple(describe_steps(ids)))


def _row(unit: Unit, strategy: Strategy, mesh: DataMesh, num_uses: int) -> UnitRow:
    reductions = sum(mesh.axis(axis).size > 1 for axis in Axis)
    gathers = [
        count_gathers(strategy, mesh, num_uses, b.weights.num_gathers, changes=b.grads is not None)
        for b in unit.buffers
    ]
    return UnitRow(
        name=unit.name,
        num_parameters=sum(len(buffer.records) for buffer in unit.buffers),
        num_elements=sum(buffer.layout.num_tensor_elements for buffer in unit.buffers),
        padding=sum(buffer.layout.padding for buffer in unit.buffers),
        weight_bytes=sum(buffer.weights.rest_bytes for buffer in unit.buffers),
        grad_bytes=sum(b.grads.rest_bytes for b in unit.trainable if b.grads is not None),
        full_bytes=sum(buffer.weights.transient_bytes for buffer in unit.buffers),
        staging_bytes=sum(b.grads.transient_bytes for b in unit.trainable if b.grads is not None),
        num_gathers=sum(gathers),
        num_reductions=len(unit.trainable) * reductions,
    )


def count_gathers(
    strategy: Strategy, mesh: DataMesh, num_uses: int, per_change: int = 1, *, changes: bool = True
) -> int:
    """Returns the number of gathers of one buffer in a step of one microbatch.

    Args:
        strategy: The levels of both axes.
        mesh: The data-parallel ranks.
        num_uses: Number of times the buffer has to be gathered if its parameters are sharded: two
            (forward and backward), or one for the last unit, which stays full in between, and for
            embeddings, whose backward needs no weights.
        per_change: Number of gathers needed to gather all encodings of the weights once.
        changes: False for frozen weights, which are not gathered again if only the optimizer state
            is sharded.

    An axis of one rank needs no gathers. Any other axis needs a gather for each use if it shards
    parameters, and one per step if it shards only optimizer state.
    """
    total = 0
    for axis in Axis:
        if mesh.axis(axis).size == 1:
            continue
        if strategy.shards(Role.PARAM, axis):
            total += max(num_uses, per_change)
        elif changes and strategy.shards(Role.OPTIM, axis):
            total += per_change
    return total


def _runs(rows: Sequence[UnitRow]) -> list[tuple[int, int, UnitRow]]:
    """Returns (first, last, row) for each run of consecutive rows that differ in name only."""
    runs: list[tuple[int, int, UnitRow]] = []
    for index, row in enumerate(rows):
        before = runs[-1][2] if runs else None
        if before and row.name and before.name and replace(before, name=row.name) == row:
            runs[-1] = (runs[-1][0], index, before)
        else:
            runs.append((index, index, row))
    return runs


def _total(rows: Sequence[UnitRow]) -> UnitRow:
    names = [field.name for field in fields(UnitRow) if field.name != "name"]
    return UnitRow("", *(sum(getattr(row, name) for row in rows) for name in names))


def _count(value: int) -> str:
    return f"{value:,}"
