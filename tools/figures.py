"""Figures in README and docs, written from results files: ``python tools/figures.py --write``.

Each is between two comments of a page, ``<!-- figures: NAME -->`` and ``<!-- end -->``; NAME is a
function of ``result_tables.py``. ``chart.py`` draws docs/comparison.svg. Without ``--write`` files
are compared, and those that differ are named.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import chart
from result_tables import TABLES

ROOT = Path(__file__).parents[1]
FIGURES = {table.__name__: table for table in TABLES}
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)


def with_figures(page: str) -> str:
    """The text of a page with the figures of the results files."""
    return _PLACE.sub(lambda found: f"{found[1]}{FIGURES[found[2]]()}\n{found[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the pages that differ")
    args = parser.parse_args()
    differ, used = [], set()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page = path.read_text(encoding="utf-8")
        used |= {found[2] for found in _PLACE.finditer(page)}
        if (new := with_figures(page)) != page:
            differ.append(path.name)
            if args.write:
                path.write_text(new, encoding="utf-8")
    drawing = chart.FILE.read_text(encoding="utf-8") if chart.FILE.exists() else ""
    if (new := chart.chart()) != drawing:
        differ.append(chart.FILE.name)
        if args.write:
            chart.FILE.write_text(new, encoding="utf-8")
    if unused := sorted(FIGURES.keys() - used):
        sys.exit(f"figures that no page shows: {', '.join(unused)}")
    if differ and not args.write:
        sys.exit(f"figures that are not those of benchmarks/results/: {', '.join(differ)}")


if __name__ == "__main__":
    main()
