"""A sharded replica of this rank, and the simulation to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fsdp_engine as fe
from tests import reference
from tests.extensions.outer_optimizer.simulation import Simulation, Weights, batch_of, make_model
from tests.reference import full_weights
from tests.training import mesh_of


def simulated(shape: tuple[int, int], way: dict[str, Any], **others: Any) -> Simulation:
    arguments = {**way}
    fragments = arguments.pop("fragments", 1)
    outer = {"outer": arguments.pop("optimizer")} if "optimizer" in arguments else {}
    return Simulation(
        num_replicas=shape[0],
        num_inner=shape[1],
        num_fragments=4 if fragments == "units" else fragments,
        **arguments,
        **outer,
        **others,
    )


class Replica:
    """A sharded model of this rank's replica, and its optimizers."""

    def __init__(
        self,
        shape: tuple[int, int],
        way: dict[str, Any],
        strategy: str = "optim_grads_params",
        make_inner: Callable[[Any], torch.optim.Optimizer] = reference.adamw,
        wrap: Callable[[Any], Any] = reference.nothing,
        **arguments: Any,
    ) -> None:
        self.model = make_model()
        self.outer = fe.OuterOptimizer(**way)
        extensions = [self.outer, *arguments.pop("extensions", ())]
        self.engine = fe.shard(
            self.model, mesh_of(*shape), strategy, extensions=extensions, **arguments
        )
        self.optimizer = make_inner(self.model.parameters())
        wrap(self.optimizer)
        self.place = divmod(dist.get_rank(), shape[1])
        self.count = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(*batch_of(self.count, *self.place)).backward()
            self.engine.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step(self.engine)
            self.count += 1

    def check(self, expected: list[Weights], tolerance: float = 2e-5) -> None:
        """Compare this replica's weights."""
        found = {name: each.float() for name, each in full_weights(self.model).items()}
        for name, value in expected[self.place[0]].items():
            torch.testing.assert_close(
                found[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
