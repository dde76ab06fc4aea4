"""A unit: a set of modules with the buffers of their parameters; what is gathered, reduced and
released as one.

The life of a unit's full parameters, as data; anything else is a bug and raises:

    SHARDED --gather--> GATHERING --wait--> IDLE <--enter, leave--> IN_USE
       ^                  |  ^               | |                      |
       +------drop--------+  +-- gather -----|-+----------------------+   (stale, another phase)
       +-------------------------release-----+

It is in use from the moment that one of its modules is called until that call returns, and again
through that call's backward. A unit whose parameters are never cut starts out IDLE and is never
released. What has to be gathered may depend on the phase of the use (``codecs/phase.py``).
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Hashable, Sequence

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.codecs.phase import BACKWARD, FORWARD
from fsdp_engine.devices.lane import Lanes, Ticket
from fsdp_engine.flat_dtensor import any_requires_grad
from fsdp_engine.planning.build import BuiltUnit
from fsdp_engine.planning.installing import Installation
from fsdp_engine.runtime.wishes import Wishes


class Residence(enum.Enum):
    """Where a unit's full parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    IDLE = "idle"
    IN_USE = "in use"

    next: tuple[Residence, ...]  # see TRANSITIONS


class Stays(enum.Enum):
    """Why a unit's full parameters are not released, whoever leaves it."""

    RECORDED = "a backward with create_graph has recorded functions of them, which will read them"
    UNSEEN = "where its backward begins was not seen once"


TRANSITIONS = {
    (Residence.SHARDED, Residence.GATHERING),
    (Residence.GATHERING, Residence.IDLE),
    (Residence.GATHERING, Residence.IN_USE),
    (Residence.GATHERING, Residence.SHARDED),
    (Residence.IDLE, Residence.GATHERING),
    (Residence.IDLE, Residence.IN_USE),
    (Residence.IDLE, Residence.SHARDED),
    (Residence.IN_USE, Residence.GATHERING),
    (Residence.IN_USE, Residence.IDLE),
}
for _state in Residence:
    # Looked up by identity: hashing an enum member runs Python code, several times a unit.
    _state.next = tuple(after for before, after in TRANSITIONS if before is _state)


class Call:
    """One forward of a unit whose output takes part in autograd.

    Only autograd's hooks hold on to it: with its graph it goes, and no longer counts.

    Attributes:
        reads_weights: its backward needs the unit's full parameters.
        aside: this use may not come again: it is not recorded, nor is its backward.
        microbatch: it belongs to; None: whichever backward reaches it.
        has_boundary: an input needs a gradient, so the end of this call's backward will be seen.
        num_awaited: inputs whose gradients are yet to come in this backward. -1: not known, since
            an input was changed in place; then the call is over when all of backward is.
        opened: its backward has begun.
        closed: its backward is over.
        is_counted: its backward is to come, or under way.
        follows_another: when it was made, the backward of another call of the unit was to come.
    """

    __slots__ = (
        "aside",
        "closed",
        "follows_another",
        "has_boundary",
        "is_counted",
        "microbatch",
        "num_awaited",
        "opened",
        "reads_weights",
        "unit",
    )

    def __init__(
        self,
        unit: Unit,
        reads_weights: bool,
        *,
        aside: bool = False,
        microbatch: Hashable | None = None,
    ) -> None:
        self.unit = unit
        self.aside = aside
        self.microbatch = microbatch
        self.reads_weights = reads_weights
        self.has_boundary = False
        self.num_awaited = 1
        self.opened = False
        self.closed = False
        self.is_counted = False
        self.follows_another = False

    def count(self) -> None:
        """Its backward is to come."""
        self.is_counted = True
        if self.aside:
            self.unit.num_aside += 1
        else:
            counts = self.unit.num_calls
            before = counts.get(self.microbatch, 0)
            self.follows_another = before > 0
            counts[self.microbatch] = before + 1

    def uncount(self) -> None:
        """Its backward is over, or will never be."""
        if self.is_counted:
            self.is_counted = False
            if self.aside:
                self.unit.num_aside -= 1
            else:
                counts = self.unit.num_calls
                after = counts.pop(self.microbatch, 0) - 1
                if after > 0:
                    counts[self.microbatch] = after

    def __del__(self) -> None:
        self.uncount()


