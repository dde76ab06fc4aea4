"""Functions for the argument ``granule`` of :func:`~fsdp_engine.shard`, for optimizers that need
more than single elements on one rank."""

from __future__ import annotations

import math

from torch import Tensor


def whole_rows(name: str, param: Tensor) -> int:
    """A granule that keeps each row of a matrix on one rank: the elements of one index of the first
    dim. Vectors are cut anywhere.

    Args:
        name: The name of the parameter.
        param: full parameter, of any shape.
    """
    return max(math.prod(param.shape[1:]), 1)


def whole_tensors(name: str, param: Tensor) -> int:
    """A granule that keeps each parameter on one rank. Optimizers that step whole parameters then
    send them only where this makes the steps of ranks equally long.

    Args:
        name: The name of the parameter.
        param: full parameter, of any shape.
    """
    return max(param.numel(), 1)
