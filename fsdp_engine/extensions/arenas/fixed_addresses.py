"""``fe.FixedAddresses``: see [Note: Arena] in ``arena.py`` and [Note: Registered memory] in
``nccl_pool.py``."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.arenas import nccl_pool
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.runtime.rehearsal import predict_concurrent_units
from fsdp_engine.units.assignment import expect
from fsdp_engine.units.build import EngineSetup


@dataclass(frozen=True)
class FixedAddresses(EngineExtension):
    """Transient buffers have fixed addresses, planned from an observed step, and steady steps
    allocate nothing. No effect before torch 2.13.

    Attributes:
        nccl: Allocate communication buffers in memory registered with NCCL, which collectives read
            and write without a copy.
        symmetric: With ``nccl``: window registration. False: plain registration.
    """

    nccl: bool = False
    symmetric: bool = True

    def check(self, setup: EngineSetup) -> None:
        """See the base class.

        Raises:
            ValueError: NCCL cannot register memory for these ranks.
        """
        if self.nccl:
            nccl_pool.check_nccl(setup.data, symmetric=self.symmetric)

    def memory(self, setup: EngineSetup) -> ArenaMemory:
        """See the base class."""
        pool = nccl_pool.NcclPool(setup.data, symmetric=self.symmetric) if self.nccl else None
        return ArenaMemory(setup.data.device, pool)

    def start(self, engine: Engine) -> None:
        """Allocate arenas for a rehearsed step, and register them. Collective with ``nccl``."""
        if not self.nccl:
            return
        memory, units = engine.memory, engine.units
        assert isinstance(memory, ArenaMemory)
        expected = expect(engine.model, [unit.modules for unit in units])
        budgets = (engine.budget, engine.staging_budget)
        memory.expect(predict_concurrent_units(units, expected, *budgets))
