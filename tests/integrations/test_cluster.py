"""Jobs on clusters: signals to end, launch scripts, workers and nodes that die."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import interruption
from interruption import Interruption
from settings import parse_settings
from tests.integrations.launching import (
    ROOT,
    Launched,
    arguments_of,
    train_undisturbed,
    wait_until,
)
from tests.pool import Ranks
from tests.ports import free_port
from tests.processes import torchrun
from train_gpt import Job, prepare

LAUNCH = ROOT / "examples" / "launch"
SHELL_SCRIPTS = sorted(LAUNCH.glob("*.s*"))


class Told(Job):
    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 7 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().train_step(step)


def train_until_told(arguments: list[str]) -> tuple[int, list[float], list[int]]:
    job = prepare(parse_settings(arguments), Told)
    before = signal.getsignal(signal.SIGTERM)
    stop = job.train()
    assert signal.getsignal(signal.SIGTERM) is before
    return stop, [record.loss for record in job.curve.steps], job.checkpointer.steps()


def go_on(arguments: list[str]) -> tuple[str, list[float]]:
    job = prepare(parse_settings(arguments), Job)
    said = job.resume()
    assert job.train() == 0
    return said, [record.loss for record in job.curve.steps]


def test_a_signal_to_one_rank_saves_and_ends_all_after_the_same_step(
    ranks: Ranks, texts: Path
) -> None:
    expected = ranks.run(train_undisturbed, arguments_of(texts, 12), world_size=2)[0]
    shutil.rmtree(texts / "out")

    answers = ranks.run(train_until_told, arguments_of(texts, 12, "--async-save"), world_size=2)
    assert answers[0] == answers[1]
    stop, losses, saved = answers[0]
    assert stop == signal.SIGUSR1
    assert losses == expected[: len(losses)]
    assert saved == [5, len(losses)]
    assert 8 <= len(losses) <= 9

    said, losses = ranks.run(go_on, arguments_of(texts, 12), world_size=4)[0]
    assert said.startswith(f"resumed after step {saved[-1]} ")
    assert losses == pytest.approx(expected, abs=1e-4)


def test_the_stronger_signal_counts_and_other_handlers_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interruption.dist, "get_world_size", lambda: 1)
    before = [signal.getsignal(each) for each in interruption.SIGNALS]
    with Interruption() as asked:
        assert asked.heard() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.heard() == signal.SIGTERM
    assert [signal.getsignal(each) for each in interruption.SIGNALS] == before


def test_sigterm_ends_the_process_as_it_would_without_a_handler(launched: Launched) -> None:
    program = "import interruption, signal; interruption.end_by(signal.SIGUSR1); print('here');"
    program += "interruption.end_by(signal.SIGTERM); print('never')"
    process = launched.start("ended", [sys.executable, "-c", program])
    assert launched.finish("ended", process) == -signal.SIGTERM
    assert launched.log("ended").endswith("here\n")


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, script], check=True, timeout=60)


# The environment that the training operator sets in each pod of the job train-gpt.
OPERATOR = {
    "PET_RDZV_ENDPOINT": "train-gpt-worker-0:23456",
    "PET_RDZV_BACKEND": "{rdzvBackend}",
    "PET_NNODES": "{minReplicas}:{maxReplicas}",
    "PET_MAX_RESTARTS": "{maxRestarts}",
}


def test_the_job_of_kubernetes_has_known_fields_and_starts_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    elastic, replicas = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]
    assert elastic.keys() == {"maxReplicas", "maxRestarts", "minReplicas", "rdzvBackend"}
    assert replicas.keys() == {"Worker"}
    assert replicas["Worker"].keys() == {"replicas", "restartPolicy", "template"}
    assert elastic["minReplicas"] <= replicas["Worker"]["replicas"] <= elastic["maxReplicas"]
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this one
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    environment = {each["name"]: each for each in container["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]["value"] == "1"

    for name, value in OPERATOR.items():
        monkeypatch.setenv(name, value.format(**elastic))
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    monkeypatch.setenv("PET_LOCAL_ADDR", "10.0.0.1")
    python, m, torchrun, *arguments = container["command"]
    assert (python, m, torchrun) == ("python", "-m", "torch.distributed.run")
    found = get_args_parser().parse_args(arguments)
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("2:4", "8", 10)
    assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "train-gpt-worker-0:23456")
    assert found.local_addr == "10.0.0.1"
    assert (ROOT / found.training_script).exists()
    settings = parse_settings(found.training_script_args)
    assert settings.out.is_relative_to(mounts["runs"])


# Environment of torchrun's nodes on this machine.
LOCAL = {"RANKS": "1", "PET_LOCAL_ADDR": "localhost", "PET_RDZV_CONF": "last_call_timeout=2"}


def slurm(folder: Path, num_tasks: int) -> dict[str, str]:
    """The environment of a batch script on two nodes, with stubs of Slurm's commands."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    stub = Path(__file__).parent / "slurm_stub.py"
    for name in ("srun", "scontrol"):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" {name} "$@"\n')
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost[1-2]"}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": str(num_tasks)}
    job |= {"SLURM_STUB_FOLDER": str(folder), "PORT": str(free_port())}
    return {**job, **LOCAL, "PATH": f"{commands}:{os.environ['PATH']}"}


