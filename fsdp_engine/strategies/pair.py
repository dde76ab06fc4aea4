"""A strategy: one level for the inner axis and one, at most as high, for the outer axis.

[Note: Depth]
Because the outer level does not exceed the inner one, a role that is sharded along the outer axis
is also sharded along the inner axis. A flat buffer therefore has only three ranges, by *depth*:

    depth 0   the full buffer
    depth 1   this rank's inner shard
    depth 2   this rank's outer shard of its inner shard

Each range contains the next one. A strategy is then three integers, the depth of each role, with
``depth(PARAM) <= depth(GRAD) <= depth(OPTIM)``. From one depth to the next, a tensor is sharded or
reduce-scattered along one axis (0 -> 1 inner, 1 -> 2 outer); in the other direction it is gathered
along this axis. The rest of the engine depends on depths only, not on the strategy.

Worked example, a buffer of 1024 elements on 2 (outer) x 4 (inner) ranks, HFSDP = (3, 1): the rank
at outer 1, inner 2 keeps parameters and gradients at depth 1, elements [512, 768), and optimizer
state at depth 2, elements [640, 768).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.strategies.levels import (
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    OPTIM_GRADS_PARAMS,
    Axis,
    Level,
    Role,
)

LEVELS: dict[str, Level] = {
    level.name: level for level in (NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS)
}

# The axis along which a range of depth d is sharded into ranges of depth d + 1, by d.
AXIS_BELOW_DEPTH = (Axis.INNER, Axis.OUTER)


def level_from_name(name: str, field: str) -> Level:
    """Returns the level with this name.

    Raises:
        ValueError: There is no such level. The message has ``field`` and the valid names.
    """
    try:
        return LEVELS[name]
    except (KeyError, TypeError):
        known = ", ".join(f"{level.name} ({level.known_as})" for level in LEVELS.values())
        raise ValueError(f"{field}: expected one of {known}; found {name!r}") from None


@dataclass(frozen=True)
class Strategy:
    """The pair (inner level, outer level).

    Raises:
        ValueError: The outer level is above the inner one.
    """

    inner: Level
    outer: Level

    def __post_init__(self) -> None:
        if self.outer.value > self.inner.value:
            raise ValueError(
                f"outer_strategy: expected a level at most that of strategy={self.inner.name!r}; "
                f"found {self.outer.name!r}"
            )

    @classmethod
    def from_names(cls, inner: str, outer: str = "no_shard") -> Strategy:
        """Returns the strategy with levels of these names."""
        return cls(level_from_name(inner, "strategy"), level_from_name(outer, "outer_strategy"))

    @staticmethod
    def all_on(num_axes: int) -> list[Strategy]:
        """Returns the ten strategies on two axes, or the four strategies on one."""
        return [each for each in ALL_STRATEGIES if num_axes == 2 or each.outer is NO_SHARD]

    def on(self, outer_size: int) -> Strategy:
        """Returns the strategy for an outer axis of ``outer_size`` ranks.

        For a single rank, the outer level is ``no_shard``.
        """
        return self if outer_size > 1 else Strategy(self.inner, NO_SHARD)

    def level(self, axis: Axis) -> Level:
        """Returns the level on ``axis``."""
        return self.inner if axis is Axis.INNER else self.outer

    def shards(self, role: Role, axis: Axis) -> bool:
        """Returns whether ``role`` is sharded along ``axis``."""
        return self.level(axis).shards(role)

    def depth(self, role: Role) -> int:
        """Returns the number of axes over which ``role`` is sharded, 0 to 2. See [Note: Depth]."""
        return int(self.inner.shards(role)) + int(self.outer.shards(role))

    def on_ranks(self, inner_size: int, outer_size: int) -> str:
        """Returns the levels and the sizes of their axes as text, such as "optim on 8 ranks"."""
        inner = f"{self.inner.name} on {inner_size} rank{'s' * (inner_size > 1)}"
        if outer_size == 1:
            return inner
        return f"{inner}, {self.outer.name} over {outer_size} groups of them"

    def __str__(self) -> str:
        return f"({self.inner.name}, {self.outer.name})"


ALL_STRATEGIES: tuple[Strategy, ...] = tuple(
    Strategy(inner, outer)
    for inner in LEVELS.values()
    for outer in LEVELS.values()
    if outer.value <= inner.value
)
