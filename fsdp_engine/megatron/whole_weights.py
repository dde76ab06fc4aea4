"""Which sharded parameter a whole tensor in Megatron-Core's sharded state dicts stands for.

``module.sharded_state_dict`` runs while modules hold whole main weights. Optimizers step the
sharded parameters, and look in the result for the entry of each of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.engine import Engine

# Of whole parameters, for as long as a state dict has them.
_SHARDED_OF: Any = WeakIdKeyDictionary()


def note_whole_params(engine: Engine) -> None:
    """Within ``engine.unsharded()``: note which parameter each whole one stands for."""
    for buffer in engine.buffers:
        for record, sharded in zip(buffer.records, buffer.sharded_params, strict=True):
            module, name = record.owners[0]
            _SHARDED_OF[module._parameters[name]] = sharded


def parameter_of(tensor: Tensor) -> Tensor:
    """The parameter that ``tensor`` stands for; ``tensor`` itself if it stands for none."""
    found: Tensor = _SHARDED_OF.get(tensor, tensor)
    return found


def entries_by_parameter(entries: Iterable[Any]) -> dict[int, Any]:
    """Megatron-Core's ``ShardedTensor``s and factories by ``id`` of the parameter they are of."""
    return {
        id(parameter_of(entry.data)): entry
        for entry in entries
        if isinstance(getattr(entry, "data", None), Tensor)
    }
