"""Functions for the option ``granule``, for optimizers that need rows or full tensors on one rank.

See ``fsdp_engine.Options``.
"""

from __future__ import annotations

import math

from torch import Tensor


def whole_rows(name: str, param: Tensor) -> int:
    """Returns the granule that keeps each row of a matrix on one rank.

    A row has the elements of one index of the first dim. Vectors are sharded at any element.

    Args:
        name: The name of the parameter.
        param: The full parameter, of any shape.
    """
    return max(math.prod(param.shape[1:]), 1)


def whole_tensors(name: str, param: Tensor) -> int:
    """Returns the granule that keeps each parameter on one rank.

    Optimizers that step full tensors then need not gather them. They send a tensor to another rank
    only to balance the step times of the ranks.

    Args:
        name: The name of the parameter.
        param: The full parameter, of any shape.
    """
    return max(param.numel(), 1)
