"""The message of a step: a small all-reduce about used parameters and the order of units.

[Note: Who got a gradient]
If a parameter got no gradient on any rank, its ``.grad`` must stay None, because weight decay would
otherwise change the parameter. If it got a gradient on any rank, all ranks must get the sum. Each
rank sends one byte for each parameter, and the elementwise maximum shows which parameters were
used. The message is started after the last reduction. Only ranks on which a gradient is missing, or
which have recorded a new order, read its result; other ranks do not wait for it before publishing.

The host needs the result before the optimizer reads ``.grad``. The host of another rank can send
its bytes as soon as it has issued its backward. On an accelerator the message therefore has its own
stream and communicator, which do not wait for kernels of the model or operations of the lanes. So a
host that reads the result waits for other hosts, but not for its device.

The message between all ranks also contains a digest of the order of units that the rank has
recorded, and the complement of the digest. All digests are equal if the maximum of the digests and
the maximum of the complements are still complements. If only some ranks share the parameters of a
buffer (experts, for example), they send a message of their own for it.

While a step is captured into a graph, no message is sent, because replays would not send it again.
Each parameter must then have a gradient on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.accelerator import capture_check
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm import collectives
from fsdp_engine.comm.activity import naming
from fsdp_engine.comm.lanes import SideStream
from fsdp_engine.runtime.schedule import order_digest

_DIGEST_BYTES = 8
_WHAT = "check of which parameters got gradients"


@dataclass
class _Part:
    """The message of one group.

    Attributes:
        group: The group.
        buffers: The buffers that the group shares, each with its number. The message has a byte for
            each of their parameters.
        result: The tensor that receives the result. None: no message was sent.
        work: The work of the all-reduce; None: there is none, or it was waited for.
    """

    group: ProcessGroup
    buffers: list[tuple[int, ParamAndGradBuffer]] = field(default_factory=list)
    result: Tensor | None = None
    work: Any = None


@dataclass(frozen=True)
class Verdict:
    """The result of a step's message.

    Attributes:
        used: For each buffer and each of its parameters, whether any rank had a gradient. (If the
            message was not read, this rank had a gradient of each parameter.)
        same_order: Whether all ranks have recorded the same order of units. False if the message
            was not read.
    """

    used: Sequence[Sequence[Any]]
    same_order: bool = False


class StepMessage:
    """Sends and reads the message of each step. See the module docstring.

    Args:
        buffers: The trainable buffers, in an order that is equal on all ranks.
        group: The group of messages between all ranks; None for one rank.
        device: The device of the messages.

    Attributes:
        num_started: Number of steps whose message was started.
        order: The order of units in the last message. A later forward may have recorded another.
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
        self._is_capturing = capture_check(device)
        self.num_started = 0
        self.order: Sequence[int] = ()
        parts = {id(group): _Part(group)} if group is not None else {}
        for number, buffer in enumerate(buffers):
            if (other := buffer.mesh.message_group) is not None:
                parts.setdefault(id(other), _Part(other)).buffers.append((number, buffer))
        self._parts = list(parts.values())

    def start(self, order: Sequence[int]) -> None:
        """Start the message of a step. ``order``: the order of units that this rank recorded."""
        self.num_started += 1
        self.order = order
        if self._is_capturing():
            return
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
        """Returns the result of the message. Waits for the message only if this rank needs it.

        Args:
            has_new_order: This rank has recorded an order of units that is not yet canonical.

        Raises:
            RuntimeError: A step is captured into a graph, and a parameter got no gradient.
        """
        used: list[Sequence[Any]] = [buffer.published.used for buffer in self._buffers]
        same_order = False
        for part in self._parts:
            is_main = part.group is self._group
            missing = not all(all(used[number]) for number, _ in part.buffers)
            if part.result is None:
                if missing:
                    self._refuse_missing(part)
                continue
            if not (missing or (is_main and has_new_order)):
                continue  # finish() waits for the work before the next message
            with naming(_WHAT, part.group), self._stream.entered():
                part.work.wait()
                values = part.result.tolist()
            part.work = part.result = None
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

    def _refuse_missing(self, part: _Part) -> None:
        name = next(
            record.name
            for _, buffer in part.buffers
            for record, is_used in zip(buffer.records, buffer.published.used, strict=True)
            if not is_used
        )
        raise RuntimeError(
            "backward, captured into a graph: expected a gradient of each parameter on each rank; "
            f"found none of {name}. Set requires_grad to False for parameters that a step does not "
            "use"
        )

    def finish(self) -> None:
        """Wait for messages that were not read."""
        for part in self._parts:
            if part.work is not None:
                with naming(_WHAT, part.group), self._stream.entered():
                    part.work.wait()
                part.work = part.result = None

    def forget(self) -> None:
        """Drop pending messages. Communication must have ended."""
        for part in self._parts:
            part.work = part.result = None
