"""fp8 gathers in training: what modules compute with is bit for bit an unsplit quantisation of the
true main weights, in every forward and backward, at every level, and after a checkpoint."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.codecs import Float8, Float8Codec
from tests import reference
from tests.extensions.fp8.float8_reference import fp8_bytes, quantised, reference_grid
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough

NUM_STEPS, NUM_MICROBATCHES = 3, 2
# Matrices of 131 columns and up to 393 rows: blocks at both edges are cut, and no shard of four
# ranks ends where a row does.
WIDTH = 131
CASES = [
    (Float8("tensor"), torch.float32, reference.adamw),
    (Float8("row"), torch.bfloat16, reference.sgd),
    (Float8("block"), torch.float32, reference.adamw),
    (Float8("block", power_of_two_scales=True), torch.bfloat16, reference.sgd),
]


class Watch:
    """Compares the parameters that modules compute with, whenever they do.

    Attributes:
        expected: by name, set before each step.
        wrong: the differences: step, moment and name.
        looks: how often each (moment, name) was compared.
        places: all of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self.expected: dict[str, Tensor] = {}
        self.wrong: list[str] = []
        self.looks: Counter[tuple[str, str]] = Counter()
        self.places: set[tuple[str, str]] = set()
        self._used: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            own = [(f"{path}.{name}", name) for name, _ in module.named_parameters(recurse=False)]
            if own:
                module.register_forward_pre_hook(self._forward(own))
                self.places |= {("forward", name) for name, _ in own}
            if own and not isinstance(module, nn.Embedding):  # whose backward reads no weights
                module.register_forward_hook(self._backward(own))
                self.places |= {("backward", name) for name, _ in own}

    def _forward(self, own: list[tuple[str, str]]) -> Any:
        def look(module: nn.Module, args: Any) -> None:
            for name, attribute in own:
                self._used[name] = getattr(module, attribute)
                self._compare("forward", name)

        return look

    def _backward(self, own: list[tuple[str, str]]) -> Any:
        def look(grad: Tensor) -> None:
            for name, _ in own:
                # What forward has used and autograd has saved, whatever the module holds now.
                self._compare("backward", name)

        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            # The module's backward begins when its output's gradient is there.
            output.register_hook(look)

        return leave

    def _compare(self, moment: str, name: str) -> None:
        used, expected = self._used[name].detach(), self.expected[name]
        self.looks[moment, name] += 1
        if used.dtype != expected.dtype or not torch.equal(used, expected):
            self.wrong.append(f"{moment} of {name}")


def true_weights(model: nn.Module, engine: fe.Engine) -> dict[str, Tensor]:
    """Main weights by all names of the parameters. A collective."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: engine.full_tensor(name) for name in names}


def computed_with(
    weights: dict[str, Tensor], options: Float8, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What modules must see of main weights."""
    return {
        name: (quantised(weight, options) if weight.ndim >= 2 else weight).to(dtype)
        for name, weight in weights.items()
    }


def fp8_buffers(engine: fe.Engine) -> Iterator[tuple[list[str], Tensor]]:
    """Names of the parameters, and the codec's scales, of each buffer that travels as fp8."""
    for buffer in engine.buffers:
        codec = buffer.weights.codec
        if isinstance(codec, Float8Codec):
            yield [record.name for record in buffer.records], codec.scales


def wrong_scales(engine: fe.Engine, weights: dict[str, Tensor], options: Float8) -> list[str]:
    """Buffers whose scales are not those of the whole weights, or not the same on all ranks."""
    lines = []
    for names, scales in fp8_buffers(engine):
        expected = torch.cat([reference_grid(weights[name], options) for name in names])
        if not torch.equal(scales, expected):
            lines.append(f"scales of {names}")
        everywhere = [torch.empty_like(scales) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, scales)
        if not all(torch.equal(each, scales) for each in everywhere):
            lines.append(f"ranks differ in the scales of {names}")
    return lines


def make_sharded(
    inner: str, outer: str, shape: tuple[int, ...], options: Float8, dtype: torch.dtype
) -> tuple[nn.Module, fe.Engine]:
    """A transformer whose matrices travel as fp8."""
    model = Transformer(num_blocks=2, tied=True, dim=WIDTH)
    engine = fe.shard(
        model,
        mesh_of(*shape),
        inner,
        outer,
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype),
        codec_rules=[options],
    )
    return model, engine


def train_step(model: nn.Module, engine: fe.Engine, step: list[list[reference.Batch]]) -> None:
    """Forwards and backwards of one step, on this rank's part of the data."""
    rank = dist.get_rank()
    for parts in step[:-1]:
        with engine.no_sync():
            (model(*parts[rank]) / len(step)).backward()
    (model(*step[-1][rank]) / len(step)).backward()


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS)
@on_ranks(4)
def test_modules_compute_with_the_quantised_main_weights_in_every_forward_and_backward(
    inner: str, outer: str
) -> None:
    data = reference.make_data(token_batch, NUM_STEPS, NUM_MICROBATCHES, 4)
    for options, dtype, make_optimizer in CASES:
        torch.manual_seed(0)
        model, engine = make_sharded(inner, outer, (2, 2), options, dtype)
        optimizer = make_optimizer(model.parameters())
        watch = Watch(model)
        wrong = []
        for step in data:
            weights = true_weights(model, engine)
            watch.expected = computed_with(weights, options, dtype)
            train_step(model, engine, step)
            wrong += wrong_scales(engine, weights, options)
            optimizer.step()
            optimizer.zero_grad()
            after = true_weights(model, engine)
            assert not any(torch.equal(after[name], weights[name]) for name in weights)
        assert not watch.wrong + wrong, (options, (watch.wrong + wrong)[:5])
        times = NUM_STEPS * NUM_MICROBATCHES
        assert {name for _, name in watch.places} == set(watch.expected)
        assert watch.looks == dict.fromkeys(watch.places, times)


