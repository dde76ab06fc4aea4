"""What training with Transformer Engine's weights must give, and eyes on the bytes meanwhile.

:class:`Alone` is the model of ``te_on_cpu.py`` in one process: plain fp32 parameters, and
forward and backward on what ``te_reference.py`` makes of them. :class:`Watch` looks at the
bytes and scales of a sharded model's weights whenever they are about to be multiplied with.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.codecs import ParamCodec, TransformerEngineCodec
from fsdp_engine.codecs import transformer_engine as codec_module
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import (
    QuantisedBlock,
    QuantisedLinear,
    QuantisedStack,
    encodings,
    load,
)
from tests.extensions.transformer_engine.te_reference import MAX, Quantised, dequantise, quantise

TRANSPOSED = ("delayed", "current", "block")  # backward reads transposes of what forward reads
FEATURES = 7
HISTORY = 4  # of te_on_cpu's delayed scaling


@contextlib.contextmanager
def counting_encodes(codec: type[ParamCodec]) -> Iterator[list[int]]:
    """Within it, ``[0]`` of what it gives is how often codecs of that class have encoded."""
    count, real = [0], codec.encode

    def encode(self: Any, *args: Any) -> Any:
        count[0] += 1
        return real(self, *args)

    with mock.patch.object(codec, "encode", encode):
        yield count


def make_stack(recipe: str, num_blocks: int = 2, seed: int = 1) -> QuantisedStack:
    """A small one: blocks of 128 x 128 need size, MXFP8's do not."""
    torch.manual_seed(seed)
    dim, hidden = (32, 96) if recipe == "mxfp8" else (96, 160)
    return QuantisedStack(recipe, num_blocks=num_blocks, dim=dim, hidden=hidden, features=FEATURES)


def make_batch(rows: int, seed: int) -> tuple[Tensor]:
    """Inputs, (rows, features)."""
    return (torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed)),)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Quantised layers by the names of their weights."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }


def scales_of(model: nn.Module) -> dict[str, float]:
    """Delayed scaling's scales of all weights, as they are; empty for other recipes."""
    return {
        name: layer.fp8_meta["scaling_fwd"].scale[te_on_cpu.WEIGHT].item()
        for name, layer in quantised_layers(model).items()
        if layer.fp8_meta["recipe"].delayed()
    }


def recipe_of(model: nn.Module) -> str:
    """The recipe's name."""
    layer = next(iter(quantised_layers(model).values()))
    known = {"Delayed": "delayed", "Float8Current": "current", "Float8Block": "block"}
    found = type(layer.fp8_meta["recipe"]).__name__
    return next((name for start, name in known.items() if found.startswith(start)), "mxfp8")


def expected_encodings(
    mains: dict[str, Tensor], recipe: str, scales: dict[str, float]
) -> dict[str, Quantised]:
    """The reference's bytes and scales of main weights."""
    return {
        name: quantise(main, recipe, torch.bfloat16, scales.get(name))
        for name, main in mains.items()
    }


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    """Whether both are there, and equal bit by bit."""
    return found is not None and expected is not None and torch.equal(found, expected)


# One process.


class _Product(torch.autograd.Function):
    """x W^T with what the rows mean, and its gradient with what the columns mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, main: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, columns)
        ctx.dtype = main.dtype
        return x @ rows.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, columns = ctx.saved_tensors
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        return dy @ columns, dw.to(ctx.dtype), None, None


class AloneLinear(nn.Module):
    """fp32 main weights of a quantised layer, quantised by the reference whenever they changed."""

    def __init__(self, layer: QuantisedLinear, recipe: str) -> None:
        super().__init__()
        value = layer.weight.get_high_precision_init_val()
        assert value is not None
        self.nominal, self.recipe = value.dtype, recipe
        self.weight = nn.Parameter(value.float())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float())
        self.amaxes, self.scale = [value.abs().max().item()], 1.0
        self._version = -1

    def forward(self, x: Tensor) -> Tensor:
        if self._version != self.weight._version:
            self._version = self.weight._version
            found = self.quantise()
            self.rows = dequantise(found.row_bytes, found.row_scale_inv).to(self.nominal)
            assert found.column_bytes is not None
            assert found.column_scale_inv is not None
            self.columns = dequantise(found.column_bytes, found.column_scale_inv).to(self.nominal)
        y = _Product.apply(x, self.weight, self.rows, self.columns)
        return y if self.bias is None else y + self.bias.to(self.nominal)

    def quantise(self) -> Quantised:
        """The main weights as they are."""
        scale = self.scale if self.recipe == "delayed" else None
        found = quantise(self.weight, self.recipe, self.nominal, scale)
        assert found.amax is not None
        self.amaxes[-1] = max(self.amaxes[-1], found.amax)
        return found

    def update_scale(self) -> None:
        """Delayed scaling, at a step's end."""
        self.scale = float(torch.tensor(MAX) / torch.tensor(max(self.amaxes[-HISTORY:])))
        self.amaxes.append(0.0)


class AloneBlock(nn.Module):
    """A block of :class:`Alone`."""

    def __init__(self, block: QuantisedBlock, recipe: str) -> None:
        super().__init__()
        self.norm = copy.deepcopy(block.norm).float()
        self.up = AloneLinear(block.up, recipe)
        self.down = AloneLinear(block.down, recipe)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(_narrow(self.norm, x))))


