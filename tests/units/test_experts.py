"""Experts: parameters that only some data-parallel ranks share.

Four ranks, two experts: ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1. Each rank has its own
tokens. A token's first feature selects its expert, which may be on the other rank of its pair. The
expected results are those of one process with both experts and all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.pool import on_ranks
from tests.reference import full
from tests.units.experts import DIM, batches, build


def wrapped(config: Any) -> tuple[fe.DistributedDataParallel, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    held = mesh["experts"].get_local_rank()
    model = build([held], mesh["experts"].get_group())
    # All ranks' experts have the same name, as in real layers of experts.
    return fe.DistributedDataParallel(model, config, expert_mesh=mesh["copies"]), held


# Overlap, average in the collective, division while copying: any two values occur together.
WAYS = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]


@on_ranks()
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_experts_train_as_one_process_that_holds_all_of_them(level: str) -> None:
    data = [batches(2)] * 2
    expected = reference.train(build([0, 1]), data)
    for overlap, average, fused in WAYS:
        fields = {"average_in_collective": average, "gradient_reduce_div_fusion": fused}
        ddp, _ = wrapped(config_of(level, overlap=overlap, **fields))
        found = train_wrapped(ddp, data)
        names = found[0].gradients.keys()  # this rank's experts and all shared parameters
        of_rank = [
            replace(
                step,
                gradients={name: step.gradients[name] for name in names},
                weights={name: step.weights[name] for name in names},
            )
            for step in expected
        ]
        lines = reference.differences(found, of_rank, 2e-5)
        assert not lines, (overlap, average, fused, lines)


@on_ranks()
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_an_expert_that_got_no_token_anywhere_keeps_no_gradient(level: str) -> None:
    ddp, held = wrapped(config_of(level, overlap=True))
    state = ddp.state_dict()
    state["first.weight"] = torch.zeros(DIM, DIM)
    state["first.bias"] = torch.ones(DIM)  # every token goes to expert 1
    ddp.load_state_dict(state)
    ddp(*batches(1)[0][dist.get_rank()]).backward()
    ddp.finish_grad_sync()
    has_gradient = {name: p.grad is not None for name, p in ddp.module.named_parameters()}
    assert has_gradient.pop(f"experts.{held}") is (held == 1)
    assert all(has_gradient.values())


@on_ranks()
def test_experts_whose_names_differ_between_ranks_are_saved_under_them() -> None:
    path = f"{shared_folder()}/checkpoint"

    def trained(seed: int) -> tuple[Any, Any, Any]:
        ddp, _ = wrapped(config_of("optim"))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1 * seed)
        ddp(*batches(1)[0][dist.get_rank()]).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        return ddp.engine, optimizer, list(ddp.parameters())

    def values(optimizer: Any, params: list[Any]) -> list[torch.Tensor]:
        state = [optimizer.state[param]["exp_avg"] for param in params]
        return [full(value) for value in (*params, *state)]

    engine, optimizer, params = trained(1)
    expected = values(optimizer, params)
    fe.save_checkpoint(path, engine, optimizer)
    engine, optimizer, params = trained(2)
    fe.load_checkpoint(path, engine, optimizer)
    for mine, theirs in zip(values(optimizer, params), expected, strict=True):
        assert torch.equal(mine, theirs)


@on_ranks()
def test_an_expert_without_ranks_of_its_own_is_refused_by_name() -> None:
    model = build([0], dist.group.WORLD)
    with pytest.raises(ValueError, match=r"experts\.0: expected expert_mesh.*allreduce=False"):
        fe.DistributedDataParallel(model)
