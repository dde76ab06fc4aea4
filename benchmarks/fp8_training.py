"""Held-out loss and communication with fp8 gathers: the example's GPT on two gloo ranks.

    python benchmarks/fp8_training.py [--steps 400] [--seeds 3] [--count-only]

Model, text, order of the data and schedule are those of ``examples/train_gpt.py``. Compute is in
bf16; parameters are gathered in bf16, or as fp8 with a scale per tensor, row or block. All four are
trained alternately, step by step on the same batches, from the same weights, for each seed. The
final held-out loss is compared with that of bf16 gathers with the same seed.

Bytes are counted, not computed: those that this rank sends in one step on the group of gathers, by
dtype. Amaxes are all-reduced, which counts as a reduce-scatter and an all-gather. The vectors of a
model are always gathered in bf16, so bytes of fp8 are compared with those of matrices in bf16.
Payloads are compared with the layouts' sizes and ``describe()``'s gathers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from _curves import Curves, compare, shown, train_alternately, verdict
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.codecs import Float8Codec

# The example's files import each other as scripts do.
from settings import Settings
from train_gpt import Job, prepare

NAME = "fp8_training"
NUM_RANKS = 2
BASE = "bf16"
GATHERS = {BASE: "none", "fp8 tensor": "tensor", "fp8 row": "row", "fp8 block": "block"}
MOST_LOSS = 1.02
MOST_BYTES = 0.505
# Bytes are counted for the trained model, and for two blocks of GPT-2's width, since scales are a
# smaller fraction of longer rows.
COUNTED = {
    "width 128, as trained": {},
    "width 768": {"width": 768, "heads": 12, "layers": 2, "batch_size": 2},
}


class Sent(TorchDispatchMode):
    """Context that counts the bytes that this rank sends in one group.

    Attributes:
        parts: bytes of gathers by dtype.
        amaxes: bytes of all-reduces.
        calls: collectives by name.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = group.group_name
        self.parts: Counter[str] = Counter()
        self.amaxes = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = dist.ProcessGroup.unbox(args[1])
            if group.group_name == self._name:
                self._note(func._schema.name.removeprefix("c10d::"), args[0], group.size())
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, tensors: list[torch.Tensor], size: int) -> None:
        self.calls[name] += 1
        for tensor in tensors:
            if name == "send":
                self.parts[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
            elif name == "allreduce_":
                self.amaxes += 2 * tensor.nbytes * (size - 1) // size
            else:
                assert name == "recv_", f"{name} in a step"


def make_job(folder: str, name: str, **settings: Any) -> Job:
    """The example's job with one kind of gathers."""
    out = Path(folder) / name
    return prepare(Settings(dtype="bf16", fp8_gather=GATHERS[name], out=out, **settings), Job)


def train(steps: int, seed: int) -> Curves:
    """(step, held-out loss) of all kinds of gathers."""
    with tempfile.TemporaryDirectory() as folder:
        return train_alternately(
            {name: make_job(folder, name, steps=steps, seed=seed) for name in GATHERS}
        )


def count(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes that this rank sends for the gathers of one step, by kind of gathers."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in GATHERS:
            job = make_job(folder, name, **settings)
            job.train_step(0)
            group = job.engine.mesh.inner.gather_group
            assert group is not None
            with Sent(group) as sent:
                job.train_step(1)
            assert dict(sent.parts) == expected_bytes(job), name
            found[name] = {
                "bytes": dict(sent.parts),
                "amax_bytes": sent.amaxes,
                "gathers": sent.calls["send"],
                "amax_messages": sent.calls["allreduce_"],
            }
            job.checkpointer.close()
    return found


def expected_bytes(job: Job) -> dict[str, int]:
    """Payload of a step's gathers by dtype: this rank's shard to every other rank, for the number
    of gathers in ``describe()``."""
    expected: Counter[str] = Counter()
    for unit, row in zip(job.engine.units, job.engine.describe().rows, strict=True):
        times = row.num_gathers // max(len(unit.buffers), 1)  # the root may have none
        for buffer in unit.buffers:
            is_fp8 = isinstance(buffer.weights.codec, Float8Codec)
            dtype = "uint8" if is_fp8 else "bfloat16"
            part = buffer.layout.numel // NUM_RANKS * getattr(torch, dtype).itemsize
            expected[dtype] += times * part * (NUM_RANKS - 1)
    return dict(expected)


def compare_bytes(counts: dict[str, Any]) -> dict[str, Any]:
    """Bytes of each kind of gathers, over those of bf16."""
    whole = counts[BASE]["bytes"]["bfloat16"]
    record = {}
    for name, found in counts.items():
        vectors = 0 if name == BASE else found["bytes"]["bfloat16"]
        matrices = whole if name == BASE else found["bytes"]["uint8"]
        record[name] = {
            **found,
            "matrices_over_bf16": matrices / (whole - vectors),
            "amaxes_over_bf16": found["amax_bytes"] / (whole - vectors),
            "all_over_bf16": (matrices + vectors + found["amax_bytes"]) / whole,
        }
    return record


def report_bytes(title: str, record: dict[str, Any]) -> None:
    rows = []
    for name, found in record.items():
        ratio = found["matrices_over_bf16"]
        both = ratio + found["amaxes_over_bf16"]
        rows.append(
            [
                name,
                f"{sum(found['bytes'].values()):,}",
                f"{found['amax_bytes']:,}",
                f"{found['gathers']} + {found['amax_messages']}",
                *(f"{value:.4f}" for value in (ratio, both, found["all_over_bf16"])),
                "" if name == BASE else " / ".join(verdict(v, MOST_BYTES) for v in (ratio, both)),
            ]
        )
    columns = ["gathers", "bytes", "bytes of amaxes", "messages", "matrices / bf16"]
    columns += ["with amaxes", "everything", f"at most {MOST_BYTES}"]
    harness.print_table(f"{title}: sent by a rank in one step", columns, rows)


def report_losses(title: str, record: dict[str, Any]) -> None:
    rows = [
        [name, *shown(found), "" if name == BASE else verdict(found["most"], MOST_LOSS)]
        for name, found in record.items()
    ]
    columns = ["gathers", "held-out loss by seed", "x bf16: median (least-most)"]
    harness.print_table(title, [*columns, f"largest at most {MOST_LOSS}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--count-only", action="store_true", help="only count bytes; keep the losses"
    )
    args = parser.parse_args()
    results: dict[str, Any] = {"steps": args.steps}
    written = harness.RESULTS / f"{NAME}.json"
    if args.count_only and written.exists():
        results = json.loads(written.read_text())["results"]
    results["bytes"] = {}
    for title, settings in COUNTED.items():
        record = compare_bytes(harness.run_ranks(count, NUM_RANKS, settings))
        results["bytes"][title] = {"settings": settings, "gathers": record}
        report_bytes(title, record)
    if args.count_only:
        harness.write_results(NAME, results)
        return
    curves = []
    for seed in range(args.seeds):
        curves.append(harness.run_ranks(train, NUM_RANKS, args.steps, seed))
        results["held_out"] = compare(curves, dict.fromkeys(GATHERS, BASE))
        results["curves"] = curves
        report_losses(f"{args.steps} steps, {len(curves)} seeds", results["held_out"])
        # After each seed, which takes minutes.
        harness.write_results(NAME, results)


if __name__ == "__main__":
    main()
