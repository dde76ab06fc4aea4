"""A unit: a set of modules and the buffers of their parameters, which are gathered, reduced and
freed together.

    SHARDED --gather--> GATHERING --wait--> FULL --release--> SHARDED
                            ^                 |
                            +--gather again---+   (main weights have changed)

A unit whose parameters are not sharded is never SHARDED. ``unit.uses`` counts the forwards and
backwards that compute with the full parameters: each call of one of the unit's modules until it
returns, and the backward of each call. A use has a phase, forward or backward. In :class:`Unit`,
uses of both phases read the same bytes; other classes (``Weights.unit_class``) distinguish phases.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
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

# The phase of a use. BOTH: the forward of a unit is repeated within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD


class Numbered(Protocol):
    """The properties of a unit that the options of other units need."""

    @property
    def index(self) -> int:
        """The number of the unit in its engine."""
        ...

    @property
    def reshards(self) -> bool:
        """Whether the unit's parameters are sharded between uses."""
        ...


@dataclass
class UnitOptions:
    """Options of one unit, which ``engine.units[i].options`` and methods of FSDP2 set. They are
    read at each use, so they can be changed between forwards and backwards. They must be equal on
    all ranks.

    Attributes:
        keeps_after_forward: Keep full parameters until the unit's backward has ended.
        keeps_after_backward: Keep full parameters until the next forward has ended.
        syncs: The last backward of a step reduces the unit's gradients along all axes. False: the
            unit's gradients are only accumulated, as within ``no_sync``.
        gathers_in_backward: Gather the unit for backward, unless its backward reads no weights.
        prefetch_in_forward: Units to prefetch when a forward enters this unit. None: the next units
            of the recorded order.
        prefetch_in_backward: Units to prefetch when a backward enters this unit. None: the next
            units of the recorded order.
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


class State(enum.IntEnum):
    """The state of a unit's full parameters. An IntEnum, because its members are hashed faster than
    those of other enums."""

    SHARDED = 0
    GATHERING = 1
    FULL = 2


TRANSITIONS = frozenset(
    {
        (State.SHARDED, State.GATHERING),
        (State.GATHERING, State.FULL),
        (State.FULL, State.GATHERING),
        (State.FULL, State.SHARDED),
    }
)


class RecordedBackwards:
    """Functions that backwards with ``create_graph`` have recorded, and that read a unit's weights.

    The decision to free weights must be the same on all ranks, so it does not depend on whether
    the graphs still exist.

    Attributes:
        num_left: Number of functions that have not yet run in a backward that frees its graph.
    """

    __slots__ = ("num_left",)

    def __init__(self) -> None:
        self.num_left = 0

    def add(self, node: Any) -> None:
        """Add the function ``node`` of autograd."""
        self.num_left += 1
        is_left = True

        def runs(grads: Any) -> None:
            nonlocal is_left
            if is_left and not retains_graph():
                is_left = False
                self.num_left -= 1

        node.register_prehook(runs)


retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns whether the running backward retains its graph; True if none is running."""


class CallSchedule(Protocol):
    """The :class:`~.schedule.Schedule` with which the units of a forward were gathered."""

    def check_backward(self, call: Call, schedule: Any) -> None:
        """See :meth:`.Schedule.check_backward`."""
        ...


