"""Programs that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def start(*command: str) -> subprocess.Popen[str]:
    """Start Python with these arguments, and with this checkout's package."""
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(num_ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))


def printed(*command: str, succeeds: bool = True) -> str:
    """Run :func:`start` to its end; returns all that it prints."""
    process = start(*command)
    try:
        text, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        process.communicate(timeout=300)
        raise
    assert (process.returncode == 0) is succeeds, text
    return text
