"""Roles, axes, and what one sharding level means on one axis.

A *level* says which roles are cut along an axis. Optimizer state is cut from level 1 on,
gradients from level 2 on, parameters at level 3:

    =====================  =====  =========  =========  ==========
    level                  value  optimizer  gradients  parameters
    =====================  =====  =========  =========  ==========
    ``no_shard``           0      whole      whole      whole
    ``optim``              1      cut        whole      whole
    ``optim_grads``        2      cut        cut        whole
    ``optim_grads_params`` 3      cut        cut        cut
    =====================  =====  =========  =========  ==========
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.IntEnum):
    """What a flat range holds; the value is the first level that cuts it."""

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

    ``per_step`` counts what travels once per optimizer step, ``per_microbatch`` what travels
    in every forward and backward. Each figure is a factor: multiply it by the buffer's padded
    number of elements and by the bytes of the dtype that travels.
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

    def cuts(self, role: Role) -> bool:
        """Whether this level cuts ``role`` along its axis."""
        return self.value >= role

    def fraction(self, role: Role, size: int) -> float:
        """Part of ``role`` that a rank holds at rest on an axis of ``size`` ranks."""
        return 1.0 / size if self.cuts(role) else 1.0

    def traffic(self, size: int) -> Traffic:
        """What travels along an axis of ``size`` ranks; see each level's module for its formula."""
        raise NotImplementedError