class Call:
    """One forward of a unit whose output takes part in autograd.

    Only hooks of autograd refer to this object. It is collected together with the graph of the
    forward, and is then no longer pending.

    Attributes:
        unit: The unit.
        reads_weights: Whether its backward needs the unit's full parameters.
        is_recorded: Whether its use is part of the recorded order. False: a one-off use.
        microbatch: The microbatch that the call belongs to; None: any backward can reach it.
        has_boundary: Whether an input requires grad, so that the end of the call's backward is
            observed.
        input_changed: Whether an input was changed in place. Its gradient is then not observed, and
            the backward of this call ends with the complete backward.
        is_pending: Whether the backward of the call is expected or running.
        is_retained: Whether a backward of the call retained its graph for another backward.
        num_resets: The unit's ``num_resets`` when the forward ran. A unit that was reset since then
            no longer counts the call.
        schedule: The schedule with which the forward was gathered.
        outer_run: The run of autograd within which the forward ran, if the engine had already used
            units in that run; else None. See [Note: Nested backwards] in
            ``extensions/nested_backwards/scheduler.py``.
    """

    __slots__ = (
        "has_boundary",
        "input_changed",
        "is_pending",
        "is_recorded",
        "is_retained",
        "microbatch",
        "num_resets",
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
        self.is_retained = False
        self.num_resets = unit.num_resets
        unit.num_calls += 1

    def await_backward(self) -> None:
        """Count the call as pending."""
        self.is_pending = True
        if not self.is_recorded:
            self.unit.num_unrecorded += 1
        else:
            pending = self.unit.pending_calls
            pending[self.microbatch] = pending.get(self.microbatch, 0) + 1

    def finish(self) -> None:
        """Count the call as no longer pending: its backward has ended, or can no longer run."""
        if self.is_pending:
            self.is_pending = False
            if self.num_resets != self.unit.num_resets:
                return
            if not self.is_recorded:
                self.unit.num_unrecorded -= 1
            else:
                pending = self.unit.pending_calls
                after = pending.pop(self.microbatch, 0) - 1
                if after > 0:
                    pending[self.microbatch] = after

    def retain(self) -> None:
        """Record that the running backward retains the graph of the call."""
        if not self.is_retained:
            self.is_retained = True
            self.unit.num_retained += 1

    def __del__(self) -> None:
        self.finish()
        self.unit.num_calls -= 1
        self.unit.num_retained -= self.is_retained


class Unit:
    """A set of modules and the buffers of their parameters. See the module docstring.

    Args:
        planned: The plan of the unit.
        buffers: The buffers of the unit's parameters. The modules hold the sharded parameters.
        policy: The policy from which the dtypes of the buffers were resolved.
        output_dtype: The dtype to which floating-point outputs of the modules are cast; None: no
            cast.
        lanes: The lanes of the engine.

    Attributes:
        name: Fully qualified names of the modules; "" for the root.
        modules: The modules whose forwards read the full parameters.
        loose: See :class:`~fsdp_engine.units.plan.PlannedUnit`.
        label: The name of the unit in messages.
        buffers, policy, output_dtype: See the arguments.
        trainable: The buffers that have gradients.
        num_elements: Number of elements of all buffers, including padding.
        reshards: Whether parameters are sharded between uses.
        needs_refresh: Whether changed main weights must be sent or cast before the next use.
        repeated_phase: The phase of a use in which the unit's forward is repeated for its backward:
            BOTH, or FORWARD if its backward gathers other bytes.
        unknown_phase: The phase to gather for if another rank's use has a phase that this rank does
            not know.
        index: The number of the unit, which the engine sets.
        options: The options of the unit, which users may change.
        state: The state of the full parameters.
        uses: Number of running forwards and backwards that compute with the full parameters.
        pending_calls: For each microbatch, the number of calls whose backward is expected or
            running and whose graph is alive, without one-off uses.
        num_unrecorded: Number of such calls that are one-off uses.
        num_calls: Number of calls whose graph is alive, including those whose backward has run.
        num_retained: Number of these calls whose backward has run with ``retain_graph``.
        num_late: Number of postponed weight gradients that are still missing.
        num_resets: Number of times that :meth:`reset` was called.
        kept: The reasons for which full parameters are not freed.
        watch: The object that is called before and after modules compute with full parameters.
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
        # These attributes are constant. A change of dtypes does not change them.
        self.trainable = [buffer for buffer in buffers if buffer.grads is not None]
        self.num_elements = sum(buffer.layout.numel for buffer in buffers)
        self.reshards = any(buffer.weights.reshards for buffer in buffers)
        self.needs_refresh = any(buffer.weights.needs_refresh for buffer in buffers)
        self.index = -1
        self.options = UnitOptions()
        self.state = State.SHARDED if self.reshards else State.FULL
        self._tickets: list[Ticket] = []  # the tickets of the gather in flight
        self.uses = 0
        self.pending_calls: dict[Hashable | None, int] = {}
        self.num_unrecorded = 0
        self.num_calls = 0
        self.num_retained = 0
        self.num_resets = 0
        self.num_late = 0
        self.kept: set[Kept] = set()
        self._recorded = RecordedBackwards()
        self.watch = implementation(UnitWatch)(buffers)
        self._lanes = lanes
        self._installation = Installation(buffers, self.label)

    def rename(self, name: str) -> None:
        """Change the names of the unit's modules in messages."""
        self.name = name
        self.label = label_of(name)

    @property
    def num_staged(self) -> int:
        """Number of elements of the staging buffers of the unit's gradients."""
        return sum(b.grads.num_staged_elements for b in self.trainable if b.grads is not None)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point inputs of the modules are cast; None: no cast."""
        # Inputs of loose modules are not cast. The model's forward, which casts its own inputs, has
        # computed them.
        casts = self.policy.cast_forward_inputs and len(set(self.loose)) < len(self.modules)
        return self.policy.param_dtype if casts else None

    @property
    def is_current(self) -> bool:
        """Whether full parameters, if there are any, are up to date with the main weights."""
        return all(buffer.weights.is_current for buffer in self.buffers)

    def mark_stale(self) -> None:
        """Record that main weights may have changed without a change of their version counters."""
        for buffer in self.buffers:
            buffer.weights.mark_stale()

    def needs_gather(self, phase: int) -> bool:
        """Returns whether parameters must be gathered or cast before the modules can compute.

        Args:
            phase: The phase of the next use.
        """
        if self.state is State.SHARDED:
            return True
        return (self.reshards or self.needs_refresh) and not self.is_current

    def record_compute(self) -> Ticket:
        """Returns a ticket of all work that compute was given so far."""
        return self._lanes.compute.record()

    def gather(self, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather that brings full parameters up to date.

        Args:
            phase: The phase of the next use.
            compute_now: A ticket of all work that compute was given so far; None: this method
                records one.
        """
        is_held = self.state is not State.SHARDED
        self.wait()  # main weights may have changed since a gather in flight was issued
        self._move(State.GATHERING)
        for buffer in self.buffers:
            self._tickets += buffer.weights.gather(compute_now, is_held=is_held)

    def gather_again(self) -> None:
        """Gather full parameters that this rank already has, because another rank needs them. They
        get the values of the main weights. Waits for the gather."""
        self.wait()
        self._move(State.GATHERING)
        for buffer in self.buffers:
            self._tickets += buffer.weights.gather()
        self.wait()

    def keep_for(self, phase: int) -> None:
        """Keep full parameters for a next use of ``phase``. A subclass whose phases read different
        bytes provides those of ``phase``."""

    def wait(self) -> None:
        """Make compute wait for the gather in flight, if there is one."""
        if self.state is State.GATHERING:
            self._move(State.FULL)
            tickets, self._tickets = self._tickets, []
            self._lanes.compute.wait(*tickets)
            for buffer in self.buffers:
                buffer.weights.gathered()

    def _move(self, state: State) -> None:
        assert (self.state, state) in TRANSITIONS, (
            f"{self.label}: {self.state.name} -> {state.name} is not a legal transition"
        )
        self.state = state

    def enter(self) -> None:
        """Begin a use: a module starts to compute with the full parameters."""
        assert self.state is not State.SHARDED, f"{self.label} is entered while it is sharded"
        self.uses += 1

    def leave(self) -> bool:
        """End a use: a forward or backward has ended. Returns whether no other use is running."""
        assert self.uses > 0, f"{self.label} is left more often than entered"
        self.uses -= 1
        return not self.uses

    def keep_recorded(self) -> None:
        """Keep the unit unsharded until :meth:`free_recorded`, because a backward with
        ``create_graph`` records functions that read its weights."""
        self.kept.add(Kept.RECORDED)

    def await_recorded(self, node: Any) -> None:
        """Wait, in :meth:`free_recorded`, for the function ``node`` of autograd, which a backward
        with ``create_graph`` has recorded."""
        self._recorded.add(node)

    def free_recorded(self) -> None:
        """Allow the unit to be freed, unless functions that were recorded with ``create_graph`` may
        still run."""
        if not self._recorded.num_left:
            self.kept.discard(Kept.RECORDED)

    def drop_recorded(self) -> None:
        """Free the unit if it was kept for recorded functions. After a change of the weights, they
        cannot run."""
        if Kept.RECORDED in self.kept:
            self._recorded = RecordedBackwards()
            self.kept.discard(Kept.RECORDED)
            if not self.uses and self.state is State.FULL:
                self.release()

    def keep_unseen(self, found: str, remedy: str) -> None:
        """Keep the unit unsharded, because the start of its backward cannot be observed, and warn.

        Args:
            found: The expected and the found tensors, for the message.
            remedy: The advice in the message.
        """
        if not self.reshards or Kept.UNSEEN in self.kept or not self.num_elements:
            return
        message = f"forward of unit {self.label}: {found}"
        self.check_unseen(message, remedy)
        warnings.warn(
            f"{message}. The start of the unit's backward cannot be observed, so the unit's full "
            f"parameters stay in memory from now on. To free them again: {remedy}",
            stacklevel=2,
        )
        self.kept.add(Kept.UNSEEN)

    def check_unseen(self, message: str, remedy: str) -> None:
        """Check that the unit can be kept unsharded if the start of its backward cannot be
        observed.

        Raises:
            RuntimeError: The unit cannot be kept unsharded (in a subclass). The error contains
                ``message``, the reason and ``remedy``.
        """

    def start(self, scheduler: Any) -> None:
        """Called when the engine, which has the given ``scheduler``, is built."""

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
        """Free the full parameters after backward, unless the options keep them."""
        if self.options.keeps_after_backward:
            self.uninstall()
        else:
            self.release()

    def follow_requires_grad(self) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the full ones.

        Raises:
            RuntimeError: A parameter that was frozen at ``shard`` requires grad now.
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
                    f"with requires_grad ({len(names)} such parameters in {self.label}). No "
                    "memory for its gradients was planned: set requires_grad=True before shard(), "
                    "and False after shard() until the parameter is to be trained"
                )

    def follow_requires_grad_in_backward(self) -> None:
        """Copy ``requires_grad`` if users have changed it since forward. Autograd accumulates into
        a leaf only if the leaf requires grad at that moment."""
        for buffer in self.trainable:
            buffer.follow_requires_grad()

    def check_not_swapped(self) -> None:
        """See :meth:`~fsdp_engine.units.installing.Installation.check_not_swapped`."""
        self._installation.check_not_swapped()

    def install(self) -> None:
        """Install the full parameters in the modules, which read them from now on."""
        self.wait()
        for buffer in self.buffers:
            buffer.weights.note_access()
        # This is also needed in backward: checkpoints within the unit repeat parts of its forward.
        if not self._installation.is_full:
            self.watch.begin()
            self._installation.install()

    def uninstall(self) -> None:
        """Install the sharded parameters in the modules, unless postponed gradients of the full
        parameters are missing."""
        if self._installation.is_full:
            # Called even if gradients are late: full parameters may be freed before these arrive.
            self.watch.end()
            if not self.num_late:
                self._installation.uninstall()

    @property
    def may_run_backward(self) -> bool:
        """Whether autograd has a graph of the unit that a backward has not freed."""
        return bool(self.pending_calls or self.num_unrecorded or self.num_retained)

    def invalidate_graphs(self, params: Collection[int]) -> None:
        """Make autograd refuse backwards of earlier forwards that read one of ``params``. The
        weights of these forwards no longer exist.

        Args:
            params: The ``id`` of each sharded parameter that an optimizer has changed.
        """
        changed = [
            full
            for buffer in self.trainable
            if not buffer.is_plain  # the optimizer's writes increase versions of plain parameters
            for full, sharded in zip(buffer.full_params, buffer.sharded_params, strict=True)
            if id(sharded) in params
        ]
        if changed:
            torch.autograd.graph.increment_version(changed)
            self.watch.reset()

    def awaits_backward(self, microbatch: Hashable | None) -> bool:
        """Returns whether more gradients of the unit may arrive in the running backward: from
        calls, from reads outside of calls, or from functions recorded with ``create_graph``.

        Args:
            microbatch: The microbatch of the running backward. Calls of other microbatches have
                other backwards. None: the backward can reach all calls.
        """
        pending = self.pending_calls
        if pending and (microbatch is None or microbatch in pending or None in pending):
            return True
        if self.kept and Kept.RECORDED in self.kept:
            return True
        if self.num_unrecorded and self.misses_gradients:
            return True  # the model's forward may have read parameters that no call has read
        return any(buffer.reads.num_pending_reads for buffer in self.trainable)

    @property
    def misses_gradients(self) -> bool:
        """Whether gradients of some parameters have not been written in this backward. Also true
        if their reduction is already submitted."""
        for buffer in self.trainable:
            assert buffer.grads is not None
            writer = buffer.grads.writer
            if writer is None or writer.num_missing:
                return True
        return False

    def reset(self) -> None:
        """Drop all state except parameters and options. Communication must have ended."""
        self.uses = self.num_unrecorded = self.num_late = 0
        self.num_resets += 1
        self.pending_calls.clear()
        self.kept.clear()
        self._recorded = RecordedBackwards()
        self.watch.reset()
        self.uninstall()
        self.state = State.SHARDED if self.reshards else State.FULL
        self._tickets = []
        self.mark_stale()
        for buffer in self.buffers:
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
    """Returns a unit. Its class is the ``unit_class`` of its weights, by default :class:`Unit`."""
    kinds: list[type[Unit]] = [each.weights.unit_class or Unit for each in buffers]
    kind = next((each for each in kinds if each is not Unit), Unit)
    return kind(planned, buffers, policy, output_dtype, lanes)
