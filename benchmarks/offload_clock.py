"""Optimizer state on the host, on the simulated clock of H100 machines, beside formulas.

    python benchmarks/offload_clock.py

Llama 3 8B and 70B on 8 and 64 ranks: level 3, bf16 compute with fp32 main weights and gradients,
AdamW, 4,096 tokens a rank, activation checkpointing. Each is simulated with the state on the device
and on the host, on two machines: ``fe.H100``, whose eight GPUs share the memory of their node, and
the same with PCIe alone.

The *bound* is the time that the copies' bytes take at least, both directions at once. The *step* of
the optimizer is from the end of backward to the last copy: the rest of the simulated step with the
state on the device, subtracted from the one with it on the host.

Steps of FSDP2's CPUOffloadPolicy and of DeepSpeed's ZeRO-Offload are formulas (:func:`fsdp2`,
:func:`zero_offload`): times that they cannot go below with all overlap that they have. They hold
more on the host than this engine with ``optimizer_state="host"``, and less on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

import harness
import torch
from _published_shapes import MODELS
from simulated import Llama, LlamaShape

import fsdp_engine as fe
from fsdp_engine.comm.lanes import COMPUTE
from fsdp_engine.simulation.machine import TwoWayLink

SHAPES = {
    "Llama-3 8B": LlamaShape(),
    "Llama-3 70B": LlamaShape(num_blocks=80, width=8192, heads=64, hidden=28_672),
}
RANKS = (8, 64)
TOKENS = 4096
MACHINES = {
    "eight GPUs share the node's memory": fe.H100,
    "PCIe alone": dataclasses.replace(fe.H100, host_memory_bandwidth=None),
}
# A step of AdamW in fp32 reads weights, gradients and two states, and writes all but gradients.
ADAMW_BYTES = 4 * 4 + 3 * 4


def host_step(elements: float, ranks: int, num_bytes: int = ADAMW_BYTES) -> float:
    """Seconds of AdamW on the host, bound by its memory, which the ranks of a node share."""
    memory = fe.H100.host_memory_bandwidth
    assert memory is not None
    return num_bytes * elements * min(ranks, fe.H100.ranks_per_node) / memory


def fsdp2(elements: float, ranks: int, model: float, link: TwoWayLink) -> float:
    """Seconds of a step of FSDP2 with ``CPUOffloadPolicy``, at least.

    Sharded parameters in fp32 are copied to the device before each all-gather, in forward and in
    backward (torch 2.13, ``_fsdp_param.py``, ``FSDPParam.all_gather_inputs``), and reduced
    gradients in fp32 to the host (``_fsdp_collectives.py``, ``foreach_reduce``). The user's
    optimizer steps on the host after backward; state lies there.

    Assumptions: copies overlap fully with forward and backward, and with each other; the step is
    bound by the host's memory alone, as a fused AdamW with enough threads.

    Args:
        elements: of a rank's shard.
        ranks: of the job.
        model: seconds of forward and backward without offload.
        link: of a rank to the host.
    """
    copies = link.least_seconds(2 * 4 * elements, 4 * elements)
    return max(model, copies) + host_step(elements, ranks)


def zero_offload(elements: float, ranks: int, model: float, link: TwoWayLink) -> float:
    """Seconds of a step of ZeRO-Offload, at least.

    "ZeRO-Offload: Democratizing Billion-Scale Model Training" (Ren et al., USENIX ATC 2021): 16-bit
    gradients go to the host during backward (section 4.1), ``cpu_adam`` steps on fp32 weights and
    state there, and 16-bit weights return while the next tile is stepped (section 5.1). The step
    reads 16-bit gradients, and writes 16-bit weights beside the fp32 ones: as many bytes as
    AdamW's in fp32.

    Assumptions: both kinds of copies overlap fully; the step is bound by the host's memory alone.
    One-step delayed updates, which change the numbers, are not used.

    Args:
        elements, ranks, model, link: see :func:`fsdp2`.
    """
    down, up = 2 * elements / link.out, 2 * elements / link.into
    return max(model, down) + max(host_step(elements, ranks), up)


def step_seconds(found: fe.Simulation) -> float:
    """Busy time of compute in the optimizer's step."""
    spans = (each for each in found.spans if (each.lane, each.phase) == (COMPUTE, "step"))
    return sum(each.end - each.start for each in spans)


def run() -> dict[str, Any]:
    """Simulate, print."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    published = {model.name: model.num_elements for model in MODELS}
    record: dict[str, Any] = {}
    rows = []
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            num_elements = sum(param.numel() for param in Llama(shape).parameters())
        assert num_elements == published[name], (num_elements, published[name])
        for ranks in RANKS:
            for where, machine in MACHINES.items():
                link = machine.link_to_state("host", ranks)
                there, here = (
                    fe.simulate(
                        partial(Llama, shape),
                        ranks,
                        batch=(tokens, tokens),
                        machine=machine,
                        mp_policy=policy,
                        checkpointing=True,
                        offload=fe.Offload(optimizer_state=place),
                    )
                    for place in ("host", "device")
                )
                model = here.seconds - step_seconds(here)
                bound = link.least_seconds(*there.copied_bytes.values())
                elements = num_elements / ranks
                row = {
                    "elements of a rank": elements,
                    "link": dataclasses.asdict(link),
                    "seconds, state on the device": here.seconds,
                    "seconds, state on the host": there.seconds,
                    "optimizer seconds, state on the device": step_seconds(here),
                    "optimizer seconds, state on the host": there.seconds - model,
                    "copied bytes": there.copied_bytes,
                    "bound": bound,
                    "over the bound": (there.seconds - model) / bound,
                    "exposed": there.exposed_by_lane,
                    "busy": there.message_seconds,
                    "peak bytes, state on the device": here.peak_bytes,
                    "peak bytes, state on the host": there.peak_bytes,
                    "bytes on the host": there.elsewhere["host"],
                    "FSDP2 at least": fsdp2(elements, ranks, model, link),
                    "ZeRO-Offload at least": zero_offload(elements, ranks, model, link),
                }
                record.setdefault(name, {}).setdefault(str(ranks), {})[where] = row
                rows.append(
                    [
                        f"{name}, {ranks}, {where}",
                        *(
                            f"{row[key]:.3f}"
                            for key in (
                                "seconds, state on the device",
                                "seconds, state on the host",
                                "optimizer seconds, state on the host",
                                "bound",
                                "over the bound",
                                "FSDP2 at least",
                                "ZeRO-Offload at least",
                            )
                        ),
                    ]
                )
                print(rows[-1], flush=True)
    columns = ["model, ranks", "device", "host", "optimizer", "bound", "ratio", "FSDP2", "ZeRO"]
    harness.print_table("Seconds of a step on simulated H100s", columns, rows)
    return record


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    harness.write_results("offload_clock", run())


if __name__ == "__main__":
    main()
