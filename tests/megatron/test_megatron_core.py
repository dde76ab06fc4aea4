"""Megatron-Core's own client code (GPT model, schedules, optimizers, checkpoints), with
``DistributedDataParallel`` and ``finalize_model_grads`` imported from this package: losses and
norms equal those of its own wrapper up to fp32 rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import fsdp_engine as fe
from fsdp_engine.megatron import get_megatron_optimizer
from tests.megatron.configs import LEVEL_NAMES, Config, config_of
from tests.megatron.core_pretrain import Job, compare, groups_of, make_models, wrap
from tests.pool import Ranks, on_ranks
from tests.reference import full

PLAIN = Job(tied=True, optimizer="sgd", their_optimizer=True)
BUCKETS: dict[str, Any] = {"overlap": True, "bucket_size": 300}
DEEP: dict[str, Any] = {"layers": 8, "microbatches": 4, "overlap": True, "bucket_size": 3000}
SUMS: dict[str, Any] = {"per_token": True, "their_finalize": True}
TWO_RANKS = {
    "one_bucket": PLAIN,
    "buckets": PLAIN.but(**BUCKETS),
    "late_buckets": PLAIN.but(bucket_size=700, microbatches=3),
    "untied": PLAIN.but(tied=False, overlap=True, bucket_size=700, microbatches=1),
    "bf16_adam": PLAIN.but(dtype="bf16", optimizer="adam"),
    "bf16_grads": PLAIN.but(dtype="bf16", grads_in_fp32=False, microbatches=1),
    "their_finalize": PLAIN.but(**SUMS),
    "whole_recomputation": PLAIN.but(**DEEP | {"layers": 4}, recompute="uniform"),
}
FOUR_RANKS = {
    "tensor": PLAIN.but(tensor=2, **BUCKETS),
    "sequence": PLAIN.but(tensor=2, sequence=True, per_token=True, optimizer="adam"),
    "pipeline": PLAIN.but(pipeline=2, sync_funcs=True, **BUCKETS),
    "tokens": PLAIN.but(pipeline=2, per_token=True, dtype="bf16", optimizer="adam"),
    "interleaved": PLAIN.but(pipeline=2, virtual=2, microbatches=4, **BUCKETS),
    "experts": PLAIN.but(experts=2, **BUCKETS),
    "experts_over_tensor_ranks": PLAIN.but(tensor=2, experts=2, sequence=True),
    "experts_on_one_rank_each": PLAIN.but(experts=4),
    "more_tensor_ranks_than_experts": PLAIN.but(tensor=4, experts=2, sequence=True),
    "tensor_parallel_experts": PLAIN.but(tensor=2, experts=2, expert_tensor=2, sequence=True),
    "recomputation": PLAIN.but(pipeline=2, recompute="uniform", **DEEP | {"bucket_size": 1500}),
    "recomputation_of_a_block": PLAIN.but(
        pipeline=2, recompute="block", **DEEP | {"microbatches": 3}
    ),
    "selective_recomputation": PLAIN.but(pipeline=2, recompute="selective", **DEEP),
    "interleaved_recomputation": PLAIN.but(pipeline=2, virtual=2, recompute="uniform", **DEEP),
    "interleaved_without_overlap": PLAIN.but(pipeline=2, virtual=4, layers=8, microbatches=4),
    "their_finalize_with_tensor": PLAIN.but(tensor=2, sequence=True, **SUMS),
    "their_finalize_with_pipeline": PLAIN.but(pipeline=2, **SUMS),
    "their_finalize_with_experts": PLAIN.but(experts=2, **SUMS),
}


ALL = LEVEL_NAMES
# Levels that the ordinary tests run, by test.
OFTEN = {
    "buckets": ALL[::2],
    "bf16_adam": ALL[1::2],
    "their_finalize": ALL,
    "sequence": ["optim_grads_params"],
    "pipeline": ["optim", "optim_grads_params"],
    "experts_over_tensor_ranks": ["optim"],
    "whole_recomputation": ["optim"],
    "their_finalize_with_tensor": ["optim_grads"],
}
COMBINATIONS = {
    f"{optimizer}-{dtype}-{tensor}x{pipeline}-{len(more)}": PLAIN.but(
        tensor=tensor, pipeline=pipeline, optimizer=optimizer, dtype=dtype, **more
    )
    for (tensor, pipeline), optimizer, dtype, more in itertools.product(
        [(1, 1), (2, 1), (1, 2)], ["sgd", "adam"], ["fp32", "bf16"], [{}, BUCKETS]
    )
}
JOBS = TWO_RANKS | FOUR_RANKS | COMBINATIONS


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        *OFTEN.items(),
        *(pytest.param(name, ALL, marks=pytest.mark.thorough, id=f"{name}-all") for name in JOBS),
    ],
)
def test_training_is_as_with_its_own_wrapper(ranks: Ranks, name: str, levels: list[str]) -> None:
    jobs = [JOBS[name].but(level=level) for level in levels]
    ranks.run(compare, jobs, world_size=2 if name in TWO_RANKS else 4)


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_attributes_that_its_loop_reads(overlap: bool) -> None:
    job = PLAIN.but(level="optim", overlap=overlap, bucket_size=300)
    with groups_of(job):
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer as get_theirs
        from megatron.core.utils import get_model_config, get_model_type

        config, models = make_models(job)
        ddp = wrap(job, config, models[0])
        assert ddp.config is get_model_config(ddp) is config
        assert get_model_type(ddp) is models[0].model_type
        assert dict(ddp.named_buffers()).keys() == dict(ddp.module.named_buffers("module")).keys()
        assert [*ddp.buffers()] == [*ddp.module.buffers()]
        data = parallel_state.get_data_parallel_group()
        assert dist.get_process_group_ranks(ddp.dp_group) == dist.get_process_group_ranks(data)
        for name in ("dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp", "pp", "ep"):
            assert isinstance(getattr(ddp, f"{name}_group"), dist.ProcessGroup), name
        assert ddp.bucket_size == 300
        assert ddp.bucket_groups + ddp.expert_parallel_bucket_groups == []
        assert ddp.expert_parallel_buffers == []
        assert ddp.params_with_grad == [*ddp.parameters()]
        assert not ddp.ddp_config.use_megatron_fsdp
        assert ddp.engine.config.use_megatron_fsdp
        assert ddp.use_forward_hook == bool(ddp.remove_forward_pre_hook_handles) == overlap
        if overlap:
            ddp.disable_forward_pre_hook()
            assert not ddp.remove_forward_pre_hook_handles
            ddp.enable_forward_pre_hook()
            assert ddp.remove_forward_pre_hook_handles
        ddp.start_param_sync(ddp.parameters(), force_sync=True, force_dispatch=True)
        ddp.start_grad_sync(ddp.parameters())
        ddp.overlap_param_gather_with_optimizer_step = False
        # Its distributed optimizer is refused at construction.
        options = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
        with pytest.raises(
            RuntimeError, match=r"get_megatron_optimizer from fsdp_engine\.megatron"
        ):
            get_theirs(options, [ddp])


def model_of_two() -> Any:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def small(level: str = "no_shard", **fields: Any) -> fe.DistributedDataParallel:
    torch.manual_seed(2)
    return fe.DistributedDataParallel(SimpleNamespace(), config_of(level, **fields), model_of_two())


def backward(ddp: fe.DistributedDataParallel) -> None:
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(2, 5)).square().mean().backward()


def gradients(ddp: fe.DistributedDataParallel) -> list[Tensor]:
    backward(ddp)
    ddp.finish_grad_sync()
    return [full(param.grad) for param in ddp.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_memory_of_gradients_is_freed_and_allocated_again(level: str) -> None:
    ddp = small(level)
    expected = gradients(ddp)
    held = ddp.engine.memory_bytes()["grad"]
    ddp.offload_grad_buffers()
    assert "grad" not in ddp.engine.memory_bytes()
    ddp.restore_grad_buffers()
    if level in LEVEL_NAMES[:2]:
        assert ddp.engine.memory_bytes()["grad"] == held
        mains = [buffer.full_params[0].main_grad for buffer in ddp.engine.buffers]
        assert not any(main.any() for main in mains)
    for with_restore in (True, False):
        assert all(map(torch.equal, gradients(ddp), expected))
        ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        if with_restore:
            ddp.restore_grad_buffers(synchronize=False)
    assert all(map(torch.equal, gradients(ddp), expected))


def whole_grads(ddp: fe.DistributedDataParallel) -> dict[str, Tensor]:
    """Gradients in the form in which Megatron-LM collects them for ``--save-wgrads-interval``."""
    params = ddp.module.named_parameters()
    return {n: p.main_grad.cpu() for n, p in params if getattr(p, "main_grad", None) is not None}


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_force_all_reduce_gathers_full_gradients_on_every_rank(level: str) -> None:
    ddp = small(level, bucket_size=10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    groups = fe.ModelParallelGroups(data=dist.group.WORLD)
    for step in range(2):
        ddp.zero_grad_buffer()
        backward(ddp)
        sliced = whole_grads(ddp)
        fe.finalize_model_grads([ddp], 4 * (step + 1), force_all_reduce=True, groups=groups)
        expected = {name: full(param.grad) for name, param in ddp.module.named_parameters()}
        if level in LEVEL_NAMES[:2]:
            for buffer in ddp.engine.buffers:
                for param, sharded in zip(buffer.full_params, buffer.sharded_params, strict=True):
                    assert torch.equal(param.main_grad, full(sharded.grad))
        if dist.get_rank() == 0:  # on one rank alone: this is no collective
            found = whole_grads(ddp)
            assert found.keys() == expected.keys()
            assert all(type(value) is Tensor for value in found.values())
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert level == "no_shard" or type(sliced["0.weight"]) is fe.FlatDTensor
        ddp.scale_gradients(0.5)
        assert all(torch.equal(value, expected[n] / 2) for n, value in whole_grads(ddp).items())
        for param in ddp.module.parameters():
            param.main_grad.mul_(2.0)
        if level != "no_shard":
            with pytest.raises(RuntimeError, match="main_grad: expected no change since"):
                whole_grads(ddp)
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_main_grad_is_assigned_and_deleted_as_an_attribute(level: str) -> None:
    ddp = small(level)
    gradients(ddp)
    params = list(ddp.module.parameters())
    for param in params:
        main_grad = param.main_grad
        param.main_grad = main_grad
        assert torch.equal(full(param.main_grad), full(param.grad))
    if level != "no_shard":
        whole = torch.arange(35.0).view(7, 5)
        mesh, placements = params[0].device_mesh, params[0].placements
        params[0].main_grad = distribute_tensor(whole, mesh, placements)
        assert torch.equal(full(params[0].grad), whole)
    for param in params:
        del param.main_grad
        assert not hasattr(param, "main_grad")
        assert param.grad is not None
        with pytest.raises(AttributeError):
            del param.main_grad
    torch.optim.SGD(params, lr=0.1).step()
    ddp.zero_grad_buffer()
    gradients(ddp)


@dataclasses.dataclass
class TheirConfig:
    """A config of Megatron-Core's, of another class; our config lacks some of its fields."""

    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    bucket_size: int | None = None
    fsdp_manual_registration: bool = False


