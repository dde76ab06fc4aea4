"""Bits, time and memory of ``fe.FixedOrderSums`` on 1, 2, 3, 4 and 8 gloo ranks.

    python benchmarks/fixed_order_sums.py [--steps 100] [--rounds 6] [--ways "AdamW, bf16" ...]

A GPT with dropout trains on random numbers. A step has 24 microbatches of two sequences (the leaves
of the tree of sums), and gradients are clipped. The first part compares hashes of weights,
optimizer state and norms after ``--steps`` steps; each run resumes half way from a checkpoint of
another number of ranks. In bf16 two levels are compared, in fp32 all. Results of ways that are not
in ``--ways`` stay in the file. The second part times a step on two ranks beside one of the plain
engine with the same microbatches, and finds the peak memory of engine and gradients together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from memory import StorageTracker
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import dropout

import fsdp_engine as fe
from gpt import GPT, GPTConfig

LEAVES = 24
RANKS = (1, 2, 3, 4, 8)
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Sizes of the axes, and levels, by number of ranks.
PAIRS = {
    4: [((2, 2), "optim_grads_params", "no_shard"), ((2, 2), "optim_grads_params", "optim")],
    8: [((2, 4), "optim_grads_params", "no_shard"), ((4, 2), "optim", "optim")],
}
CONFIG = GPTConfig(vocab_size=128, sequence_length=32, num_layers=2, num_heads=2, width=32)
TIMED = GPTConfig()  # that of `make train`
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def muon(model: GPT) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    return fe.shard_optimizer(torch.optim.Muon(matrices, lr=0.02))


WAYS: dict[str, tuple[fe.MixedPrecisionPolicy | None, Callable[[GPT], torch.optim.Optimizer]]] = {
    "AdamW, fp32": (None, adamw),
    "AdamW, bf16": (BF16, adamw),
    "Muon, bf16": (BF16, muon),
}


def batch_of(step: int, leaf: int, config: GPTConfig = CONFIG) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    # Not uniform, so that there is something to learn.
    numbers = torch.rand(2, config.sequence_length + 1, generator=generator)
    return (numbers.square() * config.vocab_size).long()


def make_model(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    model.token_embedding.register_forward_hook(lambda _, __, output: dropout(output, 0.1))
    return model


def digest(values: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for key in sorted(values):
        found.update(values[key].detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def train(
    way: str, levels: tuple[str, str], shape: tuple[int, ...] | None, steps: range, folder: str
) -> dict[str, str]:
    """Run some of the steps. The first half is saved in ``folder``, the second half loads it."""
    policy, make_optimizer = WAYS[way]
    model, sums = make_model(CONFIG), fe.FixedOrderSums(leaves=LEAVES)
    names = ("outer", "inner")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    engine = fe.shard(model, mesh, *levels, mp_policy=policy, extensions=[sums])
    optimizer = make_optimizer(model)
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    if steps.start:
        checkpointer.load(steps.start)
    norms = []
    for step in steps:
        for leaf in sums.microbatches(engine, step):
            tokens = batch_of(step, leaf)
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        norms.append(engine.clip_grad_norm_(1.0).clone())
        optimizer.step()
        model.zero_grad()
    if not steps.start:
        checkpointer.save(steps.stop)
    state = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    found = {"weights": digest(engine.full_state_dict()), "norms": digest({"": torch.stack(norms)})}
    # Muon's state of a matrix is on its owner only. Weights depend on it after a resume, so the
    # comparison of weights includes it.
    return found if "Muon" in way else {**found, "state": digest(state)}


def compare(steps: int, ways: Sequence[str]) -> list[dict[str, Any]]:
    """Hashes of every number of ranks, level and pair, resumed half way on other ranks."""
    rows = []
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            for ranks in RANKS:
                first = (
                    way,
                    (LEVELS[-1], "no_shard"),
                    None,
                    range(steps // 2),
                    f"{folder}/{ranks}",
                )
                harness.run_ranks(train, ranks, *first)
            for number, ranks in enumerate(RANKS):
                before = RANKS[number - 1]
                levels_of_way = LEVELS if "fp32" in way else (LEVELS[0], LEVELS[-1])
                places: list[Any] = [((level, "no_shard"), None) for level in levels_of_way]
                places += [(levels, shape) for shape, *levels in PAIRS.get(ranks, [])]
                for levels, shape in places:
                    half = range(steps // 2, steps)
                    found = harness.run_ranks(
                        train, ranks, way, levels, shape, half, f"{folder}/{before}"
                    )
                    mesh = "x".join(map(str, shape or (ranks,)))
                    row = {"way": way, "ranks": mesh, "before": before, "levels": list(levels)}
                    rows.append({**row, **found})
                    print(*rows[-1].values(), flush=True)
    return rows


def make_step(level: str, *, is_fixed: bool) -> Callable[[], None]:
    model, sums = make_model(TIMED), fe.FixedOrderSums(leaves=LEAVES)
    engine = fe.shard(model, strategy=level, extensions=[sums] if is_fixed else [])
    optimizer = adamw(model)
    num = LEAVES // 2

    def backward(leaf: int) -> None:
        tokens = batch_of(0, leaf, TIMED)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        (loss if is_fixed else loss / num).backward()

    def step() -> None:
        if is_fixed:
            for leaf in sums.microbatches(engine, 0):
                backward(leaf)
        else:
            with engine.no_sync():
                for leaf in range(num - 1):
                    backward(leaf)
            backward(num - 1)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for level in LEVELS:
        ways = {name: make_step(level, is_fixed=name == "fixed") for name in ("plain", "fixed")}
        times = harness.interleave(ways, rounds)
        peaks = {}
        for name in ways:
            tracker = StorageTracker()
            with tracker.on():
                step = make_step(level, is_fixed=name == "fixed")
                step()
                step()
            peaks[f"{name} peak bytes"] = tracker.replay(0)["peak"]
        found[level] = {
            **peaks,
            "plain ms": 1e3 * harness.spread(times["plain"])["median"],
            "fixed ms": 1e3 * harness.spread(times["fixed"])["median"],
            "ratio": harness.ratios(times, "fixed", "plain"),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    known = harness.RESULTS / "fixed_order_sums.json"
    kept = json.loads(known.read_text())["results"]["bits"] if known.exists() else []
    bits = [each for each in kept if each["way"] not in args.ways]
    bits += compare(args.steps, args.ways)
    different = [
        each
        for each in bits
        if any(each[key] != bits_of_first(bits, each)[key] for key in ("weights", "norms"))
        or each.get("state") != bits_of_first(bits, each).get("state")
    ]
    print(
        f"{len(bits)} runs, {len(different)} of them with other bits than the first of their kind"
    )
    times = harness.run_ranks(measure, 2, args.rounds)
    rows = [
        [
            level,
            harness.show_ratio(each["ratio"]),
            *(f"{each[f'{name} peak bytes'] / 1e6:.1f}" for name in ("plain", "fixed")),
        ]
        for level, each in times.items()
    ]
    columns = ["level", "time over plain", "plain MB", "MB"]
    harness.print_table("A step of 24 leaves on two ranks", columns, rows)
    harness.write_results("fixed_order_sums", {"steps": args.steps, "times": times, "bits": bits})


def bits_of_first(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in rows if each["way"] == row["way"])


if __name__ == "__main__":
    main()
