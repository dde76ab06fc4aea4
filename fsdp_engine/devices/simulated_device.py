"""The device that a simulation takes this process to run on.

Tensors are on the CPU, and the backend is torch's "fake" one, whatever is simulated. A host that
computes itself, with gloo, and a device with collectives of its own differ in the memory that the
engine keeps idle, and in the scratch memory of a reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_ON_HOST: list[bool] = []


@contextmanager
def simulated(*, on_host: bool) -> Iterator[None]:
    """Within it, this process is taken to compute on the host, or on a device."""
    _ON_HOST.append(on_host)
    try:
        yield
    finally:
        _ON_HOST.pop()


def simulates_host() -> bool:
    """Whether "fake" stands for gloo on CPUs."""
    return bool(_ON_HOST) and _ON_HOST[-1]


def simulates_device() -> bool:
    """Whether "fake" and the CPU stand for a device and its backend."""
    return bool(_ON_HOST) and not _ON_HOST[-1]
