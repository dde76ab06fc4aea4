"""Replicas that are killed at chosen moments: correctness, and time until the others commit a step.

    python benchmarks/replica_kills.py [--kills 300] [--block 25] [--replicas 3] [--ranks 2]

Blocks of kills alternate between ``ElasticReplicas`` ("engine", level 3, ``fixed_sum_order``) and
torchft alone: its Manager, HTTP transport and asynchronous quorum around a plain model of the same
size, whose gradients are averaged over the ranks of a replica and then by ``Manager.allreduce``.

At its chosen moment a rank sends SIGKILL to itself. The other ranks of its replica are killed 0.1 s
later, as torchrun does, and all are started again. Processes are forked from one that has imported
everything. Both lighthouses have a heartbeat timeout of 1 s and a join timeout of 1 s.

After each block of "engine", one replica trains the same steps without kills. Every rank logs a
checksum of its weights after each committed step: all must be equal to those of that run. Every
replica saves each fourth step by ``Checkpointer.save_async``. Its complete checkpoints are loaded
at the end, and must have the weights of their steps.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import mmap
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torchft.checkpointing import http_transport
from torchft.coordination import LighthouseServer

import fsdp_engine as fe
from fsdp_engine.comm.collectives import Communicator
from fsdp_engine.integrations import state_transport
from fsdp_engine.integrations.torchft import ElasticReplicas

# Optimizers import it with their first step.
import torch._dynamo  # isort: skip

WIDTH, ROWS, BLOCKS, NUM_MICROBATCHES, SAVE_EVERY = 64, 8, 4, 6, 4
TIMEOUT = 10.0
# Where a rank kills itself. "anywhere": the whole replica, from outside.
MOMENTS = [
    "anywhere",
    "forward",
    "backward",
    "reduction within the replica",
    "sum over replicas",
    "vote",
    "optimizer step",
    "healing, receiver",
    "healing, sender",
    "saving",
]
WAYS = ("engine", "torchft alone")


class Shared:
    """Shared memory of all processes: a row of numbers per replica, and the step to stop at."""

    def __init__(self, num_replicas: int, num_ranks: int) -> None:
        shape = (num_replicas + 1, 4 + num_ranks)
        memory = mmap.mmap(-1, 8 * shape[0] * shape[1])
        self._table = torch.frombuffer(memory, dtype=torch.float64).view(shape).numpy()
        self._table[:] = 0
        self._table[:, 0] = -1
        self._table[-1, 0] = 1e9

    @property
    def stop_at(self) -> float:
        return float(self._table[-1, 0])

    @stop_at.setter
    def stop_at(self, step: float) -> None:
        self._table[-1, 0] = step

    def arm(self, replica: int, rank: int, moment: str) -> None:
        """The rank is to die at the next such moment."""
        self._table[replica, 1] = rank
        self._table[replica, 0] = MOMENTS.index(moment)

    def is_armed(self, replica: int, rank: int, moment: str) -> bool:
        row = self._table[replica]
        return bool(row[0] == MOMENTS.index(moment) and row[1] == rank)

    def disarm(self) -> None:
        self._table[:-1, 0] = -1

    def died(self, replica: int, at: float) -> None:
        self._table[replica, 2] = at

    def died_at(self, replica: int) -> float:
        return float(self._table[replica, 2])

    def commit(self, replica: int, rank: int, step: int) -> None:
        self._table[replica, 4 + rank] = step

    def committed(self, replica: int) -> int:
        """Steps that all ranks of the replica have committed since it was started."""
        return int(self._table[replica, 4:].min())

    def restart(self, replica: int) -> None:
        self._table[replica, 4:] = -1


class Place:
    """A rank of a replica, which may have to die.

    Args:
        folder: Folder of logs and checkpoints.
    """

    def __init__(self, shared: Shared, replica: int, rank: int, num_ranks: int, folder: Path):
        self.shared, self.replica, self.rank, self.num_ranks = shared, replica, rank, num_ranks
        self.folder = folder
        self._log = os.open(
            folder / f"{replica}_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def at(self, moment: str, later: float = 0.0) -> None:
        """Die, if the moment is due."""
        if self.shared.is_armed(self.replica, self.rank, moment):
            self.shared.disarm()
            time.sleep(later)
            self.shared.died(self.replica, time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, owner: Any, name: str, moment: str, *, after: bool = False) -> None:
        """Make ``moment`` occur before (or after) each call of ``owner.name``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **options: Any) -> Any:
            if not after:
                self.at(moment)
            result = original(*args, **options)
            if after:
                self.at(moment)
            return result

        setattr(owner, name, wrapper)

    def record(self, step: int, weights: Sequence[Tensor], num_replicas: int) -> None:
        """Log a committed step with the checksum of its weights."""
        checksum = 0
        for each in weights:
            checksum = zlib.crc32(each.detach().contiguous().numpy().tobytes(), checksum)
        now = time.monotonic()
        record = {"step": step, "sum": checksum, "time": now, "replicas": num_replicas}
        os.write(self._log, (json.dumps(record) + "\n").encode())
        self.shared.commit(self.replica, self.rank, step)


