"""Values that ``DistributedDataParallelConfig`` accepts, and older keywords beside it."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.megatron.configs import Config, Layers, config_of
from tests.pool import on_ranks
from tests.training import mesh_of

INNER, OUTER = "data_parallel_sharding_strategy", "outer_dp_sharding_strategy"
INSTANCES, DISTRIBUTED = "num_distributed_optimizer_instances", "use_distributed_optimizer"
# The fields that are False by default.
FALSE = re.findall(
    r"\w+",
    """grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather
    use_distributed_optimizer check_for_nan_in_grad check_for_large_grads
    pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation average_in_collective
    fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp
    keep_fp8_transpose_cache nccl_ub fsdp_double_buffer disable_symmetric_registration
    delay_wgrad_compute""",
)
TRUE = ["gradient_reduce_div_fusion", "preserve_fp32_weights"]
NONE = ["bucket_size", "num_buckets", "suggested_communication_unit_size"]
DEFAULTS = {
    **dict.fromkeys(FALSE, False),
    **dict.fromkeys(TRUE, True),
    **dict.fromkeys(NONE),
    **dict.fromkeys((INNER, OUTER), "no_shard"),
    INSTANCES: 1,
}
COUNTS = dict.fromkeys(NONE, 1) | {"suggested_communication_unit_size": 0, INSTANCES: 1}
FSDP = {"use_megatron_fsdp": True}
LEVEL_LIST = (
    "no_shard (DDP), optim (ZeRO-1), optim_grads (ZeRO-2), optim_grads_params (ZeRO-3, FSDP)"
)

# Kind of error; the name at the start of its text, and words in their order; fields.
REFUSED: list[tuple[type[Exception], tuple[str, ...], dict[str, Any]]] = [
    *(
        (TypeError, (name, "expected True or False", f"found {value!r}"), {name: value})
        for name in FALSE + TRUE
        for value in (1, None, "yes")
    ),
    *(
        (TypeError, (name, f"expected an integer of {least} or more", f"found {value!r}"), fields)
        for name, least in COUNTS.items()
        for value in (1.5, "4", True, *([None] if name == INSTANCES else []))
        for fields in [{name: value}]
    ),
    *(
        (ValueError, (name, f"expected {least} or more", f"found {value}"), {name: value})
        for name, least in COUNTS.items()
        for value in (least - 1, -7)
    ),
    *(
        (ValueError, (name, f"one of {LEVEL_LIST}", f"found {value!r}"), FSDP | {name: value})
        for name in (INNER, OUTER)
        for value in ("zero3", "", "OPTIM", None, 3, ["optim"])
    ),
    # Combinations without a meaning: a field, a field that it requires, other fields.
    *(
        (ValueError, (name, f"expected {other}=True", f"found {other}=False"), {name: True, **more})
        for name, other, more in [
            ("overlap_param_gather", "overlap_grad_reduce", {}),
            ("align_param_gather", "overlap_param_gather", {}),
            ("align_param_gather", "overlap_param_gather", {"overlap_grad_reduce": True}),
            ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", {}),
            ("keep_fp8_transpose_cache", "fp8_param_gather", {}),
            ("disable_symmetric_registration", "nccl_ub", {}),
            ("disable_symmetric_registration", "nccl_ub", {"fsdp_double_buffer": True}),
        ]
    ),
    *(
        (ValueError, (INNER, "expected use_megatron_fsdp=True", level, "False"), {INNER: level})
        for level in list(LEVELS)[1:]
    ),
    *(
        (ValueError, (OUTER, f"at most that of {INNER}={inner!r}", f"found {outer!r}"), fields)
        for inner, outer in itertools.combinations(LEVELS, 2)
        for fields in [FSDP | {INNER: inner, OUTER: outer}]
    ),
    (ValueError, (OUTER, f"{INNER}='no_shard'", "'optim'"), {OUTER: "optim", DISTRIBUTED: True}),
    (
        ValueError,
        ("bucket_size", "num_buckets", "expected at most one", "10 and 3"),
        {"bucket_size": 10, "num_buckets": 3},
    ),
    (
        ValueError,
        ("reduce_scatter_with_fp32_accumulation", "expected grad_reduce_in_fp32=False", "True"),
        {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": True},
    ),
    (
        ValueError,
        (
            INSTANCES,
            f"{DISTRIBUTED}=True",
            "use_megatron_fsdp=True",
            "optim, optim_grads, optim_grads_params",
            "'no_shard'",
        ),
        {INSTANCES: 2},
    ),
    # The named strategy determines the level, not use_distributed_optimizer.
    (ValueError, (INSTANCES, "found level 'no_shard'"), FSDP | {INSTANCES: 2, DISTRIBUTED: True}),
]


def test_a_value_or_combination_without_a_meaning_is_refused() -> None:
    for kind, words, fields in REFUSED:
        with pytest.raises(kind) as caught:
            Config(**fields)
        pattern = ".*".join(map(re.escape, words))
        assert re.search(pattern, str(caught.value)), (fields, str(caught.value))


def test_fields_and_defaults_are_those_of_the_interface() -> None:
    assert {field.name: field.default for field in dataclasses.fields(Config)} == DEFAULTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.asdict(Config()) == DEFAULTS
    assert Config(nccl_ub=True).fsdp_double_buffer


@on_ranks(1)
def test_a_config_may_be_changed_until_an_engine_has_it() -> None:
    config = Config()
    config.bucket_size = 5
    config.use_distributed_optimizer = True
    ddp = fe.DistributedDataParallel(nn.Linear(2, 2), config)
    assert ddp.ddp_config.bucket_size == 5
    config.bucket_size = 7
    assert ddp.ddp_config.bucket_size == 5
    config.overlap_param_gather = True
    with pytest.raises(ValueError, match="overlap_param_gather: expected overlap_grad_reduce"):
        fe.DistributedDataParallel(nn.Linear(2, 2), config)


def test_use_custom_fsdp_warns_and_means_use_megatron_fsdp() -> None:
    with pytest.warns(DeprecationWarning, match="use_megatron_fsdp") as caught:
        old = Config(use_custom_fsdp=True, data_parallel_sharding_strategy="optim_grads")
    assert [each.filename for each in caught] == [__file__]  # the line to change is the user's
    new = Config(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads")
    assert old.level_names == new.level_names == ("optim_grads", "no_shard")
    assert dataclasses.asdict(old) == dataclasses.asdict(new) | {"use_custom_fsdp": True}


def test_levels_are_those_that_the_fields_name() -> None:
    both = {"use_distributed_optimizer": True, **FSDP}
    deep = {INNER: "optim_grads_params", OUTER: "optim"}
    for fields, names, named in (
        ({}, ("no_shard", "no_shard"), False),
        ({"use_distributed_optimizer": True}, ("optim", "no_shard"), True),
        (FSDP, ("no_shard", "no_shard"), True),
        # A named strategy decides alone.
        (both | deep, ("optim_grads_params", "optim"), True),
        (both, ("no_shard", "no_shard"), True),
    ):
        config = Config(**fields)  # type: ignore[arg-type]
        assert (config.level_names, config.names_strategy) == (names, named)


def test_the_class_has_its_old_places() -> None:
    module = importlib.import_module("fsdp_engine.config")
    assert module.DistributedDataParallelConfig is fe.DistributedDataParallelConfig
    with pytest.raises(AttributeError, match="has no attribute 'Timing'"):
        module.Timing  # noqa: B018


@pytest.mark.parametrize("name", ["main_grads_dtype", "reduce_dtype", "grad_comm_dtype"])
def test_a_policy_that_reduces_in_bf16_contradicts_grad_reduce_in_fp32(name: str) -> None:
    policy = fe.MixedPrecisionPolicy(**{name: torch.bfloat16})
    with pytest.raises(ValueError, match=rf"grad_reduce_in_fp32, {name}.*float32.*bfloat16"):
        Config(grad_reduce_in_fp32=True).applied_to(policy)
    agreeing = fe.MixedPrecisionPolicy(**{name: torch.float32})
    applied = Config(grad_reduce_in_fp32=True).applied_to(agreeing)
    dtypes = {applied.main_grads_dtype, applied.reduce_dtype, applied.grad_comm_dtype}
    assert dtypes == {torch.float32}


def test_a_policy_with_main_weights_of_their_own_contradicts_preserve_fp32_weights() -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"preserve_fp32_weights, main_params_dtype.*float32"):
        Config(preserve_fp32_weights=False).applied_to(policy)
    fields = {"param_dtype": torch.bfloat16, "main_params_dtype": torch.bfloat16}
    applied = Config(preserve_fp32_weights=False).applied_to(fe.MixedPrecisionPolicy(**fields))
    assert not applied.preserve_fp32_weights


# On ranks: the wrapper's keywords, meshes, and shard().


def linear() -> nn.Module:
    return nn.Linear(3, 3)


OLDER = {
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
    "overlap_grad_reduce": ("overlap_grad_reduce", True),
    "use_distributed_optimizer": ("use_distributed_optimizer", True),
    "check_for_nan_in_grad": ("check_for_nan_in_grad", True),
    "bucket_size": ("bucket_size", 12),
}


@on_ranks(2)
def test_older_keywords_set_their_fields_and_may_not_contradict_the_config() -> None:
    wrap = fe.DistributedDataParallel
    for keyword, (field, value) in OLDER.items():
        expected = Config(**{field: value})
        for ddp in (
            wrap(linear(), **{keyword: value}),
            wrap(linear(), expected, **{keyword: value}),
        ):
            assert ddp.ddp_config == expected, keyword
            assert ddp.engine.options == expected.to_options(), keyword
        model = linear()
        message = rf"{keyword}: expected {DEFAULTS[field]!r}.*{field}.*found {value!r}"
        with pytest.raises(ValueError, match=message):
            wrap(model, Config(), **{keyword: value})
        assert type(model.weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"overlap_grad_reduce: expected True.*found False"):
        wrap(linear(), Config(overlap_grad_reduce=True), overlap_grad_reduce=False)
    expected = Config(**dict(OLDER.values()))
    together = {keyword: value for keyword, (_, value) in OLDER.items()}
    assert wrap(linear(), **together).ddp_config == expected
    # None is what an older call passes for "not given".
    nothing = dict.fromkeys([*OLDER, "data_parallel_group"])
    assert wrap(linear(), **nothing).ddp_config == Config()
    assert wrap(linear(), expected, **nothing).ddp_config == expected


@on_ranks(2)
def test_wrong_arguments_are_refused_before_the_module_is_changed() -> None:
    wrap, shard, model = fe.DistributedDataParallel, fe.shard, linear()
    in_fp32 = Config(grad_reduce_in_fp32=True)
    in_bf16 = fe.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    cut, distributed = config_of("optim_grads"), Config(use_distributed_optimizer=True)
    level = {"strategy": "no_shard"}
    known, said = (
        "data_parallel_group, accumulate.*bucket_size; found gro",
        "strategy: expected None",
    )
    rows: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "grad_reduce_in_fp32, red", wrap, {"config": in_fp32, "mp_policy": in_bf16}),
        (TypeError, known, wrap, {"group": None}),
        (TypeError, "config: expected a DistributedData", wrap, {"config": {"bucket_size": 3}}),
        (TypeError, "expected a ProcessGroup; found 'dp'", wrap, {"data_parallel_group": "dp"}),
        (ValueError, f"^{said}, or 'optim_grads'.*'no_sh", shard, level | {"config": cut}),
        (ValueError, f"^{said}, or 'optim'.*'no_shard'", shard, level | {"config": distributed}),
        (ValueError, f"outer_{said}.*'op", shard, {"outer_strategy": "optim", "config": cut}),
    ]
    for kind, words, make, given in rows:
        with pytest.raises(kind, match=words):
            make(model, **given)
    with pytest.raises(TypeError, match=r"module|model: expected a torch.nn.Module"):
        wrap(3)  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter
    engine = shard(model, strategy="optim_grads", config=cut)
    assert engine.strategy.inner.name == "optim_grads"


@on_ranks(4)
def test_instances_that_do_not_divide_the_ranks_are_refused_on_all_of_them() -> None:
    model, mesh = linear(), mesh_of(2, 2)
    for number in (3, 5, 8):
        config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=number)
        message = rf"{INSTANCES}: expected a divisor of the 4 .*; found {number}"
        with pytest.raises(ValueError, match=message):
            fe.DistributedDataParallel(model, config)
        with pytest.raises(ValueError, match=message):
            fe.shard(model, config=config)
        with pytest.raises(ValueError, match=rf"expected the outer size of the mesh, 2.*{number}"):
            fe.DistributedDataParallel(model, config, mesh)
    assert type(model.weight) is nn.Parameter


@on_ranks(4)
def test_a_data_parallel_group_stands_for_an_axis_over_its_ranks() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = pairs[rank % 2]
    model = Layers(4, 2)
    config = Config(use_distributed_optimizer=True)
    ddp = fe.DistributedDataParallel(model, config, data_parallel_group=group)
    mesh = ddp.engine.mesh
    assert mesh.device_mesh.mesh.tolist() == [[0, 2], [1, 3]][rank % 2]
    assert (mesh.outer.size, mesh.inner.size, mesh.inner.rank) == (1, 2, rank // 2)
    with pytest.raises(ValueError, match="data_parallel_group, mesh: expected one of them"):
        fe.DistributedDataParallel(
            linear(), mesh=init_device_mesh("cpu", (4,)), data_parallel_group=group
        )


@on_ranks(4)
def test_shard_takes_the_levels_that_the_config_names() -> None:
    engine = fe.shard(linear(), mesh_of(2, 2), config=config_of("optim_grads_params", "optim"))
    levels = engine.strategy
    assert (levels.inner.name, levels.outer.name) == ("optim_grads_params", "optim")
    assert engine.buffers[0].layout.num_shards == 4
    engine = fe.shard(linear(), config=Config(use_distributed_optimizer=True))
    assert (engine.strategy.inner.name, engine.mesh.inner.size) == ("optim", 4)
    # Without a level in the config, the argument determines it; the default is the highest level.
    assert fe.shard(linear(), config=Config()).strategy.inner.name == "optim_grads_params"
    assert fe.shard(linear(), strategy="optim", config=Config()).strategy.inner.name == "optim"
