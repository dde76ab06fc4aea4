"""Programs that end right after a collective on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Gloo's threads run only while no other thread needs the core, and the main thread does not release
# the interpreter's lock. So the program ends before gloo's threads have dropped the tensor.
SCRIPT = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import fsdp_engine.sharding

sys.setswitchinterval(10)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    if (task / "comm").read_text() == "pt_gloo_runloop\\n":
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
dist.all_reduce(total)
"""


def test_a_program_that_ends_right_after_a_collective_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launch, str(script)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
