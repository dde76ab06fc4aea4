"""The fp8 sections of ``gpu.py``: the native codec on its GPT, and Transformer Engine's layers.

A single rank has no gathers. Gathered bytes are therefore those of the planner's formulas, for
``RANKS`` ranks, and the step time shows the cost of encoding and decoding.

Transformer Engine is compared with two baselines. "bf16" computes in bf16. "<recipe>, bf16 weights"
computes in fp8 and quantizes bf16 weights in every forward; it is the baseline for fp8 weights.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
from _gpu_models import (
    BF16,
    LEVELS,
    StepParts,
    make_engine,
    model_config,
    on_cuda,
    the_device,
    update_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.planner.estimates import estimate
from gpt import GPT

RANKS = 8
POLICY = fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
NATIVE = {"bf16": (), "row": (fe.Float8(),), "block": (fe.Float8(granularity="block"),)}
# The minimum compute capability, and the first one that is not supported.
RECIPES = {
    "delayed": ("DelayedScaling", (8, 9), (99, 0)),
    "current": ("Float8CurrentScaling", (8, 9), (99, 0)),
    "block": ("Float8BlockScaling", (9, 0), (10, 0)),
    "mxfp8": ("MXFP8BlockScaling", (10, 0), (12, 0)),
}


@dataclass(frozen=True)
class Contender:
    """One engine of a group of engines that are measured together.

    Attributes:
        make: constructs it.
        bases: names of its baselines.
        gathered: bytes that a rank of ``RANKS`` sends in the gathers of a step.
    """

    make: Callable[[], StepParts]
    bases: tuple[str, ...]
    gathered: Callable[[], int]


Groups = Iterator[dict[str, Contender]]


def gathered_bytes(model: nn.Module, level: str, rules: Any = ()) -> int:
    """Bytes of gathers by the planner's formulas. Weights are frozen, to exclude reductions."""
    model.requires_grad_(False)
    try:
        found = estimate(
            model,
            world_size=RANKS,
            strategy=level,
            mp_policy=POLICY,
            extensions=[fe.CodecRules(rules)],
        )
    finally:
        model.requires_grad_(True)
    return found.inner_traffic_bytes


# The native codec.


