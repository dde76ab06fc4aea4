"""``fe.weight_stream``: a receiver gets the trainer's weights, bit for bit; with ``as_in_files``,
under the names and in the layout of transformers' files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.pieces import Pieces
from fsdp_engine.pretrained import streamed_tensors
from fsdp_engine.pretrained import weight_version as version_file
from tests import models, reference
from tests.checkpoint.scene import raises_each, run_on, shared_folder, update
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for
from tests.matrices import thorough_but
from tests.messages import watched
from tests.models import Chain, Mlp
from tests.pairs import EVERY_PAIR, FEW_PAIRS
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.pretrained.families import FAMILIES, build, builder, in_files
from tests.pretrained.receiver import (
    Link,
    Receiver,
    edit,
    of_all_ranks,
    received,
    same_bits,
    sent_state,
    sharded,
)
from tests.processes import ROOT, printed, torchrun

BF16 = torch.bfloat16
FULL = ("optim_grads_params", "no_shard")


class Complex(nn.Module):
    """A complex weight beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(5))


def normalised() -> nn.Module:
    model = models.Chain(models.Normalised(), models.Normalised())
    for number, block in enumerate(model.blocks):
        block.norm.running_mean.fill_(number + 0.5)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: models.Transformer(tied=True),
    "odd": models.odd_model,
    "frozen": models.lora_model,
    "mixed": models.mixed_model,
    "buffers": normalised,
    "complex": Complex,
    "nested": models.NestedUnits,
}
POLICY = fe.MixedPrecisionPolicy(param_dtype=BF16)
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": POLICY},
    "fp8": {"mp_policy": POLICY, "codec_rules": [fe.Float8()]},
}


def forms_are_right(engine: fe.Engine, dtype: torch.dtype | None) -> None:
    """All three forms of one model."""
    expected = sent_state(engine, dtype)
    stream = fe.weight_stream(engine, dtype)
    told = [(name, kind, tuple(shape)) for name, kind, shape in stream.metadata()]
    items = list(stream)
    assert told == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items]
    own = {name for name, _ in engine.model.named_buffers() if engine.ranks.rank > 0}
    received(items, expected, but=own)
    received(of_all_ranks(fe.weight_stream(engine, dtype, pieces=True)), expected)
    version = fe.WeightVersion()
    stream = fe.weight_stream(engine, dtype, version)
    assert stream.version is version
    changes = list(stream)
    received(of_all_ranks(changes), expected)
    assert list(stream) == []
    assert version.nbytes == sum(values.nbytes for _, _, values in changes)
    if engine.ranks.size == 1:
        assert version.nbytes == sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("name", MODELS)
@on_few_ranks
def test_all_forms_of_odd_models(name: str) -> None:
    engine = fe.shard(MODELS[name](), strategy="optim_grads_params")
    for dtype in (None, BF16):
        forms_are_right(engine, dtype)


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks()
def test_all_forms_at_every_pair(inner: str, outer: str) -> None:
    for name, dtype in (("bf16", BF16), ("fp8", None)):
        model = models.Transformer(1, tied=True)
        forms_are_right(sharded(model, (inner, outer), **OPTIONS[name]), dtype)


@on_ranks()
def test_each_rank_sends_and_keeps_an_equal_part() -> None:
    for pair in FEW_PAIRS:
        engine = sharded(nn.Linear(64, 64, bias=False), pair)
        version = fe.WeightVersion()
        count = sum(x.numel() for _, _, x in fe.weight_stream(engine, BF16, version))
        assert count == 64 * 64 // 4
        assert version.nbytes == 2 * count


# --- deltas ---


