"""Replicas under torchft: they train as one process, come and go, and refuse each other's state."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.checkpointing.transport_test import run_multi_recovery_test

import fsdp_engine as fe
from fsdp_engine.integrations import managed_replica
from fsdp_engine.integrations.microbatch_sums import MicrobatchSums, share_of
from fsdp_engine.integrations.state_transport import StateTransport
from fsdp_engine.integrations.torchft import ElasticReplicas
from tests.checkpoint.scene import failing
from tests.integrations.launching import Launched
from tests.integrations.lighthouses import lighthouse_for
from tests.pool import on_ranks
from tests.training import mesh_of

WIDTH = 6


def make_model(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 2))
    layers.register_module("sometimes", nn.Linear(2, 2))
    layers.register_buffer("scale", torch.rand(2))
    return layers


def loss_of(model: Any, step: int, number: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + number))
    y = model[2](model[1](model[0](x)))
    if number == 1 and step != 1:  # used in one replica's microbatch only; unused in step 1
        y = model.sometimes(y)
    loss: Tensor = (model.scale * y).square().mean()
    return loss


class Replica(ElasticReplicas):
    """A replica, its model and its optimizer. Without a mesh, each of two ranks is a replica."""

    is_closed = False

    def __init__(
        self,
        lighthouse: str | None,
        seed: int = 0,
        width: int = WIDTH,
        *,
        mesh: Any = None,
        level: str = "optim_grads_params",
        num_microbatches: int = 3,
        **options: Any,
    ) -> None:
        self.model, self.is_short = make_model(seed, width), num_microbatches == 1
        mesh = mesh_of(2, 1)["inner"] if mesh is None else mesh
        self.engine = fe.shard(self.model, mesh, level, options=fe.Options(min_unit_size=0))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        fe.shard_optimizer(optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        super().__init__(
            self.engine,
            optimizer,
            extra={"scheduler": self.scheduler},
            lighthouse=lighthouse,
            num_microbatches=num_microbatches,
            **{"timeout": 20.0, **options},
        )

    def train_step(self) -> bool:
        """Whether the step was committed."""
        for number in self.microbatches():
            loss_of(self.model, self.step, number).backward()
        self.was_unused = self.model.sometimes.weight.grad is None
        self.num_of_step = self.num_replicas
        return self.commit()

    def train(self, until: int) -> list[int]:
        """The number of replicas in each step."""
        found = []
        while self.step < until:
            assert self.train_step()
            assert self.was_unused == (self.step == 2 or self.is_short)
            self.scheduler.step()
            found.append(self.num_of_step)
        return found

    def close(self) -> None:
        if not self.is_closed:
            super().close()
            self.is_closed = True

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


lighthouse = partial(lighthouse_for, Replica, join_timeout_ms=500, heartbeat_timeout_ms=1000)


@pytest.mark.parametrize("num", [1, 3])  # with one microbatch in all, one of the replicas has none
@on_ranks(2)
def test_replicas_train_as_one_process_with_the_microbatches_of_all(num: int) -> None:
    with lighthouse(2) as join:
        replica = join(min_replicas=2, num_microbatches=num)
        assert replica.train(5) == [2] * 5
        replica.check(train_alone(5, num), 1e-5, 1e-6)


@on_ranks(2)
def test_a_replica_that_comes_later_gets_weights_optimizer_and_scheduler() -> None:
    rank = dist.get_rank()
    meshes = [mesh_of(2, 1)["inner"] for _ in range(2)]  # both ranks make both
    with lighthouse(1) as join:
        if rank == 0:
            replica = join(mesh=meshes[0])
            assert replica.train(3) == [1] * 3
        dist.barrier()
        if rank == 1:
            replica = join(seed=7, mesh=meshes[1])
        dist.barrier()
        while replica.train(replica.step + 1) == [1]:  # the first replica alone, until both train
            assert replica.step < 5000
        until = replica.step + 3
        assert replica.train(until) == [2] * 3
        replica.check(train_alone(until))
        assert replica.scheduler.last_epoch == until


@pytest.mark.parametrize("failing", [pytest.param(2, marks=pytest.mark.thorough), 3])
@on_ranks(4)
def test_a_replica_gets_its_state_again_if_a_rank_of_it_did_not(failing: int) -> None:
    """Two replicas of two ranks; the second starts later."""
    rank = dist.get_rank()
    mesh = mesh_of(2, 2)["inner"]
    receive = StateTransport.recv_checkpoint
    failures = []

    def receive_later(self: StateTransport, *args: Any, **options: Any) -> Any:
        if rank == failing and not failures:
            failures.append(rank)
            raise ConnectionError("for a test")
        return receive(self, *args, **options)

    with lighthouse(1) as join, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateTransport, "recv_checkpoint", receive_later)
        if rank < 2:
            replica = join(mesh=mesh)
            replica.train(3)
        dist.barrier()
        if rank >= 2:
            replica = join(seed=1, mesh=mesh)
        dist.barrier()
        until = 5000
        while replica.step < until:
            if replica.train_step() and replica.num_of_step == 2 and until == 5000:
                until = replica.step + 3
        for _, value in sorted(replica.weights().items()):
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first)
        assert len(failures) == (rank == failing)


@on_ranks(2)
def test_a_torn_state_is_not_trained_with() -> None:
    """One rank got its state from a replica that was lost before the other rank got its own."""
    with lighthouse(1) as join:
        replica = join(mesh=mesh_of(1, 2)["inner"])
        for number in replica.microbatches():
            loss_of(replica.model, 0, number).backward()
        if dist.get_rank() == 0:
            replica._load(replica._state())
        replica._manager.report_error(ConnectionError("for a test"))
        assert not replica.commit()
        with pytest.raises(RuntimeError, match="expected all ranks of this replica at one step"):
            list(replica.microbatches())


OTHERS = {
    "0.weight: (": {"width": WIDTH + 1},
    "num_microbatches: ": {"num_microbatches": 4},
    "fixed_sum_order: ": {"fixed_sum_order": True},
}


@pytest.mark.parametrize("found", OTHERS)
@on_ranks(2)
def test_a_replica_of_another_model_or_configuration_is_refused(found: str) -> None:
    with lighthouse(2) as join:
        replica = join(min_replicas=2, **(OTHERS[found] if dist.get_rank() == 1 else {}))
        error, committed = "", False
        try:
            list(replica.microbatches())
            committed = replica.commit()
        except ValueError as raised:
            error = str(raised)
        everywhere: list[Any] = [None] * 2
        dist.all_gather_object(everywhere, (error, committed))
        assert not any(committed for _, committed in everywhere)
        (refused,) = [text for text, _ in everywhere if text]
        assert refused.startswith("state of a living replica: expected ")
        assert f"as this replica has; found {found}" in refused


@on_ranks(2)
def test_too_few_replicas_are_an_error_on_all_ranks() -> None:
    with lighthouse(1) as join:
        replica = join(mesh=mesh_of(1, 2)["inner"], min_replicas=2)
        weights = replica.weights()
        assert not any(replica.train_step() for _ in range(2))
        assert replica._few_since is not None
        replica._few_since -= 80.0  # as if replicas had been missing for 80 s more
        with pytest.raises(TimeoutError, match="min_replicas: expected 2 replicas within 80 s"):
            replica.train_step()
        assert replica.step == 0
        replica.check(weights, 0, 0)


@on_ranks(3)
def test_a_replica_that_was_suspended_gets_the_state_of_the_others() -> None:
    rank, pids = dist.get_rank(), [0] * 3
    dist.all_gather_object(pids, os.getpid())
    mesh = mesh_of(3, 1)["inner"]
    store = dist.distributed_c10d._get_default_store()
    with lighthouse(1) as join:
        if rank == 2:
            dist.barrier()
            store.wait(["alone"])
            os.kill(pids[1], signal.SIGCONT)
            return
        replica = join(mesh=mesh, fixed_sum_order=True, timeout=2.0)
        dist.barrier()
        until, is_alone, was_stopped = 5000, False, False
        while replica.step < until:
            step = replica.step
            for number in replica.microbatches():
                if rank == 1 and step == 4 and not was_stopped:
                    was_stopped = True
                    os.kill(os.getpid(), signal.SIGSTOP)
                loss_of(replica.model, replica.step, number).backward()
            num_replicas = replica.num_replicas
            if replica.commit():
                if step > 4 and num_replicas == 1 and not is_alone:
                    is_alone = True
                    store.set("alone", "")
                if replica.step > 5 and num_replicas == 2 and until == 5000:
                    until = replica.step + 2
        assert (is_alone, was_stopped) == (rank == 0, rank == 1)
        if rank == 0:
            replica.check(train_alone(until, with_scheduler=False))
        store.set(f"{rank}", pickle.dumps(replica.weights()))
        replica.check(pickle.loads(store.get(f"{1 - rank}")), 0, 0)


@on_ranks(2)
def test_without_a_lighthouse_there_is_an_error_and_no_wait() -> None:
    alone, of_all = mesh_of(2, 1)["inner"], mesh_of(1, 2)["inner"]
    for mesh in (alone, of_all):
        with pytest.raises((TimeoutError, RuntimeError)):  # on all ranks of a replica
            Replica("http://localhost:1", mesh=mesh, timeout=0.5)
    with (
        lighthouse(1) as join,
        failing(managed_replica, "Manager", on_rank=1),
        pytest.raises(OSError, match="No space left"),
    ):
        join(mesh=of_all)
    for number, expected in (
        (0, "num_microbatches: expected an integer of at least 1; found 0"),
        (1, "lighthouse: expected an address"),
    ):
        with pytest.raises(ValueError, match=expected):
            Replica(None, mesh=alone, num_microbatches=number)


def train_five_steps(replica: Replica, leaves: bool = False) -> dict[str, Tensor]:
    """Full weights after steps of 5 microbatches. A replica may leave the others after 3 steps."""
    dist.barrier()  # the lighthouse waits for all replicas that it knows
    num_replicas = []
    while replica.step < (3 if leaves else 5):
        for number in replica.microbatches():
            if number != 3 or replica.step != 2:  # one microbatch has no backward
                place = replica.engine.ranks.rank
                loss_of(replica.model, 10 * replica.step + 2 * place, number).backward()
        num_replicas.append(replica.num_replicas)
        assert replica.commit()
    assert leaves or num_replicas[0] == 1 or num_replicas[-1] == num_replicas[0] - 1
    return replica.weights()


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("num_replicas", [2, 3])
@on_ranks(4)
def test_sums_in_a_fixed_order_have_the_bits_of_one_replica(num_replicas: int, level: str) -> None:
    """Replicas of 2 ranks, or 3 replicas of 1 rank; one leaves in the middle."""
    rank, num_ranks = dist.get_rank(), 4 // num_replicas
    mesh = mesh_of(4 // num_ranks, num_ranks)["inner"]
    found = []
    for is_fixed, num in ((True, 1), (False, 1), (True, num_replicas)):
        with lighthouse(1) as join:
            if rank >= num_ranks * num:
                dist.barrier()
                continue
            replica = join(mesh=mesh, level=level, fixed_sum_order=is_fixed, num_microbatches=5)
            leaves = num > 1 and rank >= num_ranks * (num - 1)
            found.append(train_five_steps(replica, leaves))
            if leaves:
                replica.close()
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


# --- state from one replica to another: all of it, or an error in time ---


WAIT = timedelta(seconds=20)


@pytest.fixture
def both() -> Iterator[tuple[StateTransport, StateTransport]]:
    transports = StateTransport(timeout=1.0), StateTransport(timeout=20.0)
    yield transports
    for each in transports:
        each.shutdown()


def later(*actions: Callable[[], None]) -> None:
    """Call ``actions`` one after the other in other threads, while this one waits."""
    for number, action in enumerate(actions):
        threading.Timer(0.3 * (number + 1), action).start()


def large_state() -> dict[str, Tensor]:
    """State larger than the buffers of sockets."""
    return {"weights": torch.ones(1 << 25)}


def test_all_values_arrive(both) -> None:
    sender, receiver = both
    table = torch.arange(12.0).view(3, 4)
    state: dict[str, Any] = {
        "user": {"columns": table.T, "number": torch.tensor(3), "none": torch.empty(0, 2)},
        "narrow": [torch.randn(5).bfloat16(), torch.tensor([True, False])],
        "complex": torch.randn(4, dtype=torch.complex64),
        "shared": [table, table],
    }
    others = (None, 1.5, "text", torch.float8_e4m3fn)
    sender.send_checkpoint([1], 3, {**state, "others": others}, WAIT)
    for _ in range(2):  # as if two replicas started
        found = receiver.recv_checkpoint(0, sender.metadata(), 3, WAIT)
        assert found.pop("others") == others
        torch.testing.assert_close(found, state, rtol=0, atol=0)
    sender.disallow_checkpoint()


def test_torchfts_test_of_transports() -> None:
    run_multi_recovery_test(
        unittest.TestCase(), lambda rank, size: StateTransport(10.0), torch.device("cpu")
    )


def test_a_receiver_waits_for_its_step_and_no_longer(both) -> None:
    sender, receiver = both

    def offer(step: int) -> None:
        sender.send_checkpoint([1], step, {"step": step}, WAIT)

    later(sender.disallow_checkpoint)
    with pytest.raises(RuntimeError, match=r"expected that of step 3; found .* not offer it"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, WAIT)
    later(lambda: offer(4))
    assert receiver.recv_checkpoint(0, sender.metadata(), 4, WAIT) == {"step": 4}
    later(sender.disallow_checkpoint, lambda: offer(5))  # must not refuse a receiver of step 5
    assert receiver.recv_checkpoint(0, sender.metadata(), 5, WAIT) == {"step": 5}


def test_a_receiver_that_does_not_read_holds_the_sender_for_the_timeout_only(both) -> None:
    sender, _ = both
    sender.send_checkpoint([1], 0, large_state(), WAIT)
    host, _, port = sender.metadata().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(struct.pack("!q", 0))
        connection.recv(8)
        sender.disallow_checkpoint()  # the weights may change now: no more of them is sent
        received = 0
        while part := connection.recv(1 << 22):
            received += len(part)
        assert received < large_state()["weights"].nbytes


def test_a_sender_that_ends_or_hangs_is_an_error(both) -> None:
    _, receiver = both
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"

        def serve_some_bytes() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(8)
                connection.sendall(struct.pack("!q", 1000) + bytes(10))

        thread = threading.Thread(target=serve_some_bytes)
        thread.start()
        with pytest.raises(ConnectionError, match="expected 990 more bytes; found the end"):
            receiver.recv_checkpoint(0, address, 0, WAIT)
        thread.join()
        with pytest.raises(TimeoutError):
            receiver.recv_checkpoint(0, address, 0, timedelta(seconds=0.3))


def test_a_transfer_in_progress_is_waited_for(both) -> None:
    sender, receiver = both
    state = large_state()
    found: list[dict[str, Any]] = []
    sender.send_checkpoint([1], 0, state, WAIT)
    thread = threading.Thread(
        target=lambda: found.append(receiver.recv_checkpoint(0, sender.metadata(), 0, WAIT))
    )
    thread.start()
    deadline = time.monotonic() + 20
    while not sender._connections and not found and time.monotonic() < deadline:
        time.sleep(0.001)
    sender.disallow_checkpoint()
    state["weights"].zero_()
    thread.join()
    assert bool((found[0]["weights"] == 1).all())
