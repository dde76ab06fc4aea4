"""Stages of causal language models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Builds the module of a stage from its index and the number of stages.
Stages = Callable[[int, int], nn.Module]

# Model types whose decoder embeds tokens, runs `layers` and then `norm`, and also accepts
# embeddings.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class CausalLMStages:
    """Builds the stages of a causal language model of transformers, for ``fe.simulate_pipeline``
    and for training.

    Each stage has an equal share of the decoder's layers. If the number of stages does not divide
    the number of layers, some stages have one layer more than others. The first stage also has the
    embedding, the last one the norm and the head.

    ::

        stages = fe.CausalLMStages(lambda: LlamaForCausalLM(config))
        module = stages(rank, num_stages)  # maps tokens or hidden states to hidden states or logits

    Args:
        build: Returns the model, on any device. It is called once per stage.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build

    def __call__(self, index: int, num_stages: int) -> nn.Module:
        """Returns the module of stage ``index``.

        Raises:
            ValueError: The model cannot be split into ``num_stages`` stages.
        """
        model = self._build()
        check_stages(model, num_stages)
        return CausalLMStage(model, index, num_stages)


def check_stages(model: Any, num_stages: int) -> None:
    """Check that a model can be split into stages.

    Raises:
        ValueError: The type of the model is not supported, its head is tied to its embedding, or it
            has fewer layers than ``num_stages``.
    """
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", type(model).__name__)
    if model_type not in _MODEL_TYPES or not hasattr(model, "lm_head"):
        raise ValueError(
            "stages: expected a causal language model of transformers of one of the types "
            f"{', '.join(_MODEL_TYPES)}, or a function (index, num_stages) that builds a "
            f"stage; found {model_type}"
        )
    if config.tie_word_embeddings:
        raise ValueError(
            "stages: expected a model whose head is not tied to its embedding, since they are on "
            "different ranks; found tie_word_embeddings=True"
        )
    if len(model.model.layers) < num_stages:
        raise ValueError(
            f"stages: expected at most {len(model.model.layers)}, the number of layers of "
            f"{type(model).__name__}; found {num_stages}"
        )


def has_stages(model: Any, num_stages: int) -> bool:
    """Returns whether a model can be split into stages."""
    try:
        check_stages(model, num_stages)
    except ValueError:
        return False
    return True


def with_tp_plan(stage: nn.Module) -> nn.Module:
    """Returns the part of a stage's module to which the model's tensor-parallel plan applies."""
    return stage.causal_lm if isinstance(stage, CausalLMStage) else stage


class CausalLMStage(nn.Module):
    """One stage of a causal language model.

    Attributes:
        causal_lm: The model, reduced to the stage's modules. Parameters keep their names, except
            for the numbers of layers. ``fe.apply_tp_plan`` accepts this module.
    """

    def __init__(self, model: Any, index: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.causal_lm, decoder = model, model.model
        count = len(decoder.layers)
        own = slice(count * index // num_stages, count * (index + 1) // num_stages)
        decoder.layers = decoder.layers[own]
        # The decoder looks up the type of each layer by its number.
        decoder.config = config = copy.copy(model.config)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[own]
        if not self.is_first:
            decoder.embed_tokens = None
        if not self.is_last:
            decoder.norm = nn.Identity()
            model.lm_head = None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[batch, seq]`` or hidden states ``[batch, seq, width]`` to hidden states or
        logits ``[batch, seq, vocab]``."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        x = self.causal_lm.model(**{name: x}, use_cache=False).last_hidden_state
        return self.causal_lm.lm_head(x) if self.is_last else x
