"""Jobs that tests of launchers start: logs in files, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from settings import parse_settings
from tests.processes import torchrun
from train_gpt import Job, prepare

ROOT = Path(__file__).parents[2]
# An environment variable that marks all processes of a test, including orphaned descendants.
_MARK = "FSDP_ENGINE_TEST_JOB"

# A step takes some ten milliseconds, so a test has time to kill a job before its last step.
SMALL = [
    *("--layers", "2", "--width", "32", "--heads", "2", "--sequence-length", "32"),
    *("--batch-size", "8", "--warmup", "5", "--eval-every", "50", "--eval-sequences", "8"),
    *("--save-every", "5", "--no-sample"),
]


def arguments_of(folder: Path, steps: int, *more: str) -> list[str]:
    """Arguments of ``train_gpt.py``; ``folder`` holds the texts and all output."""
    places = ["--data", str(folder / "texts"), "--out", str(folder / "out")]
    return [*places, "--steps", str(steps), *SMALL, *more]


def train_undisturbed(arguments: list[str]) -> list[float]:
    """The losses of all steps of a run without a failure, on the ranks of the pool."""
    job = prepare(parse_settings(arguments), Job)
    job.train()
    return [record.loss for record in job.curve.steps]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Return when ``condition`` holds; an error if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not in {seconds} s")
        time.sleep(0.02)


class Launched:
    """Processes in the background, with all that they start; logs are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, command: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` in the repository; what it prints is in :meth:`log`."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PET_"))}
        own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
        own |= {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", _MARK: self._mark}
        with open(self._folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, **own, **(environment or {})},
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def all_with(self, text: str = "") -> list[psutil.Process]:
        """Running processes of this test with ``text`` in their command, the oldest first."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                is_mine = process.environ().get(_MARK) == self._mark
                if is_mine and text in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda each: each.create_time())

    def finish(self, name: str, process: subprocess.Popen[bytes], seconds: float = 180.0) -> int:
        """Wait for the end of a process; returns its exit status. After ``seconds``, an error with
        the log."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} runs after {seconds} s:\n{self.log(name)}") from None

    def run(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str] | None = None,
        *,
        seconds: float = 180.0,
    ) -> str:
        """Run Python with these arguments to its end, without an error; returns what it printed."""
        process = self.start(name, [sys.executable, *command], environment)
        assert self.finish(name, process, seconds) == 0, self.log(name)
        return self.log(name)

    def kill_all(self) -> None:
        while left := self.all_with():
            kill(*left)
        for process in self._started:
            process.wait()


def run_job(folder: Path, name: str, command: list[str], num_ranks: int) -> None:
    """Run a script under torchrun to its end, over gloo, without an error."""
    jobs = Launched(folder)
    try:
        given = {"GLOO_SOCKET_IFNAME": "lo"}
        jobs.run(name, [*torchrun(num_ranks), *command], given, seconds=400)
    finally:
        jobs.kill_all()


def kill(*processes: psutil.Process) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, timeout=5)
