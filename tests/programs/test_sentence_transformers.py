"""sentence-transformers' trainer over the engine, beside the same trainer without it.

Its models are not transformers models: they are saved and loaded as a folder for each module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainer_scene import LEVELS, as_launched, num_ranks, shared_folder
from tests.pool import Ranks
from tests.programs.packages import PROGRAM
from tests.programs.words import encoder, sentences

pytestmark = PROGRAM
NUM_ROWS = 32
STEPS = 8


def _trainer(kind: str, folder: Path) -> Any:
    import datasets
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from sentence_transformers.sentence_transformer.modules import Dense
    from sentence_transformers.sentence_transformer.training_args import (
        SentenceTransformerTrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

    from fsdp_engine.integrations.transformers import FSDPEngineMixin

    datasets.disable_progress_bars()
    ends = [("cat", 1.0), ("house", 0.0)] * (NUM_ROWS // 2)
    firsts, seconds = sentences(NUM_ROWS, 5, 1), sentences(NUM_ROWS, 5, 2)
    rows = {
        "sentence1": [f"{text} cat" for text in firsts],
        "sentence2": [f"{text} {end}" for text, (end, _) in zip(seconds, ends, strict=True)],
        "score": [score for _, score in ends],
    }
    data = datasets.Dataset.from_dict(rows)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4 // num_ranks(),
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        seed=1,
    )
    torch.manual_seed(1)
    model = encoder(Dense(32, 16))
    cls: Any = SentenceTransformerTrainer
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data}
    if kind != "plain":
        cls = type("Sharded", (FSDPEngineMixin, cls), {})
        given["shard"] = {"strategy": kind, "min_unit_size": 0}
    trainer = cls(model=model, args=arguments, loss=CosineSimilarityLoss(model), **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(kind: str, resume: bool = False) -> dict[str, Any]:
    as_launched()
    from sentence_transformers import SentenceTransformer

    folder = shared_folder()
    trainer = _trainer(kind, folder)
    trainer.train()
    if resume:
        first = trainer.state.log_history
        trainer = _trainer(kind, folder)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert trainer.state.log_history[:4] == first[:4]
    saved, texts = folder / "saved", sentences(6, 5, 3)
    trainer.save_model(str(saved))
    answers = {
        name: torch.as_tensor(SentenceTransformer(str(folder / name), device="cpu").encode(texts))
        for name in ("saved", "checkpoint-8", "checkpoint-4")
    }
    files = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    names = ("loss", "grad_norm", "eval_loss")
    log = trainer.state.log_history[:-1]
    logged = [{name: row[name] for name in names if name in row} for row in log]
    return {"logged": logged, "answers": answers, "files": files}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, Any]:
    found = ranks.run(train, "plain", world_size=1)[0]
    losses = [row["eval_loss"] for row in found["logged"] if "eval_loss" in row]
    assert losses[-1] < 0.9 * losses[0], losses
    return found


@pytest.mark.parametrize(
    ("level", "resume"), [*((level, False) for level in LEVELS), (LEVELS[-1], True)]
)
def test_a_sentence_model_is_trained_saved_and_resumed_as_without_the_engine(
    ranks: Ranks, plain: dict[str, Any], level: str, resume: bool
) -> None:
    for found in ranks.run(train, level, resume, world_size=2):
        assert found.pop("files") == plain["files"]
        for name, value in found.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-4)
