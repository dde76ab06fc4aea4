"""Random values drawn into sharded parameters are those that one process draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.pool import on_ranks
from tests.promises.everywhere import Place, everywhere

FILLS: list[Callable[[Tensor], object]] = [
    lambda t: t.normal_(0.5, 2.0),
    lambda t: t.uniform_(-1, 3),
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.xavier_normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.kaiming_uniform_,
    nn.init.ones_,
    lambda t: nn.init.constant_(t, 0.3),
]


@everywhere
def test_a_sharded_parameter_is_filled_as_one_process_fills_it(place: Place) -> None:
    model, alone = nn.Linear(5, 7), nn.Linear(5, 7)
    place.shard(model, initial_values="rank0")
    for number, fill in enumerate(FILLS):
        for each in (model, alone):
            torch.manual_seed(number)
            with torch.no_grad():
                fill(each.weight)
            nn.init.normal_(each.bias)  # what comes after is alike, too
        reference.assert_same_weights(model, alone, rtol=0, atol=0)


@on_ranks(2)
def test_generators_that_differ_are_refused() -> None:
    model = nn.Linear(5, 7)
    fe.shard(model)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"normal_: expected the random generators.*manual_seed"):
        nn.init.normal_(model.weight)
    alike = torch.Generator().manual_seed(3)
    nn.init.normal_(model.weight, generator=alike)
