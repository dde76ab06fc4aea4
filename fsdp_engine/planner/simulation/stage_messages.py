"""Messages between the stages of a simulated pipeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from fsdp_engine.planner.simulation.machine import Link

_SEND, _RECEIVE = "send to stages of rank ", "receive from stages of rank "


@dataclass(eq=False)
class Message:
    """One side of a message between two ranks of a pipeline.

    Attributes:
        rank: The pipeline rank of this side.
        peer: The pipeline rank of the other side.
        is_send: Whether ``rank`` sends the message.
        label: Microbatch and stage. Both sides have the same label.
        num_bytes: Number of bytes in the message.
        posted: Time at which compute posted this side.
        interval: Start and end of the transfer, once both sides are posted.
    """

    rank: int
    peer: int
    is_send: bool
    label: str
    num_bytes: int
    posted: float = math.inf
    interval: tuple[float, float] = (math.inf, math.inf)

    @property
    def pair(self) -> tuple[int, int]:
        """The ranks that send and receive the message."""
        return (self.rank, self.peer) if self.is_send else (self.peer, self.rank)

    @property
    def is_complete(self) -> bool:
        """Whether both sides are posted."""
        return self.interval[1] < math.inf

    @property
    def lane(self) -> str:
        """The name of the message's row in the timeline."""
        return f"{_SEND if self.is_send else _RECEIVE}{self.peer}"


def is_stage_lane(lane: str) -> bool:
    """Returns whether a row of the timeline has messages between stages."""
    return lane.startswith((_SEND, _RECEIVE))


def check_messages(messages: Sequence[Message]) -> None:
    """Check that each rank receives the messages of another rank in the order in which that rank
    sends them.

    Args:
        messages: The messages of all ranks. Messages of one rank are in its own order.

    Raises:
        ValueError: The orders differ.
    """
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    for each in messages:
        (sends if each.is_send else receives).setdefault(each.pair, []).append(each)
    for pair in sends | receives:
        for send, receive in zip_longest(sends.get(pair, ()), receives.get(pair, ())):
            if _contents(send) != _contents(receive):
                raise ValueError(
                    f"schedule: expected pipeline rank {pair[0]} to send the message that rank "
                    f"{pair[1]} receives next, {_contents(receive)}; found {_contents(send)}"
                )


def _contents(message: Message | None) -> str:
    return "none" if message is None else f"{message.label} of {message.num_bytes} bytes"


class StageMessages:
    """Computes the times of messages. A transfer starts when both sides are posted and the previous
    transfer in the same direction between the two ranks has ended.

    Args:
        link: Returns the link between two ranks of the pipeline.
    """

    def __init__(self, link: Callable[[int, int], Link]) -> None:
        self._link = link
        self._posted: dict[tuple[int, int], deque[Message]] = {}  # messages posted by one side only
        self._free: dict[tuple[int, int], float] = {}

    def post(self, message: Message, time: float) -> None:
        """Post one side of a message at ``time``."""
        message.posted = time
        pair = message.pair
        waiting = self._posted.setdefault(pair, deque())
        if not waiting or waiting[0].is_send == message.is_send:
            waiting.append(message)
            return
        other = waiting.popleft()
        start = max(time, other.posted, self._free.get(pair, 0.0))
        self._free[pair] = start + self._link(*pair).seconds(message.num_bytes, 1)
        message.interval = other.interval = (start, self._free[pair])
