"""A lighthouse of torchft for tests, and the replicas that meet there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torchft.coordination import LighthouseServer


@contextmanager
def lighthouse_for(
    make: Callable[..., Any], min_replicas: int, *, join_timeout_ms: int, heartbeat_timeout_ms: int
) -> Iterator[Callable[..., Any]]:
    """Provides ``make(address, ...)``, which makes replicas. Closes the replicas when all ranks
    have reached the end of the block."""
    server, address = None, [""]
    if dist.get_rank() == 0:
        server = LighthouseServer(
            bind="[::]:0",
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        address = [server.address()]
    dist.broadcast_object_list(address)
    joined: list[Any] = []

    def join(*arguments: Any, **options: Any) -> Any:
        joined.append(make(address[0], *arguments, **options))
        return joined[-1]

    try:
        yield join
        dist.barrier()
        for replica in joined:
            replica.close()
        dist.barrier()
    finally:
        if server is not None:
            server.shutdown()
