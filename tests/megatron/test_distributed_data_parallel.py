"""The wrapper trains as one process does: every level, with and without overlap, one and several
microbatches, on one axis and two. SGD, because Adam hides a gradient that is wrong by a factor."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks
from tests.training import mesh_of, report


@functools.cache
def trained_alone(world: int, num_micro: int) -> tuple[Transformer, list[reference.Step]]:
    """The model as it starts, and its steps in one process."""
    torch.manual_seed(1)
    model = Transformer(num_blocks=2, tied=True)
    data = reference.make_data(token_batch, 3, num_micro, world)
    return model, reference.train(copy.deepcopy(model), data)


def compare(inner: str, outer: str, shape: tuple[int, ...]) -> list[str]:
    """Differences from one process, as text, over overlap, microbatches and bucket sizes."""
    mesh = mesh_of(*shape)
    found = []
    for overlap, num_micro, bucket_size in itertools.product((False, True), (1, 3), (None, 700)):
        start, expected = trained_alone(mesh.size(), num_micro)
        model = copy.deepcopy(start)
        data = reference.make_data(token_batch, 3, num_micro, mesh.size())
        config = config_of(inner, outer, overlap=overlap, bucket_size=bucket_size)
        ddp = fe.DistributedDataParallel(model, config, mesh)
        steps = train_wrapped(ddp, data, zero_buffer=num_micro == 1)
        case = f"overlap={overlap}, {num_micro} microbatches, bucket_size={bucket_size}"
        found += [f"{case}: {line}" for line in reference.differences(steps, expected, 2e-5)]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS)
def test_a_wrapped_model_on_two_axes_trains_as_one_process(
    ranks: Ranks, inner: str, outer: str
) -> None:
    results = ranks.run(compare, inner, outer, (2, 2))
    assert not any(results), report(results)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("inner", LEVEL_NAMES)
def test_a_wrapped_model_on_one_axis_trains_as_one_process(
    ranks: Ranks, inner: str, world_size: int
) -> None:
    results = ranks.run(
        compare, inner, "no_shard", (world_size,), world_size=world_size, timeout=120
    )
    assert not any(results), report(results)
