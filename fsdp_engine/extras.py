"""Optional packages, and the extra of this project that installs each.

Training imports torch only; checkpoints import numpy and crc32c too, which are dependencies. A
module that needs another package imports it within :func:`naming_extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Top-level package: extra of pyproject.toml.
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
    """Adds the command that installs a missing package to the error of its import.

    Raises:
        ModuleNotFoundError: an import of a package in ``EXTRAS`` failed within the context.
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
