"""fp8 gathers in training: modules compute with an unsharded quantisation of the main weights, bit
by bit, in every forward and backward, at every level, and after a checkpoint; each change is
encoded once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.extensions.fp8 import Float8, Float8Codec
from tests import reference
from tests.extensions.fp8.float8_reference import quantised, reference_grid
from tests.extensions.transformer_engine.te_training import counting
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.scenario import Scenario
from tests.training import mesh_of

pytestmark = pytest.mark.thorough

STEPS, MICROBATCHES = 3, 2
# Matrices of 131 columns and up to 393 rows: blocks at both edges are cut, and no shard of four
# ranks ends where a row does.
WIDTH = 131
CASES = [
    (Float8("tensor"), torch.float32, reference.adamw),
    (Float8("row"), torch.bfloat16, reference.sgd),
    (Float8("block"), torch.float32, reference.adamw),
    (Float8("block", power_of_two_scales=True), torch.bfloat16, reference.sgd),
]
At = tuple[str, str, tuple[int, ...]]  # inner and outer level, mesh


def scenario_of(
    options: Float8, at: At, dtype: torch.dtype = torch.float32, **more: Any
) -> Scenario:
    """A transformer whose matrices are gathered as fp8."""
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    return Scenario(
        model=partial(Transformer, 2, True, WIDTH),
        pair=at[:2],
        mesh=mesh_of(*at[2]),
        options={"mp_policy": policy, "codec_rules": [options]},
        optimizer=more.pop("optimizer", reference.adamw),
        steps=STEPS,
        microbatches=MICROBATCHES,
        **more,
    )


class Watch:
    """Compares the parameters that modules compute with, whenever they do, and the scales.

    Attributes:
        weights: Main weights by all names of the parameters, at the last :meth:`expect`.
        expected: What modules must compute with, by name.
        used: What they computed with; before the first :meth:`expect`, copies.
        wrong: The differences.
        looks: How often each (moment, name) was compared.
        places: All of these.
    """

    def __init__(self, model: nn.Module, engine: fe.Engine, options: Float8) -> None:
        self.engine, self.options = engine, options
        self.weights: dict[str, Tensor] = {}
        self.expected: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}
        self.wrong: list[str] = []
        self.looks: Counter[tuple[str, str]] = Counter()
        self.places: set[tuple[str, str]] = set()
        for path, module in model.named_modules():
            own = [(f"{path}.{name}", name) for name, _ in module.named_parameters(recurse=False)]
            if own:
                module.register_forward_pre_hook(partial(self._called, own))
                self.places |= {("forward", name) for name, _ in own}
            if own and not isinstance(module, nn.Embedding):  # whose backward reads no weights
                module.register_forward_hook(partial(self._returned, own))
                self.places |= {("backward", name) for name, _ in own}
        self.names = {name for _, name in self.places}

    def expect(self, dtype: torch.dtype = torch.float32, options: Float8 | None = None) -> None:
        """Expect bytes of the present main weights. A collective."""
        self.weights = {name: self.engine.full_tensor(name) for name in self.names}
        options = options or self.options
        for name, weight in self.weights.items():
            seen = quantised(weight, options) if weight.ndim >= 2 else weight
            self.expected[name] = seen.to(dtype)

    def fp8_buffers(self) -> Iterator[tuple[list[str], Tensor]]:
        """Names of the parameters, and the codec's scales, of each buffer that is gathered as
        fp8."""
        for buffer in self.engine.buffers:
            codec = buffer.weights.codec
            if isinstance(codec, Float8Codec):
                yield [record.name for record in buffer.records], codec.scales

    def check_scales(self) -> list[str]:
        """Buffers whose scales are not those of the full weights, or not the same on all ranks."""
        lines = []
        for names, scales in self.fp8_buffers():
            grids = [reference_grid(self.weights[name], self.options) for name in names]
            if not torch.equal(scales, torch.cat(grids)):
                lines.append(f"scales of {names}")
            everywhere = [torch.empty_like(scales) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, scales)
            if not all(torch.equal(each, scales) for each in everywhere):
                lines.append(f"ranks differ in the scales of {names}")
        self.wrong += lines
        return lines

    def _called(self, own: list[tuple[str, str]], module: nn.Module, args: Any) -> None:
        for name, attribute in own:
            # Autograd saves it, whatever the module has in backward.
            used = getattr(module, attribute).detach()
            self.used[name] = used if self.expected else used.clone()  # its memory may be freed
        self._compare("forward", own)

    def _returned(self, own: Any, module: nn.Module, args: Any, output: Tensor) -> None:
        # The module's backward begins when its output's gradient is there.
        output.register_hook(lambda grad: self._compare("backward", own))

    def _compare(self, moment: str, own: list[tuple[str, str]]) -> None:
        for name, _ in own:
            used, expected = self.used[name], self.expected.get(name)
            self.looks[moment, name] += 1
            if expected is not None and not (
                used.dtype == expected.dtype and torch.equal(used, expected)
            ):
                self.wrong.append(f"{moment} of {name}")


@pytest.mark.parametrize("pair", FEW_PAIRS)
@on_ranks(4)
def test_modules_compute_with_the_quantised_main_weights_in_every_forward_and_backward(
    pair: tuple[str, str],
) -> None:
    for options, dtype, optimizer in CASES:
        scenario = scenario_of(options, (*pair, (2, 2)), dtype, optimizer=optimizer)
        model, engine = scenario.sharded_model()
        watch = Watch(model, engine, options)

        def loss_of(model: nn.Module, batch: reference.Batch, watch: Watch = watch) -> Tensor:
            loss: Tensor = model(*batch)
            watch.check_scales()
            return loss

        watching = scenario.but(
            before_step=lambda model, step, watch=watch, dtype=dtype: watch.expect(dtype),
            loss_of=loss_of,
        )
        with counting(Float8Codec, "encode") as encode:
            run = watching.train(model, engine)
        assert not watch.wrong, (options, watch.wrong[:5])
        assert watch.looks == dict.fromkeys(watch.places, STEPS * MICROBATCHES)
        assert encode.call_count == STEPS * len(list(watch.fp8_buffers()))
        for one, other in itertools.pairwise(step.weights for step in run.steps):
            assert not any(torch.equal(one[name], other[name]) for name in one)


@on_ranks(2)
def test_the_comparison_sees_weights_of_the_step_before_and_other_scales() -> None:
    scenario = scenario_of(Float8("row"), ("optim_grads_params", "no_shard", (2,)))
    scenario = scenario.but(steps=1, microbatches=1)
    model, engine = scenario.sharded_model()
    watch = Watch(model, engine, Float8("row"))
    watch.expect()
    for number in range(2):  # the second time, the weights expected are old
        scenario.train(model, engine)
        missed = watch.places if number else set()
        assert set(watch.wrong) == {f"{moment} of {name}" for moment, name in missed}
    assert watch.check_scales()

    watch.wrong.clear()
    watch.expect(options=Float8("block"))
    scenario.train(model, engine)
    assert not watch.check_scales()
    dropped = {line.split()[-1] for line in watch.wrong}
    assert dropped == {name for name, weight in watch.weights.items() if weight.ndim >= 2}
    for _, scales in watch.fp8_buffers():
        scales[-1] *= 1 + dist.get_rank()
    assert any(line.startswith("ranks differ") for line in watch.check_scales())


# --- checkpoints ---

SAVED_AT: At = ("optim_grads_params", "optim", (2, 2))
LOADED_AT: dict[int, list[At]] = {
    1: [("no_shard", "no_shard", (1,)), ("optim_grads_params", "no_shard", (1,))],
    2: [("optim", "no_shard", (2,)), ("optim_grads_params", "optim_grads_params", (2, 1))],
    4: [
        ("optim_grads", "optim_grads", (2, 2)),
        ("optim_grads_params", "no_shard", (4,)),
        ("no_shard", "no_shard", (2, 2)),
    ],
}
OPTIONS = [options for options, _, _ in CASES]


def train_and_save(folder: str) -> list[dict[str, Tensor]]:
    """Two steps and a checkpoint for each of ``OPTIONS``; main weights."""
    found = []
    for number, options in enumerate(OPTIONS):
        run = scenario_of(options, SAVED_AT).but(steps=2).sharded()
        save_checkpoint(f"{folder}/{number}", run.engine, run.optimizer)
        found.append(run.engine.full_state_dict())
    return found


def load_and_compare(folder: str, expected: list[dict[str, Tensor]]) -> None:
    """At each pair of levels for this number of ranks."""
    for (number, options), at in itertools.product(
        enumerate(OPTIONS), LOADED_AT[dist.get_world_size()]
    ):
        model, engine = scenario_of(options, at, seed=2).sharded_model()
        batch = token_batch(2, dist.get_rank())
        model(*batch)  # Its encodings must not be used after the load.
        load_checkpoint(f"{folder}/{number}", engine, reference.adamw(model.parameters()))
        watch = Watch(model, engine, options)
        watch.expect()
        model(*batch).backward()
        assert not watch.check_scales()
        assert not watch.wrong, (options, at, watch.wrong[:5])
        assert set(watch.looks) == watch.places
        for name, weight in engine.full_state_dict().items():
            assert torch.equal(weight, expected[number][name]), (options, at, name)


def test_any_ranks_and_level_quantise_a_loaded_checkpoint_to_the_same_bytes(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(train_and_save, str(tmp_path))[0]
    for world_size in LOADED_AT:
        ranks.run(load_and_compare, str(tmp_path), expected, world_size=world_size, timeout=120)
