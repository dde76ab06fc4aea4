"""Step time and memory of two versions of the engine: an older checkout and this one.

    git worktree add ../older COMMIT
    python benchmarks/two_versions.py ../older [--rounds 2]

Every run is a program of two gloo ranks with one thread each. In a round both versions run one
after the other in each configuration, so that other load on the machine affects both. A step is
forward, backward, AdamW (fused) and zero_grad of a transformer. A run reports the median of its
steps, the engine's ``peak_memory_bytes()``, and the largest resident set of rank 0.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fsdp_engine as fe

HERE = Path(__file__).parents[1]
# name: width, blocks, tokens of a sequence, steps
SIZES = {"10M": (384, 6, 128, 12), "85M": (1024, 7, 64, 4)}
CONFIGURATIONS = [
    ("optim_grads_params", "fp32", "10M"),
    ("optim_grads_params", "bf16", "10M"),
    ("optim", "fp32", "10M"),
    ("optim", "bf16", "10M"),
    ("no_shard", "fp32", "10M"),
    ("optim_grads_params", "fp32", "85M"),
    ("optim_grads_params", "bf16", "85M"),
]
WARMUP, BATCH, VOCABULARY = 3, 4, 256


class Block(nn.Module):
    """Attention and MLP. (batch, sequence, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).view(*x.shape[:2], 8, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return result


class Model(nn.Module):
    """Tokens (batch, sequence) to logits."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run(level: str, dtype: str, size: str) -> None:
    """Train on this rank; rank 0 prints milliseconds of a step, bytes, and MiB of memory."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width, num_blocks, length, num_steps = SIZES[size]
    model = Model(width, num_blocks)
    policy = None
    if dtype == "bf16":
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    engine = fe.shard(model, strategy=level, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if level != "no_shard":
        fe.shard_optimizer(optimizer)
    tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1))
    times = []
    for step in range(WARMUP + num_steps):
        dist.barrier()
        begin = time.perf_counter()
        logits = model(tokens[:, :-1]).float().flatten(0, 1)
        functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARMUP:
            times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        total = engine.peak_memory_bytes()["total"]
        print("RESULT", 1e3 * statistics.median(times), total, resident, flush=True)
    dist.destroy_process_group()


def measure(version: Path, configuration: tuple[str, str, str]) -> dict[str, float]:
    """Run a configuration with the engine of a checkout."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, __file__, "--worker", *configuration],
        env=os.environ | {"PYTHONPATH": str(version), "OMP_NUM_THREADS": "1"},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    line = next(each for each in done.stdout.splitlines() if each.startswith("RESULT"))
    milliseconds, total, resident = map(float, line.split()[1:])
    return {"ms": milliseconds, "bytes": total, "resident_mib": resident}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("older", type=Path, nargs="?", help="a checkout of an older commit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run(*args.worker)
        return
    if args.older is None:
        parser.error("expected a checkout of an older commit; found none")
    import harness

    versions = {"before": args.older.resolve(), "after": HERE}
    found: list[dict[str, object]] = []
    for configuration in CONFIGURATIONS * args.rounds:
        for name, version in versions.items():
            figures = measure(version, configuration)
            found.append({"version": name, "configuration": " ".join(configuration), **figures})
            print(*found[-1].values(), flush=True)
    harness.write_results("two_versions", found)


if __name__ == "__main__":
    main()
