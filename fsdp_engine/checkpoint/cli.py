"""Command line for checkpoints, without a process group or a GPU.

    python -m fsdp_engine.checkpoint inspect PATH       print the contents
    python -m fsdp_engine.checkpoint verify PATH...     verify the checksums of all files
    python -m fsdp_engine.checkpoint export PATH DIR    write safetensors in Hugging Face's layout
    python -m fsdp_engine.checkpoint diff A B           compare two checkpoints

A PATH is a checkpoint of the engine or of torch.distributed.checkpoint, or a directory of
checkpoints, of which the latest is used. The exit code is 0 for success, 1 for damage or
differences, and 2 for errors, which are one line on stderr. A checkpoint runs no code unless
--trust is given.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleError
from typing import Annotated, Any
from zipfile import BadZipFile

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fsdp_engine.checkpoint import tables
from fsdp_engine.checkpoint.averages import names_of_averages
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.hugging_face import export_safetensors
from fsdp_engine.checkpoint.inspection import compare, describe, matches, shared_bytes, tensor_bytes
from fsdp_engine.checkpoint.model_state import EXTRA_TENSORS, MODEL
from fsdp_engine.checkpoint.offline import (
    StoredCheckpoint,
    Verdict,
    count_files,
    find_folders,
    verify,
)
from fsdp_engine.terminal import counted, format_bytes, print_whole

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}

# torch.load raises the last two for damaged bytes.
_ERRORS = (OSError, ValueError, EOFError, RuntimeError, PickleError, BadZipFile)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

PathArgument = Annotated[Path, typer.Argument(help="a checkpoint, or a directory of them")]
StepOption = Annotated[
    int | None, typer.Option(help="step of a checkpoint in a directory; default: the latest")
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="allow objects of any class, which may run the author's code"),
]
MatchOption = Annotated[
    str | None, typer.Option(help="only entries whose names match, such as '*.bias'")
]


@app.callback()
def _root() -> None:
    """Inspect, verify, export and compare checkpoints."""


@app.command("inspect")
def inspect_(
    path: PathArgument,
    step: StepOption = None,
    match: MatchOption = None,
    tensors: Annotated[bool, typer.Option(help="list the tensors")] = True,
    every: Annotated[
        bool, typer.Option("--all", help="list each tensor, for any number of tensors")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    trust: TrustOption = False,
) -> None:
    """Print the contents of a checkpoint: properties of the save, optimizer, extra, tensors."""
    with _errors_reported():
        (folder,) = find_folders(path, step)
        found = describe(StoredCheckpoint(folder, trust))
        directory = CheckpointDirectory(path)
        steps = [] if folder == path else list(directory.complete())
        left = [each.name for each in (*directory.unfinished(), *directory.incomplete())]
    rows = [row for row in found.tensors if matches(row.name, match)] if tensors else []
    if as_json:
        values = dataclasses.asdict(dataclasses.replace(found, tensors=rows))
        typer.echo(json.dumps({"steps": steps, **values}, indent=1))
        return
    Console().print(tables.summary(found, steps, left))
    if rows:
        print_whole(tables.tensors(rows, every))
    elif tensors:
        typer.echo(f"no tensors{'' if match is None else f' that match {match!r}'}")


@app.command("verify")
def verify_(
    paths: Annotated[list[Path], typer.Argument(help="checkpoints, or directories of them")],
    step: StepOption = None,
    every: Annotated[bool, typer.Option("--all", help="all checkpoints of a directory")] = False,
    trust: TrustOption = False,
) -> None:
    """Verify the checksums of all files; list damaged files and tensors."""
    num_damaged = 0
    with _errors_reported():
        folders = [
            folder
            for path in paths
            for folder in find_folders(path, step, every=every, broken=True)
        ]
        for folder in folders:
            with _progress(folder.name, count_files(folder)[1]) as progress:
                verdict = verify(folder, progress, trust)
            _print_verdict(verdict)
            num_damaged += bool(verdict.damages)
    if num_damaged:
        raise typer.Exit(1)


def _print_verdict(verdict: Verdict) -> None:
    """Print a line for a checkpoint, and a line for each damage."""
    size = f"{counted(verdict.num_files, 'file')}, {format_bytes(verdict.num_bytes)}"
    if verdict.damages:
        typer.echo(f"DAMAGED {verdict.folder} ({size})")
    elif verdict.has_checksums:
        typer.echo(f"ok {verdict.folder}: every byte is as it was written ({size})")
    else:
        typer.echo(
            f"ok {verdict.folder}: each entry has the CRC that is stored with it; neither "
            f"manifest.json nor .metadata has checksums of files ({size})"
        )
    for line in verdict.damages:
        typer.echo(f"  {line}")
    if verdict.strays:
        typer.echo(f"  not part of the checkpoint: {tables.listed(verdict.strays)}")


@app.command(
    # Typer keeps the line breaks of a docstring.
    help="Write the model's tensors as safetensors, in Hugging Face's layout.\n\n"
    "These are the trained weights, or their averages (--averages ema). Files of an earlier export "
    "are replaced. A tied weight is written once, under its first name: read such a file with "
    "safetensors.torch.load_model."
)
def export(
    path: PathArgument,
    directory: Annotated[Path, typer.Argument(help="output directory; created if missing")],
    step: StepOption = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"dtype of floating-point tensors: {', '.join(DTYPES)}")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="bytes of tensors in one file")] = "5GB",
    averages: Annotated[
        str | None, typer.Option(help="write the averages at this name in extra, such as ema")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Write the model's tensors as safetensors, in Hugging Face's layout."""
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype: expected one of {', '.join(DTYPES)}; found {dtype!r}")
    with _errors_reported():
        (folder,) = find_folders(path, step)
        checkpoint = StoredCheckpoint(folder, trust)
        num_bytes = sum(
            tensor_bytes(row)
            for key, row in checkpoint.tensors.items()
            if checkpoint.section(key) == MODEL
        )
        with _progress(f"export of {folder.name}", num_bytes) as progress:
            export_safetensors(
                folder,
                directory,
                DTYPES.get(dtype or ""),
                max_shard_size,
                averages=averages,
                progress=progress,
                trust=trust,
            )
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"{folder} -> {directory}: {counted(len(files), 'file')}, {format_bytes(size)}")
    if averages is None and checkpoint.saved.below(EXTRA_TENSORS):
        names = names_of_averages(checkpoint)
        typer.echo(
            "These are the trained weights. The checkpoint also has "
            + (f"averages: --averages {names[0]} writes them" if names else "tensors in extra")
        )


