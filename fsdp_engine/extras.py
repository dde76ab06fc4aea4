"""Optional packages, and the extra of this project that installs each of them.

Training imports torch only. Checkpoints also import numpy and crc32c, which are dependencies. A
module that needs an optional package imports it within :func:`naming_extra`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

# Maps the name of a top-level package to an extra of pyproject.toml.
EXTRAS = {
    "accelerate": "transformers",
    "lightning": "lightning",
    "matplotlib": "examples",
    "peft": "peft",
    "ray": "ray",
    "torchft": "torchft",
    "transformers": "transformers",
}


@contextmanager
def naming_extra() -> Iterator[None]:
    """Returns a context in which the import error of a missing package says how to install it.

    Raises:
        ModuleNotFoundError: An import within the context failed. If the package is in ``EXTRAS``,
            the message contains the command.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"{package}: expected it to be installed; found no such package. Install it with: "
            f"pip install 'fsdp_engine[{EXTRAS[package]}]'",
            name=error.name,
        ) from error


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Returns a context that restores Python's random generator at its end.

    Some packages draw from it when they are imported, or when they register functions. Often only
    one rank does so (to print a table), and the generators of all ranks must stay equal.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
