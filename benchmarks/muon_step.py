"""Steps of Muon in which owners step matrices, and steps in which every rank steps all of them.

    python benchmarks/muon_step.py [--rounds 7] [--ranks 2] [--sections step shares]

*step*: ``torch.optim.Muon`` on the matrices of transformer blocks of two widths, in fp32, on gloo.
The ways take turns:

- *no_shard, as it is*: plain parameters; every rank steps all matrices.
- *FSDP2*: torch's ``fully_shard``, whose DTensors are gathered by each product of the step.
- *owners*: ``fe.shard_optimizer`` at levels 3 and 0, and at level 3 with whole matrices as granules
  (a matrix is on one rank, which sends it to another owner only to balance the work).

Bytes are those that all ranks together send in a step. The bound of a step with sharded parameters
is a gather and a scatter of the matrices: each byte of a gradient is sent to the owner, and each
byte of a weight back, except those that are already on the right rank.

*shares*: for models of 8B and of 101B parameters with experts, the largest work of a rank, relative
to the mean and to the least that whole matrices allow (:func:`~.ownership.least_share`). Beside
them the time of a step on H100s by formula: products of Newton-Schulz iterations at ``UTILISATION``
of the peak of bf16, messages at the bandwidth between nodes, in chunks that overlap.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from fsdp_engine.comm.collectives import Communicator
from fsdp_engine.extensions.whole_tensor_optimizers.ownership import (
    Item,
    assign_owners,
    least_share,
    shares_of,
    step_work,
)

SIZES = ((4, 512), (2, 1024))  # blocks, and how wide they are
LIMIT = 0.55
AS_IT_IS, FSDP2 = "no_shard, as it is", "FSDP2"
OWNERS, REPLICATED, UNCUT = "owners, level 3", "owners, no_shard", "owners, level 3, whole matrices"
NUM_ITERATIONS = 5
UTILISATION = 0.5
H100_FLOPS, H100_BETWEEN = 989e12, 50e9
NUM_CHUNKS = 8


class Block(nn.Module):
    """The matrices of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.q(x) + self.k(x) + self.v(x))
        out: torch.Tensor = x + self.down(self.up(x))
        return out


def make_model(num_blocks: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def backward(model: nn.Module, width: int) -> None:
    """Give all parameters gradients."""
    torch.manual_seed(dist.get_rank())
    model(torch.randn(64, width)).square().mean().backward()


def step_times(rounds: int, num_blocks: int, width: int) -> dict[str, Any]:
    """Seconds until all ranks have stepped, and bytes that they send."""
    steps: dict[str, Callable[[], None]] = {}
    models: list[nn.Module] = []
    shares = {}
    for name in (AS_IT_IS, OWNERS, REPLICATED, UNCUT, FSDP2):
        model = make_model(num_blocks, width)
        models.append(model)
        engine = None
        if name == FSDP2:
            for block in model:
                fully_shard(block)
            fully_shard(model)
        else:
            level = "optim_grads_params" if name in (OWNERS, UNCUT) else "no_shard"
            granule = fe.whole_tensors if name == UNCUT else None
            engine = fe.shard(
                model, strategy=level, units=[Block], options=fe.Options(granule=granule)
            )
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
        if name in (OWNERS, REPLICATED, UNCUT):
            fe.shard_optimizer(optimizer)
            assert engine is not None
            shares[name] = str(engine.describe()).splitlines()[-1]
        backward(model, width)

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            dist.barrier()

        step()  # makes the state
        steps[name] = step
    sent = {name: bytes_sent(step) for name, step in steps.items() if name not in (AS_IT_IS, FSDP2)}
    times = harness.interleave(steps, rounds, warmup=1)
    numel = sum(p.numel() for p in models[0].parameters())
    return {
        "elements": numel,
        "load before": os.getloadavg()[0],
        "seconds": {name: harness.spread(times[name]) for name in steps},
        f"of {AS_IT_IS}": {name: harness.ratios(times, name, AS_IT_IS) for name in steps},
        "bytes": sent,
        "bytes of a gather and a scatter": 2 * 4 * numel * (1 - 1 / dist.get_world_size()),
        "shares": shares,
    }


def bytes_sent(step: Callable[[], None]) -> int:
    """Bytes that all ranks together send in a step."""
    sizes: list[int] = []
    exchange = Communicator.exchange

    def counted(self: Any, received: Any, sent: Any, from_: Any, to: Any, tag: int = 0) -> Any:
        sizes.append(sum(to))
        return exchange(self, received, sent, from_, to, tag)

    with mock.patch.object(Communicator, "exchange", counted):
        step()
    total = torch.tensor(sum(sizes))
    dist.all_reduce(total)
    return int(total)


def llama(layers: int, hidden: int, kv: int, wide: int) -> list[tuple[int, int]]:
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*attention, (wide, hidden), (wide, hidden), (hidden, wide)] * layers


