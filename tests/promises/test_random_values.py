"""Random values drawn into sharded parameters are those that one process draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import init

import fsdp_engine as fe
from tests import reference
from tests.pool import on_ranks
from tests.promises.everywhere import Place, everywhere

FILLS: list[Callable[[Tensor], object]] = [
    lambda t: t.normal_(0.5, 2.0),
    lambda t: t.uniform_(-1, 3),
    *(init.normal_, init.uniform_, init.trunc_normal_, init.ones_),
    *(init.xavier_normal_, init.xavier_uniform_, init.kaiming_normal_, init.kaiming_uniform_),
    lambda t: init.constant_(t, 0.3),
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
            init.normal_(each.bias)  # later values are equal, too
        reference.assert_same_weights(model, alone, rtol=0, atol=0)


@on_ranks(2)
def test_where_generators_differ_the_first_rank_has_its_way() -> None:
    model, alone = nn.Linear(5, 7), nn.Linear(5, 7)
    fe.shard(model, initial_values="rank0")
    for generator in (torch.default_generator, torch.Generator()):
        for each in (alone, model):
            generator.manual_seed(3 if each is alone else 3 + dist.get_rank())
            given = None if generator is torch.default_generator else generator
            init.normal_(each.weight, generator=given)
            init.uniform_(each.bias, generator=given)
        reference.assert_same_weights(model, alone, rtol=0, atol=0)
    # Except on rank 0, later random numbers, of dropout for example, stay the same.
    torch.manual_seed(dist.get_rank())
    expected = torch.rand(()) if dist.get_rank() else None
    torch.manual_seed(dist.get_rank())
    init.normal_(model.weight)
    assert expected is None or torch.equal(torch.rand(()), expected)
