"""accelerate's own examples over the engine, beside accelerate's ``Accelerator`` on equal ranks.

The loops are those of its ``examples/nlp_example.py`` and ``examples/by_feature/checkpointing.py``,
with a small BERT and generated sentences.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainer_scene import LEVELS, as_launched, num_ranks, shared_folder
from tests.pool import Ranks
from tests.programs.packages import PROGRAM
from tests.programs.words import WORDS, bert_config, sentences, tokenizer

pytestmark = PROGRAM
MAX_BATCH = 4  # of a rank's microbatches, on two ranks
ACCUMULATE = 2
EPOCHS = 3


def accelerator(kind: str) -> Any:
    """Of a kind: "plain", or a level."""
    as_launched()
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from fsdp_engine.integrations.accelerate import FSDPEngineAccelerator

    # Its checkpoints know the order of this sampler alone.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    if kind == "plain":
        return Accelerator(cpu=True, dataloader_config=loading)
    shard = {"strategy": kind, "min_unit_size": 0}
    return FSDPEngineAccelerator(cpu=True, dataloader_config=loading, shard=shard)


def get_dataloaders(made: Any) -> tuple[Any, Any]:
    """Pairs of sentences, and whether one follows the other, as the examples read MRPC."""
    import datasets
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    words = tokenizer()

    def data_set(count: int, seed: int) -> Any:
        lengths = random.Random(seed)
        texts = [sentences(1, lengths.randint(4, 9), seed + row)[0] for row in range(count)]
        seconds = [f"{WORDS[row % 2]} " * 4 + each for row, each in enumerate(texts)]
        labels = [row % 2 for row in range(count)]
        rows = {"sentence1": texts, "sentence2": seconds, "labels": labels}

        def tokenize(examples: Any) -> Any:
            return words(examples["sentence1"], examples["sentence2"], truncation=True)

        with made.main_process_first():
            names = ["sentence1", "sentence2"]
            made_set = datasets.Dataset.from_dict(rows)
            return made_set.map(tokenize, batched=True, remove_columns=names)

    def collate(examples: Any) -> Any:
        return words.pad(examples, padding="longest", return_tensors="pt")

    given = {"collate_fn": collate, "batch_size": 2 * MAX_BATCH // num_ranks()}
    # Sizes that no number of ranks divides.
    train = DataLoader(data_set(53, 1), shuffle=True, drop_last=True, **given)
    return train, DataLoader(data_set(15, 100), shuffle=False, **given)


def training_function(
    kind: str, folder: str = "", checkpointing_steps: str = "", resume_from: str = ""
) -> dict[str, Any]:
    """The examples' function of this name; the losses of its steps, and held-out predictions."""
    from accelerate.utils import set_seed
    from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

    made = accelerator(kind)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(made)
    net = BertForSequenceClassification(bert_config(num_labels=2))
    optimizer = torch.optim.AdamW(params=net.parameters(), lr=1e-2)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=len(train_dataloader) * EPOCHS // ACCUMULATE,
    )
    net, optimizer, train_dataloader, eval_dataloader, lr_scheduler = made.prepare(
        net, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step: int | None = None
    if resume_from:
        made.load_state(resume_from)
        name, number = re.fullmatch(r"(epoch|step)_(\d+)", Path(resume_from).name).groups()
        if name == "epoch":
            starting_epoch = int(number) + 1
            overall_step = starting_epoch * len(train_dataloader)
        else:
            overall_step = int(number)
            starting_epoch = overall_step // len(train_dataloader)
            resume_step = overall_step - starting_epoch * len(train_dataloader)
    found: dict[str, Any] = {"losses": [], "predictions": []}
    for epoch in range(starting_epoch, EPOCHS):
        net.train()
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        active = train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            active = made.skip_first_batches(train_dataloader, resume_step)
        for batch in active:
            batch.to(made.device)
            loss = net(**batch).loss / ACCUMULATE
            found["losses"].append(float(made.reduce(loss.detach(), "mean")))
            made.backward(loss)
            overall_step += 1
            if overall_step % ACCUMULATE == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if checkpointing_steps == "step" and overall_step % 4 == 0:
                made.save_state(os.path.join(folder, f"step_{overall_step}"))
        net.eval()
        for batch in eval_dataloader:
            batch.to(made.device)
            with torch.no_grad():
                logits = net(**batch).logits
            logits, labels = made.gather_for_metrics((logits, batch["labels"]))
            found["predictions"].append((logits.tolist(), labels.tolist()))
        if checkpointing_steps == "epoch":
            made.save_state(os.path.join(folder, f"epoch_{epoch}"))
    # Without `end_training()`, which destroys the process group: it is the pool's.
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, predictions and labels of two runs are equal."""
    assert sum(len(labels) for _, labels in expected["predictions"]) % 15 == 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, Any]:
    """The run of accelerate's own ``Accelerator`` on two ranks."""
    found = ranks.run(training_function, "plain", world_size=2)[0]
    assert sum(found["losses"][-5:]) < 0.7 * sum(found["losses"][:5]), found["losses"]
    return found


def save_and_resume(level: str, checkpointing_steps: str, name: str) -> tuple[Any, Any]:
    """A run that saves, and one that resumes from the checkpoint ``name``."""
    folder = str(shared_folder())
    whole = training_function(level, folder, checkpointing_steps)
    return whole, training_function(level, resume_from=os.path.join(folder, name))


@pytest.mark.parametrize("level", LEVELS)
# An epoch has 6 batches: the second checkpoint is within the second epoch.
@pytest.mark.parametrize(
    ("steps", "name", "done"), [("epoch", "epoch_0", 6), ("step", "step_8", 8)]
)
def test_the_examples_train_as_without_the_engine_and_resume_at_an_epoch_and_within_one(
    ranks: Ranks, plain: dict[str, Any], level: str, steps: str, name: str, done: int
) -> None:
    for whole, resumed in ranks.run(save_and_resume, level, steps, name, world_size=2):
        check(whole, plain)
        predictions = plain["predictions"][-len(resumed["predictions"]) :]
        check(resumed, {"losses": plain["losses"][done:], "predictions": predictions})
