"""A unit: a set of modules and the buffers of their parameters, gathered, reduced and freed as one.

    SHARDED --gather--> GATHERING --wait--> FULL --release--> SHARDED
                            ^                 |
                            +--gather again---+   (main weights have changed)

A unit whose parameters are not sharded is never SHARDED. Forwards and backwards that compute with
the full parameters are counted in ``unit.uses``: from the moment that one of the unit's modules is
called until the call returns, and again through the backward of that call. Each use has a phase,
which matters to units of other classes (``Weights.unit_class``): here forward and backward read the
same bytes.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.lanes import Lanes, Ticket
from fsdp_engine.extension_list import implementation
from fsdp_engine.flat_dtensor import any_requires_grad
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.parameter_watch import UnitWatch
from fsdp_engine.units.installing import Installation
from fsdp_engine.units.plan import PlannedUnit, label_of

# What a use reads weights for. BOTH: a unit whose forward is repeated within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD


class Numbered(Protocol):
    """A unit, as far as the options of other units refer to it."""

    @property
    def index(self) -> int:
        """Its number among the units of its engine."""
        ...

    @property
    def reshards(self) -> bool:
        """Whether its parameters are sharded between uses."""
        ...


@dataclass
class UnitOptions:
    """Options of one unit, as FSDP2's calls and ``engine.units[i].options`` set them. They are read
    at each use, so they can change between forwards and backwards; they must be equal on all ranks.

    Attributes:
        keeps_after_forward: full parameters are kept until the unit's backward is over.
        keeps_after_backward: full parameters are kept until the next forward is over.
        syncs: a backward that can be the step's last one reduces gradients along all axes.
            False: as within ``no_sync``.
        gathers_in_backward: backward reads the unit's weights, unless they are known to be unread.
        prefetch_in_forward: units to prefetch when a forward enters this one. None: the next ones
            of the recorded order.
        prefetch_in_backward: the same for backward.
    """

    keeps_after_forward: bool = False
    keeps_after_backward: bool = False
    syncs: bool = True
    gathers_in_backward: bool = True
    prefetch_in_forward: Sequence[Numbered] | None = None
    prefetch_in_backward: Sequence[Numbered] | None = None


class Kept(enum.Enum):
    """Why the full parameters of a unit are not freed between its uses."""

    RECORDED = "a backward with create_graph recorded functions that read them"
    UNSEEN = "the start of the unit's backward could not be observed"


class State(enum.Enum):
    """Where the full parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "being gathered"
    FULL = "unsharded"


TRANSITIONS = frozenset(
    {
        (State.SHARDED, State.GATHERING),
        (State.GATHERING, State.FULL),
        (State.FULL, State.GATHERING),
        (State.FULL, State.SHARDED),
    }
)


class CallSchedule(Protocol):
    """The schedule by which a forward was gathered: a :class:`~.schedule.Schedule`."""

    def check_backward(self, call: Call, schedule: Any) -> None:
        """See the class."""
        ...


