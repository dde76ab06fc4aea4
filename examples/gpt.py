"""A small GPT in plain PyTorch, without any code for sharding.

Pre-norm blocks [Radford et al., 2019], causal ``scaled_dot_product_attention``, a GELU MLP, learned
positions. Every module that owns parameters has ``reset_parameters``, so the model can be built on
the meta device and be given its values later, module by module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

CHECKPOINTING = ("none", "non-reentrant", "reentrant")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Raises:
        ValueError: ``width`` is not a multiple of ``num_heads``, or ``checkpointing`` is unknown.
    """

    vocab_size: int = 256
    sequence_length: int = 128
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    mlp_ratio: int = 4
    checkpointing: str = "none"

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width: expected a multiple of num_heads={self.num_heads}; found {self.width}"
            )
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"checkpointing: expected one of {', '.join(CHECKPOINTING)}; "
                f"found {self.checkpointing!r}"
            )


@dataclass
class GPTOutput:
    """``logits`` ``[batch, seq, vocab]``, and the ``loss`` in nats a token if there are targets."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Linear(nn.Linear):
    """``nn.Linear`` with normally distributed weights and, if any, a bias of zero."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = True) -> None:
        self.std = std  # before super(): its constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` with normally distributed weights."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std  # before super(): its constructor calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal self-attention: ``[batch, seq, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.width, 3 * config.width, std=config.width**-0.5)
        self.out = Linear(config.width, config.width, std=residual_std(config, config.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(
            self.qkv(x),
            "batch seq (three heads dim) -> three batch heads seq dim",
            three=3,
            heads=self.num_heads,
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: torch.Tensor = self.out(rearrange(y, "batch heads seq dim -> batch seq (heads dim)"))
        return mixed


class MLP(nn.Module):
    """Two linear maps with a GELU between: ``[batch, seq, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.up = Linear(config.width, hidden, std=config.width**-0.5)
        self.down = Linear(hidden, config.width, std=residual_std(config, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """A decoder over ``config.vocab_size`` tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.width, std=1.0)
        self.position_embedding = Embedding(config.sequence_length, config.width, std=0.1)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocab_size, std=0.02, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> GPTOutput:
        """Logits, and the mean cross-entropy with ``targets``.

        Args:
            tokens: int64 ``[batch, seq]``, ``seq`` at most ``config.sequence_length``.
            targets: int64 ``[batch, seq]``.

        Raises:
            ValueError: ``tokens`` is longer than ``config.sequence_length``.
        """
        seq = tokens.shape[1]
        if seq > self.config.sequence_length:
            raise ValueError(
                f"tokens: expected at most {self.config.sequence_length} a sequence; found {seq}"
            )
        positions = torch.arange(seq, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = self._through(block, x)
        logits = self.head(self.norm(x))
        if targets is None:
            return GPTOutput(logits)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return GPTOutput(logits, loss)

    def _through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        if self.config.checkpointing == "none" or not torch.is_grad_enabled():
            y = block(x)
        else:
            reentrant = self.config.checkpointing == "reentrant"
            y = checkpoint(block, x, use_reentrant=reentrant)
        return y

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """``tokens`` followed by ``num_tokens`` sampled ones: int64 ``[seq]`` to ``[seq + num]``.

        The input of each step is padded at its end to ``config.sequence_length``, so that a
        compiler sees one shape; attention is causal and ignores it. Where the model is sharded, all
        ranks must call this together. The text is the same on all ranks if each passes a CPU
        ``generator`` with the same seed.
        """
        window = self.config.sequence_length
        for _ in range(num_tokens):
            recent = tokens[-window:]
            padded = F.pad(recent, (0, window - recent.numel()))
            logits = self(padded[None]).logits[0, recent.numel() - 1]
            probabilities = (logits.float().cpu() / temperature).softmax(dim=-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, sampled.to(tokens.device)])
        return tokens


def residual_std(config: GPTConfig, fan_in: int) -> float:
    """Standard deviation of the weights that write to the residual stream.

    The stream adds ``2 * num_layers`` such outputs, so each is made smaller by the root of that
    [Radford et al., 2019, section 2.3].
    """
    return 1.0 / math.sqrt(fan_in * 2 * config.num_layers)
