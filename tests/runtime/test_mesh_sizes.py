"""``fe.shard(model, mesh=(2, 2))``: sizes in place of a mesh."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from tests.models import Transformer, token_batch
from tests.pool import on_few_ranks, on_ranks
from tests.scenario import Scenario


@on_ranks(4)
def test_sizes_make_the_axes() -> None:
    for sizes in ((4,), (2, 2), (1, 4), (4, 1)):
        pair = ("optim_grads_params", "optim" if len(sizes) == 2 else "no_shard")
        run = Scenario(model=partial(Transformer, 1), mesh=sizes, pair=pair).check()
        mesh = run.engine.mesh
        assert (mesh.outer.size, mesh.inner.size) == (1, *sizes)[-2:]
        param = pickle.loads(pickle.dumps(run.model.head.weight))
        assert torch.equal(param.full_tensor(), run.weights["head.weight"])


@on_ranks(4)
def test_instances_of_a_config_may_be_sharded_on_the_outer_axis() -> None:
    model = Transformer(num_blocks=1)
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        outer_dp_sharding_strategy="optim",
        num_distributed_optimizer_instances=2,
    )
    engine = fe.shard(model, config=config)
    assert (engine.mesh.outer.size, engine.mesh.inner.size) == (2, 2)
    alone = Transformer(num_blocks=1)
    alone.load_state_dict(engine.full_state_dict())
    for each in (model, alone):
        each(*token_batch(2, 1)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters()])  # type: ignore[misc]
    torch.testing.assert_close(engine.clip_grad_norm_(1.0), expected)


@on_few_ranks
def test_wrong_sizes_are_refused() -> None:
    model = nn.Linear(2, 2)
    for wrong, error, message in [
        ((3, 5), ValueError, "mesh: expected one or two sizes of"),
        ((1, 1, 1), ValueError, "mesh: expected one or two sizes of"),
        ((-1, -1), ValueError, "mesh: expected one or two sizes of"),
        (4.0, TypeError, "mesh: expected a DeviceMesh, sizes such as"),
        ("2x2", TypeError, "mesh: expected a DeviceMesh, sizes such as"),
    ]:
        with pytest.raises(error, match=message):
            fe.shard(model, wrong)  # type: ignore[arg-type]
