"""State that lies in host memory or on a disk between its uses. See ``docs/offload.md``."""

from __future__ import annotations

from fsdp_engine.engine import Engine
from fsdp_engine.offload import Offload


class _Asked:
    """The offload that :func:`~fsdp_engine.sharding.shard` was called with."""

    def __init__(self, engine: Engine) -> None:
        self.offload = Offload()


def keep_offload(engine: Engine, offload: Offload) -> None:
    """``offload`` says where the state of ``engine`` lies."""
    engine.extension(_Asked).offload = offload


@property  # type: ignore[misc]
def offload(engine: Engine) -> Offload:
    """Where the state of an engine lies between its uses."""
    return engine.extension(_Asked).offload
