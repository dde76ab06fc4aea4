"""Step time with FSDP2's interface, and with tensor parallelism.

    python benchmarks/composition.py [--only face tensor] [--rounds 15]

``face``: two gloo ranks of one thread, the GPT of 10M parameters in fp32: ``fe.shard`` with a unit
for each block and the root, ``fsdp_engine.fsdp2.fully_shard`` on the same modules, and FSDP2 with
the same script. Units and levels are the same; only the interfaces differ.

``tensor``: four gloo ranks, tensor x data parallel on 2 x 2, feed-forward blocks of width 512 that
torch's ``parallelize_module`` has sharded by columns and rows: ``fe.shard`` at all four levels, and
FSDP2. Parameters over different meshes are in separate param groups, because torch's fused AdamW
does not accept DTensors and plain tensors in one group.

All engines run in one process per rank, one step of each in every round, in a random order; ratios
are computed per round. A step is forward, backward, AdamW (fused) and zero_grad.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine import fsdp2
from fsdp_engine.strategies import LEVELS
from gpt import GPT, GPTConfig

Steps = dict[str, Callable[[], None]]
CONFIG, SEQUENCES = GPTConfig(sequence_length=128, num_layers=6, width=384, num_heads=6), 4
WIDTH, NUM_BLOCKS, ROWS = 512, 6, 256
TARGETS = {
    "face": [("fsdp2.fully_shard", "fe.shard", 1.02)],
    "tensor": [("optim_grads_params", "FSDP2", 1.00)],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class FeedForward(nn.Module):
    def __init__(self, tensor: DeviceMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        for block in self.blocks:
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step_of(model: nn.Module, loss: Callable[[], Tensor], *, is_ours: bool) -> Callable[[], None]:
    """One training step of ``model`` as a function."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        groups.setdefault(mesh, []).append(param)
    in_groups = [{"params": params} for params in groups.values()]
    optimizer = torch.optim.AdamW(in_groups, lr=1e-4, fused=True)
    if is_ours:
        fe.shard_optimizer(optimizer)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_face() -> Steps:
    """The GPT under each interface, with the same weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (SEQUENCES, CONFIG.sequence_length)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    targets = tokens.roll(-1, 1)

    def by_shard(model: GPT) -> None:
        fe.shard(model, units="blocks.*")

    def by_calls(fully: Any) -> Callable[[GPT], None]:
        def shard(model: GPT) -> None:
            for module in (*model.blocks, model):
                fully(module)

        return shard

    ways = {
        "fe.shard": by_shard,
        "fsdp2.fully_shard": by_calls(fsdp2.fully_shard),
        "FSDP2": by_calls(fully_shard),
    }
    steps: Steps = {}
    for name, shard in ways.items():
        torch.manual_seed(0)
        model = GPT(CONFIG)
        shard(model)

        def loss(model: Any = model) -> Tensor:
            value: Tensor = model(tokens, targets).loss
            return value

        steps[name] = step_of(model, loss, is_ours=name != "FSDP2")
    return steps


def make_tensor() -> Steps:
    """Feed-forward blocks under tensor parallelism and each engine, with the same weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    x = torch.randn(ROWS, WIDTH, generator=generator)
    steps: Steps = {}
    for name in ("FSDP2", *LEVELS):
        torch.manual_seed(0)
        model = FeedForward(mesh["tp"])
        if name == "FSDP2":
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh["dp"])
        else:
            fe.shard(model, mesh["dp"], name, units="blocks.*")

        def loss(model: nn.Module = model) -> Tensor:
            value: Tensor = model(x)
            return value

        steps[name] = step_of(model, loss, is_ours=name != "FSDP2")
    return steps


def measure(what: str, rounds: int) -> dict[str, list[float]]:
    """Times of all engines on this rank."""
    return harness.interleave(make_face() if what == "face" else make_tensor(), rounds)


def report(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print the table of one comparison. Returns its results."""
    rows: list[list[str]] = []
    record: dict[str, Any] = {}
    for name in times:
        low, middle, high = harness.quartiles(times[name])
        against = harness.ratios(times, name, "FSDP2")
        record[name] = {"seconds": {"median": middle, "q1": low, "q3": high}, "over FSDP2": against}
        rows.append([name, f"{middle * 1e3:.1f}", harness.show_ratio(against)])
    harness.print_table(f"{what}: ms per step", ["engine", "ms", "x FSDP2"], rows)
    checks = []
    for name, base, limit in TARGETS[what]:
        ratio = harness.ratios(times, name, base)
        record[f"{name} / {base}"] = {"ratio": ratio, "at most": limit}
        verdict = "met" if ratio["median"] <= limit else "missed"
        checks.append([f"{name} / {base}", harness.show_ratio(ratio), f"{limit:.2f}", verdict])
    harness.print_table(f"{what}: targets", ["ratio", "found", "at most", ""], checks)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    results = {}
    for what in options.only:
        world_size = 2 if what == "face" else 4
        times = harness.run_ranks(measure, world_size, what, options.rounds)
        results[what] = report(what, times)
        harness.write_results("composition", results)


if __name__ == "__main__":
    main()
