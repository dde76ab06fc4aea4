"""Sends the state of a replica from memory to memory, over TCP.

A rank that offers its state listens on a port. A rank that needs the state connects, sends the
number of the step, and receives:

    8 bytes             length of the header
    header              pickled: dtypes and shapes of tensors; the state, with tensors as indices
    tensors             their bytes, one after the other
    8 bytes             ``_END``

Tensors on the CPU are sent without a copy, and received into their final memory. There is one
connection for each pair of ranks. Both sides fail if no byte is transferred for ``timeout``
seconds, or immediately if the other process has ended.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import socket
import struct
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.extras import naming_extra
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import as_bytes

with naming_extra():
    from torchft.checkpointing import CheckpointTransport

_logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!q")
_END = b"complete"
# Maximum number of bytes that one call of the socket receives, or that are copied from a device at
# once.
_CHUNK_BYTES = 1 << 22


class StateTransport(CheckpointTransport):  # type: ignore[misc]
    """The transport of one rank, which sends and receives state.

    Args:
        timeout: Seconds without a byte after which a transfer fails.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        # The offered step with its header and tensors. None: there is no offer, and weights may
        # change.
        self._offer: tuple[int, bytes, list[Tensor]] | None = None
        # The number of receivers of the offer that have not begun to receive.
        self._num_expected = 0
        # The steps that connected receivers wait for.
        self._requests: dict[socket.socket, int] = {}
        self._connections: list[socket.socket] = []
        is_dual = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            dualstack_ipv6=is_dual,
        )
        self._address = f"{socket.gethostname()}:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="state_transport").start()

    def metadata(self) -> str:
        """Returns the address of this rank, for :meth:`recv_checkpoint` of other replicas."""
        return self._address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer ``state_dict`` until :meth:`disallow_checkpoint`. Returns immediately."""
        tensors: list[Tensor] = []
        body = io.BytesIO()
        _Pickler(body, tensors).dump(state_dict)
        header = pickle.dumps(([(each.dtype, each.shape) for each in tensors], body.getvalue()))
        with self._changed:
            self._offer = (step, header, tensors)
            self._num_expected = len(dst_ranks)
            self._changed.notify_all()

    def await_receivers(self) -> None:
        """Wait until all receivers of the offer have connected, or for the timeout. Then withdraw
        the offer, and wait for the transfers. Afterwards the tensors may be changed."""
        with self._changed:
            if self._offer is None:
                return
            self._changed.wait_for(lambda: self._num_expected <= 0, self._timeout)
            self.withdraw()
            self._changed.wait_for(lambda: not self._connections)

    def withdraw(self) -> None:
        """Withdraw the offer of the current step. Returns immediately.

        Receivers that wait for the offered step or an earlier one are refused. Receivers that wait
        for a later step continue to wait. If there is no offer, all receivers are refused.
        """
        with self._changed:
            ended = self._offer[0] if self._offer is not None else math.inf
            self._requests = {each: step for each, step in self._requests.items() if step > ended}
            self._offer = None
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Withdraw the offer and wait for the transfers in progress, so that the tensors may be
        changed. Transfers that take longer than the timeout are aborted."""
        self.withdraw()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._connections, self._timeout):
                for each in self._connections:
                    each.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: not self._connections)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Returns the state that the rank at ``metadata`` offers for ``step``.

        Raises:
            ConnectionError, TimeoutError: The other rank has ended, or does not send.
            RuntimeError: The other rank does not offer that step within its timeout.
        """
        host, _, port = metadata.rpartition(":")
        seconds = min(timeout.total_seconds(), self._timeout)
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.sendall(_LENGTH.pack(step))
            (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
            if length < 0:
                raise RuntimeError(
                    f"state of a living replica: expected that of step {step}; found that the rank "
                    f"at {metadata} does not offer it"
                )
            specs, body = pickle.loads(_receive(connection, length))
            tensors = [
                allocator.empty(shape.numel(), dtype, "cpu").view(shape) for dtype, shape in specs
            ]
            for tensor in tensors:
                _receive_into(connection, _bytes_of(tensor))
            if _receive(connection, len(_END)) != _END:
                raise ConnectionError(
                    f"state from {metadata}: expected its end marker; found other bytes"
                )
        state: dict[str, Any] = _Unpickler(io.BytesIO(body), tensors).load()
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Close the server. Transfers in progress continue."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        except OSError:
            _logger.debug("the server of states was no longer listening")
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # the server was shut down
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(self._timeout)
        with connection:
            try:
                (step,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                with self._changed:
                    # Wait, because the receiver may connect before the sender offers the step.
                    self._requests[connection] = step
                    self._changed.wait_for(
                        lambda: self._offers(step) or connection not in self._requests,
                        self._timeout,
                    )
                    self._requests.pop(connection, None)
                    offer = self._offer if self._offers(step) else None
                    if offer is not None:
                        self._connections.append(connection)
                        self._num_expected -= 1
                        self._changed.notify_all()
                if offer is None:
                    connection.sendall(_LENGTH.pack(-1))
                    return
                _, header, tensors = offer
                connection.sendall(_LENGTH.pack(len(header)) + header)
                for tensor in tensors:
                    _send(connection, tensor)
                connection.sendall(_END)
            except OSError as error:  # the receiver has ended, or does not read
                _logger.warning("sending the state to a replica failed: %s", error)
            finally:
                with self._changed:
                    if connection in self._connections:
                        self._connections.remove(connection)
                    self._changed.notify_all()

    def _offers(self, step: int) -> bool:
        return self._offer is not None and self._offer[0] == step


class _Pickler(pickle.Pickler):
    """Pickler that writes indices instead of tensors, and collects the tensors."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a tensor on the CPU."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]


def _send(connection: socket.socket, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1)
    # The timeout of the connection limits the time of each call.
    for part in flat.split(max(_CHUNK_BYTES // flat.element_size(), 1)):
        connection.sendall(_bytes_of(part.cpu()))


def _receive(connection: socket.socket, length: int) -> bytearray:
    received = bytearray(length)
    _receive_into(connection, memoryview(received))
    return received


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        num = connection.recv_into(memory[done : done + _CHUNK_BYTES])
        if num == 0:
            raise ConnectionError(
                f"state of a living replica: expected {len(memory) - done} more bytes; found the "
                "end of the connection"
            )
        done += num
