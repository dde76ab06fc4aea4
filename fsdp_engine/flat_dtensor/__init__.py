"""The sharded tensor that users see, and what it is made of."""

from fsdp_engine.flat_dtensor.placement import Box, FlatPlacement, FlatShard, flat_range_boxes
from fsdp_engine.flat_dtensor.tensor import FlatDTensor

__all__ = ["Box", "FlatDTensor", "FlatPlacement", "FlatShard", "flat_range_boxes"]
