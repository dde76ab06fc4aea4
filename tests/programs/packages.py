"""The marks of tests that need the packages of the extra ``programs``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

# Made by the Makefile: torchtitan, triton, torchao, bitsandbytes, pytorch_optimizer, schedulefree,
# liger-kernel, axolotl.
TORCHTITAN = Path(sys.prefix) / "torchtitan"


def needs(*names: str) -> list[Any]:
    path = [*sys.path, str(TORCHTITAN)]
    missing = [name for name in names if PathFinder.find_spec(name, path) is None]
    reason = f"needs what `make test-all` installs; found no {missing}"
    return [pytest.mark.programs, pytest.mark.skipif(bool(missing), reason=reason)]


PROGRAM = needs(
    *("axolotl", "datasets", "diffusers", "liger_kernel", "sentence_transformers", "torchao"),
    *("torchtitan", "trl"),
)
# Marks of tests that need optimizers of these packages, but no program.
LOW_BIT = [*needs("torchao", "bitsandbytes", "pytorch_optimizer"), pytest.mark.timeout(600)]
ONLY_TORCHAO = needs("torchao")
NEEDS_OPTIMIZERS = [*PROGRAM, *needs("schedulefree", "pytorch_optimizer", "bitsandbytes")]


@contextlib.contextmanager
def with_torchao() -> Iterator[None]:
    """Makes ``import torchao`` work in the block; afterwards its folder is no longer searched."""
    sys.path.append(str(TORCHTITAN))
    try:
        yield
    finally:
        sys.path.remove(str(TORCHTITAN))
