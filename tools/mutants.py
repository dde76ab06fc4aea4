"""Mutation tests of the core: which changes of its code do the ordinary tests notice?

    python -m tools.mutants make [--number 200] [--seed 49]     write the list of mutants
    python -m tools.measure_tests run --coverage                find out which test runs which line
    python -m tools.mutants run [--first 0] [--number 200]      run tests with each, write results
    python -m tools.mutants again [--seconds 1200]              run more tests with the survivors
    python -m tools.mutants table                               print the results as a table

A mutant is one small change: another operator or constant, swapped arguments, a statement that only
calls a function (a wait, for example) left out, a condition that is always true. The list is
``tests/mutants.json``: the place is named by file, function and source text, so that it survives
changes elsewhere. A mutant whose text is gone is reported as *gone* and not counted.

A mutant is caught when a test fails. The tests are ordinary ones that run the mutated line and pass
without the mutant: the quickest, as many as together take :data:`SELECTED_SECONDS`. They run in one
process up to the first failure. A run that exceeds this time by :data:`TIMEOUT_SECONDS` counts as
caught, too. Results are in ``benchmarks/results/mutants.json``, or where ``--results`` says. Parts
of the list may run at the same time with results files of their own.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutants.json"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
CORE = ("buffers", "comm", "flat_dtensor", "layout", "memory", "runtime", "strategies", "units")
# Files that are not part of a training step of the core: measuring, disks, texts.
LEFT_OUT = ("disk", "stall_monitor", "reports", "rehearsal", "meter")
# Files of ``measure_tests run --coverage``: lines by test, and seconds of tests.
COVERAGE = ROOT / "build" / "tests" / "data"
TIMES = ROOT / "build" / "tests" / "times.xml"
# The ordinary tests.
PYTEST = ("pytest", "-q", "--no-header", "-m", "not thorough and not programs")
SELECTED_SECONDS = 240.0
TIMEOUT_SECONDS = 900.0
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: relative to the repository.
        function: qualified name of the function that it changes.
        kind: The kind of change.
        line: source text of the statement, without indentation.
        before, after: source text of the changed expression.
        place: number of the occurrence of ``before`` in the statement.
        equivalent: Why no test can tell the mutant from the original. Empty: tests can.
    """

    file: str
    function: str
    kind: str
    line: str
    before: str
    after: str
    place: int
    equivalent: str = ""


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields (kind, changed node, new source) for each mutant of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED and len(node.ops) == 1:
        other = ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators)
        yield "comparison", node, ast.unparse(other)
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", node, ast.unparse(ast.BoolOp(swapped, node.values))
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        other_op = COMPUTED[type(node.op)]()
        yield "operator", node, ast.unparse(ast.BinOp(node.left, other_op, node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", node, str(node.value + 1)
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        same = ast.dump(node.args[0]) == ast.dump(node.args[1])
        if not same and not any(isinstance(each, ast.Starred) for each in node.args):
            yield "arguments", node, ast.unparse(ast.Call(node.func, node.args[::-1], []))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", node, "pass"
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "condition", node.test, "True"


def in_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yields (qualified name, statement) of all statements in functions, also of inner ones."""
    for child in ast.iter_child_nodes(tree):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function or isinstance(child, ast.ClassDef):
            name = f"{prefix}{child.name}"  # type: ignore[attr-defined]
            if is_function:
                for each in ast.walk(child):
                    if isinstance(each, ast.stmt) and each is not child:
                        yield name, each
            else:
                yield from in_functions(child, f"{name}.")


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file. Texts of errors and warnings, and assertions, are not changed."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = []
    for function, statement in in_functions(ast.parse(source)):
        if isinstance(statement, (ast.Raise, ast.Assert, ast.FunctionDef, ast.ClassDef)):
            continue
        line = lines[statement.lineno - 1].strip()
        own = [statement, *(each for each in ast.walk(statement) if isinstance(each, ast.expr))]
        checks = {
            id(each.value)
            for each in ast.walk(statement)
            if isinstance(each, ast.keyword) and each.arg in ("strict", "stacklevel")
        }
        skipped = checks | _annotation_nodes(statement)
        for node in own:
            if id(node) in skipped:  # annotations and checks, not data
                continue
            for kind, changed, after in changes(node):
                if changed.lineno != changed.end_lineno or changed.lineno != statement.lineno:  # type: ignore[attr-defined]
                    continue  # one line, so that its text names it
                before = ast.get_source_segment(source, changed)
                if not before or before.startswith(("warn", "super()")) or before == after:
                    continue
                start = changed.col_offset - statement.col_offset  # type: ignore[attr-defined]
                place = line[:start].count(before)
                found.append(
                    Mutant(str(path.relative_to(ROOT)), function, kind, line, before, after, place)
                )
    return found


def _annotation_nodes(statement: ast.stmt) -> set[int]:
    """Identities of the nodes of annotations, which are not evaluated."""
    annotations = [
        each.annotation
        for each in ast.walk(statement)
        if isinstance(each, (ast.AnnAssign, ast.arg)) and each.annotation is not None
    ]
    return {id(node) for each in annotations for node in ast.walk(each)}


def make(number: int, seed: int) -> None:
    """Write a list of ``number`` mutants, of each file in proportion to its candidates."""
    candidates: list[Mutant] = []
    for folder in CORE:
        for path in sorted((ROOT / "fsdp_engine" / folder).rglob("*.py")):
            if not any(word in path.name for word in LEFT_OUT):
                candidates += mutants_of(path)
    chosen = random.Random(seed).sample(list(dict.fromkeys(candidates)), number)
    LIST.write_text(json.dumps([asdict(each) for each in chosen], indent=1) + "\n")
    print(
        f"{number} of {len(candidates)} mutants of {len({each.file for each in candidates})} files"
    )


def applied(mutant: Mutant, source: str) -> tuple[str, int] | None:
    """The source with the mutant, and the number of its line; None: its text is gone."""
    lines = source.splitlines(keepends=True)
    for function, statement in in_functions(ast.parse(source)):
        at = statement.lineno - 1
        if function != mutant.function or lines[at].strip() != mutant.line:
            continue
        start = -1
        for _ in range(mutant.place + 1):
            start = lines[at].find(mutant.before, start + 1)
        if start >= 0:
            end = start + len(mutant.before)
            after = mutant.after if mutant.after == "pass" else f"({mutant.after})"
            lines[at] = lines[at][:start] + after + lines[at][end:]
            return "".join(lines), at + 1
    return None


def tests_by_line(data: Path) -> dict[tuple[str, int], set[str]]:
    """Tests that run a line of the package, by file (``runtime/unit.py``) and line."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    with sqlite3.connect(data) as base:
        query = (
            "select path, context, numbits from line_bits "
            "join file on file.id = file_id join context on context.id = context_id"
        )
        for path, context, bits in base.execute(query):
            if not context:
                continue
            name = path.partition("fsdp_engine/")[2]
            for byte, value in enumerate(bits):
                for bit in range(8):
                    if value >> bit & 1:
                        found[name, 8 * byte + bit].add(context)
    return found


def cases_of(report: Path) -> Iterator[tuple[str, float, bool]]:
    """Yields the test function (``FILE::NAME``) of each case of a JUnit report, its seconds, and
    whether it failed."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        inner: list[str] = []
        while parts and not (ROOT / "/".join(parts)).with_suffix(".py").exists():
            inner.insert(0, parts.pop())  # a class of tests
        name = case.attrib["name"].partition("[")[0]
        failed = any(each.tag in ("failure", "error") for each in case)
        yield "::".join(["/".join(parts) + ".py", *inner, name]), float(case.attrib["time"]), failed


def seconds_by_test() -> Counter[str]:
    """Seconds of each test function, all its cases together; infinite where one of them failed."""
    seconds: Counter[str] = Counter()
    for test, each, failed in cases_of(TIMES):
        seconds[test] += math.inf if failed else each  # type: ignore[assignment]
    return seconds


def selected(
    tests: Iterable[str], seconds: Counter[str], limit: float = SELECTED_SECONDS
) -> list[str]:
    """The quickest tests that together take ``limit`` seconds, or all."""
    chosen: list[str] = []
    total = 0.0
    for test in sorted(tests, key=lambda each: (seconds[each], each)):
        total += seconds[test]
        if total == math.inf or (chosen and total > limit):
            break
        chosen.append(test)
    return chosen


def run(numbers: range, results_file: Path, limit: float, *, again: bool = False) -> None:
    """Run the tests with some mutants, and add the outcomes to the results file.

    Args:
        limit: seconds of the tests that run with each mutant.
        again: Run only mutants that survived before, if more tests would run now.
    """
    chosen = [Mutant(**each) for each in json.loads(LIST.read_text())]
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    tests, seconds = tests_by_line(COVERAGE), seconds_by_test()
    for index in numbers:
        known = results.get(str(index), {})
        if again and (known.get("outcome") != "survived" or known["run"] == known["tests"]):
            continue
        begin = time.monotonic()
        results[str(index)] = {
            **outcome_of(chosen[index], tests, seconds, limit),
            "seconds": round(time.monotonic() - begin),
        }
        results_file.write_text(json.dumps(results, indent=1) + "\n")
        each = chosen[index]
        print(f"{index} {each.file} {each.before!r} -> {each.after!r}: {results[str(index)]}")
        sys.stdout.flush()


def outcome_of(
    mutant: Mutant, tests: dict[tuple[str, int], set[str]], seconds: Counter[str], limit: float
) -> dict[str, Any]:
    """The outcome: "survived", "gone", "no test", "timeout", or the test that failed."""
    changed = applied(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
    if changed is None:
        return {"outcome": "gone"}
    source, line = changed
    found = tests.get((mutant.file.partition("fsdp_engine/")[2], line), set())
    chosen = selected(found, seconds, limit)
    counts = {"tests": len(found), "run": len(chosen)}
    if not chosen:
        return {"outcome": "no test", **counts}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "results", "build")
        shutil.copytree(ROOT, copy, ignore=ignored)
        device = ROOT / "tests" / "async_device" / "build"
        if device.exists():
            shutil.copytree(device, copy / "tests" / "async_device" / "build")
        (copy / mutant.file).write_text(source, encoding="utf-8")
        (Path(folder) / "tests").write_text("\n".join(chosen))
        command = [sys.executable, "-m", *PYTEST, "-p", "no:cacheprovider", "--maxfail", "1"]
        command.append(f"@{folder}/tests")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        with subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT_SECONDS + limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return {"outcome": "timeout", **counts}
    if process.returncode == 0:
        return {"outcome": "survived", **counts}
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    text = named[1] if named else "failed: " + output.strip().splitlines()[-1][:80]
    return {"outcome": text, **counts}


def table(results_file: Path) -> str:
    """The results, in Markdown."""
    chosen = [Mutant(**each) for each in json.loads(LIST.read_text())]
    results = json.loads(results_file.read_text())
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for index, result in sorted(results.items(), key=lambda each: int(each[0])):
        mutant, outcome = chosen[int(index)], result["outcome"]
        if outcome == "gone" or mutant.equivalent:
            continue
        kind = "survived" if outcome in ("survived", "no test") else "caught"
        for row in (mutant.kind, "all"):
            counts.setdefault(row, Counter())[kind] += 1
        if kind == "survived":
            cells = (mutant.file, mutant.before, mutant.after)
            survivors.append(
                "| " + " | ".join(f"`{cell.replace('|', '/')}`" for cell in cells) + " |"
            )
    rows = ["| change | mutants | caught |", "|---|---|---|"]
    for kind, count in sorted(counts.items(), key=lambda each: each[0] == "all"):
        rows.append(f"| {kind} | {count.total()} | {count['caught'] / count.total():.0%} |")
    equivalent = sum(bool(each.equivalent) for each in chosen)
    rows += ["", f"{equivalent} more are equivalent to the original, as far as a test can tell."]
    return "\n".join([*rows, "", "| file | survivor | changed to |", "|---|---|---|", *survivors])


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["make", "run", "again", "table"])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SELECTED_SECONDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.what == "make":
        make(given.number, given.seed)
    elif given.what in ("run", "again"):
        last = min(given.first + given.number, len(json.loads(LIST.read_text())))
        numbers = range(given.first, last)
        run(numbers, given.results, given.seconds, again=given.what == "again")
    else:
        print(table(given.results))


if __name__ == "__main__":
    main()
