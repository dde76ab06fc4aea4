"""Megatron-LM's loop with ``get_megatron_optimizer`` of this package: steps are those of
Megatron-Core's own optimizers, ``DistributedOptimizer`` with Adam, and state is saved and resumed
by Megatron-Core's checkpointing and by ours.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.megatron import get_megatron_optimizer
from tests.megatron.configs import LEVEL_NAMES
from tests.megatron.core_pretrain import (
    WAYS,
    Job,
    Training,
    compare,
    differences,
    groups_of,
    resume,
    save_half_way,
)
from tests.pool import Ranks, on_ranks

# Norms are summed in another order, so the clipping coefficient differs in its last bit, and now
# and then a 16-bit weight rounds the other way: one such weight moves the next norm by 2.5e-6. Adam
# divides by what may be no more than rounding, too.
LIMITS = {
    ("sgd", "fp32"): 2e-6,
    ("sgd", "bf16"): 2e-5,
    ("sgd", "fp16"): 2e-5,
    ("adam", "fp16"): 2e-4,
    ("adam", "bf16"): 2e-4,
}


def as_theirs(job: Job) -> Job:
    """The job by Megatron-Core's own names; its distributed optimizer takes Adam alone."""
    is_distributed = job.distributed_optimizer and job.optimizer == "adam"
    own = {"ours": False, "level": None, "overlap": False, "instances": 1}
    return dataclasses.replace(job, distributed_optimizer=is_distributed, **own)


def assert_as_theirs(ranks: Ranks, jobs: list[Job], world_size: int = 2) -> None:
    limit = max(LIMITS.get((job.optimizer, job.dtype), 2e-5) for job in jobs)
    pairs = [(job, as_theirs(job)) for job in jobs]
    found = ranks.run(compare, pairs, limit, world_size=world_size)
    assert not any(found), "\n".join(itertools.chain(*found))


def assert_resumes(
    ranks: Ranks,
    folder: Path,
    job: Job,
    way: str = "megatron",
    *,
    num_ranks: tuple[int, int] = (2, 2),
    limit: float = 1e-6,
    before: int = 2,
    **changed: Any,
) -> None:
    """Two steps of ``job``, a save, and two steps; these two again by a job that loads."""
    first, second = num_ranks
    other = dataclasses.replace(job, **changed)
    folder.mkdir(exist_ok=True)
    straight = ranks.run(save_half_way, job, way, str(folder), before, 2, world_size=first)[-1]
    # Scheduler, steps and state of the one that loads are others before.
    resumed = ranks.run(resume, other, way, str(folder), 2, 1, world_size=second)[-1]
    assert not differences(resumed, straight, limit)


def test_use_distributed_optimizer_is_as_with_its_distributed_optimizer(ranks: Ranks) -> None:
    jobs = [Job(dtype="bf16"), Job(dtype="bf16", level="optim_grads_params", overlap=True)]
    assert_as_theirs(ranks, jobs)


def test_an_infinite_loss_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    job = Job(dtype="fp16", optimizer="sgd", inf_on=(1, 1))
    assert_as_theirs(ranks, [dataclasses.replace(job, level=level) for level in LEVEL_NAMES])


def test_experts_have_an_optimizer_of_their_own(ranks: Ranks) -> None:
    assert_as_theirs(ranks, [Job(dtype="bf16", experts=True, level="optim_grads_params")], 4)


def test_norms_are_right_where_state_is_replicated_over_rows(ranks: Ranks) -> None:
    assert_as_theirs(ranks, [Job(instances=2, optimizer="sgd", microbatches=1)], 4)


@pytest.mark.parametrize("job", [{"level": "optim_grads_params"}, {"experts": True, "tensor": 1}])
def test_norm_groups_are_clipped_by_themselves(ranks: Ranks, job: dict[str, Any]) -> None:
    small = Job(optimizer="sgd", dtype="bf16", own_norm=True, clip=0.1, **job)
    assert_as_theirs(ranks, [small], 4 if small.experts else 2)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_steps_at_every_level(ranks: Ranks, dtype: str, optimizer: str) -> None:
    job = Job(dtype=dtype, optimizer=optimizer, lr_of_embeddings=0.02)
    every = [dataclasses.replace(job, level=level) for level in LEVEL_NAMES]
    every += [dataclasses.replace(job, level="optim", overlap=True)]
    every += [dataclasses.replace(job, clip=0.0), dataclasses.replace(job, gated=True)]
    assert_as_theirs(ranks, every)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"tensor": 2},
        {"pipeline": 2, "tied": True},
        {"pipeline": 2, "virtual": 2, "microbatches": 4, "overlap": True},
        {"experts": True},
        {"instances": 2},
    ],
    ids=lambda fields: next(reversed(fields)),
)
def test_model_parallel_steps_at_every_level(
    ranks: Ranks, fields: dict[str, Any], dtype: str
) -> None:
    levels: list[str | None] = [None] if "instances" in fields else [*LEVEL_NAMES]
    inf_on = (1, 3) if dtype == "fp16" else None
    job = Job(dtype=dtype, optimizer="sgd", inf_on=inf_on, **fields)
    assert_as_theirs(ranks, [dataclasses.replace(job, level=level) for level in levels], 4)


