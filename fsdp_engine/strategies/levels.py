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

Each rank holds all parameters, gradients and optimizer state. For ``P`` elements these are
``P(p+m+g+s)`` bytes, with ``p`` bytes per element for compute weights, ``m`` for main weights,
``g`` for gradients and ``s`` for optimizer state. If main weights are the compute weights, ``m`` is
0.

Once per step gradients are all-reduced, as a reduce-scatter and an all-gather: each of ``n`` ranks
sends ``2 P (n-1)/n`` elements. Parameters are not communicated.

Level 1, ``optim``: optimizer state is sharded (ZeRO-1, the "distributed optimizer").

Each of ``n`` ranks holds all parameters and gradients, and ``1/n`` of the optimizer state and of
separate main weights, if there are any: ``P(p + g + (m + s)/n)`` bytes. If main weights have the
compute dtype, they are a view of the compute weights and take no memory.

Once per step gradients are reduce-scattered and parameters all-gathered: a rank sends
``P (n-1)/n`` elements for each, in total as many as for the all-reduce of level 0.

Level 2, ``optim_grads``: optimizer state and gradients are sharded (ZeRO-2).

Each of ``n`` ranks holds all parameters and ``1/n`` of gradients, main weights and optimizer state:
``P(p + (g + m + s)/n)`` bytes, and temporarily the full gradients of one unit.

Gradients are reduce-scattered in every microbatch, so that no rank keeps full gradients: a rank
sends ``P (n-1)/n`` elements. Parameters are all-gathered once per step.

Level 3, ``optim_grads_params``: all roles are sharded (ZeRO-3, FSDP).

Each of ``n`` ranks holds ``1/n`` of all roles, ``P(m + g + s)/n`` bytes, and temporarily the full
parameters of the unit in use and of prefetched units, and the full gradients of one unit.

In every microbatch parameters are gathered once for forward and once for backward (the unit that
backward needs first is not resharded in between), and gradients are reduce-scattered. A rank sends
at most ``3 P (n-1)/n`` elements, 1.5 times as many as at level 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.IntEnum):
    """The kind of values in a flat buffer. The number is the lowest level that shards the role."""

    OPTIM = 1
    GRAD = 2
    PARAM = 3


class Axis(enum.Enum):
    """A mesh axis of the data-parallel group."""

    OUTER = "outer"
    INNER = "inner"


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends along one axis, per element of a buffer.

    The number of bytes is this factor times the buffer's elements, including padding, times the
    bytes per element sent.

    Attributes:
        params_per_step: Weights, once per optimizer step.
        params_per_microbatch: Weights, in every forward and backward.
        grads_per_step: Gradients, once per optimizer step.
        grads_per_microbatch: Gradients, in every backward.
    """

    params_per_step: float
    params_per_microbatch: float
    grads_per_step: float
    grads_per_microbatch: float


@dataclass(frozen=True)
class Level:
    """One sharding level along one axis.

    Attributes:
        name: The name of the level in the arguments of ``fe.shard``.
        value: The number of the level, 0 to 3.
        known_as: Its names in other libraries.
    """

    name: str
    value: int
    known_as: str

    def shards(self, role: Role) -> bool:
        """Returns whether this level shards ``role`` along its axis."""
        return self.value >= role

    def fraction(self, role: Role, size: int) -> float:
        """Returns the fraction of ``role`` that one of ``size`` ranks holds between uses."""
        return 1.0 / size if self.shards(role) else 1.0

    def traffic(self, size: int) -> Traffic:
        """Returns the traffic along an axis of ``size`` ranks: see the module docstring."""
        raise NotImplementedError


class NoShard(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        return Traffic(0.0, 0.0, 2 * (size - 1) / size, 0.0)


NO_SHARD = NoShard("no_shard", 0, "DDP")


class Optim(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, factor, 0.0)


OPTIM = Optim("optim", 1, "ZeRO-1")


class OptimGrads(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, 0.0, factor)


OPTIM_GRADS = OptimGrads("optim_grads", 2, "ZeRO-2")


class OptimGradsParams(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(0.0, 2 * factor, 0.0, factor)


OPTIM_GRADS_PARAMS = OptimGradsParams("optim_grads_params", 3, "ZeRO-3, FSDP")
