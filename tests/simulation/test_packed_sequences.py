"""Masks of transformers' models in simulations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe

TOKENS = torch.zeros(2, 256, dtype=torch.int64)


def simulated(*, use_cache: bool, **batch: Tensor) -> fe.Simulation:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        layers = {"num_hidden_layers": 2, "use_cache": use_cache}
        model: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, **heads, **layers)
        )
        return model

    return fe.simulate(build, 1, batch={"input_ids": TOKENS, "labels": TOKENS, **batch})


def test_rows_without_positions_are_one_sequence_each() -> None:
    without, with_cache = (simulated(use_cache=each) for each in (False, True))
    assert without.peak_bytes == with_cache.peak_bytes
    assert without.seconds <= with_cache.seconds


def test_given_positions_may_begin_anew_within_a_row() -> None:
    positions = torch.zeros(2, 256, dtype=torch.int64)
    packed = simulated(use_cache=False, position_ids=positions)
    assert packed.peak_bytes > simulated(use_cache=False).peak_bytes
