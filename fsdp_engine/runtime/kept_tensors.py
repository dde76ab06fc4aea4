"""A seam: tensors that a module keeps, and through which gradients can enter its unit.

The extension ``kept_tensors`` searches for them. Without it, a unit that computes something after
its outputs is no longer freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

next_function = torch.autograd._get_sequence_nr
"""Returns the sequence number of the function that autograd makes next on this thread."""


class KeptTensors:
    """The tensors that calls of one module keep. This class finds none."""

    def needs_search(self, began: int, outputs: Iterable[Tensor]) -> bool:
        """Returns whether a call may keep tensors. Here: whether its last function is not that of
        an output.

        Args:
            began: the sequence number of the call's first function.
            outputs: the tensors in its output.
        """
        end: int = next_function()
        if end == began:
            return False
        nodes: Iterable[Any] = (tensor.grad_fn for tensor in outputs)
        return not any(node is not None and node._sequence_nr() >= end - 1 for node in nodes)

    def search(
        self, began: int, outputs: Collection[Tensor], modules: Iterable[nn.Module], arguments: Any
    ) -> tuple[list[Tensor], str | None]:
        """Search for tensors that a call keeps.

        Args:
            began: the sequence number of the call's first function.
            outputs: the tensors in its output.
            modules: the module and its children.
            arguments: the arguments of the call.

        Returns:
            The tensors that were found; and, if one was computed after these and the outputs that
            was not found, a text about it, for messages.
        """
        return [], "others (the extension kept_tensors, which finds them, is missing)"
