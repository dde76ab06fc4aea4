"""State from one replica to another: all of it, or an error in time."""

from __future__ import annotations

import socket
import struct
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torchft.checkpointing.transport_test import run_multi_recovery_test

from fsdp_engine.integrations.state_transport import StateTransport

WAIT = timedelta(seconds=20)


@pytest.fixture
def both() -> Iterator[tuple[StateTransport, StateTransport]]:
    transports = StateTransport(timeout=1.0), StateTransport(timeout=20.0)
    yield transports
    for each in transports:
        each.shutdown()


def later(*actions: Callable[[], None]) -> None:
    """Call them one after the other, while this thread waits."""
    for number, action in enumerate(actions):
        threading.Timer(0.3 * (number + 1), action).start()


def large_state() -> dict[str, Tensor]:
    """More than sockets buffer."""
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
    for _ in range(2):  # two replicas start
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
    with pytest.raises(RuntimeError, match="expected that of step 3; found none"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, WAIT)
    later(lambda: offer(4))
    assert receiver.recv_checkpoint(0, sender.metadata(), 4, WAIT) == {"step": 4}
    later(sender.disallow_checkpoint, lambda: offer(5))  # refuses no receiver of the next step
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
