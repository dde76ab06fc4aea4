"""Optimizers that there are already, when parameters are replaced."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch


def optimizers_that_hold(params: Collection[int]) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Optimizers that hold parameters of these ``id``s, each with one of them."""
    kinds = _with_subclasses(torch.optim.Optimizer)
    # torch marks the step of a class when the first of its optimizers is made. Most jobs have none.
    if not any(hasattr(kind.step, "hooked") for kind in kinds):
        return
    # Exact types: there may be a million things to look at, and some lie about their class.
    for thing in gc.get_objects():
        if type(thing) not in kinds:
            continue
        for group in vars(thing).get("param_groups", ()):
            for param in group["params"]:
                if id(param) in params:
                    yield thing, id(param)


def _with_subclasses(
    kind: type[torch.optim.Optimizer],
) -> set[type[torch.optim.Optimizer]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
