"""transformers' ``Trainer`` over the engine, beside the plain one (DDP) on the same ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fsdp_engine as fe
from tests.integrations.trainer_scene import (
    FULL,
    LEVELS,
    Rows,
    arguments,
    as_launched,
    assert_same,
    figures,
    llama,
    rows,
    run,
    run_plain,
    shared_folder,
    trainer,
)
from tests.matrices import thorough_but
from tests.pool import on_few_ranks, on_ranks


def hits(prediction: Any) -> dict[str, float]:
    guessed = prediction.predictions.argmax(-1)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    return {"hits": float(np.sum((guessed == labels) & (labels != -100)))}


@pytest.mark.parametrize("level", thorough_but([FULL], LEVELS))
@on_few_ranks
def test_a_run_is_that_of_the_plain_trainer(level: str) -> None:
    given = {"compute_metrics": hits}
    expected = run("plain", trainer=given)
    assert {(2, "eval_hits"), (5, "grad_norm")} <= expected.keys()
    assert_same(run(level, trainer=given), expected)


def with_adapters() -> dict[str, Any]:
    import peft

    base = llama()
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return {"model": peft.get_peft_model(base, config)}


def with_optimizer() -> dict[str, Any]:
    """Arguments of the trainer: a model with an optimizer that was built before."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizers": (optimizer, scheduler)}


VARIANTS: dict[str, dict[str, Any]] = {
    "each rank's own mean": {"average_tokens_across_devices": False},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "no clipping": {"max_grad_norm": 0.0},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"activation_checkpointing": True},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "linear", "warmup_steps": 2},
    "fused": {"optim": "adamw_torch_fused"},
    "adafactor": {"optim": "adafactor"},
    "adagrad": {"optim": "adagrad"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "rmsprop": {"optim": "rmsprop"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "adapters": {"trainer": with_adapters},
    "optimizer": {"trainer": with_optimizer},
}
# One variant of each kind; the ordinary tests run these.
QUICK = ("each rank's own mean", "label smoothing", "checkpointing", "sgd", "adapters", "optimizer")


@pytest.mark.parametrize("name", thorough_but(QUICK, VARIANTS))
@on_ranks(2)
def test_training_arguments_mean_what_they_mean(name: str) -> None:
    expected = run("plain", **VARIANTS[name])
    for level in (FULL, "no_shard")[: 1 + (name == "optimizer")]:
        assert_same(run(level, **VARIANTS[name]), expected)


@pytest.mark.parametrize("level", [FULL, pytest.param("no_shard", marks=pytest.mark.thorough)])
@on_ranks(2)
def test_bf16_is_as_close_to_autocast_as_bf16_is(level: str) -> None:
    exact, expected = run_plain(), run("plain", bf16=True)
    assert_same(run(level, bf16=True), expected, rtol=3e-2, atol=3e-2)
    assert any(abs(exact[key] - expected[key]) > 1e-4 for key in exact)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    made = trainer(FULL, arguments(shared_folder(), bf16=True), shard={"mp_policy": policy})
    assert made.engine.policy == policy
    made = trainer(FULL, arguments(shared_folder(), bf16=True))
    assert made.engine.policy.param_dtype is torch.bfloat16


@on_ranks(2)
def test_only_the_last_microbatch_syncs_and_the_optimizer_steps_on_slices() -> None:
    from transformers import TrainerCallback

    made = trainer(FULL, arguments(shared_folder(), max_steps=2))
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_substep_end(self, *args: Any, **given: Any) -> None:
            seen.append("substep")

        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **given: Any) -> None:
            assert all(isinstance(p.grad, fe.FlatDTensor) for p in model.parameters())
            seen.append("step")

    def training_step(*args: Any) -> Any:
        seen.append(made.engine.reductions.sync)
        return step(*args)

    made.add_callback(Look())
    step, made.training_step = made.training_step, training_step
    made.train()
    assert seen == [False, "substep", True, "step"] * 2
    state = made.optimizer.optimizer.state
    assert state
    assert all(isinstance(value["exp_avg"], fe.FlatDTensor) for value in state.values())


