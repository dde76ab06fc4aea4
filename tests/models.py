"""Small models, each with one feature of real models that an engine must handle.

Most models return the mean loss of a batch of :func:`token_batch` or :func:`vector_batch`. So a
rank's loss is the mean over its part, and the mean over ranks is the loss of one process.
Blocks sit in ``nn.ModuleList`` or ``nn.Sequential``: the default units.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DIM = 12
VOCABULARY = 23
LENGTH = 5


class Dot(nn.Module):
    """The gradient of ``weight`` is the input itself, so a missing factor is visible exactly."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Block(nn.Module):
    """A transformer block: attention over one head, and an MLP."""

    def __init__(self, dim: int = DIM, norm_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, dtype=norm_dtype)
        # No bias: the gradient of the keys' bias is only rounding noise, which Adam would amplify.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, dtype=norm_dtype)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(_norm(self.norm1, x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(_norm(self.norm2, x))))


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """``norm`` in its own dtype, which may be wider than the block's."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


class Transformer(nn.Module):
    """Embedding, blocks, norm, head; the head may be tied to the embedding."""

    def __init__(self, num_blocks: int = 3, tied: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_new: int) -> Tensor:
        """Greedy continuation through ``logits``, which is not ``forward``."""
        for _ in range(num_new):
            tokens = torch.cat([tokens, self.logits(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def token_batch(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and next-token targets, (num, LENGTH) each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def vector_batch(num: int, seed: int, width: int = DIM) -> tuple[Tensor, Tensor]:
    """Inputs and regression targets, (num, width) each."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num, width, generator=generator),
        torch.randn(num, width, generator=generator),
    )


class Regression(nn.Module):
    """Mean squared error of ``self.predict``; the base of the models below."""

    def predict(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.predict(x).float(), y.float())


class Chain(Regression):
    """Blocks one after another."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Mlp(nn.Module):
    """Two linears of odd sizes with a residual."""

    def __init__(self, dim: int = DIM, hidden: int = 17) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OddBlock(nn.Module):
    """Sizes 7 and 13, a scalar, an empty, and a non-contiguous parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(5, 7).t())  # (7, 5), strides (1, 7)
        assert not self.turned.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.second(torch.tanh(self.first(x)))
        return x + (x @ self.turned) @ self.turned.t() / 35 + self.nothing.sum()


def odd_model() -> Regression:
    """Two odd blocks; batches have width 7."""
    return Chain(OddBlock(), OddBlock())