# Words of the error; ``ddp_config``, and fields of the model's config.
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    (
        r"ddp_config\.fsdp_manual_registration: expected its def",
        TheirConfig(fsdp_manual_registration=True),
        {},
    ),
    ("bucket_size: expected 1 or more", TheirConfig(bucket_size=0), {}),
    (
        "average_in_collective: expected False, since gradients",
        Config(average_in_collective=True),
        {"calculate_per_token_loss": True},
    ),
    *(
        (rf"config\.{name}: expected {supported}, .* {value}", TheirConfig(), {name: value})
        for name, supported, value in [
            ("gradient_accumulation_fusion", False, True),
            ("gtp_weight_remat_size", 1, 2),
            ("expert_gtp_weight_remat_size", 1, 2),
            ("flextron", False, True),
        ]
    ),
]


@on_ranks(2)
def test_its_config_is_taken_for_ours() -> None:
    config = TheirConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    wrapper, model = fe.DistributedDataParallel, model_of_two()
    for ddp in (
        wrapper(None, config, model_of_two()),
        wrapper(config=None, ddp_config=config, module=model_of_two()),
        wrapper(model_of_two(), config),
    ):
        assert ddp.engine.strategy.inner.name == "optim"
        assert ddp.ddp_config.overlap_grad_reduce
        assert ddp.bucket_size == 40_000_000
    for words, wrong, fields in REFUSED:
        with pytest.raises(ValueError, match=words):
            wrapper(SimpleNamespace(**fields), wrong, model)
    with pytest.raises(TypeError, match="ddp_config: expected a DistributedDataParallelConfig"):
        wrapper(config=None, ddp_config={}, module=model)
    groups = SimpleNamespace(tp=dist.group.WORLD)
    with pytest.raises(ValueError, match="pg_collection: expected a ProcessGroup in dp_cp or dp"):
        wrapper(None, TheirConfig(), model, pg_collection=groups)
    ddp = wrapper(None, config, model, disable_bucketing=True, full_param_layout=object())
    assert ddp.bucket_size is None
    assert ddp.buffers + ddp.expert_parallel_buffers == []
    ddp.stop_communication()


