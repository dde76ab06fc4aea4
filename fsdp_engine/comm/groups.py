"""Creates process groups, reads their properties, and defines sets of ranks.

``dist.new_group`` is not used, for the reason in :func:`new_group`.
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

# This also waits for the threads of groups that other code has made.
atexit.register(gloo_threads.wait_until_idle)


def group_of_ranks(
    ranks: Iterable[int], like: dist.ProcessGroup, device: torch.device, *, purpose: str = "ranks"
) -> dist.ProcessGroup:
    """Returns the group of these ranks for one purpose. The first call makes the group.

    Collective over these ranks.

    Args:
        ranks: Global ranks in any order, this rank included.
        like: The group whose timeout and options the new group gets.
        device: The device of the tensors to communicate.
        purpose: Name of the purpose. Each purpose has a group of its own.
    """
    members = tuple(sorted(ranks))
    key = (purpose, members)
    known = _BY_RANKS.setdefault(default_group(), {})
    timeout = timeout_of_group(like, device)
    met = meet("creation of a process group", members, timeout, has=key in known)
    if not met.all_have:
        known[key] = group_like(like, list(members), device, f"{met.name}/{purpose}")
    return known[key]


def group_like(
    like: dist.ProcessGroup, ranks: list[int], device: torch.device, name: str
) -> dist.ProcessGroup:
    """Make a group of these ranks, in this order. Collective over them.

    It has the timeout and the options of ``like`` for tensors on ``device``.
    """
    timeout = timeout_of_group(like, device)
    return new_group(ranks, timeout, name, options=_copy_of_options(like, device, timeout))


def default_group() -> dist.ProcessGroup:
    """Returns the default group, of all ranks. It must be initialised."""
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
    """Make a group of these ranks, in this order. Collective over them, not over all ranks.

    For an axis with 1,024 rows a rank makes one group, not 1,024. ``dist.new_group`` can do this,
    too (``use_local_synchronization``). But the name under which its ranks find each other contains
    the number of groups of the rank (torch 2.11 to 2.13), so ranks in different numbers of groups
    would wait forever.
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

    ``dist.destroy_process_group`` does not delete them (torch 2.11 to 2.13). All ranks must have
    made the group, because they read the addresses to make it.
    """
    store = distributed_c10d._world.pg_map[default_group()][1]
    rank, within = dist.get_rank(group), dist.PrefixStore(f"{group.group_name}/", store)
    devices = [device.type for device in group._device_types]
    dist.destroy_process_group(group)
    for device in devices:
        addresses = dist.PrefixStore(f"{device}/", within)
        interface = 0
        # The return value of delete_key is not used: a FileStore returns True for any key.
        while addresses.check([key := f"{interface}/{rank}"]):
            addresses.delete_key(key)
            interface += 1


@contextmanager
def _not_split_off(default: dist.ProcessGroup) -> Iterator[None]:
    """Context in which new groups are not split off the communicator of the default group.

    A split is collective over all ranks of the default group. torch splits NCCL's communicators if
    ``init_process_group`` has a ``device_id``.
    """
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
    """Returns the timeout of ``group`` for tensors on ``device``."""
    own = getattr(_options_of(group, device), "_timeout", None)
    if own is None:
        own = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))
    assert isinstance(own, timedelta)
    return own


def _options_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the options of the group's backend, or None if it has none."""
    try:
        return getattr(backend_of(group, device), "options", None)
    except RuntimeError:  # torch 2.14 raises for backends without options
        return None


def _copy_of_options(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """Returns a copy of the NCCL options of ``group`` for another group.

    It is a copy because torch writes the name of the group into its options. Returns None for
    backends for which torch accepts only a timeout.
    """
    options = _options_of(group, device)
    if not hasattr(options, "config"):
        return None
    copied = type(options)()
    copied.config = options.config  # ncclConfig_t: max_ctas, cga_cluster_size, ... by value
    copied.is_high_priority_stream = options.is_high_priority_stream
    copied._timeout = timeout
    return copied


def backend_of(group: dist.ProcessGroup, device: torch.device) -> object | None:
    """Returns the backend object of ``group`` for ``device``, or None if there is none."""
    try:
        return group._get_backend(torch.device(device.type))
    except RuntimeError:
        return None


def name_of_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the backend of ``group`` for ``device``, or "" if there is none."""
    return str(getattr(backend_of(group, device), "name", lambda: "")())


@dataclass(frozen=True)
class Ranks:
    """A set of ranks that includes this rank.

    Attributes:
        device_mesh: The mesh of these ranks.
        device: The device of this rank's tensors.
        control_group: The group of all ranks for small messages. None for a single rank.
        message_group: The group of all ranks for messages that the host waits for while the device
            computes. Its collectives must not be queued behind those of training, because a
            communicator runs its collectives in order. So on an accelerator this is a group of its
            own. None for a single rank.
    """

    device_mesh: DeviceMesh
    device: torch.device
    control_group: dist.ProcessGroup | None
    message_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks in the set."""
        return 1 if self.control_group is None else self.control_group.size()

    @property
    def rank(self) -> int:
        """Index of this rank in the set."""
        return 0 if self.control_group is None else self.control_group.rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, from which values are broadcast."""
        return self.rank == 0

    @property
    def ranks(self) -> list[int]:
        """The global ranks, row by row."""
        return members_of(self.device_mesh)

    def make_host_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Make a gloo group of all ranks for work beside training; None for a single rank.

        Collective. Collectives of another thread and those of training must not be in one group,
        because their order would differ between ranks.
        """
        if self.size == 1:
            return None
        met = meet("a save or load of a Checkpointer", self.ranks, timeout)
        return new_group(self.ranks, timeout, f"{met.name}/host", backend="gloo")

    def free_host_group(self, group: dist.ProcessGroup | None) -> None:
        """Free the connections, threads and store keys of a group of :meth:`make_host_group`.

        Not collective. No rank may use the group afterwards.
        """
        if group is not None and dist.is_initialized():
            free_gloo_group(group)


@_disable_current_modes()
def members_of(device_mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks of a mesh, row by row."""
    return list(device_mesh.mesh.flatten().tolist())
