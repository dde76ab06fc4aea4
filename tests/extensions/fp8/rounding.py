"""The loss that training with a quantising codec must have, computed in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference import Batch


def rounded_loss(quantise: Callable[[Tensor], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """The loss with quantised copies of the matrices, whose gradients the matrices have."""
    copies = {
        name: param + (quantise(param.detach()) - param.detach()) if param.ndim >= 2 else param
        for name, param in model.named_parameters()
    }
    loss: Tensor = torch.func.functional_call(model, copies, batch)
    return loss
