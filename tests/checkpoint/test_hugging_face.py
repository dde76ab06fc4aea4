"""Folders of safetensors: those of other libraries load, and other libraries read exports.

The other side is the real thing: ``safetensors`` reads every export, ``huggingface_hub`` says how
tensors are split over files, and ``transformers`` writes and reads a model.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint import hugging_face, reading_weights, safetensors_folder
from fsdp_engine.checkpoint.hugging_face import export_safetensors, load_safetensors
from fsdp_engine.checkpoint.safetensors_folder import (
    INDEX,
    SINGLE,
    ExportFolder,
    parse_size,
    plan_file,
    read_header,
)
from fsdp_engine.strategies import LEVELS
from tests import models
from tests.checkpoint.scene import (
    Config,
    Everything,
    all_configs,
    contents,
    different,
    label,
    mesh_of,
    run_on,
    shard,
    shared_folder,
    trained,
)
from tests.models import Transformer, token_batch
from tests.pairs import PAIRS
from tests.pool import Ranks, on_ranks

TIED = {"blocks.6.up.weight": "blocks.2.up.weight"}  # dropped and kept name in Everything
PT = {"format": "pt"}
LEVEL_3: Config = {"strategy": "optim_grads_params", "outer": "optim", "shape": (2, 2)}


def read_all(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of an export, as the safetensors library reads them."""
    found: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def tensors_of(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of ``contents()``, under the names that an export gives them."""
    named = {key.removeprefix("model."): value for key, value in saved.items()}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor) and name not in TIED
    }


def small(
    strategy: str = "optim_grads_params", seed: int = 0, num_blocks: int = 2, tied: bool = False
) -> tuple[Any, fe.Engine]:
    """A small model and its engine."""
    torch.manual_seed(seed)
    model = Transformer(num_blocks, tied)
    return model, fe.shard(model, strategy=strategy)


def visible(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def on_rank_0(write: Callable[[], Any]) -> None:
    """Run a function on rank 0; all ranks continue after it."""
    if dist.get_rank() == 0:
        write()
    dist.barrier()


# --- round trips ---


def export_each(folder: str, configs: list[Config]) -> list[dict[str, Any]]:
    found = []
    for config in configs:
        model, engine, _ = trained(config)
        export_safetensors(engine, f"{folder}/{label(config)}", max_shard_size="3KB")
        found.append(contents(model, engine))
    return found if dist.get_rank() == 0 else []


def load_each(folder: str, pairs: list[tuple[Config, Config]], expected: Any) -> list[str]:
    lines = []
    for source, target in pairs:
        torch.manual_seed(2)
        model = Everything()
        engine = shard(model, target)
        load_safetensors(engine, f"{folder}/{label(source)}")
        found = tensors_of(contents(model, engine, whole=False))
        lines += [
            f"{label(source)} -> {label(target)}: {line}"
            for line in different(found, expected[label(source)])
        ]
    return lines


@pytest.mark.timeout(200)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_any_ranks_and_levels_export_what_libraries_and_any_others_load(
    ranks: Ranks, tmp_path: Path, every: int
) -> None:
    configs = {world_size: each[::every] for world_size, each in all_configs().items()}
    assert every > 1 or {(c["strategy"], c["outer"]) for c in configs[4]} == set(PAIRS)
    expected = {}
    for world_size, each in configs.items():
        found = run_on(ranks, world_size, export_each, str(tmp_path), each)
        for config, saved in zip(each, found[0], strict=True):
            expected[label(config)] = tensors_of(saved)
            assert different(read_all(tmp_path / label(config)), expected[label(config)]) == []
    draw = random.Random(4)
    sources = [config for each in configs.values() for config in each]
    for world_size, targets in configs.items():
        pairs = [(draw.choice(sources), target) for target in targets]
        for lines in run_on(
            ranks, world_size, load_each, str(tmp_path), pairs, expected, timeout=120
        ):
            assert lines == []


@on_ranks(2)
def test_the_next_forward_uses_what_was_loaded() -> None:
    folder = shared_folder()
    torch.manual_seed(5)
    plain = Transformer(num_blocks=2)
    on_rank_0(lambda: save_file(plain.state_dict(), f"{folder}/{SINGLE}"))
    tokens, targets = token_batch(2, 0)
    for strategy in LEVELS:
        for dtype in (None, torch.bfloat16):
            model = Transformer(num_blocks=2)
            policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
            engine = fe.shard(model, strategy=strategy, mp_policy=policy)
            model(tokens, targets).backward()  # full weights are there, where a level keeps them
            load_safetensors(engine, folder)
            copy = Transformer(num_blocks=2).to(dtype or torch.float32)
            copy.load_state_dict(plain.state_dict())
            with torch.no_grad():
                assert torch.equal(model(tokens), copy(tokens))
            assert different(engine.full_state_dict(), plain.state_dict()) == []


@on_ranks(4)
def test_a_model_on_the_meta_device_takes_a_folder() -> None:
    folder = shared_folder()
    plain = models.Chain(models.Mlp(), models.Normalised(), models.Mlp())
    on_rank_0(lambda: save_file(plain.state_dict(), f"{folder}/{SINGLE}"))
    for config in all_configs()[4][::3]:
        with torch.device("meta"):
            model = models.Chain(models.Mlp(), NormalisedOnMeta(), models.Mlp())
        engine = shard(model, config)
        load_safetensors(engine, folder)
        assert different(engine.full_state_dict(), plain.state_dict()) == []
        assert torch.equal(model.blocks[1].constant, plain.blocks[1].constant)  # type: ignore[arg-type, union-attr]


class NormalisedOnMeta(models.Normalised):
    def reset_parameters(self) -> None:
        self.constant.copy_(torch.linspace(0, 1, models.DIM))


@on_ranks(4)
def test_floating_point_tensors_are_cast_and_others_are_not() -> None:
    folder = shared_folder()
    model, engine, _ = trained(LEVEL_3)
    first = model.odd.first.weight.full_tensor()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        before = tensors_of(contents(model, engine))
        export_safetensors(engine, folder, dtype)
        found = read_all(folder)
        expected = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in before.items()
        }
        if dist.get_rank() == 0:  # whose buffers count
            assert different(found, expected) == []
        load_safetensors(engine, folder)
        dist.barrier()
    after = model.odd.first.weight.full_tensor()
    assert after.dtype == torch.float32
    assert torch.equal(after, first.to(torch.bfloat16).to(torch.float16).float())
    assert not torch.equal(after, first)


@on_ranks(2)
def test_a_tied_weight_is_written_once_and_loads_from_any_of_its_names() -> None:
    folder = shared_folder()
    _, engine = small(tied=True)
    weight = engine.full_tensor("head.weight")
    export_safetensors(engine, folder)
    assert visible(folder) == [SINGLE]
    with safe_open(f"{folder}/{SINGLE}", "pt") as file:
        assert "embedding.weight" in file.keys()  # noqa: SIM118 - it is no mapping
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    for name in ("embedding.weight", "head.weight"):
        other, other_engine = small(seed=3, tied=True)
        swap = {"embedding.weight": name}
        load_safetensors(other_engine, folder, swap)
        assert other.head.weight is other.embedding.weight
        assert torch.equal(other_engine.full_tensor("head.weight"), weight)
    _, untied = small(seed=3)
    with pytest.raises(ValueError, match=r"missing head\.weight: expected shape \(23, 12\)"):
        load_safetensors(untied, folder)


# --- files ---


@on_ranks(4)
def test_files_are_split_as_the_hub_splits_them() -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    folder = shared_folder()
    _, engine = small()
    state = engine.full_state_dict()
    largest = max(value.nbytes for value in state.values())
    for limit in (100, 1000, largest, 5000, "9KB", "1.5MB"):
        export_safetensors(engine, folder, max_shard_size=limit)
        expected = split_torch_state_dict_into_shards(state, max_shard_size=limit)
        files = expected.filename_to_tensors
        assert {path.name for path in Path(folder).glob("*.safetensors")} == set(files)
        for name, tensors in files.items():
            found = load_file(f"{folder}/{name}")
            assert sorted(found) == sorted(tensors)
            num_bytes = sum(value.nbytes for value in found.values())
            assert num_bytes <= parse_size(limit) or len(found) == 1
        if len(files) > 1:
            index = json.loads((Path(folder) / INDEX).read_text())
            assert index["weight_map"] == expected.tensor_to_filename
            assert index["metadata"] == {"total_size": sum(v.nbytes for v in state.values())}
        assert (Path(folder) / INDEX).exists() is (len(files) > 1)
        load_safetensors(engine, folder)
        dist.barrier()


def test_a_header_says_where_each_tensor_is(tmp_path: Path) -> None:
    example = plan_file([("b", torch.bfloat16, (4,)), ("a", torch.float32, (2, 3))], PT)
    assert json.loads(example.head[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    tensors = [
        ("b", torch.bfloat16, (4,)),
        ("a", torch.float32, (2, 3)),
        ("n", torch.int64, ()),
        ("e", torch.float32, (0, 3)),
    ]
    plan = plan_file(tensors, PT)
    length = int.from_bytes(plan.head[:8], "little")
    assert len(plan.head) == 8 + length
    assert length % 8 == 0
    assert json.loads(plan.head[8:])["a"] == {
        "dtype": "F32",
        "shape": [2, 3],
        "data_offsets": [8, 32],
    }
    assert {n: start - len(plan.head) for n, start in plan.starts.items()} == {
        "n": 0,
        "a": 8,
        "e": 32,
        "b": 32,
    }
    assert plan.num_bytes == len(plan.head) + 40
    path = tmp_path / "x.safetensors"
    path.write_bytes(plan.head + bytes(40))
    assert {n: (v.dtype, tuple(v.shape)) for n, v in load_file(path).items()} == {
        name: (dtype, shape) for name, dtype, shape in tensors
    }
    assert [each.name for each in read_header(path)] == ["n", "a", "e", "b"]


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    for name, dtype in safetensors_folder.DTYPES.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({"x": torch.ones(3, 2).to(dtype)}, path)
        assert [(each.dtype, each.shape) for each in read_header(path)] == [(dtype, (3, 2))]
        plan = plan_file([("x", dtype, (3, 2))], {})
        assert plan.head[8:].startswith(b'{"__metadata__":{},"x":{"dtype":"%s"' % name.encode())
    with pytest.raises(ValueError, match=r"^x: expected a dtype of .*; found torch\.complex128"):
        plan_file([("x", torch.complex128, ())], {})


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 1), ("5GB", 5 * 10**9), ("500MB", 5 * 10**8), (" 1.5 kb", 1500), ("2TB", 2 * 10**12)],
)
def test_sizes_are_decimal(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", [0, -5, True, 1.5, None, "", "5", "5GiB", "GB", "0KB", "-1KB"])
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_shard_size: expected a positive .*; found"):
        parse_size(size)


@on_ranks(2)
def test_an_export_replaces_an_earlier_one_and_leaves_other_files_alone() -> None:
    folder = shared_folder() + "/new/model"
    others = ["adapter_model.safetensors", "config.json"]
    _, engine = small()
    for number, limit in enumerate((1000, "1GB", 3000, 1000, "1GB")):
        export_safetensors(engine, folder, max_shard_size=limit)
        if number == 0:
            on_rank_0(lambda: [(Path(folder) / name).write_text(name) for name in others])
            on_rank_0(lambda: (Path(folder) / ".exporting-dead").mkdir())
        found = visible(folder)
        if limit == "1GB":
            assert found == [*others, SINGLE]
        elif number:
            count = len(found) - 3
            assert set(found) == {
                *others,
                INDEX,
                *(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)),
            }
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(1.0)
        expected = engine.full_state_dict()
        load_safetensors(engine, folder)
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value + 1, expected[name])
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.5)
        dist.barrier()


# --- from a checkpoint ---


def save_and_export(folder: str) -> None:
    _, engine, optimizer = trained(LEVEL_3)
    fe.save_checkpoint(f"{folder}/checkpoint", engine, optimizer)
    export_safetensors(engine, f"{folder}/engine", torch.bfloat16, 2000)
    export_safetensors(engine, f"{folder}/engine-exact")
    plain = {"w": torch.arange(60.0).view(6, 10), "v": torch.arange(24).view(2, 3, 4)}
    cut = {
        "w": distribute_tensor(plain["w"], mesh_of(4), [Shard(1)]),
        "v": distribute_tensor(plain["v"], mesh_of(2, 2), [Shard(0), Shard(2)]),
    }
    dcp.save({"model": cut}, checkpoint_id=f"{folder}/cut")


@pytest.mark.parametrize("buffer_bytes", [16 << 20, 256])
def test_a_checkpoint_exports_as_its_engine_does(
    ranks: Ranks, tmp_path: Path, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run(save_and_export, str(tmp_path))
    monkeypatch.setattr(hugging_face, "BUFFER_BYTES", buffer_bytes)
    assert not dist.is_initialized()
    for name, options in (("engine", (torch.bfloat16, 2000)), ("engine-exact", ())):
        told: list[int] = []
        export_safetensors(
            tmp_path / "checkpoint", tmp_path / "out", *options, progress=told.append
        )
        found, expected = read_all(tmp_path / "out"), read_all(tmp_path / name)
        # A checkpoint does not say which tensors are tied.
        for dropped, kept in TIED.items():
            assert torch.equal(found.pop(dropped), expected[kept])
        assert different(found, expected) == []
        saved = read_all(tmp_path / "engine-exact")
        num_bytes = sum(saved[name].nbytes for name in (*saved, *TIED.values()))
        assert sum(told) == num_bytes  # as they are in the checkpoint
    export_safetensors(str(tmp_path / "cut"), str(tmp_path / "out"))
    expected = {"w": torch.arange(60.0).view(6, 10), "v": torch.arange(24).view(2, 3, 4)}
    assert different(read_all(tmp_path / "out"), expected) == []


def test_what_is_no_checkpoint_of_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a checkpoint at .*nothing"):
        export_safetensors(tmp_path / "nothing", tmp_path / "out")
    dcp.save({"optimizer": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match=r"under model\.<name>; found only optimizer\.x"):
        export_safetensors(tmp_path / "other", tmp_path / "out")
    with pytest.raises(TypeError, match=r"expected an Engine or the path .*; found Linear"):
        export_safetensors(nn.Linear(1, 1), tmp_path / "out")  # type: ignore[arg-type]
    dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "right", no_dist=True)
    next((tmp_path / "right").glob("*.distcp")).unlink()
    with pytest.raises(FileNotFoundError):
        export_safetensors(tmp_path / "right", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- bytes and memory ---


def count_bytes(folder: str, strategy: str, outer: str) -> tuple[int, int, int]:
    """(written, read, in the files) by this rank."""
    torch.manual_seed(0)
    engine = shard(
        Transformer(num_blocks=2), {"strategy": strategy, "outer": outer, "shape": (2, 2)}
    )
    written, read = [], []
    pwrite = os.pwrite

    def counting_pwrite(descriptor: int, data: Any, offset: int) -> int:
        written.append(pwrite(descriptor, data, offset))
        return written[-1]

    class CountingFile(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            read.append(super().readinto(buffer) or 0)
            return read[-1]

    with patch.object(os, "pwrite", counting_pwrite):
        export_safetensors(engine, folder, max_shard_size="5KB")
    reading_weights.open = lambda path, mode, buffering: CountingFile(path, mode)  # type: ignore[attr-defined]
    try:
        load_safetensors(engine, folder)
    finally:
        del reading_weights.open  # type: ignore[attr-defined]
    state = engine.full_state_dict()
    return sum(written), sum(read), sum(value.nbytes for value in state.values())


@pytest.mark.parametrize(
    ("strategy", "outer", "num_replicas"),
    [
        ("no_shard", "no_shard", 4),
        ("optim_grads_params", "no_shard", 2),
        ("optim_grads_params", "optim_grads_params", 1),
    ],
)
def test_every_byte_is_written_once_and_read_by_those_who_hold_it(
    ranks: Ranks, tmp_path: Path, strategy: str, outer: str, num_replicas: int
) -> None:
    found = ranks.run(count_bytes, str(tmp_path), strategy, outer)
    total = found[0][2]
    assert sum(written for written, _, _ in found) == total
    assert sum(read for _, read, _ in found) == num_replicas * total
    # Shared evenly, but for padding and for tensors that are not cut.
    assert max(written for written, _, _ in found) < 0.4 * total


@on_ranks(2)
def test_memory_is_bounded_by_the_buffer() -> None:
    folder = shared_folder()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    engine = fe.shard(model)
    fe.save_checkpoint(f"{folder}/checkpoint", engine)
    model.register_buffer("turned", torch.randn(300, 700).t())
    bound = 1 << 16
    out, alone = f"{folder}/out", f"{folder}/out-{dist.get_rank()}"
    with (
        patch.object(hugging_face, "BUFFER_BYTES", bound),
        patch.object(reading_weights, "BUFFER_BYTES", bound // reading_weights.READERS),
    ):
        for dtype in (None, torch.bfloat16):
            for function in (
                lambda dtype=dtype: export_safetensors(engine, out, dtype, "1.5MB"),
                lambda: load_safetensors(engine, out),
                lambda dtype=dtype: export_safetensors(
                    f"{folder}/checkpoint", alone, dtype, "1.5MB"
                ),
            ):
                assert 0 < most_allocated(function) <= 1.5 * bound
    assert most_allocated(engine.full_state_dict) > 40 * bound  # the measure sees tensors


def most_allocated(function: Callable[[], Any]) -> int:
    """Most bytes of tensors that a function held at one time beyond those it found."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# --- errors ---


def refuse(
    engine: fe.Engine, folder: str, kind: type[Exception], *parts: str, **options: Any
) -> None:
    """A load is refused on this rank, and changes nothing."""
    before = engine.full_state_dict()
    with pytest.raises(kind) as caught:
        load_safetensors(engine, folder, **options)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    assert different(engine.full_state_dict(), before) == []


@on_ranks(2)
def test_all_that_does_not_fit_is_listed_and_nothing_changes() -> None:
    folder = shared_folder()
    _, engine = small()
    state = engine.full_state_dict()
    del state["blocks.0.qkv.weight"], state["norm.bias"]
    state["head.weight"] = state["head.weight"].t().contiguous()
    state["norm.weight"] = state["norm.weight"].to(torch.complex64)
    state["stranger"] = torch.ones(3, dtype=torch.int8)
    on_rank_0(lambda: save_file(state, f"{folder}/{SINGLE}"))
    refuse(
        engine,
        folder,
        ValueError,
        "found 5 that differ",
        "missing blocks.0.qkv.weight: expected shape (36, 12), float32; found nothing",
        "missing norm.bias: expected shape (12,), float32; found nothing",
        "head.weight: expected shape (23, 12), float32; found shape (12, 23), float32 "
        "(head.weight in model.safetensors)",
        "norm.weight: expected shape (12,), float32; found shape (12,), complex64",
        "unexpected stranger: expected nothing; found shape (3,), int8 (stranger in model.safe",
    )


@on_ranks(2)
def test_names_are_changed_by_a_function_or_a_mapping() -> None:
    folder = shared_folder()
    _, source = small(seed=1)
    state = source.full_state_dict()
    foreign = {f"transformer.{name}": value for name, value in state.items()}
    on_rank_0(lambda: save_file({**foreign, "step": torch.ones(1)}, f"{folder}/{SINGLE}"))

    def rename(name: str) -> str | None:
        return None if name == "step" else name.removeprefix("transformer.")

    mapping = {f"transformer.{name}": name for name in state} | {"step": None}
    for each in (rename, mapping):
        _, engine = small()
        load_safetensors(engine, folder, each)
        assert different(engine.full_state_dict(), state) == []
        refuse(engine, folder, ValueError, "missing head.weight", "unexpected step")
    few = {name: mapping[name] for name in list(mapping)[2:]}
    refuse(engine, folder, ValueError, "found 4 that differ", "unexpected transformer.", rename=few)
    twice = {**mapping, "step": "head.weight"}
    refuse(engine, folder, ValueError, "head.weight: expected one tensor", rename=twice)
    refuse(engine, folder, TypeError, "expected a function or a mapping; found 3", rename=3)
    refuse(engine, folder, TypeError, "expected a name or None for step", rename={"step": 3})


def damaged(whole: bytes) -> dict[str, tuple[bytes, str]]:
    """By defect: a file, and the error's text."""
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def with_header(header: Any) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def with_entry(**changes: Any) -> bytes:
        return with_header({**header, "norm.bias": {**header["norm.bias"], **changes}})

    first, *_ = (name for name in header if name != "__metadata__")
    start, stop = header["norm.bias"]["data_offsets"]
    return {
        "empty": (b"", "expected a safetensors file"),
        "short": (whole[:5], "expected a safetensors file"),
        "long header": (b"\xff" * 8 + whole[8:], "expected a safetensors file"),
        "cut header": (whole[: 8 + length // 2], "expected a safetensors file"),
        "cut data": (whole[:-1], f"expected {len(whole)} bytes, as its header says"),
        "more data": (whole + b"x", f"expected {len(whole)} bytes, as its header says"),
        "no JSON": (with_header(b"{]"), "expected a header in JSON of 2 bytes"),
        "no text": (with_header(b'{"\xff": 1}'), "expected a header in JSON"),
        "deep": (with_header(b"[" * 200_000), "expected a header in JSON"),
        "a list": (with_header([1]), "expected a header with names; found b'[1]'"),
        "no entry": (with_header({"a": 1}), "expected dtype, shape and two data_offsets of a"),
        "no dtype": (
            with_header({**header, first: {}}),
            f"two data_offsets of {first}; found {{}}",
        ),
        "strange dtype": (with_entry(dtype="F4"), "to have one of the dtypes F64, F32"),
        "list for dtype": (with_entry(dtype=[]), "to have one of the dtypes F64, F32"),
        "three offsets": (with_entry(data_offsets=[1, 2, 3]), "two data_offsets of norm.bias"),
        "negative": (with_entry(shape=[-12]), "expected sizes and offsets of norm.bias"),
        "text": (with_entry(shape="12"), "expected sizes and offsets of norm.bias"),
        "fraction": (with_entry(shape=[12.0]), "expected sizes and offsets of norm.bias"),
        "wrong size": (with_entry(shape=[13]), "expected 52 bytes of norm.bias, F32 of shape [13]"),
        "gap": (
            with_entry(data_offsets=[start + 4, stop + 4]),
            f"expected norm.bias at byte {start}",
        ),
    }


@on_ranks(2)
def test_a_damaged_file_is_named_and_changes_nothing() -> None:
    folder = shared_folder()
    _, engine = small()
    export_safetensors(engine, folder)
    path = Path(folder) / SINGLE
    whole = path.read_bytes()
    dist.barrier()
    for content, text in damaged(whole).values():
        on_rank_0(partial(path.write_bytes, content))
        refuse(engine, folder, ValueError, str(path), text)
    on_rank_0(partial(path.write_bytes, whole))
    load_safetensors(engine, folder)


@on_ranks(2)
def test_a_damaged_folder_is_refused_and_changes_nothing() -> None:
    folder = shared_folder()
    _, engine = small()
    refuse(engine, f"{folder}/none", FileNotFoundError, f"a folder at {folder}/none; found nothing")
    refuse(engine, folder, FileNotFoundError, f"other *.safetensors in {folder}; found none")
    export_safetensors(engine, folder, max_shard_size="4KB")
    index = Path(folder) / INDEX
    names = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    assert len(names) > 2
    refuse(engine, str(index), NotADirectoryError, "found a file")
    whole = json.loads(index.read_text())
    weight_map = whole["weight_map"]
    dist.barrier()
    for text, expected in {
        "": "expected JSON with a weight_map",
        "[]": "expected JSON with a weight_map",
        "{}": "expected JSON with a weight_map",
        '{"weight_map": []}': "expected JSON with a weight_map",
        '{"weight_map": {}}': "expected a weight_map from tensors to names of files",
        '{"weight_map": {"a": 3}}': "expected a weight_map from tensors to names of files",
        '{"weight_map": {"a": "../b"}}': "expected a weight_map from tensors to names of files",
        json.dumps({"weight_map": {**weight_map, "z": names[0]}}): f"found no z in {names[0]}",
    }.items():
        on_rank_0(partial(index.write_text, text))
        refuse(engine, folder, ValueError, str(index), expected)
    on_rank_0(partial(index.write_text, json.dumps(whole)))
    load_safetensors(engine, folder)
    # Without an index every file counts.
    on_rank_0(index.unlink)
    load_safetensors(engine, folder)
    on_rank_0(lambda: shutil.copy(f"{folder}/{names[0]}", f"{folder}/other.safetensors"))
    refuse(engine, folder, ValueError, f"found it in {names[0]} and in other.safetensors")
    on_rank_0(partial(index.write_text, json.dumps(whole)))
    load_safetensors(engine, folder)
    on_rank_0((Path(folder) / names[1]).unlink)
    refuse(engine, folder, FileNotFoundError, f"files that it names beside it; found no {names[1]}")


@on_ranks(2)
def test_bad_arguments_of_an_export_are_refused_on_every_rank() -> None:
    folder = shared_folder()
    _, engine = small()
    first = dist.get_rank() == 0
    target = f"{folder}/new/model"
    for arguments, kind, text in (
        ((torch.int8,), ValueError, r"dtype: expected a floating-point dtype or None; found torch"),
        (("float32",), ValueError, r"dtype: expected a floating-point dtype"),
        ((None, "5"), ValueError, r"max_shard_size: expected a positive"),
        ((torch.int8 if first else None,), ValueError, r"dtype: expected a floating-point"),
        ((None, 100 if first else "zero"), ValueError, r"max_shard_size: expected a positive"),
        ((None, 1000 if first else 2000), ValueError, r"expected the same on all ranks"),
        ((torch.float16 if first else torch.bfloat16,), ValueError, r"the same on all ranks"),
    ):
        with pytest.raises(kind, match=text):
            export_safetensors(engine, target, *arguments)  # type: ignore[arg-type]
        assert visible(folder) == []
        dist.barrier()
    on_rank_0((Path(folder) / "file").touch)
    with pytest.raises(NotADirectoryError, match="found the file"):
        export_safetensors(engine, f"{folder}/file")
    with pytest.raises(OSError, match=r"file|proc"):
        export_safetensors(engine, f"{folder}/file/below")
    assert visible(folder) == ["file"]
    dist.barrier()
    with engine.unsharded():
        for call in (export_safetensors, load_safetensors):
            with pytest.raises(RuntimeError, match="to hold its sharded parameter"):
                call(engine, folder)
    model = nn.Linear(3, 3, dtype=torch.complex128)
    with pytest.raises(ValueError, match=r"^weight: expected a dtype of the safetensors format"):
        export_safetensors(fe.shard(model, strategy="no_shard"), target)


# --- faults ---


@on_ranks(2)
@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_leaves_nothing(on_rank: int) -> None:
    folder = shared_folder()
    _, engine = small()
    pwrite = os.pwrite
    num_calls = []

    def no_space(*arguments: Any) -> int:
        num_calls.append(1)
        if dist.get_rank() == on_rank and len(num_calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    for target in (f"{folder}/made/for/it", folder):
        with (
            patch.object(os, "pwrite", no_space),
            pytest.raises(OSError, match="No space left on device"),
        ):
            export_safetensors(engine, target, max_shard_size="4KB")
        assert visible(folder) == []
        dist.barrier()
    export_safetensors(engine, folder)
    before = (Path(folder) / SINGLE).read_bytes()
    with patch.object(os, "pwrite", no_space), pytest.raises(OSError, match="No space left on"):
        export_safetensors(engine, folder, torch.bfloat16)
    assert visible(folder) == [SINGLE]
    dist.barrier()
    assert (Path(folder) / SINGLE).read_bytes() == before


@on_ranks(2)
@pytest.mark.parametrize("method", ["begin", "publish"])
def test_a_failure_of_the_first_rank_is_raised_on_all(method: str) -> None:
    folder = shared_folder()
    _, engine = small()
    original = getattr(ExportFolder, method)

    def fails(self: Any, *arguments: Any) -> None:
        if method == "begin":
            original(self, *arguments)
        raise OSError(errno.EIO, "Input/output error")

    with (
        patch.object(ExportFolder, method, fails),
        pytest.raises(OSError, match="Input/output error"),
    ):
        export_safetensors(engine, f"{folder}/model")
    assert visible(folder) == []
    dist.barrier()
    export_safetensors(engine, f"{folder}/model")
    load_safetensors(engine, f"{folder}/model")


@on_ranks(1)
@pytest.mark.parametrize("limits", [(1000, 1000), (1000, 3000), (1000, "1GB"), ("1GB", 1000)])
def test_an_export_that_fails_half_way_into_place_is_never_taken_for_a_model(limits: Any) -> None:
    model, engine = small(num_blocks=1)
    older = engine.full_state_dict()
    newer = {name: value + 1 for name, value in older.items()}
    seen = set()
    for number in range(100):
        folder = shared_folder()
        load_values(model, older)
        export_safetensors(engine, folder, max_shard_size=limits[0])
        load_values(model, newer)
        with failing_after(number) as has_failed:
            try:
                export_safetensors(engine, folder, max_shard_size=limits[1])
            except OSError as error:
                assert "Input/output" in str(error)  # noqa: PT017 - the last one does not fail
        try:
            load_safetensors(engine, folder)
        except (ValueError, FileNotFoundError):
            seen.add("nothing")
        else:
            found = engine.full_state_dict()
            is_older, is_newer = (not different(found, state) for state in (older, newer))
            assert is_older or is_newer
            seen.add("older" if is_older else "newer")
        if not has_failed:
            break
    assert not has_failed
    # Only files of the same names cannot be replaced at once.
    same_names = limits[0] == limits[1]
    assert seen == ({"older", "nothing", "newer"} if same_names else {"older", "newer"})


def load_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


@contextmanager
def failing_after(number: int) -> Iterator[list[bool]]:
    """After so many of them, files are neither renamed nor removed one by one."""
    failed: list[bool] = []
    count = 0

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                failed.append(True)
                raise OSError(errno.EIO, "Input/output error")
            return original(*arguments, **options)

        return call

    with (
        patch.object(os, "replace", counted(os.replace)),
        patch.object(Path, "unlink", counted(Path.unlink)),
    ):
        yield failed


@on_ranks(2)
def test_a_failure_while_reading_is_raised_on_all() -> None:
    folder = shared_folder()
    _, engine = small()
    export_safetensors(engine, folder)

    def fails(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    original = reading_weights.read_box
    on_this_rank = fails if dist.get_rank() == 1 else original
    with (
        patch.object(reading_weights, "read_box", on_this_rank),
        pytest.raises(RuntimeError, match=r"weights are partly replaced: OSError: .*Input/output"),
    ):
        load_safetensors(engine, folder)
    load_safetensors(engine, folder)


# --- transformers ---


def tiny_llama(tied: bool) -> Any:
    """A configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=tied,
    )


def on_meta(config: Any) -> nn.Module:
    """A model without memory. Its norms and rotary embeddings have no ``reset_parameters``; the
    model's ``_init_weights`` gives them values."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config)


def train_llamas(folder: str, tied: bool) -> dict[str, Tensor]:
    """Load, train, export at each level; the logits before and after, by level."""
    config = tiny_llama(tied)
    tokens = torch.arange(24).view(2, 12) * (3 + dist.get_rank()) % 128
    probe = torch.arange(20).view(2, 10)
    found = {}
    for strategy in LEVELS:
        model = on_meta(config)
        engine = fe.shard(model, strategy=strategy)
        load_safetensors(engine, f"{folder}/start")
        with torch.no_grad():
            found[f"{strategy} before"] = model(probe).logits
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        export_safetensors(engine, f"{folder}/{strategy}", max_shard_size="100KB")
        with torch.no_grad():
            found[f"{strategy} after"] = model(probe).logits
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_of_transformers_goes_in_trains_and_comes_back(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    from transformers import LlamaForCausalLM

    config = tiny_llama(tied)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "start", max_shard_size="150KB")
    assert (tmp_path / "start" / INDEX).exists()
    probe = torch.arange(20).view(2, 10)
    found = ranks.run(train_llamas, str(tmp_path), tied, world_size=2)[0]
    for strategy in LEVELS:
        for moment, folder in (("before", "start"), ("after", strategy)):
            config.save_pretrained(tmp_path / folder)
            loaded, report = LlamaForCausalLM.from_pretrained(
                tmp_path / folder, output_loading_info=True
            )
            assert not any(report.values()), report
            with torch.no_grad():
                assert torch.equal(loaded(probe).logits, found[f"{strategy} {moment}"])
        assert not torch.equal(found[f"{strategy} before"], found[f"{strategy} after"])
