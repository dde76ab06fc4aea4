"""A small Llama of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.planner.simulation.memory_models import decoder

WIDTH = 64


def llama(kind: str = "Llama", depth: int = 2, inner: int = 4 * WIDTH, **options: Any) -> nn.Module:
    """A Llama, or a model of another kind, with further options of its config."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"vocab_size": 256, "use_cache": False, **options}
    return decoder(kind, WIDTH, inner, depth, 4, 2, **options)
