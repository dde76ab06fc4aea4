"""Models that call modules, read weights and return tensors in the ways of real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import DIM, LENGTH, VOCABULARY, Chain, Mlp, Regression, Transformer


class Shuffled(Chain):
    """Blocks in another order in every step."""

    turn = 0

    def predict(self, x: Tensor) -> Tensor:
        for index in [(0, 1, 2, 3), (2, 0, 3, 1), (1, 1, 0, 3)][self.turn]:
            x = self.blocks[index](x)
        return x


class Choosing(Regression):
    """Every block has two linears and uses those that ``choose`` selects."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chooser(), Chooser()])

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def choose(self, which: str) -> None:
        for block in self.blocks:
            block.which = which  # type: ignore[assignment]


class Chooser(nn.Module):
    which = "both"

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(DIM, DIM)
        self.right = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.which != "right":
            x = x + torch.tanh(self.left(x))
        if self.which != "left":
            x = x + torch.tanh(self.right(x))
        return x


class Checkpointed(Regression):
    """Recomputes blocks, every other block, a part of each block, or two blocks at once."""

    def __init__(self, where: str, use_reentrant: bool, *blocks: nn.Module) -> None:
        super().__init__()
        self.where, self.use_reentrant = where, use_reentrant
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks or [RecomputedInside(self) for _ in range(4)])

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "two blocks":
            for index in (0, 2):
                x = self.again(lambda x, i=index: self.blocks[i + 1](self.blocks[i](x)), x)
            return x
        for index, block in enumerate(self.blocks):
            if self.where == "blocks" or (self.where == "every other block" and index % 2 == 0):
                x = self.again(block, x)
            else:
                x = block(x)
        return x


class RecomputedInside(nn.Module):
    """A block of which the inner part may be recomputed."""

    def __init__(self, model: Checkpointed) -> None:
        super().__init__()
        self.model = [model]  # in a list: not a submodule
        self.inside = Mlp()
        self.outside = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        model = self.model[0]
        x = model.again(self.inside, x) if model.where == "inside" else self.inside(x)
        return self.outside(torch.tanh(x))


class Hidden:
    """An output in a class of the user's own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Hides(Mlp):
    """The start of its backward cannot be observed."""

    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


class HidesFirst(Chain):
    """Its first block hides its output, the second does not."""

    def __init__(self) -> None:
        super().__init__(Hides(), Mlp())

    def predict(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).tensor)


# Parameters that are read without a call of their module.


class Language(Transformer):
    """Uses its head by the function ``use_head``, perhaps only from the second forward on."""

    def __init__(
        self,
        use_head: Callable[[Any, Tensor], Tensor] = lambda model, x: model.head(x),
        *,
        head: nn.Module | None = None,
        tied: bool = False,
        calls_first: bool = False,
    ) -> None:
        super().__init__(num_blocks=2, tied=tied)
        if head is not None:
            self.head = head  # type: ignore[assignment]
        self.use_head, self.calls_first, self.num_calls = use_head, calls_first, 0

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.num_calls += 1
        is_called = self.calls_first and self.num_calls == 1
        return self.head(self.norm(x)) if is_called else self.use_head(self, self.norm(x))


class Product(torch.autograd.Function):
    """Like fused losses: weights are passed to a custom autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def fused(model: Any, x: Tensor) -> Tensor:
    """The head is not called."""
    return Product.apply(x, model.head.weight)


class GivenHead(nn.Linear):
    """Multiplies with the weight that it is given, as Megatron-Core's output layer does."""

    def __init__(self, has_weight: bool) -> None:
        super().__init__(DIM, VOCABULARY, bias=False)
        if not has_weight:
            self.weight = None  # type: ignore[assignment]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return Product.apply(x, weight)


