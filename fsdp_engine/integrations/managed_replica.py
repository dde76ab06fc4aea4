"""A replica that torchft keeps at the step of the other replicas.

A replica is a separate job (a torchrun with its process groups) that trains one engine, at any
level. torchft's lighthouse tracks which replicas are alive. A replica that is restarted gets its
state from a living replica, over the network, while the others compute.

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
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.buffers.gradient_memory import like
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.extras import naming_extra
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.integrations.state_transport import StateTransport

with naming_extra():
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL


class ManagedReplica:
    """The manager of one of several replicas. Collective within the replica: all of its ranks
    create this object and call its methods in the same order.

    Args:
        engine: The result of ``fsdp_engine.shard`` over the ranks of this replica.
        optimizer: The optimizer over the engine's parameters.
        counts: Further counts that must be at least 1, by the name of their argument.
        min_replicas, extra, lighthouse, name, timeout: See :class:`.ElasticReplicas`.
        patience: Seconds after which a quorum, or a vote on a step, fails.

    Raises:
        ValueError: A count is not an integer of at least 1, or there is no lighthouse.
        RuntimeError, TimeoutError: The lighthouse does not answer. All ranks of the replica raise.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        *,
        counts: Mapping[str, int],
        min_replicas: int,
        extra: Mapping[str, Stateful] | None,
        lighthouse: str | None,
        name: str,
        timeout: float,
        patience: float,
    ) -> None:
        for what, number in {**counts, "min_replicas": min_replicas}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{what}: expected an integer of at least 1; found {number!r}")
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ValueError(
                "lighthouse: expected an address, or TORCHFT_LIGHTHOUSE; found neither. Start one "
                "with: torchft_lighthouse --min_replicas 1"
            )
        self._engine = engine
        self._optimizer = optimizer
        self._min_replicas = min_replicas
        self._extra = dict(extra or {})
        # Whether this rank received a state in this step, and whether ranks have states of
        # different steps.
        self._was_loaded = False
        self._is_torn = False
        self._few_since: float | None = None
        ranks, seconds = engine.ranks, timedelta(seconds=timeout)
        self._patience = timedelta(seconds=patience)
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
        what = f"{type(self).__name__}()"
        host, port = agree(what, error, ranks.control_group, (host, port))[0]
        try:
            if ranks.rank > 0:
                self._manager = make_manager(store_addr=host, store_port=port)
        except Exception as failed:
            error = failed
        try:
            agree(what, error, ranks.control_group)
        except Exception:
            if error is None:
                self.close()  # otherwise other replicas would wait for this one
            raise

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return int(self._manager.current_step())

    @property
    def num_replicas(self) -> int:
        """The number of replicas that take part in this step."""
        return int(self._manager.num_participants())

    def close(self) -> None:
        """Leave the other replicas, which continue without this one."""
        self._manager.shutdown(wait=False)
        self._between_replicas.shutdown()

    def _begin_step(self) -> None:
        """Agree with the other replicas on which of them take part in the step. A replica that has
        just started receives its state first."""
        manager = self._manager
        self._was_loaded = False
        try:
            manager.start_quorum()
        except Exception:
            self._between_replicas.abort()  # so that other replicas do not wait for this one
            raise
        if self._is_torn and not self._was_loaded and manager.errored() is None:
            raise RuntimeError(
                "state: expected all ranks of this replica at one step; found ranks at different "
                "steps, because the sending replica was lost during the transfer. No other replica "
                "has the state: load a checkpoint"
            )
        if manager.errored() is not None:
            # Otherwise a replica that waits for this rank's state would delay the votes of both.
            self._transport.withdraw()

    def _vote(self) -> bool:
        """End the step. Returns whether all ranks of this replica have succeeded."""
        is_committed = bool(self._manager.should_commit(timeout=self._patience))
        if is_committed:
            self._is_torn, self._few_since = False, None
        else:
            self._check_after_failure()
        return is_committed

    def _report_failure(self) -> None:
        """Abort the connections to other replicas if a sum has failed on this rank, because other
        replicas may wait for this rank's part of it."""
        if self._manager.errored() is not None:
            self._between_replicas.abort()

    def _sum(self, tensors: list[Tensor]) -> None:
        """Sum ``tensors`` over replicas, in any order. The step is not committed if that fails."""
        works = [self._manager.allreduce(each, reduce_op=dist.ReduceOp.SUM) for each in tensors]
        for work in works:
            work.wait()

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

    def _state(self) -> dict[str, Any]:
        """Returns this rank's state, which the same rank of a starting replica receives."""
        if self._is_torn:
            raise RuntimeError(
                "state: expected all ranks of this replica at one step; found ranks at different "
                "steps, so the state is not sent"
            )
        optimizer = self._optimizer.state_dict()
        return {
            "expected": self._expected(),
            "weights": self._weights(),
            # Copies, since a forward may change buffers while they are sent.
            "buffers": {name: each.clone() for name, each in _saved_buffers(self._engine.model)},
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
                f"{found}. All replicas need the same model, sharding, number of ranks, optimizer, "
                "extras and arguments"
            )
        self._load_weights(state["weights"])
        with torch.no_grad():
            for name, buffer in _saved_buffers(self._engine.model):
                buffer.copy_(state["buffers"][name])
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
        and the local range of each parameter's buffer, the shapes and dtypes of module buffers, and
        the arguments."""
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
        buffers = {
            name: (tuple(each.shape), str(each.dtype))
            for name, each in _saved_buffers(self._engine.model)
        }
        return {
            **shards,
            **buffers,
            **self._arguments(),
            "optimizer": type(self._optimizer).__name__,
        }

    @property
    def _sent_buffers(self) -> list[ParamAndGradBuffer]:
        """The buffers whose main weights a starting replica receives."""
        return self._engine.buffers

    def _weights(self) -> Any:
        """Returns the weights that a starting replica receives."""
        return [buffer.weights.main.tensor for buffer in self._sent_buffers]

    @torch.no_grad()
    def _load_weights(self, weights: Any) -> None:
        """Set the weights to those that :meth:`_weights` of a living replica has returned."""
        for buffer, values in zip(self._sent_buffers, weights, strict=True):
            buffer.weights.main.tensor.copy_(values)
        self._engine.weights_changed()

    def _arguments(self) -> dict[str, Any]:
        """Returns arguments that must be equal on all replicas, by name."""
        return {}


class _Slice:
    """A rank's slice of a tensor that is sharded like its parameter."""

    def __init__(self, local: Tensor) -> None:
        self.local = local


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each module buffer that a ``state_dict`` contains."""
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield f"{prefix}.{attribute}" if prefix else attribute, buffer


def _local(value: Any) -> Any:
    return _Slice(value.to_local()) if isinstance(value, FlatDTensor) else value
