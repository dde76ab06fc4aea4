"""The marks of tests that need the packages of the extra ``programs``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

# Made by the Makefile: torchtitan, triton, torchao, bitsandbytes, pytorch_optimizer, schedulefree,
# liger-kernel, axolotl.
TORCHTITAN = Path(sys.prefix) / "torchtitan"
_NEEDED = (
    "axolotl",
    "datasets",
    "diffusers",
    "liger_kernel",
    "sentence_transformers",
    "torchao",
    "torchtitan",
    "trl",
)
_missing = [
    name for name in _NEEDED if PathFinder.find_spec(name, [*sys.path, str(TORCHTITAN)]) is None
]

PROGRAM = [
    pytest.mark.programs,
    pytest.mark.skipif(
        bool(_missing), reason=f"needs what `make test-all` installs; found no {_missing}"
    ),
]

_low_bit = [
    name
    for name in ("torchao", "bitsandbytes", "pytorch_optimizer")
    if PathFinder.find_spec(name, [*sys.path, str(TORCHTITAN)]) is None
]
# Of tests that need optimizers of these packages and no program.
LOW_BIT = [
    pytest.mark.programs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(_low_bit), reason=f"needs what `make test-all` installs; found no {_low_bit}"
    ),
]

# Of tests that need torchao alone.
ONLY_TORCHAO = [
    pytest.mark.programs,
    pytest.mark.skipif(
        "torchao" in _low_bit, reason="needs what `make test-all` installs; found no torchao"
    ),
]


@contextlib.contextmanager
def with_torchao() -> Iterator[None]:
    """Makes ``import torchao`` work, and nothing else of its folder afterwards."""
    sys.path.append(str(TORCHTITAN))
    try:
        yield
    finally:
        sys.path.remove(str(TORCHTITAN))


_MISSING_OPTIMIZERS = [
    name
    for name in ("schedulefree", "pytorch_optimizer", "bitsandbytes")
    if PathFinder.find_spec(name, [*sys.path, str(TORCHTITAN)]) is None
]
# Of tests of optimizers' libraries.
NEEDS_OPTIMIZERS = [
    *PROGRAM,
    pytest.mark.skipif(
        bool(_MISSING_OPTIMIZERS),
        reason=f"needs what `make test-all` installs; found no {_MISSING_OPTIMIZERS}",
    ),
]