class Call:
    """One forward of a unit whose output takes part in autograd.

    Only autograd's hooks refer to it: it is collected with its graph, and is then no longer
    pending.

    Attributes:
        reads_weights: its backward needs the unit's full parameters.
        is_recorded: its use is part of the recorded order. False: a one-off use.
        microbatch: the microbatch that it belongs to; None: any backward can reach it.
        has_boundary: an input needs a gradient, so the end of this call's backward is observed.
        input_changed: an input was changed in place, so its gradient is not observed: this call's
            backward ends with the whole backward.
        is_pending: its backward is to come, or runs.
        follows_another: when it was made, another call of the unit was pending.
        schedule: by which its forward was gathered.
        outer_run: the run of autograd within which its forward ran, if the engine computed in it
            before; else None. See [Note: Nested backwards] in ``scheduler.py``.
    """

    __slots__ = (
        "follows_another",
        "has_boundary",
        "input_changed",
        "is_pending",
        "is_recorded",
        "microbatch",
        "outer_run",
        "reads_weights",
        "schedule",
        "unit",
    )

    def __init__(
        self,
        unit: Unit,
        reads_weights: bool,
        schedule: CallSchedule,
        *,
        is_recorded: bool = True,
        microbatch: Hashable | None = None,
        outer_run: int | None = None,
    ) -> None:
        self.unit = unit
        self.outer_run = outer_run
        self.schedule = schedule
        self.is_recorded = is_recorded
        self.microbatch = microbatch
        self.reads_weights = reads_weights
        self.has_boundary = False
        self.input_changed = False
        self.is_pending = False
        self.follows_another = False
        unit.num_calls += 1

    def await_backward(self) -> None:
        """Count the call as pending."""
        self.is_pending = True
        if not self.is_recorded:
            self.unit.num_unrecorded += 1
        else:
            pending = self.unit.pending_calls
            before = pending.get(self.microbatch, 0)
            self.follows_another = before > 0
            pending[self.microbatch] = before + 1

    def finish(self) -> None:
        """Its backward is over, or cannot come: it is no longer pending."""
        if self.is_pending:
            self.is_pending = False
            if not self.is_recorded:
                self.unit.num_unrecorded -= 1
            else:
                pending = self.unit.pending_calls
                after = pending.pop(self.microbatch, 0) - 1
                if after > 0:
                    pending[self.microbatch] = after

    def __del__(self) -> None:
        self.finish()
        self.unit.num_calls -= 1


