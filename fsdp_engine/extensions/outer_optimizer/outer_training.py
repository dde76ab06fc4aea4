"""The exchanges of one engine: when fragments are sent, and when their outer steps are taken.

    inner step        1    2    3    4    5    6    7    8        every=4, two fragments, delay=1
    fragment 0             send step           send step
    fragment 1                       send step           send     ...

A fragment is sent on the reduce lane of the outer axis, which the engine itself does not use. So
the exchange runs concurrently with ``delay`` inner steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_engine.comm.collectives import Communicator, gather_objects
from fsdp_engine.engine import Engine
from fsdp_engine.extension_list import find_module
from fsdp_engine.extensions.outer_optimizer.fragment import Exchange, Fragment
from fsdp_engine.extensions.outer_optimizer.saved_state import check_state, pack, unpack
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.runtime.gradient_observer import GradientObserver

_STEP = "OuterOptimizer.step()"
_BLOCK = 256  # number of elements with a common scale in a quantized exchange


class OuterTraining(GradientObserver):
    """The outer weights and exchanges of one engine.

    Args:
        engine: The engine, over the ranks of one replica.
        fragments: The fragments of the model.
        owner: The extension that created this object.
        every, delay, bits, alpha: The arguments of :class:`.OuterOptimizer`.

    Attributes:
        fragments: The fragments.
        owner: See above.
        count: Number of inner steps so far.
        replica: The index of this replica.
        num_replicas: Number of replicas.
    """

    def __init__(
        self,
        engine: Engine,
        fragments: Sequence[Fragment],
        owner: object,
        *,
        every: int,
        delay: int,
        bits: int | None,
        alpha: float,
    ) -> None:
        whole = engine.mesh.part_of
        assert whole is not None
        self.owner = owner
        self._engine = engine
        self._every, self._delay, self._alpha = every, delay, alpha
        self._whole = whole
        self.replica, self.num_replicas = whole.outer.rank, whole.outer.size
        self._comm = _make_communicator(whole, bits)
        self.count = 0
        self.fragments = list(fragments)
        self._has_values = False  # whether outer weights have been set
        self._is_compared = False  # whether replicas have compared them since the last load
        self._has_stepped = False  # whether an optimizer has stepped since construction
        # Number of replicas of the run that saved the state that was loaded last.
        self._loaded_replicas = self.num_replicas
        # Whether a backward has begun since the last call of `step`, and the optimizers that have
        # stepped since that backward.
        self._has_gradients = False
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        engine.reductions.observers.append(self)
        add_step_listener(self)

    def begin_backward(self) -> None:
        """Set the outer weights to the main weights in each backward of the first step, since
        weights may be loaded between them. Compare outer weights between replicas in these
        backwards, and in the first backward after a load.

        Raises:
            RuntimeError: The state of another number of replicas was loaded, and :meth:`restart`
                was not called. Or the model temporarily has other weights, as in :meth:`swapped`.
            ValueError: Replicas have different weights. Raised on all ranks.
        """
        self._engine.check_trained_weights("backward")
        self._has_gradients = True
        is_first = self.count == 0 and not self._has_stepped
        if self._is_compared and not is_first:
            return
        self._check_restarted("backward")
        self._begin("backward", takes_weights=is_first)

    def step(self) -> None:
        """See :meth:`.OuterOptimizer.step`."""
        self._check_at_rest(_STEP)
        self._check_restarted(_STEP)
        if not self._has_values:
            raise RuntimeError(f"{_STEP}: expected a backward before the first step; found none")
        self._engine.await_ranks()
        self._end_inner_step()
        self.count += 1
        every = self._every
        due = [
            each
            for each in self.fragments
            if self.count % every == offset_of(each.number, len(self.fragments), every)
        ]
        # With a delay, the outer steps that are due now belong to earlier exchanges. They precede
        # the new exchanges.
        self._take_outer_steps()
        for fragment in due:
            self._finish(fragment)  # an exchange that a run with another delay has saved
            self._send(fragment, self.count + self._delay)
        self._take_outer_steps()

    def synchronize(self) -> None:
        """See :meth:`.OuterOptimizer.synchronize`."""
        what = "OuterOptimizer.synchronize()"
        self._check_at_rest(what)
        self._check_restarted(what)
        self._engine.await_ranks()
        self._end_inner_step()
        self._begin(what, takes_weights=False)
        for fragment in self.fragments:
            self._finish(fragment)
        for fragment in self.fragments:
            if fragment.exchanged_at < self.count:
                self._send(fragment, self.count)
        for fragment in self.fragments:
            self._finish(fragment)
            fragment.write_main()

    def restart(self) -> None:
        """See :meth:`.OuterOptimizer.restart`."""
        what = "OuterOptimizer.restart()"
        self._check_at_rest(what)
        if not self._has_values:
            raise RuntimeError(f"{what}: expected outer weights, which were loaded; found none")
        self._engine.await_ranks()
        self._end_inner_step()
        self._compare(what)
        self._loaded_replicas = self.num_replicas
        for fragment in self.fragments:
            fragment.exchange = None
            fragment.exchanged_at = self.count
            fragment.write_main()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """See :meth:`.OuterOptimizer.swapped`."""
        what = "OuterOptimizer.swapped()"
        self._check_at_rest(what)
        if not self._has_values:
            raise RuntimeError(f"{what}: expected outer weights; found none before a backward")
        self._engine.await_ranks()
        with ExitStack() as stack:
            for fragment in self.fragments:
                stack.enter_context(fragment.in_model())
            stack.enter_context(self._engine.hold_other_weights(f"outer weights, within {what}"))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of inner steps, outer weights, the outer optimizers' state and
        hyperparameters, and the exchanges that have begun. Values of parameters are sharded tensors
        by name, which share memory with this object.

        Waits for the communication of the exchanges. With ``bits``, save all replicas after the
        same inner step: on a CPU, a rank sends the second message of an exchange only while it
        waits for the exchange.

        Raises:
            RuntimeError: The model temporarily has other weights, as in :meth:`swapped`. Or the
                state of another number of replicas was loaded, and :meth:`restart` was not called.
        """
        what = "state of OuterOptimizer"
        self._engine.check_trained_weights(what)
        self._check_restarted(what)
        if not self._has_values:  # a checkpoint before the first step
            for fragment in self.fragments:
                fragment.take_main()
        for fragment in self.fragments:
            if fragment.exchange is not None:
                self._await(fragment.exchange)
        counts = {"count": self.count, "replica": self.replica, "replicas": self.num_replicas}
        return {**counts, **pack(self.fragments)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, of any number of ranks in a replica. Warns if
        it is that of another replica.

        Raises:
            TypeError, ValueError: The state is not complete, or belongs to other parameters or to
                another class of outer optimizer. Or parameters of one fragment belonged to several
                fragments whose optimizers or exchanges differ; names a parameter. Nothing is
                loaded.
            RuntimeError: The model temporarily has other weights, as in :meth:`swapped`.
        """
        self._engine.check_trained_weights("state of OuterOptimizer")
        check_state(state_dict, self.fragments)
        same = state_dict["replicas"] == self.num_replicas
        unpack(state_dict, self.fragments, has_exchanges=same)
        if same and state_dict["replica"] != self.replica:
            warnings.warn(
                f"state of OuterOptimizer: expected the state of replica {self.replica}; found the "
                f"state of replica {state_dict['replica']}, whose weights are now loaded. Load "
                "each replica's own state, or call OuterOptimizer.restart(engine)",
                stacklevel=2,
            )
        self.count = state_dict["count"]
        self._loaded_replicas = state_dict["replicas"]
        self._end_inner_step()
        self._has_values, self._is_compared = True, False

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Check that :meth:`step` was called after the last step of ``optimizer``.

        Raises:
            RuntimeError: It was not called, or the model temporarily has other weights, as in
                :meth:`swapped`.
        """
        if self._engine.is_stepped_by(optimizer):
            what = f"{type(optimizer).__name__}.step"
            self._engine.check_trained_weights(what)
            if optimizer in self._stepped:
                raise RuntimeError(
                    f"{what}: expected OuterOptimizer.step(engine) after each optimizer step; "
                    "found two steps without it"
                )

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Record that ``optimizer`` has stepped. Steps with a closure are checked here, since
        :meth:`optimizer_steps` is not called before them.

        Raises:
            RuntimeError: See :meth:`optimizer_steps`.
        """
        if not self._engine.is_stepped_by(optimizer):
            return
        if optimizer in self._stepped:
            self.optimizer_steps(optimizer)
        self._has_stepped = True
        if self._has_gradients:  # A step without gradients only creates the optimizer's state.
            self._stepped.add(optimizer)

    def _check_at_rest(self, what: str) -> None:
        self._engine.check_trained_weights(what)
        self._engine.scheduler.check_at_rest(what)
        self._engine.check_sharded(what)

    def _check_restarted(self, what: str) -> None:
        if self._loaded_replicas != self.num_replicas:
            raise RuntimeError(
                f"{what}: expected outer weights of {self.num_replicas} replicas; found the "
                f"state of {self._loaded_replicas} replicas, with the weights of one of them. Call "
                "OuterOptimizer.restart(engine) after loading"
            )

    def _end_inner_step(self) -> None:
        self._stepped.clear()
        self._has_gradients = False

    def _begin(self, what: str, *, takes_weights: bool) -> None:
        """Set outer weights to the main weights if they have not been set or ``takes_weights`` is
        true, and compare them between replicas. Collective over all replicas."""
        if not self._has_values or takes_weights:
            self._engine.missing_values.check()
            for fragment in self.fragments:
                fragment.take_main()
        self._compare(what)
        self._has_values = True

    def _compare(self, what: str) -> None:
        """Compare numbers of steps, outer weights and hyperparameters between replicas. Collective
        over all replicas.

        Raises:
            ValueError: They differ. Raised on all ranks.
        """
        group = self._whole.control_group
        if group is None or dist.get_backend(group) == "fake":  # one process simulates all ranks
            self._is_compared = True
            return
        own = (self.count, [(each.checksum, each.hyperparameters) for each in self.fragments])
        found: list[Any] = gather_objects(own, group, what)
        per_replica = self._whole.inner.size
        for rank, (count, values) in enumerate(found):
            replica, column = divmod(rank, per_replica)
            first_count, expected = found[column]
            if count != first_count:
                raise ValueError(
                    f"{what}: expected all replicas at one inner step; found replica 0 after step "
                    f"{first_count} and replica {replica} after step {count}"
                )
            for fragment, one, other in zip(self.fragments, expected, values, strict=True):
                which = f"of parameters such as {fragment.names[0]}"
                if one[0] != other[0]:
                    raise ValueError(
                        f"{what}: expected the same outer weights in all replicas; found different "
                        f"values in replicas 0 and {replica} {which}. Build the model with the "
                        "same seed in all replicas, or load the same weights"
                    )
                if one[1] != other[1]:
                    raise ValueError(
                        f"{what}: expected the same outer optimizer in all replicas; found "
                        f"{other[1]} in replica {replica} and {one[1]} in replica 0 {which}"
                    )
        self._is_compared = True

    def _send(self, fragment: Fragment, due: int) -> None:
        """Begin an exchange, whose outer step is taken after inner step ``due``."""
        movement = fragment.movement()
        ticket = None
        if self._comm is not None:
            lanes, label = self._engine.lanes, f"exchange of fragment {fragment.number}"
            operation = partial(
                self._comm.all_reduce, movement, average=True, tag=2 * fragment.number
            )
            ticket = lanes.outer_reduce.submit(
                label,
                operation,
                after=[lanes.compute.record()],
                reads=[movement],
                writes=[movement],
            )
        fragment.exchange = Exchange(movement, ticket, due)
        fragment.exchanged_at = self.count

    def _await(self, exchange: Exchange) -> None:
        """Make compute wait for the communication of an exchange."""
        if exchange.ticket is not None:
            self._engine.lanes.compute.wait(exchange.ticket)
            exchange.ticket = None

    def _take_outer_steps(self) -> None:
        for fragment in self.fragments:
            if fragment.exchange is not None and fragment.exchange.due <= self.count:
                self._finish(fragment)

    def _finish(self, fragment: Fragment) -> None:
        """Take the outer step of the fragment's exchange, if there is one."""
        if fragment.exchange is not None:
            self._await(fragment.exchange)
            fragment.step(fragment.exchange.movement, self._alpha)
            fragment.exchange = None


def _make_communicator(whole: Any, bits: int | None) -> Communicator | None:
    """Returns the communicator between replicas; None: there is one replica."""
    group, device = whole.outer.reduce_group, whole.device
    if group is None:
        return None
    if bits is None:
        return Communicator(group, device)
    codes = find_module("quantized_reduction.block_codes", "bits").BlockCodes(bits, _BLOCK)
    kind = find_module("quantized_reduction.communicator", "bits").QuantizedCommunicator
    made: Communicator = kind(group, device, codes, None)
    return made


def fragments_of(units: Sequence[Sequence[Any]], fragments: int | str) -> list[list[Any]]:
    """Returns the buffers of each fragment. Unit ``u`` of those with trainable buffers belongs to
    fragment ``u % n``, so that each fragment has units from all depths of the model.

    Args:
        units: The trainable buffers of each unit.
        fragments: The number ``n`` of fragments, or "units": one fragment for each unit.

    Source: the strided pattern of Streaming DiLoCo, https://arxiv.org/abs/2501.18512, section 2.1.
    """
    present = [list(each) for each in units if each]
    number = len(present) if isinstance(fragments, str) else fragments
    return [
        [buffer for unit in present[first::number] for buffer in unit] for first in range(number)
    ]


def offset_of(number: int, num_fragments: int, every: int) -> int:
    """Returns the remainder of inner steps, modulo ``every``, after which a fragment is sent."""
    return every * (number + 1) // num_fragments % every
