"""Megatron-LM's loop with ``get_megatron_optimizer`` of this package gives the steps of
Megatron-Core's own optimizers; with Adam, this is ``DistributedOptimizer``. State is saved and
resumed by Megatron-Core's checkpointing and by ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.buffers.full_values import gather_state
from fsdp_engine.megatron import get_megatron_optimizer
from tests.checkpoint.scene import raises_each, shared_folder
from tests.megatron.configs import LEVEL_NAMES
from tests.megatron.core_pretrain import (
    WAYS,
    Job,
    Training,
    compare,
    differences,
    groups_of,
    may_have_children,
    resume,
    save_half_way,
)
from tests.pool import Ranks, on_ranks

SHARDED = Job(dtype="bf16", level="optim_grads_params")
NORM_GROUPS = Job(optimizer="sgd", dtype="bf16", own_norm=True, clip=0.1)
thorough = pytest.mark.thorough


def at_every_level(job: Job) -> list[Job]:
    return [job.but(level=level) for level in LEVEL_NAMES]


def jobs_of(dtype: str, optimizer: str) -> list[Job]:
    job = Job(dtype=dtype, optimizer=optimizer, lr_of_embeddings=0.02)
    more = [job.but(level="optim", overlap=True), job.but(clip=0.0), job.but(gated=True)]
    return [*at_every_level(job), *more]


def model_parallel_jobs_of(dtype: str, fields: dict[str, Any]) -> list[Job]:
    inf_on = (1, 3) if dtype == "fp16" else None
    job = Job(dtype=dtype, optimizer="sgd", inf_on=inf_on, **fields)
    return [job] if "instances" in fields else at_every_level(job)


EXPERTS = Job(experts=2, dtype="bf16")
STEPS: dict[str, tuple[list[Job], int]] = {
    "its distributed optimizer": ([Job(dtype="bf16"), SHARDED.but(overlap=True)], 2),
    "an infinite loss on one rank skips the step on all": (
        [Job(dtype="fp16", optimizer="sgd", inf_on=(1, 1), level="optim_grads")],
        2,
    ),
    "experts have an optimizer of their own": ([EXPERTS.but(level="optim_grads_params")], 4),
    "state is replicated over rows": ([Job(instances=2, optimizer="sgd", microbatches=1)], 4),
    "norm groups are clipped by themselves": ([NORM_GROUPS.but(level="optim_grads_params")], 2),
}
THOROUGH_STEPS: dict[str, tuple[list[Job], int]] = (
    {
        "norm groups of experts": ([NORM_GROUPS.but(experts=2)], 4),
        "an infinite loss at every level": (
            at_every_level(Job(dtype="fp16", optimizer="sgd", inf_on=(1, 1))),
            2,
        ),
    }
    | {
        f"{dtype}-{optimizer}": (jobs_of(dtype, optimizer), 2)
        for dtype, optimizer in itertools.product(["fp32", "bf16", "fp16"], ["sgd", "adam"])
    }
    | {
        f"{dtype}-{next(reversed(fields))}": (model_parallel_jobs_of(dtype, fields), 4)
        for dtype in ("bf16", "fp16")
        for fields in (
            {"tensor": 2},
            {"pipeline": 2, "tied": True},
            {"pipeline": 2, "virtual": 2, "microbatches": 4, "overlap": True},
            {"experts": 2},
            {"instances": 2},
        )
    }
)


@pytest.mark.parametrize(
    "name", [*STEPS, *(pytest.param(name, marks=thorough) for name in THOROUGH_STEPS)]
)
def test_steps_are_those_of_its_optimizers(ranks: Ranks, name: str) -> None:
    jobs, world_size = (STEPS | THOROUGH_STEPS)[name]
    ranks.run(compare, jobs, world_size=world_size)


class Resumed(NamedTuple):
    """A job is saved after ``before`` steps and trains on; another job loads it and repeats the
    later steps."""

    job: Job
    changed: dict[str, Any] = {}  # noqa: RUF012
    way: str = "megatron"
    ranks: tuple[int, int] = (2, 2)
    limit: float = 0.0
    before: int = 2


FP16 = SHARDED.but(dtype="fp16", inf_on=(1, 1))
FEW = Job(dtype="bf16")
THEIRS, OURS = {"ours": False, "level": None}, {"ours": True, "level": "optim_grads_params"}
MANY = OURS | {"microbatches": 1}
RESUMED = {
    **{way: Resumed(FP16, way=way) for way in WAYS},
    "more ranks": Resumed(FEW.but(level="optim"), MANY, ranks=(2, 4), limit=1e-6),
    "from its distributed optimizer": Resumed(FEW.but(**THEIRS), OURS, limit=1e-6),
    "before the first step": Resumed(FEW.but(level="no_shard"), before=0),
    "before the first step of SGD": Resumed(
        FEW.but(level="optim_grads", optimizer="sgd"), before=0
    ),
}
TENSOR = Job(tensor=2, gated=True)
CHUNKS = Job(pipeline=2, virtual=2, microbatches=4, dtype="bf16")
NARROW: dict[str, Any] = {"ranks": (4, 2), "limit": 2e-5}
# Model-parallel jobs.
OTHER_RANKS: list[tuple[Job, dict[str, Any], dict[str, Any]]] = [
    (TENSOR, {}, {}),
    (TENSOR, {"level": "optim", "tensor": 1}, NARROW),
    (Job(pipeline=2, tied=True), {"level": "optim", "pipeline": 1}, NARROW),
    (EXPERTS, {"level": "optim_grads"}, {"limit": 1e-6}),
    (EXPERTS, {"level": "optim_grads_params"}, {"limit": 1e-6, "way": "checkpointer"}),
    (CHUNKS, {"level": "optim_grads_params"}, {"limit": 1e-6}),
    (CHUNKS, {"level": "optim"}, {"limit": 1e-6, "way": "checkpointer"}),
]


def thorough_resumed() -> Iterator[Resumed]:
    for dtype, limit in (("bf16", 1e-6), ("fp16", 1e-4)):
        plain = Job(dtype=dtype, distributed_optimizer=False)
        yield Resumed(plain.but(**THEIRS), OURS, limit=limit)
        yield Resumed(plain.but(**OURS), THEIRS, limit=limit)
    for level, dtype, way in itertools.product(LEVEL_NAMES, ("fp32", "bf16", "fp16"), WAYS):
        optimizer = "sgd" if dtype == "fp32" else "adam"
        yield Resumed(Job(dtype=dtype, level=level, optimizer=optimizer), way=way)
    for first, second in itertools.pairwise([*LEVEL_NAMES, "no_shard"]):
        job = FEW.but(level=first, fully_parallel=True)
        for way, number in itertools.product(("megatron", "checkpointer"), (1, 4)):
            changed = {"level": second, "microbatches": 4 // number}
            yield Resumed(job, changed, way, (2, number), 1e-6)
    for level, (job, changed, more) in itertools.product(
        ("optim", "optim_grads_params"), OTHER_RANKS
    ):
        yield Resumed(job.but(level=level), changed, **{"ranks": (4, 4), **more})
    changed = {"instances": 1, "microbatches": 4}
    yield Resumed(FEW.but(instances=2), changed, ranks=(4, 2), limit=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in RESUMED.items()),
        *(pytest.param(case, marks=thorough) for case in thorough_resumed()),
    ],
)
def test_state_is_resumed(ranks: Ranks, tmp_path: Path, case: Resumed) -> None:
    first, second = case.ranks
    saved = (case.job, case.way, str(tmp_path), case.before, 2)
    straight = ranks.run(save_half_way, *saved, world_size=first)[-1]
    # Until the load, this job has another scheduler, other steps and another state.
    loaded = (case.job.but(**case.changed), case.way, str(tmp_path), 2, 1)
    resumed = ranks.run(resume, *loaded, world_size=second)[-1]
    assert not differences(resumed, straight, case.limit)


def entries_of(state: Any) -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {each.key: tuple(each.global_shape) for each in nested_values(sharded)}


@on_ranks(2)
def test_entries_are_those_of_its_distributed_optimizer_and_take_one_gather_per_buffer() -> None:
    job = SHARDED
    with groups_of(job):
        both = Training(job.as_theirs()), Training(job)
        for training in both:
            training.train(1)
        expected, found = (each.generate_state_dict(is_loading=False)["optimizer"] for each in both)
        assert entries_of(expected) == entries_of(found)
        assert found["param_state_sharding_type"] == expected["param_state_sharding_type"]
        groups = [each["optimizer"]["param_groups"] for each in (expected, found)]
        assert [each["step"] for each in groups[0]] == [each["step"] for each in groups[1]]
        optimizer, ddp = both[1].optimizer, both[1].ddp
        model = {"model": ddp.module.sharded_state_dict()}
        path = "fsdp_engine.megatron.sharded_optimizers.gather_state"
        with mock.patch(path, side_effect=gather_state) as spy:
            optimizer.sharded_state_dict(model, is_loading=True)
            assert not spy.call_count
            optimizer.sharded_state_dict(model)
            # Main weights and two moments.
            assert spy.call_count == 3 * len(ddp.engine.buffers)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@on_ranks(2)
def test_a_loaded_state_can_be_loaded_again(dtype: str, distributed_optimizer: bool) -> None:
    def state_of(training: Training) -> list[dict[str, Any]]:
        (wrapped,) = training.optimizer.chained_optimizers
        return [wrapped.optimizer.state[each] for each in wrapped.get_parameters()]

    folder = shared_folder()
    job = Job(dtype=dtype, distributed_optimizer=distributed_optimizer)
    with groups_of(job):
        from megatron.core import dist_checkpointing

        training = Training(job)
        training.train(2)
        with may_have_children():
            training.save(folder)
        expected = state_of(training)
        wanted = training.generate_state_dict(is_loading=True)
        loaded = dist_checkpointing.load(wanted, folder)["optimizer"]
        for _ in range(2):
            again = Training(job)
            again.optimizer.load_state_dict(loaded)
            for mine, theirs in zip(state_of(again), expected, strict=True):
                assert mine.keys() == theirs.keys() >= {"step", "exp_avg", "exp_avg_sq"}
                assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_loaded_weights_need_no_copy(level: str) -> None:
    job = Job(dtype="bf16", level=level)
    with groups_of(job):
        first, second = Training(job), Training(job)
        first.train(1)
        first_weights = first.ddp.engine.full_state_dict()
        second.ddp.load_state_dict(first_weights)
        for given in (None, {"model": first_weights}):
            second.optimizer.reload_model_params(state_dict=given)
            found = second.ddp.engine.full_state_dict()
            names = [name for name, value in found.items() if isinstance(value, torch.Tensor)]
            assert all(torch.equal(found[name], first_weights[name]) for name in names)
        second.steps = first.steps
        assert second.train_step()[0] == first.train_step()[0]


@on_ranks(2)
def test_a_checkpoint_without_a_scaler_is_refused_or_leaves_the_scaler_as_it_is(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "steps")
    job = Job(dtype="fp16", level="optim")
    with groups_of(job):
        training = Training(job)
        training.train(2)
        (wrapped,) = training.optimizer.chained_optimizers
        inner, scale = wrapped.optimizer, float(training.optimizer.get_loss_scale())
        assert scale == 2.0**11
        plain = fe.Checkpointer(folder, training.ddp.engine, inner)
        plain.save(3)
        plain.close()
        own = fe.Checkpointer(folder, training.ddp.engine, training.optimizer)
        words = r"missing optimizer\.param_groups: expected grad_scale"
        with pytest.raises(ValueError, match=words):
            own.load()
        assert own.load(strict=False).problems
        assert float(training.optimizer.get_loss_scale()) == scale
        # The reverse: torch's optimizer loads state that was saved with a scaler.
        own.save(4)
        plain.load()
        assert len(inner.state) == len([*training.ddp.parameters()])


@on_ranks(2)
def test_unsupported_options_raise() -> None:
    job = Job(dtype="bf16", level="optim")
    with groups_of(job):
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer as get_theirs
        from megatron.core.transformer.transformer_config import TransformerConfig

        training = Training(job)
        options = {"lr": 0.1, "bf16": True, "use_distributed_optimizer": True}

        def get(model: Any, **fields: Any) -> Any:
            config = OptimizerConfig(**options)
            vars(config).update(fields)
            return partial(get_megatron_optimizer, config, model)

        # Without fp32 main weights.
        narrow = fe.DistributedDataParallelConfig(
            use_distributed_optimizer=True, preserve_fp32_weights=False
        )
        model_config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        ddp = fe.DistributedDataParallel(model_config, narrow, nn.Linear(4, 4).bfloat16())
        plain = get_theirs(OptimizerConfig(lr=0.1, bf16=True), [ddp])
        own = fe.Checkpointer("unused", ddp.engine, plain)
        optimizer, model = training.optimizer, training.model
        beside = "overlap_param_gather_with_optimizer_step"
        raises_each(
            (TypeError, r"model_chunks: .*; found a Linear", get([nn.Linear(2, 2)])),
            (ValueError, "config.optimizer_cpu_.*False", get(model, optimizer_cpu_offload=True)),
            (ValueError, f"config.{beside}: expected False", get(model, **{beside: True})),
            (ValueError, "config.optimizer: expected one of adam", get(model, optimizer="muon")),
            (RuntimeError, "format torch_dist", partial(optimizer.save_parameter_state, "file")),
            (RuntimeError, "format torch_dist", partial(optimizer.load_parameter_state, "file")),
            (ValueError, "model_sharded_state_dict: ", partial(optimizer.sharded_state_dict, {})),
            (ValueError, "preserve_fp32_weights: expected True", get([ddp])),
            (ValueError, "optimizer: expected one that steps the main", partial(own.save, 0)),
        )
