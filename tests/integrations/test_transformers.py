"""transformers' ``Trainer`` over the engine, beside the plain one (DDP) on the same ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_engine as fe
from tests.integrations.trainer_scene import (
    FULL,
    LEVELS,
    arguments,
    assert_same,
    figures,
    llama,
    rows,
    run,
    run_plain,
    shared_folder,
    trainer,
)
from tests.pool import on_few_ranks, on_ranks


def hits(prediction: Any) -> dict[str, float]:
    guessed = prediction.predictions.argmax(-1)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    return {"hits": float(np.sum((guessed == labels) & (labels != -100)))}


@pytest.mark.parametrize(
    "level", [FULL, *(pytest.param(each, marks=pytest.mark.thorough) for each in LEVELS[:3])]
)
@on_few_ranks
def test_a_run_is_that_of_the_plain_trainer(level: str) -> None:
    given = {"compute_metrics": hits}
    expected = run("plain", trainer=given)
    assert {(2, "eval_hits"), (5, "grad_norm")} <= expected.keys()
    assert_same(run(level, trainer=given), expected)


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
}
# One of each kind in every run of the tests.
QUICK = ("each rank's own mean", "label smoothing", "checkpointing", "sgd")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)
        for name in VARIANTS
    ],
)
@on_ranks(2)
def test_training_arguments_mean_what_they_mean(name: str) -> None:
    arguments = VARIANTS[name]
    assert_same(run(FULL, **arguments), run("plain", **arguments))


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
    seen: list[tuple[str, int]] = []

    class Look(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(("substep", state.global_step))

        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
        ) -> None:
            assert all(isinstance(p.grad, fe.FlatDTensor) for p in model.parameters())
            seen.append(("step", state.global_step))

    made.add_callback(Look())
    synced: list[bool] = []
    step = made.training_step

    def training_step(*args: Any) -> Any:
        synced.append(made.engine.reductions.sync)
        return step(*args)

    made.training_step = training_step
    made.train()
    assert synced == [False, True, False, True]
    assert seen == [("substep", 0), ("step", 0), ("substep", 1), ("step", 1)]
    state = made.optimizer.optimizer.state
    assert state
    assert all(isinstance(value["exp_avg"], fe.FlatDTensor) for value in state.values())


@pytest.mark.parametrize("level", ["no_shard", FULL])
@on_ranks(2)
def test_an_optimizer_that_was_built_before_is_taken(level: str) -> None:
    def given() -> dict[str, Any]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizers": (optimizer, scheduler)}

    assert_same(run(level, trainer=given()), run("plain", trainer=given()))


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
    results = []
    for kind in ("plain", FULL):
        made = trainer(kind, arguments(shared_folder()), compute_metrics=hits)
        results.append((made.evaluate(), made.predict(rows(5, seed=4))))
    (expected, predicted), (evaluated, found) = results
    assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    np.testing.assert_allclose(found.predictions, predicted.predictions, rtol=1e-4, atol=1e-5)
    assert found.metrics["test_hits"] == predicted.metrics["test_hits"]


@pytest.mark.thorough
@on_ranks(2)
def test_evaluation_in_bf16_throughout() -> None:
    plain, ours = (
        trainer(kind, arguments(shared_folder(), bf16_full_eval=True)).evaluate()["eval_loss"]
        for kind in ("plain", FULL)
    )
    assert ours == pytest.approx(plain, rel=1e-2)


def with_adapters() -> Any:
    import peft

    base = llama()
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


@on_ranks(2)
def test_adapters_of_peft_are_trained_on_a_frozen_base() -> None:
    given = {"make_model": with_adapters}
    assert_same(run(FULL, trainer=given), run("plain", trainer=given))


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