class Unit:
    """See the module docstring.

    Attributes:
        built: its modules and buffers, its number and name.
        index: its number among the units of its engine, which gives it.
        wishes: what users ask of it.
        residence: where its full parameters are.
        uses: how many forwards and backwards of it are under way.
        num_calls: forwards whose backward is to come and whose graph still lives, by microbatch.
        num_aside: likewise, of uses aside.
        open_calls: those whose backward has begun.
        num_late: weight gradients that this backward's modules have put off.
        stays: why it is not released, if it is not.
    """

    def __init__(self, built: BuiltUnit, lanes: Lanes) -> None:
        self.built = built
        self.index = -1
        self.wishes = Wishes()
        self.residence = Residence.SHARDED if built.reshards else Residence.IDLE
        self.uses = 0
        self.num_calls: dict[Hashable | None, int] = {}
        self.num_aside = 0
        self.open_calls: list[Call] = []
        self.num_late = 0
        self.stays: set[Stays] = set()
        self._lanes = lanes
        self._tickets: list[Ticket] = []
        self._phase = FORWARD  # what it was gathered for
        self._installation = Installation(built.buffers, built.label)

    @property
    def name(self) -> str:
        """Fully qualified names of its modules; "" for the root."""
        return self.built.name

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.built.label

    @property
    def buffers(self) -> Sequence[ParamAndGradBuffer]:
        """Its parameters, by kind."""
        return self.built.buffers

    @property
    def trainable(self) -> Sequence[ParamAndGradBuffer]:
        """Its buffers that have gradients."""
        return self.built.trainable

    @property
    def num_elements(self) -> int:
        """Elements of its buffers, padding included."""
        return self.built.num_elements

    @property
    def num_staged(self) -> int:
        """Elements of transient memory that writing its gradients takes."""
        return sum(b.grads.num_staged_elements for b in self.trainable if b.grads is not None)

    @property
    def reshards(self) -> bool:
        """Whether its full parameters come and go."""
        return self.built.reshards

    @property
    def needs_refresh(self) -> bool:
        """Whether a change of main weights has to travel or be cast before use."""
        return self.built.needs_refresh

    @property
    def is_current(self) -> bool:
        """Whether full parameters, if they are there, equal the main weights."""
        return all(buffer.weights.is_current for buffer in self.built.buffers)

    @property
    def is_whole(self) -> bool:
        """Whether its full parameters are there or on their way, though they come and go."""
        return self.reshards and self.residence is not Residence.SHARDED

    def needs_gather(self, phase: int) -> bool:
        """Whether something must travel or be cast before the modules can compute.

        Args:
            phase: of the use: see ``codecs/phase.py``.
        """
        residence, built = self.residence, self.built
        if residence is Residence.SHARDED:
            return True
        split = built.split_weights
        if split and not all(weights.holds(phase) for weights in split):
            return True
        if residence is Residence.GATHERING:
            return False
        return (built.reshards or built.needs_refresh) and not self.is_current

    def record_compute(self) -> Ticket:
        """What compute has been given so far."""
        return self._lanes.compute.record()

    def gather(self, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue what brings the full parameters up to date.

        Args:
            phase: of the next use.
            compute_now: what compute has been given so far, if that was recorded.
        """
        if self.built.split_weights:
            compute_now = None
            self.wait()  # what another phase reads may be under way
            if not self.uses:
                for weights in self.built.split_weights:
                    weights.keep_only(phase)
        self._phase = phase
        self._move_to(Residence.GATHERING)
        for buffer in self.built.buffers:
            self._tickets += buffer.weights.gather(phase, compute_now)

    def turn_to(self, phase: int) -> None:
        """It stays full until its next use: what is there is to be what that reads."""
        if self.built.split_weights:
            if self.needs_gather(phase):
                self.gather(phase)
        elif phase & BACKWARD:
            for buffer in self.buffers:
                buffer.weights.gathered(for_backward=True)

    def wait(self) -> None:
        """Compute waits for the gather, if one is under way."""
        if self.residence is Residence.GATHERING:
            self._lanes.compute.wait(*self._tickets)
            self._tickets.clear()
            for_backward = self._phase >= BACKWARD
            for buffer in self.built.buffers:
                buffer.weights.gathered(for_backward=for_backward)
            self._move_to(Residence.IN_USE if self.uses else Residence.IDLE)

    def enter(self) -> None:
        """A module starts to compute with the full parameters."""
        if self.residence is not Residence.IN_USE:
            self._move_to(Residence.IN_USE)
        self.uses += 1

    def leave(self) -> None:
        """One forward or backward is over."""
        assert self.uses > 0, f"{self.label} is left more often than entered"
        self.uses -= 1
        if self.uses == 0:
            self._move_to(Residence.IDLE)

    def end_uses(self) -> None:
        """Nothing uses it, whatever was not seen to end."""
        self.uses = 0
        if self.residence is Residence.IN_USE:
            self._move_to(Residence.IDLE)

    def stay_for_recorded(self) -> None:
        """A backward with ``create_graph`` goes through it: it is not released, whoever leaves it,
        until :meth:`forget_recorded`.

        Raises:
            RuntimeError: its weights cannot stay.
        """
        if self.built.split_weights:
            raise RuntimeError(
                f"backward with create_graph=True through unit {self.label}: expected weights that "
                "are one for forward and backward, to be kept until the second backward; found "
                "weights of two encodings. Use level optim_grads"
            )
        self.stays.add(Stays.RECORDED)

    def forget_recorded(self) -> None:
        """Nothing that was recorded of it will run any more."""
        self.stays.discard(Stays.RECORDED)

    def hide_output(self, found: object) -> None:
        """Nobody will see its backward begin, since its output lies in ``found``: it stays full.

        Raises:
            RuntimeError: its weights cannot stay.
        """
        if not self.reshards or Stays.UNSEEN in self.stays or not self.num_elements:
            return
        message = (
            f"forward of unit {self.label}: expected tensors to be returned by themselves or in "
            f"tuples, lists, dicts or dataclasses; found a {type(found).__name__}, in which nobody "
            "looks for them"
        )
        if self.built.split_weights:
            raise RuntimeError(f"{message}, and weights of two encodings. Return a dataclass")
        warnings.warn(
            f"{message}. Its backward may come unseen, so its full parameters are not released any "
            "more. Return a dataclass, and they will be",
            stacklevel=2,
        )
        self.stays.add(Stays.UNSEEN)

    def release(self) -> None:
        """Hand back the full parameters' memory, unless they are never cut."""
        self.uninstall()
        if self.stays or self.residence is Residence.SHARDED or not self.built.reshards:
            return
        self.wait()
        self._move_to(Residence.SHARDED)
        for buffer in self.built.buffers:
            buffer.weights.release()

    def follow_requires_grad(self) -> None:
        """Freeze and thaw full parameters as the user has the sharded ones since.

        Raises:
            RuntimeError: one requires grad that was frozen at ``shard``.
        """
        for buffer in self.buffers:
            if buffer.grads is not None:
                buffer.follow_requires_grad()
            elif any_requires_grad(buffer.sharded_params):
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

    def follow_requires_grad_in_backward(self) -> None:
        """Freeze and thaw full parameters as the user has frozen and thawed the sharded ones since
        forward. Autograd accumulates into a leaf only if the leaf requires grad at that moment."""
        for buffer in self.trainable:
            buffer.follow_requires_grad()

    def check_not_swapped(self) -> None:
        """See :meth:`~fsdp_engine.planning.installing.Installation.check_not_swapped`."""
        self._installation.check_not_swapped()

    def install(self) -> None:
        """Put the full parameters into the modules."""
        self._installation.install()

    def uninstall(self) -> None:
        """Put the sharded parameters back, unless gradients of the full ones are yet to come."""
        if not self.num_late:
            self._installation.uninstall()

    def note_access(self) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        for buffer in self.built.buffers:
            buffer.weights.note_access()

    def awaits_backward(self, microbatch: Hashable | None) -> bool:
        """Whether more gradients may come: of forwards, reads outside them, what is recorded.

        Args:
            microbatch: whose backward it is; the forwards of others have theirs to themselves.
                None: of any.
        """
        counts = self.num_calls
        if counts and (microbatch is None or microbatch in counts or None in counts):
            return True
        if self.stays and Stays.RECORDED in self.stays:
            return True
        if self.num_aside and self.num_missing_grads:
            return True  # the model's forward may have read what its modules' calls have not
        return any(buffer.reads.num_open for buffer in self.trainable)

    @property
    def num_missing_grads(self) -> int:
        """Trainable parameters whose gradient has not come in this backward."""
        missing = 0
        for buffer in self.trainable:
            assert buffer.grads is not None
            missing += len(buffer.records) - buffer.grads.num_touched
        return missing

    def reset(self) -> None:
        """As after ``shard``, from any state; communication must be over."""
        self.uses = self.num_aside = self.num_late = 0
        self.num_calls.clear()
        self.stays.clear()
        self._tickets.clear()
        self.open_calls.clear()
        self.uninstall()
        self.residence = Residence.SHARDED if self.reshards else Residence.IDLE
        for buffer in self.buffers:
            buffer.weights.mark_stale()
            buffer.weights.release()
            if buffer.grads is not None:
                buffer.grads.release()

    def _move_to(self, residence: Residence) -> None:
        assert residence in self.residence.next, (
            f"{self.label}: {self.residence.value} -> {residence.value} is not a legal transition"
        )
        self.residence = residence
