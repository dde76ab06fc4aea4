"""Positions of transformers' models in simulations.

Without a mask or a cache, these models ask whether positions begin anew within a row, which means
several sequences in it and a mask for attention. Fake tensors have no values to tell: the models
would then make the mask, as they do for an exported program. Positions that the models make
themselves never begin anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fsdp_engine.simulation.device_kernels import replaced


def one_sequence_a_row() -> AbstractContextManager[None]:
    """Context in which these models take every row for one sequence. The models have been built, so
    that transformers has been imported if it is used."""
    module = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(module, name):
        return nullcontext()
    return replaced({(module, name): lambda position_ids: None})


def has_positions(inputs: Any) -> bool:
    """Returns whether the batch says where its tokens are, so that rows may be packed."""
    return isinstance(inputs, Mapping) and inputs.get("position_ids") is not None
