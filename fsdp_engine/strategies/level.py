"""Roles, mesh axes, and sharding levels of one axis.

A *level* determines which roles are sharded along an axis: optimizer state at level 1 and above,
gradients at level 2 and above, parameters at level 3.

    =====================  =====  =========  =========  ==========
    level                  value  optimizer  gradients  parameters
    =====================  =====  =========  =========  ==========
    ``no_shard``           0      full       full       full
    ``optim``              1      sharded    full       full
    ``optim_grads``        2      sharded    sharded    full
    ``optim_grads_params`` 3      sharded    sharded    sharded
    =====================  =====  =========  =========  ==========
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.IntEnum):
    """The contents of a flat range; the value is the lowest level that shards it."""

    OPTIM = 1
    GRAD = 2
    PARAM = 3


class Axis(enum.Enum):
    """A mesh axis of the data-parallel group."""

    OUTER = "outer"
    INNER = "inner"


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends along one axis of ``size`` ranks, per element of a buffer.

    ``per_step`` counts communication once per optimizer step, ``per_microbatch`` communication in
    every forward and backward. Each figure is a factor: multiply it by the buffer's padded number
    of elements and by the bytes per element that are sent.
    """

    params_per_step: float
    params_per_microbatch: float
    grads_per_step: float
    grads_per_microbatch: float


@dataclass(frozen=True)
class Level:
    """One sharding level on one axis: a name, a value, and its formulas."""

    name: str
    value: int

    def shards(self, role: Role) -> bool:
        """Whether this level shards ``role`` along its axis."""
        return self.value >= role

    def fraction(self, role: Role, size: int) -> float:
        """Fraction of ``role`` that a rank holds at rest on an axis of ``size`` ranks."""
        return 1.0 / size if self.shards(role) else 1.0

    def traffic(self, size: int) -> Traffic:
        """Communication along an axis of ``size`` ranks; each level's module has the formula."""
        raise NotImplementedError
