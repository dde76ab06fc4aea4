"""What ``shard(checkpointing=...)`` asks for."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_engine import backend
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.activations.checkpointing import Checkpointing, checkpoint_units
from fsdp_engine.extensions.activations.offloaded_activations import (
    ActivationOffload,
    OffloadActivations,
)
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.blocks import find_blocks
from fsdp_engine.units.build import EngineSetup, Resources


class ActivationSettings(EngineExtension):
    """Recomputes or offloads the activations of blocks. Offloading changes nothing on a CPU.

    Args:
        checkpointing: see :func:`~fsdp_engine.shard`.

    Attributes:
        offload: how activations are offloaded; None: they are not.

    Raises:
        ValueError: ``checkpointing`` is none of those that ``shard`` takes.
    """

    def __init__(self, checkpointing: object) -> None:
        self._asked = checkpointing
        self.offload = OffloadActivations.of(checkpointing)
        self._recomputed = Checkpointing.of(checkpointing)
        self._units: UnitSelector | Iterable[UnitSelector] | None = None

    def signature(self) -> str:
        """See the base class."""
        return f"checkpointing={self._asked}"

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """See the base class."""
        del resources
        self._units = setup.units
        if self._recomputed is not None:
            checkpoint_units(setup.model, setup.units, self._recomputed)

    def start(self, engine: Engine) -> None:
        """See the base class."""
        memory = engine.memory
        if self.offload is None or not backend.current().runs_ahead(memory.device):
            return
        moves = ActivationOffload(memory, engine.lanes.compute, self.offload)
        moves.install(find_blocks(engine.model, self._units))
        engine.parts.append(moves)
