"""Which of all experts a rank holds, whatever number of ranks they are cut over.

[Note: Names of experts]
With expert parallelism over ``size`` ranks, each holds as many experts of a layer, and their
parameters have the same names on every rank. In checkpoints they have those of one process that
holds all experts:

    layer of               on rank 1 of 2                   in a checkpoint
    ====================   ==============================   ==================================
    modules, two here      experts.0.up.weight              experts.2.up.weight
    one tensor for all,    experts.weight, shape (2, 8, 4)  experts.weight, shape (4, 8, 4), of
    two experts here                                        which this rank has the second half
    modules whose names    experts.2.up.weight              the same
    tell already
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPlace:
    """One parameter of a layer of experts, or of several experts. See [Note: Names of experts].

    Attributes:
        rank: this rank's number among those that hold different experts.
        size: how many those are.
        layer: name of the module that holds this rank's experts, with a dot behind it; "" where
            names tell already.
        num_local: experts of modules that a rank holds; 0: they are in one tensor.
        names: where names tell already, those that ranks have in this one's place.
    """

    rank: int
    size: int
    layer: str = ""
    num_local: int = 0
    names: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the tensor has a part of the experts, along its first dim."""
        return bool(self.layer) and not self.num_local

    def rename(self, name: str, rank: int | None = None) -> str:
        """A name of this rank's as checkpoints have it; that of another rank's parameter, if
        ``rank`` says so."""
        if not self.num_local or not name.startswith(self.layer):
            return name
        number, dot, rest = name[len(self.layer) :].partition(".")
        place = (self.rank if rank is None else rank) * self.num_local + int(number)
        return f"{self.layer}{place}{dot}{rest}"

    def all_names(self, name: str) -> list[str]:
        """What checkpoints have of the parameters that ranks hold in the place of this one."""
        if not self.num_local:
            return list(dict.fromkeys((name, *self.names)))
        return [self.rename(name, rank) for rank in range(self.size)]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor of all experts, of which this rank has one of ``shape``."""
        first, *others = shape
        return (first * self.size, *others)
