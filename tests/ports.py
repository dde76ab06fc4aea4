"""Ports of this machine for programs that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A free port below the range from which the system assigns ports to connections: a port of
    that range may be in use again before a program listens on it."""
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
