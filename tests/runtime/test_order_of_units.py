"""The order of units that ranks adopt is the one that they have compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.options import Options, Timing
from fsdp_engine.sharding import make_engine
from fsdp_engine.strategies import Strategy
from tests.pool import on_ranks


class InAnyOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def make(level: str) -> tuple[InAnyOrder, fe.Engine]:
    torch.manual_seed(0)
    model = InAnyOrder()
    mesh = init_device_mesh("cpu", (2,))
    timing = Timing(finishes_backward=False)
    strategy = Strategy.from_names(level, "no_shard")
    options = Options(min_unit_size=0)
    engine = make_engine(
        model, mesh, strategy, fe.MixedPrecisionPolicy(), options, timing, units="blocks.*"
    )
    return model, engine


@on_ranks(2)
def test_an_evaluation_before_the_end_of_a_step_does_not_change_the_order() -> None:
    x = torch.ones(2, 4)
    # At other levels a forward gathers nothing, or gathers in one order on all ranks.
    for level in ("optim", "optim_grads"):
        model, engine = make(level)
        reductions = engine.reductions
        before = list(reductions.canonical_order)
        model.order = [2, 1, 0]
        model(x).sum().backward()
        with torch.no_grad():
            model.order = [1, 0, 2] if dist.get_rank() else [1, 2, 0]
            model(x)
        engine.finish_grad_sync()
        found: list[list[int]] = [[], []]
        dist.all_gather_object(found, list(reductions.canonical_order))
        assert found[0] == found[1] == [0, 3, 2, 1], level
        assert before == [0, 1, 2, 3], level
