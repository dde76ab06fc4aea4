"""Unsupported uses of a stage raise on every rank, with the name of the argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

import fsdp_engine as fe
from fsdp_engine.pipelining import PipelineStage
from tests import reference
from tests.extensions.pipelines import scene
from tests.pool import on_ranks


def messages(error: BaseException | None) -> str:
    """The texts of an error and of its causes; torch's stage wraps errors."""
    text = ""
    while error is not None:
        text += f"{error}\n"
        error = error.__cause__
    return text


def step(pipeline: scene.Pipeline) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        pipeline.step(*next(scene.batches(2)))
    return messages(caught.value)


class Later(PipelineStage):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, dw_builder=lambda: lambda: None, **kwargs)


class Around(PipelineStage):
    def __init__(self, module: scene.Stage, *args: Any, **kwargs: Any) -> None:
        super().__init__(nn.Sequential(module), *args, **kwargs)


class Within(PipelineStage):
    def __init__(self, module: scene.Stage, *args: Any, **kwargs: Any) -> None:
        super().__init__(module.first, *args, **kwargs)


OWN = pipelining.PipelineStage
OTHER = r"submodule: expected the module that was passed to shard\(\)"
REFUSED = [
    ("InterleavedZeroBubble", OWN, r"fsdp_engine\.pipelining\.PipelineStage"),
    ("ZBVZeroBubble", OWN, r"fsdp_engine\.pipelining\.PipelineStage"),
    ("InterleavedZeroBubble", Later, ": expected None, since its module is sharded"),
    ("Interleaved1F1B", Around, rf"{OTHER}(.|\n)*of which 0 was sharded"),
    ("Interleaved1F1B", Within, rf"{OTHER}(.|\n)*of which the root module"),
]


# Both ranks are data-parallel, and have all stages: so both come to a split backward.
@pytest.mark.parametrize(("schedule", "stage_class", "words"), REFUSED)
@scene.passes_on_to_itself
@on_ranks(2)
def test_a_stage_that_is_not_supported_raises(schedule: str, stage_class: Any, words: str) -> None:
    for level in scene.LEVELS if stage_class is OWN else ["optim"]:
        text = step(scene.make_pipeline(schedule, level, stage_class=stage_class))
        assert re.search(words, text), (level, text)


@on_ranks(2)
def test_a_module_that_is_not_sharded_is_torchs_own_business() -> None:
    alone, _ = scene.trained_alone(2, 1)
    rank = torch.distributed.get_rank()
    module = scene.make_stages(2)[rank]
    group = torch.distributed.group.WORLD
    schedule = scene.make_schedule("1F1B", [module], [rank], group, PipelineStage)
    optimizer = reference.sgd(module.parameters())
    for x, y in scene.batches(1):
        schedule.step(x[0]) if rank == 0 else schedule.step(target=y[0])
        optimizer.step()
        optimizer.zero_grad()
    reference.assert_same_weights(module, alone[rank])


@on_ranks(1)
def test_a_backward_of_weights_within_a_forward_raises() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            engine.microbatches.backward_of_weights(0, [], last=True)
            return x

    model = Model(3, 3)
    engine = fe.shard(model)
    with pytest.raises(RuntimeError, match=r"backward of weights: expected no forward or backward"):
        model(torch.randn(2, 3))


@scene.passes_on_to_itself
@on_ranks(2)
def test_after_an_error_among_the_gradients_of_weights_a_reset_leads_back() -> None:
    pipeline = scene.make_pipeline("InterleavedZeroBubble", "optim_grads_params")
    alone, _ = scene.trained_alone(2, 2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_engine.extensions.pipelines.pipeline_stage._compute", fail)
        assert "planted" in step(pipeline)
    assert "call engine.reset() before the next forward" in step(pipeline)
    for engine in pipeline.engines:
        engine.reset()
    # The state of torch's schedule is lost as well.
    group = pipeline.schedule._stages[0].group
    pipeline.schedule = scene.make_schedule(
        "InterleavedZeroBubble", pipeline.modules, pipeline.indices, group, PipelineStage
    )
    scene.train(pipeline, 2)
    for index, module in zip(pipeline.indices, pipeline.modules, strict=True):
        reference.assert_same_weights(module, alone[index], rtol=2e-4, atol=2e-6)