def newest_in(folder: Path) -> int:
    return max((int(each.name[5:13]) for each in folder.glob("step-*")), default=0)


def newest(folder: Path) -> int:
    return newest_in(folder / "out" / "checkpoints")


def lines_of(folder: Path, name: str) -> list[str]:
    """Lines of a file that stubs write: "started" or "requeued"."""
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


def measured(folder: Path) -> tuple[int, list[float]]:
    found = json.loads((folder / "out" / "metrics.json").read_text())
    return found["num_ranks"], [record["loss"] for record in found["steps"]]


# Replaces Python: writes its environment and arguments, and waits for a signal.
FAKE_PYTHON = """#!/usr/bin/env bash
trap 'exit 0' USR1
trap 'exit 143' TERM
rank="$RANK/$WORLD_SIZE/$LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
echo "$rank $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*" >> "$SLURM_STUB_FOLDER/started"
if [ -e "$SLURM_STUB_FOLDER/fails" ] && [ "$SLURM_PROCID" = 1 ]; then
    until [ "$(wc -l < "$SLURM_STUB_FOLDER/started")" -ge "$SLURM_NTASKS" ]; do sleep 0.01; done
    rm "$SLURM_STUB_FOLDER/fails"
    exit 3
fi
while true; do sleep 0.05; done
"""


def with_fake_python(folder: Path, num_tasks: int) -> dict[str, str]:
    python = folder / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return {**slurm(folder, num_tasks), "PYTHON": str(python)}


def test_slurm_numbers_ranks_starts_anew_after_a_failure_and_requeues(
    tmp_path: Path, launched: Launched
) -> None:
    environment = with_fake_python(tmp_path, num_tasks=4)
    (tmp_path / "fails").touch()
    command = ["bash", str(LAUNCH / "slurm_srun.sbatch"), "--out", "a folder"]
    batch = launched.start("batch", command, environment)
    wait_until(lambda: len(lines_of(tmp_path, "started")) == 8, "two attempts of four ranks")
    batch.send_signal(signal.SIGUSR1)
    assert launched.finish("batch", batch) == 0, launched.log("batch")
    port = int(environment["PORT"])
    assert sorted(lines_of(tmp_path, "started")) == sorted(
        f"{rank}/4/{rank % 2}/2 localhost {port + attempt}  examples/train_gpt.py --out a folder"
        for attempt in (0, 1)
        for rank in range(4)
    )
    assert "attempt 0 ended with status 3" in launched.log("batch")
    assert lines_of(tmp_path, "requeued") == ["4711"]


