"""``FlatDTensor``, the class of sharded parameters, gradients and optimizer state."""

from fsdp_engine.flat_dtensor import state_dicts as _state_dicts  # noqa: F401  patches torch
from fsdp_engine.flat_dtensor.flat_placement import Box, FlatPlacement, FlatShard, flat_range_boxes
from fsdp_engine.flat_dtensor.parameters import (
    accumulator_of,
    any_requires_grad,
    clear_gradients,
    gradients_of,
    requires_grad_of,
    set_contents,
    set_gradients,
    share_attributes,
    versions_of,
)
from fsdp_engine.flat_dtensor.tensor import FlatDTensor

__all__ = [
    "Box",
    "FlatDTensor",
    "FlatPlacement",
    "FlatShard",
    "accumulator_of",
    "any_requires_grad",
    "clear_gradients",
    "flat_range_boxes",
    "gradients_of",
    "requires_grad_of",
    "set_contents",
    "set_gradients",
    "share_attributes",
    "versions_of",
]
