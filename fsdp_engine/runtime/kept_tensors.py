"""A seam: tensors that a module keeps, and through which gradients can enter its unit.

The extension ``kept_tensors`` searches for them. Without it, the backward of a unit begins at its
outputs alone, and raises where a function before that reads full parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

next_function = torch.autograd._get_sequence_nr
"""Returns the sequence number of the function that autograd makes next on this thread."""

Shape = tuple[int, ...]


class KeptTensors:
    """The tensors that calls of one module keep. This class finds none."""

    def needs_search(self, began: int, outputs: Iterable[Tensor]) -> bool:
        """Returns whether a call may keep tensors.

        Args:
            began: the sequence number of the call's first function.
            outputs: the tensors in its output.
        """
        return False

    def search(
        self, began: int, outputs: Collection[Tensor], modules: Iterable[nn.Module], arguments: Any
    ) -> tuple[list[Tensor], Shape | None]:
        """Search for tensors that a call keeps.

        Args:
            began: the sequence number of the call's first function.
            outputs: the tensors in its output.
            modules: the module and its children.
            arguments: the arguments of the call.

        Returns:
            The tensors that were found; and the shape of one that was computed after these and the
            outputs and is kept elsewhere, None if there is none.
        """
        return [], None
