"""Seconds, lines and coverage of the tests, by folder and by file.

    python -m tools.measure_tests run [--coverage] [tests/runtime ...]    run the ordinary tests
    python -m tools.measure_tests table                                   print the tables

``run`` writes ``benchmarks/results/tests.json``: for each file its lines, items and seconds (while
another process ran other files), and with ``--coverage`` for each file of the core the share of its
lines that ran, and for each test the number of lines of the core that only it runs. Ranks are
measured, too. Without folders all ordinary tests run. Coverage makes tests slower: seconds are from
a run without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.coverage_contexts import CONTEXTS
from tools.mutants import CORE, COVERAGE, PYTEST, TIMES, cases_of, tests_by_line

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tests.json"
SETTINGS = """[run]
source = fsdp_engine
parallel = true
sigterm = true
patch = subprocess, fork, _exit
core = ctrace
data_file = {folder}/data
"""


def run(folders: list[str], *, coverage: bool) -> None:
    """Run tests and write the results file."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = folder / "settings"
        settings.write_text(SETTINGS.format(folder=folder))
        command = [sys.executable, "-m"]
        if coverage:
            command += ["coverage", "run", "--rcfile", str(settings), "-m"]
        command += [*PYTEST, "--numprocesses", "2", "--dist", "loadfile"]
        command.append(f"--junitxml={folder}/times.xml")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if coverage:
            environment[CONTEXTS] = "1"
        tests = [*command, *(folders or ["tests"])]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        if coverage:
            combine = ["coverage", "combine", "--rcfile", str(settings), "--quiet"]
            subprocess.run([sys.executable, "-m", *combine], cwd=folder, check=True)
            results["coverage"] = coverage_of(folder / "data", settings)
            COVERAGE.parent.mkdir(parents=True, exist_ok=True)  # tools/mutants.py reads both
            shutil.copy(folder / "data", COVERAGE)
            shutil.copy(folder / "times.xml", TIMES)
        else:
            results["times"] = times_of(folder / "times.xml")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(status)


def times_of(report: Path) -> dict[str, dict[str, Any]]:
    """Lines, items and seconds of each file of tests."""
    seconds: Counter[str] = Counter()
    items: Counter[str] = Counter()
    for test, each, _ in cases_of(report):
        file = test.partition("::")[0]
        seconds[file] += each  # type: ignore[assignment]
        items[file] += 1
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        found[file] = {"lines": lines, "items": items[file], "seconds": round(seconds[file], 1)}
    return found


def coverage_of(data: Path, settings: Path) -> dict[str, Any]:
    """Shares of lines of the core that ran, and lines that only one test runs."""
    report = data.with_suffix(".json")
    command = [sys.executable, "-m", "coverage", "json", "--rcfile", str(settings), "-q"]
    subprocess.run([*command, "-o", str(report)], cwd=ROOT, check=True)
    files = {
        name.partition("fsdp_engine/")[2]: each["summary"]
        for name, each in json.loads(report.read_text())["files"].items()
    }
    core = {name: each for name, each in files.items() if name.partition("/")[0] in CORE}
    tests_of = {place: tests for place, tests in tests_by_line(data).items() if place[0] in core}
    alone = Counter(next(iter(tests)) for tests in tests_of.values() if len(tests) == 1)
    total = Counter(lines=0, covered=0)
    for each in core.values():
        total.update(lines=each["num_statements"], covered=each["covered_lines"])
    return {
        "core": {name: round(each["percent_covered"], 1) for name, each in sorted(core.items())},
        "all": round(100 * total["covered"] / total["lines"], 2),
        "lines of one test": dict(alone.most_common()),
        "tests": sorted({test for tests in tests_of.values() for test in tests}),
    }


def times_table() -> str:
    """Lines, items and seconds by folder, in Markdown."""
    times = json.loads(RESULTS.read_text())["times"]
    rows = ["| folder of `tests/` | files | lines | items | seconds |", "|---|---|---|---|---|"]
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for file, each in times.items():
        inner = Path(file).parts[1:-1]
        row = "/".join(inner[: 2 if inner[:1] == ("extensions",) else 1]) or "(files)"
        for name in (row, "all"):
            sums[name].update(files=1, **each)
    for folder, each in sorted(sums.items(), key=lambda row: (row[0] == "all", -row[1]["seconds"])):
        cells = (each["files"], each["lines"], each["items"], round(each["seconds"]))
        rows.append(f"| {folder} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    return "\n".join(rows)


def coverage_table() -> str:
    """Coverage of the core, and its least covered files, in Markdown."""
    covered = json.loads(RESULTS.read_text())["coverage"]
    least = sorted(covered["core"].items(), key=lambda row: row[1])[:12]
    alone = sum(covered["lines of one test"].values())
    rows = [
        f"These tests run {covered['all']} % of the core's lines; {alone} of them are "
        "run by no more than one test. Files with the lowest shares:",
        "",
        "| file | % of its lines |",
        "|---|---|",
        *(f"| `{name}` | {share} |" for name, share in least),
    ]
    return "\n".join(rows)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--coverage", action="store_true")
    given = parser.parse_intermixed_args()
    if given.what == "run":
        run(given.folders, coverage=given.coverage)
    else:
        print(times_table(), coverage_table(), sep="\n\n")


if __name__ == "__main__":
    main()
