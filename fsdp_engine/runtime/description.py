"""``engine.describe()``: a row for each unit with what it holds and sends."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.planning.assignment import expect
from fsdp_engine.runtime.measuring import Measurement
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.terminal import format_bytes


@dataclass(frozen=True)
class UnitRow:
    """One unit on this rank; bytes by role.

    Attributes:
        name: fully qualified name; "" for the root.
        num_parameters: parameter tensors.
        num_elements: elements of them.
        padding: elements that the flat buffers add.
        weight_bytes: main and compute weights at rest.
        grad_bytes: gradients, from their first reduction until they are cleared.
        full_bytes: full parameters while the unit is in use, beyond what it holds at rest.
        staging_bytes: full gradients until they are reduced, beyond what it holds at rest.
        num_gathers: parameter collectives per step of one microbatch.
        num_reductions: gradient collectives per step of one microbatch.
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
        title: of the table.
        rows: of each unit.
        measured: by the latest ``engine.measure()``, a table of its own; None: there was none.
    """

    title: str
    rows: tuple[UnitRow, ...]
    measured: Measurement | None = None

    def __str__(self) -> str:
        # Only here: training without tables needs no library for them.
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", show_footer=True)
        total = _total(self.rows)
        # Names of deep modules differ at their ends: they are folded, never cut.
        table.add_column("unit", footer="all", overflow="fold")
        columns = (
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
        for header, field, show in columns:
            footer = "" if field in ("full_bytes", "staging_bytes") else show(getattr(total, field))
            table.add_column(header, footer=footer, justify="right", no_wrap=True)
        for first, last, row in _runs(self.rows):
            name = row.name or "(root)"
            label = name if first == last else f"{name} .. {self.rows[last].name}"
            table.add_row(label, *(show(getattr(row, field)) for _, field, show in columns))
        text = io.StringIO()
        Console(file=text, width=132).print(table)
        described = text.getvalue().rstrip()
        return described if self.measured is None else f"{described}\n{self.measured}"


def describe_units(
    units: Sequence[Unit],
    strategy: Strategy,
    mesh: DataMesh,
    budget: int,
    measured: Measurement | None = None,
) -> Description:
    """Rows for ``units`` on this rank, and the latest measurement of them."""
    title = (
        f"{strategy} on {mesh.outer.size} x {mesh.inner.size} ranks (outer x inner), "
        f"up to {budget:,} elements gathered ahead. Bytes are this rank's; gathers and reductions "
        "are collectives per step of one microbatch."
    )
    expected = expect(units[0].built.modules[0], [unit.built.modules for unit in units])
    rows = (_row(unit, strategy, mesh, expected.num_gathers(unit.index)) for unit in units)
    return Description(title, tuple(rows), measured)


def _row(unit: Unit, strategy: Strategy, mesh: DataMesh, num_uses: int) -> UnitRow:
    reductions = sum(mesh.axis(axis).size > 1 for axis in Axis)
    gathers = [
        count_gathers(strategy, mesh, num_uses, b.weights.num_wires, changes=b.grads is not None)
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
    strategy: Strategy, mesh: DataMesh, num_uses: int, num_wires: int = 1, *, changes: bool = True
) -> int:
    """Gathers of one buffer in a step of one microbatch.

    Args:
        num_uses: how often it has to be full anew, where parameters are cut: twice, for forward and
            for backward; once for the last unit, which stays full between them, and for
            embeddings, whose backward needs no weights.
        num_wires: 2 where forward and backward read different bytes ([Note: Planes] in
            ``codecs/base.py``).
        changes: False for frozen weights, which are not gathered again where only optimizer state
            is cut.

    An axis of one rank costs nothing. Along each other axis parameters are gathered for each use
    where they are cut, once per step where only optimizer state is.
    """
    total = 0
    for axis in Axis:
        if mesh.axis(axis).size == 1:
            continue
        if strategy.cuts(Role.PARAM, axis):
            total += max(num_uses, num_wires)
        elif changes and strategy.cuts(Role.OPTIM, axis):
            total += num_wires
    return total


def _runs(rows: Sequence[UnitRow]) -> list[tuple[int, int, UnitRow]]:
    """(first, last, row) for each run of rows that differ in name only."""
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
