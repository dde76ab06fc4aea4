"""State on the host, on the simulated clock of H100 machines, beside formulas.

    python benchmarks/offload_clock.py

Llama 3 8B and 70B on 8 and 64 ranks: level 3, bf16 compute with fp32 main weights and gradients,
AdamW, 4,096 tokens a rank, activation checkpointing. Each is simulated with the optimizer's state
on the device and on the host. With main weights and gradients on the host, too, the optimizer steps
on the device or on the host. There are two machines: ``fe.H100``, whose eight GPUs share the memory
of their node, and the same with copies that are bound by PCIe alone.

With the state on the host the optimizer's step is also simulated beside the next forward
(``overlap_forward``). Formulas give lower bounds of the time that copies add to a step
(:func:`beside`), and of steps on the host that begin in backward, before the norm of gradients is
known (:func:`speculative`).

The *bound* of optimizer state is the time that the copies' bytes take at least, both directions at
once. The *step* of the optimizer is the time from the end of backward to the last copy: the
simulated step with the state on the host, less forward and backward of the one with the state on
the device. The bound of everything on the host is that of a whole step (:func:`everything`).

Steps of FSDP2's CPUOffloadPolicy and of DeepSpeed's ZeRO-Offload are formulas (:func:`fsdp2`,
:func:`zero_offload`): lower bounds, with all overlap that these have. They have everything on the
host, and step there. All formulas and the simulation assume that work on the host is bound by the
host's memory alone.
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
from fsdp_engine.planner.simulation.machine import TwoWayLink

EVERYTHING = fe.Offload(optimizer_state="host", main_weights="host", gradients="host")
SHAPES = {
    "Llama-3 8B": LlamaShape(),
    "Llama-3 70B": LlamaShape(num_blocks=80, width=8192, heads=64, hidden=28_672),
}
RANKS = (8, 64)
TOKENS = 4096


class OfPcieAlone(fe.Machine):
    """A machine whose copies are not bound by the host's memory; the host's own work is."""

    def link_to_state(self, place: str, num_ranks: int) -> TwoWayLink:
        """Returns the link of a rank that shares the host's memory with no other."""
        return super().link_to_state(place, 1)


MACHINES = {
    "eight GPUs share the node's memory": fe.H100,
    "PCIe alone": OfPcieAlone(
        **{each.name: getattr(fe.H100, each.name) for each in dataclasses.fields(fe.H100)}
    ),
}
BESIDE = "state on the host, beside forward"
OFFLOADS = {
    "state on the device": fe.Offload(),
    "state on the host": fe.Offload(optimizer_state="host"),
    BESIDE: fe.Offload(optimizer_state="host", overlap_forward=True),
    "everything on the host": EVERYTHING,
    "everything on the host, stepped there": dataclasses.replace(EVERYTHING, step_on="host"),
}
EVERYWHERE = {key: each for key, each in OFFLOADS.items() if key.startswith("everything")}
# A step of AdamW in fp32 reads weights, gradients and two states, and writes all but gradients.
ADAMW_BYTES = 4 * 4 + 3 * 4
# Bytes of an element that a step on the device copies in and out.
STEPPED_IN, STEPPED_OUT = 4 * 4, 3 * 4
# Values that a step on the host changes: weights and two states.
CHANGED_BYTES = 3 * 4
# The host casts weights from fp32 to bf16.
CAST_BYTES = 4 + 2


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
        elements: Number of elements of a rank's shard.
        ranks: Number of ranks of the job.
        model: Seconds of forward and backward without offload.
        link: Link of a rank to the host.
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


def everything(
    elements: float, ranks: int, model: float, link: TwoWayLink, gathered: float, step_on: str
) -> float:
    """Seconds of a step of this engine with everything on the host, at least, with the assumptions
    of :func:`fsdp2`.

    The host casts weights to bf16 once, and they are copied to the device for each gather; reduced
    gradients in fp32 are copied to the host. A step on the device waits for copies; one on the host
    is bound by its memory.

    Args:
        elements, ranks, model, link: see :func:`fsdp2`.
        gathered: Bytes that are copied to the device for gathers.
        step_on: "device" or "host".
    """
    copies = link.least_seconds(gathered, 4 * elements)
    before = max(model, copies, host_step(elements, ranks, CAST_BYTES))
    if step_on == "host":
        return before + host_step(elements, ranks)
    return before + link.least_seconds(STEPPED_IN * elements, STEPPED_OUT * elements)


