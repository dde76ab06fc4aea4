"""Units whose backward reads other bytes than forward, or additional data.

The full parameters of such a unit serve one or both phases of its uses: FORWARD, BACKWARD, or BOTH
(as in a unit whose forward is recomputed within its own backward).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.runtime.hooks import outside_checkpoints
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.passes import in_backward
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD, State, Unit
from fsdp_engine.units.installing import holders


class PhasedUnit(Unit):
    """A unit with different data for forward and backward. See the module docstring.

    Attributes:
        phases: The phases that the full parameters serve.
        split_weights: Weights for which forward and backward gather different bytes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        found = [buffer.weights for buffer in self.buffers]
        self._phased: list[Any] = [each for each in found if each.unit_class is PhasedUnit]
        self.split_weights = [each for each in self._phased if each.is_split]
        if self.split_weights:
            self.repeated_phase, self.unknown_phase = FORWARD, BOTH
        self.phases = BOTH
        self._for_backward = False

    def needs_gather(self, phase: int) -> bool:
        """See :class:`Unit`."""
        return bool(phase & ~self.phases) or super().needs_gather(phase)

    def gather(self, phase: int, compute_now: Ticket | None = None) -> None:
        """See :class:`Unit`."""
        kept = held = 0
        if self.state is not State.SHARDED:
            held = self.phases
            self.wait()
            if self.split_weights:
                compute_now = None
                if self.uses:
                    kept = held if self.is_current else 0
                else:
                    for each in self.split_weights:
                        each.free_all_but(phase)
        for each in self._phased:
            each.wanted, each.phases = phase, held
        super().gather(phase, compute_now)
        self._serve(phase | kept if self.split_weights else BOTH, phase >= BACKWARD)

    def gather_again(self) -> None:
        """See :class:`Unit`."""
        for each in self._phased:
            each.wanted = BOTH
        super().gather_again()

    def keep_for(self, phase: int) -> None:
        """See :class:`Unit`."""
        if self.split_weights:
            if self.needs_gather(phase):
                self.gather(phase)
        elif phase & BACKWARD and not self._for_backward:
            self.wait()
            self._serve(BOTH, True)
            for each in self._phased:
                each.gathered()

    def _serve(self, phases: int, for_backward: bool) -> None:
        """Record the phases that the full parameters serve."""
        self.phases, self._for_backward = phases, for_backward
        for each in self._phased:
            each.phases, each.for_backward = phases, for_backward

    def keep_recorded(self) -> None:
        """See :class:`Unit`.

        Raises:
            RuntimeError: Forward and backward read different bytes.
        """
        if self.split_weights:
            raise RuntimeError(
                f"backward with create_graph=True through unit {self.label}: expected weights with "
                "one encoding for forward and backward, which can be kept until the second "
                "backward; found weights with two encodings. Use level optim_grads"
            )
        super().keep_recorded()

    def check_unseen(self, message: str, remedy: str) -> None:
        """See :class:`Unit`.

        Raises:
            RuntimeError: Forward and backward read different bytes.
        """
        if self.split_weights:
            raise RuntimeError(f"{message}, and weights of two encodings. {remedy}")

    def start(self, scheduler: Any) -> None:
        """See :class:`Unit`. Adds hooks that gather the bytes for forward if part of the unit is
        recomputed in its backward.

        If forward and backward read different bytes, a unit in backward holds those for backward. A
        checkpoint around one of its modules runs the hooks of this module again, but a checkpoint
        around a part of the module does not. So the modules that hold such parameters get hooks of
        their own.
        """
        if not self.split_weights:
            return

        @not_compiled
        @outside_checkpoints
        def before(module: nn.Module, args: Any) -> None:
            if in_backward() and not scheduler.is_nested_forward([self], is_model=False):
                scheduler.repeat(self)

        for module in holders(self.buffers):
            module.register_forward_pre_hook(before, prepend=True)
