"""State from one replica to another: all of it, or an error in time."""

from __future__ import annotations

import socket
import struct
import threading
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torchft.checkpointing.transport_test import run_multi_recovery_test

from fsdp_engine.integrations.state_transport import StateTransport

WAIT = timedelta(seconds=20)


@pytest.fixture
def sender() -> Iterator[StateTransport]:
    transport = StateTransport(timeout=1.0)
    yield transport
    transport.shutdown()


@pytest.fixture
def receiver() -> Iterator[StateTransport]:
    transport = StateTransport(timeout=20.0)
    yield transport
    transport.shutdown()


def large_state() -> dict[str, Tensor]:
    """More than sockets buffer."""
    return {"weights": torch.ones(1 << 25)}


def test_all_values_arrive(sender: StateTransport, receiver: StateTransport) -> None:
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


def test_a_receiver_waits_until_the_state_is_offered(
    sender: StateTransport, receiver: StateTransport
) -> None:
    offer = threading.Timer(0.3, sender.send_checkpoint, ([1], 4, {"step": 4}, WAIT))
    offer.start()
    assert receiver.recv_checkpoint(0, sender.metadata(), 4, WAIT) == {"step": 4}
    offer.join()


def test_a_step_that_is_over_is_refused(sender: StateTransport, receiver: StateTransport) -> None:
    end = threading.Timer(0.3, sender.disallow_checkpoint)
    end.start()
    with pytest.raises(RuntimeError, match="expected that of step 5; found none"):
        receiver.recv_checkpoint(0, sender.metadata(), 5, WAIT)
    end.join()


def test_the_end_of_a_step_refuses_no_receiver_of_the_next(
    sender: StateTransport, receiver: StateTransport
) -> None:
    sender.send_checkpoint([1], 5, {"step": 5}, WAIT)
    actions = [
        sender.disallow_checkpoint,
        lambda: sender.send_checkpoint([1], 6, {"step": 6}, WAIT),
    ]
    timers = [threading.Timer(0.3 * (i + 1), action) for i, action in enumerate(actions)]
    for each in timers:
        each.start()
    assert receiver.recv_checkpoint(0, sender.metadata(), 6, WAIT) == {"step": 6}
    for each in timers:
        each.join()


def test_a_receiver_that_does_not_read_holds_the_sender_for_the_timeout_only(
    sender: StateTransport,
) -> None:
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


def test_a_sender_that_ends_is_an_error_at_once(receiver: StateTransport) -> None:
    with socket.create_server(("localhost", 0)) as server:

        def serve_some_bytes() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(8)
                connection.sendall(struct.pack("!q", 1000) + bytes(10))

        thread = threading.Thread(target=serve_some_bytes)
        thread.start()
        with pytest.raises(ConnectionError, match="expected 990 more bytes; found the end"):
            receiver.recv_checkpoint(0, f"localhost:{server.getsockname()[1]}", 0, WAIT)
        thread.join()


def test_a_sender_that_hangs_is_an_error_after_the_timeout(receiver: StateTransport) -> None:
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            receiver.recv_checkpoint(0, address, 0, timedelta(seconds=0.3))


def test_a_transfer_in_progress_is_waited_for(
    sender: StateTransport, receiver: StateTransport
) -> None:
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