def test_slurm_gives_up_after_so_many_failures(tmp_path: Path, launched: Launched) -> None:
    environment = {**with_fake_python(tmp_path, num_tasks=2), "RESTARTS": "1", "PYTHON": "false"}
    batch = launched.start("batch", ["bash", str(LAUNCH / "slurm_srun.sbatch")], environment)
    assert launched.finish("batch", batch) == 1
    assert launched.log("batch").count("ended with status 1") == 2
    assert lines_of(tmp_path, "requeued") == []


@pytest.mark.parametrize("script", ["slurm_srun.sbatch", "slurm_torchrun.sbatch"])
def test_a_job_that_slurm_ends_waits_to_be_ended(
    script: str, tmp_path: Path, launched: Launched
) -> None:
    environment = with_fake_python(tmp_path, num_tasks=2)
    batch = launched.start("batch", ["bash", str(LAUNCH / script), "--steps", "5"], environment)
    wait_until(lambda: len(lines_of(tmp_path, "started")) == 2, "two tasks")
    if "torchrun" in script:
        line = (
            "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint "
            f"localhost:{environment['PORT']} --rdzv-id 4711 --nnodes 2 --nproc-per-node 1 "
            "--max-restarts 10 examples/train_gpt.py --steps 5"
        )
        assert lines_of(tmp_path, "started") == [f"///   1 {line}"] * 2
    batch.send_signal(signal.SIGTERM)
    wait_until(lambda: launched.all_with("sleep infinity"), "the script's rest")
    wait_until(lambda: not launched.all_with("examples/train_gpt.py --steps"), "the tasks' end")
    assert batch.poll() is None
    assert lines_of(tmp_path, "requeued") == []


@pytest.mark.thorough
def test_slurm_trains_to_the_time_limit_and_goes_on_by_another_script(
    ranks: Ranks, texts: Path, launched: Launched
) -> None:
    # So many steps that they do not end by themselves.
    arguments = arguments_of(texts, 100_000)
    environment = slurm(texts, num_tasks=2)
    saved = 0
    for life, script in enumerate(("slurm_srun.sbatch", "slurm_torchrun.sbatch"), start=1):
        name, from_step = script.removesuffix(".sbatch"), saved
        batch = launched.start(name, ["bash", str(LAUNCH / script), *arguments], environment)
        wait_until(lambda: newest(texts) >= saved + 10, "a further checkpoint")  # noqa: B023
        batch.send_signal(signal.SIGUSR1)
        assert launched.finish(name, batch) == 0, launched.log(name)
        (saved,) = map(int, re.findall(r"SIGUSR1; saved step (\d+);", launched.log(name)))
        assert saved >= from_step + 10
        assert (f"resumed after step {from_step} " in launched.log(name)) == (life > 1)
        assert lines_of(texts, "requeued") == ["4711"] * life
    until = [*arguments, "--stop-at", str(saved + 1)]
    _, losses = ranks.run(go_on, until, world_size=2)[0]
    shutil.rmtree(texts / "out")
    assert losses == pytest.approx(ranks.run(train_undisturbed, until, world_size=2)[0], abs=1e-6)


def listens(port: int) -> bool:
    with socket.socket() as each:
        return each.connect_ex(("localhost", port)) == 0


def processes(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]


