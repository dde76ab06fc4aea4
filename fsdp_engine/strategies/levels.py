"""Roles, mesh axes, and the four sharding levels of one axis.

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

Level 0, ``no_shard``: nothing is sharded. Plain data parallelism (DDP).

A rank holds every parameter, gradient and optimizer state: for ``P`` elements with compute weights
of ``p`` bytes, main weights of ``m``, gradients of ``g`` and optimizer state of ``s`` bytes per
element, ``P(p+m+g+s)``. If main weights are the compute weights, ``m`` is 0.

Once per step gradients are all-reduced, as a reduce-scatter and an all-gather: a rank of ``n``
sends ``2 P (n-1)/n`` elements. Parameters are not communicated.

Level 1, ``optim``: optimizer state is sharded (ZeRO-1, the "distributed optimizer").

A rank of ``n`` holds all parameters and gradients, and ``1/n`` of the optimizer state and of a
separate main copy, if there is one: ``P(p + g + (m + s)/n)`` bytes. If main weights have the
compute dtype, they are a view of the compute weights and take no memory.

Once per step gradients are reduce-scattered and parameters all-gathered: ``(n-1)/n`` elements
each, as much as level 0's all-reduce.

Level 2, ``optim_grads``: optimizer state and gradients are sharded (ZeRO-2).

A rank of ``n`` holds all parameters and ``1/n`` of gradients and optimizer state:
``P(p + (g + m + s)/n)`` bytes, and temporarily one unit's full gradients.

Gradients are reduce-scattered in every microbatch, ``(n-1)/n`` elements, so that no rank keeps full
ones; parameters are all-gathered once per step.

Level 3, ``optim_grads_params``: all roles are sharded (ZeRO-3, FSDP).

A rank of ``n`` holds ``1/n`` of all roles, ``P(m + g + s)/n`` bytes, and temporarily the full
parameters of the unit in use and of prefetched units, and one unit's full gradients.

Every microbatch gathers parameters once for forward and once for backward (the unit that backward
needs first is not resharded in between), and reduce-scatters gradients: at most ``3 (n-1)/n``
elements, 1.5 times as many as level 0.
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


class NoShard(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        return Traffic(0.0, 0.0, 2 * (size - 1) / size, 0.0)


NO_SHARD = NoShard("no_shard", 0)


class Optim(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, factor, 0.0)


OPTIM = Optim("optim", 1)


class OptimGrads(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, 0.0, factor)


OPTIM_GRADS = OptimGrads("optim_grads", 2)


class OptimGradsParams(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(0.0, 2 * factor, 0.0, factor)


OPTIM_GRADS_PARAMS = OptimGradsParams("optim_grads_params", 3)
