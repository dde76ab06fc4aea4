"""Recurrent modules keep a list of their weights beside their parameters."""

from __future__ import annotations

import weakref

from torch import nn


def list_flat_weights(module: nn.RNNBase) -> None:
    """Let the module's own list hold the weights that the module holds."""
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    # In place: entries of units refer to the list.
    module._flat_weights[:] = weights
    # By these its forward sees that weights are others than in its list.
    module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in weights]
