"""A small Llama of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

WIDTH = 64


def llama(**options: Any) -> nn.Module:
    """Builds it, with further options of its config."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
        **options,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model