def test_state_is_resumed_by_its_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    job = Job(dtype="fp16", level="optim_grads_params", inf_on=(1, 1))
    assert_resumes(ranks, tmp_path / "a", job, limit=0.0)
    job = Job(dtype="bf16", level="optim", microbatches=2)
    many = {"level": "optim_grads_params", "microbatches": 1}
    assert_resumes(ranks, tmp_path / "b", job, num_ranks=(2, 4), **many)


def test_checkpoints_of_its_distributed_optimizer_are_resumed(ranks: Ranks, tmp_path: Path) -> None:
    job = Job(dtype="bf16", ours=False)
    assert_resumes(ranks, tmp_path, job, ours=True, level="optim_grads_params")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_checkpoints_of_its_other_optimizers_are_resumed_and_theirs_resume_ours(
    ranks: Ranks, tmp_path: Path, dtype: str
) -> None:
    ours: dict[str, Any] = {"ours": True, "level": "optim_grads_params"}
    theirs = Job(dtype=dtype, ours=False, distributed_optimizer=False)
    limit = 1e-6 if dtype == "bf16" else 1e-4
    assert_resumes(ranks, tmp_path / "a", theirs, limit=limit, **ours)
    own = dataclasses.replace(theirs, **ours)
    assert_resumes(ranks, tmp_path / "b", own, limit=limit, ours=False, level=None)


