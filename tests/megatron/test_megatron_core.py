"""Megatron-Core's own client code (0.19.2: GPT model, schedules, optimizers, checkpoints), with
``DistributedDataParallel`` and ``finalize_model_grads`` imported from this package.

Losses and norms equal those of its own wrapper up to fp32 rounding. The first call of a rank
imports Megatron-Core, which takes some seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import fsdp_engine as fe
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.megatron import get_megatron_optimizer
from tests.megatron.configs import LEVEL_NAMES
from tests.megatron.core_training import Case, compare, make_models, model_parallel, wrap
from tests.pool import Ranks, on_ranks

# Fields describe each case; the defaults are 2 microbatches, fp32, SGD, tied.
TWO_RANKS = {
    "one_bucket": Case(),
    "buckets": Case(overlap=True, bucket_size=300),
    "late_buckets": Case(bucket_size=700, microbatches=3),
    "untied": Case(tied=False, overlap=True, bucket_size=700, microbatches=1),
    "bf16_adam": Case(bf16=True, optimizer="adam"),
    "bf16_grads": Case(bf16=True, grads_in_fp32=False, microbatches=1),
    "own_optimizer": Case(own_optimizer=True, overlap=True),
    "their_finalize": Case(per_token=True, their_finalize=True),
    "whole_recomputation": Case(recompute="uniform", overlap=True, bucket_size=1500, layers=4),
}
FOUR_RANKS = {
    "tensor": Case(tensor=2, bucket_size=300, overlap=True),
    "sequence": Case(tensor=2, sequence=True, per_token=True, optimizer="adam"),
    "pipeline": Case(pipeline=2, bucket_size=300, overlap=True, sync_funcs=True),
    "tokens": Case(pipeline=2, per_token=True, bf16=True, optimizer="adam"),
    "interleaved": Case(pipeline=2, virtual=2, microbatches=4, overlap=True, bucket_size=300),
    "experts": Case(experts=2, bucket_size=300, overlap=True),
    "experts_over_tensor_ranks": Case(tensor=2, experts=2, sequence=True),
    "experts_on_one_rank_each": Case(experts=4),
    "more_tensor_ranks_than_experts": Case(tensor=4, experts=2, sequence=True),
    "tensor_parallel_experts": Case(tensor=2, experts=2, expert_tensor=2, sequence=True),
    "recomputation": Case(
        pipeline=2, recompute="uniform", layers=8, microbatches=4, overlap=True, bucket_size=1500
    ),
    "recomputation_of_a_block": Case(
        pipeline=2, recompute="block", layers=8, microbatches=3, overlap=True, bucket_size=3000
    ),
    "selective_recomputation": Case(
        pipeline=2, recompute="selective", layers=8, microbatches=4, overlap=True, bucket_size=3000
    ),
    "interleaved_recomputation": Case(
        pipeline=2,
        virtual=2,
        recompute="uniform",
        layers=8,
        microbatches=4,
        overlap=True,
        bucket_size=3000,
    ),
    "interleaved_without_overlap": Case(pipeline=2, virtual=4, layers=8, microbatches=4),
    "their_finalize_with_tensor": Case(
        tensor=2, sequence=True, per_token=True, their_finalize=True
    ),
    "their_finalize_with_pipeline": Case(pipeline=2, per_token=True, their_finalize=True),
    "their_finalize_with_experts": Case(experts=2, per_token=True, their_finalize=True),
}


def assert_same(ranks: Ranks, case: Case, levels: list[str], world_size: int) -> None:
    cases = [dataclasses.replace(case, level=level) for level in levels]
    # Adam divides by what may be no more than rounding; gradients in bf16 are summed in another
    # order.
    limit = 2e-5 if case.optimizer == "adam" else 2e-6
    if case.bf16 and not case.grads_in_fp32:
        limit = 2e-2
    results = ranks.run(compare, cases, limit, world_size=world_size)
    assert not any(results), "\n".join(itertools.chain(*results))


@pytest.mark.parametrize("name", ["buckets", "bf16_adam", "their_finalize"])
def test_training_is_as_with_its_own_wrapper(ranks: Ranks, name: str) -> None:
    assert_same(ranks, TWO_RANKS[name], LEVEL_NAMES, 2)


@pytest.mark.parametrize("name", ["sequence", "pipeline"])
def test_model_parallel_training_is_as_with_its_own_wrapper(ranks: Ranks, name: str) -> None:
    assert_same(ranks, FOUR_RANKS[name], ["optim", "optim_grads_params"], 4)


@pytest.mark.parametrize("name", ["experts_over_tensor_ranks", "recomputation"])
def test_its_parallelism_trains_at_level_optim(ranks: Ranks, name: str) -> None:
    assert_same(ranks, FOUR_RANKS[name], ["optim"], 4)


@pytest.mark.parametrize("name", ["their_finalize_with_tensor", "their_finalize_with_pipeline"])
def test_its_own_finalize_model_grads_sums_sharded_gradients(ranks: Ranks, name: str) -> None:
    assert_same(ranks, FOUR_RANKS[name], ["optim_grads"], 4)


@on_ranks(2)
def test_sums_of_gradients_are_not_averaged_in_the_collective() -> None:
    model = Small()
    per_token = SimpleNamespace(calculate_per_token_loss=True)
    ours = DistributedDataParallelConfig(average_in_collective=True)
    with pytest.raises(ValueError, match=r"average_in_collective: expected False, since gradients"):
        fe.DistributedDataParallel(per_token, ours, model)
    ddp = fe.DistributedDataParallel(per_token, DistributedDataParallelConfig(), model)
    means = gradients(small())
    ddp.module.load_state_dict(small().module.state_dict())
    assert all(map(torch.equal, gradients(ddp), [2 * each for each in means]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", TWO_RANKS)
def test_training_at_every_level(ranks: Ranks, name: str) -> None:
    assert_same(ranks, TWO_RANKS[name], LEVEL_NAMES, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_model_parallel_training_at_every_level(ranks: Ranks, name: str) -> None:
    assert_same(ranks, FOUR_RANKS[name], LEVEL_NAMES, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bf16", [False, True])
def test_all_combinations(ranks: Ranks, sizes: tuple[int, int], optimizer: str, bf16: bool) -> None:
    tensor, pipeline = sizes
    case = Case(tensor=tensor, pipeline=pipeline, optimizer=optimizer, bf16=bf16)
    for overlap, bucket_size in ((False, None), (True, 300)):
        each = dataclasses.replace(case, overlap=overlap, bucket_size=bucket_size)
        assert_same(ranks, each, LEVEL_NAMES, 4)


def wrapped(case: Case) -> Any:
    config, models = make_models(case)
    return wrap(case, True, config, models[0])


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_its_distributed_optimizer_is_refused_at_construction(level: str) -> None:
    case = Case(level=level, optimizer="adam")
    with model_parallel(case):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ddp = wrapped(case)
        assert dict(ddp.named_buffers()).keys() == dict(ddp.module.named_buffers("module")).keys()
        assert [*ddp.buffers()] == [*ddp.module.buffers()]
        config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
        with pytest.raises(
            RuntimeError, match=r"get_megatron_optimizer from fsdp_engine\.megatron"
        ):
            get_megatron_optimizer(config, [ddp])


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_attributes_that_its_loop_reads(level: str, overlap: bool) -> None:
    case = Case(level=level, overlap=overlap, bucket_size=300)
    with model_parallel(case):
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config, get_model_type

        config, models = make_models(case)
        ddp = wrap(case, True, config, models[0])
        assert ddp.config is config
        assert get_model_config(ddp) is config
        assert get_model_type(ddp) is models[0].model_type
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
        assert ddp.use_forward_hook == overlap
        assert bool(ddp.remove_forward_pre_hook_handles) == overlap
        if overlap:
            ddp.disable_forward_pre_hook()
            assert not ddp.remove_forward_pre_hook_handles
            ddp.enable_forward_pre_hook()
            assert ddp.remove_forward_pre_hook_handles
        ddp.start_param_sync(ddp.parameters(), force_sync=True, force_dispatch=True)
        ddp.start_grad_sync(ddp.parameters())
        ddp.overlap_param_gather_with_optimizer_step = False


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def small(level: str = "no_shard", **fields: Any) -> fe.DistributedDataParallel:
    torch.manual_seed(2)
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy=level, **fields
    )
    return fe.DistributedDataParallel(SimpleNamespace(), config, Small())


def gradients(ddp: fe.DistributedDataParallel) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(2, 5)).backward()
    ddp.finish_grad_sync()
    return [full(param.grad) for param in ddp.parameters()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, fe.FlatDTensor) else tensor.clone()


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
    """As Megatron-LM collects them for ``--save-wgrads-interval``."""
    return {
        name: param.main_grad.cpu()
        for name, param in ddp.module.named_parameters()
        if getattr(param, "main_grad", None) is not None
    }


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_force_all_reduce_gathers_full_gradients_on_every_rank(level: str) -> None:
    ddp = small(level, bucket_size=10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        ddp.zero_grad_buffer()
        torch.manual_seed(dist.get_rank())
        ddp(torch.randn(2, 5)).backward()
        sliced = whole_grads(ddp)
        groups = fe.ModelParallelGroups(data=dist.group.WORLD)
        num_tokens = 4 * (step + 1)
        fe.finalize_model_grads([ddp], num_tokens, force_all_reduce=True, groups=groups)
        expected = {name: full(param.grad) for name, param in ddp.module.named_parameters()}
        if level in LEVEL_NAMES[:2]:
            for buffer in ddp.engine.buffers:
                for param, sharded in zip(buffer.full_params, buffer.sharded_params, strict=True):
                    assert torch.equal(param.main_grad, full(sharded.grad))
        if dist.get_rank() == 0:  # without the others
            found = whole_grads(ddp)
            assert found.keys() == expected.keys()
            for name, value in found.items():
                assert type(value) is Tensor
                assert torch.equal(value, expected[name]), name
        assert level == "no_shard" or type(sliced["first.weight"]) is fe.FlatDTensor
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
    """A config of another class with fields of Megatron-Core's, some of which we have not."""

    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    bucket_size: int | None = None
    fsdp_manual_registration: bool = False


