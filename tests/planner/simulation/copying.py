"""A machine on which only copies take time, and models for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor, TwoWayLink

F32 = torch.float32
WIDTH, BLOCKS, RANKS = 256, 4, 4
# Bytes of AdamW's state, for one block on a rank.
CHUNK = 8 * WIDTH * WIDTH // RANKS
ALONE, BOTH = 1e6, 1.5e6
ROWS = 1024
# A block saves its input.
SAVED = 4 * ROWS * WIDTH


def machine(**changes: Any) -> Machine:
    """Only copies of state take time."""
    free = Link(math.inf, 0.0)
    made = Machine(
        "a machine that only copies",
        Processor({F32: math.inf}, math.inf, 1e12),
        free,
        free,
        ranks_per_node=8,
        host_link=TwoWayLink(ALONE, ALONE, BOTH),
        disk=TwoWayLink(2 * ALONE, ALONE, BOTH),
    )
    return dataclasses.replace(made, **changes)


class Blocks(nn.Sequential):
    """Linears without bias, a unit each."""

    def __init__(self, num: int = BLOCKS) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(num)))


def all_on_host(step_on: str = "device") -> fe.Offload:
    return fe.Offload("host", main_weights="host", gradients="host", step_on=step_on)


def with_host_rate(rate: float) -> Machine:
    """Each rank reads and writes so many bytes of the host's memory in a second."""
    return machine(host_memory_bandwidth=RANKS * rate)


def computing(share: float) -> fe.Machine:
    """The forward of a block takes ``share`` of one of its copies; backward takes twice that."""
    flops = 2 * ROWS * WIDTH * WIDTH / (share * SAVED / ALONE)
    link = TwoWayLink(ALONE, ALONE, 2 * ALONE)
    return machine(processor=Processor({F32: flops}, math.inf, 1e12), host_link=link)
