"""Ranks that act together, and what they need to do so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_engine.devices.groups import free_gloo_group, new_group
from fsdp_engine.devices.rendezvous import meet


@dataclass(frozen=True)
class Ranks:
    """Some ranks, this one among them.

    Attributes:
        device_mesh: how they lie.
        device: where this rank's tensors live.
        control_group: all of them; small messages. None for a single rank.
        message_group: all of them; messages that the host waits for while the device computes. A
            communicator runs one collective after the other, so on an accelerator this one carries
            nothing that waits for work of the device.
    """

    device_mesh: DeviceMesh
    device: torch.device
    control_group: dist.ProcessGroup | None
    message_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.control_group is None else self.control_group.size()

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return 0 if self.control_group is None else self.control_group.rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose values are broadcast, if any are."""
        return self.rank == 0

    @property
    def ranks(self) -> list[int]:
        """Global ranks, row by row."""
        return members_of(self.device_mesh)

    def make_host_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """A further group of all of them, on gloo, for work beside training; None for one rank.

        All must call it. Collectives that a thread issues must not meet those of training in one
        group: their order would differ between ranks.
        """
        if self.size == 1:
            return None
        met = meet("a group on the host", self.ranks, timeout)
        return new_group(self.ranks, timeout, f"{met.name}/host", backend="gloo")

    def free_host_group(self, group: dist.ProcessGroup | None) -> None:
        """Free a group of :meth:`make_host_group`: connections, threads and keys of the store.
        Not collective, but no rank may need the group any more."""
        if group is not None and dist.is_initialized():
            free_gloo_group(group)


@_disable_current_modes()
def members_of(device_mesh: DeviceMesh) -> list[int]:
    """Global ranks of a mesh, row by row."""
    return list(device_mesh.mesh.flatten().tolist())
