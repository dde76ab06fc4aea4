"""A seam: the search for tensors that a module stores, through which gradients can enter its unit.

The extension ``kept_tensors`` implements the search. Without it, a unit that computes tensors after
its outputs stays full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

next_function = torch.autograd._get_sequence_nr
"""Returns the sequence number of the function that autograd makes next on this thread."""


class KeptTensors:
    """Searches for tensors that calls of one module store. This class finds none."""

    def needs_search(self, began: int, outputs: Iterable[Tensor]) -> bool:
        """Returns whether a call may have stored tensors. This class returns True if the call's
        last function of autograd computed a tensor that is not an output.

        Args:
            began: The sequence number of the call's first function of autograd.
            outputs: The tensors in the output of the call.
        """
        end: int = next_function()
        if end == began:
            return False
        nodes: Iterable[Any] = (tensor.grad_fn for tensor in outputs)
        return not any(node is not None and node._sequence_nr() >= end - 1 for node in nodes)

    def search(
        self, began: int, outputs: Collection[Tensor], modules: Iterable[nn.Module], arguments: Any
    ) -> tuple[list[Tensor], str | None]:
        """Search for tensors that a call has stored.

        Args:
            began: The sequence number of the call's first function of autograd.
            outputs: The tensors in the output of the call.
            modules: The module and its descendants.
            arguments: The arguments of the call.

        Returns:
            Two values: the tensors that were found; and a text for messages, or None. The text
            describes a tensor that the call stored elsewhere, computed later than all of these.
        """
        return [], (
            "one that is not in the output (arguments and attributes are searched only if the "
            "extension kept_tensors is installed)"
        )