def changed(param: Tensor, draw: random.Random) -> None:
    """A random change of one weight: of no, some or all elements, or too small for its rounded
    value."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    flat = param.view(-1)
    what = draw.choice(["nothing", "few", "some", "all", "rounded away", "special", "a range"])
    if not flat.numel() or what == "nothing":
        return
    noise = torch.randn(flat.numel(), generator=generator).to(flat.dtype)
    if what == "all":
        flat.copy_(noise)
    elif what == "rounded away":
        flat.mul_(1 + 1e-5)
    elif what == "special":
        where = draw.randrange(flat.numel())
        flat[where] = draw.choice([float("nan"), float("inf"), -0.0, 0.0])
    elif what == "a range":
        start = draw.randrange(flat.numel())
        flat[start : start + draw.randrange(200)] += 1
    else:
        share = 0.02 if what == "few" else 0.4
        where = torch.rand(flat.numel(), generator=generator) < share
        flat[where] = noise[where]


def random_deltas(pair: tuple[str, str], count: int) -> None:
    """Send ``count`` deltas of each model, each after a random change, to the same receiver."""
    draw = random.Random(f"{pair} {reference.rank_and_size()[1]}")
    kinds: list[tuple[Callable[[], nn.Module], dict[str, Any], torch.dtype | None]] = [
        (lambda: models.Transformer(1, tied=True), {}, BF16),
        (models.mixed_model, {}, None),
        (models.odd_model, {"mp_policy": POLICY}, torch.float16),
        (models.lora_model, OPTIONS["fp8"], torch.float8_e4m3fn),
        (models.unused_model, {}, None),
    ]
    # Some tensors are then several chunks, of which some are sent as ranges and some by index.
    with patch.object(version_file, "CHUNK", 50):
        for build, options, dtype in kinds:
            engine = sharded(build(), pair, **options)
            link = Link(engine, dtype=dtype)
            link.take()
            for _ in range(count):
                edits = random.Random(draw.randrange(1 << 30))
                edit(engine, lambda param, edits=edits: changed(param, edits))  # type: ignore[misc]
                link.take()
                link.check()


@pytest.mark.parametrize(
    ("num_ranks", "pair"),
    [
        *itertools.product((0, 1, 2), [("no_shard", "no_shard"), FULL]),
        *itertools.product((4,), [FULL, ("optim_grads_params", "optim")]),
    ],
)
def test_random_deltas(ranks: Ranks, num_ranks: int, pair: tuple[str, str]) -> None:
    run_on(ranks, num_ranks, random_deltas, pair, 6)


@on_ranks(2)
def test_a_delta_has_what_changed_in_the_dtype_that_is_sent() -> None:
    engine = fe.shard(nn.Linear(256, 512, bias=False), strategy="optim_grads_params")
    version = fe.WeightVersion("cpu")
    stream = fe.weight_stream(engine, BF16, version)
    assert [type(indices) for _, indices, _ in stream] == [slice]
    edit(engine, lambda param: param.mul_(1 + 1e-6))  # type: ignore[func-returns-value]
    edit(engine, lambda param: param.view(-1)[:1000:10].fill_(3.0))
    everywhere = torch.arange(0, 1000, 10)
    items = list(of_all_ranks(stream))
    ((name, indices, values),) = [item for item in items if item[2].numel() > 90]
    assert name == "weight"
    assert indices.dtype == torch.int32
    assert values.dtype == BF16
    # A few more elements may change: those at a boundary between two bf16 numbers.
    assert set(everywhere.tolist()) <= set(indices.tolist())
    assert sum(item[2].numel() for item in items) < 2000
    edit(engine, lambda param: param.add_(1))  # type: ignore[func-returns-value]
    assert [type(indices) for _, indices, _ in stream] == [slice]
    version.clear()
    assert version.nbytes == 0
    assert sum(values.numel() for _, _, values in stream) == 256 * 512 // 2


# --- other parallelisms ---


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(4)
def test_parameters_cut_by_tensor_parallelism(level: str) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = cut(Model(hidden=17, width=6), mesh["tp"], sequence=True)
    engine = fe.shard(model, mesh["dp"], level)
    forms_are_right(engine, BF16)
    link = Link(engine)
    link.take()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        with patch.object(version_file, "CHUNK", 16):
            update(model(tokens_for(step, 0, mesh["dp"].get_local_rank())), optimizer)
            link.take()
        link.check()


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(4)
def test_experts_are_sent_by_who_has_them(level: str) -> None:
    from tests.checkpoint.experts import NUM_EXPERTS, built, stepped
    from tests.checkpoint.experts import Model as WithExperts

    engine, _ = built(2, level, seed=3)
    with pytest.raises(ValueError, match="found the expert blocks"):
        fe.weight_stream(engine, BF16)
    torch.manual_seed(3)
    expected = {name: x.to(BF16) for name, x in WithExperts(NUM_EXPERTS).state_dict().items()}
    received(of_all_ranks(fe.weight_stream(engine, BF16, pieces=True)), expected)
    stream = fe.weight_stream(engine, BF16, fe.WeightVersion())
    receiver = Receiver(expected)
    receiver.take(of_all_ranks(stream))
    receiver.once()
    receiver.check(expected)
    stepped(engine, 2)
    receiver.take(of_all_ranks(stream))
    again = Receiver(expected)
    again.take(of_all_ranks(fe.weight_stream(engine, BF16, pieces=True)))
    receiver.check(again.weights)


# --- traffic and memory ---


@on_ranks(2)
def test_a_unit_is_one_message_for_each_buffer() -> None:
    sent: list[Tensor] = []
    watching = partial(watched, lambda group, tensor: sent.append(tensor), lambda *others: None)
    for level in ("no_shard", "optim", "optim_grads_params"):
        engine = fe.shard(models.Transformer(), strategy=level)
        cut_buffers = engine.buffers if level != "no_shard" else []
        with watching():
            assert list(fe.weight_stream(engine, BF16))
        assert [x.dtype for x in sent] == [BF16] * len(cut_buffers)
        assert sum(x.numel() for x in sent) == sum(b.layout.numel // 2 for b in cut_buffers)
        sent.clear()
        with watching():
            assert list(fe.weight_stream(engine, BF16, pieces=True))
            assert list(fe.weight_stream(engine, BF16, fe.WeightVersion()))
        assert not sent


@on_ranks(2)
def test_one_unit_is_held_and_no_more() -> None:
    engine = fe.shard(models.Transformer(), strategy="optim_grads_params")
    largest = max(sum(b.layout.numel for b in unit.buffers) for unit in engine.units)
    engine.peak_memory_bytes(reset=True)
    addresses = set()
    for name, tensor in fe.weight_stream(engine, BF16):
        if name.endswith("qkv.weight"):
            addresses.add(tensor.data_ptr())
        assert engine.memory_bytes()["stream"] == 2 * largest
    assert engine.peak_memory_bytes()["stream"] == 2 * largest
    assert len(addresses) == 1  # three blocks, one after the other, in one place
    assert "stream" not in engine.memory_bytes()


@pytest.mark.parametrize("form", ["whole", "pieces"])
@on_few_ranks
def test_what_somebody_keeps_stays_as_it_is(form: str) -> None:
    for level in ("no_shard", "optim_grads_params"):
        link = Link(fe.shard(models.Transformer(), strategy=level), form)
        kept = list(link.stream)
        list(fe.weight_stream(link.engine, torch.float16, pieces=form == "pieces"))
        link.take(kept)
        del kept
        link.check()
        assert "stream" not in link.engine.memory_bytes()


# --- left half way, and changed in between ---


def train(engine: fe.Engine, step: int) -> None:
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    update(engine.model(*models.token_batch(2, step)), optimizer)


@pytest.mark.parametrize("form", ["whole", "pieces", "changes"])
@on_few_ranks
def test_a_loop_that_is_left_holds_nothing_and_what_it_lost_is_sent_again(form: str) -> None:
    link = Link(fe.shard(models.Transformer(), strategy="optim_grads_params"), form)
    for stop in (0, 1, 5, 9):
        got = []
        for item in link.stream:
            if len(got) == stop:
                break  # and this item may be lost
            got.append(item)
        assert "stream" not in link.engine.memory_bytes()
        link.take(got)
        train(link.engine, stop)
    link.take()
    link.check()


@pytest.mark.parametrize("form", ["whole", "pieces", "changes"])
@on_few_ranks
def test_weights_that_change_in_between_raise_on_all_ranks(form: str) -> None:
    engine = fe.shard(models.Transformer(), strategy="optim_grads_params")
    link = Link(engine, form)

    def edited() -> None:
        edit(engine, lambda param: param.add_(1))  # type: ignore[func-returns-value]

    def on_the_last_rank() -> None:
        if engine.ranks.rank == engine.ranks.size - 1:
            next(iter(engine.model.parameters())).data.local.add_(1)

    def iterated(change: Callable[[], None], number: int) -> None:
        for count, _ in enumerate(link.stream):
            if count == number:
                change()

    changes = [partial(train, engine, 0), engine.weights_changed, edited]
    for number, change in enumerate([on_the_last_rank, *changes] if form == "whole" else changes):
        with pytest.raises(RuntimeError, match="expected unchanged weights during the iteration"):
            iterated(change, number)
        assert "stream" not in engine.memory_bytes()
    if link.version is not None:
        link.version.clear()  # then all weights are sent: none were sent above
    link.take()
    link.check()


@on_few_ranks
def test_an_evaluation_in_between_is_no_change() -> None:
    link = Link(fe.shard(models.Transformer(), mp_policy=POLICY), "whole", None)
    for item in link.stream:
        with torch.no_grad():
            link.engine.model(*models.token_batch(1, 0))
        link.take([item])
    link.check()


@on_few_ranks
def test_weights_from_elsewhere_are_streamed() -> None:
    folder = shared_folder()
    engine = fe.shard(models.Transformer(), strategy="optim_grads_params")
    link = Link(engine)
    link.take()
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    fe.save_checkpoint(f"{folder}/checkpoint", engine, optimizer)
    fe.export_safetensors(engine, f"{folder}/weights")
    for load in (
        partial(fe.load_checkpoint, f"{folder}/checkpoint", engine, optimizer),
        partial(fe.load_safetensors, engine, f"{folder}/weights"),
    ):
        train(engine, 1)
        link.take()
        link.check()
        load()
        assert link.take() > 0
        link.check()


# --- errors ---


@on_ranks(2)
def test_arguments_that_differ_and_versions_of_other_weights_raise_on_all_ranks() -> None:
    engine = fe.shard(models.Transformer())
    is_first = engine.ranks.rank == 0
    version = fe.WeightVersion()
    stream = partial(fe.weight_stream, engine)
    differ = ValueError, "expected the same on all ranks"
    no_dtype = TypeError, "dtype: expected a floating-point dtype"
    no_version = TypeError, "changed_since: expected a WeightVersion"
    raises_each(
        (*differ, partial(stream, BF16 if is_first else None)),
        (*differ, partial(stream, pieces=is_first)),
        (*differ, partial(stream, changed_since=version if is_first else None)),
        (*differ, partial(stream, as_in_files=is_first)),
        (*no_dtype, partial(stream, torch.int8 if is_first else BF16)),
        (*no_version, partial(stream, changed_since=version if is_first else 3)),
    )
    list(stream(BF16, version))
    other = version if is_first else fe.WeightVersion()
    not_of_these = ValueError, "expected a version of these weights"
    odd = fe.shard(models.odd_model())
    raises_each(
        (*not_of_these, partial(stream, torch.float16, other)),
        (*not_of_these, partial(fe.weight_stream, odd, BF16, version)),
    )


@on_few_ranks
def test_a_version_serves_one_iteration_at_a_time() -> None:
    link = Link(fe.shard(models.Transformer()))
    first = iter(link.stream)
    next(first)
    with pytest.raises(RuntimeError, match="no other iteration uses"):
        list(link.stream)
    del first
    link.version.clear()  # type: ignore[union-attr]
    link.take()
    link.check()


@on_ranks(2)
def test_streams_are_at_rest_only() -> None:
    model = models.Transformer()
    with pytest.raises(ValueError, match=r"expected the engine that fe\.shard returned"):
        fe.weight_stream(model)
    engine = fe.shard(model)
    stream = fe.weight_stream(engine)
    with engine.unsharded(), pytest.raises(RuntimeError, match="expected the sharded parameter as"):
        list(stream)
    found: list[str] = []

    def inside(module: nn.Module, inputs: Any) -> None:
        for make in (lambda: fe.weight_stream(engine), lambda: next(iter(stream))):
            try:
                make()
            except RuntimeError as error:
                found.append(str(error))

    handle = model.blocks[1].norm1.register_forward_pre_hook(inside)
    model(*models.token_batch(2, 0)).backward()
    handle.remove()
    assert len(found) == 2
    assert all("forward" in each for each in found)
    assert len(list(stream)) == len(list(model.parameters()))


@on_ranks(2)
def test_nothing_is_streamed_before_weights_are_loaded() -> None:
    folder = shared_folder()
    whole = fe.shard(models.Transformer(), initial_values="rank0")
    fe.export_safetensors(whole, folder)
    with torch.device("meta"):
        model = models.Transformer()
    engine = fe.shard(model, initial_values="empty")
    with pytest.raises(RuntimeError, match="expected values; found none"):
        fe.weight_stream(engine)
    fe.load_safetensors(engine, folder)
    received(fe.weight_stream(engine), sent_state(whole, None))


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [(), torchrun(2)], ids=["one rank", "two ranks"])
def test_the_example_has_the_same_weights_after_every_round(launcher: tuple[str, ...]) -> None:
    small = "--steps 4 --send-every 2 --layers 1 --width 16 --sequence-length 32 --batch-size 2"
    text = printed(*launcher, str(ROOT / "examples" / "stream_weights.py"), *small.split())
    rounds = [line for line in text.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in rounds] == ["0", "2", "4"]
    assert all("the same weights" in line for line in rounds)


def streamed(family: str, folder: str, level: str) -> None:
    """All three forms of the tensors in ``folder``; then of other values, saved beside it."""
    engine = fe.shard(builder(family)(), strategy=level, initial_values="empty")
    fe.load_pretrained(engine, folder)
    expected = in_files(Path(folder))
    version = fe.WeightVersion()
    changes = fe.weight_stream(engine, changed_since=version, as_in_files=True)
    receiver = Receiver(expected)
    receiver.take(of_all_ranks(changes))
    receiver.once()
    receiver.check(expected)
    generator = torch.Generator().manual_seed(0)

    def few(param: Tensor) -> None:
        where = torch.rand(param.shape, generator=generator) < 0.05
        param[where] += 1

    with patch.object(version_file, "CHUNK", 128):
        edit(engine, few)
        receiver.take(of_all_ranks(changes))
    fe.save_pretrained(engine, f"{folder}/edited")
    expected = in_files(Path(folder) / "edited")
    receiver.check(expected)
    pieces = of_all_ranks(fe.weight_stream(engine, pieces=True, as_in_files=True))
    for stream in (fe.weight_stream(engine, as_in_files=True), pieces):
        received(stream, expected)
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("family", thorough_but(["mixtral", "llama tied"], FAMILIES))
def test_a_receiver_has_what_files_have(ranks: Ranks, tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    for world_size, level in ((1, "no_shard"), (2, "optim_grads_params")):
        folder = str(tmp_path / str(world_size))
        build(family).save_pretrained(folder)
        ranks.run(streamed, family, folder, level, world_size=world_size)


def joined(model: nn.Module, held: dict[str, Pieces]) -> dict[str, Pieces]:
    """A layout that no family has: it joins tensors of several units, and transposes some."""
    found = dict(held)
    ups = [found.pop(f"blocks.{index}.up.weight") for index in range(3)]
    found["ups"] = torch.stack([each.t() for each in ups], 1)  # type: ignore[call-overload]
    both = torch.cat([found.pop("blocks.0.up.bias"), found.pop("blocks.2.up.bias")])  # type: ignore[call-overload]
    found["biases"] = both.reshape(2, -1)
    found["turned"] = found.pop("blocks.1.down.weight").t()
    return found


def as_joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found: Any = joined(nn.Module(), dict(state))  # type: ignore[arg-type]
    return {name: value.contiguous() for name, value in found.items()}


@on_few_ranks
def test_a_tensor_of_several_units() -> None:
    model = Chain(Mlp(), Mlp(), Mlp())
    engine = fe.shard(
        model, strategy="optim_grads_params", units=[Mlp], options=fe.Options(min_unit_size=0)
    )
    assert len(engine.units) == 4
    expected = as_joined(sent_state(engine, torch.bfloat16))
    with (
        patch.object(streamed_tensors, "as_on_disk", joined),
        patch.object(version_file, "CHUNK", 40),
    ):
        options: dict[str, Any] = {"dtype": torch.bfloat16, "as_in_files": True}
        changes = fe.weight_stream(engine, changed_since=fe.WeightVersion(), **options)
        receiver = Receiver(expected)
        receiver.take(of_all_ranks(changes))
        receiver.once()
        receiver.check(expected)
        received(of_all_ranks(fe.weight_stream(engine, pieces=True, **options)), expected)
        edit(engine, lambda param: param.view(-1)[::7].add_(1))
        receiver.take(of_all_ranks(changes))
        expected = as_joined(sent_state(engine, torch.bfloat16))
        receiver.check(expected)
        for name, tensor in fe.weight_stream(engine, **options):
            assert tensor.is_contiguous()
            assert same_bits(tensor, expected.pop(name)), name
        assert not expected
