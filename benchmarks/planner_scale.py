"""Time of planning for large models on 1,024 ranks, on one core.

    python benchmarks/planner_scale.py              # all three models, some minutes
    python benchmarks/planner_scale.py --only 70B
    python benchmarks/planner_scale.py --quick      # the quick plan of 405B on 16,384 ranks

The shapes of an 8B and a 70B Llama (transformers' own class) and of a mixture of experts with 100B
parameters, 4,096 tokens a rank, bf16 compute, AdamW, on 128 nodes of eight H100. Each model is
simulated 28 times: the four levels on one axis of 1,024 ranks and the ten pairs on 128 x 8, with
activations kept, and with each block's recomputed in backward. Every model has its own process of
one thread. Reported are wall and processor time, without imports, and the peak of resident memory;
processor time depends less on other programs.

Rows are simulated one after the other and share a cache of operations
([Note: Operation cache], ``simulation/operations.py``). ``--afresh`` simulates every ninth row
without the cache, for comparison. Results of models that were not run are kept in the file.

``--quick`` is ``fe.plan(quick=True)`` of the three, and of a 405B Llama on 16,384 ranks with 8,192
tokens each ("The Llama 3 Herd of Models", 2024, table 3: 126 layers, width 16,384, feed-forward
53,248, 128 heads, 8 of keys and values; 128,256 tokens as in the published config). Its times are
those since the process was started: until torch, the engine and the model's library are imported,
until the first row, and until the plan. The package's bytecode is compiled before, as pip does.
"""

from __future__ import annotations

import argparse
import compileall
import functools
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.planner import job
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.simulation.operations import OperationCache
from fsdp_engine.strategies import ALL_STRATEGIES

WORLD_SIZE = 1024
NODES = (128, 8)
TOKENS = 4096
VOCABULARY = 128256
PAIRS = [(each.inner.name, each.outer.name) for each in ALL_STRATEGIES]


@dataclass(frozen=True)
class Row:
    """One simulation."""

    mesh: tuple[int, ...]
    strategy: str
    outer_strategy: str
    recomputes: bool

    def __str__(self) -> str:
        mesh = " x ".join(map(str, self.mesh))
        again = ", recomputed" if self.recomputes else ""
        return f"{self.strategy} / {self.outer_strategy} on {mesh}{again}"


ROWS = [
    Row(mesh, *pair, recomputes)
    for recomputes in (False, True)
    for mesh in ((WORLD_SIZE,), NODES)
    for pair in PAIRS
    if len(mesh) == 2 or pair[1] == PAIRS[0][1]
]


