"""Units whose parameters may be read without a call of their modules.

Modules beside blocks are often read by the forward around them: a head that multiplies with
``self.embedding.weight``, a scale that lies in a module of its own. Such a unit has to be full
while that forward, the model's, is under way. Which are, execution shows:

- in the first forward all loose units are entered with the model. Those whose loose modules were
  all called (a block is called, or not used) are entered by their own calls from then on;
- where the forward reads a sharded parameter of a loose unit (``WatchedParameters`` in
  ``planning/installing.py``), or a function meets one, the unit is entered there and then, and full
  parameters are what it gets. A unit whose parameters are cut is entered with the model from the
  next forward on, so that it is gathered once and ahead; any other by each read, so that what
  comes before need not wait for it.

Other units are read too: a diffusion model may call the modulation of a block before the block. The
function that meets a sharded parameter of such a unit enters it with the model's forward. The unit
then stays full until that forward returns, which is said once where its parameters are cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from fsdp_engine.runtime.hooks import ModuleHooks
from fsdp_engine.runtime.unit import Unit


class LooseUnits:
    """See the module docstring.

    Args:
        root: the hooks of the model itself.
        units: all of them.
        hooks_of: of each unit with loose modules, their hooks.
        check: called before each forward of the model.
    """

    def __init__(
        self,
        root: ModuleHooks,
        units: Sequence[Unit],
        hooks_of: Mapping[Unit, Sequence[ModuleHooks]],
        check: Callable[[], None],
    ) -> None:
        root.model = self
        self.begins = check
        self._root = root
        self._hooks_of = hooks_of
        # Entered with the model, until all of their modules were seen to be called.
        self._unseen = [unit for unit, hooks in hooks_of.items() if root not in hooks]
        self._is_first = True
        self._warned: set[Unit] = set()
        for unit in units:
            for buffer in unit.buffers:
                buffer.reads.on_read = lambda unit=unit: self.read(unit)

    def entered_aside(self) -> list[Unit]:
        """Units to be entered with the model's forward, this time."""
        return self._unseen if self._is_first else []

    def ends(self) -> None:
        """The model's forward is over: units whose loose modules were all called are entered by
        calls alone from now on. (They may have been read, too: so this time backward brings them
        back.)
        """
        if not self._unseen:
            return
        freed = [
            unit for unit in self._unseen if all(each.was_called for each in self._hooks_of[unit])
        ]
        self._unseen = [unit for unit in self._unseen if unit not in freed]
        beside = [unit for unit in self._root.units if unit not in freed]
        self._root.units = [*beside, *(unit for unit in self._unseen if unit not in beside)]
        self._is_first = False

    def read(self, unit: Unit) -> bool:
        """A sharded parameter of ``unit`` is read: make it full, if the model's forward
        is under way; returns whether it is."""
        if unit.uses:
            return True
        if not self._root.enter_now(unit):
            return False
        if unit.reshards:
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
