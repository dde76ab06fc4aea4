"""A unit: one module with its buffers, the granule of gather, reduce and release.

The life of a unit's full parameters, as data; anything else is a bug and raises:

    SHARDED --gather--> GATHERING --wait--> IN_USE --leave--> IDLE --release--> SHARDED
                            |                  ^  |             |
                            +--drop--> SHARDED +-----enter------+--gather (stale)--> GATHERING
                                                  |                                     ^
                                                  +--gather (another plane)-------------+

A unit whose parameters are never cut starts out IDLE and is never released. Where the codec of a
buffer has two planes ([Note: Planes] in ``codecs/base.py``), what a unit has to gather depends on
what for (``for_backward``). A unit that is recomputed within its own backward needs both; once seen
to be, it gathers both from the start.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Sequence

from torch.nn.utils.stateless import _functional_call

from fsdp_engine.devices.lanes import Lanes, Ticket
from fsdp_engine.flat_dtensor import any_requires_grad
from fsdp_engine.planning.build import BuiltUnit
from fsdp_engine.planning.installing import install_table

_CANNOT_STAY = "weights of two encodings"


class UnitState(enum.Enum):
    """Where a unit's full parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    IN_USE = "in use"
    IDLE = "idle"

    next: tuple[UnitState, ...]  # see TRANSITIONS


TRANSITIONS = {
    (UnitState.SHARDED, UnitState.GATHERING),
    (UnitState.GATHERING, UnitState.IN_USE),
    (UnitState.GATHERING, UnitState.IDLE),
    (UnitState.GATHERING, UnitState.SHARDED),
    (UnitState.IN_USE, UnitState.IDLE),
    (UnitState.IN_USE, UnitState.GATHERING),
    (UnitState.IDLE, UnitState.IN_USE),
    (UnitState.IDLE, UnitState.SHARDED),
    (UnitState.IDLE, UnitState.GATHERING),
}
for _state in UnitState:
    # Looked up by identity: hashing an enum member runs Python code, several times a unit.
    _state.next = tuple(after for before, after in TRANSITIONS if before is _state)


