"""Small messages that all ranks exchange during training, and that the host reads."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import Work

from fsdp_engine.comm.activity import naming
from fsdp_engine.comm.collectives import bytes_to, start_all_reduce
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.lanes import SideStream


class HostMessage:
    """Computes the elementwise maximum over ranks of some bytes.

    It does not wait for computation of the device. One message is in flight at a time.

    Args:
        what: Name of the message in errors.
        ranks: The ranks that take part.
    """

    def __init__(self, what: str, ranks: Ranks) -> None:
        self._what = what
        self._group = ranks.message_group
        self._device = ranks.device
        self._stream = SideStream(ranks.device)
        self._content = bytearray()
        self._sent: Tensor | None = None
        self._work: Work | None = None

    def start(self, content: bytearray) -> None:
        """Send ``content``, whose length must be the same on all ranks. Collective."""
        self._content = content
        if self._group is not None:
            with self._stream.entered():
                self._sent = bytes_to(content, self._device)
                self._work = start_all_reduce(self._sent, self._group, "max")

    def finish(self) -> list[int]:
        """Wait for the messages of all ranks, and return the maxima."""
        if self._group is None:
            return list(self._content)
        assert self._sent is not None
        assert self._work is not None
        with naming(self._what, self._group), self._stream.entered():
            self._work.wait()
            found: list[int] = self._sent.tolist()
        self._sent = self._work = None
        return found