@on_ranks(2)
def test_optimizers_that_have_stepped_or_have_other_parameters_are_refused() -> None:
    import transformers

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model(**{name: value[None] for name, value in rows(1)[0].items()}).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="optimizer: expected one that has not stepped"):
        trainer(FULL, arguments(shared_folder()), model, optimizers=(optimizer, None))
    made, loss = trainer(FULL, arguments(shared_folder())), nn.Linear(3, 2)
    create = transformers.Trainer.create_optimizer

    def with_loss(self: Any, *args: Any) -> Any:
        optimizer = create(self, *args)
        optimizer.add_param_group({"params": list(loss.parameters())})
        return optimizer

    with (
        mock.patch.object(transformers.Trainer, "create_optimizer", with_loss),
        pytest.raises(ValueError, match=r"found 2 others, of shapes \[\(2, 3\), \(2,\)\]"),
    ):
        made.train()


@on_ranks(2)
def test_a_model_on_the_meta_device_gets_the_weights_of_a_folder() -> None:
    folder = shared_folder()
    plain = llama(seed=3)
    if torch.distributed.get_rank() == 0:
        plain.save_pretrained(folder / "model")
    torch.distributed.barrier()
    expected = run("plain", trainer={"model": plain})
    with torch.device("meta"):
        model = llama()
    given = {"model": model, "pretrained": folder / "model"}
    assert_same(run(FULL, trainer=given), expected)


@on_ranks(2)
def test_a_model_that_is_sharded_is_taken_as_it_is() -> None:
    model = llama()
    engine = fe.shard(model, strategy="optim_grads")
    made = trainer(FULL, arguments(shared_folder()), model)
    assert made.engine is engine
    made.train()
    assert_same(figures(made), run_plain())


@pytest.mark.thorough
@on_ranks(2)
def test_model_init_is_called_for_each_training() -> None:
    made = trainer(FULL, arguments(shared_folder()), model_init=lambda: llama())
    expected = run("plain", trainer={"model_init": lambda: llama()})
    for _ in range(2):
        made.train()
        assert_same(figures(made), expected)


@on_ranks(2)
def test_evaluation_and_prediction_without_training() -> None:
    for options, rel in (({"bf16_full_eval": True}, 1e-2), ({}, 1e-5)):
        plain, ours = (
            trainer(kind, arguments(shared_folder(), **options), compute_metrics=hits)
            for kind in ("plain", FULL)
        )
        expected = plain.evaluate()["eval_loss"]
        assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=rel)
    predicted, found = (made.predict(rows(5, seed=4)) for made in (plain, ours))
    np.testing.assert_allclose(found.predictions, predicted.predictions, rtol=1e-4, atol=1e-5)
    assert found.metrics["test_hits"] == predicted.metrics["test_hits"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": ({"fp16": True}, {}),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}),
    "save_on_each_node": ({"save_on_each_node": True}, {}),
    "fsdp": ({"fsdp": True}, {}),
    "num_processes: expected the 2 ranks": ({"use_cpu": False}, {}),
    "shard: expected arguments of": ({}, {"shard": {"level": 3}}),
    "model_in_checkpoints": ({"save_only_model": True}, {"model_in_checkpoints": False}),
}


@pytest.mark.parametrize("by", ["all ranks", "rank 1"])
@on_ranks(2)
def test_what_does_not_fit_together_is_refused_on_all_ranks(by: str) -> None:
    for name, refused in REFUSED.items():
        is_mine = by == "all ranks" or torch.distributed.get_rank() == 1
        changes, given = refused if is_mine else ({}, {})
        with pytest.raises(ValueError, match=name):
            trainer(FULL, arguments(shared_folder(), **changes), **given)


# --- generated text ---