def workers(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    mine = "-u examples/train_gpt.py"
    return [each for each in processes(node) if mine in " ".join(each.cmdline())]


def on_nodes(port: int, **changes: str) -> dict[str, str]:
    quick = {"LOGLEVEL": "INFO", "PET_MONITOR_INTERVAL": "0.1"}
    return {**LOCAL, **quick, "HEAD": "localhost", "PORT": str(port), **changes}


@pytest.mark.thorough
def test_torchrun_goes_on_without_a_worker_without_a_node_and_with_a_new_node(
    ranks: Ranks, texts: Path, launched: Launched
) -> None:
    port, times = free_port(), "last_call_timeout=3,keep_alive_interval=1"
    environment = on_nodes(port, NODES="1:2", PET_RDZV_CONF=times)
    command = [str(LAUNCH / "torchrun.sh"), "examples/train_gpt.py", *arguments_of(texts, 200)]

    def resumed(times: int) -> bool:
        return launched.log("node0").count("resumed after step") == times

    # The first node has the rendezvous store, so it must not end.
    node0 = launched.start("node0", command, environment)
    wait_until(lambda: listens(port), "the rendezvous")
    node1 = launched.start("node1", command, environment)
    wait_until(lambda: newest(texts) >= 5, "a checkpoint on two ranks")

    # A worker dies: both nodes restart their workers.
    workers(node1)[0].kill()
    wait_until(lambda: resumed(1), "a restart of all workers")
    at_restart = newest(texts)
    wait_until(lambda: newest(texts) > at_restart, "a checkpoint after it")

    # A node dies, with all that runs there: the other continues alone.
    for each in processes(node1):
        each.kill()
    wait_until(lambda: resumed(2), "a start without the node")
    alone_from = newest(texts)
    wait_until(lambda: newest(texts) > alone_from, "a checkpoint of one rank")
    (survivor,) = workers(node0)
    survivor.suspend()  # otherwise it might finish before another node joins

    # A node joins: the survivor gets a signal, saves and ends, and both start.
    launched.start("node2", command, environment)
    wait_until(lambda: "Detected 1 new nodes" in launched.log("node0"), "a new node")
    survivor.resume()
    assert launched.finish("node0", node0) == 0, launched.log("node0")
    assert resumed(3)
    assert "ended by SIGTERM; saved step" in launched.log("node0")
    shapes = re.findall(r"on (\d x \d).* ranks \(outer", launched.log("node0"))
    assert shapes == ["1 x 2", "1 x 2", "1 x 1", "1 x 2"]

    num_ranks, losses = measured(texts)
    assert num_ranks == 2
    shutil.rmtree(texts / "out")
    expected = ranks.run(train_undisturbed, arguments_of(texts, 200), world_size=2)[0]
    assert losses[:alone_from] == pytest.approx(expected[:alone_from], abs=1e-6)
    assert losses == pytest.approx(expected, abs=1e-2)


@pytest.mark.thorough
def test_torchrun_goes_on_from_the_memory_of_the_nodes(texts: Path, launched: Launched) -> None:
    """Checkpoints exist only in folders of the nodes. A lost node's folder is lost, too."""
    port, times = free_port(), "last_call_timeout=1,keep_alive_interval=1"
    environment = on_nodes(port, NODES="2", PET_RDZV_CONF=times)
    arguments = arguments_of(texts, 400, "--save-every", "400")

    def start(node: int) -> subprocess.Popen[bytes]:
        local = ["--local-save", str(texts / f"memory{node}"), "--local-save-every", "5"]
        command = [str(LAUNCH / "torchrun.sh"), "examples/train_gpt.py", *arguments, *local]
        return launched.start(f"node{node}", command, environment)

    def newest_of(*nodes: int) -> int:
        return min(newest_in(texts / f"memory{node}") for node in nodes)

    def resumed() -> list[int]:
        return [
            int(step) for step in re.findall(r"resumed after step (\d+)", launched.log("node0"))
        ]

    node0 = start(0)
    wait_until(lambda: listens(port), "the rendezvous")
    node1 = start(1)
    wait_until(lambda: newest_of(0, 1) >= 10, "a checkpoint on two nodes")
    workers(node1)[0].kill()
    wait_until(lambda: len(resumed()) == 1, "a restart of all workers")
    wait_until(lambda: newest_of(0, 1) > resumed()[0], "a checkpoint after it")
    for each in processes(node1):
        each.kill()
    shutil.rmtree(texts / "memory1")
    start(2)
    assert launched.finish("node0", node0) == 0, launched.log("node0")
    first, second = resumed()
    assert 10 <= first < second
    # Checkpoints in memory were removed at the end.
    assert not list(texts.glob("memory*/step-*"))

    losses = measured(texts)
    shutil.rmtree(texts / "out")
    launched.run("undisturbed", [*torchrun(2), "examples/train_gpt.py", *arguments])
    assert losses == measured(texts)
