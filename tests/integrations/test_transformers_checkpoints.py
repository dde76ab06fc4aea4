"""Checkpoints of ``FSDPEngineTrainer``, and runs that resume from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_engine.checkpoint.offline import StoredCheckpoint, find_folders
from tests.integrations.trainer_scene import (
    FULL,
    arguments,
    assert_same,
    figures,
    llama,
    run,
    shared_folder,
    trainer,
)
from tests.pool import Ranks, on_ranks

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
FOLDER = {"config.json", "fsdp_engine", "generation_config.json", "model.safetensors"}
FOLDER |= {"scheduler.pt", "trainer_state.json", "training_args.bin"}


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.txt").write_text("bytes")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@on_ranks(2)
def test_the_model_is_saved_as_from_pretrained_reads_it() -> None:
    from transformers import AutoModelForCausalLM

    folder = shared_folder()
    made = trainer(FULL, arguments(folder), processing_class=Tokenizer())
    made.train()
    made.save_model(str(folder / "model"))
    read = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    held = made.engine.full_state_dict()
    assert read.keys() == held.keys()
    assert all(torch.equal(read[name], value) for name, value in held.items())
    assert (folder / "model" / "tokenizer.txt").is_file()
    assert (folder / "model" / "training_args.bin").is_file()
    assert not (folder / "model" / "fsdp_engine").exists()
    made.save_model()
    assert (folder / "config.json").is_file()


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.up(x).square().mean()}


@pytest.mark.thorough
@on_ranks(2)
def test_a_model_that_is_not_of_transformers_is_saved_by_names() -> None:
    from safetensors.torch import load_file

    folder = shared_folder()
    args = {"eval_strategy": "no", **SAVES}
    given = {"train_dataset": [{"x": torch.ones(3) * number} for number in range(16)]}
    made = trainer(FULL, arguments(folder, **args), Plain(), **given)
    made.train()
    read = load_file(folder / "checkpoint-6" / "model.safetensors")
    assert torch.equal(read["up.weight"], made.engine.full_tensor("up.weight"))
    again = trainer(FULL, arguments(folder, **args), Plain(), **given)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(again.engine.full_tensor("up.weight"), read["up.weight"])


def first_run(folder: str) -> dict[Any, float]:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step == 4

    made = trainer(FULL, arguments(Path(folder), **SAVES), llama())
    made.add_callback(Stop())
    made.train()
    return figures(made)


def second_run(folder: str, level: str) -> tuple[dict[Any, float], dict[Any, float]]:
    """The same run started again, from another model's weights; and a run without a break."""
    made = trainer(level, arguments(Path(folder), **SAVES), llama(seed=9))
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6
    return figures(made), run(FULL, **SAVES)


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [
        (1, 2, FULL),
        pytest.param(2, 1, "optim", marks=pytest.mark.thorough),
        pytest.param(2, 4, "no_shard", marks=pytest.mark.thorough),
        pytest.param(4, 2, "optim_grads", marks=pytest.mark.thorough),
    ],
)
def test_a_run_continues_along_its_curve_on_other_ranks(
    ranks: Ranks, tmp_path: Path, first: int, second: int, level: str
) -> None:
    began = ranks.run(first_run, str(tmp_path), world_size=first)[0]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    states = [f"rng_state_{rank}.pth" for rank in range(first)] if first > 1 else ["rng_state.pth"]
    assert set(checkpoints(tmp_path / "checkpoint-4")) == {*FOLDER, *states}
    # A killed save may leave such a folder. It is ignored and removed.
    (tmp_path / ".saving" / "checkpoint-6").mkdir(parents=True)
    ended, whole = ranks.run(second_run, str(tmp_path), level, world_size=second)[0]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert {step for step, _ in ended} == {1, 2, 3, 4, 5, 6}
    found = {**ended, **began}
    # Ranks fill up their last batches, so this mean depends on the number of ranks (also in the
    # plain Trainer).
    for figures_of_run in (found, whole):
        for key in [key for key in figures_of_run if key[1] == "eval_loss"]:
            del figures_of_run[key]
    assert_same(found, whole)


@on_ranks(2)
def test_a_run_continues_bit_by_bit_on_as_many_ranks_also_with_dropout() -> None:
    folder, runs = shared_folder(), []
    for seed, path in ((0, None), (9, str(folder / "checkpoint-2"))):
        args = arguments(folder, **SAVES, eval_strategy="no")
        runs.append(trainer(FULL, args, llama(seed, attention_dropout=0.3)))
        runs[-1].train(resume_from_checkpoint=path)
    made, again = runs
    assert figures(again) == figures(made)
    whole, other = made.engine.full_state_dict(), again.engine.full_state_dict()
    assert all(torch.equal(value, other[name]) for name, value in whole.items())