@app.command()
def diff(
    a: PathArgument,
    b: PathArgument,
    step: StepOption = None,
    match: MatchOption = None,
    rtol: Annotated[
        float, typer.Option(help="tolerance of tensors and floats, relative to B's values")
    ] = 0.0,
    atol: Annotated[float, typer.Option(help="absolute tolerance")] = 0.0,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="also compare the entries of each rank")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="list all differences")] = False,
    trust: TrustOption = False,
) -> None:
    """Compare two checkpoints: entries, shapes, every element, hyperparameters and step."""
    with _errors_reported():
        first, second = (StoredCheckpoint(find_folders(path, step)[0], trust) for path in (a, b))
        with _progress("diff", shared_bytes(first, second, match)) as progress:
            found = compare(
                first, second, match=match, rtol=rtol, atol=atol, ranks=ranks, progress=progress
            )
    typer.echo(f"A {tables.title(first)}\nB {tables.title(second)}")
    limit = None if every else tables.MAX_LINES
    for title, lines in (
        ("only in A", found.only_in_a),
        ("only in B", found.only_in_b),
        ("different shapes or dtypes (A; B)", found.other),
        ("different values (A; B)", found.values),
    ):
        _print_lines(title, lines, limit)
    if different := [each for each in found.tensors if each.num_different]:
        print_whole(tables.differences(different, limit))
    if num_within := len(found.tensors) - len(different):
        typer.echo(f"differences within the tolerance: {counted(num_within, 'tensor')}")
    if found.left_out:
        typer.echo(f"not compared: {len(found.left_out)} entries of ranks (--ranks compares them)")
    norms = ", ".join(f"{name} {value:.6g}" for name, value in found.norms.items())
    typer.echo(
        f"{'equal' if found.is_empty else 'different'}: {found.num_compared:,} tensors compared; "
        f"norm of the difference {found.norm:.6g}{f' ({norms})' if norms else ''}"
    )
    if not found.is_empty:
        raise typer.Exit(1)


def _print_lines(title: str, lines: Sequence[str], limit: int | None) -> None:
    if lines:
        typer.echo(f"{title}: {len(lines):,}")
    for line in lines[:limit]:
        typer.echo(f"  {line}")
    if limit is not None and len(lines) > limit:
        typer.echo(f"  and {len(lines) - limit:,} more (--all lists them)")


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Context that reports errors in one line on stderr, and exits with code 2."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # subclasses of RuntimeError
        raise
    except _ERRORS as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes on stderr, if it is a terminal."""
    console = Console(stderr=True)
    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda count: bar.advance(task, count)


def main() -> None:
    """Run the command line ``python -m fsdp_engine.checkpoint``."""
    app(prog_name="python -m fsdp_engine.checkpoint")
