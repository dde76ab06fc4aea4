"""sentence-transformers' trainer over the engine, beside the same trainer without it.

Its models are no transformers models: a folder for each of their modules is saved and loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.trainer_scene import LEVELS, as_launched, num_ranks, shared_folder
from tests.pool import Ranks
from tests.programs.packages import PROGRAM
from tests.programs.words import bert_config, sentences, tokenizer

pytestmark = PROGRAM
NUM_ROWS = 32
STEPS = 8


def _model() -> Any:
    """A small BERT, the mean of its outputs, and a dense layer on it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    folder = str(shared_folder())
    if not dist.is_initialized() or dist.get_rank() == 0:
        BertModel(bert_config()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    transformer = Transformer(folder)
    torch.manual_seed(1)
    modules = [transformer, Pooling(32), Dense(32, 16)]
    return SentenceTransformer(modules=modules, device="cpu")


def _trainer(kind: str, folder: Path, **changes: Any) -> Any:
    import datasets
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from sentence_transformers.sentence_transformer.training_args import (
        SentenceTransformerTrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

    from fsdp_engine.integrations.transformers import FSDPEngineMixin

    datasets.disable_progress_bars()
    rows = {
        "sentence1": [f"{text} cat" for text in sentences(NUM_ROWS, 5, 1)],
        "sentence2": [
            f"{text} {'house' if row % 2 else 'cat'}"
            for row, text in enumerate(sentences(NUM_ROWS, 5, 2))
        ],
        "score": [float(row % 2 == 0) for row in range(NUM_ROWS)],
    }
    data = datasets.Dataset.from_dict(rows)
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4 // num_ranks(),
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "seed": 1,
    }
    model = _model()
    cls: Any = SentenceTransformerTrainer
    given: dict[str, Any] = {}
    if kind != "plain":
        cls = type("Sharded", (FSDPEngineMixin, cls), {})
        given["shard"] = {"strategy": kind, "min_unit_size": 0}
    trainer = cls(
        model=model,
        args=SentenceTransformerTrainingArguments(**{**arguments, **changes}),
        train_dataset=data,
        eval_dataset=data,
        loss=CosineSimilarityLoss(model),
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(kind: str, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Losses and norms of each step, and what the saved model answers when it is read anew."""
    as_launched()
    from sentence_transformers import SentenceTransformer

    folder = shared_folder()
    trainer = _trainer(kind, folder, **changes)
    trainer.train()
    if resume:
        first = trainer.state.log_history
        trainer = _trainer(kind, folder, **changes)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert trainer.state.log_history[:4] == first[:4]
    trainer.save_model(str(folder / "saved"))
    texts = sentences(6, 5, 3)
    answers: dict[str, Tensor] = {
        name: torch.as_tensor(SentenceTransformer(str(folder / name), device="cpu").encode(texts))
        for name in ("saved", "checkpoint-8", "checkpoint-4")
    }
    files = sorted(
        str(path.relative_to(folder / "saved"))
        for path in (folder / "saved").rglob("*")
        if path.is_file()
    )
    names = ("loss", "grad_norm", "eval_loss")
    logged = [
        {name: row[name] for name in names if name in row} for row in trainer.state.log_history[:-1]
    ]
    return {"logged": logged, "answers": answers, "files": files}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, Any]:
    """The run of a trainer without the engine, on one process."""
    found: dict[str, Any] = ranks.run(train, "plain", world_size=1)[0]
    losses = [row["eval_loss"] for row in found["logged"] if "eval_loss" in row]
    assert losses[-1] < 0.9 * losses[0], losses
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two runs log the same figures, and save the same files, of models that answer alike."""
    torch.testing.assert_close(found["logged"], expected["logged"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["answers"], expected["answers"], rtol=1e-3, atol=1e-4)
    assert found["files"] == expected["files"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_sentence_model_is_trained_and_saved_as_without_the_engine(
    ranks: Ranks, plain: dict[str, Any], level: str
) -> None:
    for found in ranks.run(train, level, world_size=2):
        check(found, plain)


def test_a_sentence_model_resumes(ranks: Ranks, plain: dict[str, Any]) -> None:
    for found in ranks.run(train, LEVELS[-1], True, world_size=2):
        check(found, plain)
