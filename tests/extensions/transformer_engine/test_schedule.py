"""When bytes of Transformer Engine's weights travel: an encoding for forward and one for backward,
one message of amaxes for each change, recomputation, memory, and no race."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.codecs import Float8, Float8Codec, TransformerEngineCodec
from fsdp_engine.codecs.base import BACKWARD, FORWARD
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.strategies import Axis
from tests.extensions.transformer_engine.te_on_cpu import QuantisedBlock, QuantisedStack
from tests.extensions.transformer_engine.te_training import (
    FEATURES,
    Watch,
    counting_encodes,
    make_batch,
    make_stack,
    train_watched,
)
from tests.messages import Messages
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import BUDGETS, config_of, mesh_of, traced

pytestmark = pytest.mark.thorough

CUT = "optim_grads_params"


def is_quantised(buffer: Any) -> bool:
    return isinstance(buffer.weights.codec, TransformerEngineCodec)


def count_micro(model: nn.Module, engine: Any, *, last: bool = True) -> Messages:
    """Messages of one forward and backward."""
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


# Encodings.


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
                    # The last block and the root stay full: of MXFP8 in another encoding.
                    stays = unit.index in (0, len(engine.units) - 1)
                    again = not stays or (is_quantised(buffer) and recipe == "mxfp8")
                    label = f"all-gather of {buffer.label} over the inner axis"
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


def planes_of(unit: Unit) -> list[tuple[bool, ...]]:
    """Which encodings of its quantised buffers have memory."""
    return [
        tuple(encoding.storage.filled for encoding in buffer.weights._encodings)
        for buffer in unit.buffers
        if is_quantised(buffer)
    ]


@on_ranks(2)
def test_a_unit_holds_the_plane_that_it_computes_with_and_no_other() -> None:
    model = make_stack("mxfp8", num_blocks=3)
    engine = fe.shard(model, units="blocks.*")
    watch = Watch(model, engine)
    rows, columns, nothing = [(True, False)], [(False, True)], [(False, False)]
    units = {unit.name: unit for unit in engine.units}
    looks: Counter[str] = Counter()

    def look(name: str, expected: Any, *_: Any) -> None:
        assert planes_of(units[name]) == expected, name
        looks[name] += 1

    for name, unit in units.items():
        if name:
            up: Any = unit.modules[0].up
            up.register_forward_hook(partial(look, name, rows))

            def listen(module: Any, args: Any, y: Tensor, name: str = name) -> None:
                y.register_hook(partial(look, name, columns))

            up.register_forward_hook(listen)
    for step in range(2):
        watch.expect()
        loss = model(*make_batch(2, dist.get_rank()))
        assert planes_of(units["blocks.2"]) == columns  # kept for backward
        assert planes_of(units["blocks.0"]) == planes_of(units["blocks.1"]) == nothing
        loss.backward()
        for name in looks:
            assert planes_of(units[name]) == nothing
        assert looks == dict.fromkeys(looks, 2 * (step + 1))
        engine.zero_grad_buffer()
    assert len(looks) == 3


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
    # What persists: half of each encoding and of fp32 main weights.
    assert engine.memory_bytes()["model"] == 3 * 2 * encoding // 2


# Recomputation.


class Recomputed(QuantisedStack):
    """A stack whose blocks, or the layers in them, are checkpointed."""

    how: tuple[bool, bool] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.to(self.dtype))
        for block in self.blocks:
            y = self.run(block, y)
        return (self.head(self.norm(y)).float() - x.float()).square().mean()

    def run(self, block: Any, y: Tensor) -> Tensor:
        if self.how is None:
            return block(y)
        reentrant, whole = self.how
        return checkpoint(block, y, use_reentrant=reentrant) if whole else block(y)


class PartlyRecomputed(QuantisedBlock):
    """Its layers, but not its norm, are checkpointed."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.reentrant is None:
            return x + self.inside(y)
        return x + checkpoint(self.inside, y, use_reentrant=self.reentrant)

    def inside(self, y: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(y)))


def recomputing(recipe: str, how: tuple[bool, bool] | None) -> Recomputed:
    """``how``: re-entrant or not, and around whole blocks or within them."""
    model: Any = make_stack(recipe, num_blocks=3)
    model.__class__, model.how = Recomputed, how
    for block in model.blocks:
        block.__class__ = PartlyRecomputed
        if how is not None and not how[1]:
            block.reentrant = how[0]
    return model


