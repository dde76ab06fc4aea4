"""The hooks on a model's modules that enter units, also units that are read without a call.

Modules beside blocks are often read by the forward around them: a head that multiplies with
``self.embedding.weight``, a scale in a module of its own. Such a unit has to be unsharded while the
model's forward runs. Execution shows which units these are:

- In the first forward, all units with modules outside of blocks (*loose* modules) are entered with
  the model. Units whose loose modules were all called (a block is called, or not used) are entered
  by their own calls from then on.
- Where the forward reads a sharded parameter of such a unit (``WatchedParameters`` in
  ``units/installing.py``), or a function receives one, the unit is entered at that moment, and
  the read returns the full parameter. A sharded unit is entered with the model from the next
  forward on, so that it is gathered once, and prefetched; any other unit is entered by each read,
  so that work before the read does not wait for it.

Other units are read, too: a diffusion model can call the modulation of a block before the block.
The function that receives a sharded parameter of such a unit enters it with the model's forward.
The unit is then unsharded until that forward returns; a warning says so once, if it is sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from fsdp_engine.runtime.hooks import ModuleHooks
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class ImplicitUses:
    """See the module docstring.

    Args:
        root: the hooks of the model itself.
        units: all of them.
        hooks_of: The hooks of each unit that has loose modules.
        check: called before each forward of the model.
        scheduler: The scheduler of the engine. While ranks may use different units, they are
            entered by calls and reads, and nothing is learnt from them.
    """

    def __init__(
        self,
        root: ModuleHooks,
        units: Sequence[Unit],
        hooks_of: Mapping[Unit, Sequence[ModuleHooks]],
        check: Callable[[], None],
        scheduler: Scheduler,
    ) -> None:
        root.model = self
        self._scheduler = scheduler
        self.begins = check
        self._root = root
        self._hooks_of = hooks_of
        # Not all of their loose modules have been called: entered with the model.
        self._uncalled = [unit for unit, hooks in hooks_of.items() if root not in hooks]
        self._is_first = True
        self._warned: set[Unit] = set()
        for unit in units:
            for buffer in unit.buffers:
                buffer.reads.on_read = lambda unit=unit: self.read(unit)

    def implicit_uses(self) -> list[Unit]:
        """Units to enter with this forward of the model, as one-off uses."""
        return self._uncalled if self._is_first and not self._scheduler.ranks_differ else []

    def ends(self) -> None:
        """The model's forward is over: units whose loose modules were all called are entered by
        calls alone from now on. (They may also have been read, so their next backward gathers
        them.)
        """
        if not self._uncalled or self._scheduler.ranks_differ:
            return
        called = [
            unit for unit in self._uncalled if all(each.was_called for each in self._hooks_of[unit])
        ]
        self._uncalled = [unit for unit in self._uncalled if unit not in called]
        beside = [unit for unit in self._root.units if unit not in called]
        self._root.units = [*beside, *(unit for unit in self._uncalled if unit not in beside)]
        self._is_first = False

    def read(self, unit: Unit) -> bool:
        """A sharded parameter of ``unit`` is read: gather the unit, if the model's forward runs;
        returns whether it is unsharded."""
        if unit.uses:
            return True
        if not self._root.enter_now(unit):
            return False
        if unit.reshards and not self._scheduler.ranks_differ:
            if unit in self._hooks_of:
                self._root.units.append(unit)
            elif unit not in self._warned:
                self._warned.add(unit)
                warnings.warn(
                    f"parameters of unit {unit.label} are read in the model's forward outside that "
                    "of the unit, as when a module within it is called from elsewhere: the unit "
                    "stays full until the model's forward returns. Make a unit of that module "
                    "(units=), or call it within the unit's forward",
                    stacklevel=2,
                )
        return True


class ModelHooks:
    """See the module docstring.

    Args:
        units: all of them, the root first.
        scheduler: The scheduler of the engine.
        check: called before each forward of the model.
        engine: kept alive as long as the modules.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        scheduler: Scheduler,
        check: Callable[[], None],
        engine: object,
    ) -> None:
        self._hooks: dict[nn.Module, ModuleHooks] = {}
        root = units[0]
        loose: dict[Unit, list[ModuleHooks]] = {}
        for unit in units:
            beside = set(unit.loose)
            casts = (unit.input_dtype, unit.output_dtype)
            # The root is always seen, since its forward frames all others.
            is_seen = unit is root or unit.reshards or unit.needs_refresh
            if not is_seen and casts == (None, None):
                continue
            # All of its modules, or none: a unit's gradients have come when all calls are over.
            for module in unit.modules:
                # Modules beside blocks get inputs that the model's forward has computed.
                dtypes = (None, unit.output_dtype) if module in beside else casts
                if module not in self._hooks:
                    self._hooks[module] = ModuleHooks(scheduler, module, dtypes, engine)
                self._hooks[module].units.append(unit)
                if module in beside:
                    loose.setdefault(unit, []).append(self._hooks[module])
        self._implicit_uses = ImplicitUses(
            self._hooks[root.modules[0]], units, loose, check, scheduler
        )

    @property
    def modules(self) -> Iterable[nn.Module]:
        """Those that are hooked."""
        return self._hooks

    def pause(self, unit: Unit, *, paused: bool) -> None:
        """Whether calls of the unit's modules are let through as they are."""
        for module in unit.modules:
            if module in self._hooks:
                self._hooks[module].paused = paused

    def reset(self) -> None:
        """Forget forwards that an exception ended."""
        for hooks in self._hooks.values():
            hooks.reset()
