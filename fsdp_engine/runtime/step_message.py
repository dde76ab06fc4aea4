"""One small all-reduce per step: parameters used, order of units.

[Note: Who got a gradient]
A parameter that got no gradient on any rank must keep ``.grad`` None, or weight decay would move
it; one that got a gradient elsewhere must get the sum. Each rank sends a byte for every parameter,
and the elementwise maximum says which parameters were used. The message is started after the last
reduction. Its result is read only by a rank that misses a gradient or has seen a new order; others
never wait for it.

The host needs the answer before the optimizer looks at ``.grad``, and another rank's host has it
when that one's backward is issued. On an accelerator the message has a stream and a communicator
of its own, which wait for no kernel of the model and no operation of the lanes. So a host that
reads it waits for the other hosts, and not for its device.

The message of all ranks also carries a digest of the order of units that the rank has seen (and its
complement: if maximum and complement still add up, all digests are equal). Ranks that share other
parameters (experts) have a message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm import collectives
from fsdp_engine.comm.activity import naming
from fsdp_engine.comm.lanes import SideStream
from fsdp_engine.runtime.schedule import order_digest

_DIGEST_BYTES = 8
_WHAT = "the message of the step"


@dataclass
class _Part:
    """One group's message: whose gradients it is about, and its result to be.

    Attributes:
        buffers: with their numbers among all.
    """

    group: ProcessGroup
    buffers: list[tuple[int, ParamAndGradBuffer]] = field(default_factory=list)
    result: Tensor | None = None
    work: Any = None


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after a message.

    Attributes:
        used: For each parameter of each buffer, whether any rank had a gradient, as far as a
            message was read; otherwise whether this rank had one.
        same_order: all ranks have seen the order that this one has.
    """

    used: Sequence[Sequence[Any]]
    same_order: bool = False


class StepMessage:
    """See the module docstring.

    Args:
        buffers: the trainable buffers, in one order on all ranks.
        group: The group of messages between all ranks; None for one rank.
        device: The device of the messages.

    Attributes:
        num_started: steps whose message was sent.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._buffers = tuple(buffers)
        self._device = device
        self._group = group
        self._stream = SideStream(device)
        self.num_started = 0
        parts = {id(group): _Part(group)} if group is not None else {}
        for number, buffer in enumerate(buffers):
            if (other := buffer.mesh.message_group) is not None:
                parts.setdefault(id(other), _Part(other)).buffers.append((number, buffer))
        self._parts = list(parts.values())

    def start(self, order: Sequence[int]) -> None:
        """Send what this rank knows; ``order`` is the order of units that it has seen."""
        self.num_started += 1
        for part in self._parts:
            flags = bytearray()
            for _, buffer in part.buffers:
                flags += bytes(buffer.published.used)
            if part.group is self._group:
                digest = order_digest(order)
                flags += digest + bytes(255 - byte for byte in digest)
            with self._stream.entered():
                part.result = collectives.bytes_to(flags, self._device)
                part.work = collectives.start_all_reduce(part.result, part.group, "max")

    def read(self, has_new_order: bool) -> Verdict:
        """What all ranks know, as far as this one needs to know it."""
        used: list[Sequence[Any]] = [buffer.published.used for buffer in self._buffers]
        same_order = False
        for part in self._parts:
            is_main = part.group is self._group
            missing = not all(all(used[number]) for number, _ in part.buffers)
            if not (missing or (is_main and has_new_order)):
                continue  # the work is waited for before the next message
            with naming(_WHAT, part.group), self._stream.entered():
                part.work.wait()
                assert part.result is not None
                values = part.result.tolist()
            part.work = None
            at = 0
            for number, _ in part.buffers:
                end = at + len(used[number])
                used[number] = values[at:end]
                at = end
            if is_main:
                digest = values[at : at + _DIGEST_BYTES]
                complement = values[at + _DIGEST_BYTES : at + 2 * _DIGEST_BYTES]
                same_order = all(a + b == 255 for a, b in zip(digest, complement, strict=True))
        return Verdict(used, same_order)

    def finish(self) -> None:
        """Wait for messages that were not read."""
        for part in self._parts:
            if part.work is not None:
                with naming(_WHAT, part.group), self._stream.entered():
                    part.work.wait()
                part.work = None

    def forget(self) -> None:
        """Drop pending messages; communication must be over."""
        for part in self._parts:
            part.work = part.result = None
