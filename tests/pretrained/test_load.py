"""``fe.load_pretrained`` reads, bit for bit, what ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_engine as fe
from tests.checkpoint.scene import shared_folder
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.pretrained.families import FAMILIES, build, builder
from tests.pretrained.folders import read_by_transformers


def loaded(family: str, folder: str, level: str) -> list[str]:
    """Names that differ."""
    expected = read_by_transformers(family, folder)
    model = builder(family)()
    engine = fe.shard(model, strategy=level, initial_values="empty")
    report = fe.load_pretrained(engine, folder)
    assert report.missing == report.unexpected == ()
    found = {name: engine.full_tensor(name) for name, _ in model.named_parameters()}
    found |= dict(model.named_buffers())
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value.detach())
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_loads_as_transformers_loads_it(ranks: Ranks, tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    build(family).save_pretrained(tmp_path)
    for world_size, level in ((1, "no_shard"), (2, "optim_grads_params")):
        found = ranks.run(loaded, family, str(tmp_path), level, world_size=world_size)
        assert found == [[]] * world_size


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_loads_on_four_ranks_in_two_axes(
    ranks: Ranks, tmp_path: Path, family: str
) -> None:
    torch.manual_seed(0)
    build(family).save_pretrained(tmp_path, max_shard_size="5KB")
    found = ranks.run(loaded, family, str(tmp_path), "optim_grads_params", world_size=4)
    assert found == [[]] * 4


@on_ranks(2)
def test_missing_and_unexpected_tensors_are_listed_before_anything_is_changed() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        build("llama").save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        tensors["model.extra.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(3)
        del tensors["lm_head.weight"]
        save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    dist.barrier()
    model = builder("llama")()
    engine = fe.shard(model)
    before = {name: engine.full_tensor(name) for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match="found 3 that differ") as caught:
        fe.load_pretrained(model, folder)
    told = str(caught.value)
    assert "missing lm_head.weight: expected" in told
    assert "unexpected model.extra.weight: expected nothing" in told
    assert "model.norm.weight: expected" in told
    # Another shape is an error in any case.
    with pytest.raises(ValueError, match="found 1 that differ"):
        fe.load_pretrained(model, folder, strict=False)
    for name, value in before.items():
        assert torch.equal(engine.full_tensor(name), value)


@on_ranks(2)
def test_a_new_head_stays_as_the_model_made_it() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        config = transformers.BertConfig(**FAMILIES["bert"][2])
        transformers.BertModel(config).save_pretrained(folder)
    dist.barrier()
    config = transformers.BertConfig(**{**FAMILIES["bert"][2], "num_labels": 3})
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    engine = fe.shard(model)
    head = engine.full_tensor("classifier.weight")
    assert head.abs().sum() > 0
    with pytest.raises(ValueError, match=r"missing classifier\.weight"):
        fe.load_pretrained(engine, folder)
    warned = "not there, and as the model made them: classifier.weight, classifier.bias"
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=warned):
            report = fe.load_pretrained(engine, folder, strict=False)
    else:
        report = fe.load_pretrained(engine, folder, strict=False)
    assert report.missing == ("classifier.weight", "classifier.bias")
    assert report.unexpected == ()
    expected = load_file(f"{folder}/model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(engine.full_tensor("bert.embeddings.word_embeddings.weight"), expected)
    assert torch.equal(engine.full_tensor("classifier.weight"), head)


@on_ranks(2)
def test_an_empty_model_takes_no_step_before_it_has_values() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        config = transformers.BertConfig(**FAMILIES["bert"][2])
        transformers.BertModel(config).save_pretrained(folder)
    dist.barrier()

    def made() -> nn.Module:
        config = transformers.BertConfig(**{**FAMILIES["bert"][2], "num_labels": 3})
        with torch.device("meta"):
            model: nn.Module = transformers.BertForSequenceClassification(config)
        return model

    torch.manual_seed(5)
    model = made()
    engine = fe.shard(model, initial_values="empty")
    tokens = torch.arange(8).view(2, 4)
    for use in (
        lambda: model(input_ids=tokens),
        lambda: fe.save_checkpoint(f"{folder}/checkpoint", engine),
    ):
        with pytest.raises(RuntimeError, match="weights: expected values; found none"):
            use()
    with pytest.raises(ValueError, match=r"missing classifier\.weight"):
        fe.load_pretrained(engine, folder)
    with pytest.raises(RuntimeError, match="weights: expected values; found none"):
        model(input_ids=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fe.load_pretrained(engine, folder, strict=False)
    assert report.missing == ("classifier.weight", "classifier.bias")
    head = engine.full_tensor("classifier.weight")
    # As transformers makes a head.
    assert 0.005 < head.std() < 0.05
    assert not engine.full_tensor("classifier.bias").any()
    loss = model(input_ids=tokens, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert engine.clip_grad_norm_(1.0) > 0
    # All ranks have the same model.
    losses = [None, None]
    dist.all_gather_object(losses, loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_half_a_module_gets_the_other_half_from_the_model() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        save_file({"0.weight": torch.ones(4, 4)}, f"{folder}/model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = fe.shard(model, initial_values="empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fe.load_pretrained(model, folder, strict=False)
    assert engine.full_tensor("0.weight").eq(1).all()
    assert 0 < engine.full_tensor("0.bias").abs().max() < 0.5
    assert engine.full_tensor("1.weight").eq(1).all()
    assert not engine.full_tensor("1.bias").any()


@on_ranks(2)
def test_what_is_loaded_stays_where_the_other_half_of_its_module_gets_values() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        save_file({"unknown": torch.ones(1)}, f"{folder}/model.safetensors")
    dist.barrier()
    whole = fe.shard(nn.Sequential(nn.Linear(4, 4, bias=False)), initial_values="rank0")
    with contextlib.closing(fe.Checkpointer(f"{folder}/c", whole)) as checkpointer:
        checkpointer.save(1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    engine = fe.shard(model, initial_values="empty")
    with contextlib.closing(fe.Checkpointer(f"{folder}/c", engine)) as checkpointer:
        checkpointer.load(strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fe.load_pretrained(model, folder, strict=False)
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
    folder = shared_folder()
    tensors = {name: torch.full(value.shape, 2.0) for name, value in model.state_dict().items()}
    if engine.mesh.rank == 0:
        save_file(tensors, f"{folder}/model.safetensors")
    if dist.is_initialized():
        dist.barrier()
    fe.load_safetensors(engine, folder)
    for name in ("weight", "linear.weight", "linear.bias"):
        assert engine.full_tensor(name).eq(2.0).all()
    assert model.mean.eq(2.0).all()


@on_ranks(2)
def test_values_are_cast_and_trained_on() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        build("mixtral").to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
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


class Plain(nn.Module):
    """Not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 4)


