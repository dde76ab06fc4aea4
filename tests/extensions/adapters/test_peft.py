"""Adapters of PEFT: a base model under them, their own values, and their folders."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.adapters import adapter_folder
from fsdp_engine.strategies import LEVELS
from tests.checkpoint.scene import failing, shared_folder
from tests.extensions.adapters.peft_models import CONFIGS, adapted, llama, lora, peft
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.pretrained.families import FAMILIES

NOT_ON_META = {"tokens"}  # initial values are rows of the base
TOKENS = torch.arange(8).view(2, 4)


def held(engine: fe.Engine) -> dict[str, Tensor]:
    """Whole parameters, by every name."""
    return {
        name: engine.full_tensor(name)
        for name, _ in engine.model.named_parameters(remove_duplicate=False)
    }


def is_own(name: str) -> bool:
    """Whether a parameter is an adapter's, and begins with random values or constants."""
    return any(part in name for part in ("lora_A", "lora_B", "lora_embedding", "ia3_l", "prompt_"))


def load_base_model(kind: str, folder: str, level: str, values: str) -> None:
    """Load a base model under new adapters; values are those of PEFT's model."""
    expected = adapted(kind).state_dict()
    model = adapted(kind, meta=values != "cpu")
    engine = fe.shard(model, strategy=level, initial_values="same" if values == "cpu" else values)
    report = load_base(engine, folder)
    assert report.unexpected == ()
    assert report.missing
    derived = ("magnitude", "trainable_tokens_delta")
    assert all(is_own(name) or any(map(name.__contains__, derived)) for name in report.missing)
    found = held(engine)
    constant = [n for n in found if "lora_B" in n or "lora_embedding_A" in n or "ia3_l" in n]
    random = [n for n in found if is_own(n) and n not in constant]
    for name in random:
        assert 0 < found[name].std() < 2, name
    with torch.no_grad():
        assert model(input_ids=TOKENS).logits.isfinite().all()
    for name in found.keys() - set(random):
        assert torch.equal(found[name], expected[name]), name


