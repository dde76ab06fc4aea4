"""The candidates: meshes, strategies, activation checkpointing, microbatch sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fsdp_engine.simulation.arguments import check_sizes, listed
from fsdp_engine.strategies import ALL_STRATEGIES, Axis, Role, Strategy

Mesh = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """One configuration of a job.

    Attributes:
        mesh: ranks on each axis, (inner,) or (outer, inner).
        strategy, outer_strategy: names of the levels.
        checkpointing: each unit's activations are recomputed in backward.
        microbatch_size: the argument of the batch function; None: the batch has one size.
    """

    mesh: Mesh
    strategy: str
    outer_strategy: str
    checkpointing: bool
    microbatch_size: int | None = None

    @property
    def levels(self) -> str:
        """The strategy as text: "optim", or "optim_grads_params + optim" on two axes."""
        if len(self.mesh) == 1:
            return self.strategy
        return f"{self.strategy} + {self.outer_strategy}"

    @property
    def ranks(self) -> str:
        """The mesh as text: "1024", or "128 x 8" (outer x inner)."""
        return " x ".join(map(str, self.mesh))

    def __str__(self) -> str:
        parts = [f"{self.levels} on {self.ranks} ranks"]
        if self.microbatch_size is not None:
            parts.append(f"microbatches of {self.microbatch_size}")
        parts.append("activation checkpointing" if self.checkpointing else "no checkpointing")
        return ", ".join(parts)


def fitting_meshes(world_size: int, ranks_per_node: int) -> list[Mesh]:
    """One axis; also nodes x ranks per node if the ranks fill two or more nodes."""
    meshes: list[Mesh] = [(world_size,)]
    if 1 < ranks_per_node < world_size and world_size % ranks_per_node == 0:
        meshes.append((world_size // ranks_per_node, ranks_per_node))
    return meshes


def check_meshes(meshes: Iterable[Sequence[int]], world_size: int) -> list[Mesh]:
    """Returns the user's meshes as tuples.

    Raises:
        ValueError: a mesh does not have ``world_size`` ranks, or has neither one nor two axes.
    """
    expected = f"one or two sizes of {world_size} ranks each"
    found = [tuple(listed("meshes", mesh, expected)) for mesh in listed("meshes", meshes, expected)]
    for mesh in found:
        check_sizes("meshes", mesh, expected)
        if len(mesh) not in (1, 2) or math.prod(mesh) != world_size or min(mesh) < 1:
            raise ValueError(f"meshes: expected {expected}; found {mesh}")
    return found


def candidates(
    meshes: Iterable[Mesh], checkpointing: Iterable[bool], microbatch_sizes: Iterable[int | None]
) -> Iterator[Candidate]:
    """Every combination: four levels on one axis, ten pairs on two."""
    for size, recompute, mesh in itertools.product(microbatch_sizes, checkpointing, meshes):
        for pair in _pairs(mesh):
            yield Candidate(mesh, pair.inner.name, pair.outer.name, recompute, size)


def _pairs(mesh: Mesh) -> list[Strategy]:
    return [s for s in ALL_STRATEGIES if len(mesh) == 2 or not s.shards(Role.OPTIM, Axis.OUTER)]
