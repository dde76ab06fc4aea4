"""Workers and nodes that die: training continues from checkpoints in the memory of the nodes.

    python benchmarks/node_losses.py [--kills 100] [--nodes 3]

``examples/train_gpt.py`` runs at level 3 under torchrun, one rank on each node; a node is an agent
of torchrun with a folder in ``/dev/shm`` of its own. At random moments a worker is killed by
SIGKILL, or a node is lost with its agent, worker and folder. A lost node is replaced by one with an
empty folder. There is no other checkpoint before the end. Then weights and optimizer state are
compared with those of a run without losses, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import harness
import psutil

# Steps of some 20 ms.
MODEL = ["--layers", "2", "--width", "64", "--heads", "2", "--sequence-length", "32"]
SAVE_EVERY = 5
STEPS_PER_KILL = 20
SECONDS = 120.0  # for a restart
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1e6)
"""


class Cluster:
    """Nodes of a job on this machine, and the store in which they meet.

    Args:
        num_nodes: Number of nodes that train.
        folder: Folder of logs and of the run.
        memory: Folder in memory, in which each node has a folder.
        steps: Number of steps of the run.
    """

    def __init__(self, num_nodes: int, folder: Path, memory: Path, steps: int) -> None:
        self.folder = folder
        self.memory = memory
        self._num_nodes = num_nodes
        self._steps = steps
        self._num_started = 0
        self.nodes: list[tuple[subprocess.Popen[bytes], Path]] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self._port = free.getsockname()[1]
        self._store = subprocess.Popen(
            [sys.executable, "-c", STORE, str(self._port)], stdout=subprocess.PIPE
        )
        assert self._store.stdout is not None
        self._store.stdout.readline()
        for _ in range(num_nodes):
            self.add_node()

    @property
    def log(self) -> str:
        """The output of all nodes."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    def newest(self) -> int:
        """The newest step in the memory of a node."""
        found = [path.name for _, node in self.nodes for path in node.glob("step-*")]
        return max((int(name.split("-")[1].split(".")[0]) for name in found), default=0)

    def add_node(self) -> None:
        """Start a node with an empty folder."""
        name = f"node{self._num_started}"
        self._num_started += 1
        rendezvous = f"is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2,timeout={SECONDS:.0f}"  # noqa: E501
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self._num_nodes)),
            *("--nproc-per-node", "1", "--max-restarts", "100000", "--monitor-interval", "0.05"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}"),
            *("--rdzv-conf", rendezvous, "--rdzv-id", "losses", "--local-addr", "localhost"),
            str(harness.ROOT / "examples" / "train_gpt.py"),
            *("--out", str(self.folder / "out"), "--steps", str(self._steps), *MODEL),
            *("--batch-size", str(4 * self._num_nodes), "--eval-every", str(self._steps)),
            *("--eval-sequences", "12", "--save-every", str(self._steps), "--no-sample"),
            *("--local-save", str(self.memory / name), "--local-save-every", str(SAVE_EVERY)),
        ]
        environment = {
            "PYTHONPATH": f"{harness.ROOT}:{harness.ROOT / 'examples'}",
            "OMP_NUM_THREADS": "1",
            # Otherwise agents reuse the store of the first round, which a lost node may have had.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            agent = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.nodes.append((agent, self.memory / name))

    def lose_worker(self, draw: random.Random) -> None:
        """Kill the worker of one node."""
        agent, _ = draw.choice(self.nodes)
        for worker in psutil.Process(agent.pid).children(recursive=True):
            worker.kill()

    def lose_node(self, draw: random.Random) -> None:
        """Kill a node with its memory, and start another one."""
        agent, memory = self.nodes.pop(draw.randrange(len(self.nodes)))
        for each in (
            *psutil.Process(agent.pid).children(recursive=True),
            psutil.Process(agent.pid),
        ):
            each.kill()
        agent.wait()
        shutil.rmtree(memory)
        self.add_node()

    def finish(self) -> None:
        """Wait for the end of the run."""
        for agent, _ in self.nodes:
            agent.wait(timeout=10 * SECONDS)
            assert agent.returncode == 0, self.log[-3000:]

    def close(self) -> None:
        """End all processes."""
        for agent, _ in self.nodes:
            if agent.poll() is None:
                kill(agent)
        self._store.kill()
        self._store.wait()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its workers, as the loss of a machine does."""
    agent.send_signal(signal.SIGSTOP)  # it must not see its workers end
    for worker in psutil.Process(agent.pid).children(recursive=True):
        worker.kill()
    agent.kill()
    agent.wait()


