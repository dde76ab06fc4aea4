"""Host time of an AdamW step over 300 sharded parameters, with and without ``shard_optimizer``.

    python benchmarks/optimizer_step.py [--rounds 30] [--parameters 300]

One process of a fake process group of two ranks; every engine steps on the same number of local
elements: half of a 64 x 64 or a 512 x 512 parameter. Plain tensors are the baseline. Processor time
of this process is measured instead of wall time, to reduce the influence of other programs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.optim import shard_optimizer

LIMIT = 1.2
BASE = "plain tensors"
OURS = "FlatDTensor, shard_optimizer"
FORMS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def make_flat(size: int, mesh: DeviceMesh) -> Tensor:
    """The second half of a (size, size) tensor."""
    numel = size * size
    placement = FlatPlacement.on_mesh((size, size), numel // 2, numel, mesh, 1)
    return FlatDTensor.from_flat_local(torch.randn(numel - numel // 2), placement)


def make_distributed(size: int, mesh: DeviceMesh) -> Tensor:
    """Half of the rows, as in FSDP2."""
    return DTensor.from_local(torch.randn(size // 2, size), mesh, [Shard(0)])


def make_plain(size: int, mesh: DeviceMesh) -> Tensor:
    """A plain tensor with the same number of elements."""
    return torch.randn(size * size // 2)


def make_step(
    make: Callable[[int, DeviceMesh], Tensor],
    num_parameters: int,
    size: int,
    mesh: DeviceMesh,
    options: dict[str, Any],
    sharded: bool = False,
) -> Callable[[], object]:
    """The step of a new AdamW."""
    params = [nn.Parameter(make(size, mesh)) for _ in range(num_parameters)]
    for param in params:
        param.grad = make(size, mesh)
    optimizer = torch.optim.AdamW(params, **options)
    return (shard_optimizer(optimizer) if sharded else optimizer).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parameters", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    rows, record = [], {}
    # A step over the large parameters takes twenty times as long, and varies less.
    for size, rounds in ((64, args.rounds), (512, max(args.rounds // 3, 1))):
        for form, options in FORMS.items():
            made = (args.parameters, size, mesh, options)
            steps: dict[str, Any] = {
                BASE: make_step(make_plain, *made),
                OURS: make_step(make_flat, *made, sharded=True),
                "FlatDTensor": make_step(make_flat, *made),
                "DTensor (FSDP2)": make_step(make_distributed, *made),
            }
            times = harness.interleave(steps, rounds, clock=time.process_time)
            for name in steps:
                low, middle, high = (seconds * 1e3 for seconds in harness.quartiles(times[name]))
                ratio = harness.ratios(times, name, BASE)
                milliseconds = {"median": middle, "q1": low, "q3": high}
                record[f"{size}x{size} {form}, {name}"] = {"ms": milliseconds, "ratio": ratio}
                took = f"{middle:.2f} ({low:.2f}-{high:.2f})"
                rows.append([f"{size} x {size}", form, name, took, harness.show_ratio(ratio)])
    harness.print_table(
        f"AdamW step over {args.parameters} parameters sharded over two ranks, processor time",
        ["parameter", "form", "tensors", "ms", f"x {BASE}"],
        rows,
    )
    found = max(entry["ratio"]["median"] for name, entry in record.items() if name.endswith(OURS))
    print(
        f"shard_optimizer over plain tensors: {found:.3f} at worst, at most {LIMIT}: "
        f"{'met' if found <= LIMIT else 'missed'}"
    )
    harness.write_results("optimizer_step", record)


if __name__ == "__main__":
    main()
