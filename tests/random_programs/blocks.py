"""Random models: every block takes and returns a tensor of shape (rows, width)."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Mlp


class BlockError(Exception):
    """Raised by a :class:`MayFail` on request."""


class Gain(nn.Module):
    """A scalar, a vector and an empty parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.offset = nn.Parameter(torch.linspace(-0.2, 0.3, width))
        self.empty = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset + self.empty.sum()


class Seq(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(Seq):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * super().forward(x)


class Branches(Seq):
    """Every block gets the input; part of the last block's output is detached."""

    def forward(self, x: Tensor) -> Tensor:
        *outputs, last = [block(x) for block in self.blocks]
        return torch.stack([*outputs, last.detach() * 0.3 + last * 0.2]).mean(0)


class Around(nn.Module):
    """One block, and how it is used."""

    def __init__(self, block: nn.Module, how: Any = None) -> None:
        super().__init__()
        self.block, self.how = block, how


class Repeat(Around):
    """Calls its block ``how`` times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.how):
            x = self.block(x)
        return x


class Switch(Around):
    """A block that is left out while it is off."""

    is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if self.is_on else x


class Detached(Around):
    """A block without gradients, or whose input is detached, in a residual connection."""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return x + self.block(x)
        return x + self.block(x.detach())


class Recomputed(Around):
    """``how``: whether the checkpoint is re-entrant."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.how)


class Boxed(Around):
    """Passes tensors in containers and by keyword; also passes an unused tensor."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(_Box(block))

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(inputs={"x": [x]}, unused=x * 2)
        return found["out"][0]


class _Box(Around):
    def forward(self, *, inputs: dict[str, list[Tensor]], unused: Tensor) -> Any:
        out = self.block(inputs["x"][0])
        return {"out": [out, out.square()], "unused": [unused]}


class InPlace(Around):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 0.5 * self.block(x.clone())
        return x


class Wider(Around):
    """A block in another dtype than the tensors around it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.double()).to(x.dtype)


class MayFail(Around):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.fails:
            raise BlockError
        return x


class Root(nn.Module):
    """Mean squared error over rows."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.body(x)).float() - y).square().mean()


def random_model(draw: random.Random, width: int, *, wider: bool) -> Root:
    """A model of up to four levels of nesting; values from torch's generator."""
    linears: list[nn.Linear] = []
    shared: list[nn.Module] = []

    def linear() -> nn.Module:
        linears.append(nn.Linear(width, width, bias=draw.random() < 0.7))
        return linears[-1]

    def tied() -> nn.Module:
        if not linears:
            return linear()
        made = nn.Linear(width, width)
        made.weight = draw.choice(linears).weight
        return made

    def again() -> nn.Module:
        return draw.choice(shared) if shared else leaf()

    leaves: Sequence[tuple[Callable[[], nn.Module], int]] = [
        (linear, 4),
        (lambda: Mlp(width, draw.randint(1, 11)), 4),
        (lambda: nn.LayerNorm(width), 3),
        (lambda: Gain(width), 2),
        (nn.Tanh, 2),
        (tied, 2),
        (again, 2),
    ]

    def leaf() -> nn.Module:
        makers, weights = zip(*leaves, strict=True)
        made: nn.Module = draw.choices(makers, weights)[0]()
        if draw.random() < 0.3:
            shared.append(made)
        return made

    def some(depth: int) -> list[nn.Module]:
        return [block(depth - 1) for _ in range(draw.randint(1, 3))]

    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        lambda inner: Repeat(inner, draw.randint(2, 3)),
        Switch,
        lambda inner: Detached(inner, draw.choice(["no_grad", "detach"])),
        lambda inner: Recomputed(inner, draw.random() < 0.4),
        Boxed,
        InPlace,
        MayFail,
    ]

    def block(depth: int) -> nn.Module:
        if depth == 0 or draw.random() < 0.2:
            return leaf()
        kind = draw.random()
        made: nn.Module
        if kind < 0.55:
            made = draw.choice([Seq, Residual, Residual, Branches])(*some(depth))
        elif kind < 0.9:
            made = draw.choice(wrappers)(block(depth - 1))
        else:
            made = copy.deepcopy(block(depth - 1))
        if draw.random() < 0.15:
            shared.append(made)
        return made

    body = Seq(nn.Linear(width, width), *(block(3) for _ in range(draw.randint(2, 4))))
    if wider:
        body.blocks.append(Wider(Mlp(width, 5).double()))
    root = Root(body, width)
    uses = count_uses(root)
    for module in root.modules():
        if isinstance(module, Recomputed) and any(uses[id(p)] > 1 for p in module.parameters()):
            module.how = False  # re-entrant checkpoints allow one use
    return root


def count_uses(module: nn.Module) -> Counter[int]:
    """How often a forward uses each parameter, by ``id``."""
    found = Counter(id(param) for param in module._parameters.values() if param is not None)
    for child in module._modules.values():
        assert child is not None
        found.update(count_uses(child))
    if isinstance(module, Repeat):
        found = Counter({key: count * module.how for key, count in found.items()})
    return found
