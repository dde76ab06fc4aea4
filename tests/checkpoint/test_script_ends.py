"""Scripts that end right after ``save_async``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_engine.checkpoint.manifest import MANIFEST
from tests.processes import printed, torchrun

SCRIPT = """
import sys
import threading
import torch
import torch.distributed as dist
from torch import nn
import fsdp_engine as fe

script_has_ended = threading.Event()


class LateCheckpointer(fe.Checkpointer):
    def _write(self, save):
        script_has_ended.wait()
        super()._write(save)


torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
engine = fe.shard(model, strategy="optim_grads_params")
LateCheckpointer(sys.argv[1], engine).save_async(1)
if sys.argv[2] == "destroy":
    dist.destroy_process_group()
script_has_ended.set()
"""


def run(folder: Path, launcher: tuple[str, ...], ending: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = (*launcher, str(script), str(folder / "saved"), ending)
    return printed(*command, succeeds=ending != "destroy")


@pytest.mark.parametrize("launcher", [(), pytest.param(torchrun(2), marks=pytest.mark.thorough)])
def test_the_save_is_finished(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    run(tmp_path, launcher, "plainly")
    assert (tmp_path / "saved/step-00000001" / MANIFEST).is_file()


def test_a_save_that_cannot_be_finished_ends_the_script_with_its_error(tmp_path: Path) -> None:
    text = run(tmp_path, torchrun(2), "destroy")
    for part in (
        "saving step 1 into",
        "before destroy_process_group()",
        "the process group was destroyed",
    ):
        assert part in text
    # Without a group each rank would take itself for the only one, and publish its shards alone.
    assert not list((tmp_path / "saved").glob("step-*"))