@pytest.mark.parametrize("way", ["checkpointer", "per_rank"])
def test_state_is_resumed_by_our_checkpoints_and_by_each_rank(
    ranks: Ranks, tmp_path: Path, way: str
) -> None:
    job = Job(dtype="fp16", level="optim_grads_params", inf_on=(1, 1))
    assert_resumes(ranks, tmp_path, job, way, limit=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_state_is_resumed_at_every_level(
    ranks: Ranks, tmp_path: Path, level: str, dtype: str, way: str
) -> None:
    job = Job(dtype=dtype, level=level, optimizer="sgd" if dtype == "fp32" else "adam")
    assert_resumes(ranks, tmp_path, job, way, limit=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["megatron", "checkpointer"])
@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise([*LEVEL_NAMES, "no_shard"])])
def test_state_is_resumed_on_other_ranks_and_levels(
    ranks: Ranks, tmp_path: Path, first: str, second: str, way: str
) -> None:
    job = Job(dtype="bf16", level=first, fully_parallel=True)
    for number, microbatches in ((1, 4), (4, 1)):
        assert_resumes(
            ranks,
            tmp_path / str(number),
            job,
            way,
            num_ranks=(2, number),
            level=second,
            microbatches=microbatches,
        )


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_state_is_resumed_with_other_model_parallel_ranks(
    ranks: Ranks, tmp_path: Path, level: str
) -> None:
    wide = {"tensor": 2, "gated": True, "level": level}
    assert_resumes(ranks, tmp_path / "a", Job(**wide), num_ranks=(4, 4), limit=0.0)
    narrow = {"num_ranks": (4, 2), "limit": 2e-5, "level": "optim"}
    assert_resumes(ranks, tmp_path / "b", Job(**wide), tensor=1, **narrow)
    staged = Job(pipeline=2, tied=True, level=level)
    assert_resumes(ranks, tmp_path / "c", staged, pipeline=1, **narrow)
    experts = Job(experts=True, dtype="bf16", level=level)
    assert_resumes(ranks, tmp_path / "d", experts, num_ranks=(4, 4), level="optim_grads")
    own = {"way": "checkpointer", "num_ranks": (4, 4)}
    assert_resumes(ranks, tmp_path / "e", experts, level="optim_grads_params", **own)
    chunks = Job(pipeline=2, virtual=2, microbatches=4, dtype="bf16", level=level)
    assert_resumes(ranks, tmp_path / "g", chunks, num_ranks=(4, 4), level="optim_grads_params")
    assert_resumes(ranks, tmp_path / "h", chunks, level="optim", **own)
    rows = Job(instances=2, dtype="bf16")
    assert_resumes(
        ranks, tmp_path / "f", rows, num_ranks=(4, 2), instances=1, microbatches=4, limit=1e-5
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_checkpoint_from_before_the_first_step_is_resumed(
    ranks: Ranks, tmp_path: Path, optimizer: str
) -> None:
    job = Job(dtype="bf16", optimizer=optimizer, level="optim_grads")
    assert_resumes(ranks, tmp_path, job, before=0, limit=0.0)


def entries_of(state: Any) -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {each.key: tuple(each.global_shape) for each in nested_values(sharded)}


@on_ranks(2)
def test_entries_are_those_of_its_distributed_optimizer() -> None:
    job = Job(dtype="bf16", level="optim_grads_params")
    with groups_of(job):
        theirs, mine = Training(as_theirs(job)), Training(job)
        theirs.train(2)
        mine.train(2)
        expected, found = (
            each.generate_state_dict(is_loading=False)["optimizer"] for each in (theirs, mine)
        )
        assert entries_of(expected) == entries_of(found)
        assert found["param_state_sharding_type"] == expected["param_state_sharding_type"]
        steps = [
            [group["step"] for group in each["optimizer"]["param_groups"]]
            for each in (expected, found)
        ]
        assert steps[0] == steps[1]


@on_ranks(2)
def test_saving_takes_one_gather_per_buffer_and_loading_none() -> None:
    job = Job(dtype="bf16", level="optim_grads_params")
    with groups_of(job):
        training = Training(job)
        training.train(1)
        model = {"model": training.ddp.module.sharded_state_dict()}
        gather = ParamAndGradBuffer.gather_state
        with mock.patch.object(ParamAndGradBuffer, "gather_state", autospec=True) as spy:
            spy.side_effect = gather
            training.optimizer.sharded_state_dict(model, is_loading=True)
            assert not spy.call_count
            training.optimizer.sharded_state_dict(model)
            # Main weights and two moments.
            assert spy.call_count == 3 * len(training.ddp.engine.buffers)


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_loaded_weights_need_no_copy(level: str) -> None:
    """And are not rounded by ``reload_model_params`` to the dtype that modules compute in."""
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
        training.train(3)
        (wrapped,) = training.optimizer.chained_optimizers
        inner, scale = wrapped.optimizer, float(training.optimizer.get_loss_scale())
        assert scale == 2.0**11
        plain = fe.Checkpointer(folder, training.ddp.engine, inner)
        plain.save(3)
        plain.close()
        own = fe.Checkpointer(folder, training.ddp.engine, training.optimizer)
        with pytest.raises(
            ValueError, match=r"missing optimizer\.param_groups: expected grad_scale"
        ):
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

        training = Training(job)
        config = OptimizerConfig(lr=0.1, bf16=True, use_distributed_optimizer=True)
        with pytest.raises(
            TypeError, match=r"model_chunks: expected modules in .*; found a Linear"
        ):
            get_megatron_optimizer(config, [nn.Linear(2, 2)])
        for name in ("optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"):
            setattr(config, name, True)
            with pytest.raises(ValueError, match=f"config.{name}: expected False"):
                get_megatron_optimizer(config, training.model)
            setattr(config, name, False)
        config.optimizer = "muon"
        with pytest.raises(
            ValueError, match=r"config\.optimizer: expected one of adam, sgd; found"
        ):
            get_megatron_optimizer(config, training.model)
        config.optimizer = "adam"
        for method in ("save_parameter_state", "load_parameter_state"):
            with pytest.raises(RuntimeError, match="--ckpt-format torch_dist"):
                getattr(training.optimizer, method)("file")
        with pytest.raises(ValueError, match=r"model_sharded_state_dict: expected an entry for "):
            training.optimizer.sharded_state_dict({})


@on_ranks(2)
def test_weights_in_a_narrow_dtype_alone_are_refused() -> None:
    with groups_of(Job()):
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer as get_theirs
        from megatron.core.transformer.transformer_config import TransformerConfig

        narrow = fe.DistributedDataParallelConfig(
            use_distributed_optimizer=True, preserve_fp32_weights=False
        )
        model_config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        ddp = fe.DistributedDataParallel(model_config, narrow, nn.Linear(4, 4).bfloat16())
        config = OptimizerConfig(lr=0.1, bf16=True)
        with pytest.raises(ValueError, match="preserve_fp32_weights: expected True"):
            get_megatron_optimizer(config, [ddp])
        theirs = get_theirs(config, [ddp])
        own = fe.Checkpointer("unused", ddp.engine, theirs)
        with pytest.raises(ValueError, match="optimizer: expected one that steps the main weights"):
            own.save(0)
