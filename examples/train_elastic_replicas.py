"""Trains three replicas of a sharded model, kills some at random, and starts them again.

    python examples/train_elastic_replicas.py [--steps 120] [--kills 3] [--replicas 3] [--ranks 2]

This process runs torchft's lighthouse and starts the ranks of each replica. A replica that was
killed gets weights, optimizer state and scheduler from a living one. At the end all replicas have
the weights of a run without kills (``--kills 0``), bit for bit. The model is small; the loop is
that of a large one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.integrations.torchft import ElasticReplicas

WIDTH, ROWS, NUM_MICROBATCHES = 32, 8, 6


def make_model(seed: int) -> nn.Sequential:
    """Maps (rows, width) to (rows, 1)."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def batch_of(step: int, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank of any replica gets for microbatch ``number`` of ``step``."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * number + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True))


def train(args: argparse.Namespace) -> None:
    """Train as one rank of a replica."""
    model = make_model(seed=0)
    engine = fe.shard(model, units=list(model), options=fe.Options(min_unit_size=0))
    rank = engine.ranks.rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fe.shard_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    replicas = ElasticReplicas(
        engine,
        optimizer,
        num_microbatches=NUM_MICROBATCHES,
        min_replicas=args.min_replicas,
        extra={"scheduler": scheduler},
        fixed_sum_order=True,
        name=args.name,
        timeout=args.timeout,
    )
    log = args.out / f"{args.name}.jsonl"
    while replicas.step < args.steps:
        losses = []
        for number in replicas.microbatches():
            x, target = batch_of(replicas.step, number, rank)
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            losses.append(loss.item())
            time.sleep(args.sleep / NUM_MICROBATCHES)
        step, num_replicas = replicas.step, replicas.num_replicas
        is_committed = replicas.commit()
        if is_committed:
            scheduler.step()
        if rank == 0:
            record = {
                "step": step,
                "replicas": num_replicas,
                "committed": is_committed,
                "loss": sum(losses) / len(losses) if losses else None,
                "time": time.time(),
            }
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    weights = engine.full_state_dict()
    if rank == 0:
        torch.save(weights, args.out / f"{args.name}.pt")
    replicas.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def committed(log: Path) -> list[dict[str, float]]:
    """The committed steps in a replica's log."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [record for record in map(json.loads, lines) if record["committed"]]


class Replica:
    """The processes of one replica: one for each rank, as a scheduler of jobs would start them."""

    def __init__(self, name: str, args: argparse.Namespace, lighthouse: str) -> None:
        self.log = args.out / f"{name}.jsonl"
        options = ("steps", "out", "sleep", "timeout", "min_replicas")
        self._command = [sys.executable, __file__, f"--name={name}"]
        self._command += [f"--{key}={getattr(args, key)}" for key in options]
        self._num_ranks = args.ranks
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse}
        self._output = (args.out / f"{name}.log").open("ab")
        self.start()

    def start(self) -> None:
        """Start the processes."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        self._processes = []
        for rank in range(self._num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._num_ranks)}
            self._processes.append(
                subprocess.Popen(
                    self._command,
                    env={**self._environment, **address, **place},
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
            )

    def kill(self) -> None:
        """End all processes at once, as a lost machine would."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    @property
    def runs(self) -> bool:
        """Whether a process has not ended."""
        return any(process.poll() is None for process in self._processes)

    @property
    def has_failed(self) -> bool:
        """Whether a process has ended with an error."""
        return any(process.poll() not in (None, 0) for process in self._processes)


def supervise(args: argparse.Namespace) -> int:
    """Starts everything, kills replicas, and compares their weights; returns an exit code."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=args.min_replicas, join_timeout_ms=1000
    )
    draw = random.Random(args.seed)
    names = [f"replica_{number}" for number in range(args.replicas)]
    replicas = [Replica(name, args, lighthouse.address()) for name in names]
    # No kills in the last half: a restarted replica needs some seconds, and a peer that trains.
    kills = sorted(draw.sample(range(2, args.steps // 2), args.kills))
    waits = []
    while any(each.runs for each in replicas):
        time.sleep(0.05)
        done = max((len(committed(each.log)) for each in replicas), default=0)
        for each in replicas:
            if each.has_failed:
                print(f"{each.log.stem} failed: see {each.log.with_suffix('.log')}")
                for other in replicas:
                    other.kill()
                return 1
        if kills and done >= kills[0]:
            running = [each for each in replicas if each.runs]
            victim = draw.choice(running)
            killed_at = time.time()
            victim.kill()
            print(f"killed {victim.log.stem} after step {kills.pop(0)}")
            victim.start()
            others = [each for each in replicas if each is not victim]
            waits.append((killed_at, others))
    lighthouse.shutdown()
    for killed_at, others in waits:
        times = [r["time"] for each in others for r in committed(each.log)]
        after = min((each - killed_at for each in times if each > killed_at), default=None)
        if after is not None:
            print(f"{after:.2f} s from a kill to the next committed step")
    states = [torch.load(args.out / f"{name}.pt") for name in names]
    apart = max(
        float((state[key] - value).abs().max())
        for state in states
        for key, value in states[0].items()
    )
    losses = [r["loss"] for r in committed(replicas[0].log) if r["loss"] is not None]
    print(f"{args.steps} steps; weights of replicas differ by {apart:.1e} at most")
    print(f"loss of {names[0]} {losses[0]:.3f} -> {losses[-1]:.3f}; logs are in {args.out}")
    return 0 if apart == 0 else 1


def main() -> int:
    """Supervise replicas, or train as one of their ranks; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="of each replica")
    parser.add_argument("--min_replicas", type=int, default=2)
    parser.add_argument(
        "--sleep", type=float, default=0.3, help="seconds to add to a step, over its microbatches"
    )
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--name", default="", help="replica of this rank; empty: supervise all")
    args = parser.parse_args()
    if args.name:
        train(args)
        return 0
    args.out = args.out or Path(tempfile.mkdtemp(prefix="replicas_"))
    args.out.mkdir(parents=True, exist_ok=True)
    return supervise(args)


if __name__ == "__main__":
    sys.exit(main())
