"""Checks that a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from tests import reference
from tests.models import token_batch


@contextmanager
def refused(
    model: nn.Module, *parts: str, kind: type[Exception] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error whose message holds all ``parts``; the model stays as it was and can be sharded."""
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items() if not p.is_meta}
    with pytest.raises(kind) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    for name, parameter in after.items():
        assert parameter is parameters[name], f"{name} was replaced"
        if name in values:
            assert torch.equal(parameter, values[name]), f"{name} was changed"


def assert_still_trains(model: nn.Module) -> None:
    engine = fe.shard(model)
    data = reference.make_data(token_batch, 1, 1, dist.get_world_size())
    (step,) = reference.train_sharded(model, engine, data)
    assert step.norm > 0