@on_ranks(2)
def test_names_of_any_model_are_mapped_by_patterns() -> None:
    folder = shared_folder()
    weights = {name: torch.randn(value.shape) for name, value in Plain().state_dict().items()}
    dist.broadcast_object_list(held := [weights])
    if dist.get_rank() == 0:
        named = {f"net.{name.replace('first', 'one')}": value for name, value in held[0].items()}
        save_file(named, f"{folder}/model.safetensors")
    dist.barrier()
    model = Plain()
    engine = fe.shard(model, initial_values="rank0")
    fe.load_pretrained(engine, folder, key_mapping={r"^net\.": "", r"\bone\b": "first"})
    for name, value in held[0].items():
        assert torch.equal(engine.full_tensor(name), value)


@on_ranks(2)
def test_two_tensors_for_one_name_and_models_without_an_engine_are_refused() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        save_file({"a.weight": torch.ones(1), "b.weight": torch.ones(1)}, f"{folder}/m.safetensors")
    dist.barrier()
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
    from fsdp_engine.checkpoint import reader

    engine = fe.shard(builder(family)(), initial_values="rank0")
    read: list[int] = []
    exactly = reader._read_exactly

    def counted(file: Any, start: int, flat: Tensor) -> None:
        read.append(flat.nbytes)
        exactly(file, start, flat)

    reader._read_exactly = counted
    try:
        fe.load_pretrained(engine, folder)
    finally:
        reader._read_exactly = exactly
    held = sum(param.to_local().nbytes for param in engine.model.parameters())  # type: ignore[operator]
    return sum(read), held


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3 moe"])
def test_a_rank_reads_what_it_owns(ranks: Ranks, tmp_path: Path, family: str) -> None:
    build(family).save_pretrained(tmp_path)
    for read, held in ranks.run(bytes_read, str(tmp_path), family, world_size=4):
        assert 0 < held <= read <= 1.1 * held
    assert json.loads((tmp_path / "config.json").read_text())
