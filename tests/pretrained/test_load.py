"""``fe.load_pretrained`` reads, bit for bit, what ``from_pretrained`` reads; and saves it so."""

from __future__ import annotations

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
from tests.checkpoint.scene import different, on_rank_0, raises_each, shared_folder
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.pretrained.families import FAMILIES, build, builder
from tests.pretrained.folders import in_files, read_by_transformers


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


@on_ranks(2)
def test_missing_and_unexpected_tensors_are_listed_before_anything_is_changed() -> None:
    torch.manual_seed(0)
    folder = saved(build("llama"))
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.extra.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(3)
    del tensors["lm_head.weight"]
    on_rank_0(lambda: save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"}))
    model = builder("llama")()
    fe.shard(model)
    before = reference.full_weights(model)
    with pytest.raises(ValueError, match="found 3 that differ") as caught:
        fe.load_pretrained(model, folder)
    for part in (
        "missing lm_head.weight: expected",
        "unexpected model.extra.weight: expected nothing",
        "model.norm.weight: expected",
    ):
        assert part in str(caught.value)
    # Another shape is an error in any case.
    with pytest.raises(ValueError, match="found 1 that differ"):
        fe.load_pretrained(model, folder, strict=False)
    assert different(reference.full_weights(model), before) == []


def classifier() -> nn.Module:
    """A model whose head is not in the folder of the other."""
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
    warned = "not there, and as the model made them: classifier.weight, classifier.bias"
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
    # As transformers makes a head.
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
    """Has a buffer that is saved, and one that is not, and cannot make its parameter."""

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
def test_values_are_cast_and_trained_on() -> None:
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
    found.backward()
    assert engine.clip_grad_norm_(1.0) > 0


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
def test_two_tensors_for_one_name_and_models_without_an_engine_are_refused() -> None:
    folder = written({"a.weight": torch.ones(1), "b.weight": torch.ones(1)}, "m")
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    with pytest.raises(ValueError, match=r"model_or_engine: expected what fe\.shard"):
        fe.load_pretrained(model, folder)
    fe.shard(model, initial_values="rank0")
    with pytest.raises(ValueError, match=r"found a\.weight in m\.safetensors and b\.weight"):
        fe.load_pretrained(model, folder, key_mapping={"^[ab]": "0"})
    with pytest.raises(FileNotFoundError):
        fe.load_pretrained(model, f"{folder}/nowhere")


def bytes_read(folder: str, family: str) -> tuple[int, int]:
    """By this rank: read, and held in the stored dtype."""
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