def t5(seed: int = 0) -> Any:
    """An encoder and a decoder with shared embeddings; some of its texts end early."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    sizes = {"vocab_size": 12, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}
    sizes |= {"num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes))


def pairs(count: int, seed: int = 1) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(2, 12, (6,), generator=generator),
            "labels": torch.randint(2, 12, (5,), generator=generator),
        }
        for _ in range(count)
    ]


def lengths(prediction: Any) -> dict[str, float]:
    texts = prediction.predictions
    return {"hits": float(np.sum((texts != 0) & (texts != -100)))}


def generating(kind: str, seed: int, changes: dict[str, Any], **given: Any) -> Any:
    as_launched()
    from transformers import Seq2SeqTrainingArguments

    changes = {"predict_with_generate": True, "generation_max_length": 6, **changes}
    args = arguments(shared_folder(), Seq2SeqTrainingArguments, **changes)
    return trainer(kind, args, t5(seed), compute_metrics=lengths, **given)


@pytest.mark.parametrize("level", [FULL, pytest.param("optim", marks=pytest.mark.thorough)])
@on_ranks(2)
def test_predict_with_generate_is_the_plain_trainers(level: str) -> None:
    given = {"train_dataset": pairs(40), "eval_dataset": pairs(7, seed=2)}
    found = []
    for kind in ("plain", level):
        made = generating(kind, 0, {"max_steps": 2}, **given)
        made.train()
        (logged, *_) = (row for row in made.state.log_history if "eval_hits" in row)
        predicted = made.predict(pairs(7, seed=3), num_beams=2)
        found.append((logged["eval_loss"], logged["eval_hits"], predicted.predictions))
    check_same(*found, rel=1e-4)


def check_same(plain: Any, ours: Any, rel: float) -> None:
    assert ours[:2] == (pytest.approx(plain[0], rel=rel), plain[1])
    np.testing.assert_array_equal(ours[2], plain[2])


def generate(model: Any) -> torch.Tensor:
    """Generate a text from a prompt; on rank 1, prompt and text are longer."""
    rank = torch.distributed.get_rank()
    prompt = torch.arange(3, 8 + rank)[None]
    return model.generate(prompt, max_new_tokens=3 + 8 * rank, do_sample=False)


@pytest.mark.parametrize("level", thorough_but([FULL], LEVELS))
@on_ranks(2)
def test_texts_of_other_lengths_on_other_ranks(level: str) -> None:
    from transformers import TrainerCallback

    made = trainer(level, arguments(shared_folder(), max_steps=2))
    texts: list[torch.Tensor] = []

    class Writes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            text = generate(given["model"])
            with made.engine.unsharded():
                assert torch.equal(text, generate(given["model"]))
            # Rank 1 has one text more.
            with made.engine.together():
                for _ in range(1 + torch.distributed.get_rank()):
                    assert torch.equal(text, generate(given["model"]))
            texts.append(text)

    made.add_callback(Writes())
    made.train()
    plain = llama()
    plain.load_state_dict(made.engine.full_state_dict())
    assert torch.equal(texts[-1], generate(plain))


@pytest.mark.parametrize("level", [FULL, pytest.param("optim", marks=pytest.mark.thorough)])
@on_ranks(2)
def test_generate_together_computes_no_more_than_each_ranks_own_text(level: str) -> None:
    found = []
    for together in (False, True):
        made = trainer(level, arguments(shared_folder()), generate_together=together)
        forwards: list[Any] = []
        made.model.lm_head.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(0))
        text = generate(made.model)
        with made.engine.unsharded():
            assert torch.equal(text, generate(made.model))
        found.append((text, len(forwards)))
    (expected, waiting), (text, number) = found
    assert torch.equal(text, expected)
    own = 3 + 8 * torch.distributed.get_rank()
    # The user's hook is also called for the second text, which the unsharded model generates.
    assert number == 2 * own
    assert waiting == 11 + own  # transformers runs forwards for the other rank
    with pytest.raises(ValueError, match=r"expected a model that has generate\(\)"):
        trainer(FULL, arguments(shared_folder()), torch.nn.Linear(2, 2), generate_together=True)


@pytest.mark.parametrize(
    "together",
    ["neither", "generate_together", pytest.param("different_modules", marks=pytest.mark.thorough)],
)
@on_ranks(2)
def test_texts_of_uneven_loaders_are_generated_at_every_level(together: str) -> None:
    """Ranks evaluate different numbers of prompts of different lengths; some texts end early."""
    rank, found = torch.distributed.get_rank(), []
    mine = [
        {"input_ids": torch.arange(2, 5 + (number + rank) % 4)[None], "labels": row["labels"][None]}
        for number, row in enumerate(pairs(2 + 3 * rank, seed=5 + rank))
    ]
    options = {} if together == "neither" else {together: True}
    for level in ("no_shard", FULL):
        made = generating(level, 3, {"eval_strategy": "no"}, **options)
        made.get_eval_dataloader = lambda dataset=None: DataLoader(mine, batch_size=None)
        made.get_test_dataloader = made.get_eval_dataloader
        evaluated, predicted = made.evaluate(), made.predict([0])
        assert len(predicted.predictions) == 2 + 5
        found.append((evaluated["eval_loss"], evaluated["eval_hits"], predicted.predictions))
    check_same(*found, rel=1e-5)