def make_model(place: Place) -> nn.Sequential:
    """Maps (rows, width) to (rows, 1); its middle block is where forward and backward die."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    def forward(module: nn.Module, args: Any, output: Tensor) -> None:
        place.at("forward")
        if output.requires_grad:
            output.register_hook(lambda grad: place.at("backward"))

    model[BLOCKS // 2].register_forward_hook(forward)
    return model


def loss_of(model: nn.Module, step: int, number: int, rank: int) -> Tensor:
    """The loss of a microbatch, which is the same in all replicas."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * number + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(x), torch.sin(x.sum(1, keepdim=True)))


def train_engine(place: Place, lighthouse: str) -> None:
    """Train as one rank of a replica of the engine."""
    place.wrap(Communicator, "_pairwise_reduce_started", "reduction within the replica")
    place.wrap(torchft.ProcessGroupGloo, "alltoall_base", "sum over replicas", after=True)
    place.wrap(torchft.Manager, "should_commit", "vote")
    place.wrap(state_transport, "_receive_into", "healing, receiver", after=True)
    place.wrap(state_transport, "_send", "healing, sender", after=True)
    model = make_model(place)
    engine = fe.shard(
        model, strategy="optim_grads_params", units=list(model), options=fe.Options(min_unit_size=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fe.shard_optimizer(optimizer)
    optimizer.register_step_pre_hook(lambda *_: place.at("optimizer step"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    saved = fe.Checkpointer(
        place.folder / f"saved_{place.replica}", engine, optimizer, extra={"scheduler": scheduler}
    )
    weights = [buffer.weights.main.tensor for buffer in engine.buffers]
    replicas = ElasticReplicas(
        engine,
        optimizer,
        num_microbatches=NUM_MICROBATCHES,
        fixed_sum_order=True,
        extra={"scheduler": scheduler},
        lighthouse=lighthouse,
        name=f"replica_{place.replica}",
        timeout=TIMEOUT,
    )
    while replicas.step < place.shared.stop_at:
        for number in replicas.microbatches():
            loss_of(model, replicas.step, number, place.rank).backward()
        num_replicas = replicas.num_replicas
        if replicas.commit():
            scheduler.step()
            place.record(replicas.step, weights, num_replicas)
            if replicas.step % SAVE_EVERY == 0:
                saved.save_async(replicas.step)
                place.at("saving", later=random.random() * 0.02)
    saved.wait()
    replicas.close()


def read_checkpoints(place: Place, _: str) -> None:
    """Load all complete checkpoints of replicas, and log their weights."""
    model = make_model(place)
    engine = fe.shard(
        model, strategy="optim_grads_params", units=list(model), options=fe.Options(min_unit_size=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fe.shard_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    for folder in sorted(place.folder.parent.glob("saved_*")):
        saved = fe.Checkpointer(folder, engine, optimizer, extra={"scheduler": scheduler})
        for step in saved.steps():
            saved.load(step, verify=True)
            place.record(step, [buffer.weights.main.tensor for buffer in engine.buffers], 1)
        saved.close()


def train_alone(place: Place, lighthouse: str) -> None:
    """Train as one rank of a replica of a plain model under torchft."""
    place.wrap(torchft.Manager, "allreduce", "sum over replicas", after=True)
    place.wrap(torchft.Manager, "should_commit", "vote")
    place.wrap(http_transport, "_streaming_load", "healing, receiver")
    place.wrap(http_transport, "_streaming_save", "healing, sender")
    model = make_model(place)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inner.register_step_pre_hook(lambda *_: place.at("optimizer step"))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    store = [0]
    if place.rank == 0:
        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store = [server.port]
    dist.broadcast_object_list(store)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=TIMEOUT),
        quorum_timeout=timedelta(seconds=4 * TIMEOUT),
        connect_timeout=timedelta(seconds=TIMEOUT),
        rank=place.rank,
        world_size=place.num_ranks,
        store_addr="localhost",
        store_port=store[0],
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{place.replica}",
    )
    optimizer = torchft.Optimizer(manager, inner)
    params = list(model.parameters())
    writing: threading.Thread | None = None
    while manager.current_step() < place.shared.stop_at:
        optimizer.zero_grad()
        for number in range(NUM_MICROBATCHES // 3):
            loss_of(model, manager.current_step(), number, place.rank).backward()
        flat = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
        work = dist.all_reduce(flat, async_op=True)
        place.at("reduction within the replica")
        assert work is not None
        work.wait()
        manager.allreduce(flat).wait()
        parts = flat.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param) / place.num_ranks
        step = manager.current_step()
        num_replicas = manager.num_participants()
        optimizer.step()
        if manager.current_step() > step:
            place.record(manager.current_step(), params, num_replicas)
            if manager.current_step() % SAVE_EVERY == 0:
                if writing is not None:
                    writing.join()
                path = place.folder / f"alone_{place.replica}_{place.rank}.pt"
                writing = threading.Thread(target=torch.save, args=(state(), path))
                writing.start()
                place.at("saving", later=random.random() * 0.02)
    manager.shutdown(wait=False)


# Advancing the generator sends gradients. At its first yield some of them have been sent.
_pairwise_reduce = Communicator._pairwise_reduce


def _reduce_in_two_parts(self: Communicator, *args: Any) -> Iterator[Any]:
    steps = _pairwise_reduce(self, *args)
    yield next(steps)
    self._pairwise_reduce_started()  # type: ignore[attr-defined]
    yield from steps


Communicator._pairwise_reduce = _reduce_in_two_parts  # type: ignore[method-assign, assignment]
Communicator._pairwise_reduce_started = lambda self: None  # type: ignore[attr-defined]


class Job:
    """Replicas of one way, as a scheduler runs them."""

    def __init__(
        self,
        train: Callable[[Place, str], None],
        folder: Path,
        lighthouse: str,
        num_replicas: int,
        num_ranks: int,
    ):
        self.shared = Shared(num_replicas, num_ranks)
        self.num_replicas, self.num_ranks = num_replicas, num_ranks
        self.folder, self._lighthouse = folder, lighthouse
        self._train = train
        self._num_starts = 0
        self.processes: dict[int, tuple[int, int]] = {}
        for replica in range(num_replicas):
            self.start(replica)

    def start(self, replica: int) -> None:
        """Fork the ranks of a replica."""
        self._num_starts += 1
        self.shared.restart(replica)
        for rank in range(self.num_ranks):
            pid = os.fork()
            if pid == 0:
                self._run(replica, rank)
            self.processes[pid] = (replica, rank)

    def _run(self, replica: int, rank: int) -> None:
        code = 1
        output = os.open(
            self.folder / f"{replica}_{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            torch.set_num_threads(1)
            random.seed()
            store = dist.FileStore(str(self.folder / f"store_{self._num_starts}"), self.num_ranks)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=60),
            )
            place = Place(self.shared, replica, rank, self.num_ranks, self.folder)
            self._train(place, self._lighthouse)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def pids(self, replica: int) -> list[int]:
        return [pid for pid, place in self.processes.items() if place[0] == replica]

    def kill(self, replica: int) -> None:
        """End the remaining ranks of a replica."""
        for pid in self.pids(replica):
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids(replica):
            os.waitpid(pid, 0)
            del self.processes[pid]

    def await_death(self, seconds: float) -> int:
        """Returns the replica of the first process that ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid and (place := self.processes.pop(pid, None)) is not None:
                if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                    raise RuntimeError(f"replica {place[0]} rank {place[1]} failed: {status}")
                return place[0]
            time.sleep(0.002)
        raise TimeoutError(f"no rank died in {seconds} s")

    def await_step(self, replica: int, step: int, seconds: float = 90.0) -> None:
        """Wait until a replica that was started has committed ``step`` or a later one."""
        deadline = time.monotonic() + seconds
        while self.shared.committed(replica) < step:
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"replica {replica} did not commit step {step}")
            time.sleep(0.002)

    def raise_if_failed(self) -> None:
        """Raise if a process has ended with an error."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid and (place := self.processes.pop(pid, None)) is not None and status:
            raise RuntimeError(f"replica {place[0]} rank {place[1]} failed: {status}")

    def last_step(self) -> int:
        return max(self.shared.committed(each) for each in range(self.num_replicas))

    def restart_after_death(self, replica: int) -> None:
        """Kill the other ranks a little later, as torchrun does, and start all ranks again."""
        time.sleep(0.1)
        self.kill(replica)
        self.shared.disarm()
        self.start(replica)

    def finish(self, step: int) -> None:
        """Let all train up to ``step`` and end."""
        self.shared.stop_at = step
        deadline = time.monotonic() + 120
        while self.processes:
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"replicas {sorted(self.processes.values())} did not end")
            time.sleep(0.01)

    def show_stacks(self) -> None:
        """Write the stacks of all threads to the ranks' output."""
        for pid in self.processes:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)


@contextmanager
def lighthouse() -> Iterator[str]:
    """Run a lighthouse in its own process, since this process forks."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        server = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=1000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=1000,
        )
        os.write(writer, server.address().encode())
        signal.pause()
    try:
        yield os.read(reader, 1000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def kill_once(job: Job, moment: str, draw: random.Random) -> tuple[int, float]:
    """Kill a replica at ``moment`` and start it again; returns which, and when it died."""
    victim, rank = draw.randrange(job.num_replicas), draw.randrange(job.num_ranks)
    if moment == "anywhere":
        time.sleep(draw.random() * 0.1)
        at = time.monotonic()
        job.kill(victim)
        job.start(victim)
        return victim, at
    if moment.startswith("healing"):
        job.kill(victim)
        if moment == "healing, receiver":
            job.shared.arm(victim, rank, moment)
        else:
            for each in range(job.num_replicas):
                if each != victim:
                    job.shared.arm(each, rank, moment)
        job.start(victim)
    else:
        job.shared.arm(victim, rank, moment)
    dead = job.await_death(60)
    at = job.shared.died_at(dead)
    job.restart_after_death(dead)
    return dead, at


def run(
    way: str, moments: list[str], seed: int, num_replicas: int, num_ranks: int, folder: Path
) -> list[dict[str, Any]]:
    """A block of kills; raises where something is wrong."""
    draw = random.Random(seed)
    kills = []
    with lighthouse() as address:
        train = train_engine if way == "engine" else train_alone
        job = Job(train, folder, address, num_replicas, num_ranks)
        try:
            for replica in range(num_replicas):
                job.await_step(replica, 1)
            for moment in moments:
                begin = time.monotonic()
                victim, at = kill_once(job, moment, draw)
                # All train again, for some steps.
                for replica in range(num_replicas):
                    job.await_step(replica, 1)
                last = job.last_step()
                for replica in range(num_replicas):
                    job.await_step(replica, last + 2)
                took = time.monotonic() - begin
                kills.append({"moment": moment, "victim": victim, "at": at, "took": took})
            job.finish(job.last_step() + 6)
        except Exception:
            job.show_stacks()
            raise
        finally:
            for replica in range(num_replicas):
                job.kill(replica)
    for kill in kills:
        times = [
            record["time"]
            for replica in range(num_replicas)
            if replica != kill["victim"]
            for record in read_log(folder, replica, 0)
        ]
        kill["seconds"] = min(each for each in times if each > kill["at"]) - kill["at"]
    return kills


def read_log(folder: Path, replica: int, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"{replica}_{rank}.log").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check(folder: Path, expected: Path, num_replicas: int, num_ranks: int) -> int:
    """Compare all steps with those of a run of one replica; returns their number."""
    last = 0
    for rank in range(num_ranks):
        right = {record["step"]: record["sum"] for record in read_log(expected, 0, rank)}
        seen: set[int] = set()
        for replica in range(num_replicas):
            steps = [record["step"] for record in read_log(folder, replica, rank)]
            # Steps must ascend: a replica repeats only steps that no replica has committed.
            for record in read_log(folder, replica, rank):
                if record["sum"] != right[record["step"]]:
                    raise AssertionError(
                        f"step {record['step']}: weights of rank {rank} of replica {replica} are "
                        "not those of a run without kills"
                    )
            if sorted(set(steps)) != steps:
                raise AssertionError(f"replica {replica} committed steps twice: {steps}")
            seen.update(steps)
        for record in read_log(folder / "read", 0, rank):
            if record["sum"] != right[record["step"]]:
                raise AssertionError(f"a checkpoint lacks the weights of step {record['step']}")
        last = max(seen)
        if seen != set(range(1, last + 1)):
            raise AssertionError(f"steps are missing: {sorted(set(range(1, last)) - seen)}")
    return last


def summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [kill["seconds"] for kill in kills]
    return {"kills": len(kills), **harness.spread(seconds), "worst": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=300, help="of each way")
    parser.add_argument("--block", type=int, default=25)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="of each replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument(
        "--keep", type=float, default=1e9, help="seconds; keep the logs of slower kills"
    )
    parser.add_argument("--results", default="replica_kills")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(args.seed)
    moments = (args.moments * (args.kills // len(args.moments) + 1))[: args.kills]
    draw.shuffle(moments)
    kills: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    num_steps = num_checkpoints = 0
    for first in range(0, args.kills, args.block):
        block = moments[first : first + args.block]
        for way in args.ways:
            folder = Path(tempfile.mkdtemp(prefix="replica_kills_"))
            shape = (args.replicas, args.ranks)
            try:
                kills[way] += run(way, block, args.seed + first, *shape, folder)
                if way == "engine":
                    last = max(
                        read_log(folder, each, 0)[-1]["step"] for each in range(args.replicas)
                    )
                    expected, read = folder / "expected", folder / "read"
                    expected.mkdir()
                    read.mkdir()
                    with lighthouse() as address:
                        Job(train_engine, expected, address, 1, args.ranks).finish(last)
                    Job(read_checkpoints, read, "", 1, args.ranks).finish(0)
                    num_checkpoints += len(read_log(read, 0, 0))
                    num_steps += check(folder, expected, *shape)
            except Exception:
                print(f"logs and output of the ranks are in {folder}")
                raise
            done = kills[way][-len(block) :]
            if any(kill["seconds"] > args.keep for kill in done):
                print(f"logs of a slow kill are in {folder}: {done}")
            else:
                shutil.rmtree(folder)
            print(f"{way}: {len(kills[way])} kills, {summary(done)}", flush=True)
        write(args, kills, num_steps, num_checkpoints)


def write(
    args: argparse.Namespace, kills: dict[str, list[dict[str, Any]]], steps: int, checkpoints: int
) -> None:
    by_moment = {
        moment: {
            way: summary([kill for kill in found if kill["moment"] == moment])
            for way, found in kills.items()
            if any(kill["moment"] == moment for kill in found)
        }
        for moment in MOMENTS
    }
    record = {
        "replicas": args.replicas,
        "ranks": args.ranks,
        "steps with the bits of a run without kills": steps,
        "checkpoints with the bits of their steps": checkpoints,
        "seconds to the next committed step of the others": {
            "all": {way: summary(found) for way, found in kills.items()},
            **by_moment,
        },
        "kills": kills,
    }
    harness.write_results(args.results, record)


if __name__ == "__main__":
    main()