@on_ranks(2)
def test_the_comparison_sees_weights_of_the_step_before_and_other_scales() -> None:
    options = Float8("row")
    model, engine = make_sharded("optim_grads_params", "no_shard", (2,), options, torch.float32)
    optimizer = reference.sgd(model.parameters())
    watch = Watch(model)
    step = reference.make_data(token_batch, 1, 1, 2)[0]
    weights = true_weights(model, engine)
    watch.expected = computed_with(weights, options, torch.float32)
    for number in range(2):  # the second time, the weights expected are old
        train_step(model, engine, step)
        optimizer.step()
        optimizer.zero_grad()
        missed = watch.places if number else set()
        assert set(watch.wrong) == {f"{moment} of {name}" for moment, name in missed}
    assert wrong_scales(engine, weights, options)

    watch.wrong.clear()
    weights = true_weights(model, engine)
    watch.expected = computed_with(weights, Float8("block"), torch.float32)
    train_step(model, engine, step)
    assert not wrong_scales(engine, weights, options)
    dropped = {line.split()[-1] for line in watch.wrong}
    assert dropped == {name for name, weight in weights.items() if weight.ndim >= 2}
    for _, scales in fp8_buffers(engine):
        scales[-1] *= 1 + dist.get_rank()
    assert any(line.startswith("ranks differ") for line in wrong_scales(engine, weights, options))


# --- checkpoints ---

SAVED_AT = ("optim_grads_params", "optim", (2, 2))
LOADED_AT: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {
    1: [("no_shard", "no_shard", (1,)), ("optim_grads_params", "no_shard", (1,))],
    2: [("optim", "no_shard", (2,)), ("optim_grads_params", "optim_grads_params", (2, 1))],
    4: [
        ("optim_grads", "optim_grads", (2, 2)),
        ("optim_grads_params", "no_shard", (4,)),
        ("no_shard", "no_shard", (2, 2)),
    ],
}
OPTIONS = [options for options, _, _ in CASES]


class Seen(Watch):
    """Keeps what modules compute with in a forward, by name."""

    def _compare(self, moment: str, name: str) -> None:
        if moment == "forward":
            self.expected[name] = self._used[name].detach().clone()


def quantised_state(model: nn.Module, engine: fe.Engine, options: Float8) -> dict[str, Tensor]:
    """Everything that quantising leaves: bytes of whole main weights, each parameter's scales, and
    what a forward computes with. A collective."""
    seen = Seen(model)
    model(*token_batch(2, dist.get_rank()))
    weights = true_weights(model, engine)
    state = {f"seen {name}": used for name, used in seen.expected.items()}
    state |= {f"main {name}": weight for name, weight in weights.items()}
    for names, scales in fp8_buffers(engine):
        grids = [reference_grid(weights[name], options) for name in names]
        parts = scales.split([grid.numel() for grid in grids])
        for name, part in zip(names, parts, strict=True):
            state[f"scales {name}"] = part.clone()
            state[f"bytes {name}"] = fp8_bytes(weights[name], options)
    return state


def train_and_save(folder: str) -> list[dict[str, Tensor]]:
    """Two steps and a checkpoint for each of ``OPTIONS``; what quantising leaves."""
    data = reference.make_data(token_batch, 2, NUM_MICROBATCHES, 4)
    found = []
    for number, options in enumerate(OPTIONS):
        torch.manual_seed(1)
        model, engine = make_sharded(*SAVED_AT, options, torch.float32)
        optimizer = reference.adamw(model.parameters())
        for step in data:
            train_step(model, engine, step)
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(f"{folder}/{number}", engine, optimizer)
        found.append(quantised_state(model, engine, options))
    return found


def load_and_compare(folder: str, expected: list[dict[str, Tensor]]) -> list[str]:
    """What differs after loading, at each pair of this world size."""
    lines = []
    for (number, options), at in itertools.product(
        enumerate(OPTIONS), LOADED_AT[dist.get_world_size()]
    ):
        torch.manual_seed(2)
        model, engine = make_sharded(*at, options, torch.float32)
        # Encodings from before the load must not be used after it.
        model(*token_batch(2, dist.get_rank()))
        load_checkpoint(f"{folder}/{number}", engine, reference.adamw(model.parameters()))
        found = quantised_state(model, engine, options)
        assert found.keys() == expected[number].keys()
        lines += [
            f"{options} {at}: {key}"
            for key, value in found.items()
            if not torch.equal(value, expected[number][key])
        ]
    return lines


def test_any_ranks_and_level_quantise_a_loaded_checkpoint_to_the_same_bytes(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(train_and_save, str(tmp_path))[0]
    kinds = Counter(key.split()[0] for key in expected[0])
    # Of two blocks' four matrices, and the embedding that is the head's weight, too.
    assert kinds["scales"] == kinds["bytes"] == 9
    assert kinds["seen"] == kinds["main"] > 10
    assert not torch.equal(expected[0]["seen head.weight"], expected[1]["seen head.weight"])
    for world_size in LOADED_AT:
        wrong = ranks.run(
            load_and_compare, str(tmp_path), expected, world_size=world_size, timeout=120
        )
        assert not any(wrong), wrong[0][:10]