@on_ranks(4)
def test_groups_are_those_of_the_collection() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
    groups = SimpleNamespace(dp=data, dp_cp=data, tp=tensor)
    torch.manual_seed(dist.get_rank())  # rank 0 of each group decides
    model = model_of_two()
    model[0].bias.sequence_parallel = True
    ddp = fe.DistributedDataParallel(
        SimpleNamespace(sequence_parallel=True), TheirConfig(), model, pg_collection=groups
    )
    assert ddp.engine.mesh.size == 2
    assert ddp.tp_group is groups.tp

    def finalized(*given: Any) -> list[Tensor]:
        ddp.zero_grad_buffer()
        backward(ddp)
        fe.finalize_model_grads([ddp], None, *given)
        return [param.grad.clone() for param in model.parameters()]

    ddp.zero_grad_buffer()
    alone = gradients(ddp)
    both = [grad.clone() for grad in alone]
    index = [name for name, _ in model.named_parameters()].index("0.bias")
    dist.all_reduce(both[index], group=tensor)
    for found in (finalized(groups), finalized()):
        assert all(map(torch.allclose, found, both))
    # The marks have an effect only if the model's config enables sequence parallelism.
    ddp.config.sequence_parallel = False
    assert all(map(torch.equal, finalized(groups), alone))
    with pytest.raises(ValueError, match="groups, pg_collection: expected one of them"):
        fe.finalize_model_grads([ddp], None, groups, groups=fe.ModelParallelGroups())


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_its_helpers_take_the_wrapper_for_its_own(level: str) -> None:
    job = PLAIN.but(level=level, dtype="bf16")
    with groups_of(job):
        from megatron.core import distributed, utils
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.module import Float16Module

        theirs: Any = distributed
        config, models = make_models(job)
        ddp = wrap(job, config, Float16Module(config, models[0]))
        assert isinstance(ddp, theirs.DistributedDataParallel)
        assert type(ddp) is fe.DistributedDataParallel
        assert utils.unwrap_model([ddp]) == [models[0]]
        assert utils.unwrap_model(ddp) is models[0]
        assert utils.check_param_hashes_across_dp_replicas([ddp], cross_check=True)
        other_config, others = make_models(job)
        inner = wrap(job, other_config, others[0])
        assert utils.unwrap_model(Float16Module(config, inner)) is inner.module
        # State dicts of all wrapped modules have full weights, and the optimizer accepts each of
        # them.
        options = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16)
        optimizer = get_megatron_optimizer(options, [ddp])
        values = tensors_of(ddp)
        for module in (utils.unwrap_model(ddp), ddp.module, ddp):
            state = module.sharded_state_dict()
            for name, value in values.items():
                assert torch.equal(state[name].data, value), name
            assert optimizer.sharded_state_dict({"model": state})


def tensors_of(ddp: fe.DistributedDataParallel) -> dict[str, Tensor]:
    state = ddp.engine.full_state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("is_around", [False, True])
def test_a_float16_module_around_or_within_the_wrapper_loads(level: str, is_around: bool) -> None:
    job = PLAIN.but(level=level, dtype="bf16")
    with groups_of(job):
        from megatron.core.transformer.module import Float16Module

        def make(bucket_size: int) -> tuple[Any, fe.DistributedDataParallel]:
            config, models = make_models(job)
            other = job.but(bucket_size=bucket_size)
            if is_around:
                ddp = wrap(other, config, models[0])
                return Float16Module(config, ddp), ddp
            ddp = wrap(other, config, Float16Module(config, models[0]))
            return ddp, ddp

        (first, mine), (second, theirs) = make(300), make(5000)  # slices of another layout
        with torch.no_grad():
            for param in first.parameters():
                param.add_(0.25)
        values = tensors_of(mine)
        for state in (first.state_dict(), first.state_dict_for_save_checkpoint(), values):
            with torch.no_grad():
                for param in second.parameters():
                    param.zero_()
            second.load_state_dict(state, strict=False)
            for name, value in tensors_of(theirs).items():
                assert torch.equal(value, values[name]), name