class ReadsPositions(Transformer):
    """Reads the weight of a module that it never calls, before the first block."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.embedding = nn.ModuleDict(  # type: ignore[assignment]
            {"tokens": self.embedding, "positions": nn.Embedding(LENGTH, DIM)}
        )

    def logits(self, tokens: Tensor) -> Tensor:
        tables: Any = self.embedding
        x = tables["tokens"](tokens) + tables["positions"].weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LANGUAGES: dict[str, Callable[[], nn.Module]] = {
    "reads its embedding": lambda: Language(
        lambda model, x: x @ model.embedding.weight.t(), head=nn.Identity()
    ),
    "reads positions": ReadsPositions,
    "fused head": lambda: Language(fused),
    "fused tied head": lambda: Language(fused, tied=True),
    "reads its head later": lambda: Language(
        lambda model, x: F.linear(x, model.head.weight), calls_first=True
    ),
    "fused head later": lambda: Language(fused, calls_first=True),
    "passes a weight": lambda: Language(
        lambda model, x: model.head(x, model.head.weight), head=GivenHead(True)
    ),
    "passes the embedding": lambda: Language(
        lambda model, x: model.head(x, weight=model.embedding.weight), head=GivenHead(False)
    ),
}

# Parameters that units return.


class Skips(nn.Module):
    """Leaves its bias to the caller, as Megatron-Core's layers do with ``skip_bias_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight.t(), self.bias


class Views(Skips):
    """Returns views: of one row, transposed, expanded, detached."""

    def forward(self, x: Tensor) -> Any:
        return {
            "out": x @ self.weight.t(),
            "all": [self.bias, self.weight[0], self.weight.t(), self.bias.expand(len(x), -1)],
            "still": self.weight.detach(),
        }


def combine(found: Any) -> Tensor:
    """Uses outputs of :class:`Skips` or :class:`Views`; its backward reads the parameters, too."""
    if isinstance(found, tuple):
        x, bias = found
        return torch.tanh(x + bias) * bias
    bias, row, turned, rows = found["all"]
    return torch.tanh((found["out"] + rows) * row * bias) @ turned + found["still"].mean()


class Reads(Regression):
    """Reads parameters that its blocks return."""

    def __init__(self, block: Callable[[], nn.Module], reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.last = Skips()
        self.head = nn.Linear(DIM, DIM)
        self.reentrant = reentrant

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = combine(block(x))
        return combine(self.last(x))

    def predict(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.features(x))
        x = x.requires_grad_()
        return self.head(checkpoint(self.features, x, use_reentrant=self.reentrant))


class Table(nn.Module):
    """A unit whose forward returns its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self) -> Tensor:
        return self.weight


class WithTable(Reads):
    """Reads a table twice."""

    def __init__(self) -> None:
        super().__init__(Skips)
        self.tables = nn.ModuleList([Table()])

    def features(self, x: Tensor) -> Tensor:
        return super().features(x @ self.tables[0]()) @ self.tables[0]()


class Keeps(Skips):
    """Puts its bias, and a view of its weight, into containers that the caller passed."""

    def forward(self, x: Tensor, biases: list[Tensor], *, views: dict[str, Any]) -> Tensor:
        biases.append(self.bias)
        views["turned"] = [self.weight.t()]
        return x @ self.weight.t()


class WithContainers(Reads):
    """Reads parameters from containers after all blocks have put them there."""

    def __init__(self) -> None:
        super().__init__(Keeps)

    def features(self, x: Tensor) -> Tensor:
        biases: list[Tensor] = []
        views: dict[str, Any] = {}
        for block in self.blocks:
            x = block(x, biases, views=views)
        x = torch.tanh(x + biases[0]) * biases[1].sum() @ views["turned"][0]
        return combine(self.last(x))


# By name: models whose units return parameters.
RETURNS: dict[str, Callable[[], nn.Module]] = {
    "returned parameters": lambda: Reads(Skips),
    "returned views": lambda: Reads(Views),
    "a returned table": WithTable,
    "parameters in containers": WithContainers,
}

# Modules of a unit that are called outside of the unit's forward.


class Modulated(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.modulation = make()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) + shift


class Diffusion(nn.Module):
    """Calls the modulation of each block before the block."""

    def __init__(self, make: Callable[[], nn.Module], *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList([Modulated(make) for _ in range(2)])
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recomputes:
                shift: Any = checkpoint(block.modulation, condition, use_reentrant=False)
            else:
                shift = block.modulation(condition)  # type: ignore[operator]
            x = block(x, shift[0] if isinstance(shift, tuple) else shift)
        return self.out(x).square().mean()


def diffusion_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 3, 6, generator=generator) for _ in range(2))  # type: ignore[return-value]


MODULATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.SiLU(), nn.Linear(6, 6)),
    "layer norm": lambda: nn.LayerNorm(6),
    "convolution": lambda: nn.Conv1d(3, 3, 1),
    "recurrent": lambda: nn.GRU(6, 6, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 6, dropout=0.0, batch_first=True),
}
