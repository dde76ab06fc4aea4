"""The example of pipeline x data parallelism: small runs of the whole job."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from gpt import GPT, GPTConfig
from tests.processes import ROOT, printed, torchrun
from train_pipeline import Stage

SIZES = ("--layers", "4", "--width", "32", "--sequence-length", "32", "--steps", "4")
PROGRAM = (str(ROOT / "examples/train_pipeline.py"), *SIZES)


def test_stages_one_after_the_other_are_the_model_with_its_names() -> None:
    config = GPTConfig(sequence_length=16, num_layers=5, width=32, num_heads=4)
    whole = GPT(config)
    stages = [Stage(whole, index, 3) for index in range(3)]
    tokens = x = torch.randint(256, (2, 16))
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens).logits)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


def losses(folder: Path, *arguments: str) -> list[float]:
    printed(*arguments, "--data", str(ROOT / "docs"), "--out", str(folder))
    with (folder / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.thorough
def test_pipelines_have_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", *PROGRAM)
    assert len(alone) == 4
    for schedule, level in (("1F1B", "optim"), ("InterleavedZeroBubble", "optim_grads_params")):
        options = ("--pipeline", "2", "--schedule", schedule, "--strategy", level)
        found = losses(tmp_path / schedule, *torchrun(4), *PROGRAM, *options)
        assert found == pytest.approx(alone, rel=2e-5), schedule