class Call:
    """One forward of a unit whose output takes part in autograd.

    Only autograd's hooks hold on to it: with its graph it goes, and no longer counts.

    Attributes:
        has_boundary: an input needs a gradient, so the end of this call's backward will be seen.
        num_awaited: inputs whose gradients are yet to come in this backward. -1: not known, since
            an input was changed in place; then the call is over when all of backward is.
        opened: its backward has begun.
        closed: its backward is over.
    """

    __slots__ = ("_counts", "closed", "has_boundary", "num_awaited", "opened", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.has_boundary = False
        self.num_awaited = 1
        self.opened = False
        self.closed = False
        self._counts = False

    def count(self) -> None:
        """Its backward is to come."""
        self._counts = True
        self.unit.num_calls += 1

    def uncount(self) -> None:
        """Its backward is over, or will never be."""
        if self._counts:
            self._counts = False
            self.unit.num_calls -= 1

    def __del__(self) -> None:
        self.uncount()


class Unit:
    """See the module docstring.

    Attributes:
        index: its number among the engine's units, in module order.
        name: fully qualified name of its module; "" for the root.
        buffers: its parameters, by kind.
        uses: how many forwards and backwards of it are under way.
        num_calls: forwards whose backward is to come and whose graph still lives.
        open_calls: those whose backward has begun.
        parts: of the root, units whose parameters lie in modules that it calls itself; see
            ``plan.py``.
        uncalled: of such a part, modules that hold its parameters and were never called.
        num_awaited: weight gradients that this backward's modules have put off.
        installed: the full parameters are in the modules.
        has_planes: forward and backward gather different bytes of some of its buffers.
        for_backward: what it is gathered for next.
        is_recorded: a backward with ``create_graph`` has recorded functions of its weights.
        is_kept_full: it is not released, since what is recorded will read its weights.
        hides_output: it is not released, since where its backward begins was not seen once.
        is_recomputed: its forward was seen to run again within its backward.
    """

    def __init__(self, built: BuiltUnit, lanes: Lanes) -> None:
        buffers = built.buffers
        self._lanes = lanes
        self.index = built.index
        self.name = built.name
        self.module = built.module
        self.buffers = tuple(buffers)
        self.trainable = tuple(buffer for buffer in buffers if buffer.grads is not None)
        self._frozen = tuple(buffer for buffer in buffers if buffer.grads is None)
        self.num_elements = sum(buffer.layout.numel for buffer in buffers)
        self.reshards = any(buffer.weights.reshards for buffer in buffers)
        self.needs_refresh = any(buffer.weights.needs_refresh for buffer in buffers)
        self.num_trainable = sum(len(buffer.records) for buffer in self.trainable)
        self.num_staged = sum(b.grads.num_staged_elements for b in self.trainable if b.grads)
        self.state = UnitState.SHARDED if self.reshards else UnitState.IDLE
        self.uses = 0
        self.num_calls = 0
        self.open_calls: list[Call] = []
        self.parts: tuple[Unit, ...] = ()
        self.uncalled: set[int] = set()
        self.num_awaited = 0
        self.has_open_grads = False
        self.is_reduced = False
        self._tickets: list[Ticket] = []
        split = [b.weights for b in buffers if b.weights.reshards and b.weights.num_planes > 1]
        self._split_towers = tuple(split)
        self.has_planes = bool(split)
        self.for_backward = False
        self.is_recomputed = False
        self.installed = False
        self.is_recorded = False
        self.is_kept_full = False
        self.hides_output = False
        self._table = install_table(self.buffers)

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name or "the root module"

    @property
    def is_current(self) -> bool:
        """Whether full parameters, if they are there, equal the main weights."""
        return all(buffer.weights.is_current for buffer in self.buffers)

    @property
    def needs_gather(self) -> bool:
        """Whether something must travel or be cast before the module can compute."""
        if self.state is UnitState.SHARDED:
            return True
        if self.has_planes and not self._holds_planes():
            return True
        if self.state is UnitState.GATHERING:
            return False
        return (self.reshards or self.needs_refresh) and not self.is_current

    def gather(self) -> None:
        """Issue what brings the full parameters up to date."""
        planes: Sequence[int] = (0,)
        if self.has_planes:
            planes = self._wanted_planes()
            self.settle()  # another plane may be under way
            if not self.uses:
                self._release_planes(planes)
        self._move_to(UnitState.GATHERING)
        after = (self._lanes.compute.record(),)
        for buffer in self.buffers:
            self._tickets += buffer.weights.gather(after, planes)

    def turn_to_backward(self) -> None:
        """It stays full, from its forward to its backward: what is there is to be what backward
        reads."""
        self.for_backward = True
        if self.has_planes:
            self.gather()
            return
        for buffer in self.buffers:
            buffer.weights.gathered(for_backward=True)

    def settle(self) -> None:
        """Compute waits for the gather, if one is under way."""
        if self.state is UnitState.GATHERING:
            for ticket in self._tickets:
                self._lanes.compute.wait(ticket)
            self._tickets.clear()
            for buffer in self.buffers:
                buffer.weights.gathered(for_backward=self.for_backward)
            self._move_to(UnitState.IDLE)

    def enter(self) -> None:
        """The module starts to compute with the full parameters."""
        if self.state is not UnitState.IN_USE:
            self._move_to(UnitState.IN_USE)
        self.uses += 1

    def leave(self) -> None:
        """One forward or backward is over."""
        assert self.uses > 0, f"{self.label} is left more often than entered"
        self.uses -= 1
        if self.uses == 0:
            self._move_to(UnitState.IDLE)

    def keep_full(self) -> None:
        """A backward with ``create_graph``: do not release it, whoever leaves it, until
        ``is_kept_full`` is taken back.

        Raises:
            RuntimeError: its weights cannot stay.
        """
        if self.reshards and not self._can_stay:
            raise RuntimeError(
                f"backward with create_graph=True through unit {self.label}: expected memory that "
                f"can stay until the second backward; found {_CANNOT_STAY}. Use level optim_grads"
            )
        self.is_kept_full = self.reshards

    def hide_output(self, found: object) -> None:
        """Nobody will see its backward begin, since its output lies in ``found``: it stays full.

        Raises:
            RuntimeError: its weights cannot stay.
        """
        if not self.reshards or self.hides_output or not self.num_elements:
            return
        message = (
            f"forward of unit {self.label}: expected tensors to be returned by themselves or in "
            f"tuples, lists, dicts or dataclasses; found a {type(found).__name__}, in which nobody "
            "looks for them"
        )
        if not self._can_stay:
            raise RuntimeError(f"{message}, and {_CANNOT_STAY}. Return a dataclass")
        warnings.warn(
            f"{message}. Its backward may come unseen, so its full parameters are not released any "
            "more. Return a dataclass, and they will be",
            stacklevel=2,
        )
        self.hides_output = True

    @property
    def _can_stay(self) -> bool:
        """Whether its full parameters may stay as long as they are wanted."""
        return not self.has_planes

    def rest(self) -> None:
        """Nothing uses it, whatever was not seen to end."""
        self.uses = 0
        self._move_to(UnitState.IDLE)

    def release(self) -> None:
        """Hand back the full parameters' memory, unless they are never cut."""
        self.uninstall()
        stays = not self.reshards or self.is_kept_full or self.hides_output
        if stays or self.state is UnitState.SHARDED:
            return
        self.settle()
        self._move_to(UnitState.SHARDED)
        for buffer in self.buffers:
            buffer.weights.release()

    def resume(self) -> None:
        """Gathered again, it is as much in use as before."""
        if self.uses and self.state is UnitState.IDLE:
            self._move_to(UnitState.IN_USE)

    def check_not_swapped(self) -> None:
        """A forward within ``torch.func.functional_call`` is about to put full parameters where the
        sharded ones are.

        Raises:
            RuntimeError: it has put others there.
        """
        for parameters, name, full, sharded in self._table:
            found = parameters[name]
            if found is not sharded and found is not full:
                raise RuntimeError(
                    f"functional_call: expected the model's own parameters in unit {self.label}; "
                    f"found another tensor for {name}, in whose place the engine would use the "
                    "sharded weights. Change the weights themselves (load_state_dict, "
                    "engine.unsharded()), or shard at level no_shard without mixed precision"
                )

    def follow_requires_grad(self) -> None:
        """Freeze and thaw full parameters as the user has the sharded ones since.

        Raises:
            RuntimeError: one requires grad that was frozen at ``shard``.
        """
        for buffer in self._frozen:
            if any_requires_grad(buffer.sharded_params):
                names = [
                    record.name
                    for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
                    if param.requires_grad
                ]
                raise RuntimeError(
                    f"forward: expected {names[0]} to stay frozen, as it was at shard(); found it "
                    f"with requires_grad ({len(names)} such parameters in {self.label}). It has no "
                    "place for gradients: let it require grad before shard(), freeze it after, and "
                    "thaw it when wanted"
                )
        for buffer in self.trainable:
            buffer.follow_requires_grad()

    def install(self) -> None:
        """Put the full parameters into the modules."""
        if not self.installed:
            self.installed = True
            for parameters, name, full, _ in self._table:
                parameters[name] = full

    def uninstall(self) -> None:
        """Put the sharded parameters back, unless gradients of the full ones are yet to come."""
        if self.installed and not self.num_awaited:
            self.installed = False
            for parameters, name, _, sharded in self._table:
                parameters[name] = sharded
        for part in self.parts:
            part.uninstall()

    def touch(self) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        for buffer in self.buffers:
            buffer.weights.touch()

    @property
    def awaits_backward(self) -> bool:
        """Whether more gradients may come: of forwards, reads outside them, what is recorded."""
        calls = self.num_calls > 0 or self.is_recorded
        return calls or any(buffer.reads.num_open for buffer in self.trainable)

    @property
    def num_missing_grads(self) -> int:
        """Trainable parameters whose gradient has not come in this backward."""
        return self.num_trainable - sum(
            buffer.grads.num_touched for buffer in self.trainable if buffer.grads
        )

    def missing_gradients(self) -> list[str]:
        """Names of trainable parameters whose gradient has not come in this backward."""
        if self.is_reduced:
            return []
        return [
            record.name
            for buffer in self.trainable
            if buffer.grads is not None
            for record, came in zip(buffer.records, buffer.grads.touched, strict=True)
            if not came
        ]

    def abandon(self) -> None:
        """Back to rest from any state; communication must be over."""
        self.uses = 0
        self.num_awaited = 0
        self.is_recomputed = False
        self.is_recorded = self.is_kept_full = self.hides_output = False
        self._tickets.clear()
        self.num_calls = 0
        self.open_calls.clear()
        self.has_open_grads = False
        self.is_reduced = False
        self.uninstall()
        if self.reshards:
            self.state = UnitState.SHARDED
        else:
            self.state = UnitState.IDLE
        for buffer in self.buffers:
            buffer.weights.mark_stale()
            buffer.weights.release()
            if buffer.grads is not None:
                buffer.grads.release()

    def _wanted_planes(self) -> tuple[int, ...]:
        if not self.for_backward:
            return (0,)
        return (0, 1) if self.is_recomputed else (1,)

    def _holds_planes(self) -> bool:
        planes = self._wanted_planes()
        return all(tower.holds(planes) for tower in self._split_towers)

    def _release_planes(self, wanted: Sequence[int]) -> None:
        """Let go of what was there for the other half of a step."""
        others = [plane for plane in (0, 1) if plane not in wanted]
        for tower in self._split_towers:
            tower.release(others)

    def _move_to(self, state: UnitState) -> None:
        assert state in self.state.next, (
            f"{self.label}: {self.state.value} -> {state.value} is not a legal transition"
        )
        self.state = state


def in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` is under way."""
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None