class Alone(nn.Module):
    """A stack in one process; names of parameters are the stack's.

    Args:
        model: from whose weights it starts, before it is sharded.
    """

    def __init__(self, model: QuantisedStack) -> None:
        super().__init__()
        recipe = recipe_of(model)
        self.embed = copy.deepcopy(model.embed).float()
        self.blocks = nn.ModuleList([AloneBlock(block, recipe) for block in model.blocks])
        self.norm = copy.deepcopy(model.norm).float()
        self.head = copy.deepcopy(model.head).float()

    def forward(self, x: Tensor) -> Tensor:
        y = _narrow(self.embed, x.bfloat16())
        for block in self.blocks:
            y = block(y)
        return (_narrow(self.head, _narrow(self.norm, y)).float() - x.float()).square().mean()

    def update_scales(self) -> None:
        """Delayed scaling, at a step's end."""
        for module in self.modules():
            if isinstance(module, AloneLinear):
                module.update_scale()


def _narrow(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer``, whose weights are fp32, in bf16."""
    weights = {name: param.bfloat16() for name, param in layer.named_parameters()}
    return torch.func.functional_call(layer, weights, (x,))


# Many ranks.


class Watch:
    """Compares bytes and scales with the reference's whenever a quantised layer computes: rows in
    its forward, columns when the gradient of its output has come.

    Args:
        model: sharded.
        engine: its engine.

    Attributes:
        looks: how often rows and columns were compared, by "rows" and "columns".
        expected: by name of weight; set by :meth:`expect`.
    """

    def __init__(self, model: nn.Module, engine: fe.Engine) -> None:
        self.model, self.engine = model, engine
        self.layers = quantised_layers(model)
        self.recipe = recipe_of(model)
        self.looks: Counter[str] = Counter()
        self._used: dict[str, Any] = {}
        self.expected: dict[str, Quantised] = {}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(self._before(name))
            layer.register_forward_hook(self._after(name))

    def expect(self, mains: dict[str, Tensor] | None = None) -> None:
        """From now on, what the main weights are now, between steps.

        Args:
            mains: full main weights by name; None: they are gathered. A collective.
        """
        if mains is None:
            mains = self.engine.full_state_dict()
        mains = {name: mains[name] for name in self.layers}
        self.expected = expected_encodings(mains, self.recipe, scales_of(self.model))

    @property
    def weights(self) -> dict[str, Any]:
        """The parameters that modules compute with, by name."""
        found = {}
        for buffer in self.engine.buffers:
            for record, full in zip(buffer.records, buffer.full_params, strict=True):
                if record.name in self.layers:
                    found[record.name] = full
        return found

    def scales(self) -> dict[str, Tensor]:
        """All scales that are there, without padding, which is never written."""
        return {
            f"{name} {field}": scale.clone()
            for name, weight in self.weights.items()
            for field in ("row_scale_inv", "column_scale_inv")
            if (scale := getattr(encodings(weight), field)) is not None
        }

    def _before(self, name: str) -> Any:
        def before(layer: Any, args: Any) -> None:
            # What autograd saves, whatever the module holds in backward.
            self._used[name] = layer.weight
            self._look(name, layer.weight, "rows")

        return before

    def _after(self, name: str) -> Any:
        def after(layer: Any, args: Any, y: Tensor) -> None:
            if y.requires_grad:
                y.register_hook(lambda grad: self._look(name, self._used[name], "columns"))

        return after

    def _look(self, name: str, weight: Any, what: str) -> None:
        found, expected = encodings(weight), self.expected[name]
        if what == "rows":
            pairs = [(found.row_bytes, expected.row_bytes)]
            pairs.append((found.row_scale_inv, expected.row_scale_inv))
        elif te_on_cpu.has_native_tn() and self.recipe in ("delayed", "current"):
            assert found.column_bytes is None  # rows serve
            pairs = [(found.row_bytes, expected.row_bytes)]
        else:
            pairs = [(found.column_bytes, expected.column_bytes)]
            pairs.append((found.column_scale_inv, expected.column_scale_inv))
        for ours, theirs in pairs:
            assert same(ours, theirs), f"{what} of {name}"
        self.looks[what] += 1


def train_watched(
    model: QuantisedStack,
    engine: fe.Engine,
    watch: Watch | None,
    num_steps: int = 2,
    num_micro: int = 2,
    lr: float = 0.1,
) -> list[float]:
    """SGD on this rank's data; the losses of all microbatches."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(num_steps):
        if watch is not None:
            watch.expect()
        for micro in range(num_micro):
            loss = model(*make_batch(2, 100 * step + 10 * micro + dist.get_rank()))
            if micro == num_micro - 1:
                loss.backward()
            else:
                with engine.no_sync():
                    loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.update_scales()
    return losses


def make_codec(
    recipe: str, dtype: torch.dtype = torch.bfloat16, *, keeps: bool = False
) -> TransformerEngineCodec:
    load()
    found = next(each for each in codec_module.RECIPES if each.name == recipe)
    return TransformerEngineCodec(codec_module._load("weight"), found, dtype, keeps)