@pytest.mark.parametrize("level", [CUT, "optim"])
@on_ranks(2)
def test_recomputation_trains_bit_by_bit_as_none(level: str) -> None:
    for recipe in ("mxfp8", "block"):
        results = []
        for how in (None, *itertools.product((False, True), repeat=2)):
            model = recomputing(recipe, how)
            engine = fe.shard(model, strategy=level)
            watch = Watch(model, engine)
            losses = train_watched(model, engine, watch, num_steps=3)
            count = 3 * 2 * len(watch.layers)
            assert watch.looks == {"rows": count * (1 if how is None else 2), "columns": count}
            results.append((losses, engine.full_state_dict()))
        losses, state = results[0]
        for others, other in results[1:]:
            assert others == losses
            assert all(torch.equal(other[name], state[name]) for name in state)


def gathers_of(how: tuple[bool, bool]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """In each of three microbatches: (unit, encodings) of every gather that backward asks for."""
    model = recomputing("mxfp8", how)
    engine = fe.shard(model, units="blocks.*", config=config_of(0))
    found: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    real = Unit.gather

    def gather(unit: Unit, phase: int, *args: Any) -> None:
        if unit.name:
            assert len(unit.split_buffers) == 1
            held = unit.unsharded.phases if unit.unsharded is not None else 0
            encodings = enumerate((FORWARD, BACKWARD))
            missing = tuple(encoding for encoding, read in encodings if phase & ~held & read)
            found[-1].append((unit.name, missing))
        real(unit, phase, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "gather", gather)
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
    first, *later = ranks.run(gathers_of, (False, whole), world_size=2)[0]
    names = ["blocks.1", "blocks.0"]
    # The last block's columns were asked for as forward left it.
    assert first == [("blocks.2", (0,)), *((n, p) for n in names for p in ((1,), (0,)))]
    assert later == 2 * [[(name, (0, 1)) for name in names]]


# One message of amaxes.


def count_amaxes(inner: str, outer: str) -> None:
    for recipe in ("current", "mxfp8"):
        model = make_stack(recipe)
        engine = fe.shard(model, mesh_of(2, 2), inner, outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_buffers = sum(is_quantised(buffer) for buffer in engine.buffers)
        assert num_buffers == len(model.blocks)
        with counting_encodes(TransformerEngineCodec) as encodes:
            for step in range(3):
                total: Counter[Any] = Counter()
                for micro in range(3):
                    messages = count_micro(model, engine, last=micro == 2)
                    total += messages.calls
                    assert encodes[0] == (step + 1) * num_buffers
                for axis, level in ((Axis.INNER, inner), (Axis.OUTER, outer)):
                    group = engine.mesh.axis(axis).gather_group
                    assert group is not None
                    # Gathers themselves are sends; nothing else is reduced in these groups.
                    expected = num_buffers if level != "no_shard" else 0
                    assert total[group.group_name, "allreduce_"] == expected, (recipe, axis)
                step_of(engine, optimizer)


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_each_change_is_encoded_once_with_one_message_for_each_axis_that_cuts(
    ranks: Ranks, inner: str, outer: str
) -> None:
    ranks.run(count_amaxes, inner, outer)


def count_native(inner: str, outer: str) -> None:
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, mesh_of(2, 2), inner, outer, codec_rules=[Float8()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_buffers = sum(isinstance(b.weights.codec, Float8Codec) for b in engine.buffers)
    assert num_buffers == 4  # of the embedding, of two blocks, of the head
    with counting_encodes(Float8Codec) as encodes:
        for step in range(3):
            for micro in range(3):
                loss = model(*token_batch(2, micro))
                if micro == 2:
                    loss.backward()
                else:
                    with engine.no_sync():
                        loss.backward()
            assert encodes[0] == (step + 1) * num_buffers
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_the_native_codec_encodes_each_change_once(ranks: Ranks, inner: str, outer: str) -> None:
    ranks.run(count_native, inner, outer)


# Races.


def train_traced(model: Any, engine: Any) -> None:
    train_watched(model, engine, None)


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@pytest.mark.parametrize(
    ("inner", "outer"),
    [("no_shard", "no_shard"), ("optim", "optim"), (CUT, "no_shard"), (CUT, CUT)],
)
@on_ranks(4)
def test_the_schedule_has_no_race(inner: str, outer: str, recipe: str) -> None:
    for budget in BUDGETS.values():
        make: Callable[[], nn.Module] = partial(make_stack, recipe, 3)
        traced(
            make,
            train_traced,
            mesh=mesh_of(2, 2),
            strategy=inner,
            outer_strategy=outer,
            config=config_of(budget),
        )


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputation_makes_no_race(reentrant: bool) -> None:
    for whole in (False, True):
        traced(partial(recomputing, "mxfp8", (reentrant, whole)), train_traced)
