"""Errors where FSDP2 asserts."""

from __future__ import annotations


class WrongUse(ValueError, AssertionError):
    """A value that cannot be taken, as elsewhere; and the AssertionError that FSDP2 raises there,
    for who catches that."""
