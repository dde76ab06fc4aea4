"""When bytes of Transformer Engine's weights are encoded, gathered and transposed, and races."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.phased_unit import PhasedUnit
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from fsdp_engine.runtime.unit import BACKWARD, FORWARD, State
from fsdp_engine.strategies import Axis
from tests import reference
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import QuantisedStack
from tests.extensions.transformer_engine.te_training import (
    CUT,
    FEATURES,
    Watch,
    assert_all_same,
    bent,
    counting,
    make_batch,
    make_stack,
    partly_recomputed,
    scenario_of,
    watched,
)
from tests.messages import Messages
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import BUDGETS, config_of, mesh_of, traced

pytestmark = pytest.mark.thorough


def is_quantised(buffer: Any) -> bool:
    return isinstance(buffer.weights.codec, TransformerEngineCodec)


def count_micro(model: nn.Module, engine: Any, *, last: bool = True) -> Messages:
    messages = Messages()
    with messages.counting():
        loss = model(*make_batch(2, dist.get_rank()))
        if last:
            loss.backward()
        else:
            with engine.no_sync():
                loss.backward()
    return messages


def step_of(engine: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    engine.model.update_scales()


@on_ranks(2)
def test_forward_gathers_rows_and_backward_columns_of_half_the_bytes_of_bf16() -> None:
    for recipe, budget in itertools.product(("mxfp8", "block"), BUDGETS.values()):
        torch.manual_seed(0)
        model = QuantisedStack(recipe, dim=64, hidden=256, features=FEATURES)
        engine = fe.shard(model, units="blocks.*", config=config_of(budget))
        group = engine.mesh.inner.gather_group
        assert group is not None
        for step in range(2):
            messages = count_micro(model, engine)
            expected = 0
            for unit in engine.units:
                for buffer in unit.buffers:
                    # The last block and the root stay full, but MXFP8 gathers its other encoding.
                    stays = unit.index in (0, len(engine.units) - 1)
                    again = not stays or (is_quantised(buffer) and recipe == "mxfp8")
                    label = f"all-gather of {buffer.label}"
                    assert messages.operations[label] == 1 + again, (recipe, step, label)
                    itemsize = 1 if is_quantised(buffer) else 2
                    expected += (1 + again) * buffer.layout.numel * itemsize // 2
                    if is_quantised(buffer):
                        elements = sum(slot.numel for slot in buffer.layout.slots)
                        assert buffer.layout.numel <= 1.01 * elements
                        amaxes = sum(s.numel() for s in buffer.weights.codec.state)
                        expected += amaxes * (2 if recipe == "mxfp8" else 4)  # bf16, fp32
            assert messages.sent[group.group_name] == expected, (recipe, step)
            engine.zero_grad_buffer()
            engine.weights_changed()


@on_ranks(2)
def test_two_planes_are_full_while_they_are_encoded_and_one_at_any_other_time() -> None:
    model = make_stack("mxfp8", num_blocks=3)
    engine = fe.shard(model, units="blocks.*", config=config_of(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = 2 * sum(buffer.layout.numel for buffer in engine.units[0].buffers)
    block = engine.units[1]
    plain = 2 * sum(b.layout.numel for b in block.buffers if not is_quantised(b))
    (encoding,) = (b.layout.numel for b in block.buffers if is_quantised(b))
    for _ in range(2):
        for last in (False, True):
            engine.peak_memory_bytes(reset=True)
            count_micro(model, engine, last=last)
            encodings = 1 if last else 2
            assert engine.peak_memory_bytes()["full"] == root + plain + encodings * encoding
        step_of(engine, optimizer)
    # Half of each encoding persists on each rank.
    assert engine.memory_bytes()["model"] == 3 * 2 * encoding // 2


def recomputing(whole: bool, reentrant: bool = False) -> QuantisedStack:
    if whole:
        return bent("mxfp8", span=1, reentrant=reentrant)
    return partly_recomputed("mxfp8", reentrant)


def gathers_of(whole: bool) -> list[list[tuple[str, tuple[int, ...]]]]:
    """In each of three microbatches: (unit, encodings) of every gather that backward asks for."""
    model = recomputing(whole)
    engine = fe.shard(model, units="blocks.*", config=config_of(0))
    found: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    real = PhasedUnit.gather

    def gather(unit: PhasedUnit, phase: int, *args: Any) -> None:
        if unit.name:
            assert len(unit.split_weights) == 1
            held = unit.phases if unit.state is not State.SHARDED else 0
            encodings = enumerate((FORWARD, BACKWARD))
            missing = tuple(encoding for encoding, read in encodings if phase & ~held & read)
            found[-1].append((unit.name, missing))
        real(unit, phase, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhasedUnit, "gather", gather)
        for micro in range(3):
            loss = model(*make_batch(2, micro))
            found.append([])
            with engine.no_sync():
                loss.backward()
            found.append([])
    return found[1::2]


@pytest.mark.parametrize("whole", [False, True])
def test_a_unit_seen_to_be_recomputed_gathers_both_planes_from_then_on(
    ranks: Ranks, whole: bool
) -> None:
    first, *later = ranks.run(gathers_of, whole, world_size=2)[0]
    names = ["blocks.2", "blocks.1", "blocks.0"]
    # The last block's columns were requested at the end of its forward.
    assert first == [("blocks.3", (0,)), *((n, p) for n in names for p in ((1,), (0,)))]
    assert later == 2 * [[(name, (0, 1)) for name in names]]


@pytest.mark.parametrize("pair", FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_each_change_is_encoded_once_with_one_message_for_each_axis_that_cuts(
    pair: tuple[str, str],
) -> None:
    for recipe in ("current", "mxfp8"):
        model = make_stack(recipe)
        engine = fe.shard(model, mesh_of(2, 2), *pair)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_buffers = sum(is_quantised(buffer) for buffer in engine.buffers)
        assert num_buffers == len(model.blocks)
        with counting(TransformerEngineCodec, "encode") as encode:
            for step in range(3):
                total: Counter[Any] = Counter()
                for micro in range(3):
                    total += count_micro(model, engine, last=micro == 2).calls
                    assert encode.call_count == (step + 1) * num_buffers
                for axis, level in zip((Axis.INNER, Axis.OUTER), pair, strict=True):
                    group = engine.mesh.axis(axis).gather_group
                    assert group is not None
                    # Only amaxes are all-reduced in these groups: all-gathers count as sends.
                    expected = num_buffers if level != "no_shard" else 0
                    assert total[group.group_name, "allreduce_"] == expected, (recipe, axis)
                step_of(engine, optimizer)


# Races.


def train_traced(model: Any, engine: Any) -> None:
    scenario_of("", steps=2).train(model, engine)


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@pytest.mark.parametrize(
    ("inner", "outer"),
    [("no_shard", "no_shard"), ("optim", "optim"), (CUT, "no_shard"), (CUT, CUT)],
)
@on_ranks(4)
def test_the_schedule_has_no_race(inner: str, outer: str, recipe: str) -> None:
    for budget in BUDGETS.values():
        traced(
            partial(make_stack, recipe, 3),
            train_traced,
            mesh=mesh_of(2, 2),
            strategy=inner,
            outer_strategy=outer,
            config=config_of(budget),
        )


@on_ranks(2)
def test_recomputation_makes_no_race() -> None:
    for whole, reentrant in itertools.product((False, True), repeat=2):
        traced(partial(recomputing, whole, reentrant), train_traced)


def counting_transposes() -> Any:
    te_on_cpu.load()
    import transformer_engine_torch as tex

    return counting(tex, "fp8_transpose")


@pytest.mark.parametrize("pair", FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_transposes_are_never_stale_and_are_made_once_where_they_are_kept(
    pair: tuple[str, str],
) -> None:
    cuts = pair[0] == CUT
    for recipe, keeps in itertools.product(("delayed", "current", "block"), (False, True)):
        if not cuts and recipe == "delayed":
            continue
        config = fe.DistributedDataParallelConfig(
            fp8_param_gather=True, keep_fp8_transpose_cache=keeps
        )
        scenario = scenario_of(recipe, pair=pair, mesh=mesh_of(2, 2), options={"config": config})
        watch = Watch(*scenario.sharded_model())
        with counting_transposes() as transpose:
            watch.train(scenario)
        # For each backward, or after each step.
        times = 3 * 2 if cuts and not keeps else 3
        assert transpose.call_count == times * len(watch.layers), recipe
        for weight in watch.weights.values():
            has_columns = te_on_cpu.encodings(weight).column_bytes is not None
            assert has_columns == (keeps or not cuts), recipe


@on_ranks(2)
def test_where_rows_serve_backward_nothing_is_transposed_and_training_is_the_same() -> None:
    for recipe in ("delayed", "current"):
        scenarios = [scenario_of(recipe, pair=(level, "no_shard")) for level in ("optim", CUT)]
        runs = [watched(scenario)[0] for scenario in scenarios]
        with te_on_cpu.native_tn(), counting_transposes() as transpose:
            runs += [watched(scenario)[0] for scenario in scenarios]
        assert_all_same(runs)
        assert not transpose.called


@on_ranks(2)
def test_the_comparison_sees_a_stale_transpose_and_stale_bytes() -> None:
    config = fe.DistributedDataParallelConfig(fp8_param_gather=True, keep_fp8_transpose_cache=True)
    for level, what in itertools.product(("optim", CUT), ("columns", "rows")):
        scenario = scenario_of(
            "current", pair=(level, "no_shard"), options={"config": config}, steps=1
        )
        _, watch = watched(scenario)
        with pytest.MonkeyPatch.context() as patch:
            if what == "rows":
                patch.setattr(TransformerEngineCodec, "encode", lambda *args: iter(()))
            else:
                patch.setattr(TransformerEngineCodec, "_drop_columns", reference.nothing)
                weight = next(iter(watch.weights.values()))
                patch.setattr(type(weight), "_create_transpose", reference.nothing)
            with pytest.raises(AssertionError, match=f"{what} of"):
                watch.train(scenario)
