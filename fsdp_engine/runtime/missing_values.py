"""Entries of the model without valid values.

[Note: Missing values]
Forwards and saves raise until missing values are loaded. Two cases leave tensors without values:
``shard(..., initial_values="empty")`` only allocates their memory, and a load that fails half way
replaces some of them. A load writes directly into the parameters, because a second copy would not
fit into memory. Everything that can be checked in advance is checked in advance; a damaged block or
a failing disk is found only while reading.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class MissingValues:
    """The entries of one model that have no valid values.

    While there are any, each module of the model has a forward pre-hook that raises.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keys: set[Hashable] = set()
        self._message = ""
        self._handles: list[RemovableHandle] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def check(self) -> None:
        """Check that all entries have values.

        Raises:
            RuntimeError: some have none; the message says why, and how to load them.
        """
        if self._keys:
            raise RuntimeError(self._message)

    def mark_empty(self, names: Iterable[str]) -> None:
        """Mark entries that have memory and no values, because none were loaded yet.

        Args:
            names: The names of the entries in ``model.state_dict()``.
        """
        self._mark(
            set(names),
            "weights: expected values; found none, since the model was sharded on the meta device "
            'with initial_values="empty". Load them: fe.load_pretrained, fe.load_safetensors, a '
            "checkpoint",
        )

    @contextmanager
    def replacing(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Context in which a load replaces entries. An exception marks all of them as missing.

        Entries that were missing before and are not among ``keys`` stay missing, so the model is
        usable again when every entry of every failed load has been replaced.

        Args:
            keys: names in ``model.state_dict()``; other hashable keys for state outside the model.
        """
        replaced = set(keys)
        before, message = self._keys, self._message
        self._mark(set(), "")
        try:
            yield
        except BaseException as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._mark(
                before | replaced,
                "weights: expected those of one checkpoint; found them partly replaced by a load "
                f"that failed ({reason}). Load a checkpoint again",
            )
            raise
        self._mark(before - replaced, message)

    def _mark(self, keys: set[Hashable], message: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._keys, self._message = keys, message
        self._handles = [
            module.register_forward_pre_hook(self._refuse_forward, prepend=True)
            for module in (self._model.modules() if keys else ())
        ]

    def _refuse_forward(self, module: nn.Module, args: Any) -> None:
        raise RuntimeError(self._message)
