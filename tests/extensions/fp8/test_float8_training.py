"""fp8 gathers in training: modules compute with an unsharded quantisation of the main weights, bit
by bit, in every forward and backward, at every level; each change is encoded once."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.fp8 import Float8, Float8Codec
from tests import reference
from tests.extensions.fp8.float8_reference import quantised
from tests.extensions.transformer_engine.te_training import counting
from tests.models import Transformer
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.reference import OptimizerMaker
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


class Watch:
    """Compares the parameters that modules compute with, whenever they do, with ``expected``."""

    def __init__(
        self, model: nn.Module, engine: fe.Engine, options: Float8, dtype: torch.dtype
    ) -> None:
        self.engine, self.options, self.dtype = engine, options, dtype
        self.expected: dict[str, Tensor] = {}
        self.looks: Counter[tuple[str, str]] = Counter()
        self.places: set[tuple[str, str]] = set()
        for path, module in model.named_modules():
            for key, _ in module.named_parameters(recurse=False):
                name = f"{path}.{key}"
                self.places.add(("forward", name))
                module.register_forward_pre_hook(partial(self._look, "forward", name, key))
                if not isinstance(module, nn.Embedding):  # whose backward reads no weights
                    self.places.add(("backward", name))
                    module.register_forward_hook(partial(self._returned, name, key))

    def expect(self, model: Any = None, step: int = 0) -> None:
        """Expect the quantised values of the present main weights. A collective."""
        for name in sorted({name for _, name in self.places}):
            weight = self.engine.full_tensor(name)
            seen = quantised(weight, self.options) if weight.ndim >= 2 else weight
            self.expected[name] = seen.to(self.dtype)

    def _returned(self, name: str, key: str, module: nn.Module, args: Any, output: Tensor) -> None:
        # Autograd saves the weight, whatever the module has in backward, which begins when the
        # output's gradient is there.
        weight = getattr(module, key).detach()
        output.register_hook(lambda grad: self._compare("backward", name, weight))

    def _look(self, moment: str, name: str, key: str, module: nn.Module, args: Any) -> None:
        self._compare(moment, name, getattr(module, key))

    def _compare(self, moment: str, name: str, used: Tensor) -> None:
        self.looks[moment, name] += 1
        assert used.dtype == self.expected[name].dtype
        assert torch.equal(used, self.expected[name]), f"{moment} of {name}"


def watched(
    pair: tuple[str, str], options: Float8, dtype: torch.dtype, optimizer: OptimizerMaker
) -> tuple[Scenario, Watch]:
    """A transformer whose matrices are gathered as fp8."""
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    scenario = Scenario(
        model=partial(Transformer, 2, True, WIDTH),
        pair=pair,
        mesh=mesh_of(2, 2),
        options={"mp_policy": policy, "codec_rules": [options]},
        optimizer=optimizer,
        steps=STEPS,
        microbatches=MICROBATCHES,
    )
    model, engine = scenario.sharded_model()
    return scenario, Watch(model, engine, options, dtype)


@pytest.mark.parametrize("pair", FEW_PAIRS)
@on_ranks(4)
def test_modules_compute_with_the_quantised_main_weights_in_every_forward_and_backward(
    pair: tuple[str, str],
) -> None:
    for case in CASES:
        scenario, watch = watched(pair, *case)
        engine = watch.engine
        with counting(Float8Codec, "encode") as encode:
            run = scenario.but(before_step=watch.expect).train(engine.model, engine)
        assert watch.looks == dict.fromkeys(watch.places, STEPS * MICROBATCHES)
        codecs = [buffer.weights.codec for buffer in engine.buffers]
        num_codecs = sum(isinstance(each, Float8Codec) for each in codecs)
        assert encode.call_count == STEPS * num_codecs > 0
        for one, other in itertools.pairwise(step.weights for step in run.steps):
            assert not any(torch.equal(one[name], other[name]) for name in one)


@on_ranks(4)
def test_the_comparison_sees_weights_of_the_step_before() -> None:
    scenario, watch = watched(FEW_PAIRS[-1], *CASES[1])
    watch.expect()
    with pytest.raises(AssertionError, match="forward of"):
        scenario.train(watch.engine.model, watch.engine)
