"""Small models with adapters of PEFT. Tests import ``peft`` from here."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn

from tests.pretrained.families import FAMILIES
from tests.without_te import import_without_te

peft: Any = import_without_te("peft")

os.environ["HF_HUB_OFFLINE"] = "1"  # for other processes, too

CAUSAL = "CAUSAL_LM"
TARGETS = ["q_proj", "v_proj"]
_LLAMA = {**FAMILIES["llama"][2], "tie_word_embeddings": False}


def llama(dtype: torch.dtype = torch.float32, *, meta: bool = False, **more: Any) -> nn.Module:
    """A base model, of seed 0 or on the meta device."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**_LLAMA, **more})
    with torch.device("meta" if meta else "cpu"):
        return transformers.LlamaForCausalLM(config).to(dtype)


def lora(**more: Any) -> peft.LoraConfig:
    """A LoRA of rank 4 over queries and values."""
    values = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": CAUSAL, **more}
    return peft.LoraConfig(**values)


CONFIGS: dict[str, Any] = {
    "lora": lora,
    "lora, embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "dora": lambda: lora(use_dora=True),
    "gaussian, biases": lambda: lora(init_lora_weights="gaussian", bias="lora_only"),
    "modules to save": lambda: lora(modules_to_save=["lm_head", "norm"]),
    "tokens": lambda: lora(trainable_token_indices={"embed_tokens": [1, 5]}),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=CAUSAL
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=CAUSAL),
}

# Kinds that tests merge. Tests do not save those that are not in CONFIGS.
MERGED: dict[str, Any] = {
    **CONFIGS,
    "boft": lambda: peft.BOFTConfig(target_modules=TARGETS, boft_block_size=4, task_type=CAUSAL),
    "hra": lambda: peft.HRAConfig(target_modules=TARGETS, r=4, task_type=CAUSAL),
}


def adapted(kind: str, dtype: torch.dtype = torch.float32, *, meta: bool = False) -> peft.PeftModel:
    """A base model with an adapter."""
    base: Any = llama(dtype, meta=meta)
    model: peft.PeftModel = peft.get_peft_model(base, MERGED[kind]())
    return model