@on_ranks(2)
def test_its_config_is_taken_for_ours() -> None:
    config = TheirConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    for make in (
        lambda: fe.DistributedDataParallel(None, config, Small()),
        lambda: fe.DistributedDataParallel(config=None, ddp_config=config, module=Small()),
        lambda: fe.DistributedDataParallel(Small(), config),
    ):
        ddp = make()
        assert ddp.engine.strategy.inner.name == "optim"
        assert ddp.ddp_config.overlap_grad_reduce
        assert ddp.bucket_size == 40_000_000
    config.fsdp_manual_registration = True
    model = Small()
    with pytest.raises(ValueError, match=r"ddp_config\.fsdp_manual_registration: expected its def"):
        fe.DistributedDataParallel(None, config, model)
    config.fsdp_manual_registration = False
    config.bucket_size = 0
    with pytest.raises(ValueError, match="bucket_size: expected 1 or more"):
        fe.DistributedDataParallel(None, config, model)
    config.bucket_size = None
    with pytest.raises(TypeError, match="ddp_config: expected a DistributedDataParallelConfig"):
        fe.DistributedDataParallel(config=None, ddp_config={}, module=model)
    for name, supported, value in [
        ("gradient_accumulation_fusion", False, True),
        ("gtp_weight_remat_size", 1, 2),
        ("expert_gtp_weight_remat_size", 1, 2),
        ("flextron", False, True),
    ]:
        with pytest.raises(ValueError, match=rf"config\.{name}: expected {supported}, .* {value}"):
            fe.DistributedDataParallel(SimpleNamespace(**{name: value}), config, model)
    ddp = fe.DistributedDataParallel(
        None, config, model, disable_bucketing=True, full_param_layout=object()
    )
    assert ddp.bucket_size is None
    assert ddp.buffers + ddp.expert_parallel_buffers == []
    ddp.stop_communication()


