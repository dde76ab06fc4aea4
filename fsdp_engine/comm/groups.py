"""Process groups: creation in agreement with all of their ranks, properties, and sets of ranks.

``dist.new_group`` is not used: see :func:`new_group`.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_engine.comm import gloo_threads
from fsdp_engine.comm.rendezvous import meet

_BY_RANKS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()

# Also those of groups that were made elsewhere.
atexit.register(gloo_threads.wait_until_idle)


def group_of_ranks(
    ranks: Iterable[int], like: dist.ProcessGroup, device: torch.device, *, purpose: str = "ranks"
) -> dist.ProcessGroup:
    """The group of these global ranks for one purpose, made once. All of them must call it, and no
    other rank.

    Args:
        ranks: in any order, this rank among them.
        like: whose timeout and options it gets.
        device: The device of the tensors that are sent.
        purpose: groups of other purposes are other groups.
    """
    members = tuple(sorted(ranks))
    key = (purpose, members)
    known = _BY_RANKS.setdefault(default_group(), {})
    timeout = timeout_of_group(like, device)
    met = meet("a group of model-parallel ranks", members, timeout, has=key in known)
    if not met.all_have:
        known[key] = group_like(like, list(members), device, f"{met.name}/{purpose}")
    return known[key]


def group_like(
    like: dist.ProcessGroup, ranks: list[int], device: torch.device, name: str
) -> dist.ProcessGroup:
    """The group of these ranks, in this order, with the timeout and the options that ``like`` was
    made with for tensors on ``device``; only they call it."""
    timeout = timeout_of_group(like, device)
    return new_group(ranks, timeout, name, options=_copy_of_options(like, device, timeout))


def default_group() -> dist.ProcessGroup:
    """That of all ranks, which must be initialised."""
    group = dist.group.WORLD
    assert group is not None
    return group


def new_group(
    ranks: list[int],
    timeout: timedelta,
    name: str,
    backend: str | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """The group of these ranks, in this order; only they call it.

    An axis of 1,024 rows costs a rank one group, not 1,024. ``dist.new_group`` has that, too, but
    puts the number of groups that the rank is in into the name under which its ranks look for each
    other (torch 2.11 to 2.13): ranks in different numbers of groups would wait for ever.
    """
    default = default_group()
    world = distributed_c10d._world
    default_backend, store = world.pg_map[default]
    with _not_split_off(default):
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend or default_backend),
            store,
            distributed_c10d.GroupName(f"fsdp_engine/{name}"),
            backend_options=options,
            timeout=timeout,
            group_desc="fsdp_engine",
        )
    assert isinstance(group, dist.ProcessGroup)
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def free_gloo_group(group: dist.ProcessGroup) -> None:
    """Destroy a gloo group, and delete this rank's addresses from the default store.

    ``dist.destroy_process_group`` leaves them there (torch 2.11 to 2.13). All ranks of the group
    must have made it: they read the addresses to do so.
    """
    store = distributed_c10d._world.pg_map[default_group()][1]
    rank, within = dist.get_rank(group), dist.PrefixStore(f"{group.group_name}/", store)
    devices = [device.type for device in group._device_types]
    dist.destroy_process_group(group)
    for device in devices:
        addresses = dist.PrefixStore(f"{device}/", within)
        interface = 0
        # A FileStore says of every key that it has deleted it.
        while addresses.check([key := f"{interface}/{rank}"]):
            addresses.delete_key(key)
            interface += 1


@contextmanager
def _not_split_off(default: dist.ProcessGroup) -> Iterator[None]:
    """Within it, new groups are not split off the default group's communicator, which all its ranks
    would have to take part in (NCCL, where ``init_process_group`` was given a device)."""
    bound = default.bound_device_id
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def timeout_of_group(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout that ``group`` was made with, for tensors on ``device``."""
    own = getattr(_options_of(group, device), "_timeout", None)
    if own is None:
        own = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))
    assert isinstance(own, timedelta)
    return own


def _options_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The options of the group's backend; None: the backend has none."""
    try:
        return getattr(backend_of(group, device), "options", None)
    except RuntimeError:  # torch 2.14 of backends that do not implement them
        return None


def _copy_of_options(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """NCCL's options that ``group`` was made with, for another group (torch writes that one's name
    into them); None for backends of which torch takes none but a timeout."""
    options = _options_of(group, device)
    if not hasattr(options, "config"):
        return None
    copied = type(options)()
    copied.config = options.config  # ncclConfig_t: max_ctas, cga_cluster_size, ... by value
    copied.is_high_priority_stream = options.is_high_priority_stream
    copied._timeout = timeout
    return copied


def backend_of(group: dist.ProcessGroup, device: torch.device) -> object | None:
    """The backend object that serves ``device`` in ``group``; None if there is none."""
    try:
        return group._get_backend(torch.device(device.type))
    except RuntimeError:
        return None


def name_of_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves ``device`` in ``group``; "" if there is none."""
    return str(getattr(backend_of(group, device), "name", lambda: "")())


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
