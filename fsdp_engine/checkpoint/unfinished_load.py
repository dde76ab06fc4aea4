"""Weights that are not all there: the engine says so until they are loaded.

Weights are read straight into their places, since nobody has memory for them twice. Everything that
can be checked before is checked before; but a block that turns out damaged, or a disk that fails,
leaves some weights new and others old. Then no forward and no save goes on with them. Nor does one
where weights were given memory alone, and nothing was loaded yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_engine.checkpoint.sharded_model import ShardedModel


class _Unfinished:
    """What is left to be loaded, and the hooks that refuse a forward meanwhile."""

    def __init__(self, model: nn.Module, keys: set[str], message: str) -> None:
        self.keys = keys
        self.message = message
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._refuse, prepend=True)
            for module in model.modules()
        ]

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise RuntimeError(self.message)

    def remove(self) -> None:
        """Let forwards run again."""
        for handle in self._handles:
            handle.remove()


_UNFINISHED: weakref.WeakKeyDictionary[nn.Module, _Unfinished] = weakref.WeakKeyDictionary()


@contextmanager
def replacing(engine: ShardedModel, keys: Iterable[str]) -> Iterator[None]:
    """While weights and state of these keys are replaced: an error leaves the engine unusable.

    It is usable again when the keys of every such load have been replaced.
    """
    model, replaced = engine.model, set(keys)
    before = _UNFINISHED.pop(model, None)
    left = set() if before is None else before.keys
    if before is not None:
        before.remove()
    try:
        yield
    except BaseException as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        message = (
            "weights: expected those of one checkpoint; found them partly replaced by a load that "
            f"failed ({reason}). Load a checkpoint again"
        )
        _UNFINISHED[model] = _Unfinished(model, left | replaced, message)
        raise
    if left - replaced:
        assert before is not None
        _UNFINISHED[model] = _Unfinished(model, left - replaced, before.message)


def nothing_loaded(engine: ShardedModel, keys: Iterable[str]) -> None:
    """These were given memory and no values: until they are loaded, no forward and no save."""
    _UNFINISHED[engine.model] = _Unfinished(
        engine.model,
        set(keys),
        "weights: expected values; found none, since the model was sharded on the meta device with "
        'initial_values="empty". Load them: fe.load_pretrained, fe.load_safetensors, a checkpoint',
    )


def has_nothing(engine: ShardedModel, key: str) -> bool:
    """Whether the entry is still to be loaded."""
    found = _UNFINISHED.get(engine.model)
    return found is not None and key in found.keys


def check_finished(engine: ShardedModel) -> None:
    """Whether the last load is whole.

    Raises:
        RuntimeError: it failed half way.
    """
    found = _UNFINISHED.get(engine.model)
    if found is not None:
        raise RuntimeError(found.message)