def load_base(engine: fe.Engine, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fe.load_pretrained(engine, folder, strict=False)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_base_model_lands_under_adapters_that_begin_as_peft_begins_them(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    llama().save_pretrained(tmp_path)
    ways = [(1, "no_shard", "same"), (2, "optim_grads_params", "empty")]
    for world_size, level, values in [(2, "optim", "cpu")] if kind in NOT_ON_META else ways:
        ranks.run(load_base_model, kind, str(tmp_path), level, values, world_size=world_size)


@on_ranks(2)
def test_adapters_have_the_values_that_peft_draws_for_a_base_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        folder = shared_folder()
        if dist.get_rank() == 0:
            llama(dtype).save_pretrained(folder)
        dist.barrier()
        for kind in ("lora", "lora, embeddings", "dora", "gaussian, biases", "ia3"):
            config = CONFIGS[kind]()
            base: Any = llama(dtype)
            torch.manual_seed(7)
            expected = peft.get_peft_model(base, config).state_dict()
            model = adapted(kind, dtype, meta=True)
            engine = fe.shard(model, initial_values="empty")
            torch.manual_seed(7)
            load_base(engine, folder)
            for name, value in held(engine).items():
                assert value.dtype == expected[name].dtype, (kind, name)
                assert torch.equal(value, expected[name]), (kind, dtype, name)


def filled(model: torch.nn.Module, seed: int) -> None:
    """Give adapters other values, as training does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape))


def trained(kind: str, dtype: torch.dtype = torch.float32) -> peft.PeftModel:
    """A model whose adapters are filled with values: two adapters for "lora", else one."""
    model = adapted(kind, dtype)
    filled(model, 1)
    if kind == "lora":
        model.add_adapter("other", lora(r=2))
        model.set_adapter("other")
        filled(model, 2)
        model.set_adapter("default")
    return model


def adapters_saved(kind: str, folder: str, level: str) -> None:
    engine = fe.shard(trained(kind), strategy=level)
    fe.save_pretrained(engine, folder)
    fe.save_pretrained(engine, folder)  # once more, over it


def files_of(folder: Path) -> dict[str, Any]:
    """The contents of an adapter's folder: tensors, configs, other files."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = {
                key: (each.dtype, each.tolist()) for key, each in load_file(path).items()
            }
        elif path.suffix == ".json":
            values = json.loads(path.read_text())
            # Sets are written in no order.
            found[name] = {k: sorted(v) if isinstance(v, list) else v for k, v in values.items()}
        else:
            found[name] = None
    return found


def load_adapter(kind: str, base: str, folder: str, level: str, values: str) -> None:
    """Load an adapter; outputs and values are those of PEFT."""
    plain: Any = llama()
    expected = peft.PeftModel.from_pretrained(plain, folder)
    model = adapted(kind, meta=values == "empty")
    engine = fe.shard(model, strategy=level, initial_values=values)
    if values == "empty":
        load_base(engine, base)
    report = fe.load_pretrained(engine, folder)
    assert report.missing == report.unexpected == ()
    with torch.no_grad():
        outputs = model(input_ids=TOKENS).logits
        assert torch.equal(outputs, expected(input_ids=TOKENS).logits)
    theirs = expected.state_dict()
    for name, value in held(engine).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_saved_and_loaded_as_peft_does(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    base, theirs = tmp_path / "base", tmp_path / "theirs"
    llama().save_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of embeddings as targets
        trained(kind).save_pretrained(str(theirs))
    for world_size, level, values in ((1, "no_shard", "same"), (2, "optim_grads_params", "empty")):
        ours = tmp_path / f"ours-{world_size}"
        ranks.run(adapters_saved, kind, str(ours), level, world_size=world_size)
        assert files_of(ours) == files_of(theirs)
        if values == "same" or kind not in NOT_ON_META:
            given = (kind, str(base), str(theirs), level, values)
            ranks.run(load_adapter, *given, world_size=world_size)


@on_ranks(2)
def test_an_adapter_that_does_not_fit_changes_nothing() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        adapted("lora").save_pretrained(f"{folder}/fits")
        other: Any = llama()
        other.save_pretrained(f"{folder}/base")
        peft.get_peft_model(other, lora(lora_alpha=16)).save_pretrained(f"{folder}/alpha")
        other = llama()
        more = lora(target_modules=["q_proj", "k_proj"])
        peft.get_peft_model(other, more).save_pretrained(f"{folder}/targets")
        Path(f"{folder}/pickle").mkdir()
        shutil.copy(f"{folder}/fits/adapter_config.json", f"{folder}/pickle")
        torch.save({}, f"{folder}/pickle/adapter_model.bin")
    dist.barrier()
    model = trained("lora")
    engine = fe.shard(model)
    before = held(engine)
    for name, told, options in (
        ("alpha", "expected lora_alpha of the model's adapter 'default', 8; found 16", {}),
        ("targets", r"missing base_model.*v_proj.lora_A.default.weight", {}),
        ("targets", r"unexpected base_model.*k_proj.lora_A.weight", {}),
        ("base", r"found those of the base model, without \d+ tensors of adapters", {}),
        ("pickle", "found adapter_model.bin, a pickle", {}),
        ("fits", "adapter: expected one of default, other; found 't'", {"adapter": "t"}),
    ):
        with pytest.raises(ValueError, match=told):
            fe.load_pretrained(engine, f"{folder}/{name}", **options)
    with pytest.raises(ValueError, match="expected a base model's folder"):
        fe.load_pretrained(fe.shard(llama()), f"{folder}/fits")
    after = held(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@on_ranks(2)
def test_peft_loads_its_state_dict_into_a_sharded_model() -> None:
    source = trained("lora")
    state = peft.get_peft_model_state_dict(source)
    assert state
    for level in LEVELS:
        model = adapted("lora")
        engine = fe.shard(model, strategy=level)
        peft.set_peft_model_state_dict(model, dict(state))
        for name, value in held(engine).items():
            if is_own(name):
                assert torch.equal(value, source.state_dict()[name]), (level, name)


@pytest.mark.parametrize("method", [peft.LoHaConfig, peft.LoKrConfig])
@on_ranks(1)
def test_an_adapter_of_another_scale_is_refused(method: Any) -> None:
    folder = shared_folder()

    def make(alpha: int) -> peft.PeftModel:
        config = method(r=4, alpha=alpha, target_modules=["q_proj"])
        model: Any = peft.get_peft_model(llama(), config)
        return model

    make(16).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"expected alpha of the model's adapter.*, 8; found 16"):
        fe.load_pretrained(fe.shard(make(8)), folder)
    fe.load_pretrained(fe.shard(make(16)), folder)


def classifier(*, meta: bool) -> peft.PeftModel:
    """A classifier with adapters; its head is not in the saved base model."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        **{**FAMILIES["llama"][2], "num_labels": 3, "pad_token_id": 0}
    )
    with torch.device("meta" if meta else "cpu"):
        base: Any = transformers.LlamaForSequenceClassification(config).to(torch.bfloat16)
    model: peft.PeftModel = peft.get_peft_model(base, lora(task_type="SEQ_CLS"))
    return model


@on_few_ranks
def test_a_classifier_with_adapters_has_a_new_head_of_the_models_own() -> None:
    folder = shared_folder()
    if not dist.is_initialized() or dist.get_rank() == 0:
        llama(torch.bfloat16).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    for values in ("empty", "same"):
        model = classifier(meta=True)
        engine = fe.shard(model, initial_values=values)
        assert load_base(engine, folder).unexpected == ("lm_head.weight",)
        found = held(engine)
        own = found["base_model.model.score.original_module.weight"]
        copy = found["base_model.model.score.modules_to_save.default.weight"]
        # The head is initialized as in transformers, and its trained copy has the same values.
        assert own.dtype == torch.bfloat16
        assert torch.equal(own.float(), copy)
        assert 0.01 < own.float().std() < 0.04
        adapters = {name: value for name, value in found.items() if "lora_" in name}
        assert all(value.dtype == torch.float32 for value in adapters.values())
        assert all(value.any() == ("lora_A" in name) for name, value in adapters.items())
        model(input_ids=TOKENS, labels=torch.tensor([0, 2])).loss.backward()
        assert engine.clip_grad_norm_(1.0) > 0


@on_ranks(2)
def test_a_merged_model_has_no_adapter_to_save() -> None:
    folder = shared_folder()
    engine = fe.shard(adapted("lora"))
    with engine.unsharded():
        merged = engine.model.merge_and_unload()
        if dist.get_rank() == 0:
            merged.save_pretrained(folder)
    with pytest.raises(ValueError, match="adapter 'default': expected tensors in the model"):
        fe.save_pretrained(engine, f"{folder}/adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", ["lora", "prefix"])
@on_ranks(2)
def test_tensors_that_the_first_rank_cannot_copy_are_an_error_on_all_ranks(kind: str) -> None:
    folder = shared_folder()
    engine = fe.shard(adapted(kind))
    fault = failing(adapter_folder, "_copied_to_host", on_rank=0)
    with fault, pytest.raises(OSError, match="No space left"):
        fe.save_pretrained(engine, folder)
    fe.save_pretrained(engine, folder)
    assert (Path(folder) / "adapter_config.json").is_file()


@on_ranks(2)
def test_replicas_that_are_seeded_differently_draw_the_same_adapters() -> None:
    folder, rank = shared_folder(), dist.get_rank()
    if rank == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    for place in ({"strategy": "no_shard"}, {"mesh": (2, 1)}):
        model = adapted("lora", meta=True)
        torch.manual_seed(rank)
        engine = fe.shard(model, initial_values="empty", **place)
        load_base(engine, folder)
        mine = {name: value for name, value in held(engine).items() if "lora_A" in name}
        of_all: list[Any] = [None, None]
        dist.all_gather_object(of_all, mine)
        torch.testing.assert_close(*of_all, rtol=0, atol=0)
        assert all(value.std() > 0 for value in mine.values())
        # Random numbers drawn next, as for data, differ between ranks.
        draws = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(draws, torch.rand(1))
        assert draws[0] != draws[1]


@on_ranks(2)
def test_adapters_that_begin_from_the_base_are_refused_on_the_meta_device() -> None:
    base: Any = llama(meta=True)
    model = peft.get_peft_model(base, peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="whose initial values are random"):
        fe.shard(model)


@on_ranks(2)
def test_what_cannot_be_written_leaves_the_older_adapter() -> None:
    folder = shared_folder()
    model = trained("lora")
    engine = fe.shard(model)
    fe.save_pretrained(engine, folder)
    file = Path(f"{folder}/adapter_model.safetensors")
    before, weights = files_of(file.parent), load_file(file)
    dist.barrier()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with (
        patch.object(peft.LoraConfig, "save_pretrained", side_effect=OSError("no space left")),
        pytest.raises(OSError, match="no space left"),
    ):
        fe.save_pretrained(engine, folder)
    assert files_of(file.parent) == before
    fe.save_pretrained(engine, folder, torch.bfloat16)
    expected = {key: (2 * value).to(torch.bfloat16) for key, value in weights.items()}
    torch.testing.assert_close(load_file(file), expected, rtol=0, atol=0)
