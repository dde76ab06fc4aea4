"""Replicas under torchft: they train as one process, come and go, and refuse each other's state."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

import fsdp_engine as fe
from fsdp_engine.integrations.microbatch_sums import MicrobatchSums, share_of
from fsdp_engine.integrations.state_transport import StateTransport
from fsdp_engine.integrations.torchft import ElasticReplicas
from tests.integrations.launching import Launched
from tests.pool import on_ranks
from tests.training import mesh_of

WIDTH = 6


def make_model(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 2))
    layers.register_module("sometimes", nn.Linear(2, 2))
    return layers


def loss_of(model: Any, step: int, number: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + number))
    y = model[2](model[1](model[0](x)))
    if number == 1 and step != 1:  # one replica's alone, and in a step none's
        y = model.sometimes(y)
    loss: Tensor = y.square().mean()
    return loss


class Replica:
    """A replica, and what it trains.

    Args:
        mesh: of its ranks; None: it has one rank, of two.
        options: of :class:`ElasticReplicas`.
    """

    def __init__(
        self,
        lighthouse: str,
        seed: int = 0,
        width: int = WIDTH,
        *,
        mesh: Any = None,
        level: str = "optim_grads_params",
        num_microbatches: int = 3,
        **options: Any,
    ) -> None:
        self.model = make_model(seed, width)
        mesh = mesh_of(2, 1)["inner"] if mesh is None else mesh
        self.engine = fe.shard(self.model, mesh, level, options=fe.Options(min_unit_size=0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        fe.shard_optimizer(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.num_microbatches = num_microbatches
        self.replicas = ElasticReplicas(
            self.engine,
            self.optimizer,
            extra={"scheduler": self.scheduler},
            lighthouse=lighthouse,
            num_microbatches=num_microbatches,
            **{"timeout": 20.0, **options},
        )

    def train(self, until: int) -> list[int]:
        num_replicas = []
        while self.replicas.step < until:
            for number in self.replicas.microbatches():
                loss_of(self.model, self.replicas.step, number).backward()
            step = self.replicas.step
            num_replicas.append(self.replicas.num_replicas)
            unused = self.model.sometimes.weight.grad is None
            assert unused == (step == 1 or self.num_microbatches == 1)
            assert self.replicas.commit()
            self.scheduler.step()
        return num_replicas

    def weights(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()

    def check(self, expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-4) -> None:
        torch.testing.assert_close(self.weights(), expected, rtol=rtol, atol=atol)


def train_alone(
    until: int, num_microbatches: int = 3, with_scheduler: bool = True
) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(until):
        losses = [loss_of(model, step, number) for number in range(num_microbatches)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if with_scheduler:
            scheduler.step()
    return dict(model.state_dict())


@contextmanager
def lighthouse(min_replicas: int) -> Iterator[str]:
    server, address = None, [""]
    if dist.get_rank() == 0:
        times = {"join_timeout_ms": 500, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1000}
        server = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, **times)
        address = [server.address()]
    dist.broadcast_object_list(address)
    try:
        yield address[0]
        dist.barrier()
    finally:
        if server is not None:
            server.shutdown()


def sharded(mesh: Any = None) -> tuple[fe.Engine, torch.optim.Optimizer]:
    """An engine over all ranks or those of a mesh, and its optimizer."""
    options = fe.Options(min_unit_size=0)
    engine = fe.shard(make_model(), mesh, "optim_grads_params", options=options)
    return engine, torch.optim.SGD(engine.model.parameters(), lr=0.1)


@pytest.mark.parametrize("num", [1, 3])  # of one, one replica has none
@on_ranks(2)
def test_replicas_train_as_one_process_with_the_microbatches_of_all(num: int) -> None:
    with lighthouse(2) as address:
        replica = Replica(address, seed=0, min_replicas=2, num_microbatches=num)
        assert replica.train(5) == [2] * 5
        replica.check(train_alone(5, num), 1e-5, 1e-6)
        dist.barrier()
        replica.replicas.close()


@on_ranks(2)
def test_a_replica_that_comes_later_gets_weights_optimizer_and_scheduler() -> None:
    rank = dist.get_rank()
    meshes = [mesh_of(2, 1)["inner"] for _ in range(2)]  # both ranks make both
    with lighthouse(1) as address:
        if rank == 0:
            replica = Replica(address, mesh=meshes[0])
            assert replica.train(3) == [1] * 3
        dist.barrier()
        if rank == 1:
            replica = Replica(address, seed=7, mesh=meshes[1])
        dist.barrier()
        while replica.train(replica.replicas.step + 1) == [1]:  # the first one, until both do
            assert replica.replicas.step < 5000
        until = replica.replicas.step + 3
        assert replica.train(until) == [2] * 3
        replica.check(train_alone(until))
        assert replica.scheduler.last_epoch == until
        dist.barrier()
        replica.replicas.close()


@pytest.mark.parametrize("failing", [pytest.param(2, marks=pytest.mark.thorough), 3])
@on_ranks(4)
def test_a_replica_gets_its_state_again_if_a_rank_of_it_did_not(failing: int) -> None:
    """Of replicas of two ranks the second one starts later."""
    rank = dist.get_rank()
    mesh = mesh_of(2, 2)["inner"]
    receive = StateTransport.recv_checkpoint
    failures = []

    def receive_later(self: StateTransport, *args: Any, **options: Any) -> Any:
        if rank == failing and not failures:
            failures.append(rank)
            raise ConnectionError("for a test")
        return receive(self, *args, **options)

    def train(until: int) -> None:
        while replica.replicas.step < until:
            for number in replica.replicas.microbatches():
                loss_of(replica.model, replica.replicas.step, number).backward()
            replica.replicas.commit()

    with lighthouse(1) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateTransport, "recv_checkpoint", receive_later)
        if rank < 2:
            replica = Replica(address, mesh=mesh)
            train(3)
        dist.barrier()
        if rank >= 2:
            replica = Replica(address, seed=1, mesh=mesh)
        dist.barrier()
        while replica.replicas.step < 5000:
            train(replica.replicas.step + 1)
            if replica.replicas.num_replicas == 2:
                break
        train(replica.replicas.step + 3)
        for _, value in sorted(replica.weights().items()):
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first)
        assert len(failures) == (rank == failing)
        dist.barrier()
        replica.replicas.close()


@on_ranks(2)
def test_a_torn_state_is_not_trained_with() -> None:
    """One rank got the state of a replica, which was lost before the other rank did."""
    engine, optimizer = sharded()
    with lighthouse(1) as address:
        replicas = ElasticReplicas(engine, optimizer, num_microbatches=1, lighthouse=address)
        for number in replicas.microbatches():
            loss_of(engine.model, 0, number).backward()
        if dist.get_rank() == 0:
            replicas._load(replicas._state())
        replicas._manager.report_error(ConnectionError("for a test"))
        assert not replicas.commit()
        with pytest.raises(RuntimeError, match="expected one of a single step on all ranks"):
            list(replicas.microbatches())
        dist.barrier()
        replicas.close()


OTHERS = {
    "0.weight: (": {"width": WIDTH + 1},
    "num_microbatches: ": {"num_microbatches": 4},
    "fixed_sum_order: ": {"fixed_sum_order": True},
}


@pytest.mark.parametrize("found", OTHERS)
@on_ranks(2)
def test_a_replica_of_another_model_or_configuration_is_refused(found: str) -> None:
    with lighthouse(2) as address:
        more = OTHERS[found] if dist.get_rank() == 1 else {}
        replica = Replica(address, min_replicas=2, **more)
        error, committed = "", False
        try:
            list(replica.replicas.microbatches())
            committed = replica.replicas.commit()
        except ValueError as raised:
            error = str(raised)
        everywhere: list[Any] = [None] * 2
        dist.all_gather_object(everywhere, (error, committed))
        assert not any(committed for _, committed in everywhere)
        (refused,) = [text for text, _ in everywhere if text]
        assert refused.startswith("state of a living replica: expected ")
        assert f"as this replica has; found {found}" in refused
        dist.barrier()
        replica.replicas.close()


@on_ranks(2)
def test_too_few_replicas_are_an_error_on_all_ranks() -> None:
    engine, optimizer = sharded()
    weights = engine.full_state_dict()
    with lighthouse(1) as address:
        options = {"num_microbatches": 1, "min_replicas": 2, "timeout": 20.0}
        replicas = ElasticReplicas(engine, optimizer, lighthouse=address, **options)

        def train() -> None:
            for number in replicas.microbatches():
                loss_of(engine.model, replicas.step, number).backward()
            assert not replicas.commit()

        for _ in range(2):
            train()
        assert replicas._few_since is not None
        replicas._few_since -= 80.0  # as if that long ago
        with pytest.raises(TimeoutError, match="min_replicas: expected 2 replicas within 80 s"):
            train()
        assert replicas.step == 0
        torch.testing.assert_close(engine.full_state_dict(), weights, rtol=0, atol=0)
        dist.barrier()
        replicas.close()


@on_ranks(3)
def test_a_replica_that_was_suspended_gets_the_state_of_the_others() -> None:
    rank, pids = dist.get_rank(), [0] * 3
    dist.all_gather_object(pids, os.getpid())
    mesh = mesh_of(3, 1)["inner"]
    store = dist.distributed_c10d._get_default_store()
    with lighthouse(1) as address:
        if rank == 2:
            dist.barrier()
            store.wait(["alone"])
            os.kill(pids[1], signal.SIGCONT)
        else:
            replica = Replica(address, mesh=mesh, fixed_sum_order=True, timeout=2.0)
            replicas = replica.replicas
            dist.barrier()
            until, is_alone, was_stopped = 5000, False, False
            while replicas.step < until:
                step = replicas.step
                for number in replicas.microbatches():
                    if rank == 1 and step == 4 and not was_stopped:
                        was_stopped = True
                        os.kill(os.getpid(), signal.SIGSTOP)
                    loss_of(replica.model, replicas.step, number).backward()
                num_replicas = replicas.num_replicas
                if replicas.commit():
                    if step > 4 and num_replicas == 1 and not is_alone:
                        is_alone = True
                        store.set("alone", "")
                    if replicas.step > 5 and num_replicas == 2 and until == 5000:
                        until = replicas.step + 2
            assert (is_alone, was_stopped) == (rank == 0, rank == 1)
            weights = replica.weights()
            replicas.close()
            if rank == 0:
                alone = train_alone(until, with_scheduler=False)
                torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-4)
            store.set(f"{rank}", pickle.dumps(weights))
            for name, value in pickle.loads(store.get(f"{1 - rank}")).items():
                assert torch.equal(weights[name], value)
        dist.barrier()


@on_ranks(2)
def test_without_a_lighthouse_there_is_an_error_and_no_wait() -> None:
    absent = {"lighthouse": "http://localhost:1", "timeout": 0.5}
    alone, of_all = sharded(mesh_of(2, 1)["inner"]), sharded()
    for given in (alone, of_all):
        with pytest.raises((TimeoutError, RuntimeError)):  # on all ranks of a replica
            ElasticReplicas(*given, num_microbatches=1, **absent)
    for number, expected in (
        (0, "num_microbatches: expected at least 1; found 0"),
        (1, "lighthouse: expected an address"),
    ):
        with pytest.raises(ValueError, match=expected):
            ElasticReplicas(*alone, num_microbatches=number)


def train_five_steps(
    address: str, mesh: Any, level: str, fixed_sum_order: bool, leaves: bool = False
) -> dict[str, Tensor]:
    """Full weights after steps of 5 microbatches. A replica may leave the others after 3 steps."""
    options = {"fixed_sum_order": fixed_sum_order, "num_microbatches": 5}
    replica = Replica(address, mesh=mesh, level=level, **options)
    replicas, place = replica.replicas, replica.engine.ranks.rank
    dist.barrier()  # the lighthouse awaits replicas that it has seen
    num_replicas = []
    while replicas.step < (3 if leaves else 5):
        for number in replicas.microbatches():
            if number != 3 or replicas.step != 2:  # a microbatch without a backward
                loss_of(replica.model, 10 * replicas.step + 2 * place, number).backward()
        num_replicas.append(replicas.num_replicas)
        assert replicas.commit()
    weights = replica.weights()
    replicas.close()
    dist.barrier()
    assert leaves or num_replicas[0] == 1 or num_replicas[-1] == num_replicas[0] - 1
    return weights


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("num_replicas", [2, 3])
@on_ranks(4)
def test_sums_in_a_fixed_order_have_the_bits_of_one_replica(num_replicas: int, level: str) -> None:
    """Replicas of 2 ranks, or 3 replicas of 1 rank; one leaves in the middle."""
    rank, num_ranks = dist.get_rank(), 4 // num_replicas
    mesh = mesh_of(4 // num_ranks, num_ranks)["inner"]
    found = []
    for fixed_sum_order, num in ((True, 1), (False, 1), (True, num_replicas)):
        with lighthouse(1) as address:
            if rank < num_ranks * num:
                leaves = num > 1 and rank >= num_ranks * (num - 1)
                given = (address, mesh, level, fixed_sum_order, leaves)
                found.append(train_five_steps(*given))
            else:
                for _ in range(2):
                    dist.barrier()
    if rank < num_ranks:
        alone, in_another_order, together = found
        assert all(torch.equal(together[name], value) for name, value in alone.items())
        torch.testing.assert_close(together, in_another_order, rtol=1e-5, atol=1e-6)


def test_the_tree_of_sums_does_not_depend_on_the_shares() -> None:
    for total in range(1, 20):
        expected = ""
        for num_replicas in range(1, total + 3):
            tree = MicrobatchSums(total)
            shares = [share_of(each, num_replicas, total) for each in range(num_replicas)]
            assert [number for share in shares for number in share] == list(range(total))
            for share in shares:
                mine = MicrobatchSums(total)
                for number in share:
                    mine.add(number, number + 1, [Brackets(str(number))])
                assert len(mine.sums) <= 2 * max(len(share), 1).bit_length()
                for place, sums in zip(mine.places(), mine.sums, strict=True):
                    tree.add(*place, sums)
            ((found,),) = tree.sums
            expected = expected or found.text
            assert found.text == expected


class Brackets:
    """Adds as a tensor does; each sum is in brackets."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iadd__(self, other: Brackets) -> Brackets:
        self.text = f"({self.text}+{other.text})"
        return self


@pytest.mark.thorough
def test_replicas_that_are_killed_end_with_the_bits_of_a_run_without_kills(
    tmp_path: Path, launched: Launched
) -> None:
    states = []
    for kills in (0, 2):
        out, name = tmp_path / f"out_{kills}", f"{kills}_kills"
        options = ["--replicas=2", "--min_replicas=1", f"--kills={kills}", f"--out={out}"]
        log = launched.run(name, ["examples/train_elastic_replicas.py", *options], seconds=250)
        assert log.count("killed replica_") == kills
        states += [torch.load(out / f"replica_{number}.pt") for number in range(2)]
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())
