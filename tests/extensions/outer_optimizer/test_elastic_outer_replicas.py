"""Replicas under torchft that exchange weights rarely: one is lost, and comes again."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.integrations import state_transport
from fsdp_engine.integrations.torchft_outer import ElasticOuterReplicas
from tests import reference
from tests.integrations.lighthouses import lighthouse_for
from tests.models import odd_model, vector_batch
from tests.pool import on_ranks
from tests.reference import full_weights
from tests.training import mesh_of

EVERY = 3
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return odd_model()


def train_period(model: nn.Module, optimizer: Any, steps: Any, replica: int) -> None:
    """Train the inner steps of a period."""
    for step in steps:
        model(*vector_batch(2, 100 * step + 10 * replica, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Simulation:
    """The replicas of one process.

    Attributes:
        shared: The outer weights.
    """

    def __init__(self, replicas: int) -> None:
        first = make_model()
        self.models = [copy.deepcopy(first) for _ in range(replicas)]
        self.optimizers = [reference.adamw(model.parameters()) for model in self.models]
        self.shared = [nn.Parameter(p.detach().clone()) for p in first.parameters()]
        self.outer = OUTER(self.shared)
        self.period = 0

    def run(self, replicas: list[int]) -> None:
        """A period of some of the replicas."""
        steps = range(EVERY * self.period, EVERY * (self.period + 1))
        for replica in replicas:
            train_period(self.models[replica], self.optimizers[replica], steps, replica)
        owns = [list(self.models[replica].parameters()) for replica in replicas]
        for number, shared in enumerate(self.shared):
            moved = [shared.data - own[number].data for own in owns]
            shared.grad = torch.stack(moved).mean(0)
        self.outer.step()
        for model in self.models:
            for p, shared in zip(model.parameters(), self.shared, strict=True):
                p.data.copy_(shared.data)
        self.period += 1

    def join(self, replica: int, other: int) -> None:
        """Start a replica with the optimizer state of another one."""
        state = copy.deepcopy(self.optimizers[other].state_dict())
        self.optimizers[replica].load_state_dict(state)


class Replica:
    """A sharded model of this rank's replica."""

    def __init__(self, address: str, mesh: Any, replica: int, level: str, **options: Any) -> None:
        self.model, self.number = make_model(), replica
        self.engine = fe.shard(self.model, mesh, level)
        self.optimizer = reference.adamw(self.model.parameters())
        fe.shard_optimizer(self.optimizer)
        self.replicas = ElasticOuterReplicas(
            self.engine,
            self.optimizer,
            every=EVERY,
            lighthouse=address,
            **{"outer_optimizer": OUTER, "timeout": 10.0, "period_timeout": 40.0, **options},
        )

    def train(self) -> int:
        """Train a period; returns the number of replicas that have exchanged."""
        train_period(self.model, self.optimizer, self.replicas.inner_steps(), self.number)
        self.replicas.exchange()
        return self.replicas.num_replicas

    def close(self) -> None:
        self.replicas.close()

    def check(self, expected: list[nn.Parameter]) -> None:
        weights = full_weights(self.model).values()
        for found, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, value.detach(), rtol=2e-5, atol=2e-5)
        for name, value in self.replicas.weights().items():
            assert torch.equal(reference.full(value), full_weights(self.model)[name])


# Heartbeats are late on a busy machine.
lighthouse = partial(lighthouse_for, Replica, join_timeout_ms=20000, heartbeat_timeout_ms=4000)


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_replicas_train_as_those_of_one_process(level: str) -> None:
    with lighthouse(2) as join:
        replica = join(mesh_of(2, 1)["inner"], dist.get_rank(), level, min_replicas=2)
        expected = Simulation(2)
        for _ in range(3):
            assert replica.train() == 2
            expected.run([0, 1])
            replica.check(expected.shared)


