"""Scripts that end right after ``save_async``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_engine.checkpoint.manifest import MANIFEST

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


def run(folder: Path, num_ranks: int, ending: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [sys.executable, *(launch if num_ranks > 1 else []), script, folder / "saved", ending],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_save_is_finished(tmp_path: Path, num_ranks: int) -> None:
    ended = run(tmp_path, num_ranks, "plainly")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "saved/step-00000001" / MANIFEST).is_file()


def test_a_save_that_cannot_be_finished_ends_the_script_with_its_error(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "destroy")
    assert ended.returncode == 1
    assert "saving step 1 into" in ended.stderr
    assert "before destroy_process_group()" in ended.stderr
    assert "the process group was destroyed" in ended.stderr
    # Without a group each rank would take itself for the only one, and publish its shards alone.
    assert not list((tmp_path / "saved").glob("step-*"))
