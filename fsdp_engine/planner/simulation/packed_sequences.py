"""Masks of transformers' models in simulations, whose tensors have no values.

Without a mask or a cache, these models ask whether positions begin anew within a row, which means
several sequences in it and a mask for attention. Fake tensors have no values to tell: the models
would then make the mask, as they do for an exported program. Positions that the models make
themselves never begin anew.

With a mask of the tokens, ``attention_mask`` of (rows, tokens), they ask whether it masks any. In
simulations it does, so that attention has a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fsdp_engine.planner.simulation.device_kernels import Place, for_fake_tensors, replaced


def masks_of_rows(inputs: Any = None) -> AbstractContextManager[None]:
    """Context in which these models take every row for one sequence, with padding if the batch has
    a mask. The models have been built, so that transformers has been imported if it is used.

    Args:
        inputs: The batch. If it says where its tokens are, rows may be packed.
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
