"""The error for arguments on which FSDP2 fails an assertion."""

from __future__ import annotations


class UsageError(ValueError, AssertionError):
    """An invalid value. Also an AssertionError, which FSDP2 raises, so that code that catches it
    works unchanged."""