@on_ranks(2)
def test_a_lost_replica_loses_its_period_and_comes_again() -> None:
    rank = dist.get_rank()
    send = state_transport._send

    def send_slowly(*arguments: Any) -> None:
        time.sleep(0.02)  # inner steps of the sender must not change what it sends
        send(*arguments)

    meshes = [mesh_of(2, 1)["inner"] for _ in range(2)]
    expected = Simulation(2)
    slow = mock.patch.object(state_transport, "_send", send_slowly)
    with slow, lighthouse(1) as join:
        dist.barrier()
        replica = join(meshes[0], rank, "optim_grads_params")
        dist.barrier()
        assert replica.train() == 2
        expected.run([0, 1])
        replica.check(expected.shared)
        steps = replica.replicas.inner_steps()
        train_period(replica.model, replica.optimizer, steps, rank)
        if rank == 1:  # is lost before it exchanges
            replica.replicas.close()
            replica.replicas.close = lambda: None  # type: ignore[method-assign]
        else:
            time.sleep(0.2)
            replica.replicas.exchange()
            assert replica.replicas.num_replicas == 1
            expected.run([0])
            replica.check(expected.shared)
        dist.barrier()
        if rank == 1:
            expected.run([0])
            again = join(meshes[1], rank, "optim_grads_params")
        dist.barrier()
        replica = again if rank == 1 else replica
        expected.join(1, 0)
        period = 2
        while True:  # the first one may be alone for some periods, until the other one has joined
            number = replica.train()
            while period < replica.replicas.step:
                period += 1
                if period == replica.replicas.step and number == 2:
                    break
                expected.run([0])
                expected.join(1, 0)
            if number == 2:
                break
        expected.run([0, 1])
        replica.check(expected.shared)
        assert replica.train() == 2
        expected.run([0, 1])
        replica.check(expected.shared)


@on_ranks(2)
def test_a_replica_that_joins_a_repeated_exchange_has_no_part_in_the_mean() -> None:
    rank, expected = dist.get_rank(), Simulation(2)
    meshes = [mesh_of(2, 1)["inner"] for _ in range(2)]
    with lighthouse(1) as join:
        if rank == 0:
            replica = join(meshes[0], 0, "optim")
            assert replica.train() == 1
            steps = replica.replicas.inner_steps()
            train_period(replica.model, replica.optimizer, steps, 0)
            replica.replicas._manager.report_error(ConnectionError("for a test"))
        dist.barrier()
        if rank == 1:
            replica = join(meshes[1], 1, "optim")
        dist.barrier()
        if rank == 0:
            time.sleep(1.0)  # the other replica awaits a quorum
            replica.replicas.exchange()
            assert replica.replicas.num_replicas == 2
        for _ in range(2):
            expected.run([0])
        expected.join(1, 0)
        assert replica.train() == 2
        expected.run([0, 1])
        replica.check(expected.shared)
        assert replica.replicas.step == 3


@on_ranks(2)
def test_a_replica_whose_sender_is_lost_before_a_repeated_exchange_trains_the_period() -> None:
    """Both ranks form the only replica. It joins an exchange in which no replica has trained."""
    expected = Simulation(1)
    with lighthouse(1) as join:
        replica = join(mesh_of(1, 2)["inner"], 0, "optim")
        for _ in range(2):
            replica.replicas._has_joined_exchange = True
            assert replica.train() == 1
            expected.run([0])
            replica.check(expected.shared)
        assert replica.replicas.step == 2


@on_ranks(2)
def test_replicas_with_other_arguments_refuse_each_other() -> None:
    other = partial(torch.optim.AdamW, lr=1e-3)
    options = {"outer_optimizer": other} if dist.get_rank() else {}
    with lighthouse(2) as join:
        mesh = mesh_of(2, 1)["inner"]
        replica = join(mesh, 0, "no_shard", min_replicas=2, **options).replicas
        error = ""
        try:
            list(replica.inner_steps())
        except ValueError as raised:
            error = str(raised)
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, error)
        (refused,) = filter(None, found)
        assert "state of a living replica: expected " in refused
        assert "found outer optimizer: " in refused
    with pytest.raises(ValueError, match="every: expected an integer of at least 1; found 0"):
        ElasticOuterReplicas(
            replica._engine, replica._optimizer, every=0, lighthouse="http://localhost:1"
        )
