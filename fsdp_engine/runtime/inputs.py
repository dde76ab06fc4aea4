"""The arguments of a module's call, with casts and views in place of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.runtime.trees import Exchange, iter_tensors, map_tensors


class Inputs:
    """Arguments of one call, some of them replaced: by casts, and by views for the boundary.

    The module gets the user's own containers, which it may be meant to change; they hold the
    replacements until it returns.

    Args:
        tree: positional and keyword arguments.
    """

    __slots__ = ("_casts", "_exchanges", "_given", "_known", "_tree", "views")

    def __init__(self, tree: Any) -> None:
        self._given = self._tree = tree
        self._exchanges: list[Exchange] = []
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._known: dict[int, tuple[Tensor, int]] = {}
        self.views: list[Tensor] = []

    def cast(self, dtype: torch.dtype) -> None:
        """Cast floating-point tensors."""

        def cast(tensor: Tensor) -> Tensor:
            new = cast_to(dtype, tensor)
            if new is tensor:
                return tensor
            self._known[id(tensor)] = (tensor, version_of(tensor))
            # One input given twice stays one tensor: modules compare inputs by identity.
            return self._casts.setdefault(id(tensor), (tensor, new))[1]

        self._replace(cast)

    def mark(self, listen: Callable[[Tensor], Tensor]) -> None:
        """Replace tensors that need a gradient by ``listen`` of them, and record the others."""
        views: dict[int, Tensor] = {}
        for tensor in iter_tensors(self._tree):
            self._known[id(tensor)] = (tensor, version_of(tensor))
            if tensor.requires_grad and id(tensor) not in views:
                views[id(tensor)] = listen(tensor)
        if views:
            self.views = list(views.values())
            self._replace(lambda tensor: views.get(id(tensor), tensor))

    def take_back(self) -> None:
        """The module has returned: the user's containers hold the user's tensors again."""
        for exchange in reversed(self._exchanges):
            exchange.undo()
        for tensor, cast in self._casts.values():
            if version_of(cast) > 0:
                tensor.copy_(cast)

    def changed(self) -> list[Tensor]:
        """Inputs that were changed in place."""
        return [tensor for tensor, version in self._known.values() if version_of(tensor) != version]

    def added(self) -> list[Tensor]:
        """Tensors that the module has put into the user's containers."""
        return [tensor for tensor in iter_tensors(self._given) if id(tensor) not in self._known]

    @property
    def arguments(self) -> tuple[Any, Any]:
        """For the module."""
        args, kwargs = self._tree
        return args, kwargs

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        args, kwargs = self._tree
        exchange = Exchange()
        # Keyword arguments come in a dict of this call's own.
        self._tree = tuple(map_tensors(function, each, exchange) for each in (args, dict(kwargs)))
        self._exchanges.append(exchange)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; 0 for tensors of inference mode, which do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def is_of(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether :func:`cast_to` would leave ``tensor`` as it is."""
    return tensor.dtype == dtype or not tensor.is_floating_point()


def cast_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """``tensor`` in ``dtype``, if it is floating-point."""
    return tensor if is_of(dtype, tensor) else tensor.to(dtype)
