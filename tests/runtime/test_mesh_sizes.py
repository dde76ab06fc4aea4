"""``fe.shard(model, mesh=(2, 2))``: sizes in place of a mesh."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_few_ranks


def losses(mesh: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, mesh, "optim_grads_params", "optim" if len(mesh) == 2 else None)
    whole = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), whole[name])  # type: ignore[operator]
        again = pickle.loads(pickle.dumps(param))
        assert torch.equal(again.full_tensor(), whole[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        loss = model(*token_batch(2, 10 * step + engine.mesh.rank))
        loss.backward()
        found.append(engine.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return engine.mesh.outer.size, engine.mesh.inner.size, found


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 4), (4, 1)])
def test_sizes_make_the_axes(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    one = ranks.run(losses, (4,), world_size=4)[0]
    for outer, inner, found in ranks.run(losses, sizes, world_size=4):
        assert (outer, inner) == (sizes if len(sizes) == 2 else (1, *sizes))
        assert found == pytest.approx(one[2], rel=1e-5)


def by_config() -> float:
    model = Transformer(num_blocks=2)
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        outer_dp_sharding_strategy="optim",
        num_distributed_optimizer_instances=2,
    )
    engine = fe.shard(model, config=config, initial_values="rank0")
    model(*token_batch(2, 1)).backward()
    assert (engine.mesh.outer.size, engine.mesh.inner.size) == (2, 2)
    return engine.clip_grad_norm_(1.0).item()


def test_instances_of_a_config_may_cut_on_the_outer_axis(ranks: Ranks) -> None:
    assert len({round(norm, 6) for norm in ranks.run(by_config, world_size=4)}) == 1


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
