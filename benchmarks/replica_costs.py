"""Step time of replicas that may be lost, against an outer axis, DDP and torchft with DDP.

    python benchmarks/replica_costs.py [--size 10M] [--rounds 12] [--microbatches 2 3]

Two replicas of one rank each, one thread each. A step is forward and backward of each replica's
microbatches, the sum over replicas, fused AdamW and zero_grad, of the GPT of ``step_time.py``.
"outer axis" is one engine over both ranks on an outer axis. "torchft DDP" is torchft's
DistributedDataParallel and Optimizer. Both DDPs accumulate under ``no_sync``. Every way under
torchft has a lighthouse of its own and a quorum in each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
import torchft
from step_time import SIZES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel as TorchftDDP

import fsdp_engine as fe
from fsdp_engine.integrations.torchft import ElasticReplicas
from gpt import GPT

ELASTIC, FIXED, OUTER, TORCHFT, DDP = (
    "ElasticReplicas",
    "ElasticReplicas, fixed_sum_order",
    "outer axis",
    "torchft DDP",
    "DDP",
)
TIMEOUT = 60.0


def measure(size: str, num_own: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps with ``num_own`` microbatches on each replica."""
    rank = dist.get_rank()
    config, num_sequences = SIZES[size]
    generator = torch.Generator().manual_seed(rank)
    shape = (num_own, num_sequences, config.sequence_length)
    batches = list(torch.randint(0, config.vocab_size, shape, generator=generator))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    lighthouses = []

    def lighthouse() -> str:
        address: list[Any] = [None]
        if rank == 0:
            lighthouses.append(LighthouseServer(bind="[::]:0", min_replicas=2))
            address = [lighthouses[-1].address()]
        dist.broadcast_object_list(address)
        return str(address[0])

    def make_model() -> GPT:
        torch.manual_seed(0)
        return GPT(config)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def backward(model: nn.Module, number: int) -> None:
        tokens = batches[number]
        model(tokens, tokens.roll(-1, 1)).loss.backward()

    def accumulate(model: nn.Module, no_sync: Callable[[], Any]) -> None:
        for number in range(num_own):
            with nullcontext() if number == num_own - 1 else no_sync():
                backward(model, number)

    steps: dict[str, Callable[[], None]] = {}

    def add_elastic(name: str, fixed_sum_order: bool) -> None:
        model = make_model()
        engine = fe.shard(model, mesh["inner"], "optim_grads_params")
        optimizer = adamw(model)
        fe.shard_optimizer(optimizer)
        replicas = ElasticReplicas(
            engine,
            optimizer,
            num_microbatches=2 * num_own,
            min_replicas=2,
            fixed_sum_order=fixed_sum_order,
            lighthouse=lighthouse(),
            timeout=TIMEOUT,
        )

        def step() -> None:
            for number in replicas.microbatches():
                backward(model, number % num_own)
            if not replicas.commit() or replicas.num_replicas != 2:
                raise RuntimeError("expected a step of two replicas")

        steps[name] = step

    def add_outer() -> None:
        model = make_model()
        engine = fe.shard(model, mesh, "optim_grads_params")
        optimizer = adamw(model)
        fe.shard_optimizer(optimizer)

        def step() -> None:
            accumulate(model, engine.no_sync)
            optimizer.step()
            optimizer.zero_grad()

        steps[OUTER] = step

    def add_ddp() -> None:
        model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
        optimizer = adamw(model)

        def step() -> None:
            accumulate(model, model.no_sync)
            optimizer.step()
            optimizer.zero_grad()

        steps[DDP] = step

    def add_torchft() -> None:
        module = make_model()
        inner = adamw(module)
        address = lighthouse()
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        seconds = timedelta(seconds=TIMEOUT)
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=seconds),
            load_state_dict=partial(load, module, inner),
            state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=2,
            timeout=seconds,
            quorum_timeout=seconds,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"replica_{rank}",
        )
        model = TorchftDDP(manager, module)
        optimizer = torchft.Optimizer(manager, inner)

        def step(store: dist.TCPStore = store) -> None:
            optimizer.zero_grad()
            accumulate(model, model.no_sync)
            optimizer.step()

        steps[TORCHFT] = step

    add_elastic(ELASTIC, False)
    add_elastic(FIXED, True)
    add_outer()
    add_ddp()
    add_torchft()
    times = harness.interleave(steps, rounds)
    dist.barrier()
    return times


def load(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of the other replica."""
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 3], help="of a replica")
    args = parser.parse_args()
    record: dict[str, Any] = {"size": args.size, "rounds": args.rounds, "steps": {}}
    for num_own in args.microbatches:
        times = harness.run_ranks(measure, 2, args.size, num_own, args.rounds)
        ways = {
            name: {
                "seconds": harness.spread(seconds),
                **{base: harness.ratios(times, name, base) for base in (OUTER, TORCHFT, DDP)},
            }
            for name, seconds in times.items()
        }
        rows = [
            [
                name,
                f"{1e3 * each['seconds']['median']:.0f}",
                *(harness.show_ratio(each[base]) for base in (OUTER, TORCHFT, DDP)),
            ]
            for name, each in ways.items()
        ]
        columns = ["step", "ms", *(f"/ {base}" for base in (OUTER, TORCHFT, DDP))]
        harness.print_table(f"{num_own} microbatches a replica", columns, rows)
        record["steps"][str(num_own)] = ways
    harness.write_results("replica_costs", record)


if __name__ == "__main__":
    main()
