"""Heap of a training run: bytes in use, and freed bytes that glibc keeps.

    python benchmarks/heap.py [--steps 600]

Runs the training of ``examples/train_gpt.py`` on one rank and reads glibc's ``mallinfo2`` every 25
steps. The resident set rises and falls with ``malloc_trim`` (every 100 backwards, [Note: Freed
pages] in ``memory/allocator.py``); only a rise of the bytes in use would be a leak. Also counts the
objects that Python's cyclic collector tracks: a reference cycle per step would show as a rise
between two collections.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile

import harness

MEBIBYTE = 2**20
STEPS_PER_SAMPLE = 25


class MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc (``man mallinfo2``); all fields are bytes or counts."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def sample(step: int, resident: int) -> dict[str, float]:
    """The process's memory after a step: MiB, and a number of objects."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo2
    info = libc.mallinfo2()
    return {
        "step": step,
        "resident_mib": resident / MEBIBYTE,
        "in_use_mib": (info.uordblks + info.hblkhd) / MEBIBYTE,
        "kept_mib": info.fordblks / MEBIBYTE,
        "objects": len(gc.get_objects()),
    }


def train(num_steps: int, folder: str) -> list[dict[str, float]]:
    """Samples of a run of ``num_steps`` steps."""
    from curve import memory_in_use
    from settings import parse_settings
    from train_gpt import Job, StepReader, prepare

    job = prepare(parse_settings(["--steps", str(num_steps), "--out", folder]), Job)
    reader = StepReader(job, job.curve)
    samples = []
    for step in range(num_steps):
        reader.add(step, *job.train_step(step))
        if (step + 1) % STEPS_PER_SAMPLE == 0:
            reader.read()
            samples.append(sample(step + 1, memory_in_use(job.device)))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = harness.run_ranks(train, 1, args.steps, folder)
    columns = ["step", "resident MiB", "in use MiB", "kept MiB", "objects"]
    rows = [[f"{value:,.0f}" for value in each.values()] for each in samples]
    harness.print_table("one rank of examples/train_gpt.py", columns, rows)
    harness.write_results("heap", samples)


if __name__ == "__main__":
    main()
