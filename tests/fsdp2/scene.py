"""Models and comparisons that the tests of FSDP2's names share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fsdp2.programs import APIS, Model, whole


def seeded() -> Model:
    model = Model()
    torch.manual_seed(3)
    model.init_weights()
    return model


def both(script: Any) -> None:
    """``script(api)`` shows the same with FSDP2 and with the face."""
    logs = [script(api) for api in APIS.values()]
    assert logs[0] == logs[1]


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole(param.grad).clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def assert_alike(compute: Callable[[Any], Any]) -> None:
    """``compute(api)`` gives the same tensors with FSDP2 and with the face."""
    found = [compute(api) for api in APIS.values()]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
