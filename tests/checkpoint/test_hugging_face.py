"""The engine loads folders of safetensors that other libraries wrote, and they read its exports.

The tests use the real libraries: ``safetensors`` reads every export, ``huggingface_hub`` says how
tensors are split over files, and ``transformers`` writes and reads a model.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable
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
from fsdp_engine.checkpoint.offline import find_folders
from fsdp_engine.checkpoint.reader import Reader
from fsdp_engine.checkpoint.safetensors_folder import (
    INDEX,
    SINGLE,
    ExportFolder,
    parse_size,
    plan_file,
    read_header,
)
from fsdp_engine.strategies import LEVELS
from tests.checkpoint.scene import (
    TIED,
    Config,
    add_one,
    different,
    exported,
    failing,
    most_allocated,
    on_rank_0,
    raises_each,
    refused,
    shard,
    shared_folder,
    small,
    trained,
    visible,
)
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

LEVEL_3: Config = {"strategy": "optim_grads_params", "outer": "optim", "shape": (2, 2)}


def load_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


@on_ranks(2)
def test_the_next_forward_uses_what_was_loaded() -> None:
    folder = shared_folder()
    torch.manual_seed(5)
    plain = Transformer(num_blocks=1)
    on_rank_0(lambda: save_file(plain.state_dict(), f"{folder}/{SINGLE}"))
    on_rank_0(partial(dcp.save, {"model": plain.state_dict()}, checkpoint_id=folder, no_dist=True))
    tokens, targets = token_batch(2, 0)
    for strategy, dtype in itertools.product(LEVELS, (None, torch.bfloat16)):
        model = Transformer(num_blocks=1)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        copy = Transformer(num_blocks=1).to(dtype or torch.float32)
        copy.load_state_dict(plain.state_dict())
        loads = (
            partial(load_safetensors, engine, folder),
            partial(fe.load_checkpoint, folder, engine),
        )
        for load in loads:
            add_one(model, engine)
            model(tokens, targets).backward()  # gathers weights that the load must replace
            load()
            with torch.no_grad():
                assert torch.equal(model(tokens), copy(tokens))
            assert different(engine.full_state_dict(), plain.state_dict()) == []


@on_ranks(4)
def test_floating_point_tensors_are_cast_and_others_are_not() -> None:
    folder = shared_folder()
    model, engine, _ = trained(LEVEL_3)
    first = model.odd.first.weight.full_tensor()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = {k: v for k, v in engine.full_state_dict().items() if isinstance(v, Tensor)}
        export_safetensors(engine, folder, dtype)
        expected = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in state.items()
            if name not in TIED
        }
        if dist.get_rank() == 0:  # the buffers of rank 0 are exported
            assert different(exported(folder), expected) == []
        load_safetensors(engine, folder)
        dist.barrier()
    after = model.odd.first.weight.full_tensor()
    assert after.dtype == torch.float32
    assert torch.equal(after, first.to(torch.bfloat16).to(torch.float16).float())
    assert not torch.equal(after, first)


@on_ranks(2)
def test_a_buffer_of_one_element_may_have_any_stride() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("one", torch.arange(12.0).view(3, 4)[:1, 3])
    engine = fe.shard(model, initial_values="rank0")
    folder = shared_folder()
    export_safetensors(engine, folder)
    assert exported(folder)["one"].tolist() == [3.0]


@on_ranks(2)
def test_a_tied_weight_is_written_once_and_loads_from_any_of_its_names() -> None:
    folder = shared_folder()
    _, engine, _ = small(tied=True, steps=0)
    weight = engine.full_tensor("head.weight")
    export_safetensors(engine, folder)
    assert visible(folder) == [SINGLE]
    with safe_open(f"{folder}/{SINGLE}", "pt") as file:
        assert {"embedding.weight", "head.weight"} & {*file.keys()} == {"embedding.weight"}
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    for name in ("embedding.weight", "head.weight"):
        other, other_engine, _ = small(seed=3, tied=True, steps=0)
        load_safetensors(other_engine, folder, {"embedding.weight": name})
        assert other.head.weight is other.embedding.weight
        assert torch.equal(other_engine.full_tensor("head.weight"), weight)
    _, untied, _ = small(seed=3, steps=0)
    with pytest.raises(ValueError, match=r"missing head\.weight: expected shape \(23, 12\)"):
        load_safetensors(untied, folder)


# --- files ---


@on_ranks(2)
def test_files_are_split_as_the_hub_splits_them() -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    folder = shared_folder()
    _, engine, _ = small(steps=0)
    state = engine.full_state_dict()
    largest = max(value.nbytes for value in state.values())
    for limit in (100, 1000, largest, 5000, "9KB", "1.5MB"):
        export_safetensors(engine, folder, max_shard_size=limit)
        expected = split_torch_state_dict_into_shards(state, max_shard_size=limit)
        files = expected.filename_to_tensors
        assert {path.name for path in Path(folder).glob("*.safetensors")} == set(files)
        for name, tensors in files.items():
            assert load_file(f"{folder}/{name}").keys() == set(tensors)
        assert (Path(folder) / INDEX).exists() is (len(files) > 1)
        if len(files) > 1:
            index = json.loads((Path(folder) / INDEX).read_text())
            assert index["weight_map"] == expected.tensor_to_filename
            assert index["metadata"] == {"total_size": sum(v.nbytes for v in state.values())}
        load_safetensors(engine, folder)
        dist.barrier()


def test_every_dtype_of_the_library_is_known_and_aligned(tmp_path: Path) -> None:
    for name, dtype in safetensors_folder.DTYPES.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({"x": torch.ones(3, 2).to(dtype)}, path)
        assert [(each.dtype, each.shape) for each in read_header(path)] == [(dtype, (3, 2))]
        plan = plan_file([("x", dtype, (3, 2))], {})
        assert len(plan.head) == 8 + int.from_bytes(plan.head[:8], "little")
        assert len(plan.head) % 8 == 0
        assert plan.head[8:].startswith(b'{"__metadata__":{},"x":{"dtype":"%s"' % name.encode())
    dtypes = {str(dtype): dtype for dtype in safetensors_folder.DTYPES.values()}
    plan = plan_file([(name, dtypes[name], (3,)) for name in sorted(dtypes)], {})
    assert all(start % dtypes[name].itemsize == 0 for name, start in plan.starts.items())
    with pytest.raises(ValueError, match=r"^x: expected a dtype of .*; found torch\.complex128"):
        plan_file([("x", torch.complex128, ())], {})


def test_sizes_are_positive_and_decimal() -> None:
    for size, expected in ((1, 1), ("5GB", 5 * 10**9), (" 1.5 kb", 1500), ("2TB", 2 * 10**12)):
        assert parse_size(size) == expected
    bad: list[Any] = [0, -5, True, 1.5, None, "", "5", "5GiB", "GB", "0KB", "-1KB"]
    message = r"^max_shard_size: expected a positive .*; found"
    raises_each(*((ValueError, message, partial(parse_size, size)) for size in bad))


# --- from a checkpoint ---


def save_and_export(folder: str) -> None:
    _, engine, optimizer = trained(LEVEL_3)
    fe.save_checkpoint(f"{folder}/checkpoint", engine, optimizer)
    checkpointer = fe.Checkpointer(f"{folder}/job", engine, optimizer)
    checkpointer.save_async(1)
    engine.full_state_dict()  # while a thread writes
    checkpointer.close()
    export_safetensors(engine, f"{folder}/engine", torch.bfloat16, 2000)
    export_safetensors(engine, f"{folder}/engine-exact")
    cut = {
        "w": distribute_tensor(PLAIN["w"], mesh_of(4), [Shard(1)]),
        "v": distribute_tensor(PLAIN["v"], mesh_of(2, 2), [Shard(0), Shard(2)]),
    }
    dcp.save({"model": cut}, checkpoint_id=f"{folder}/cut")


PLAIN = {"w": torch.arange(60.0).view(6, 10), "v": torch.arange(24).view(2, 3, 4)}


def test_a_checkpoint_exports_as_its_engine_does(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_export, str(tmp_path))
    assert not dist.is_initialized()
    saved = exported(tmp_path / "engine-exact")
    num_bytes = sum(saved[name].nbytes for name in (*saved, *TIED.values()))
    options: dict[str, tuple[Any, ...]] = {"engine": (torch.bfloat16, 2000), "engine-exact": ()}
    for size, name in itertools.product((16 << 20, 256), options):
        told: list[int] = []
        call: Any = partial(export_safetensors, tmp_path / "checkpoint", tmp_path / "out")
        with patch.object(hugging_face, "BUFFER_BYTES", size):
            call(*options[name], progress=told.append)
            export_safetensors(str(tmp_path / "cut"), str(tmp_path / "cut-out"))
        found, expected = exported(tmp_path / "out"), exported(tmp_path / name)
        # A checkpoint without a manifest does not say which tensors are tied.
        for dropped, kept in TIED.items():
            assert torch.equal(found.pop(dropped), expected[kept])
        assert different(found, expected) == []
        assert sum(told) == num_bytes  # in the checkpoint's dtypes, tied weights twice
        assert different(exported(tmp_path / "cut-out"), PLAIN) == []


def test_an_export_from_a_checkpoint_with_a_manifest_has_tied_weights_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_and_export, str(tmp_path))
    (folder,) = find_folders(tmp_path / "job", None)
    export_safetensors(folder, tmp_path / "out")
    found, expected = tmp_path / "out" / SINGLE, tmp_path / "engine-exact" / SINGLE
    assert different(load_file(found), load_file(expected)) == []
    with safe_open(found, "pt") as ours, safe_open(expected, "pt") as of_engine:
        assert ours.metadata() == of_engine.metadata() == {"format": "pt", **TIED}


def test_a_source_that_is_no_checkpoint_of_a_model_is_refused(tmp_path: Path) -> None:
    dcp.save({"optimizer": PLAIN}, checkpoint_id=tmp_path / "other", no_dist=True)
    out = tmp_path / "out"

    def export(source: Any) -> Callable[[], Any]:
        return partial(export_safetensors, source, out)

    raises_each(
        (FileNotFoundError, "expected a checkpoint at .*none", export(tmp_path / "none")),
        (ValueError, r"under model\.<name>; found only optimizer", export(tmp_path / "other")),
        (TypeError, "an Engine or the path .*; found Linear", export(nn.Linear(1, 1))),
    )
    assert not out.exists()


# --- bytes and memory ---


@on_ranks(4)
def test_every_byte_is_written_once() -> None:
    for inner, outer in (("no_shard", "no_shard"), ("optim_grads_params", "optim_grads_params")):
        config: Config = {"strategy": inner, "outer": outer, "shape": (2, 2)}
        engine = shard(Transformer(num_blocks=2), config)
        total = sum(value.nbytes for value in engine.full_state_dict().values())
        with patch.object(os, "pwrite", wraps=os.pwrite) as pwrite:
            export_safetensors(engine, shared_folder(), max_shard_size="5KB")
        written = torch.tensor(sum(len(call.args[1]) for call in pwrite.call_args_list))
        # Ranks write equal shares, except for padding and tensors that are not sharded.
        assert written < 0.4 * total
        dist.all_reduce(written)
        assert written == total


@on_ranks(2)
def test_memory_is_bounded_by_the_buffer() -> None:
    folder = shared_folder()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    whole = {"model": copy.deepcopy(model).bfloat16().state_dict()}
    engine = fe.shard(model)
    fe.save_checkpoint(f"{folder}/checkpoint", engine)
    on_rank_0(lambda: dcp.save(whole, checkpoint_id=f"{folder}/plain", no_dist=True))
    bound = 1 << 16
    out, alone = f"{folder}/out", f"{folder}/out-{dist.get_rank()}"
    with (
        patch.object(hugging_face, "BUFFER_BYTES", bound),
        patch.object(reading_weights, "BUFFER_BYTES", bound // reading_weights.READERS),
        patch.object(Reader.__init__, "__defaults__", (bound,)),
    ):
        for name in ("checkpoint", "plain"):
            load = partial(fe.load_checkpoint, f"{folder}/{name}", engine)
            assert 0 < most_allocated(load) <= 1.5 * bound
        model.register_buffer("turned", torch.randn(300, 700).t())
        for dtype in (None, torch.bfloat16):
            for function in (
                partial(export_safetensors, engine, out, dtype, "1.5MB"),
                partial(load_safetensors, engine, out),
                partial(export_safetensors, f"{folder}/checkpoint", alone, dtype, "1.5MB"),
            ):
                assert 0 < most_allocated(function) <= 1.5 * bound
    # Checks that most_allocated counts tensors.
    assert most_allocated(engine.full_state_dict) > 40 * bound


# --- errors ---


@on_ranks(2)
def test_tensors_and_names_that_do_not_fit_are_listed_and_nothing_changes() -> None:
    folder = shared_folder()
    model, engine, _ = small(steps=0)

    def refuse(*parts: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        with refused(model, *parts, kind=kind):
            load_safetensors(engine, folder, **options)

    state = engine.full_state_dict()
    missing = ("blocks.0.qkv.weight", "norm.bias")
    other = {name: value for name, value in state.items() if name not in missing}
    other["head.weight"] = other["head.weight"].t().contiguous()
    other["norm.weight"] = other["norm.weight"].to(torch.complex64)
    other["stranger"] = torch.ones(3, dtype=torch.int8)
    on_rank_0(lambda: save_file(other, f"{folder}/{SINGLE}"))
    refuse(
        "found 5 that differ",
        "missing blocks.0.qkv.weight: expected shape (36, 12), float32; found nothing",
        "missing norm.bias: expected shape (12,), float32; found nothing",
        "head.weight: expected shape (23, 12), float32; found shape (12, 23), float32 "
        "(head.weight in model.safetensors)",
        "norm.weight: expected shape (12,), float32; found shape (12,), complex64",
        "unexpected stranger: expected nothing; found shape (3,), int8 (stranger in model.safe",
    )
    foreign = {f"transformer.{name}": value + 1 for name, value in state.items()}
    on_rank_0(lambda: save_file({**foreign, "step": torch.ones(1)}, f"{folder}/{SINGLE}"))

    def rename(name: str) -> str | None:
        return None if name == "step" else name.removeprefix("transformer.")

    mapping = {f"transformer.{name}": name for name in state} | {"step": None}
    expected = {name: value + 1 for name, value in state.items()}
    for each in (rename, mapping):
        load_values(model, state)
        load_safetensors(engine, folder, each)
        assert different(engine.full_state_dict(), expected) == []
    refuse("missing head.weight", "unexpected step")
    compiled = {f"_orig_mod.{name}": value for name, value in state.items()}
    on_rank_0(lambda: save_file(compiled, f"{folder}/{SINGLE}"))
    refuse("unexpected _orig_mod.head.weight", "puts _orig_mod. before names: compile the model in")
    on_rank_0(lambda: save_file({**foreign, "step": torch.ones(1)}, f"{folder}/{SINGLE}"))
    few = {name: mapping[name] for name in list(mapping)[2:]}
    refuse("found 4 that differ", "unexpected transformer.", rename=few)
    refuse("head.weight: expected one stored tensor", rename={**mapping, "step": "head.weight"})
    refuse("expected a function or a mapping; found 3", kind=TypeError, rename=3)
    refuse("expected a name or None for step", kind=TypeError, rename={"step": 3})


def damaged(whole: bytes) -> list[tuple[bytes, str]]:
    """Files with a defect, and the error's text."""
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def with_header(header: Any) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def entry(**changes: Any) -> bytes:
        return with_header({**header, "norm.bias": {**header["norm.bias"], **changes}})

    first, *_ = (name for name in header if name != "__metadata__")
    start, stop = header["norm.bias"]["data_offsets"]
    no_file, no_sizes = "expected a safetensors file", "expected sizes and offsets of norm.bias"
    return [
        (b"", no_file),
        (whole[:5], no_file),
        (b"\xff" * 8 + whole[8:], no_file),
        (whole[: 8 + length // 2], no_file),
        (whole[:-1], f"expected {len(whole)} bytes, as its header says"),
        (whole + b"x", f"expected {len(whole)} bytes, as its header says"),
        (with_header(b"{]"), "expected a header in JSON of 2 bytes"),
        (with_header(b'{"\xff": 1}'), "expected a header in JSON"),
        (with_header(b"[" * 200_000), "expected a header in JSON"),
        (with_header([1]), "expected a JSON object as header; found b'[1]'"),
        (with_header({"a": 1}), "expected dtype, shape and two data_offsets of a"),
        (with_header({**header, first: {}}), f"two data_offsets of {first}; found {{}}"),
        (entry(dtype="F4"), "to have one of the dtypes F64, F32"),
        (entry(dtype=[]), "to have one of the dtypes F64, F32"),
        (entry(data_offsets=[1, 2, 3]), "two data_offsets of norm.bias"),
        *((entry(shape=shape), no_sizes) for shape in ([-12], "12", [12.0])),
        (entry(shape=[13]), "expected 52 bytes of norm.bias, F32 of shape [13]"),
        (entry(data_offsets=[start + 4, stop + 4]), f"expected norm.bias at byte {start}"),
    ]


@on_ranks(2)
def test_a_damaged_file_or_folder_is_named_and_changes_nothing() -> None:
    folder = shared_folder()
    model, engine, _ = small(steps=0)

    def refuse(*parts: str, place: str = folder, kind: type[Exception] = ValueError) -> None:
        with refused(model, *parts, kind=kind):
            load_safetensors(engine, place)

    missing = FileNotFoundError
    refuse(f"a folder at {folder}/none; found nothing", place=f"{folder}/none", kind=missing)
    refuse(f"other *.safetensors in {folder}; found none", kind=missing)
    export_safetensors(engine, folder)
    path = Path(folder) / SINGLE
    content = path.read_bytes()
    for changed, text in damaged(content):
        on_rank_0(partial(path.write_bytes, changed))
        refuse(str(path), text)
    on_rank_0(partial(path.write_bytes, content))
    load_safetensors(engine, folder)
    export_safetensors(engine, folder, max_shard_size="4KB")
    index = Path(folder) / INDEX
    names = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    assert len(names) > 2
    refuse("found a file", place=str(index), kind=NotADirectoryError)
    whole = index.read_text()
    with_z = json.dumps({"weight_map": {**json.loads(whole)["weight_map"], "z": names[0]}})
    no_names = "expected a weight_map from tensors to files"
    for text, expected in {
        **dict.fromkeys(("", "[]", "{}", '{"weight_map": []}'), "expected JSON with a weight_map"),
        '{"weight_map": {}}': no_names,
        '{"weight_map": {"a": 3}}': no_names,
        '{"weight_map": {"a": "../b"}}': no_names,
        with_z: f"found no z in {names[0]}",
    }.items():
        on_rank_0(partial(index.write_text, text))
        refuse(str(index), expected)
    on_rank_0(index.unlink)
    load_safetensors(engine, folder)  # without an index all files are read
    on_rank_0(lambda: shutil.copy(f"{folder}/{names[0]}", f"{folder}/other.safetensors"))
    refuse(f"found it in {names[0]} and in other.safetensors")
    on_rank_0(partial(index.write_text, whole))
    load_safetensors(engine, folder)
    on_rank_0((Path(folder) / names[1]).unlink)
    refuse(f"files that it names in the same folder; found no {names[1]}", kind=missing)


@on_ranks(2)
def test_bad_arguments_of_an_export_are_refused_on_every_rank() -> None:
    folder = shared_folder()
    _, engine, _ = small(steps=0)
    first = dist.get_rank() == 0
    no_dtype, no_size = "dtype: expected a floating-point dtype", "max_shard_size: expected a pos"
    differ = "expected the same on all ranks"

    def export(*arguments: Any, to: str = "new/model", what: Any = engine) -> Callable[[], Any]:
        return partial(export_safetensors, what, f"{folder}/{to}", *arguments)

    strange = fe.shard(nn.Linear(3, 3, dtype=torch.complex128), strategy="no_shard")
    raises_each(
        (ValueError, f"{no_dtype} or None; found torch", export(torch.int8)),
        (ValueError, no_dtype, export("float32")),
        (ValueError, no_size, export(None, "5")),
        (ValueError, no_dtype, export(torch.int8 if first else None)),
        (ValueError, no_size, export(None, 100 if first else "zero")),
        (ValueError, differ, export(None, 1000 if first else 2000)),
        (ValueError, differ, export(torch.float16 if first else torch.bfloat16)),
        (ValueError, "^weight: expected a dtype of the safetensors format", export(what=strange)),
    )
    assert visible(folder) == []
    on_rank_0((Path(folder) / "file").touch)
    raises_each(
        (NotADirectoryError, "found the file", export(to="file")),
        (OSError, "file|proc", export(to="file/below")),
    )
    assert visible(folder) == ["file"]
    dist.barrier()
    at_rest = "expected the sharded parameter as"
    with engine.unsharded():
        raises_each(
            (RuntimeError, at_rest, export()),
            (RuntimeError, at_rest, partial(load_safetensors, engine, folder)),
        )


# --- faults ---


@on_ranks(2)
def test_a_fault_on_one_rank_is_raised_on_all_and_leaves_nothing() -> None:
    model, engine, _ = small(steps=0)
    begin = ExportFolder.begin

    def begins_and_fails(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        raise OSError("No space left on device")

    faults: list[Callable[[], Any]] = [
        partial(failing, os, "pwrite", on_rank=0, after=3),
        partial(failing, os, "pwrite", on_rank=1, after=3),
        partial(failing, ExportFolder, "publish"),
        partial(patch.object, ExportFolder, "begin", begins_and_fails),
    ]
    for fault in faults:
        folder = shared_folder()
        for target in (f"{folder}/made/for/it", folder):
            with fault(), pytest.raises(OSError, match="No space left on device"):
                export_safetensors(engine, target, max_shard_size="4KB")
            assert visible(folder) == []
            dist.barrier()
        export_safetensors(engine, folder)
        before = (Path(folder) / SINGLE).read_bytes()
        with fault(), pytest.raises(OSError, match="No space left on"):
            export_safetensors(engine, folder, torch.bfloat16)
        assert visible(folder) == [SINGLE]
        dist.barrier()
        assert (Path(folder) / SINGLE).read_bytes() == before
    partly = pytest.raises(RuntimeError, match=r"weights are partly replaced: OSError: .*No space")
    with failing(reading_weights, "read_box", on_rank=1), partly:
        load_safetensors(engine, folder)
    load_safetensors(engine, folder)
    assert model(*token_batch(2, 0)).isfinite()


@on_ranks(1)
@pytest.mark.parametrize("limits", [(1000, 1000), (1000, 3000), (1000, "1GB"), ("1GB", 1000)])
def test_an_export_that_fails_half_way_into_place_is_never_taken_for_a_model(limits: Any) -> None:
    """For each ``number``, renames and removals fail after that many calls. Other files stay."""
    model, engine, _ = small(num_blocks=1, steps=0)
    older = engine.full_state_dict()
    newer = {name: value + 1 for name, value in older.items()}
    others = ["adapter_model.safetensors", "config.json"]
    seen = set()
    has_failed = True
    for number in range(100):
        folder = Path(shared_folder()) / "new" / "model"
        load_values(model, older)
        export_safetensors(engine, folder, max_shard_size=limits[0])
        for name in others:
            (folder / name).write_text(name)
        (folder / ".exporting-dead").mkdir()
        load_values(model, newer)
        counter = itertools.count()
        with (
            failing(os, "replace", after=number, counter=counter),
            failing(Path, "unlink", after=number, counter=counter),
        ):
            try:
                export_safetensors(engine, folder, max_shard_size=limits[1])
                has_failed = False
            except OSError as error:
                assert "No space left" in str(error)  # noqa: PT017 - the last one does not fail
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
    count = len(visible(folder)) - 3
    parts = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert {*visible(folder)} == {*others, *([SINGLE] if limits[1] == "1GB" else [INDEX, *parts])}
    # Replacing several files of the same names is not atomic.
    same_names = limits[0] == limits[1]
    assert seen == ({"older", "nothing", "newer"} if same_names else {"older", "newer"})
