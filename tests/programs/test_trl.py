"""TRL's trainers with LoRA, over the engine, beside the same trainers without it.

DPO and KTO switch the adapters off between the forward and the backward of a step, for their
reference model: parameters are frozen and thawed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations.trainer_scene import LEVELS, as_launched, llama, num_ranks, shared_folder
from tests.pool import Ranks
from tests.programs.packages import PROGRAM
from tests.programs.words import SIZES, VOCABULARY, WORDS, sentences, tokenizer

pytestmark = PROGRAM
NUM_ROWS = 16
STEPS = 8


class Algorithm(NamedTuple):
    """A trainer of TRL.

    Attributes:
        name: prefix of its classes, ``<name>Trainer`` and ``<name>Config``.
        columns: makes the columns of its data set.
        arguments: arguments of its config.
        shown: the logged figure that shows what it learns, and whether it rises.
        least: the least change of that figure, from the first two steps to the last two.
    """

    name: str
    columns: Callable[[], dict[str, list[Any]]]
    arguments: dict[str, Any]
    shown: str = "loss"
    rises: bool = False
    least: float = 0.0


def _with(word: str, seed: int) -> list[str]:
    return [f" {each} {word}" for each in sentences(NUM_ROWS, 4, seed)]


def reward(completions: list[str], **given: Any) -> list[float]:
    liked = set(WORDS[: len(WORDS) // 2])
    return [sum(word in liked for word in each.split()) / 6 for each in completions]


def _preferences() -> dict[str, list[Any]]:
    chosen, rejected = _with("cat", 2), _with("dog", 3)
    return {"prompt": sentences(NUM_ROWS, 4, 1), "chosen": chosen, "rejected": rejected}


def _judged() -> dict[str, list[Any]]:
    found = _preferences()
    labels = [row % 2 == 0 for row in range(NUM_ROWS)]
    texts = zip(found["chosen"], found["rejected"], labels, strict=True)
    completions = [chosen if label else rejected for chosen, rejected, label in texts]
    return {"prompt": found["prompt"], "completion": completions, "label": labels}


ALGORITHMS = {
    "sft": Algorithm(
        "SFT",
        lambda: {"text": [f"{each} cat dog" for each in sentences(NUM_ROWS, 6, 1)]},
        {"learning_rate": 5e-2},
        least=0.5,
    ),
    "dpo": Algorithm("DPO", _preferences, {"learning_rate": 2e-2}, least=0.1),
    "kto": Algorithm("KTO", _judged, {"learning_rate": 2e-2}, least=0.05),
    "grpo": Algorithm(
        "GRPO",
        lambda: {"prompt": sentences(NUM_ROWS, 4, 1)},
        {
            "learning_rate": 5e-2,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "beta": 0.05,  # a reference model
        },
        shown="reward",
        rises=True,
        least=0.1,
    ),
}


def _model() -> Any:
    return llama(**SIZES, num_key_value_heads=2, max_position_embeddings=64)


def train(
    kind: str,
    name: str,
    lora: bool = True,
    reward_funcs: Any = None,
    sharded: dict[str, Any] | None = None,
    ends: Sequence[str] = (),
    **changes: Any,
) -> list[dict[str, float]]:
    """Loss, norm and the figure that shows learning, of each step.

    Args:
        kind: "plain", or a level.
        name: name of the algorithm.
        lora: train adapters; else the whole model.
        reward_funcs: reward functions of GRPO; None: :func:`reward`.
        sharded: options of the engine's trainer.
        ends: words that end a completion, as the tokenizer's end does.
        changes: changes of the training arguments.
    """
    as_launched()
    import datasets
    import trl
    from peft import LoraConfig
    from transformers.trainer_callback import PrinterCallback

    from fsdp_engine.integrations.transformers import FSDPEngineMixin

    datasets.disable_progress_bars()
    algorithm = ALGORITHMS[name]
    arguments = {
        "output_dir": str(shared_folder()),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4 // num_ranks(),
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 1,
    }
    config = getattr(trl, f"{algorithm.name}Config")
    given: dict[str, Any] = {
        "model": _model(),
        "args": config(**{**arguments, **algorithm.arguments, **changes}),
        "train_dataset": datasets.Dataset.from_dict(algorithm.columns()),
        "processing_class": tokenizer(),
    }
    if ends:
        numbers = [2, *(VOCABULARY[word] for word in ends)]
        given["model"].generation_config.eos_token_id = numbers
    if lora:
        layers = ["v_proj", "o_proj", "up_proj", "down_proj"]
        config = {"r": 4, "lora_alpha": 8, "target_modules": layers, "task_type": "CAUSAL_LM"}
        given["peft_config"] = LoraConfig(**config)
    elif name in ("dpo", "kto"):
        given["ref_model"] = _model()
    if name == "grpo":
        given["reward_funcs"] = reward_funcs or reward
    cls = getattr(trl, f"{algorithm.name}Trainer")
    if kind != "plain":
        cls = type(f"Sharded{cls.__name__}", (FSDPEngineMixin, cls), {})
        given |= {"shard": {"strategy": kind, "min_unit_size": 0}, **(sharded or {})}
    trainer = cls(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    names = {"loss", "grad_norm", algorithm.shown}
    return [{key: row[key] for key in names} for row in trainer.state.log_history if "loss" in row]


def check(found: list[dict[str, float]], expected: list[dict[str, float]], name: str) -> None:
    assert len(expected) == STEPS
    algorithm = ALGORITHMS[name]
    shown = [row[algorithm.shown] for row in expected]
    change = (sum(shown[-2:]) - sum(shown[:2])) / 2
    assert (change if algorithm.rises else -change) > algorithm.least, shown
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# KTO subtracts a divergence that each process estimates on its own batch; GRPO's processes
# sample completions of their own. One process computes other figures than two.
PROCESSES = {"sft": 1, "dpo": 1, "kto": 2, "grpo": 2}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, list[dict[str, float]]]:
    return {
        name: ranks.run(train, "plain", name, world_size=number)[0]
        for name, number in PROCESSES.items()
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROCESSES)
def test_adapters_are_trained_as_without_the_engine(ranks, plain, name: str, level: str) -> None:
    found = ranks.run(train, level, name, world_size=2)
    assert found[0] == found[1]
    check(found[0], plain[name], name)


@pytest.mark.parametrize("name", PROCESSES)
def test_whole_models_are_trained_beside_a_reference_model(ranks: Ranks, name: str) -> None:
    # Without adapters GRPO would read its reference model from a folder.
    given = {"learning_rate": 5e-3, **({"beta": 0.0} if name == "grpo" else {})}
    expected = ranks.run(_train_whole, "plain", name, given, world_size=2)
    found = ranks.run(_train_whole, LEVELS[-1], name, given, world_size=2)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-3, atol=1e-4)


def _train_whole(kind: str, name: str, given: dict[str, Any]) -> list[dict[str, float]]:
    return train(kind, name, lora=False, **given)


def lengths_of_completions(kind: str, options: dict[str, Any]) -> tuple[Any, list[list[int]]]:
    """Figures of GRPO, and the lengths of this rank's completions by generation.

    Args:
        kind: "plain", or a level.
        options: options of the sharded trainer.
    """
    lengths: list[list[int]] = []

    def noting(completions: list[str], completion_ids: list[list[int]], **given: Any) -> Any:
        lengths.append([len(ids) for ids in completion_ids])
        return reward(completions)

    figures = train(
        kind,
        "grpo",
        lora=False,
        reward_funcs=noting,
        sharded=options,
        learning_rate=5e-3,
        beta=0.0,
        max_completion_length=24,
        ends=WORDS[:4],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
    )
    return figures, lengths


@pytest.mark.parametrize("together", [False, True])
def test_grpo_generates_texts_that_end_at_different_times(ranks: Ranks, together: bool) -> None:
    options = {"generate_together": together}
    expected = ranks.run(lengths_of_completions, "plain", {}, world_size=2)
    found = ranks.run(lengths_of_completions, LEVELS[-1], options, world_size=2)
    (figures, first), (_, second) = found
    # Ranks stop generating at different lengths: compare their longest texts.
    differ = [max(one) != max(other) for one, other in zip(first, second, strict=True)]
    assert sum(differ) >= STEPS // 2
    torch.testing.assert_close(figures, expected[0][0], rtol=2e-3, atol=1e-4)
    assert [lengths for _, lengths in found] == [lengths for _, lengths in expected]
