"""Writes the accuracy of planned times into the package, from results files.

    python tools/time_factors.py            # fails if the package has others
    python tools/time_factors.py --write

Run it after ``benchmarks/planner_published.py``, ``planner_time.py`` or ``planner_gpu.py``; then
``tools/figures.py --write`` and ``tools/planner_example.py --write`` for the docs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "fsdp_engine" / "planner" / "simulation" / "time_factors.json"


def measured() -> dict[str, list[float]]:
    """Measured over planned step times by family, from the results files. For published jobs these
    are ratios of planned to published speeds."""
    models = _results("planner_time")["models"].values()
    jobs = [each for of_card in _results("planner_gpu").values() for each in of_card.values()]
    found = {
        "A100": _published("A100"),
        "H100": _published("H100"),
        "calibrated CPU": [1 / each["ratio"] for m in models for each in m["steps"].values()],
        "calibrated GPU": [each["measured seconds"] / each["planned seconds"] for each in jobs],
    }
    return {family: sorted(factors) for family, factors in found.items()}


def file_text() -> str:
    """The text of the file of the package."""
    found = {
        family: [round(factor, 4) for factor in factors] for family, factors in measured().items()
    }
    return json.dumps(found, indent=1) + "\n"


def _published(gpu: str) -> list[float]:
    """The factors of published jobs in bf16, not compiled, with data parallelism alone."""
    rows = [row for row in _results("planner_published") if not row["compiled"]]
    return [row["planned over published"] for row in rows if gpu in row["machine"]]


def _results(name: str) -> Any:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the file")
    if parser.parse_args().write:
        TARGET.write_text(file_text(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != file_text():
        sys.exit(f"{TARGET}: expected the factors of the results files; found others. Run --write")


if __name__ == "__main__":
    main()
