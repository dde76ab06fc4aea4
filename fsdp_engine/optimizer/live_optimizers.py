"""Finds optimizers that were created before their parameters are replaced."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch


def find_optimizers(params: Collection[int]) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Find the optimizers of this process that hold given parameters.

    Args:
        params: ``id``s of the parameters.

    Yields:
        An optimizer, and the ``id`` of a parameter in its groups; once for each such parameter.
    """
    classes = _with_subclasses(torch.optim.Optimizer)
    # torch sets `hooked` on a class's step when the first instance is created. Most jobs have none
    # at this point, and skip the scan.
    if not any(hasattr(each.step, "hooked") for each in classes):
        return
    # Exact types instead of isinstance: there may be a million objects, and some override
    # __class__.
    for candidate in gc.get_objects():
        if type(candidate) not in classes:
            continue
        for group in vars(candidate).get("param_groups", ()):
            for param in group["params"]:
                if id(param) in params:
                    yield candidate, id(param)


def _with_subclasses(
    base: type[torch.optim.Optimizer],
) -> set[type[torch.optim.Optimizer]]:
    return {base}.union(*map(_with_subclasses, base.__subclasses__()))