def train(
    num_nodes: int, num_kills: int, folder: Path, memory: Path, steps: int
) -> dict[str, list[float]]:
    """Train, and lose workers and nodes. Returns the seconds from each loss to the next checkpoint,
    by kind of loss."""
    draw = random.Random(0)
    folder.mkdir()
    seconds: dict[str, list[float]] = {"worker": [], "node": []}
    with ExitStack() as stack:
        cluster = Cluster(num_nodes, folder, memory, steps)
        stack.callback(cluster.close)
        for number in range(num_kills):
            wait_for_step(cluster, STEPS_PER_KILL * (number + 1))
            time.sleep(draw.uniform(0, 0.5))  # losses during saves, and between them
            kind = draw.choice(["worker", "node"])
            num_resumed = len(resumed_steps(cluster))
            start = time.monotonic()
            cluster.lose_worker(draw) if kind == "worker" else cluster.lose_node(draw)
            while len(resumed_steps(cluster)) == num_resumed:
                wait_a_little(start, cluster)
            step = resumed_steps(cluster)[-1]
            while cluster.newest() <= step:
                wait_a_little(start, cluster)
            seconds[kind].append(time.monotonic() - start)
            print(f"{number + 1}: lost a {kind}, went on after step {step}", flush=True)
        cluster.finish()
    return seconds


def resumed_steps(cluster: Cluster) -> list[int]:
    """Steps from which the run was continued, ascending."""
    lines = [line for line in cluster.log.splitlines() if "resumed after step" in line]
    return sorted(int(line.split("resumed after step ")[1].split()[0]) for line in lines)


def wait_for_step(cluster: Cluster, step: int) -> None:
    """Wait until the memory of a node has a checkpoint of ``step`` or later."""
    start = time.monotonic()
    while cluster.newest() < step:
        wait_a_little(start, cluster)


def wait_a_little(start: float, cluster: Cluster) -> None:
    """Sleep.

    Raises:
        TimeoutError: too much time has passed.
    """
    if time.monotonic() > start + SECONDS:
        raise TimeoutError(cluster.log[-5000:])
    time.sleep(0.02)


def is_equal(checkpoints: Sequence[Path], match: str) -> bool:
    """Whether entries of two runs' last checkpoints are equal, bit for bit."""
    command = [sys.executable, "-m", "fsdp_engine.checkpoint", "diff", *map(str, checkpoints)]
    environment = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    compared = subprocess.run(
        [*command, "--match", match], capture_output=True, text=True, env=environment
    )
    print(compared.stdout, compared.stderr)
    return compared.returncode == 0


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    steps = STEPS_PER_KILL * (options.kills + 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        runs, memories = Path(folder), Path(memory)
        train(options.nodes, 0, runs / "undisturbed", memories, steps)
        seconds = train(options.nodes, options.kills, runs / "losses", memories, steps)
        out = [runs / name / "out" for name in ("undisturbed", "losses")]
        losses = [
            [step["loss"] for step in json.loads((each / "metrics.json").read_text())["steps"]]
            for each in out
        ]
        checkpoints = [each / "checkpoints" for each in out]
        are_equal = {
            "losses of all steps": losses[0] == losses[1] and len(losses[1]) == steps,
            "weights": is_equal(checkpoints, "model.*"),
            "optimizer": is_equal(checkpoints, "optimizer.*"),
        }
    results = {
        "nodes": options.nodes,
        "steps": steps,
        "save_every": SAVE_EVERY,
        "losses": {kind: len(each) for kind, each in seconds.items()},
        "seconds": {
            kind: {**harness.spread(each), "worst": max(each)} for kind, each in seconds.items()
        },
        "are_equal": are_equal,
        "is_equal": all(are_equal.values()),
    }
    print(json.dumps(results, indent=1))
    harness.write_results("node_losses", results)


if __name__ == "__main__":
    main()
