"""transformers' Trainer with ``optim="adamw_torch_8bit"``, ``"adamw_torch_4bit"`` and
``"adamw_bnb_8bit"``: over the engine, beside itself over DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import run_job
from tests.integrations.trainer_scene import LEVELS
from tests.programs.packages import LOW_BIT

pytestmark = LOW_BIT
SCRIPT = Path(__file__).with_name("train_low_bit.py")
OPTIMIZERS = {
    "adamw_torch_8bit": "AdamW8bit",
    "adamw_torch_4bit": "AdamW4bit",
    "adamw_bnb_8bit": "AdamW",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each optimizer, results of the plain trainer and of the engine at each level."""
    folder = tmp_path_factory.mktemp("low_bit")
    out = folder / "found.json"
    run_job(folder, "job", [str(SCRIPT), "--out", str(out), "--kinds", "plain", *LEVELS], 2)
    return json.loads(out.read_text())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_resumes_with_quantised_state(
    results: dict[str, Any], name: str, level: str
) -> None:
    plain, found = results[name]["plain"], results[name][level]
    assert found["optimizer"] == OPTIMIZERS[name]
    assert found["num_quantized"] > 0
    # Sums of gradients have another order. Norms vary more than losses do.
    losses = {key: value for key, value in plain["logged"].items() if "loss" in key}
    assert {key: found["logged"][key] for key in losses} == pytest.approx(losses, rel=1e-5)
    assert found["resumed"] == pytest.approx(found["logged"], rel=1e-5)
