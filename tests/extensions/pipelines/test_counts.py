"""Collectives and staging in a step of a pipeline, as expected from the levels."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import reference
from tests.extensions.pipelines import scene
from tests.messages import GATHERS, REDUCTIONS, Messages
from tests.pool import on_ranks

# Of the four microbatches of a stage, by schedule and pipeline rank: from how many forwards it
# goes straight into their own backward, of which the last unit then stays full.
TURNS = {
    "GPipe": (1, 1),  # F0 F1 F2 F3 B0 ..: of the last forward, for whichever backward follows
    "1F1B": (3, 4),  # F0 F1 B0 F2 B1 F3 B2 B3, and F0 B0 F1 B1 ..
}


def counted(pipeline: scene.Pipeline) -> Counter[str]:
    """Of the second step: in the first one torch learns shapes, and the engine its order."""
    optimizers = [reference.sgd(module.parameters()) for module in pipeline.modules]
    messages = Messages()
    for number, (x, y) in zip(range(2), scene.batches(2), strict=False):
        with messages.counting():
            pipeline.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            messages.operations.clear()
    found = messages.operations
    return Counter({k: v for k, v in found.items() if k.startswith(GATHERS + REDUCTIONS)})


@pytest.mark.parametrize("schedule", scene.SINGLE)
@on_ranks(4)
def test_collectives_of_whole_backwards(schedule: str) -> None:
    num_micro = scene.NUM_MICROBATCHES
    # GPipe gathers as often as 1F1B, but for the turns.
    for level in scene.LEVELS if schedule == "1F1B" else scene.LEVELS[::3]:
        pipeline = scene.make_pipeline(schedule, level)
        (engine,) = pipeline.engines
        found = counted(pipeline)
        wanted: Counter[str] = Counter()
        for unit in engine.units:
            over = f"of {unit.label} over the inner axis"
            num_stayed = TURNS[schedule][pipeline.indices[0]] if unit is engine.units[-1] else 0
            if unit is engine.units[0]:
                # It frames all others: the last in forward, the first in backward.
                num_stayed = num_micro
            if unit.reshards:
                wanted[f"all-gather {over}"] = 2 * num_micro - num_stayed
            elif unit.needs_refresh:
                wanted[f"all-gather {over}"] = 1
            reduce = "reduce-scatter" if unit.needs_refresh or unit.reshards else "all-reduce"
            cut = unit.buffers[0].spec.grad_depth > 0
            wanted[f"{reduce} {over}"] = num_micro if cut else 1
        assert found == wanted, f"{level} {pipeline.indices} {found - wanted} {wanted - found}"


@pytest.mark.parametrize(
    "schedule",
    scene.marked(["InterleavedZeroBubble", "ZBVZeroBubble"], default=["InterleavedZeroBubble"]),
)
@on_ranks(4)
def test_collectives_of_split_backwards(schedule: str) -> None:
    num_micro = scene.NUM_MICROBATCHES
    for level in scene.LEVELS:
        pipeline = scene.make_pipeline(schedule, level)
        found = counted(pipeline)
        gathers = {k: v for k, v in found.items() if k.startswith(GATHERS)}
        reductions = {k: v for k, v in found.items() if k.startswith(REDUCTIONS)}
        unit = pipeline.engines[0].units[1]
        # Two stages of a rank have units of the same names.
        per_step = num_micro if unit.buffers[0].spec.grad_depth else 1
        assert set(reductions.values()) == {2 * per_step}, level
        if unit.reshards:
            assert max(gathers.values()) <= 2 * 3 * num_micro, gathers
        else:
            assert set(gathers.values()) <= {2}, level


@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble"])
@on_ranks(4)
def test_no_more_is_staged_than_where_each_forward_has_its_backward_at_once(
    schedule: str, level: str
) -> None:
    pipeline = scene.make_pipeline(schedule, level, what="deep")
    x, y = next(scene.batches(2))
    for engine, module in zip(pipeline.engines, pipeline.modules, strict=True):
        for _ in range(2):
            engine.peak_memory_bytes(reset=True)
            module(x[0]).sum().backward()
        at_once = engine.peak_memory_bytes(reset=True)["staging"]
        assert at_once < 0.6 * sum(4 * unit.num_staged for unit in engine.units)
    pipeline.step(x, y)
    for engine in pipeline.engines:
        assert engine.peak_memory_bytes()["staging"] <= at_once
