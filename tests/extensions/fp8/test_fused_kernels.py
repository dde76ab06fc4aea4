"""The Triton kernels of fp8 find the elements and scales that functions of torch find."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_engine.extensions.fp8.arithmetic import GRANULARITIES
from tests.extensions.fp8 import interpreted_kernels


def test_kernels_find_the_elements_and_scales_that_functions_of_torch_find() -> None:
    pytest.importorskip("triton")
    # A process of its own, because Triton must be imported anew for its interpreter.
    command = [sys.executable, "-m", interpreted_kernels.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(GRANULARITIES) * len(interpreted_kernels.CASES)