def native_groups(mesh: DeviceMesh) -> tuple[dict[str, Any], Groups]:
    """Returns the model's sizes, and for each level a group of engines: one for each ``NATIVE``."""
    config, num_sequences = model_config()
    if on_cuda():
        # Half of the layers, to save time.
        config = dataclasses.replace(config, num_layers=max(2, config.num_layers // 2))
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape, device=the_device())
    batch = (tokens, tokens.roll(-1, 1))

    def gathered(level: str, rules: Any) -> int:
        with torch.device("meta"):
            return gathered_bytes(GPT(config), level, rules)

    def groups() -> Groups:
        for level in LEVELS:
            yield {
                f"{level}, {name}": Contender(
                    partial(make_engine, config, batch, mesh, level, rules),
                    (f"{level}, bf16",),
                    partial(gathered, level, rules),
                )
                for name, rules in NATIVE.items()
            }

    return vars(config) | {"sequences": num_sequences}, groups()


# Transformer Engine.


def why_not() -> str:
    """The reason why Transformer Engine cannot be measured; "" if it can."""
    if not on_cuda():
        return "needs a CUDA device; found none"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"needs the extra fsdp_engine[transformer-engine]; found: {error}"
    return ""


class LayerStack(nn.Module):
    """Transformer Engine's layers, causal, without dropout, with a loss that depends on the
    input."""

    def __init__(self, num_layers: int, width: int, num_heads: int) -> None:
        te = importlib.import_module("transformer_engine.pytorch")
        super().__init__()
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width,
                4 * width,
                num_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                params_dtype=BF16,
                device=the_device(),
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (sequence, batch, width)."""
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y.float() - x.float()).square().mean()


def transformer_engine_groups(mesh: DeviceMesh) -> tuple[dict[str, Any], Groups]:
    """Returns the stack's sizes, and for each level a group of engines: bf16, and each recipe that
    the device supports, with bf16 weights and with fp8 weights."""
    config, num_sequences = model_config()
    layers = max(2, config.num_layers // 2)
    sizes = {
        "num_layers": layers,
        "width": config.width,
        "num_heads": config.num_heads,
        "sequence_length": config.sequence_length,
        "sequences": num_sequences,
    }
    shape = (config.sequence_length, num_sequences, config.width)
    x = torch.randn(shape, dtype=BF16, device=the_device())
    found = torch.cuda.get_device_capability()
    recipes = [name for name, (_, least, below) in RECIPES.items() if least <= found < below]

    def model(recipe: str | None) -> nn.Module:
        te = importlib.import_module("transformer_engine.pytorch")
        torch.manual_seed(0)
        with te.quantized_model_init(
            enabled=recipe is not None,
            recipe=make_recipe(recipe),
            preserve_high_precision_init_val=True,
        ):
            return LayerStack(layers, config.width, config.num_heads)

    def gathered(level: str, recipe: str | None) -> int:
        return gathered_bytes(model(recipe), level)

    def make(level: str, computes: str | None, weights: str | None) -> StepParts:
        built, recipe = model(weights), make_recipe(computes)
        fe.shard(built, mesh=mesh, strategy=level, mp_policy=POLICY)
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4, fused=True)
        fe.shard_optimizer(optimizer)
        return forward_backward_in(built, x, recipe), update_of(optimizer)

    def groups() -> Groups:
        for level in LEVELS:
            bf16 = f"{level}, bf16"
            group = {
                bf16: Contender(
                    partial(make, level, None, None), (), partial(gathered, level, None)
                )
            }
            for recipe in recipes:
                wide = f"{level}, {recipe}, bf16 weights"
                group[wide] = Contender(
                    partial(make, level, recipe, None), (bf16,), partial(gathered, level, None)
                )
                group[f"{level}, {recipe}, fp8 weights"] = Contender(
                    partial(make, level, recipe, recipe),
                    (bf16, wide),
                    partial(gathered, level, recipe),
                )
            yield group

    return sizes, groups()


def make_recipe(name: str | None) -> Any:
    """Transformer Engine's recipe object, or None."""
    if name is None:
        return None
    common = importlib.import_module("transformer_engine.common.recipe")
    return getattr(common, RECIPES[name][0])()


def forward_backward_in(model: nn.Module, x: Tensor, recipe: Any) -> Callable[[], Tensor]:
    """Forward and backward under ``autocast`` with ``recipe``, if there is one. Delayed scaling
    updates the scales of all models of a process at once; here each model has its own state."""
    te = importlib.import_module("transformer_engine.pytorch")
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    state = quantization.FP8GlobalState()

    def run() -> Tensor:
        quantization.FP8GlobalStateManager.quantization_state = state
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss: Tensor = model(x)
        loss.backward()
        return loss.detach()

    return run


# The table.


def report(title: str, found: dict[str, Any]) -> None:
    """Print the table of a section."""
    engines = found.get("engines", {})
    steps = {n: e["milliseconds"]["step"] for n, e in engines.items() if "milliseconds" in e}
    rows = []
    for engine, facts in engines.items():
        cells = [engine, "failed"]
        if engine in steps:
            low, middle, high = harness.quartiles(steps[engine])
            cells[1] = f"{middle:.1f} ({low:.1f}-{high:.1f})"
        bases = [b for b in facts.get("bases", ()) if b != engine and engine in steps]
        for base in (*bases, None, None)[:2]:
            known = base in steps and len(steps[base]) == len(steps[engine])
            cells.append(harness.show_ratio(harness.ratios(steps, engine, base)) if known else "-")
        for key in ("rest bytes", "peak bytes"):
            cells.append(f"{facts[key] / 2**30:.2f}" if key in facts else "-")
        gathered = facts.get("gathered bytes")
        cells.append("-" if gathered is None else f"{gathered / 2**20:.2f}")
        base = engines.get(f"{engine.split(',')[0]}, bf16", {}).get("gathered bytes")
        cells.append(f"{gathered / base:.3f}" if gathered and base else "-")
        if facts.get("losses"):
            cells.append(f"{facts['losses'][-1]:.4f}")
        rows.append(cells)
    columns = ["step ms", "x bf16", "x bf16 weights", "rest GiB", "peak GiB"]
    columns += [f"gathered MiB, {found.get('gathering ranks', '?')} ranks", "x bf16", "3rd loss"]
    layers = found.get("config", {}).get("num_layers", "?")
    harness.print_table(f"{title}, {layers} layers", ["engine", *columns], rows)
