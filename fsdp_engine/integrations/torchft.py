"""``ElasticReplicas``: trains replicas of a sharded model that may be lost and rejoin, with
torchft.

A replica is a separate job (a torchrun with its process groups) that trains one engine, at any
level. torchft's lighthouse tracks which replicas are alive. Gradients that a replica has reduced
are summed over the replicas of the step, and a step is committed only if all sums have succeeded.
If a replica is lost, the others repeat the step, including its microbatches. A replica that is
restarted gets weights, optimizer state and further state from a living replica, over the network,
while the others compute.

[Note: One trajectory]
A step has ``num_microbatches`` over all replicas, numbered from 0. Each replica trains a range of
them, which depends on the number of replicas in the step, and gradients are divided by
``num_microbatches``. So the weights after a step do not depend on the number of replicas, except
for the order in which microbatches are summed. With ``fixed_sum_order`` this order does not depend
on it either: each microbatch is reduced separately within the replica, and sums follow a tree over
all numbers (``microbatch_sums.py``).

[Note: Torn states]
Each rank receives its state separately. If only some ranks of a replica have received theirs, the
step is not committed. torchft uses the step that any rank reports as the step of the replica, and
might not send the state again. So after a step that was not committed the ranks compare their
steps, and report the lowest one if they differ. If no replica has a later step, there is no replica
that could send its state, and the ranks raise an error.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.buffers.gradient_memory import like
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.extras import naming_extra
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.integrations.microbatch_sums import MicrobatchSums, share_of, sum_over_replicas
from fsdp_engine.integrations.state_transport import StateTransport

with naming_extra():
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

_WHAT = "ElasticReplicas()"


class ElasticReplicas:
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
        for what, number in (
            ("num_microbatches", num_microbatches),
            ("min_replicas", min_replicas),
        ):
            if number < 1:
                raise ValueError(f"{what}: expected at least 1; found {number}")
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ValueError(
                "lighthouse: expected an address, or TORCHFT_LIGHTHOUSE; found neither. Start one "
                "with: torchft_lighthouse --min_replicas 1"
            )
        self._engine = engine
        self._optimizer = optimizer
        self._num_microbatches = num_microbatches
        self._min_replicas = min_replicas
        self._extra = dict(extra or {})
        self._fixed_sum_order = fixed_sum_order
        self._share = range(0)
        # Whether this rank received a state in this step, and whether ranks have states of
        # different steps.
        self._was_loaded = False
        self._is_torn = False
        self._few_since: float | None = None
        # The sums of this step's microbatches, and the microbatch whose gradients are not added
        # yet.
        self._sums = MicrobatchSums(num_microbatches)
        self._awaited: int | None = None
        ranks, seconds = engine.ranks, timedelta(seconds=timeout)
        # The timeout of a quorum or vote is longer, because other ranks may be waiting in a
        # collective with a lost replica.
        self._patience = 4 * seconds
        kind = ProcessGroupNCCL if is_accelerator(ranks.device) else ProcessGroupGloo
        self._between_replicas = kind(timeout=seconds)
        self._transport = StateTransport(timeout)
        make_manager = partial(
            Manager,
            pg=self._between_replicas,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=min_replicas,
            # A forward needs the weights of all ranks, and some ranks may still be receiving
            # theirs.
            use_async_quorum=False,
            timeout=seconds,
            quorum_timeout=self._patience,
            connect_timeout=seconds,
            rank=ranks.rank,
            world_size=ranks.size,
            lighthouse_addr=lighthouse,
            checkpoint_transport=self._transport,
            replica_id=name,
        )
        # The first rank's manager serves the managers of the other ranks. Its address is in a store
        # that is created at each start of the replica. A store that outlives the processes, such as
        # torchrun's, would contain the address of an earlier manager.
        error: Exception | None = None
        host = socket.gethostname()
        port = 0
        if ranks.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
            try:
                self._manager = make_manager(store_addr=host, store_port=port)
            except Exception as failed:  # torchft raises errors of several classes
                error = failed
        host, port = agree(_WHAT, error, ranks.control_group, (host, port))[0]
        if ranks.rank > 0:
            self._manager = make_manager(store_addr=host, store_port=port)
        engine.set_replica_reduction(self._reduce)

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return int(self._manager.current_step())

    @property
    def num_replicas(self) -> int:
        """The number of replicas that compute this step's gradients."""
        return int(self._manager.num_participants())

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
        manager = self._manager
        self._was_loaded = False
        try:
            manager.start_quorum()
        except Exception:
            self._between_replicas.abort()  # so that other replicas do not wait for this one
            raise
        if self._is_torn and not self._was_loaded and manager.errored() is None:
            raise RuntimeError(
                "state of this replica: expected one of a single step on all ranks; found that "
                "some ranks have that of a replica which was lost before the others had theirs. No "
                "other replica is left to get it from: start from a checkpoint"
            )
        if manager.errored() is not None:
            # Otherwise a replica that waits for this rank's state would delay the votes of both.
            self._transport.withdraw()
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
        is_committed = bool(self._manager.should_commit(timeout=self._patience))
        if is_committed:
            self._is_torn, self._few_since = False, None
            self._optimizer.step()
        else:
            self._check_after_failure()
        self._optimizer.zero_grad()
        self._engine.zero_grad_buffer(zero=False)  # also if the next step has no backward
        return is_committed

    def _check_after_failure(self) -> None:
        """Compare the states of ranks after a failed step; see [Note: Torn states]. Raise an error
        if there have been too few replicas for too long."""
        error: Exception | None = None
        num_replicas, patience = self.num_replicas, self._patience.total_seconds()
        if num_replicas >= self._min_replicas:
            self._few_since = None
        elif self._few_since is None:
            self._few_since = time.monotonic()
        elif time.monotonic() - self._few_since > patience:
            error = TimeoutError(
                f"min_replicas: expected {self._min_replicas} replicas within {patience:g} s; "
                f"found {num_replicas}"
            )
        state = self._manager.state_dict()
        found = (state["step"], self._was_loaded)
        by_rank = agree("commit()", error, self._engine.ranks.control_group, found)
        if len(set(by_rank)) > 1:
            self._is_torn = True
            lowest = min(step for step, _ in by_rank)
            self._manager.load_state_dict({**state, "step": lowest})
        elif self._was_loaded:
            self._is_torn = False

    def close(self) -> None:
        """Leave the other replicas, which continue without this one."""
        self._engine.set_replica_reduction(None)
        self._manager.shutdown(wait=False)
        self._between_replicas.shutdown()

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
        if self._manager.errored() is not None:
            # Other replicas may wait for this rank's part of the sum. An abort makes their
            # connections fail immediately.
            self._between_replicas.abort()
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

    def _sum(self, tensors: list[Tensor]) -> None:
        """Sum ``tensors`` over replicas, in any order."""
        # A failed sum is reported to the manager, and the step is then not committed.
        works = [self._manager.allreduce(each, reduce_op=dist.ReduceOp.SUM) for each in tensors]
        for work in works:
            work.wait()

    def _state(self) -> dict[str, Any]:
        """Returns this rank's state, which the same rank of a starting replica receives."""
        if self._is_torn:
            raise RuntimeError("state of this replica: expected one of a single step on all ranks")
        optimizer = self._optimizer.state_dict()
        return {
            "expected": self._expected(),
            "weights": [buffer.weights.main.tensor for buffer in self._engine.buffers],
            "optimizer": {
                **optimizer,
                "state": {
                    number: {key: _local(value) for key, value in state.items()}
                    for number, state in optimizer["state"].items()
                },
            },
            "extra": {name: each.state_dict() for name, each in self._extra.items()},
        }

    def _load(self, state: dict[str, Any]) -> None:
        expected = self._expected()
        if state["expected"] != expected or set(state["extra"]) != set(self._extra):
            theirs, ours = ({**each} for each in (state["expected"], expected))
            differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
            found = f"{differing[0]}: {theirs.get(differing[0])}" if differing else "other extras"
            wanted = ours.get(differing[0]) if differing else sorted(self._extra)
            raise ValueError(
                f"state of a living replica: expected {wanted}, as this replica has; found "
                f"{found}. All replicas need one model, sharding, number of ranks, optimizer, "
                "extras and arguments"
            )
        with torch.no_grad():
            for buffer, weights in zip(self._engine.buffers, state["weights"], strict=True):
                buffer.weights.main.tensor.copy_(weights)
        self._engine.weights_changed()
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        optimizer = state["optimizer"]
        self._optimizer.load_state_dict(
            {
                **optimizer,
                "state": {
                    number: {
                        key: like(params[number], value.local) if type(value) is _Slice else value
                        for key, value in each.items()
                    }
                    for number, each in optimizer["state"].items()
                },
            }
        )
        for name, each in self._extra.items():
            each.load_state_dict(state["extra"][name])
        self._was_loaded = True

    def _expected(self) -> dict[str, Any]:
        """Returns the properties that must be equal on all replicas, by name: the shape, the dtype
        and the local range of each parameter's buffer, and the arguments."""
        shards = {
            record.name: (
                tuple(slot.shape),
                str(buffer.weights.main.tensor.dtype),
                buffer.layout.numel,
                slot.offset,
                buffer.layout.range(buffer.spec.optim_depth, buffer.mesh.coordinate),
            )
            for buffer in self._engine.buffers
            for record, slot in zip(buffer.records, buffer.layout.slots, strict=True)
        }
        return {
            **shards,
            "num_microbatches": self._num_microbatches,
            "fixed_sum_order": self._fixed_sum_order,
            "optimizer": type(self._optimizer).__name__,
        }


class _Slice:
    """A rank's slice of a tensor that is sharded like its parameter."""

    def __init__(self, local: Tensor) -> None:
        self.local = local


def _local(value: Any) -> Any:
    return _Slice(value.to_local()) if isinstance(value, FlatDTensor) else value
