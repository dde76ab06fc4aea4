"""Masks of transformers' models in simulations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fsdp_engine as fe
from tests.planner.simulation.small_llama import llama

TOKENS = torch.zeros(2, 256, dtype=torch.int64)


def simulated(
    *, use_cache: bool = False, attention: str = "sdpa", **batch: Tensor
) -> fe.Simulation:
    build = partial(llama, depth=1, use_cache=use_cache, attn_implementation=attention)
    return fe.simulate(build, 1, batch={"input_ids": TOKENS, "labels": TOKENS, **batch})


def test_rows_without_positions_are_one_sequence_each() -> None:
    without, with_cache = (simulated(use_cache=each) for each in (False, True))
    assert without.peak_bytes == with_cache.peak_bytes
    assert without.seconds <= with_cache.seconds
    # With given positions, sequences may be packed, which needs a mask.
    assert simulated(position_ids=TOKENS).peak_bytes > without.peak_bytes


@pytest.mark.parametrize(
    "attention",
    ["sdpa", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("eager", "flex_attention"))],
)
def test_a_mask_of_the_tokens_is_one_of_attention(attention: str) -> None:
    """The mask needs memory: the tokens may include padding."""
    without = simulated(attention=attention)
    masked = simulated(attention=attention, attention_mask=torch.ones_like(TOKENS))
    assert masked.peak_bytes > without.peak_bytes
    assert masked.seconds >= without.seconds


def test_stages_of_pipelines_have_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    attention = F.scaled_dot_product_attention

    def recorded(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        masks.append(kwargs.pop("attn_mask", mask))
        return attention(q, k, v, masks[-1], *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    stages = fe.CausalLMStages(llama)
    fe.simulate_pipeline(stages, 2, pipeline=2, microbatches=2, batch=TOKENS, target=TOKENS)
    assert masks
    assert not any(mask is not None for mask in masks)
