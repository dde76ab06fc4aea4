"""Step time of all four levels against torch DDP and FSDP2, on two gloo ranks of one thread each.

    python benchmarks/step_time.py [--sizes 10M 85M] [--dtypes fp32 bf16] [--rounds 12]
        [--without "FSDP2 pairwise" ...]

All engines run in one process per rank, one step of each in every round, in a random order; ratios
are computed per round. A step is forward, backward, AdamW (fused) and zero_grad.

"pairwise" is FSDP2 with this engine's collectives, through FSDP2's hooks for custom collectives, to
compare the engines without their collectives. In bf16 every engine computes in bf16 with fp32 main
weights: DDP by autocast, the others by their policies with gradients reduced in bf16. "wrapper" is
DistributedDataParallel, in Megatron-Core's loop: 40M-element buckets, overlap of reductions and
gathers, ``finish_grad_sync``, ``zero_grad_buffer``. "no communication" is one rank's model without
an engine, and "level 3's bytes alone" the gathers and reductions of optim_grads_params without a
model. If ranks use all cores, as on this machine, communication takes processor time from the
model, and the sum of the two is a lower bound for level 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_engine as fe
from fsdp_engine.comm.collectives import Communicator, Steps
from gpt import GPT, GPTConfig

SIZES = {
    # name: config, sequences per rank
    "10M": (GPTConfig(sequence_length=128, num_layers=6, width=384, num_heads=6), 4),
    "85M": (GPTConfig(sequence_length=128, num_layers=12, width=768, num_heads=12), 4),
}
BARE, BYTES = "no communication", "level 3's bytes alone"
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WRAPPERS: dict[str, dict[str, Any]] = {
    "wrapper no_shard": {},
    "wrapper optim": {"use_distributed_optimizer": True},
}
OPTIONAL = ("FSDP2", "FSDP2 no reshard", "FSDP2 pairwise", *LEVELS, *WRAPPERS)
TARGETS = (
    # name, baseline, target in fp32, in bf16
    ("optim_grads_params", "FSDP2", 0.70, 0.60),
    ("optim_grads_params", "DDP", 1.03, 1.03),
    ("optim_grads_params", "FSDP2 pairwise", 0.92, 0.92),
    ("no_shard", "DDP", 1.00, 1.00),
    ("optim", "DDP", 1.00, 1.00),
    ("wrapper no_shard", "DDP", 1.00, 1.00),
)


class PairwiseGather:
    """FSDP2's all-gather by this engine's pairwise exchange."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._comm = Communicator(group, torch.device("cpu"))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> None:
        run_steps(self._comm.all_gather(output_tensor, input_tensor))


class PairwiseScatter(PairwiseGather):
    """FSDP2's reduce-scatter by this engine's pairwise exchange."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        average = op == dist.ReduceOp.AVG
        flat_input, flat_output = input_tensor.view(-1), output_tensor.view(-1)
        run_steps(self._comm.reduce_scatter(flat_input, flat_output, average=average))


def make_step(model: nn.Module, parameters: Any, batch: Any, autocast: bool) -> Callable[[], None]:
    """One training step of ``model`` as a function."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if isinstance(parameters, _Sharded):
        fe.shard_optimizer(optimizer)
    tokens, targets = batch

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_wrapped_step(model: GPT, low: torch.dtype | None, batch: Any, **fields: Any) -> Any:
    """A step of the wrapper, as in Megatron-Core's loop."""
    config = fe.DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=40_000_000, **fields
    )
    policy = fe.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
    ddp = fe.DistributedDataParallel(model, config, mp_policy=policy)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    fe.shard_optimizer(optimizer)
    tokens, targets = batch

    def step() -> None:
        ddp.zero_grad_buffer(zero_buffer=False)
        ddp(tokens, targets).loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()

    return step


class _Sharded(list):  # type: ignore[type-arg]
    """Parameters that this engine shards; their optimizer is passed to shard_optimizer."""