class LoraLinear(nn.Module):
    """A frozen linear with a trainable low-rank adapter beside it."""

    def __init__(self, dim: int = DIM, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The adapter's gradients are complete before the base weight is used for the gradient
        # of x.
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


def lora_model() -> Regression:
    return Chain(LoraLinear(), LoraLinear(), LoraLinear())


def frozen_first_model() -> Regression:
    """The first blocks are wholly frozen, so no gradient flows into them."""
    model = Chain(Mlp(), Mlp(), Mlp(), Mlp())
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    return model


@dataclass
class Output:
    """What a block with many results returns."""

    hidden: Tensor
    extra: dict[str, Tensor] | None = None
    label: str = "output"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Bag(OrderedDict):
    """A mapping of a user's own class."""


class NestedBlock(nn.Module):
    """Returns its result inside a container: one of the kinds that real modules use."""

    KINDS = ("dict", "dataclass", "nested", "namedtuple", "own_mapping", "defaultdict")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inside = Mlp()

    def forward(self, x: Tensor) -> Any:
        hidden = self.inside(x)
        half = hidden * 0.5
        match self.kind:
            case "dict":
                return {"hidden": hidden, "half": half, "name": "x"}
            case "dataclass":
                return Output(hidden, {"half": half})
            case "nested":
                return (hidden, [half, ({"again": hidden}, None)])
            case "namedtuple":
                return Pair(hidden, half)
            case "own_mapping":
                return Bag(hidden=hidden, half=half)
        found: defaultdict[str, Tensor] = defaultdict(lambda: half)
        found["hidden"] = hidden
        return found


class NestedModel(Regression):
    """One block per kind of container; containers keep their type on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NestedBlock(kind) for kind in NestedBlock.KINDS])
        self.types: list[type] = []

    def predict(self, x: Tensor) -> Tensor:
        self.types = []
        for block in self.blocks:
            result = block(x)
            self.types.append(type(result))
            match result:
                case Output(hidden, {"half": half}):
                    x = hidden + half
                case Pair():
                    x = result.left + result.right
                case tuple():
                    x = result[0] + result[1][0] + result[1][1][0]["again"]
                case defaultdict():
                    x = result["hidden"] + result["missing"]
                case dict():
                    x = result["hidden"] + result["half"]
            x = x / 2
        return x


class CalledTwice(Chain):
    """The same unit is called twice in one forward, with another between."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp())

    def predict(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


class Skipping(Chain):
    """The middle unit runs only when ``skip`` is false."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp(), Mlp())
        self.skip = False

    def predict(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 1 or not self.skip:
                x = block(x)
        return x


class PartlyUnused(nn.Module):
    """A parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Mlp()
        self.unused = nn.Parameter(torch.ones(11, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class NestedUnits(Chain):
    """Units inside units: a Sequential in a ModuleList, and a parameter of the outer one."""

    def __init__(self) -> None:
        super().__init__(SequentialBlock(), SequentialBlock())


class SequentialBlock(nn.Module):
    """A Sequential with a scale of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(DIM, 17), nn.GELU(), nn.Linear(17, DIM))
        self.scale = nn.Parameter(torch.full((DIM,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inside(x)


def unused_model() -> Regression:
    return Chain(PartlyUnused(), Mlp())


class MixedBlock(nn.Module):
    """bf16 linears and an fp32 norm in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 17, dtype=torch.bfloat16)
        self.down = nn.Linear(17, DIM, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(_norm(self.norm, x).bfloat16()))
        return x + self.down(hidden).to(x.dtype)


def mixed_model() -> Regression:
    return Chain(MixedBlock(), MixedBlock())


def shared_model() -> Regression:
    """Two blocks share one weight, and nothing contains both but the root."""
    model = Chain(Mlp(), Mlp(), Mlp())
    first, last = model.blocks[0], model.blocks[2]
    assert isinstance(first, Mlp)
    assert isinstance(last, Mlp)
    last.up.weight = first.up.weight
    return model


class WithShared(nn.Module):
    """A block with a module that other blocks share, like Zamba2's attention."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own(self.shared(x))


def shared_module_model() -> Regression:
    """Two blocks share a module; another block is between them."""
    shared = Mlp()
    return Chain(WithShared(shared), Mlp(), WithShared(shared))


class DecoderLayer(nn.Module):
    """Takes its own input and a memory, by keyword, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(DIM, DIM)
        self.cross = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x) + self.cross(memory))


class EncoderDecoder(Regression):
    """The encoder's memory goes to every decoder layer, so its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Mlp(), Mlp()])
        self.decoder = nn.ModuleList([DecoderLayer(), DecoderLayer(), DecoderLayer()])

    def predict(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory=memory)
        return x


class InPlace(Chain):
    """The outputs of units are changed in place immediately."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp())

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x = x.clone().relu_()
        return x


class MaybeIdentity(nn.Module):
    """Returns its input unchanged when inactive, like stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Mlp()
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) if self.active else x


class Router(nn.Module):
    """Returns a result and a second one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Mlp()
        self.extra = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.extra(x)


class UnusedOutput(Chain):
    """Only one of the units' second outputs is used."""

    def __init__(self) -> None:
        super().__init__(Router(), Router(), Router())

    def predict(self, x: Tensor) -> Tensor:
        side: Tensor | float = 0.0
        for index, block in enumerate(self.blocks):
            x, extra = block(x)
            if index == 1:
                side = extra.mean(-1, keepdim=True)
        return x + side


class Normalised(nn.Module):
    """Batch norm, whose running statistics are buffers, and a cached constant."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("constant", torch.linspace(0, 1, DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)) + self.constant)


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.unflatten(-1, (DIM // 3, 3)))
        return x + out.flatten(1)


class Between(Regression):
    """Blocks of given sizes between two layers that belong to the root."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(hidden=size) for size in sizes])
        self.last = nn.Linear(DIM, DIM, bias=False)

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Stack(Between):
    """Four units of different sizes."""

    def __init__(self) -> None:
        super().__init__(5, 18, 31, 44)


NUM_BLOCKS = 6


class Even(Between):
    """Blocks of one size."""

    def __init__(self) -> None:
        super().__init__(*[17] * NUM_BLOCKS)


class Small(Between):
    """Blocks in any ``order``, maybe with torch's checkpoints."""

    def __init__(self, num_blocks: int = 3, checkpoints: bool | None = None) -> None:
        super().__init__(*[5] * num_blocks)
        self.order = list(range(num_blocks))
        self.checkpoints = checkpoints

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            block = self.blocks[index]
            if self.checkpoints is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.last(x)


class _InputGradOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.append((x.detach(), grad))
        return grad @ weight, None, None


class LateLinear(nn.Module):
    """A linear with a bias. The gradient of its weight waits for ``backward_dw``, by the protocol
    of Transformer Engine's modules."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.zeros(dim))
        self._later: list[tuple[Tensor, Tensor]] = []
        self._callbacks: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def forward(self, x: Tensor) -> Tensor:
        return _InputGradOnly.apply(x, self.weight, self._later) + self.bias

    def backward_dw(self) -> None:
        if not self._later:
            return
        grads = [grad.t() @ x for x, grad in self._later]
        self._later.clear()
        self.weight.grad = torch.stack(grads).sum(0)
        for callback in self._callbacks:
            callback()


class LateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = LateLinear()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.late(x)))


class LateModel(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first = LateLinear()
        self.blocks = nn.ModuleList([LateBlock() for _ in range(3)])

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def late_modules(model: nn.Module) -> list[LateLinear]:
    return [module for module in model.modules() if isinstance(module, LateLinear)]


class LstmLanguage(nn.Module):
    """An embedding, blocks, an LSTM in the root, and a head of the embedding's shape. Head and
    embedding may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.lstm(x)[0])
