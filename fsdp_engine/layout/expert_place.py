"""Indices of a rank's experts among all experts, and their names in checkpoints.

[Note: Names of experts]
With expert parallelism over ``size`` ranks, each rank holds the same number of experts of a layer,
and their parameters usually have the same names on every rank. Checkpoints use the names of one
process that holds all experts, so that they can be loaded with any number of ranks:

    experts are            on rank 1 of 2                   in a checkpoint
    ====================   ==============================   ==================================
    modules, two per rank  experts.0.up.weight              experts.2.up.weight
    one tensor, of two     experts.weight, shape (2, 8, 4)  experts.weight, shape (4, 8, 4), of
    experts per rank                                        which this rank has the second half
    modules with global    experts.2.up.weight              the same
    indices as names
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPlace:
    """The place of one expert parameter among all ranks' experts. See [Note: Names of experts].

    Attributes:
        rank: Index of this rank among the ranks that hold different experts.
        size: Number of these ranks.
        layer: Name of the module that holds this rank's experts, followed by a dot. "" if names
            have global indices.
        num_local: Number of expert modules on each rank. 0: the experts are in one tensor, or names
            have global indices.
        names: If names have global indices, the names of the corresponding parameters of all ranks.
    """

    rank: int
    size: int
    layer: str = ""
    num_local: int = 0
    names: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether the tensor is this rank's shard, along the first dim, of a tensor of all
        experts."""
        return bool(self.layer) and not self.num_local

    def rename(self, name: str, rank: int | None = None) -> str:
        """Returns the name in checkpoints of this rank's parameter ``name``.

        With ``rank``, returns the name of that rank's corresponding parameter.
        """
        if not self.num_local or not name.startswith(self.layer):
            return name
        number, dot, rest = name[len(self.layer) :].partition(".")
        place = (self.rank if rank is None else rank) * self.num_local + int(number)
        return f"{self.layer}{place}{dot}{rest}"

    def all_names(self, name: str) -> list[str]:
        """Returns the checkpoint names of all ranks' parameters that correspond to ``name``."""
        if not self.num_local:
            return list(dict.fromkeys((name, *self.names)))
        return [self.rename(name, rank) for rank in range(self.size)]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor of all experts, from the ``shape`` of this rank's
        shard."""
        first, *others = shape
        return (first * self.size, *others)
