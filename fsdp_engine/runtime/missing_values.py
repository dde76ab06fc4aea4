"""Parameters and buffers of a model that have no valid values.

[Note: Missing values]
Forwards and saves raise an error until missing values are loaded. There are two causes:
``shard(..., initial_values="empty")`` allocates tensors without values, and a load that fails half
way has replaced only some of the values. A load writes directly into the parameters, because a
second copy would not fit into memory. It checks as much as possible before it writes, but a damaged
block or a failing disk is detected only while reading.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class MissingValues:
    """The entries of one model's state that have no valid values.

    While there are any, each module of the model has a forward pre-hook that raises an error.

    Args:
        model: The sharded model.
        check_load: Function that is called before a load; it raises if loads are not allowed.
    """

    def __init__(self, model: nn.Module, check_load: Callable[[], None]) -> None:
        self._model = model
        self._check_load = check_load
        self._keys: set[Hashable] = set()
        self._message = ""
        self._handles: list[RemovableHandle] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def check(self) -> None:
        """Check that all entries have values.

        Raises:
            RuntimeError: Entries have no values. The message says why, and how to load them.
        """
        if self._keys:
            raise RuntimeError(self._message)

    def mark_empty(self, names: Iterable[str]) -> None:
        """Mark entries that have memory but no values, because none were loaded yet.

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
        """Returns a context in which a load replaces entries. An exception within the context marks
        all of these entries as missing.

        Entries that were missing before and are not among ``keys`` stay missing. So the model is
        usable again when every entry of every failed load has been replaced.

        Args:
            keys: Names in ``model.state_dict()``, or other hashable keys for state outside of the
                model.

        Raises:
            RuntimeError: The model holds other weights than the trained ones.
        """
        self._check_load()
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
