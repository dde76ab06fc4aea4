"""Each wait of the lanes in a steady step, left out in turn, on the asynchronous device.

``tests/async_device/waits.py`` has the programs and the patterns of delays. A wait is needed if
without it the weights are wrong on some rank; the results have the first pattern that shows it.

    python benchmarks/missing_waits.py
"""

from __future__ import annotations

import argparse
import time

import harness

from tests.async_device import device as on
from tests.async_device.build import build
from tests.async_device.waits import NUM_PATTERNS, PROGRAMS, num_ranks, sweep


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    build()
    backend = f"cpu:gloo,{on.NAME}:{on.NAME}"
    start, found, rows = time.perf_counter(), {}, []
    for name in PROGRAMS:
        waits = harness.run_ranks(sweep, num_ranks(name), name, backend=backend, set_up=on.install)
        found[name] = waits
        tried = [each["pattern"] for each in waits if not each["implied"]]
        shown = [pattern for pattern in tried if pattern is not None]
        rows.append([name, *map(str, (len(waits), len(waits) - len(tried), len(shown)))])
    harness.print_table("waits of a step", ["program", "all", "implied", "needed"], rows)
    seconds = time.perf_counter() - start
    harness.write_results(
        "missing_waits", {"patterns": NUM_PATTERNS, "seconds": seconds, "programs": found}
    )


if __name__ == "__main__":
    main()