class Unit:
    """See the module docstring.

    Args:
        planned: what it is.
        buffers: its parameters, by kind; the modules hold the sharded ones.
        policy: what their dtypes follow from.
        output_dtype: what its modules return is cast to it; None: left alone.
        lanes: of the engine.

    Attributes:
        name: fully qualified names of its modules; "" for the root.
        modules: whose forwards need its full parameters.
        loose: see :class:`~fsdp_engine.units.plan.PlannedUnit`.
        label: its name in messages.
        buffers, policy, output_dtype: see the arguments.
        trainable: its buffers that have gradients.
        num_elements: elements of its buffers, padding included.
        reshards: whether its parameters are sharded between uses.
        needs_refresh: whether a change of main weights has to be sent or cast before use.
        repeated_phase: what a use reads in which the unit's forward is repeated for its backward:
            FORWARD if its backward gathers other bytes.
        unknown_phase: what a use of another rank reads, whose phase this rank does not know.
        index: its number among the units of its engine, which sets it.
        options: set by users.
        state: of its full parameters.
        uses: forwards and backwards that compute with the full parameters.
        pending_calls: number of calls whose backward is to come and whose graph is alive, by
            microbatch; one-off uses are in ``num_unrecorded``.
        num_unrecorded: number of such calls that are one-off uses.
        num_calls: number of calls whose graph is alive, also of those whose backward has run.
        num_late: weight gradients that modules postponed in this backward.
        kept: reasons not to free the full parameters.
        watch: sees full parameters before and after modules compute with them.
    """

    repeated_phase = BOTH
    unknown_phase = FORWARD

    def __init__(
        self,
        planned: PlannedUnit,
        buffers: Sequence[ParamAndGradBuffer],
        policy: MixedPrecisionPolicy,
        output_dtype: torch.dtype | None,
        lanes: Lanes,
    ) -> None:
        self.name = planned.name
        self.modules = planned.modules
        self.loose = planned.loose
        self.label = planned.label
        self.buffers = buffers
        self.policy = policy
        self.output_dtype = output_dtype
        # Fixed: other dtypes change none of them.
        self.trainable = [buffer for buffer in buffers if buffer.grads is not None]
        self.num_elements = sum(buffer.layout.numel for buffer in buffers)
        self.reshards = any(buffer.weights.reshards for buffer in buffers)
        self.needs_refresh = any(buffer.weights.needs_refresh for buffer in buffers)
        self.index = -1
        self.options = UnitOptions()
        self.state = State.SHARDED if self.reshards else State.FULL
        self._tickets: list[Ticket] = []  # of the gather in flight
        self.uses = 0
        self.pending_calls: dict[Hashable | None, int] = {}
        self.num_unrecorded = 0
        self.num_calls = 0
        self.num_late = 0
        self.kept: set[Kept] = set()
        self.watch = implementation(UnitWatch)(buffers)
        self._lanes = lanes
        self._installation = Installation(buffers, self.label)

    def rename(self, name: str) -> None:
        """Its modules are known by other names from now on."""
        self.name = name
        self.label = label_of(name)

    @property
    def num_staged(self) -> int:
        """Elements of staging buffers that its gradients are written into."""
        return sum(b.grads.num_staged_elements for b in self.trainable if b.grads is not None)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Floating-point inputs of its modules are cast to it; None: left alone."""
        # Modules beside blocks get inputs that the model's forward has computed.
        casts = self.policy.cast_forward_inputs and len(set(self.loose)) < len(self.modules)
        return self.policy.param_dtype if casts else None

    @property
    def is_current(self) -> bool:
        """Whether full parameters, where they exist, equal the main weights."""
        return all(buffer.weights.is_current for buffer in self.buffers)

    def needs_gather(self, phase: int) -> bool:
        """Whether parameters must be gathered or cast before the modules can compute.

        Args:
            phase: what the use reads weights for.
        """
        if self.state is State.SHARDED:
            return True
        return (self.reshards or self.needs_refresh) and not self.is_current

    def record_compute(self) -> Ticket:
        """Record the work that compute has so far."""
        return self._lanes.compute.record()

    def gather(self, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather that brings full parameters up to date.

        Args:
            phase: what the next use reads weights for.
            compute_now: ticket of the work that compute has so far; None: it is recorded here.
        """
        is_held = self.state is not State.SHARDED
        self.wait()  # main weights may have changed since a gather that is in flight
        self._move(State.GATHERING)
        for buffer in self.buffers:
            self._tickets += buffer.weights.gather(compute_now, is_held=is_held)

    def gather_again(self) -> None:
        """Gather full parameters that this rank has once more, because another rank needs them;
        they get the values of the main weights."""
        self.wait()
        self._move(State.GATHERING)
        for buffer in self.buffers:
            self._tickets += buffer.weights.gather()
        self.wait()

    def keep_for(self, phase: int) -> None:
        """The unit is unsharded, and its next use is one of ``phase``: provide the bytes that this
        use reads."""

    def wait(self) -> None:
        """Let compute wait for the gather in flight, if there is one."""
        if self.state is State.GATHERING:
            self._move(State.FULL)
            tickets, self._tickets = self._tickets, []
            self._lanes.compute.wait(*tickets)
            for buffer in self.buffers:
                buffer.weights.gathered()

    def _move(self, state: State) -> None:
        assert (self.state, state) in TRANSITIONS, (
            f"{self.label}: {self.state.value} -> {state.value} is not a legal transition"
        )
        self.state = state

    def enter(self) -> None:
        """A module starts to compute with the full parameters."""
        assert self.state is not State.SHARDED, f"{self.label} is entered while it is sharded"
        self.uses += 1

    def leave(self) -> bool:
        """One forward or backward is over; returns whether it was the last one that runs."""
        assert self.uses > 0, f"{self.label} is left more often than entered"
        self.uses -= 1
        return not self.uses

    def keep_recorded(self) -> None:
        """A backward with ``create_graph`` reads the unit: keep it unsharded until
        :meth:`free_recorded`."""
        self.kept.add(Kept.RECORDED)

    def free_recorded(self) -> None:
        """No recorded function of the unit will run again."""
        self.kept.discard(Kept.RECORDED)

    def keep_unseen(self, found: str, remedy: str) -> None:
        """The start of the unit's backward cannot be observed: keep it unsharded.

        Args:
            found: the expected and the found tensors, for the message.
            remedy: the advice in the message.
        """
        if not self.reshards or Kept.UNSEEN in self.kept or not self.num_elements:
            return
        message = f"forward of unit {self.label}: {found}"
        self.check_unseen(message, remedy)
        warnings.warn(
            f"{message}. The start of its backward cannot be observed, so its full parameters are "
            f"no longer freed. {remedy}, and they will be",
            stacklevel=2,
        )
        self.kept.add(Kept.UNSEEN)

    def check_unseen(self, message: str, remedy: str) -> None:
        """Check that the unit can be kept unsharded because the start of its backward cannot be
        observed.

        Raises:
            RuntimeError: it cannot. The error has ``message``, the reason and ``remedy``.
        """

    def start(self, scheduler: Any) -> None:
        """The engine is built, whose ``scheduler`` is given."""

    def release(self) -> None:
        """Free the full parameters, unless they are not sharded or have to be kept."""
        self.uninstall()
        if self.kept or self.state is State.SHARDED or not self.reshards:
            return
        assert not self.uses, f"{self.label} is freed while it is in use"
        if self.state is State.GATHERING:
            self.wait()
        self._move(State.SHARDED)
        for buffer in self.buffers:
            buffer.weights.release()

    def end_backward(self) -> None:
        """No backward that runs has a use for the full parameters."""
        if self.options.keeps_after_backward:
            self.uninstall()
        else:
            self.release()

    def follow_requires_grad(self) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the full ones.

        Raises:
            RuntimeError: a parameter requires grad that was frozen at ``shard``.
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
        """Copy ``requires_grad`` as users changed it since forward: autograd accumulates into a
        leaf only if the leaf requires grad at that moment."""
        for buffer in self.trainable:
            buffer.follow_requires_grad()

    def check_not_swapped(self) -> None:
        """See :meth:`~fsdp_engine.units.installing.Installation.check_not_swapped`."""
        self._installation.check_not_swapped()

    def install(self) -> None:
        """Put the full parameters into the modules, which read them from here on."""
        self.wait()
        for buffer in self.buffers:
            buffer.weights.note_access()
        # In backward, too: checkpoints within the unit run parts of its forward again.
        if not self._installation.is_full:
            self.watch.begin()
            self._installation.install()

    def uninstall(self) -> None:
        """Put the sharded parameters back, unless gradients of the full ones are yet to come."""
        if self._installation.is_full:
            self.watch.end()  # while gradients are late, full parameters may be freed before them
            if not self.num_late:
                self._installation.uninstall()

    def awaits_backward(self, microbatch: Hashable | None) -> bool:
        """Whether more gradients may come: of forwards, of reads outside of them, of recorded
        functions.

        Args:
            microbatch: of the backward that runs; forwards of other microbatches have their own.
                None: any.
        """
        pending = self.pending_calls
        if pending and (microbatch is None or microbatch in pending or None in pending):
            return True
        if self.kept and Kept.RECORDED in self.kept:
            return True
        if self.num_unrecorded and self.misses_gradients:
            return True  # the model's forward can have read parameters that calls did not
        return any(buffer.reads.num_pending_reads for buffer in self.trainable)

    @property
    def misses_gradients(self) -> bool:
        """Whether gradients of some parameters have not come in this backward, or have come and are
        reduced."""
        for buffer in self.trainable:
            assert buffer.grads is not None
            writer = buffer.grads.writer
            if writer is None or writer.num_missing:
                return True
        return False

    def reset(self) -> None:
        """Drop all state but parameters and options; communication must be over."""
        self.uses = self.num_unrecorded = self.num_late = 0
        self.pending_calls.clear()
        self.kept.clear()
        self.watch.reset()
        self.uninstall()
        self.state = State.SHARDED if self.reshards else State.FULL
        self._tickets = []
        for buffer in self.buffers:
            buffer.weights.mark_stale()
            buffer.weights.release()
            if buffer.grads is not None:
                buffer.grads.release()


def make_unit(
    planned: PlannedUnit,
    buffers: Sequence[ParamAndGradBuffer],
    policy: MixedPrecisionPolicy,
    output_dtype: torch.dtype | None,
    lanes: Lanes,
) -> Unit:
    """Returns a unit, of the class that its weights have. See :class:`Unit`."""
    kinds: list[type[Unit]] = [each.weights.unit_class or Unit for each in buffers]
    kind = next((each for each in kinds if each is not Unit), Unit)
    return kind(planned, buffers, policy, output_dtype, lanes)
