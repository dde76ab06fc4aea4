"""The hooks of all of a model's modules that enter units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from fsdp_engine.runtime.hooks import ModuleHooks
from fsdp_engine.runtime.implicit_uses import ImplicitUses
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class ModelHooks:
    """See the module docstring.

    Args:
        units: all of them, the root first.
        scheduler: of the engine.
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
            built = unit.built
            beside = set(built.loose)
            casts = (built.input_dtype, built.output_dtype)
            # The root is always seen, since its forward frames all others.
            is_seen = unit is root or unit.reshards or unit.needs_refresh
            if not is_seen and casts == (None, None):
                continue
            # All of its modules, or none: a unit's gradients have come when all calls are over.
            for module in built.modules:
                # Modules beside blocks get inputs that the model's forward has computed.
                dtypes = (None, built.output_dtype) if module in beside else casts
                if module not in self._hooks:
                    self._hooks[module] = ModuleHooks(scheduler, module, dtypes, engine)
                self._hooks[module].units.append(unit)
                if module in beside:
                    loose.setdefault(unit, []).append(self._hooks[module])
        self._implicit_uses = ImplicitUses(self._hooks[root.built.modules[0]], units, loose, check)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """Those that are hooked."""
        return self._hooks

    def pause(self, unit: Unit, *, paused: bool) -> None:
        """Whether calls of the unit's modules are let through as they are."""
        for module in unit.built.modules:
            if module in self._hooks:
                self._hooks[module].paused = paused

    def reset(self) -> None:
        """Forget forwards that an exception ended."""
        for hooks in self._hooks.values():
            hooks.reset()
