"""Ports of this machine for programs that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that no program listens on, below those that the system gives to connections: one of
    these may be in use again before a program listens on it."""
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
