"""What a simulation pretends that this process runs on; nothing at any other time.

Tensors are the CPU's, and the backend is torch's "fake" one, whatever is pretended. What differs
between a host that computes itself, with gloo, and a device with collectives of its own is which
memory the engine keeps idle, and which scratch a reduction takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_ON_HOST: list[bool] = []


@contextmanager
def pretending(*, on_host: bool) -> Iterator[None]:
    """Within it, this process pretends to compute on the host, or on a device."""
    _ON_HOST.append(on_host)
    try:
        yield
    finally:
        _ON_HOST.pop()


def pretends_host() -> bool:
    """Whether "fake" stands for gloo on CPUs."""
    return bool(_ON_HOST) and _ON_HOST[-1]


def pretends_device() -> bool:
    """Whether "fake" and the CPU stand for a device and its backend."""
    return bool(_ON_HOST) and not _ON_HOST[-1]
