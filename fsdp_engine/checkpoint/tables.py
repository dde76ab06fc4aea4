"""Formats the tables of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from fsdp_engine.checkpoint.inspection import (
    Description,
    TensorDifference,
    TensorGroup,
    group_tensors,
    shorten,
    tensor_bytes,
)
from fsdp_engine.checkpoint.manifest import TensorRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    RANKS,
)
from fsdp_engine.checkpoint.offline import StoredCheckpoint
from fsdp_engine.terminal import counted, format_bytes

# Maximum number of tensors that are shown without grouping.
MAX_TENSORS = 40
# Maximum number of lines that are shown without --all.
MAX_LINES = 40

_NO_MANIFEST = (
    "unknown: no manifest.json (written by save_checkpoint or torch.distributed.checkpoint)"
)


def title(checkpoint: StoredCheckpoint) -> str:
    """Describe a checkpoint in one line."""
    manifest = checkpoint.manifest
    if manifest is None:
        step = "" if checkpoint.step is None else f"step {checkpoint.step}, "
        return f"{checkpoint.folder}: {step}without a manifest"
    mesh = " x ".join(str(size) for size in manifest.mesh.values())
    ranks = counted(manifest.world_size, "rank")
    return (
        f"{checkpoint.folder}: step {manifest.step}, {ranks} ({mesh}), {_pair(manifest.strategy)}"
    )


def summary(found: Description, steps: Sequence[int], left: Sequence[str]) -> Table:
    """Returns a table of all properties of a checkpoint except its tensors.

    Args:
        found: The description of the checkpoint.
        steps: The steps in its directory; empty if the path is a single checkpoint.
        left: Names of folders in its directory that are not complete.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, *values: str) -> None:
        for number, value in enumerate(values):
            table.add_row("" if number else name, escape(value))

    line("checkpoint", found.path)
    line("step", _NO_MANIFEST if found.step is None else str(found.step))
    if steps:
        line("steps", f"{listed([f'{each}' for each in steps[::-1]], 16)} (latest first)")
    if left:
        line("incomplete", listed(left))
    line("saved", found.saved_at)
    if found.mesh is not None and found.strategy is not None:
        mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items())
        line("world", f"{counted(found.world_size or 0, 'rank')} ({mesh})")
        line("strategy", _pair(found.strategy))
    if found.libraries is not None:
        line("libraries", ", ".join(f"{name} {value}" for name, value in found.libraries.items()))
    if found.trainable_only:
        line("parameters", "only trainable ones; frozen ones were not saved")
    if found.ties:
        names = listed([f"{name} is {first}" for name, first in found.ties.items()])
        line("tied", f"{names} (stored and counted under each name)")
    line("files", f"{found.num_files}, {format_bytes(found.num_bytes)}")
    if found.missing_files:
        line("MISSING", listed(found.missing_files))
    if found.stray_files:
        line("stray", listed(found.stray_files))
    for name, section in found.sections.items():
        if name in (EXTRA, RANKS) and not section.tensors:
            continue  # shown in separate lines
        parts = [found.optimizer] if name == OPTIMIZER and found.optimizer is not None else []
        if section.tensors:
            parts.append(
                f"{section.elements:,} elements in {counted(section.tensors, 'tensor')}, "
                f"{format_bytes(section.bytes)}"
            )
        if section.objects and name not in (EXTRA, OPTIMIZER):
            parts.append(counted(section.objects, "object"))
        line(name, ", ".join(parts))
        if name == OPTIMIZER:
            _add_groups(line, found)
    shown = [f"{key}: {shorten(value)}" for key, value in found.extra.items()]
    more = len(shown) - MAX_LINES
    line("extra of rank 0", *shown[:MAX_LINES], *([f"and {more:,} more (--json)"] * (more > 0)))
    if found.num_ranks:
        line("each rank's own", f"random states and extra of {counted(found.num_ranks, 'rank')}")
    return table


def _add_groups(line: Callable[..., None], found: Description) -> None:
    for group in found.groups:
        values = ", ".join(
            f"{key} {shorten(value)}" for key, value in group.hyperparameters.items()
        )
        line(f"  group {group.number}", f"{counted(group.parameters, 'parameter')}: {values}")
    if found.num_groups > len(found.groups):
        line("", f"and {found.num_groups - len(found.groups):,} groups more")


def tensors(rows: Sequence[TensorRow], every: bool) -> Table:
    """Returns a table of tensors. Many tensors are grouped by name, shape and dtype.

    Args:
        rows: The tensors; at least one.
        every: Do not group tensors, for any number of them.
    """
    is_grouped = len(rows) > MAX_TENSORS and not every
    elements = sum(math.prod(row.shape) for row in rows)
    table = Table(
        title=f"{len(rows):,} tensors, {elements:,} elements",
        caption="tensors whose names differ only in numbers share a line (--all: one line each)"
        if is_grouped
        else None,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("name", no_wrap=True)
    if is_grouped:
        table.add_column("tensors", justify="right", no_wrap=True)
    for column in ("shape", "dtype", "elements", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    lines = (
        group_tensors(rows)
        if is_grouped
        else [TensorGroup(r.name, 1, r.shape, r.dtype) for r in rows]
    )
    most = len(lines) if every or len(lines) < 3 * MAX_TENSORS else 2 * MAX_TENSORS
    for each in lines[:most]:
        row = TensorRow(each.name, each.shape, each.dtype)
        cells = [escape(each.name), *([f"{each.count:,}"] if is_grouped else [])]
        cells += [escape(str([*each.shape])), each.dtype]
        elements = each.count * math.prod(each.shape)
        table.add_row(*cells, f"{elements:,}", format_bytes(each.count * tensor_bytes(row)))
    if not every and len(lines) > most:
        table.add_row(f"and {counted(len(lines) - most, 'line')} more (--match, --all)")
    return table


def differences(found: Sequence[TensorDifference], limit: int | None) -> Table:
    """Returns a table of tensors that differ: the model's first, then by the largest difference.

    Args:
        found: The tensors.
        limit: Maximum number of rows. None: no limit.
    """
    has_nan = any(each.num_nan for each in found)
    table = Table(title=f"{len(found):,} tensors with different values", title_justify="left")
    table.add_column("name", no_wrap=True)
    columns = ["elements", "different", *(["NaN in one"] if has_nan else [])]
    for column in (*columns, "max |A - B|", "norm of A - B"):
        table.add_column(column, justify="right", no_wrap=True)
    ordered = sorted(
        found, key=lambda each: (each.section != MODEL, each.num_nan == 0, -each.max_abs)
    )
    for each in ordered[:limit]:
        counts = [each.num_elements, each.num_different, *([each.num_nan] if has_nan else [])]
        cells = [f"{count:,}" for count in counts]
        table.add_row(escape(each.name), *cells, f"{each.max_abs:.6g}", f"{each.norm:.6g}")
    if limit is not None and len(ordered) > limit:
        table.add_row(f"and {len(ordered) - limit:,} more (--all lists them)")
    return table


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Join the first ``limit`` names, and append the number of other names."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _pair(strategy: dict[str, str]) -> str:
    return ", ".join(f"{axis} {name}" for axis, name in strategy.items())
