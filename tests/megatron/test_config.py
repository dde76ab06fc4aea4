"""What ``DistributedDataParallelConfig`` accepts, and how older keywords and it meet."""

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
from fsdp_engine.options import Timing
from fsdp_engine.strategies import LEVELS
from tests.megatron.configs import Config, Layers, config_of
from tests.pool import on_ranks

# As section 1 of the interface has them.
DEFAULTS = {
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "bucket_size": None,
    "num_buckets": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "average_in_collective": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "outer_dp_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "preserve_fp32_weights": True,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "disable_symmetric_registration": False,
    "delay_wgrad_compute": False,
}
BOOLS = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]
COUNTS = {
    "num_distributed_optimizer_instances": 1,
    "bucket_size": 1,
    "num_buckets": 1,
    "suggested_communication_unit_size": 0,
}
STRATEGIES = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy")
LEVEL_LIST = "no_shard, optim, optim_grads, optim_grads_params"

# Fields, kind of error, words of its text in their order.
Refused = tuple[dict[str, Any], type[Exception], tuple[str, ...]]


def needs(field: str, other: str, **fields: Any) -> Refused:
    """``field`` is set without the other one that it needs."""
    found = repr(fields.get(other, False))
    return {field: True, **fields}, ValueError, (field, f"expected {other}=True", "found", found)