def experts(layers: int, hidden: int, wide: int, num: int) -> list[tuple[int, int]]:
    attention = [(hidden, hidden), (1024, hidden), (1024, hidden), (hidden, hidden)]
    return [*attention, *[(wide, hidden), (wide, hidden), (hidden, wide)] * num] * layers


MODELS = {"8B": llama(32, 4096, 1024, 14336), "101B, experts": experts(35, 4096, 14336, 16)}


def shares() -> dict[str, Any]:
    """Shares and times by formula."""
    found: dict[str, Any] = {}
    for model, shapes in MODELS.items():
        work_of = [step_work(shape, multiplies=True) for shape in shapes]
        items = [Item(w, shape[0] * shape[1]) for w, shape in zip(work_of, shapes, strict=True)]
        for num_ranks in (8, 64, 256, 1024):
            owned = shares_of(items, assign_owners(items, num_ranks), num_ranks)
            work, numel = (max(each) for each in zip(*(s[:2] for s in owned), strict=True))
            mean = sum(work_of) / num_ranks
            bound = least_share(work_of, num_ranks)
            # An iteration: a Gram matrix, its square, and their product with the matrix.
            step = NUM_ITERATIONS * 3 * 2 * work / (UTILISATION * H100_FLOPS)
            total = NUM_ITERATIONS * 3 * 2 * mean * num_ranks / (UTILISATION * H100_FLOPS)
            elements = sum(item.numel for item in items) / num_ranks
            message = 4 * elements / H100_BETWEEN
            longest = max(step, message)
            found[f"{model}, {num_ranks} ranks"] = {
                "matrices": len(items),
                "of the mean": work / mean,
                "of the bound": work / bound,
                "elements of the mean": numel * num_ranks / sum(item.numel for item in items),
                "every rank does all, ms": 1e3 * total,
                "owners compute, ms": 1e3 * step,
                "a message, ms": 1e3 * message,
                "step, ms": 1e3 * (longest + (step + 2 * message - longest) / NUM_CHUNKS),
            }
    return found


def show(results: dict[str, Any]) -> None:
    for size, step in results.get("step", {}).items():
        rows = [
            [
                name,
                harness.show_ratio(seconds),
                harness.show_ratio(step[f"of {AS_IT_IS}"][name]),
                f"{step['bytes'][name] / 1e6:.1f}" if name in step["bytes"] else "",
            ]
            for name, seconds in step["seconds"].items()
        ]
        title = (
            f"{size}: {step['elements'] / 1e6:.1f}M elements; load before: "
            f"{step['load before']:.1f}; a gather and a scatter: "
            f"{step['bytes of a gather and a scatter'] / 1e6:.1f} MB"
        )
        harness.print_table(title, ["", "seconds", f"of {AS_IT_IS}", "MB sent"], rows)
    if found := results.get("shares"):
        columns = list(next(iter(found.values())))
        rows = [[name, *(f"{each[c]:.2f}" for c in columns)] for name, each in found.items()]
        harness.print_table("by formula", ["", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sections", nargs="+", default=["step", "shares"])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if "step" in options.sections:
        results["step"] = {
            f"{num_blocks} blocks, {width} wide": harness.run_ranks(
                step_times, options.ranks, options.rounds, num_blocks, width
            )
            for num_blocks, width in SIZES
        }
    if "shares" in options.sections:
        results["shares"] = shares()
    show(results)
    if {"step", "shares"} <= set(options.sections):
        harness.write_results("muon_step", results)


if __name__ == "__main__":
    main()
