"""Replaces checks by which transformers' models decide whether attention needs a mask. The checks
read values, which simulated tensors do not have.

Without a mask or a cache, these models check whether positions start again within a row. The row
then consists of several packed sequences, and attention needs a mask. Fake tensors have no values,
so the models would assume packed sequences and make the mask, as they do for an exported program.
Positions that the models generate themselves never start again.

With a mask of the tokens, ``attention_mask`` of shape (rows, tokens), the models check whether it
masks any token. Simulations assume that it does, so that attention has a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fsdp_engine.planner.simulation.device_kernels import Place, for_fake_tensors, replaced


def masks_of_rows(inputs: Any = None) -> AbstractContextManager[None]:
    """Returns a context in which transformers' models treat every row as one sequence, with padding
    if the batch has a mask. Enter the context after the model has been built, so that transformers
    is imported if the model uses it.

    Args:
        inputs: The batch. If it has ``position_ids``, rows may be packed, and the models assume
            that they are.
    """
    module = sys.modules.get("transformers.masking_utils")
    packed, all_true = (module, "find_packed_sequence_indices"), (module, "fast_all")
    has_positions = isinstance(inputs, Mapping) and inputs.get("position_ids") is not None
    functions: dict[Place, Callable[..., Any]] = {}
    if hasattr(*packed) and not has_positions:
        functions[packed] = lambda position_ids: None
    if hasattr(*all_true):
        functions[all_true] = for_fake_tensors(all_true, lambda function, tensor: False)
    return replaced(functions)