def adapted(seed: int) -> Any:
    """The same base model, with adapters from a seed."""
    import peft

    base = llama()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


@on_ranks(2)
def test_checkpoints_of_adapters_leave_the_base_model_out() -> None:
    folder, runs = shared_folder(), []
    for seed, path in ((0, None), (9, str(folder / "checkpoint-2"))):
        given = {**SAVES, "load_best_model_at_end": True, "eval_steps": 2}
        runs.append(trainer(FULL, arguments(folder, **given), adapted(seed)))
        runs[-1].train(resume_from_checkpoint=path)
    made, again = runs
    whole, other = made.engine.full_state_dict(), again.engine.full_state_dict()
    assert figures(again) == figures(made)
    assert all(torch.equal(value, other[name]) for name, value in whole.items())
    # As the folder of one checkpoint, and as the directory of all.
    for path in (folder / "checkpoint-6", folder):
        (found,) = find_folders(path)
        assert found == folder / "checkpoint-6" / "fsdp_engine"
        keys = StoredCheckpoint(found).tensors
        names = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
        assert names == {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert len(find_folders(folder, every=True)) == 3
    assert find_folders(folder, 4) == [folder / "checkpoint-4" / "fsdp_engine"]
    whole_state = trainer(FULL, arguments(folder), adapted(0), trainable_only=False)
    whole_state.args.save_strategy = "steps"
    whole_state.args.save_steps = 5
    whole_state.train()
    keys = StoredCheckpoint(find_folders(folder, 5)[0]).tensors
    assert any("embed_tokens" in key for key in keys)
    # A checkpoint that has the base model is loaded completely.
    other = adapted(3)
    with torch.no_grad():
        other.get_input_embeddings().weight.zero_()
    again = trainer(FULL, arguments(folder), other)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    expected = whole_state.engine.full_state_dict()
    for name, value in again.engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_limits_and_the_best_model() -> None:
    folder = shared_folder()
    args = arguments(
        folder,
        **SAVES,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=1.0,  # so that the last one is not the best
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    made = trainer(FULL, args)
    made.train()
    losses = {step: value for (step, name), value in figures(made).items() if name == "eval_loss"}
    step = min(losses, key=losses.__getitem__)
    assert step < 6
    best = Path(made.state.best_model_checkpoint)
    assert best == folder / f"checkpoint-{step}"
    torch.distributed.barrier()  # the first rank removes the others
    assert checkpoints(folder) == [f"checkpoint-{step}"]
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
    assert made.evaluate()["eval_loss"] == losses[step]


@pytest.mark.thorough
@pytest.mark.parametrize("only", [True, False])
@on_ranks(2)
def test_a_checkpoint_may_leave_out_the_state_or_the_model(only: bool) -> None:
    folder = shared_folder()
    given = {} if only else {"model_in_checkpoints": False}
    made = trainer(FULL, arguments(folder, **SAVES, save_only_model=only), **given)
    made.train()
    last = folder / "checkpoint-6"
    assert (last / "model.safetensors").exists() == only
    assert (last / "fsdp_engine").exists() != only
    again = trainer(FULL, arguments(folder, **{**SAVES, "max_steps": 7}), llama(seed=9))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 7
    # Both have the weights of step 6, so the loss is that of a trained model.
    assert figures(again)[7, "loss"] == pytest.approx(figures(made)[6, "loss"], abs=0.5)


class Broken(Tokenizer):
    def save_pretrained(self, folder: str) -> None:
        raise OSError("no space left")


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_no_checkpoint() -> None:
    folder = shared_folder()
    for failing in (0, 1):
        broken = {"processing_class": Broken()} if failing == 0 else {}
        made = trainer(FULL, arguments(folder, **SAVES), **broken)
        save = made._save_rng_state

        def breaks(output_dir: str, failing: int = failing, save: Any = save) -> None:
            if failing == torch.distributed.get_rank() == 1:
                raise OSError("no space left")
            save(output_dir)

        made._save_rng_state = breaks
        with pytest.raises(OSError, match="no space left"):
            made.train()
        assert checkpoints(folder) == []


@on_ranks(2)
def test_a_run_of_the_plain_trainer_continues_sharded() -> None:
    folder = shared_folder()
    expected = run("plain", folder, **SAVES)
    made = trainer(FULL, arguments(folder, **SAVES), llama(seed=9))
    with pytest.raises(OSError, match="nothing"):
        made.train(resume_from_checkpoint=str(folder / "nothing"))
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_same(figures(made), expected)
