"""Tests look at what engines send on gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


@contextmanager
def watched(
    on_send: Callable[[Any, Tensor], None], on_all_reduce: Callable[[Any, Tensor, Any], None]
) -> Iterator[None]:
    """Within it ``on_send(group, tensor)`` is called before each message to one rank, and
    ``on_all_reduce(group, tensor, options)`` before each all-reduce of this process."""
    groups: Any = dist.ProcessGroup
    # From the dict: what the attribute gives is not bound to groups any more when it is put back.
    all_reduce, isend = vars(groups)["allreduce"], dist.isend

    def reducing(group: Any, tensors: list[Tensor], options: Any) -> Any:
        (tensor,) = tensors
        on_all_reduce(group, tensor, options)
        return all_reduce.__get__(group)(tensors, options)

    def sending(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        on_send(group, tensor)
        return isend(tensor, *args, group=group, **kwargs)

    groups.allreduce, dist.isend = reducing, sending
    try:
        yield
    finally:
        groups.allreduce, dist.isend = all_reduce, isend