def beside(copies: float, forward: float, backward: float) -> dict[str, float]:
    """Seconds that copies add to a step, at least, by the work with which they overlap.

    A step beside backward begins with the gradients of one unit. With clipping it would have to be
    undone, since the norm is known at the end of backward.

    Args:
        copies: The bound of copies.
        forward, backward: Seconds of forward and of backward.
    """
    beside_what = {"nothing": 0.0, "forward": forward, "backward": backward}
    beside_what["both"] = forward + backward
    return {key: max(copies - seconds, 0.0) for key, seconds in beside_what.items()}


def speculative(elements: float, ranks: int, backward: float) -> dict[str, float]:
    """Seconds of a step on the host after backward, at least: one that waits for the norm of
    gradients, and one that begins in backward and is undone if the norm says so.

    To undo a step, the old weights and states are kept. Either the step writes the new ones to
    other memory of the same size, which takes no time, or the old ones are copied before, which
    reads and writes them once more. An undone step is repeated after backward, and takes all of its
    time.

    Args:
        elements, ranks: see :func:`fsdp2`.
        backward: Seconds of backward.
    """
    step = host_step(elements, ranks)
    with_copies = host_step(elements, ranks, ADAMW_BYTES + 2 * CHANGED_BYTES)
    back = host_step(elements, ranks, 2 * CHANGED_BYTES)
    begun, copied = max(step - backward, 0.0), max(with_copies - backward, 0.0)
    return {
        "waits": step,
        "begun, written elsewhere": begun,
        "undone, written elsewhere": begun + step,
        "begun, copied before": copied,
        "undone, copied before": copied + back + step,
        "bytes of memory, written elsewhere": CHANGED_BYTES * elements,
    }


def phase_seconds(found: fe.Simulation, phase: str) -> float:
    """Seconds from the start to the end of compute in a phase."""
    spans = [each for each in found.spans if (each.lane, each.phase) == (COMPUTE, phase)]
    return max(each.end for each in spans) - min(each.start for each in spans)


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
                found = {
                    key: fe.simulate(
                        partial(Llama, shape),
                        ranks,
                        batch=(tokens, tokens),
                        machine=machine,
                        mp_policy=policy,
                        extensions=[fe.Recompute()],
                        offload=offload,
                    )
                    for key, offload in OFFLOADS.items()
                }
                here, there = found["state on the device"], found["state on the host"]
                model = here.seconds - step_seconds(here)
                bound = link.least_seconds(*there.copied_bytes.values())
                elements = num_elements / ranks
                overlapped = found[BESIDE]
                forward, backward = (phase_seconds(here, name) for name in ("forward", "backward"))
                row: dict[str, Any] = {
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
                    "forward seconds": forward,
                    "backward seconds": backward,
                    BESIDE: {
                        "seconds": overlapped.seconds,
                        "longer by": overlapped.seconds - model,
                        "exposed": overlapped.exposed_by_lane,
                        "peak bytes": overlapped.peak_bytes,
                    },
                    "longer at least, beside": beside(bound, forward, backward),
                    "stepped on the host after backward": speculative(elements, ranks, backward),
                }
                for key, offload in EVERYWHERE.items():
                    each = found[key]
                    gathered = each.copied_bytes["copy in"]
                    row[key] = {
                        "seconds": each.seconds,
                        "at least": everything(
                            elements, ranks, model, link, gathered, offload.step_on
                        ),
                        "copied bytes": each.copied_bytes,
                        "exposed": each.exposed_by_lane,
                        "busy": each.message_seconds,
                        "peak bytes": each.peak_bytes,
                        "bytes on the host": each.elsewhere["host"],
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
                        *(
                            f"{row[key]['seconds']:.3f} ({row[key]['at least']:.3f})"
                            for key in EVERYWHERE
                        ),
                        f"{overlapped.seconds - model:.3f}",
                        f"{row['longer at least, beside']['forward']:.3f}",
                    ]
                )
                print(rows[-1], flush=True)
    columns = ["model, ranks", "device", "host", "optimizer", "bound", "ratio", "FSDP2", "ZeRO"]
    columns += ["everything (bound)", "stepped there", "beside forward", "bound"]
    harness.print_table("Seconds of a step on simulated H100s", columns, rows)
    return record


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    harness.write_results("offload_clock", run())


if __name__ == "__main__":
    main()
