"""Planned stages of pipelines train. These tests have a file, and so a process, of their own:
DTensor's caches may return an equal mesh of an earlier test, with groups of other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble

import fsdp_engine as fe
from tests.extensions.pipelines.scene import passes_on_to_itself
from tests.planner.made_plans import (
    TOKENS,
    llama_batch,
    loss_of_logits,
    noting_dtensors,
    quick_plan,
    small_llama,
    trained,
)
from tests.pool import Ranks

llama, deep_llama = partial(small_llama, 2), partial(small_llama, 4)


def _train_stages(path: str, build: Callable[[], nn.Module]) -> tuple[list[float], bool]:
    """Losses of two steps of the planned stages, where this rank has the last one, and whether
    there were DTensors."""
    with noting_dtensors() as has_dtensors:
        stages = fe.StrategyPlan.load(path).shard_stages(fe.CausalLMStages(build))
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params))
    count = 2 * len(stages)
    schedule: Any = Schedule1F1B(stages[0], count, loss_fn=loss_of_logits)
    if len(stages) > 1:
        schedule = ScheduleZBVZeroBubble(list(stages), count, loss_fn=loss_of_logits)
    inputs = (TOKENS,) if stages[0].is_first else ()
    is_last = any(each.is_last for each in stages)
    losses: list[float] = []
    for _ in range(2):
        found: list[Tensor] = []
        schedule.step(*inputs, **({"target": TOKENS, "losses": found} if is_last else {}))
        losses += [sum(each.item() for each in found) / count] if is_last else []
        optimizer.step()
        optimizer.zero_grad()
    return losses, all(has_dtensors)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {"meshes": [(2,)]}),
        pytest.param(llama, {"tensor_parallel": 2, "meshes": [(1,)]}, marks=pytest.mark.thorough),
        pytest.param(llama, {"meshes": [(2,)], "context_parallel": 2}, marks=pytest.mark.thorough),
        pytest.param(
            deep_llama,
            {"meshes": [(2,)], "schedules": "ZBVZeroBubble", "microbatches": 4},
            marks=[pytest.mark.thorough, passes_on_to_itself],
        ),
    ],
    ids=["data parallel", "tensor parallel", "context parallel", "split backwards"],
)
def test_planned_stages_train_on_their_ranks(
    ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """All data-parallel ranks train on the same full sequences."""
    path = str(tmp_path / "plan.json")
    given = {"world_size": 4, "checkpointing": (False,), "microbatches": 2, **options}
    machine = replace(fe.H100, ranks_per_node=2)
    planning = quick_plan(build, llama_batch, machine=machine, pipeline=2, fitting=1, **given)
    planning.save(path)
    found = ranks.run(_train_stages, path, build, world_size=4)
    last = [losses for losses, _ in found if losses]
    assert len(last) == 2
    for losses in last:
        assert losses == pytest.approx(trained(build()), rel=1e-4)
    assert {has_dtensors for _, has_dtensors in found} == {"tensor_parallel" in options}