def make_bytes(model: GPT, dtype: torch.dtype) -> Callable[[], None]:
    """The pairwise communication of optim_grads_params in a step, one exchange at a time."""
    group = dist.group.WORLD
    assert group is not None
    comm = Communicator(group, torch.device("cpu"))
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    root = sum(p.numel() for p in model.parameters()) - sum(sizes)
    # The root and the last block are not resharded between forward and backward.
    gathers, reductions = [root, *sizes, *sizes[:-1]], [*sizes, root]
    full = torch.zeros(max(root, *sizes), dtype=dtype)
    part = torch.zeros_like(full)

    def step() -> None:
        for numel in gathers:
            numel -= numel % 2
            run_steps(comm.all_gather(full[:numel], part[: numel // 2]))
        for numel in reductions:
            numel -= numel % 2
            run_steps(comm.reduce_scatter(full[:numel], part[: numel // 2]))

    return step


def run_steps(steps: Steps) -> None:
    """Run a collective to its end."""
    for works in steps:
        for work in works:
            work.wait()


def make_engines(size: str, dtype: str, without: list[str]) -> dict[str, Callable[[], None]]:
    """A step function for each engine except ``without``, all with the same initial weights."""
    config, num_sequences = SIZES[size]
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    batch = (tokens, tokens.roll(-1, 1))
    low = torch.bfloat16 if dtype == "bf16" else None

    def fresh() -> GPT:
        torch.manual_seed(0)
        return GPT(config)

    steps: dict[str, Callable[[], None]] = {}
    bare = fresh()
    steps[BARE] = make_step(bare, bare.parameters(), batch, low is not None)
    steps[BYTES] = make_bytes(bare, low or torch.float32)
    ddp = DistributedDataParallel(fresh(), gradient_as_bucket_view=True)
    steps["DDP"] = make_step(ddp, ddp.parameters(), batch, low is not None)

    for name, reshard, pairwise in (
        ("FSDP2", True, False),
        ("FSDP2 no reshard", False, False),
        ("FSDP2 pairwise", True, True),
    ):
        if name in without:
            continue
        model = fresh()
        policy = FSDP2Policy(param_dtype=low)
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=reshard, mp_policy=policy)
        if pairwise:
            group = dist.group.WORLD
            assert group is not None
            for module in (*model.blocks, model):
                module.set_custom_all_gather(PairwiseGather(group))
                module.set_custom_reduce_scatter(PairwiseScatter(group))
        steps[name] = make_step(model, model.parameters(), batch, False)

    for level in LEVELS:
        if level in without:
            continue
        model = fresh()
        dtypes = fe.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        fe.shard(model, strategy=level, mp_policy=dtypes)
        steps[level] = make_step(model, _Sharded(model.parameters()), batch, False)
    for name, fields in WRAPPERS.items():
        if name not in without:
            steps[name] = make_wrapped_step(fresh(), low, batch, **fields)
    return steps


def measure(size: str, dtype: str, rounds: int, without: list[str]) -> dict[str, Any]:
    """Times of all engines on this rank."""
    return harness.interleave(make_engines(size, dtype, without), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=12)
    # Each engine has its own model, and the machine may not have memory for all of them.
    parser.add_argument("--without", nargs="+", choices=OPTIONAL, default=[], metavar="ENGINE")
    args = parser.parse_args()
    for size in args.sizes:
        results = {}
        for dtype in args.dtypes:
            times = harness.run_ranks(measure, 2, size, dtype, args.rounds, args.without)
            results[f"{size} {dtype}"] = report(f"{size} {dtype}", times)
            # After each model, since large ones take long.
            harness.write_results(f"step_time_{size}", results)


def report(title: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print the tables of one model. Returns its results."""
    bases = [base for base in ("DDP", "FSDP2", "FSDP2 pairwise") if base in times]
    rows: list[list[str]] = []
    record: dict[str, Any] = {}
    for name in times:
        low, middle, high = harness.quartiles(times[name])
        against = {base: harness.ratios(times, name, base) for base in bases}
        record[name] = {"seconds": {"median": middle, "q1": low, "q3": high}, "over": against}
        cells = [harness.show_ratio(against[base]) for base in bases]
        rows.append([name, f"{middle * 1e3:.1f}", *cells])
    harness.print_table(
        f"{title}: ms per step, and ratios (median, quartiles)",
        ["engine", "ms", *(f"x {base}" for base in bases)],
        rows,
    )
    floors: dict[str, float] = {
        base: harness.quartiles(
            [(a + b) / c for a, b, c in zip(times[BARE], times[BYTES], times[base], strict=True)]
        )[1]
        for base in bases
    }
    record["floor of level 3"] = floors
    checks = []
    for name, base, *limits in TARGETS:
        limit = limits[title.endswith("bf16")]
        if name not in times or base not in times:
            continue
        ratio = record[name]["over"][base]["median"]
        floor = f"{floors[base]:.3f}" if name == "optim_grads_params" else ""
        verdict = "met" if ratio <= limit else "missed"
        checks.append([f"{name} / {base}", f"{ratio:.3f}", f"{limit:.2f}", verdict, floor])
    columns = ["ratio", "found", "at most", "", "lower bound"]
    harness.print_table(f"{title}: targets", columns, checks)
    return record


if __name__ == "__main__":
    main()