def llama(hidden: int, intermediate: int, layers: int, heads: int) -> nn.Module:
    """A Llama of transformers, which returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Attention(nn.Module):
    """Causal, with eight heads for keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.kv = nn.Linear(hidden, 2 * 8 * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (16, self.size)).transpose(1, 2).chunk(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Experts(nn.Module):
    """Tokens are routed to their two best experts, up to their capacity; products are batched.

    Dispatch is a product with zeros and ones, (tokens, experts, capacity), as in GShard ("GShard:
    Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020, algorithm 1),
    so that shapes do not depend on values.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.up = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        experts = self.router.out_features
        room = math.ceil(1.25 * 2 * tokens.shape[0] / experts)
        gates, chosen = self.router(tokens).softmax(-1).topk(2)
        wanted = F.one_hot(chosen, experts)
        place = wanted.flatten(0, 1).cumsum(0).view_as(wanted) * wanted - 1
        fits = ((place >= 0) & (place < room))[..., None]
        seats = (F.one_hot(place.clamp(0, room - 1), room) * fits).to(x.dtype)
        weights = torch.einsum("nk,nkes->nes", gates, seats)
        rows = torch.einsum("nes,nd->esd", seats.sum(1), tokens)
        done = torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)
        return torch.einsum("nes,esd->nd", weights, done).view_as(x)


class Block(nn.Module):
    """Attention and experts, each after a norm."""

    def __init__(self, hidden: int, intermediate: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(hidden), torch.ones(hidden)])
        self.attention = Attention(hidden, heads)
        self.experts = Experts(hidden, intermediate, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.norms[0]))
        out: Tensor = x + self.experts(F.rms_norm(x, x.shape[-1:], self.norms[1]))
        return out


class MixtureOfExperts(nn.Module):
    """A decoder whose blocks have experts; the loss of the next token."""

    def __init__(self, hidden: int, intermediate: int, layers: int, heads: int, experts: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            Block(hidden, intermediate, heads, experts) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "8B Llama": lambda: llama(4096, 14336, 32, 32),
    "70B Llama": lambda: llama(8192, 28672, 80, 64),
    "405B Llama": lambda: llama(16384, 53248, 126, 128),
    "100B experts": lambda: MixtureOfExperts(4096, 14336, 35, 32, 16),
}


def build(name: str, recomputes: bool) -> nn.Module:
    """Build the model on the meta device, optionally with recomputation of its blocks."""
    with torch.device("meta"):
        model = MODELS[name]()
    if recomputes:
        for blocks in model.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    block.forward = recomputed(block.forward)
    return model


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


class WorkedOut(OperationCache):
    """A cache without entries: torch runs every operation."""

    def run(self, mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, None]:
        return func(*args, **kwargs), None


def simulate_all(name: str, afresh: bool) -> dict[str, Any]:
    """All rows of one model, in this process, by one thread."""
    torch.set_num_threads(1)
    known = WorkedOut() if afresh else OperationCache()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    rows, began, worked = {}, time.perf_counter(), time.process_time()
    for row in ROWS[:: 9 if afresh else 1]:
        start = time.perf_counter()
        result = fe.simulate(
            functools.partial(build, name, row.recomputes),
            WORLD_SIZE,
            batch={"input_ids": tokens, "labels": tokens},
            mesh=row.mesh,
            strategy=row.strategy,
            outer_strategy=row.outer_strategy,
            mp_policy=fe.MixedPrecisionPolicy(torch.bfloat16),
            known=known,
        )
        took = time.perf_counter() - start
        rows[str(row)] = {"took": took, "step": result.seconds, "peak_bytes": result.peak_bytes}
    parameters = sum(each.numel() for each in build(name, False).parameters())
    return {
        "parameters": parameters,
        "rows": rows,
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - worked,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


QUICK_RANKS, QUICK_TOKENS = {"405B Llama": 16384}, {"405B Llama": 8192}


def quick_plan(name: str, started: float) -> dict[str, Any]:
    """A quick plan of one model, in this process, by one thread.

    Args:
        name: Name of the model.
        started: ``time.time()`` at the start of the process.
    """
    torch.set_num_threads(1)
    if "Llama" in name:
        import_module("transformers.models.llama.modeling_llama")

    def spent() -> dict[str, float]:
        return {"seconds": time.time() - started, "processor_seconds": time.process_time()}

    imports = spent()
    rows: list[dict[str, float]] = []
    outcome = job.Job.outcome

    def timed(*args: Any) -> Outcome:
        found = outcome(*args)  # runs three simulations for a deep model
        rows.append(spent())
        return found

    tokens = torch.zeros(1, QUICK_TOKENS.get(name, TOKENS), dtype=torch.long)
    with mock.patch.object(job.Job, "outcome", timed):
        planning = fe.plan(
            functools.partial(build, name, False),
            {"input_ids": tokens, "labels": tokens},
            world_size=QUICK_RANKS.get(name, WORLD_SIZE),
            quick=True,
            mp_policy=fe.MixedPrecisionPolicy(torch.bfloat16),
        )
    return {
        "ranks": planning.setting.world_size,
        "parameters": planning.setting.num_elements,
        "rows": len(planning.outcomes),
        "imports": imports,
        "first": rows[0],
        **spent(),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "best": str(planning.outcomes[0].candidate),
    }


def quick_row(name: str, found: dict[str, Any]) -> list[str]:
    """A row of the table of quick plans."""
    first = found["first"]
    return [
        name,
        f"{found['ranks']:,}",
        str(found["rows"]),
        f"{found['imports']['seconds']:.1f} s",
        f"{first['seconds']:.1f} s",
        f"{first['processor_seconds']:.1f} s",
        f"{found['seconds']:.1f} s",
        f"{found['processor_seconds']:.1f} s",
        f"{found['resident_bytes'] / 2**30:.2f} GiB",
    ]


QUICK_COLUMNS = ["", "ranks", "rows", "imports", "first row", "processor", "plan", "processor"]
QUICK_COLUMNS += ["resident"]


def main() -> None:
    """Run, print a table, write results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a part of a model's name")
    parser.add_argument("--afresh", action="store_true", help="every ninth row, without the cache")
    parser.add_argument("--quick", action="store_true", help="quick plans, also of 405B")
    parser.add_argument("--in-process", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [name for name in MODELS if not args.only or args.only in name]
    if not args.quick:
        names = [name for name in names if name not in QUICK_RANKS]
    if args.in_process is not None:
        if args.quick:
            print(json.dumps(quick_plan(names[0], args.in_process)))
        else:
            print(json.dumps(simulate_all(names[0], args.afresh)))
        return
    compileall.compile_dir(Path(fe.__file__).parent, quiet=1)
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--in-process", str(time.time()), "--only", name]
        command += ["--afresh"] * args.afresh + ["--quick"] * args.quick
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    if args.quick:
        table = [quick_row(name, each) for name, each in found.items()]
        harness.print_table("Quick plans, one thread", QUICK_COLUMNS, table)
        write("planner_quick", found)
        return
    table = []
    for name, each in found.items():
        count = len(each["rows"])
        took = [row["took"] for row in each["rows"].values()]
        table.append(
            [
                name,
                f"{each['parameters'] / 1e9:.1f}",
                str(count),
                f"{each['seconds']:.0f} s",
                f"{each['processor_seconds']:.0f} s",
                f"{each['seconds'] / count:.1f} s",
                f"{max(took):.1f} s",
                f"{each['resident_bytes'] / 2**30:.2f} GiB",
            ]
        )
    columns = ["", "billions", "rows", "wall", "processor", "a row", "longest", "resident"]
    harness.print_table(f"Planning on {WORLD_SIZE:,} ranks, one thread", columns, table)
    write("planner_scale", found, "afresh" if args.afresh else "shared")


def write(name: str, found: dict[str, Any], kind: str | None = None) -> None:
    """Update the results in a file, or those of one ``kind`` if the file has several."""
    path = harness.RESULTS / f"{name}.json"
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    (before if kind is None else before.setdefault(kind, {})).update(found)
    harness.write_results(name, before)


if __name__ == "__main__":
    main()
