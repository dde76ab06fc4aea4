"""Twenty small models of transformers, of different families, and their folders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

_SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 48}
_SMALL |= {"intermediate_size": 24}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
_MOE = {**_DECODER, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 4}
_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 48, "n_positions": 32}
_OPT = {**_SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
_DISTIL = {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24, "vocab_size": 48}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 48}
_SPEECH = {**_SMALL, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4)}
_SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
_SPEECH |= {"num_conv_pos_embedding_groups": 2}
_BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 48}
_BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}

# Class of the model, class of its config, and options of the config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_MOE, "shared_expert_intermediate_size": 12},
    ),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _MOE),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**_DECODER, "num_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", _SMALL),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _SMALL),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_SMALL, "image_size": 16, "patch_size": 8},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", _RESNET),
}


def build(family: str) -> nn.Module:
    """A model of this family with random weights."""
    name, config, options = FAMILIES[family]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model


@functools.cache
def builder(family: str) -> Callable[[], nn.Module]:
    """Returns a function that makes a model of this family on the meta device."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return build(family)

    return make


def in_files(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def read_by_transformers(family: str, folder: str) -> dict[str, Tensor]:
    """All parameters and buffers, including those that are not saved."""
    name, *_ = FAMILIES[family]
    model = getattr(transformers, name).from_pretrained(folder)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
