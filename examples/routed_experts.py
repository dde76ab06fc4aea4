"""Trains mixtures of experts at level 3, and gathers only the experts that are routed to.

    torchrun --nproc-per-node 2 examples/routed_experts.py [--model gpt] [--experts 16] [--steps 30]
    python examples/routed_experts.py

Each expert is a unit, and a step runs within ``engine.together()``. A hook on each router calls
``engine.will_use`` with the experts that its tokens are routed to. The ranks then gather the
experts that any of them routes to, in one round. An expert that no rank routes to is not gathered,
and its parameters have no gradient, as in one process.

``gpt`` is the GPT of ``gpt.py`` with experts in place of its MLPs. ``mixtral`` and ``qwen`` are
small models of transformers with random weights. Their experts are stacked in one parameter, so
:func:`split_experts` first replaces each stack by one module for each expert.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from corpus import VOCAB_SIZE, BatchPlan, read_corpus
from gpt import GPT, MLP, GPTConfig, Linear

SEQUENCES, SEQUENCE_LENGTH, TOP_K = 2, 32, 2


class Router(nn.Module):
    """Chooses ``top_k`` of the experts for each token.

    Returns, as the routers of transformers do, logits (tokens, experts), and the weights and the
    indices of the chosen experts, both (tokens, top_k).
    """

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.linear = Linear(width, num_experts, std=width**-0.5, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(x)
        weights, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


class Experts(nn.Module):
    """Experts of which each token uses some.

    Args:
        experts: Modules from (tokens, width) to (tokens, width).
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.items = nn.ModuleList(experts)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of the chosen experts, (tokens, width).

        Args:
            x: Tokens, (tokens, width).
            chosen: Indices of the experts of each token, (tokens, top_k).
            weights: Weights of these experts, (tokens, top_k).
        """
        result = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            found = self.items[index](x[token]) * weights[token, place, None]
            result.index_add_(0, token, found.to(result.dtype))
        return result


class MoE(nn.Module):
    """A router and its experts, in place of an MLP: [batch, seq, width] to the same shape."""

    def __init__(self, config: GPTConfig, num_experts: int) -> None:
        super().__init__()
        self.gate = Router(config.width, num_experts, TOP_K)
        self.experts = Experts([MLP(config) for _ in range(num_experts)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        _, weights, chosen = self.gate(flat)
        result: Tensor = self.experts(flat, chosen, weights)
        return result.view_as(x)


class GatedExpert(nn.Module):
    """One expert of the transformers library: down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj)


def split_experts(model: nn.Module) -> None:
    """Replace the stacked experts of the transformers library by one module each, in place.

    A stack has the parameters ``gate_up_proj`` (experts, 2 * hidden, width) and ``down_proj``
    (experts, width, hidden), as in Mixtral and in Qwen's mixtures of experts. Names of parameters
    change: ``experts.gate_up_proj`` becomes ``experts.items.0.gate_up_proj`` and so on.
    """
    for module in list(model.modules()):
        stack: Any = getattr(module, "experts", None)
        if isinstance(getattr(stack, "gate_up_proj", None), nn.Parameter):
            pairs = zip(stack.gate_up_proj.detach(), stack.down_proj.detach(), strict=True)
            module.experts = Experts(
                [GatedExpert(up.clone(), down.clone(), stack.act_fn) for up, down in pairs]
            )


def name_routed_experts(model: nn.Module, engine: fe.Engine) -> None:
    """Call ``engine.will_use`` with the chosen experts after each router of ``model``."""
    for module in model.modules():
        layer: Any = module
        if isinstance(getattr(module, "experts", None), Experts):
            layer.gate.register_forward_hook(partial(_name_chosen, engine, layer.experts.items))


def _name_chosen(
    engine: fe.Engine, items: nn.ModuleList, router: nn.Module, given: Any, output: Any
) -> None:
    chosen: Tensor = output[2]
    engine.will_use([items[index] for index in chosen.unique().tolist()])


def make_gpt(num_experts: int) -> nn.Module:
    """A GPT of two blocks with experts in place of MLPs."""
    config = GPTConfig(sequence_length=SEQUENCE_LENGTH, num_layers=2, width=64, mlp_ratio=2)
    model = GPT(config)
    for block in model.blocks:
        block.mlp = MoE(config, num_experts)
    return model


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
}


def make_mixtral(num_experts: int) -> nn.Module:
    """A small Mixtral of transformers, its experts split."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=num_experts)
    model = MixtralForCausalLM(config)
    split_experts(model)
    return model


def make_qwen(num_experts: int) -> nn.Module:
    """A small Qwen 3 mixture of experts of transformers, its experts split."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | {"head_dim": 16, "moe_intermediate_size": 48, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=num_experts))
    split_experts(model)
    return model


MODELS = {"gpt": make_gpt, "mixtral": make_mixtral, "qwen": make_qwen}
# Each block is a unit, and so is each expert within it.
UNITS = {
    "gpt": ["blocks.*", "blocks.*.mlp.experts.items.*"],
    "mixtral": ["model.layers.*", "model.layers.*.mlp.experts.items.*"],
    "qwen": ["model.layers.*", "model.layers.*.mlp.experts.items.*"],
}


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of a batch; tokens and targets (sequences, length)."""
    logits: Tensor = model(tokens).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(name: str, num_experts: int, steps: int) -> None:
    """Train a model and print how it went."""
    torch.manual_seed(0)
    model = MODELS[name](num_experts)
    engine = fe.shard(
        model,
        strategy="optim_grads_params",
        units=UNITS[name],
        options=fe.Options(min_unit_size=0),  # small experts are units of their own, too
    )
    name_routed_experts(model, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fe.shard_optimizer(optimizer)
    ranks, text = engine.ranks, read_corpus().train
    plan = BatchPlan(SEQUENCES * ranks.size, 1, ranks.size, SEQUENCE_LENGTH)
    experts = [param for name, param in model.named_parameters() if ".items." in name]
    losses, unused = [], 0.0
    for step in range(steps):
        batch = plan.train_batch(text, step, 0, ranks.rank)
        with engine.together():
            loss = loss_of(model, batch.tokens, batch.targets)
            loss.backward()
        losses.append(loss.item())
        unused += sum(param.grad is None for param in experts) / len(experts)
        optimizer.step()
        optimizer.zero_grad()
    if ranks.rank == 0:
        third = max(steps // 3, 1)
        first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
        print(
            f"{name:8} loss {first:.3f} -> {last:.3f}; no rank routed to {unused / steps:.0%} of "
            "the experts"
        )


def main() -> None:
    """Parse the command line, and train each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, help="default: all that are installed")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    for name in [args.model] if args.model else MODELS:
        try:
            train(name, args.experts, args.steps)
        except ImportError:
            print(f"{name:8} needs transformers")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
