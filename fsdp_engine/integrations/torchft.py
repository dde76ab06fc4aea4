"""``ElasticReplicas``: trains replicas of a sharded model that may be lost and rejoin, with
torchft.

A replica is a separate job (a torchrun with its process groups) that trains one engine, at any
level. torchft's lighthouse tracks which replicas are alive. Gradients that a replica has reduced
are summed over the replicas of the step, and a step is committed only if all sums have succeeded.
If a replica is lost, the others repeat the step, including its microbatches. A replica that is
restarted gets weights, module buffers, optimizer state and further state from a living replica,
over the network, while the others compute.

[Note: One trajectory]
A step has ``num_microbatches`` over all replicas, numbered from 0. Each replica trains a range of
them, which depends on the number of replicas in the step, and gradients are divided by
``num_microbatches``. So the weights after a step do not depend on the number of replicas, except
for the order in which microbatches are summed. With ``fixed_sum_order`` this order does not depend
on it either: each microbatch is reduced separately within the replica, and sums follow a tree over
all numbers (``microbatch_sums.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.engine import Engine
from fsdp_engine.integrations.managed_replica import ManagedReplica
from fsdp_engine.integrations.microbatch_sums import MicrobatchSums, share_of, sum_over_replicas


class ElasticReplicas(ManagedReplica):
    """Trains one of several replicas, each of which may be lost. Collective within the replica: all
    of its ranks create this object and call its methods in the same order.

    Example::

        replicas = ElasticReplicas(engine, optimizer, num_microbatches=12)
        while replicas.step < 1000:
            for number in replicas.microbatches():
                loss_of(model, batch_of(replicas.step, number)).backward()
            replicas.commit()

    Args:
        engine: The result of ``fsdp_engine.shard`` over the ranks of this replica.
        optimizer: The optimizer over the engine's parameters.
        num_microbatches: The number of microbatches of a step, over all replicas.
        min_replicas: The minimum number of replicas. A step with fewer replicas is not committed,
            and is repeated until there are enough.
        extra: Objects with ``state_dict()`` and ``load_state_dict()``, by name, whose state is
            equal on all replicas: schedulers, positions. A replica that starts gets the state from
            a living one.
        fixed_sum_order: Sum in a fixed order, so that weights have the same bits with any number of
            replicas in any step. Each microbatch needs exactly one backward, and is reduced
            separately within the replica. This needs memory for up to log2(the replica's
            microbatches) + 1 more gradients of this rank.
        lighthouse: The address of the lighthouse, ``http://host:port``. None: the environment
            variable ``TORCHFT_LIGHTHOUSE``.
        name: The name of this replica in torchft's logs.
        timeout: Seconds after which a collective with a lost replica fails, unless the loss is
            detected immediately. The timeout of a quorum, and of the vote on a step, is four times
            as long.

    Raises:
        ValueError: ``num_microbatches`` or ``min_replicas`` is below 1, or there is no lighthouse.
        RuntimeError, TimeoutError: The lighthouse does not answer. All ranks of the replica raise.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        *,
        num_microbatches: int,
        min_replicas: int = 1,
        extra: Mapping[str, Stateful] | None = None,
        fixed_sum_order: bool = False,
        lighthouse: str | None = None,
        name: str = "",
        timeout: float = 60.0,
    ) -> None:
        super().__init__(
            engine,
            optimizer,
            counts={"num_microbatches": num_microbatches},
            min_replicas=min_replicas,
            extra=extra,
            lighthouse=lighthouse,
            name=name,
            timeout=timeout,
            # A rank in a collective with a lost replica votes only after this collective's timeout.
            patience=4 * timeout,
        )
        self._num_microbatches = num_microbatches
        self._fixed_sum_order = fixed_sum_order
        self._share = range(0)
        # The sums of this step's microbatches, and the microbatch whose gradients are not added
        # yet.
        self._sums = MicrobatchSums(num_microbatches)
        self._awaited: int | None = None
        engine.set_replica_reduction(self._reduce)

    def microbatches(self) -> Iterator[int]:
        """Begin a step, or repeat a step that was not committed. Yields the numbers of the
        microbatches that this replica trains; the caller runs the backward of each one. A replica
        that has just started receives its state first.

        Raises:
            ValueError: The state of a living replica belongs to another model, sharding or
                optimizer, or to other arguments.
            RuntimeError, TimeoutError: The lighthouse does not answer, there are not enough
                replicas, or only some ranks have received their state because the sending replica
                was lost.
        """
        self._begin_step()
        manager = self._manager
        self._share = share_of(
            manager.participating_rank(), manager.num_participants(), self._num_microbatches
        )
        self._sums = MicrobatchSums(self._num_microbatches)
        for number in self._share:
            is_synced = self._fixed_sum_order or number == self._share[-1]
            self._awaited = number
            with nullcontext() if is_synced else self._engine.no_sync():
                yield number
            if self._fixed_sum_order and self._awaited is not None:
                self._engine.finish_grad_sync()  # there was no backward: reduce zeros
        if not self._share or not self._fixed_sum_order:
            self._engine.finish_grad_sync()  # reduces zeros if there was no microbatch

    def commit(self) -> bool:
        """End the step. The optimizer steps if the gradients of all replicas were summed, and
        gradients are cleared. Returns whether the optimizer stepped; if not, the next
        :meth:`microbatches` repeats the step.

        Raises:
            TimeoutError: There were fewer than ``min_replicas`` for four times the timeout. All
                ranks of the replica raise.
        """
        if is_committed := self._vote():
            self._optimizer.step()
        self._optimizer.zero_grad()
        # The next step may have no backward on this replica, so gradients are cleared here.
        self._engine.zero_grad_buffer(zero=False)
        return is_committed

    def close(self) -> None:
        """Leave the other replicas, which continue without this one."""
        self._engine.set_replica_reduction(None)
        super().close()

    def _reduce(
        self, gradients: Sequence[Tensor], used: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[bool]] | None:
        """Sum ``gradients`` over replicas, in place. Returns which parameters any replica used, or
        None if this replica has further microbatches to add first."""
        device = self._engine.ranks.device
        flags = torch.tensor([float(flag) for each in used for flag in each], device=device)
        tensors = [flags, *gradients]
        if self._fixed_sum_order:
            if self._share and not self._add(tensors):
                return None
            self._sum_in_order(tensors)
        else:
            self._sum(tensors)
        self._report_failure()
        for each in gradients:
            each /= self._num_microbatches
        is_used = iter((flags > 0).tolist())
        return [[next(is_used) for _ in each] for each in used]

    def _add(self, tensors: list[Tensor]) -> bool:
        """Add the gradients of a microbatch to the sums. Returns whether it was this replica's last
        one."""
        number, self._awaited = self._awaited, None
        if number is None:
            raise RuntimeError(
                "backward: expected one for each microbatch, as fixed_sum_order needs; found a "
                "second one"
            )
        is_last = number == self._share[-1]
        # Gradients are copied, because the next backward overwrites them.
        kept = tensors if is_last else [each.clone() for each in tensors]
        self._sums.add(number, number + 1, kept)
        return is_last

    def _sum_in_order(self, tensors: list[Tensor]) -> None:
        """Sum the nodes of all replicas into ``tensors``."""
        manager = self._manager
        if manager.num_participants() == 1:
            for tensor, total in zip(tensors, *self._sums.sums, strict=True):
                tensor.copy_(total)
        elif manager.errored() is None:
            try:
                sum_over_replicas(
                    self._between_replicas,
                    manager.participating_rank(),
                    manager.num_participants(),
                    self._sums,
                    tensors,
                    self._num_microbatches,
                )
            except Exception as failed:  # an error of the backend; the step is then not committed
                manager.report_error(failed)

    def _arguments(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "num_microbatches": self._num_microbatches,
            "fixed_sum_order": self._fixed_sum_order,
        }
