"""Slurm's commands on one machine: ``python slurm_stub.py srun|scontrol ARGUMENTS``.

srun starts ``SLURM_NTASKS`` tasks, each in a session of its own. It forwards signals to the tasks,
not to their child processes. ``--kill-on-bad-exit`` is always on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def srun(command: list[str]) -> int:
    """Run ``command`` as a job step; the exit status of the task that failed first, or 0."""
    while command[0].startswith("--"):
        command = command[1:]
    num_tasks, num_nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, hand_on)
    for rank in range(num_tasks):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank * num_nodes // num_tasks),
            "SLURM_LOCALID": str(rank % (num_tasks // num_nodes)),
        }
        tasks.append(subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True))
    while True:
        statuses = [task.poll() for task in tasks]
        status = next(filter(None, statuses), 0)
        if status or None not in statuses:
            break
        time.sleep(0.02)
    for task in tasks:
        task.kill()
        task.wait()
    return 128 - status if status < 0 else status


def scontrol(arguments: list[str]) -> int:
    """Print the names of a job's nodes, or record that a job was requeued."""
    if arguments[:2] == ["show", "hostnames"]:
        print("localhost\n" * int(os.environ["SLURM_JOB_NUM_NODES"]), end="")
        return 0
    assert arguments[0] == "requeue", arguments
    with open(Path(os.environ["SLURM_STUB_FOLDER"]) / "requeued", "a") as file:
        file.write(f"{arguments[1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