@on_ranks(4)
def test_groups_are_those_of_the_collection() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = SimpleNamespace(
        dp=mesh.get_group("dp"), dp_cp=mesh.get_group("dp"), tp=mesh.get_group("tp")
    )
    torch.manual_seed(dist.get_rank())  # rank 0 of each group decides
    model = Small()
    model.first.bias.sequence_parallel = True
    ddp = fe.DistributedDataParallel(
        SimpleNamespace(sequence_parallel=True), TheirConfig(), model, pg_collection=groups
    )
    assert ddp.engine.mesh.size == 2
    assert ddp.tp_group is groups.tp
    grads = []
    for given in ({"pg_collection": groups}, {}, None):
        ddp.zero_grad_buffer()
        torch.manual_seed(dist.get_rank())
        ddp(torch.randn(2, 5)).backward()
        if given is None:
            ddp.finish_grad_sync()
        else:
            fe.finalize_model_grads([ddp], None, **given)
        grads.append([param.grad.clone() for param in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    both = grads[2][names.index("first.bias")].clone()
    dist.all_reduce(both, group=groups.tp)
    for found in grads[:2]:
        for name, grad, alone in zip(names, found, grads[2], strict=True):
            assert torch.allclose(grad, both if name == "first.bias" else alone), name
    # Marks count where the model's config says so.
    ddp.config.sequence_parallel = False
    ddp.zero_grad_buffer()
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(2, 5)).backward()
    fe.finalize_model_grads([ddp], None, groups)
    assert all(map(torch.equal, [param.grad for param in model.parameters()], grads[2]))
    with pytest.raises(ValueError, match="groups, pg_collection: expected one of them"):
        fe.finalize_model_grads([ddp], None, groups, groups=fe.ModelParallelGroups())
    with pytest.raises(ValueError, match="pg_collection: expected a ProcessGroup in dp_cp or dp"):
        fe.DistributedDataParallel(
            None, TheirConfig(), Small(), pg_collection=SimpleNamespace(tp=groups.tp)
        )


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_its_helpers_take_the_wrapper_for_its_own(level: str) -> None:
    case = Case(level=level, bf16=True)
    with model_parallel(case):
        from megatron.core import distributed, utils
        from megatron.core.transformer.module import Float16Module

        theirs: Any = distributed
        config, models = make_models(case)
        half = Float16Module(config, models[0])
        ddp = wrap(case, True, config, half)
        assert isinstance(ddp, fe.DistributedDataParallel)
        assert isinstance(ddp, theirs.DistributedDataParallel)
        assert type(ddp) is fe.DistributedDataParallel
        assert utils.unwrap_model([ddp]) == [models[0]]
        assert utils.unwrap_model(ddp) is models[0]
        assert utils.check_param_hashes_across_dp_replicas([ddp], cross_check=True)
        inner = wrap(case, True, config, make_models(case)[1][0])
        assert utils.unwrap_model(Float16Module(config, inner)) is inner.module


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("is_around", [False, True])
def test_a_float16_module_around_or_within_the_wrapper_loads(level: str, is_around: bool) -> None:
    case = Case(level=level, bf16=True, bucket_size=300)
    with model_parallel(case):
        from megatron.core.transformer.module import Float16Module

        def make(bucket_size: int) -> tuple[Any, fe.DistributedDataParallel]:
            config, models = make_models(case)
            other = dataclasses.replace(case, bucket_size=bucket_size)
            if is_around:
                ddp = wrap(other, True, config, models[0])
                return Float16Module(config, ddp), ddp
            ddp = wrap(other, True, config, Float16Module(config, models[0]))
            return ddp, ddp

        (first, mine), (second, theirs) = make(300), make(5000)  # slices of another layout
        with torch.no_grad():
            for param in first.parameters():
                param.add_(0.25)
        values = mine.engine.full_state_dict()
        for state in (
            first.state_dict(),
            first.state_dict_for_save_checkpoint(),
            {name: value for name, value in values.items() if isinstance(value, Tensor)},
        ):
            with torch.no_grad():
                for param in second.parameters():
                    param.zero_()
            second.load_state_dict(state, strict=False)
            for name, value in theirs.engine.full_state_dict().items():
                assert not isinstance(value, Tensor) or torch.equal(value, values[name]), name


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_an_unwrapped_float16_module_saves_full_weights_for_the_optimizer(
    level: str,
) -> None:
    case = Case(level=level, bf16=True)
    with model_parallel(case):
        from megatron.core import utils
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.module import Float16Module

        config, models = make_models(case)
        ddp = wrap(case, True, config, Float16Module(config, models[0]))
        assert isinstance(ddp, fe.DistributedDataParallel)
        options = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16)
        optimizer = get_megatron_optimizer(options, [ddp])
        values = ddp.engine.full_state_dict()
        for module in (utils.unwrap_model(ddp), ddp.module, ddp):
            state = module.sharded_state_dict()
            for name, value in values.items():
                assert not isinstance(value, Tensor) or torch.equal(state[name].data, value), name
            found = optimizer.sharded_state_dict({"model": state})
            assert found


