"""Figures in README and docs, written from results files: ``python tools/figures.py --write``.

Each is between two comments of a page, ``<!-- figures: NAME -->`` and ``<!-- end -->``. Without
``--write`` pages are compared, and those that differ are named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from step_time import TARGETS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STEP_TIMES = ("step_time_10M", "step_time_85M")
LEVEL_3 = "optim_grads_params"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _runs() -> dict[str, dict[str, Any]]:
    """Step times by model and dtype."""
    return {title: run for name in STEP_TIMES for title, run in _read(name)["results"].items()}


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Of the step times."""
    machines = [_read(name)["machine"] for name in STEP_TIMES]
    processors = " and ".join(dict.fromkeys(each["processor"] for each in machines))
    return f"Processor: {processors}; torch {machines[0]['torch']}; {machines[0]['cores']} cores."


def step_time_over_fsdp2() -> str:
    """README's sentence."""
    ratios = [run[LEVEL_3]["over"]["FSDP2"]["median"] for run in _runs().values()]
    return (
        f"On two CPU ranks a step of level 3 takes {min(ratios):.2f} to {max(ratios):.2f} of "
        "FSDP2's, by model and dtype."
    )


def step_time_aims() -> str:
    """Ratios beside what is aimed at."""
    runs = _runs()
    rows = []
    for engine, base, *aims in TARGETS:
        low, high = (f"{aim:.2f}" for aim in aims)
        row = [f"{engine} / {base}", low if low == high else f"{low} fp32, {high} bf16"]
        for title, run in runs.items():
            if base not in run:
                row.append("-")
                continue
            ratio = run[engine]["over"][base]["median"]
            missed = ratio > aims[title.endswith("bf16")]
            floor = f" ({run['floor of level 3'][base]:.3f})" if engine == LEVEL_3 else ""
            row.append(f"{ratio:.3f}{' **missed**' if missed else ''}{floor}")
        rows.append(row)
    return _table(["ratio", "at most", *runs], rows)


def step_times() -> str:
    """A table for each model and dtype."""
    parts = []
    for title, run in _runs().items():
        engines = {name: row for name, row in run.items() if "seconds" in row}
        bases = list(next(iter(engines.values()))["over"])
        rows = [
            [
                name,
                f"{row['seconds']['median'] * 1e3:.0f}",
                *(
                    f"{over['median']:.2f} ({over['q1']:.2f}-{over['q3']:.2f})"
                    for over in (row["over"][base] for base in bases)
                ),
            ]
            for name, row in engines.items()
        ]
        table = _table(["engine", "ms", *(f"x {base}" for base in bases)], rows)
        parts.append(f"### {title}\n\n{table}")
    return "\n\n".join(parts)


def published() -> str:
    """Published speeds beside planned ones."""
    rows = []
    for row in _read("planner_published")["results"]:
        batch = f"{row['rows']} x {row['length']}"
        if row["microbatches"] > 1:
            batch = f"{row['microbatches']} times {batch}"
        rows.append(
            [
                row["job"],
                f"{row['ranks']} {_gpu(row)}",
                batch,
                f"{row['published recomputation']} / {row['planned recomputation']}",
                f"{row['published tokens/s']:,.0f}",
                f"{row['planned tokens/s']:,.0f}",
                f"{row['planned over published']:.2f}",
            ]
        )
    columns = ["job", "GPUs", "batch of a rank", "recomputed: published / planned"]
    return _table([*columns, "tokens/s of a GPU, published", "planned", "ratio"], rows)


def published_ranges() -> str:
    """How far planned speeds are from published ones, of jobs that recompute as is planned."""
    lines = []
    for gpu in ("A100", "H100"):
        ratios = sorted(
            row["planned over published"]
            for row in _read("planner_published")["results"]
            if gpu in row["machine"] and row["published recomputation"] != "some"
        )
        middle = ratios[len(ratios) // 2]
        lines.append(
            f"{gpu}: {len(ratios)} jobs, planned over published {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, in the middle {middle:.2f}."
        )
    return " ".join(lines)


def _gpu(row: dict[str, Any]) -> str:
    """ "H100", with its memory where that is not 80 GB: "8 x A100 40 GB a node, ..."."""
    found = re.search(r"(\w100)(?: SXM)?(?: (\d+) GB)?", row["machine"])
    assert found is not None
    gib = found[2]
    return found[1] if gib in (None, "80") else f"{found[1]} {gib} GB"


FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        machine,
        step_time_over_fsdp2,
        step_time_aims,
        step_times,
        published,
        published_ranges,
    )
}
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def with_figures(page: str) -> str:
    """The text of a page with the figures of the results files."""
    return _PLACE.sub(lambda found: found[1] + FIGURES[found[2]]() + found[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the pages that differ")
    args = parser.parse_args()
    differ = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = path.read_text(encoding="utf-8")
        if (new := with_figures(page)) != page:
            differ.append(path.name)
            if args.write:
                path.write_text(new, encoding="utf-8")
    if differ and not args.write:
        sys.exit(f"figures that are not those of benchmarks/results/: {', '.join(differ)}")


if __name__ == "__main__":
    main()
