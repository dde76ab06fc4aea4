"""Maps full tensors in Megatron-Core's sharded state dicts to the sharded parameters.

``module.sharded_state_dict`` runs while modules hold full main weights. Optimizers step the
sharded parameters, and look up the entry of each of their parameters in the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.engine import Engine

# From full to sharded parameter, while a state dict references the full one.
_SHARDED_OF: Any = WeakIdKeyDictionary()


def record_full_params(engine: Engine) -> None:
    """Within ``engine.unsharded()``, record the sharded parameter of each full one."""
    for buffer in engine.buffers:
        for record, sharded in zip(buffer.records, buffer.sharded_params, strict=True):
            module, name = record.owners[0]
            _SHARDED_OF[module._parameters[name]] = sharded


def sharded_param_of(tensor: Tensor) -> Tensor:
    """The sharded parameter of a full one; ``tensor`` itself if it is not a recorded one."""
    found: Tensor = _SHARDED_OF.get(tensor, tensor)
    return found


def entries_by_parameter(entries: Iterable[Any]) -> dict[int, Any]:
    """Megatron-Core's ``ShardedTensor``s and factories, by ``id`` of the sharded parameter."""
    return {
        id(sharded_param_of(entry.data)): entry
        for entry in entries
        if isinstance(getattr(entry, "data", None), Tensor)
    }