def save_and_load(case: Case, folder: str) -> list[str]:
    """Save by its ``dist_checkpointing`` and load into another model. Returns names of tensors that
    differ."""
    # Its writer has a child, which the pool's daemons may not have.
    may_have_children = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)
    with may_have_children, model_parallel(case):
        from megatron.core import dist_checkpointing

        first, second = wrapped(case), wrapped(case)
        with torch.no_grad():
            for param in first.parameters():
                param.add_(0.25)
        dist_checkpointing.save(first.module.sharded_state_dict(), folder)
        before = second.engine.full_state_dict()
        second.load_state_dict(dist_checkpointing.load(second.sharded_state_dict(), folder))
        mine, theirs = first.engine.full_state_dict(), second.engine.full_state_dict()
        tokens = torch.arange(8)[None]
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        outputs = [ddp(tokens, tokens, mask, labels=tokens) for ddp in (first, second)]
        assert torch.equal(*outputs)
        values = {name: value for name, value in mine.items() if isinstance(value, Tensor)}
        assert values
        return [
            name
            for name, value in values.items()
            if not torch.equal(value, theirs[name]) or torch.equal(value, before[name])
        ]


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_its_checkpoints_contain_full_weights(
    ranks: Ranks, tmp_path: Path, level: str, bf16: bool
) -> None:
    found = ranks.run(save_and_load, Case(level=level, bf16=bf16), str(tmp_path), world_size=2)
    assert found == [[], []]
