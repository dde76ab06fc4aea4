"""Inputs of transformers' models are found from signatures and configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.command_inputs import default_loss, example_inputs, model_builder
from tests.planner.made_plans import LLAMA
from tests.planner.simulation.scene import on_meta

_TEXT = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_TEXT |= {"intermediate_size": 32, "vocab_size": 64}

_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
_T5["decoder_start_token_id"] = 0

WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 10}
TOKENS = {"input_ids": (2, 8)}

# Class, options of its config, sizes, and the shapes that its forward should get.
FAMILIES: list[tuple[str, dict[str, int], tuple[int, ...], dict[str, tuple[int, ...]]]] = [
    ("LlamaForCausalLM", _TEXT, (2, 8), {**TOKENS, "labels": (2, 8)}),
    ("BertForSequenceClassification", _TEXT, (2, 8), {**TOKENS, "labels": (2,)}),
    ("T5ForConditionalGeneration", _T5, (2, 8), {**TOKENS, "labels": (2, 8)}),
    ("T5Model", _T5, (2, 8), {**TOKENS, "decoder_input_ids": (2, 8)}),
    (
        "ViTForImageClassification",
        {**_TEXT, "image_size": 16, "patch_size": 8},
        (2,),
        {"pixel_values": (2, 3, 16, 16), "labels": (2,)},
    ),
    (
        "WhisperForAudioClassification",
        WHISPER,
        (2,),
        {"input_features": (2, 8, 20), "labels": (2,)},
    ),
]


@pytest.mark.parametrize(("name", "options", "sizes", "shapes"), FAMILIES)
def test_example_inputs_match_the_forward_of_a_model(
    name: str, options: dict[str, int], sizes: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
) -> None:
    architecture = getattr(transformers, name)
    build = on_meta(lambda: architecture(architecture.config_class(**options)))
    inputs = example_inputs(build(), sizes)
    assert {key: tuple(value.shape) for key, value in inputs.items()} == shapes
    found = fe.simulate(build, 2, batch=inputs, loss=default_loss)
    assert found.seconds > 0


def test_other_models_need_a_function() -> None:
    with pytest.raises(ValueError, match=r"batch: .* not of transformers; found the sizes 2x8"):
        example_inputs(nn.Linear(2, 2), (2, 8))
    with pytest.raises(ValueError, match="a floating-point tensor in the output; found dict"):
        default_loss({"tokens": torch.zeros(2, dtype=torch.long)})
    logits, loss = torch.ones(2, 3), torch.tensor(5.0)
    assert default_loss((logits, loss)) is loss
    assert default_loss((logits, {"main": loss, "extra": loss + 1})) == 6
    with pytest.raises(ValueError, match="batch: expected rows x length, such as 4x4096; found 4"):
        example_inputs(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT)), (4,))


def test_a_config_may_have_any_name_beside_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    wider = {**LLAMA, "hidden_size": 48}
    (tmp_path / "wider.json").write_text(json.dumps(wider))
    model = model_builder(str(tmp_path / "wider.json"), "--model")()
    config: Any = model.config
    assert config.hidden_size == 48
