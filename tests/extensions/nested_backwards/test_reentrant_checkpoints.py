"""Re-entrant checkpoints, each of which runs autograd within the backward."""

from __future__ import annotations

import copy

import pytest
import torch

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import config_of, train_wrapped
from tests.models import DIM, Small, vector_batch
from tests.pool import on_ranks


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim", "optim_grads"])
@pytest.mark.parametrize("size", [None, 0])
def test_buckets_train_as_one_process(level: str, size: int | None) -> None:
    data = reference.make_data(vector_batch, 4, 2, 2)
    torch.manual_seed(3)
    model = Small(3, checkpoints=True)
    expected = reference.train(copy.deepcopy(model), data)
    fields = {} if size is None else {"suggested_communication_unit_size": size}
    config = config_of(level, overlap=True, bucket_size=DIM * DIM + DIM, **fields)
    ddp = fe.DistributedDataParallel(model, config)
    assert len(ddp.engine.buffers) > 1
    assert not reference.differences(train_wrapped(ddp, data), expected, 2e-5)
