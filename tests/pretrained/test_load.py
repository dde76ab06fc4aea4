"""``fe.load_pretrained`` and ``from_pretrained`` read the same values, bit for bit, and
transformers loads the folders of ``fe.save_pretrained``."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint import reader
from tests import reference
from tests.checkpoint.scene import different, failing, on_rank_0, raises_each, shared_folder, update
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.pretrained.families import FAMILIES, build, builder, in_files, read_by_transformers
from tests.processes import printed, start


def loaded_and_saved(family: str, folder: str, level: str) -> list[str]:
    """Names that differ from what transformers loads."""
    expected = read_by_transformers(family, f"{folder}/theirs")
    model = builder(family)()
    engine = fe.shard(model, strategy=level, initial_values="empty")
    report = fe.load_pretrained(engine, f"{folder}/theirs")
    assert report.missing == report.unexpected == ()
    fe.save_pretrained(model, f"{folder}/ours", max_shard_size="6KB")
    found = {name: engine.full_tensor(name) for name, _ in model.named_parameters()}
    return different({**found, **dict(model.named_buffers())}, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("world_size", "level"), [(1, "no_shard"), (2, "optim_grads_params"), (4, "optim_grads")]
)
def test_a_family_is_loaded_and_saved_as_transformers_does(
    ranks: Ranks, tmp_path: Path, family: str, world_size: int, level: str
) -> None:
    torch.manual_seed(0)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    build(family).save_pretrained(theirs, max_shard_size="5KB")
    found = ranks.run(loaded_and_saved, family, str(tmp_path), level, world_size=world_size)
    assert found == [[]] * world_size
    assert different(in_files(ours), in_files(theirs)) == []
    again = read_by_transformers(family, str(ours))
    assert different(again, read_by_transformers(family, str(theirs))) == []


def written(tensors: dict[str, Tensor], name: str = "model") -> str:
    """A folder with one file, on all ranks."""
    folder = shared_folder()
    on_rank_0(lambda: save_file(tensors, f"{folder}/{name}.safetensors", {"format": "pt"}))
    return folder


def saved(model: Any) -> str:
    """A folder that transformers has written, on all ranks."""
    folder = shared_folder()
    on_rank_0(lambda: model.save_pretrained(folder))
    return folder


def not_strict(engine: Any, folder: str) -> Any:
    """Loads the tensors of the folder, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fe.load_pretrained(engine, folder, strict=False)


def classifier() -> nn.Module:
    """A model with a head, which a folder of :func:`without_head` lacks."""
    with torch.device("meta"):
        config = transformers.BertConfig(**{**FAMILIES["bert"][2], "num_labels": 3})
        return transformers.BertForSequenceClassification(config)


def without_head() -> Any:
    torch.manual_seed(3)
    return transformers.BertModel(transformers.BertConfig(**FAMILIES["bert"][2]))


