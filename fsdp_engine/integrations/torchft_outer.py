"""``ElasticOuterReplicas``: replicas that may be lost, and exchange weights after each period.

A *period* is ``every`` inner steps, in which each replica trains alone. At its end the replicas
average the changes of their weights, and an outer optimizer steps with the mean (DiLoCo: see the
extension ``outer_optimizer``). A step of torchft's manager is one period.

[Note: An exchange that fails]
If a replica is lost, the sum over replicas fails in some or all of the other replicas. The replicas
in which the sum has failed form a new quorum, and sum the same changes of their weights again. So
only the period of the lost replica is lost. If the sum has succeeded in another replica, that
replica has already stepped its outer weights. It sends its state to the replicas in which the sum
has failed, and they begin the next period with it. A replica that starts may join the quorum of a
repeated exchange. It has trained nothing, but takes part immediately, so that the other replicas do
not wait for a period. Therefore each replica also sends whether it has trained, and the mean is
over the replicas that have. If no replica has trained, because those that repeated the exchange
were lost, there is no mean: the period is not committed, and the replicas train it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.engine import Engine
from fsdp_engine.extensions.outer_optimizer.fragment import NESTEROV, Fragment
from fsdp_engine.integrations.managed_replica import ManagedReplica
from fsdp_engine.memory import allocator


class ElasticOuterReplicas(ManagedReplica):
    """Trains one of several replicas, each of which may be lost, and which exchange weights after
    each period of ``every`` steps. Collective within the replica: all of its ranks create this
    object and call its methods in the same order.

    A replica that is lost loses its period, and the others lose nothing. A replica that is
    restarted begins the next period with the outer weights and the optimizer state of a living one.

    Example::

        replicas = ElasticOuterReplicas(engine, optimizer, every=50)
        while replicas.step < 100:  # periods
            for number in replicas.inner_steps():
                model(batch_of(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            replicas.exchange()

    Args:
        engine: The result of ``fsdp_engine.shard`` over the ranks of this replica.
        optimizer: The inner optimizer, over the engine's parameters.
        every: The number of inner steps of a period.
        outer_optimizer: Makes the outer optimizer; see ``fe.OuterOptimizer``.
        on_host: Store outer weights in memory of the host; see ``fe.OuterOptimizer``.
        min_replicas, extra, lighthouse, name: See :class:`.ElasticReplicas`. The lighthouse waits
            for late replicas for its ``join_timeout_ms``: set this above the largest difference
            between the replicas' times for a period. A replica that exceeds it loses its period.
        timeout: Seconds after which a collective with a lost replica fails, unless the loss is
            detected immediately.
        period_timeout: Seconds that a replica waits for the others at the end of a period.

    Raises:
        ValueError: ``every`` or ``min_replicas`` is below 1, or there is no lighthouse.
        RuntimeError: Parameters have no values.
        RuntimeError, TimeoutError: The lighthouse does not answer. All ranks of the replica raise.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        *,
        every: int,
        outer_optimizer: Callable[[list[nn.Parameter]], Optimizer] = NESTEROV,
        on_host: bool = False,
        min_replicas: int = 1,
        extra: Mapping[str, Stateful] | None = None,
        lighthouse: str | None = None,
        name: str = "",
        timeout: float = 60.0,
        period_timeout: float = 3600.0,
    ) -> None:
        engine.missing_values.check()
        self._every = every
        # Whether the quorum of the next period is formed already.
        self._has_begun = False
        # Whether this replica repeats an exchange, and whether it started by joining an exchange
        # that other replicas repeat.
        self._repeats = False
        self._has_joined_exchange = False
        buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        self._outer = Fragment(0, buffers, outer_optimizer, engine.memory, on_host=on_host)
        self._outer.take_main()
        super().__init__(
            engine,
            optimizer,
            counts={"every": every},
            min_replicas=min_replicas,
            extra=extra,
            lighthouse=lighthouse,
            name=name,
            timeout=timeout,
            patience=period_timeout,
        )

    def inner_steps(self) -> Iterator[int]:
        """Begin a period. Yields the numbers of its inner steps, which continue those of the last
        period; the caller trains each of them. A replica that has just started receives its state
        first.

        Raises:
            ValueError, RuntimeError, TimeoutError: See :meth:`.ElasticReplicas.microbatches`.
        """
        if not self._has_begun:
            self._begin_step()
        while self._has_joined_exchange:
            self._has_joined_exchange = False
            self._exchange(self._outer.movement().zero_(), has_trained=False)
            if not self._has_begun:
                self._begin_step()
        self._has_begun = False
        # The inner steps change the state of the optimizer, which is sent without a copy, so they
        # begin after the transfer. All replicas wait for the receiver at the end of the period
        # anyway.
        self._transport.await_receivers()
        yield from range(self.step * self._every, (self.step + 1) * self._every)

    def exchange(self) -> None:
        """End a period: average the changes of the replicas' weights, step the outer optimizer, and
        set the model's weights to the outer weights. If a replica is lost, the exchange is repeated
        until it succeeds.

        Raises:
            RuntimeError: A forward or backward is running.
            ValueError, TimeoutError: See :meth:`.ElasticReplicas.microbatches`; or there were fewer
                than ``min_replicas`` for ``period_timeout``.
        """
        self._engine.scheduler.check_at_rest("ElasticOuterReplicas.exchange()")
        self._engine.await_ranks()
        self._exchange(self._outer.movement(), has_trained=True)

    def _exchange(self, movement: Tensor, *, has_trained: bool) -> None:
        """Exchange weight changes until this succeeds. See [Note: An exchange that fails].

        Args:
            movement: Outer weights minus main weights; zeros if this replica has not trained.
            has_trained: Whether the mean includes this replica.
        """
        self._repeats = False
        while True:
            total = movement.clone()
            trained = allocator.zeros(1, movement.dtype, movement.device).fill_(float(has_trained))
            self._sum([total, trained])
            self._report_failure()
            is_untrained = not has_trained and self._is_untrained(trained)
            if self._vote():
                self._outer.step(total / trained, 0.0)
                break
            if is_untrained:
                break
            self._repeats = True
            self._begin_step()
            if self._was_loaded:
                self._has_begun = True
                break
        self._repeats = False

    def _is_untrained(self, trained: Tensor) -> bool:
        """Returns whether no replica of the exchange has trained. The step is then not committed.
        Collective within the replica.

        Args:
            trained: The number of replicas that have trained, unless the sum has failed.
        """
        found = self._manager.errored() is None and not bool(trained)
        is_untrained = any(gather_objects(found, self._engine.ranks.control_group, "an exchange"))
        if is_untrained:
            self._manager.report_error(
                RuntimeError("exchange: expected a replica that has trained; found none")
            )
        return is_untrained

    def weights(self) -> dict[str, Tensor]:
        """Returns the outer weights as sharded tensors by parameter name. They share memory with
        this object."""
        return self._outer.weights()

    def _weights(self) -> Any:
        """See the base class. Outer weights are sent instead of the trained main weights."""
        outer = self._outer.flat_state()
        return {"outer": outer, "frozen": super()._weights(), "exchanges": self._repeats}

    @torch.no_grad()
    def _load_weights(self, weights: Any) -> None:
        """See the base class."""
        super()._load_weights(weights["frozen"])
        self._outer.load_flat(weights["outer"])
        self._outer.write_main()
        self._has_joined_exchange = weights["exchanges"]

    @property
    def _sent_buffers(self) -> list[ParamAndGradBuffer]:
        """See the base class."""
        return [each for each in self._engine.buffers if each.grads is None]

    def _arguments(self) -> dict[str, Any]:
        """See the base class."""
        return {"every": self._every, "outer optimizer": self._outer.hyperparameters}
