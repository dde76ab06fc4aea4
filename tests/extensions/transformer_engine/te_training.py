"""Training with Transformer Engine's weights. :class:`Watch` compares the bytes and scales of a
sharded model's weights with the reference's whenever a module is about to multiply with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine import quantized_codec as codec_module
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import (
    QuantisedBlock,
    QuantisedLinear,
    QuantisedStack,
    encodings,
    load,
)
from tests.extensions.transformer_engine.te_reference import Quantised, quantise
from tests.scenario import Run, Scenario

FEATURES = 7
CUT = "optim_grads_params"
LEVELS = ("no_shard", "optim", "optim_grads", CUT)


def counting(owner: Any, name: str) -> Any:
    """A context that counts calls of ``owner.name`` in ``call_count``."""
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def make_stack(recipe: str, num_blocks: int = 2, seed: int = 1) -> QuantisedStack:
    """A small stack: MXFP8's blocks allow smaller weights than blocks of 128 x 128."""
    torch.manual_seed(seed)
    dim, hidden = (32, 96) if recipe == "mxfp8" else (96, 160)
    return QuantisedStack(recipe, num_blocks=num_blocks, dim=dim, hidden=hidden, features=FEATURES)


def make_batch(rows: int, seed: int) -> tuple[Tensor]:
    return (torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed)),)


def make_codec(recipe: str) -> TransformerEngineCodec:
    load()
    found = next(each for each in codec_module.RECIPES if each.name == recipe)
    return TransformerEngineCodec(codec_module._load("weight"), found, torch.bfloat16, False)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }


def scenario_of(recipe: str, num_blocks: int = 2, **changes: Any) -> Scenario:
    """SGD on a stack, without clipping, since levels sum norms in different orders."""
    made = {"model": partial(make_stack, recipe, num_blocks), "batch": make_batch, "steps": 3}
    return Scenario(**{**made, "max_norm": math.inf, **changes})


class Bent(QuantisedStack):
    """Calls its blocks in an order of its own, ``span`` of them in one checkpoint."""

    order: tuple[int, ...] = (0, 1, 2, 3)
    span = 0
    reentrant = False

    def run_blocks(self, y: Tensor) -> Tensor:
        size = max(self.span, 1)
        for start in range(0, len(self.order), size):
            several = nn.Sequential(*(self.blocks[i] for i in self.order[start : start + size]))
            y = checkpoint(several, y, use_reentrant=self.reentrant) if self.span else several(y)
        return y


def bent(recipe: str, **habits: Any) -> QuantisedStack:
    model: Any = make_stack(recipe, num_blocks=4)
    model.__class__ = Bent
    vars(model).update(habits)
    return model


class PartlyRecomputed(QuantisedBlock):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, self.norm(x), use_reentrant=self.reentrant)

    def inside(self, y: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(y)))


def partly_recomputed(recipe: str, reentrant: bool = False) -> QuantisedStack:
    model: Any = make_stack(recipe, num_blocks=4)
    for block in model.blocks:
        block.__class__, block.reentrant = PartlyRecomputed, reentrant
    return model


class Watch:
    """Compares bytes and scales with the reference's whenever a quantised layer computes: "rows" in
    its forward, "columns" when the gradient of its output is there. ``looks`` counts these."""

    def __init__(self, model: nn.Module, engine: fe.Engine) -> None:
        self.model, self.engine = model, engine
        self.layers = quantised_layers(model)
        self.looks: Counter[str] = Counter()
        self.expected: dict[str, Quantised] = {}
        self._used: dict[str, Any] = {}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(partial(self._called, name))
            layer.register_forward_hook(partial(self._returned, name))

    def expect(self, mains: dict[str, Tensor] | None = None) -> None:
        """Expect the bytes of ``mains``, full main weights. None: gather the current ones.
        Delayed scaling's scales are those of the model."""
        mains = self.engine.full_state_dict() if mains is None else mains
        for name, layer in self.layers.items():
            scale = None
            if layer.recipe == "delayed":
                scale = layer.fp8_meta["scaling_fwd"].scale[te_on_cpu.WEIGHT].item()
            self.expected[name] = quantise(mains[name], layer.recipe, torch.bfloat16, scale)

    def train(self, scenario: Scenario, *, num_forwards: float | None = 1) -> Run:
        """Train, and check the number of forwards of each layer per backward. None: any number."""
        before, looks = scenario.before_step, self.looks.copy()

        def before_step(model: Any, number: int) -> None:
            if number:
                model.update_scales()
            self.expect()
            before(model, number)

        run = scenario.but(before_step=before_step).train(self.model, self.engine)
        self.model.update_scales()
        count = sum(map(len, scenario.data())) * len(self.layers)
        if num_forwards is not None:
            assert self.looks - looks == {"rows": count * num_forwards, "columns": count}
        return run

    @property
    def weights(self) -> dict[str, Any]:
        return {
            record.name: full
            for buffer in self.engine.buffers
            for record, full in zip(buffer.records, buffer.full_params, strict=True)
            if record.name in self.layers
        }

    def scales(self) -> dict[str, Tensor]:
        """All present scales, without their padding, which is never written."""
        return {
            f"{name} {field}": scale.clone()
            for name, weight in self.weights.items()
            for field in ("row_scale_inv", "column_scale_inv")
            if (scale := getattr(encodings(weight), field)) is not None
        }

    def _called(self, name: str, layer: Any, args: Any) -> None:
        self._used[name] = layer.weight  # autograd saves it: backward uses this one
        self._look(name, "rows")

    def _returned(self, name: str, layer: Any, args: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(lambda grad: self._look(name, "columns"))

    def _look(self, name: str, what: str) -> None:
        found, expected = encodings(self._used[name]), self.expected[name]
        start = 0 if what == "rows" else 2
        if te_on_cpu.has_native_tn() and self.layers[name].recipe in ("delayed", "current"):
            assert found.column_bytes is None
            start = 0  # backward reads rows, too
        for ours, theirs in zip(found[start : start + 2], expected[start : start + 2], strict=True):
            assert ours is not None, f"{what} of {name}"
            assert torch.equal(ours, theirs), f"{what} of {name}"
        self.looks[what] += 1


def watched(scenario: Scenario, *, num_forwards: float | None = 1) -> tuple[Run, Watch]:
    watch = Watch(*scenario.sharded_model())
    return watch.train(scenario, num_forwards=num_forwards), watch


def assert_all_same(runs: Sequence[Run], tolerance: float = 0.0) -> None:
    """Losses, gradients and weights are equal. Norms, summed in another order, are not compared.

    Args:
        runs: The runs.
        tolerance: Largest error relative to the largest element of a tensor.
    """
    expected = runs[0].steps
    for run in runs[1:]:
        steps = [replace(s, norm=o.norm) for s, o in zip(run.steps, expected, strict=True)]
        lines = reference.differences(steps, expected, tolerance)
        assert not lines, "\n".join(lines[:8])