@on_ranks(2)
def test_a_new_head_stays_as_the_model_made_it() -> None:
    folder = saved(without_head())
    engine = fe.shard(classifier())
    head = engine.full_tensor("classifier.weight")
    assert head.abs().sum() > 0
    with pytest.raises(ValueError, match=r"missing classifier\.weight"):
        fe.load_pretrained(engine, folder)
    warned = "initialized by the model or unchanged: classifier.weight, classifier.bias"
    warns = pytest.warns(UserWarning, match=warned) if dist.get_rank() == 0 else nullcontext()
    with warns:
        report = fe.load_pretrained(engine, folder, strict=False)
    assert report.missing == ("classifier.weight", "classifier.bias")
    assert report.unexpected == ()
    expected = load_file(f"{folder}/model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(engine.full_tensor("bert.embeddings.word_embeddings.weight"), expected)
    assert torch.equal(engine.full_tensor("classifier.weight"), head)


@on_ranks(2)
def test_an_empty_model_takes_no_step_before_it_has_values() -> None:
    folder = saved(without_head())
    torch.manual_seed(5)
    model = classifier()
    engine = fe.shard(model, initial_values="empty")
    tokens = torch.arange(8).view(2, 4)
    forward = partial(model, input_ids=tokens)
    save = partial(fe.save_checkpoint, f"{folder}/checkpoint", engine)
    none = "weights: expected values; found none"
    raises_each(
        (RuntimeError, none, forward),
        (RuntimeError, none, save),
        (ValueError, r"missing classifier\.weight", partial(fe.load_pretrained, engine, folder)),
        (RuntimeError, none, forward),
    )
    report = not_strict(engine, folder)
    assert report.missing == ("classifier.weight", "classifier.bias")
    # The new head has the initial values that transformers would give it.
    assert 0.005 < engine.full_tensor("classifier.weight").std() < 0.05
    assert not engine.full_tensor("classifier.bias").any()
    loss = model(input_ids=tokens, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert engine.clip_grad_norm_(1.0) > 0
    assert reference.mean_over_ranks(loss) == loss.item()  # all ranks have the same model


@on_ranks(2)
def test_half_a_module_gets_the_other_half_from_the_model() -> None:
    folder = written({"0.weight": torch.ones(4, 4)})
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = fe.shard(model, initial_values="empty")
    not_strict(model, folder)
    assert engine.full_tensor("0.weight").eq(1).all()
    assert 0 < engine.full_tensor("0.bias").abs().max() < 0.5
    assert engine.full_tensor("1.weight").eq(1).all()
    assert not engine.full_tensor("1.bias").any()


@on_ranks(2)
def test_what_is_loaded_stays_where_the_other_half_of_its_module_gets_values() -> None:
    folder = written({"unknown": torch.ones(1)})
    whole = fe.shard(nn.Sequential(nn.Linear(4, 4, bias=False)), initial_values="rank0")
    with closing(fe.Checkpointer(f"{folder}/c", whole)) as checkpointer:
        checkpointer.save(1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    engine = fe.shard(model, initial_values="empty")
    with closing(fe.Checkpointer(f"{folder}/c", engine)) as checkpointer:
        checkpointer.load(strict=False)
    not_strict(model, folder)
    assert torch.equal(engine.full_tensor("0.weight"), whole.full_tensor("0.weight"))
    assert 0 < engine.full_tensor("0.bias").abs().max() < 0.6


class Remembers(nn.Module):
    """Has a buffer, and a parameter of its own but no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.linear = nn.Linear(3, 3)


@on_few_ranks
def test_what_cannot_give_itself_values_may_be_empty() -> None:
    with torch.device("meta"):
        model = Remembers()
    with pytest.raises(ValueError, match=r"expected a method reset_parameters"):
        fe.shard(model)
    engine = fe.shard(model, initial_values="empty")
    assert engine.full_tensor("weight").isnan().all()
    folder = written({name: torch.full(v.shape, 2.0) for name, v in model.state_dict().items()})
    fe.load_safetensors(engine, folder)
    for name in ("weight", "linear.weight", "linear.bias"):
        assert engine.full_tensor(name).eq(2.0).all()
    assert model.mean.eq(2.0).all()


@on_ranks(2)
def test_values_are_cast_and_trained_on_and_saved_in_another_dtype() -> None:
    torch.manual_seed(1)
    folder = saved(build("mixtral").to(torch.bfloat16))
    model = builder("mixtral")()
    engine = fe.shard(model, mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fe.load_pretrained(engine, folder)
    plain = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(8).view(1, 8)
    plain.to(torch.bfloat16)
    expected = plain(input_ids=tokens, labels=tokens).loss
    found = model(input_ids=tokens, labels=tokens).loss
    assert torch.equal(found, expected)
    before = engine.full_tensor("lm_head.weight")
    update(found, reference.sgd(model.parameters()))
    assert not torch.equal(engine.full_tensor("lm_head.weight"), before)
    fe.save_pretrained(engine, f"{folder}/trained", torch.bfloat16)
    again = transformers.MixtralForCausalLM.from_pretrained(f"{folder}/trained")
    assert again.dtype is torch.bfloat16
    for name, value in again.named_parameters():
        assert torch.equal(value.detach(), engine.full_tensor(name).bfloat16()), name


@on_ranks(2)
def test_names_of_any_model_are_mapped_by_patterns() -> None:
    model = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(5, 4)})
    torch.manual_seed(2)
    weights = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    folder = written({f"net.{n.replace('first', 'one')}": v for n, v in weights.items()})
    engine = fe.shard(model, initial_values="rank0")
    fe.load_pretrained(engine, folder, key_mapping={r"^net\.": "", r"\bone\b": "first"})
    assert different(reference.full_weights(model), weights) == []


@on_ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    """Other errors of folders are tested in ``test_hugging_face.py``."""
    folder = written({"a.weight": torch.ones(1), "b.weight": torch.ones(1)}, "m")
    other = written({"0.weight": torch.ones(3), "1.weight": torch.ones(1)})
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    load = partial(fe.load_pretrained, model)
    text = r"model_or_engine: expected the engine that fe\.shard"
    raises_each((ValueError, text, partial(load, folder)))
    fe.shard(model, initial_values="rank0")
    before = reference.full_weights(model)
    two = r"found a\.weight in m\.safetensors and b\.weight"
    raises_each(
        (ValueError, two, partial(load, folder, key_mapping={"^[ab]": "0"})),
        (FileNotFoundError, "nowhere", partial(load, f"{folder}/nowhere")),
        (ValueError, r"missing 0\.weight(.|\n)*unexpected a\.weight", partial(load, folder)),
        (ValueError, "found 2 that differ", partial(load, other)),
        # Another shape is an error in any case.
        (ValueError, "found 1 that differ", partial(load, other, strict=False)),
    )
    assert different(reference.full_weights(model), before) == []


@on_ranks(2)
def test_the_model_s_own_save_pretrained_saves_full_weights_or_raises() -> None:
    model = build("llama")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = fe.shard(model, initial_values="rank0")
    folder = shared_folder()
    for each in (model, model.model):
        with pytest.raises(ValueError, match=r"fe\.save_pretrained\(engine, folder\) or fe\."):
            each.save_pretrained(folder)
    if torch.distributed.get_rank() == 0:  # nothing is gathered before the error
        with pytest.raises(ValueError, match=r"storage: expected a full tensor"):
            model.save_pretrained(folder)
    state = engine.full_state_dict(rank0_only=True)
    on_rank_0(lambda: model.save_pretrained(f"{folder}/given", state_dict=state))
    with engine.unsharded():
        on_rank_0(lambda: model.save_pretrained(f"{folder}/full"))
    for name in ("given", "full"):
        found = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        assert different(found.state_dict(), expected) == []


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int8))


@on_ranks(2)
def test_integers_are_read_only_where_each_value_fits() -> None:
    weights = {"linear.weight": torch.ones(2, 2), "linear.bias": torch.ones(2)}
    fits = written({**weights, "counts": torch.tensor([1, 2, 3], dtype=torch.int8)})
    too_wide = written({**weights, "counts": torch.tensor([1, 200, 70_000])})
    engine = fe.shard(model := Counts(), initial_values="rank0")
    fe.load_pretrained(engine, fits)
    assert model.counts.tolist() == [1, 2, 3]
    load = partial(fe.load_pretrained, engine, too_wide)
    raises_each((ValueError, r"counts: expected shape \(3,\), int8; found .*int64", load))
    assert model.counts.tolist() == [1, 2, 3]


def bytes_read(folder: str, family: str) -> tuple[int, int]:
    """Bytes that this rank reads, and bytes of its shards."""
    engine = fe.shard(builder(family)(), initial_values="rank0")
    read = patch.object(reader, "_read_exactly", wraps=reader._read_exactly)
    with read as read_exactly:
        fe.load_pretrained(engine, folder)
    held = sum(param.to_local().nbytes for param in engine.model.parameters())  # type: ignore[operator]
    return sum(call.args[2].nbytes for call in read_exactly.call_args_list), held


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3 moe"])
def test_a_rank_reads_what_it_owns(ranks: Ranks, tmp_path: Path, family: str) -> None:
    build(family).save_pretrained(tmp_path)
    for read, held in ranks.run(bytes_read, str(tmp_path), family, world_size=4):
        assert 0 < held <= read <= 1.1 * held


@on_ranks(2)
def test_a_failure_leaves_the_older_model() -> None:
    folder = shared_folder()
    model = build("llama")
    engine = fe.shard(model, initial_values="rank0")
    fe.save_pretrained(engine, folder)
    before = in_files(Path(folder))
    with failing(os, "pwrite"), pytest.raises(OSError, match="No space left"):
        fe.save_pretrained(engine, folder)
    assert (Path(folder) / "config.json").is_file()
    assert not (Path(folder) / "config.json.before").exists()
    assert in_files(Path(folder)).keys() == before.keys()
    transformers.LlamaForCausalLM.from_pretrained(folder)
    dist.barrier()
    # The save fails again, and then so does the rename that restores the older config.
    last = failing(os, "replace", on_rank=0, after=1)
    with failing(os, "pwrite"), last, pytest.raises(OSError, match="No space left") as caught:
        fe.save_pretrained(engine, folder)
    assert dist.get_rank() or "is still named config.json.before" in str(caught.value)
    assert (Path(folder) / "config.json.before").is_file()


@on_ranks(2)
def test_ranks_that_still_evaluate_take_part_in_a_save() -> None:
    folder, model = shared_folder(), build("llama")
    engine = fe.shard(model, initial_values="rank0")
    tokens = torch.arange(8).view(1, 8)
    with engine.together(), torch.no_grad():
        for _ in range(1 + 3 * dist.get_rank()):
            model(input_ids=tokens)
        fe.save_pretrained(engine, folder)
        for _ in range(4 - 3 * dist.get_rank()):
            model(input_ids=tokens)
        fe.load_pretrained(engine, folder)


KILLED = """
import os, signal, sys
import torch
import fsdp_engine as fe
from tests.pretrained.families import build, in_files

folder, count = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = build("llama")
fe.shard(model)
pwrite, replace = os.pwrite, os.replace
left = [count]


def counted(function):
    def call(*arguments):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments)

    return call


os.pwrite, os.replace = counted(pwrite), counted(replace)
fe.save_pretrained(model, folder, max_shard_size="6KB")
print("done", count - left[0])
"""


@pytest.mark.thorough
def test_a_kill_leaves_nothing_that_is_taken_for_a_model(tmp_path: Path) -> None:
    theirs = tmp_path / "older"
    build("llama").save_pretrained(theirs)

    calls = int(printed("-c", KILLED, str(tmp_path / "whole"), "10000").split()[-1])
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    for number, count in enumerate((0, 1, calls // 2, calls - 1)):
        folder = tmp_path / str(number)
        shutil.copytree(theirs, folder)
        killed = start("-c", KILLED, str(folder), str(count))
        killed.communicate(timeout=300)
        assert killed.returncode == -signal.SIGKILL
        if count:
            with pytest.raises((OSError, ValueError)):
                transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        else:  # nothing has changed yet
            transformers.LlamaForCausalLM.from_pretrained(folder)


@on_ranks(2)
def test_other_models_are_refused() -> None:
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model_or_engine: expected the engine that fe\.shard"):
        fe.save_pretrained(model, folder)
    fe.shard(model, initial_values="rank0")
    no_library = "expected a model of transformers or diffusers; found Sequential.*export_safetens"
    with pytest.raises(TypeError, match=no_library):
        fe.save_pretrained(model, folder)
    assert not list(Path(folder).iterdir())


class Denoiser(nn.Module):
    """A model that writes its config itself, as those of diffusers do."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, noisy: Tensor) -> Tensor:
        return self.leave(self.enter(noisy))

    def save_config(self, folder: str) -> None:
        (Path(folder) / self.config_name).write_text('{"_class_name": "Denoiser"}')


@pytest.mark.parametrize("size", ["5GB", 200])
@on_ranks(2)
def test_a_model_of_diffusers_has_its_own_names_of_files(size: int | str) -> None:
    folder = Path(shared_folder())
    engine = fe.shard(Denoiser(), strategy="optim_grads_params")
    fe.save_pretrained(engine, folder, max_shard_size=size)
    index = (folder / "diffusion_pytorch_model.safetensors.index.json").is_file()
    assert index is (size == 200)
    assert all(path.name.startswith("diffusion_") for path in folder.glob("*.safetensors"))
    assert (folder / "config.json").read_text() == '{"_class_name": "Denoiser"}'
    whole = engine.full_state_dict()
    assert different(in_files(folder), whole) == []
    other = fe.shard(Denoiser(), strategy="optim")
    fe.load_pretrained(other, folder)
    assert different(other.full_state_dict(), whole) == []
