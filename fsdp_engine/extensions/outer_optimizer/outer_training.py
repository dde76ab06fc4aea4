"""The exchanges of one engine: when fragments are sent, and when their outer steps are taken.

    inner step        1    2    3    4    5    6    7    8        every=4, two fragments, delay=1
    fragment 0             send step           send step
    fragment 1                       send step           send     ...

A fragment is sent on the reduce lane of the outer axis, on which the engine itself has no work. So
the exchange runs beside ``delay`` inner steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.comm.collectives import Communicator, gather_objects
from fsdp_engine.engine import Engine
from fsdp_engine.extension_list import find_module
from fsdp_engine.extensions.outer_optimizer.fragment import Exchange, Fragment
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.runtime.gradient_observer import GradientObserver

_STEP = "OuterOptimizer.step()"
_BLOCK = 256  # elements with a common scale
_KEYS = ("count", "replicas", "weights", "optimizer", "pending", "due")


class OuterTraining(GradientObserver):
    """The outer weights and exchanges of one engine.

    Args:
        engine: The engine, over the ranks of one replica.
        fragments: The fragments of the model.
        every, delay, bits, alpha: The arguments of :class:`.OuterOptimizer`.

    Attributes:
        fragments: The fragments.
        count: Number of inner steps so far.
        replica: The index of this replica.
        num_replicas: Number of replicas.
    """

    sees_all_ranks = True

    def __init__(
        self,
        engine: Engine,
        fragments: Sequence[Fragment],
        *,
        every: int,
        delay: int,
        bits: int | None,
        alpha: float,
    ) -> None:
        whole = engine.mesh.part_of
        assert whole is not None
        self._engine = engine
        self._every, self._delay, self._alpha = every, delay, alpha
        self._whole = whole
        self.replica, self.num_replicas = whole.outer.rank, whole.outer.size
        self._comm = _make_communicator(whole, bits)
        self.count = 0
        self.fragments = list(fragments)
        self._is_swapped = False
        self._has_values = False  # whether outer weights have values
        self._is_compared = False  # whether replicas have compared outer weights
        self._loaded_replicas = self.num_replicas  # of the state that was loaded last
        # Optimizers that have stepped since the last call of `step`.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        engine.reductions.observers.append(self)
        add_step_listener(self)

    def begin_backward(self) -> None:
        """Take the weights of the first backward as outer weights, and compare them between
        replicas.

        Raises:
            RuntimeError: The state of another number of replicas was loaded, and this replica still
                has its own weights. Or the model has outer weights within :meth:`swapped`.
            ValueError: Replicas have different weights. Raised on all ranks.
        """
        if self._is_swapped:
            self._raise_swapped("backward")
        if self._is_compared:
            return
        if self._loaded_replicas != self.num_replicas:
            raise RuntimeError(
                f"backward: expected outer weights of {self.num_replicas} replicas; found the "
                f"state of {self._loaded_replicas} replicas, with the weights of one of them. Call "
                "OuterOptimizer.restart(engine) after loading"
            )
        self._begin("backward")

    def step(self) -> None:
        """See :meth:`.OuterOptimizer.step`."""
        self._check_at_rest(_STEP)
        if not self._has_values:
            raise RuntimeError(f"{_STEP}: expected a backward before the first step; found none")
        self._engine.await_ranks()
        self._stepped.clear()
        self.count += 1
        every = self._every
        due = [
            each
            for each in self.fragments
            if self.count % every == offset_of(each.number, len(self.fragments), every)
        ]
        # With a delay, exchanges that end now began before those that begin now.
        self._take_outer_steps()
        for fragment in due:
            self._send(fragment, self.count + self._delay)
        self._take_outer_steps()

    def synchronize(self) -> None:
        """See :meth:`.OuterOptimizer.synchronize`."""
        self._check_at_rest("OuterOptimizer.synchronize()")
        self._engine.await_ranks()
        self._stepped.clear()
        if not self._is_compared:
            self._begin("OuterOptimizer.synchronize()")
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
        self._loaded_replicas = self.num_replicas
        self._compare(what)
        for fragment in self.fragments:
            fragment.exchange = None
            fragment.write_main()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of inner steps, outer weights, the outer optimizer's state, and the
        exchanges that have begun, after waiting for their communication. Values of parameters are
        sharded tensors by name, which share memory with this object.

        Raises:
            RuntimeError: There are no outer weights before the first backward.
        """
        if self._is_swapped:
            self._raise_swapped("state of OuterOptimizer")
        if not self._has_values:
            raise RuntimeError(
                "state of OuterOptimizer: expected a backward before it is saved; found none"
            )
        weights: dict[str, Tensor] = {}
        pending: dict[str, Tensor] = {}
        optimizer: dict[str, dict[str, Any]] = {}
        due: dict[str, int] = {}
        for fragment in self.fragments:
            weights |= fragment.weights()
            for key, values in fragment.state().items():
                optimizer.setdefault(key, {}).update(values)
            if fragment.exchange is not None:
                self._await(fragment.exchange)
                pending |= fragment.pending()
                due |= dict.fromkeys(fragment.names, fragment.exchange.due)
        return {
            "count": self.count,
            "replicas": self.num_replicas,
            "weights": weights,
            "optimizer": optimizer,
            "pending": pending,
            "due": due,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, of any number of ranks in a replica.

        Raises:
            ValueError: Parameters are missing or unexpected, have other shapes, or exchanges that
                have begun are of other fragments; names a parameter. Nothing is loaded.
        """
        what = "state of OuterOptimizer"
        if missing := [key for key in _KEYS if key not in state_dict]:
            raise ValueError(f"{what}: expected {missing[0]!r}; found none")
        saved, due = state_dict["weights"], state_dict["due"]
        own = {name: each for part in self.fragments for name, each in part.weights().items()}
        if differ := sorted(saved.keys() ^ own.keys()):
            raise ValueError(
                f"{what}: expected outer weights of {len(own)} parameters; found {len(saved)}: "
                f"{differ[0]} is {'missing' if differ[0] in own else 'unexpected'}"
            )
        for name, each in own.items():
            if saved[name].shape != each.shape:
                raise ValueError(
                    f"{what}: {name}: expected shape {tuple(each.shape)}; found "
                    f"{tuple(saved[name].shape)}"
                )
        if state_dict["replicas"] == self.num_replicas:
            for fragment in self.fragments:
                if len(found := {due.get(name) for name in fragment.names}) > 1:
                    raise ValueError(
                        f"{what}: expected the fragments of the run that saved it, since exchanges "
                        f"have begun; found that those of {fragment.names[0]} and other parameters "
                        f"of a fragment end after steps {sorted(map(str, found))}"
                    )
        else:
            due = {}
        for fragment in self.fragments:
            optimizer = {
                key: values
                for key, values in state_dict["optimizer"].items()
                if fragment.names[0] in values
            }
            fragment.load(saved, optimizer, state_dict["pending"], due.get(fragment.names[0]))
            fragment.exchanged_at = 0
        self.count = int(state_dict["count"])
        self._loaded_replicas = int(state_dict["replicas"])
        self._has_values, self._is_compared = True, False

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
            self._is_swapped = True
            try:
                yield
            finally:
                self._is_swapped = False

    def _check_at_rest(self, what: str) -> None:
        if self._is_swapped:
            self._raise_swapped(what)
        if not self._engine.scheduler.is_at_rest:
            raise RuntimeError(
                f"{what}: expected no forward or backward in progress; found a "
                f"{self._engine.scheduler.phase}"
            )

    def _begin(self, what: str) -> None:
        """Take the main weights as outer weights, if there are none, and compare outer weights
        between replicas. Collective over all replicas."""
        if self._has_values:
            self._compare(what)
            return
        self._engine.missing_values.check()
        for fragment in self.fragments:
            fragment.take_main()
        self._compare(what)
        self._has_values = True

    def _compare(self, what: str) -> None:
        """Compare numbers of steps and outer weights between replicas. Collective over all
        replicas.

        Raises:
            ValueError: They differ. Raised on all ranks.
        """
        own = (self.count, [each.checksum for each in self.fragments])
        found: list[Any] = gather_objects(own, self._whole.control_group, what)
        per_replica = self._whole.inner.size
        for rank, (count, checksums) in enumerate(found):
            replica, column = divmod(rank, per_replica)
            first_count, expected = found[column]
            if count != first_count:
                raise ValueError(
                    f"{what}: expected all replicas at one inner step; found replica 0 after step "
                    f"{first_count} and replica {replica} after step {count}"
                )
            for fragment, one, other in zip(self.fragments, expected, checksums, strict=True):
                if one != other:
                    raise ValueError(
                        f"{what}: expected the same outer weights in all replicas; found other "
                        f"values in replica {replica} than in replica 0 of parameters such as "
                        f"{fragment.names[0]}. Build the model with the same seed in all replicas, "
                        "or load the same weights"
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

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Check that :meth:`step` was called after the last step of ``optimizer``.

        Raises:
            RuntimeError: It was not, or the model has outer weights within :meth:`swapped`.
        """
        if self._is_swapped and self._engine.is_stepped_by(optimizer):
            self._raise_swapped(f"{type(optimizer).__name__}.step")
        if optimizer in self._stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected OuterOptimizer.step(engine) after each "
                "optimizer step; found two steps without it"
            )

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Remember that ``optimizer`` has stepped."""
        if self._engine.is_stepped_by(optimizer):
            self._stepped.add(optimizer)

    def _raise_swapped(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: expected the replica's own weights in the model; found outer weights, within "
            "OuterOptimizer.swapped(). Leave the context first"
        )


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
        fragments: Their number ``n``, or "units": one for each unit.

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
