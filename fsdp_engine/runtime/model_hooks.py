"""The hooks on all modules of a model, and the units that are read without a call of a module.

The model's forward often reads weights of modules outside of blocks without calling them. For
example, a head may multiply with ``self.embedding.weight``. The units of such modules must be
unsharded while the model's forward runs. The first forwards show which units these are:

- In the first forward, all units with modules outside of blocks (*loose* modules) are entered with
  the model. If all loose modules of a unit were called, only calls enter the unit from then on.
  (Blocks are always entered by calls.)
- If the forward reads a sharded parameter of such a unit (``WatchedParameters`` in
  ``units/installing.py``), or passes one to a function, the unit is entered at that moment, and
  the full parameter is read. From the next forward on, a unit that is sharded between uses
  is entered with the model, so that it is gathered once and prefetched. Any other unit is entered
  by each read, so that work before the read does not wait for it.

Parameters of blocks can also be read without a call: a diffusion model may call the modulation of a
block before the block. When a function receives such a sharded parameter, the unit is entered. It
then stays full until the model's forward returns; if its parameters are sharded, a warning says so
once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from fsdp_engine.runtime.hooks import ModuleHooks
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class ImplicitUses:
    """Enters units that the model's forward reads without a call. See the module docstring.

    Args:
        root: The hooks of the root module.
        units: All units of the model.
        hooks_of: The hooks of the loose modules of each unit that has some.
        check: A function that is called before each forward of the model.
        scheduler: The scheduler of the engine. While ranks may use different units, only calls and
            reads enter units, and nothing is recorded for later forwards.
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
        # Units that have loose modules which were not called yet. They are entered with the model.
        self._uncalled = [unit for unit, hooks in hooks_of.items() if root not in hooks]
        self._is_first = True
        self._warned: set[Unit] = set()
        for unit in units:
            for buffer in unit.buffers:
                buffer.reads.on_read = lambda unit=unit: self.read(unit)

    def implicit_uses(self) -> list[Unit]:
        """Returns the units that this forward of the model must enter as one-off uses."""
        return self._uncalled if self._is_first and not self._scheduler.ranks_differ else []

    def ends(self) -> None:
        """Called when the model's forward has ended. Units whose loose modules were all called are
        entered only by calls from now on. (The forward may also have read them without a call, so
        the next backward still gathers them.)
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
        """Gather ``unit``, because one of its sharded parameters is read, if the model's forward is
        running. Returns whether the unit is unsharded now."""
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
                    f"unit {unit.label}: expected reads of its parameters within the unit's "
                    "forward; found a read elsewhere in the model's forward. The unit stays "
                    "unsharded until the model's forward returns. If another module calls a module "
                    "of the unit, make the called module a unit (units=), or call it within the "
                    "unit's forward",
                    stacklevel=2,
                )
        return True


class ModelHooks:
    """The hooks on all modules of a model. See the module docstring.

    Args:
        units: All units of the model, the root first.
        scheduler: The scheduler of the engine.
        check: A function that is called before each forward of the model.
        engine: The engine, which lives as long as the modules.
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
            # The root always has hooks, because its forward contains all others.
            is_seen = unit is root or unit.reshards or unit.needs_refresh
            if not is_seen and casts == (None, None):
                continue
            # Either all modules of a unit have hooks or none has: the gradients of the unit are
            # complete when the backwards of all its calls have ended.
            for module in unit.modules:
                # Inputs of loose modules are not cast. The model's forward, which casts its own
                # inputs, has computed them.
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
        """The modules that have hooks."""
        return self._hooks

    def pause(self, unit: Unit, *, paused: bool) -> None:
        """Set whether calls of the unit's modules run without entering units."""
        for module in unit.modules:
            if module in self._hooks:
                self._hooks[module].paused = paused

    def reset(self) -> None:
        """Drop the forwards that an exception has ended."""
        for hooks in self._hooks.values():
            hooks.reset()