REFUSED: list[Refused] = [
    *(
        ({name: value}, TypeError, (name, "expected True or False", f"found {value!r}"))
        for name in BOOLS
        for value in (1, None, "yes")
    ),
    *(
        (
            {name: value},
            TypeError,
            (name, f"expected an integer of {least} or more", f"found {value!r}"),
        )
        for name, least in COUNTS.items()
        for value in (1.5, "4", True)
    ),
    (
        {"num_distributed_optimizer_instances": None},
        TypeError,
        ("num_distributed_optimizer_instances", "expected an integer of 1 or more", "found None"),
    ),
    *(
        ({name: value}, ValueError, (name, f"expected {least} or more", f"found {value}"))
        for name, least in COUNTS.items()
        for value in (least - 1, -7)
    ),
    *(
        (
            {"use_megatron_fsdp": True, name: value},
            ValueError,
            (name, f"expected one of {LEVEL_LIST}", f"found {value!r}"),
        )
        for name in STRATEGIES
        for value in ("zero3", "", "OPTIM", None, 3, ["optim"])
    ),
    # Combinations without a meaning.
    needs("overlap_param_gather", "overlap_grad_reduce"),
    needs("align_param_gather", "overlap_param_gather"),
    needs("align_param_gather", "overlap_param_gather", overlap_grad_reduce=True),
    needs("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather"),
    needs("keep_fp8_transpose_cache", "fp8_param_gather"),
    needs("disable_symmetric_registration", "nccl_ub"),
    needs("disable_symmetric_registration", "nccl_ub", fsdp_double_buffer=True),
    (
        {"bucket_size": 10, "num_buckets": 3},
        ValueError,
        ("bucket_size", "num_buckets", "expected at most one", "10 and 3"),
    ),
    (
        {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": True},
        ValueError,
        ("reduce_scatter_with_fp32_accumulation", "expected grad_reduce_in_fp32=False", "True"),
    ),
    *(
        (
            {"data_parallel_sharding_strategy": level},
            ValueError,
            ("data_parallel_sharding_strategy", "expected use_megatron_fsdp=True", level, "False"),
        )
        for level in list(LEVELS)[1:]
    ),
    *(
        (
            {
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": inner,
                "outer_dp_sharding_strategy": outer,
            },
            ValueError,
            (
                "outer_dp_sharding_strategy",
                f"at most that of data_parallel_sharding_strategy={inner!r}",
                f"found {outer!r}",
            ),
        )
        for inner, outer in itertools.combinations(LEVELS, 2)
    ),
    (
        {"outer_dp_sharding_strategy": "optim", "use_distributed_optimizer": True},
        ValueError,
        ("outer_dp_sharding_strategy", "data_parallel_sharding_strategy='no_shard'", "'optim'"),
    ),
    (
        {"num_distributed_optimizer_instances": 2},
        ValueError,
        (
            "num_distributed_optimizer_instances",
            "use_distributed_optimizer=True",
            "use_megatron_fsdp=True",
            "optim, optim_grads, optim_grads_params",
            "found 'no_shard'",
        ),
    ),
    (
        # The named strategy counts, not use_distributed_optimizer.
        {
            "num_distributed_optimizer_instances": 2,
            "use_distributed_optimizer": True,
            "use_megatron_fsdp": True,
        },
        ValueError,
        ("num_distributed_optimizer_instances", "found 'no_shard'"),
    ),
]


def case_name(value: Any) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{name}={each!r}" for name, each in value.items())
    return "" if isinstance(value, (tuple, type)) else None


@pytest.mark.parametrize(("fields", "kind", "words"), REFUSED, ids=case_name)
def test_a_value_or_combination_without_a_meaning_is_refused(
    fields: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        Config(**fields)
    assert re.search(".*".join(map(re.escape, words)), str(caught.value)), str(caught.value)


def test_fields_and_defaults_are_those_of_the_interface() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    assert fields == DEFAULTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.asdict(Config()) == DEFAULTS


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
    dist.destroy_process_group()


def test_combinations_that_fields_need_are_accepted() -> None:
    Config(overlap_grad_reduce=True, overlap_param_gather=True, align_param_gather=True)
    Config(fp8_param_gather=True, keep_fp8_transpose_cache=True)
    Config(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)
    Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    Config(suggested_communication_unit_size=0)
    for inner, outer in itertools.product(LEVELS, LEVELS):
        if LEVELS[outer].value <= LEVELS[inner].value:
            assert config_of(inner, outer).level_names == (inner, outer)


def test_use_custom_fsdp_warns_and_means_use_megatron_fsdp() -> None:
    with pytest.warns(DeprecationWarning, match="use_megatron_fsdp") as caught:
        old = Config(use_custom_fsdp=True, data_parallel_sharding_strategy="optim_grads")
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line to change is the user's
    assert old.use_megatron_fsdp
    new = Config(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads")
    assert dataclasses.replace(new, use_megatron_fsdp=True) == new
    assert old.level_names == new.level_names == ("optim_grads", "no_shard")
    assert dataclasses.asdict(old) == dataclasses.asdict(new) | {"use_custom_fsdp": True}


def test_nccl_ub_implies_fsdp_double_buffer() -> None:
    assert Config(nccl_ub=True).fsdp_double_buffer
    assert Config(nccl_ub=True, disable_symmetric_registration=True).fsdp_double_buffer
    assert not Config().fsdp_double_buffer


@pytest.mark.parametrize(
    ("fields", "names", "named"),
    [
        ({}, ("no_shard", "no_shard"), False),
        ({"use_distributed_optimizer": True}, ("optim", "no_shard"), True),
        ({"use_megatron_fsdp": True}, ("no_shard", "no_shard"), True),
        (
            # A named strategy decides alone.
            {
                "use_distributed_optimizer": True,
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
                "outer_dp_sharding_strategy": "optim",
            },
            ("optim_grads_params", "optim"),
            True,
        ),
        ({"use_distributed_optimizer": True, "use_megatron_fsdp": True}, ("no_shard",) * 2, True),
    ],
    ids=case_name,
)
def test_levels_are_those_that_the_fields_name(
    fields: dict[str, Any], names: tuple[str, str], named: bool
) -> None:
    config = Config(**fields)
    assert config.level_names == names
    assert config.names_strategy is named


def test_fields_are_translated_to_options_of_the_engine() -> None:
    fields: dict[str, tuple[Any, dict[str, Any]]] = {
        "bucket_size": (7, {"bucket_size": 7}),
        "num_buckets": (3, {"num_buckets": 3}),
        "pad_buckets_for_high_nccl_busbw": (True, {"pad_shards": True}),
        "reduce_scatter_with_fp32_accumulation": (True, {"sum_in_fp32": True}),
        "average_in_collective": (True, {"average_in_collective": True}),
        "gradient_reduce_div_fusion": (False, {"scale_while_copying": False}),
        "suggested_communication_unit_size": (5, {"prefetch_window": 5, "staging_limit": 5}),
    }
    for name, (value, options) in fields.items():
        assert Config(**{name: value}).to_options() == fe.Options(**options), name
    assert Config().to_options() == fe.Options()


def test_fields_are_translated_to_extensions() -> None:
    assert Config().to_extensions() == []
    found = Config(check_for_large_grads=True, fp8_param_gather=True).to_extensions()
    assert found == [fe.Float8(), fe.GradientChecks(nan=False, large=True)]
    found = Config(fp8_param_gather=True, keep_fp8_transpose_cache=True).to_extensions()
    assert found == [fe.Float8(), fe.TransformerEngine(keep_transposes=True)]
    for fields, expected in (
        ({"delay_wgrad_compute": True}, fe.LateGradients()),
        ({"fsdp_double_buffer": True}, fe.Arenas()),
        ({"nccl_ub": True}, fe.Arenas(registered=True)),
        (
            {"nccl_ub": True, "disable_symmetric_registration": True},
            fe.Arenas(registered=True, symmetric=False),
        ),
    ):
        assert Config(**fields).to_extensions() == [expected]


def test_fields_of_time_are_translated_to_the_timing() -> None:
    assert Config().timing == Timing(
        reduces_in_backward=False,
        finishes_backward=False,
        gathers_in_forward=False,
        gathers_ahead=True,
    )
    fields = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather")
    assert Config(**dict.fromkeys(fields, True)).timing == Timing(
        finishes_backward=False, gathers_ahead=False
    )


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
    assert (applied.main_grads_dtype, applied.reduce_dtype, applied.grad_comm_dtype) == (
        torch.float32,
    ) * 3


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


@on_ranks(world_size=2)
def test_a_contradicting_policy_is_refused_before_the_module_is_changed() -> None:
    model = linear()
    before = model.weight
    with pytest.raises(ValueError, match="grad_reduce_in_fp32, reduce_dtype"):
        fe.DistributedDataParallel(
            model,
            Config(grad_reduce_in_fp32=True),
            mp_policy=fe.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        )
    assert model.weight is before
    fe.DistributedDataParallel(model)


@on_ranks(world_size=4)
@pytest.mark.parametrize("number", [3, 5, 8])
def test_instances_that_do_not_divide_the_ranks_are_refused_on_all_of_them(number: int) -> None:
    config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=number)
    message = (
        rf"num_distributed_optimizer_instances: expected a divisor of the 4 .*; found {number}"
    )
    for make in (
        lambda model: fe.DistributedDataParallel(model, config),
        lambda model: fe.shard(model, config=config),
    ):
        model = linear()
        with pytest.raises(ValueError, match=message):
            make(model)
        assert type(model.weight) is nn.Parameter
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with pytest.raises(ValueError, match=rf"expected the outer size of the mesh, 2.*{number}"):
        fe.DistributedDataParallel(linear(), config, mesh)


OLDER = {
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
    "overlap_grad_reduce": ("overlap_grad_reduce", True),
    "use_distributed_optimizer": ("use_distributed_optimizer", True),
    "check_for_nan_in_grad": ("check_for_nan_in_grad", True),
    "bucket_size": ("bucket_size", 12),
}


@on_ranks(world_size=2)
def test_each_older_keyword_sets_its_field() -> None:
    for keyword, (field, value) in OLDER.items():
        ddp = fe.DistributedDataParallel(linear(), **{keyword: value})
        assert ddp.ddp_config == Config(**{field: value}), keyword
        assert ddp.engine.options == ddp.ddp_config.to_options(), keyword
    together = {keyword: value for keyword, (_, value) in OLDER.items()}
    expected = Config(**dict(OLDER.values()))
    assert fe.DistributedDataParallel(linear(), **together).ddp_config == expected
    # None is what an older call passes for "not given".
    nothing = dict.fromkeys([*OLDER, "data_parallel_group"])
    assert fe.DistributedDataParallel(linear(), **nothing).ddp_config == Config()
    assert fe.DistributedDataParallel(linear(), expected, **nothing).ddp_config == expected


@on_ranks(world_size=2)
def test_an_older_keyword_that_contradicts_the_config_is_refused() -> None:
    for keyword, (field, value) in OLDER.items():
        agreeing = Config(**{field: value})
        ddp = fe.DistributedDataParallel(linear(), agreeing, **{keyword: value})
        assert ddp.ddp_config == agreeing
        model = linear()
        message = rf"{keyword}: expected {Config().__dict__[field]!r}.*{field}.*found {value!r}"
        with pytest.raises(ValueError, match=message):
            fe.DistributedDataParallel(model, Config(), **{keyword: value})
        assert type(model.weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"overlap_grad_reduce: expected True.*found False"):
        fe.DistributedDataParallel(
            linear(), Config(overlap_grad_reduce=True), overlap_grad_reduce=False
        )


@on_ranks(world_size=2)
def test_an_unknown_keyword_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"data_parallel_group, accumulate.*bucket_size; found gro"):
        fe.DistributedDataParallel(linear(), group=None)
    with pytest.raises(TypeError, match="config: expected a DistributedDataParallelConfig"):
        fe.DistributedDataParallel(linear(), {"bucket_size": 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module|model: expected a torch.nn.Module"):
        fe.DistributedDataParallel(3)  # type: ignore[arg-type]


@on_ranks(world_size=4)
def test_a_data_parallel_group_stands_for_an_axis_over_its_ranks() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = pairs[rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    model = Layers(4, 2)
    config = Config(use_distributed_optimizer=True)
    ddp = fe.DistributedDataParallel(model, config, data_parallel_group=group)
    mesh = ddp.engine.mesh
    assert mesh.device_mesh.mesh.tolist() == [[0, 2], [1, 3]][rank % 2]
    assert (mesh.outer.size, mesh.inner.size, mesh.inner.rank) == (1, 2, rank // 2)
    # Each pair means over its own two ranks: the gradient of a bias of the last layer would be
    # another one if all four took part.
    x = torch.full((1, 4), float(rank + 1))
    ddp(x).backward()
    ddp.finish_grad_sync()
    bias = model.layers[1].bias.grad
    assert bias is not None
    found = bias.full_tensor()  # type: ignore[attr-defined]
    both = [torch.empty(4) for _ in range(2)]
    dist.all_gather(both, found, group=group)
    assert torch.equal(both[0], both[1])
    everyone = [torch.empty(4) for _ in range(4)]
    dist.all_gather(everyone, found)
    assert not torch.allclose(everyone[0], everyone[1])
    with pytest.raises(ValueError, match="data_parallel_group, mesh: expected one of them"):
        fe.DistributedDataParallel(
            linear(), mesh=init_device_mesh("cpu", (4,)), data_parallel_group=group
        )
    with pytest.raises(TypeError, match="data_parallel_group: expected a ProcessGroup; found 'dp'"):
        fe.DistributedDataParallel(linear(), data_parallel_group="dp")


@on_ranks(world_size=2)
def test_shard_refuses_a_level_that_contradicts_the_config() -> None:
    model = linear()
    for config in (config_of("optim_grads"), Config(use_distributed_optimizer=True)):
        said = config.level_names[0]
        with pytest.raises(ValueError, match=rf"strategy: expected None, or '{said}'.*'no_shard'"):
            fe.shard(model, strategy="no_shard", config=config)
    with pytest.raises(ValueError, match=r"outer_strategy: expected None, or 'no_shard'.*'optim'"):
        fe.shard(model, outer_strategy="optim", config=config_of("optim_grads"))
    assert type(model.weight) is nn.Parameter
    engine = fe.shard(model, strategy="optim_grads", config=config_of("optim_grads"))
    assert engine.strategy.inner.name == "optim_grads"


@on_ranks(world_size=4)
def test_shard_takes_the_levels_that_the_config_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    engine = fe.shard(linear(), mesh, config=config_of("optim_grads_params", "optim"))
    levels = engine.strategy
    assert (levels.inner.name, levels.outer.name) == ("optim_grads_params", "optim")
    assert engine.buffers[0].layout.num_shards == 4
    engine = fe.shard(linear(), config=Config(use_distributed_optimizer=True))
    assert (engine.strategy.inner.name, engine.mesh.inner.size) == ("optim", 4)
    # A config that names none leaves it to the arguments, and those to the highest level.
    assert fe.shard(linear(), config=Config()).strategy.inner.name == "optim_grads_params"
    assert fe.shard(linear(), strategy="optim", config=Config()).strategy.inner.name == "optim"
