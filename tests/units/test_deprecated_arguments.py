"""Arguments of earlier versions of ``fe.shard`` warn, and select the same options as new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.codecs import CastCodec
from fsdp_engine.deprecated_arguments import current_arguments, replaced
from tests.pool import on_ranks

Config = fe.DistributedDataParallelConfig


def rows(name: str, param: torch.Tensor) -> int:
    return 1


def rule(name: str, param: torch.Tensor, dtypes: Any) -> Any:
    return "other", lambda: CastCodec(dtypes.main, dtypes.compute)


@pytest.mark.parametrize(
    ("given", "expected", "replacement"),
    [
        *(
            ({name: value}, {"options": fe.Options(**{name: value})}, f"fe.Options({name}=...)")
            for name, value in (("granule", rows), ("min_unit_size", 0))
        ),
        *(
            ({name: value}, {"extensions": [extension]}, f"fe.{type(extension).__name__}")
            for name, value, extension in (
                ("codec_rules", [fe.Float8("row")], fe.Float8("row")),
                ("codec_rules", [rule], fe.CodecRules((rule,))),
                ("checkpointing", True, fe.Recompute()),
                ("checkpointing", "selective", fe.Recompute("selective")),
                ("checkpointing", "offload", fe.OffloadActivations()),
                ("offload", fe.Offload("host"), fe.Offload("host")),
            )
        ),
        (
            {"config": Config(num_buckets=2, check_for_nan_in_grad=True)},
            {"options": fe.Options(num_buckets=2), "extensions": [fe.GradientChecks()]},
            "fsdp_engine.megatron",
        ),
        (
            {"config": Config(grad_reduce_in_fp32=True, use_distributed_optimizer=True)},
            {
                "strategy": "optim",
                "outer_strategy": "no_shard",
                "options": fe.Options(),
                "mp_policy": fe.MixedPrecisionPolicy(
                    main_grads_dtype=torch.float32,
                    reduce_dtype=torch.float32,
                    grad_comm_dtype=torch.float32,
                ),
            },
            "strategy=",
        ),
        (
            {"config": Config(fp8_param_gather=True), "codec_rules": [fe.Float8("row")]},
            {"options": fe.Options(), "extensions": [fe.Float8("row")]},
            "fe.Float8",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_argument_warns_and_is_replaced(
    given: dict[str, Any], expected: dict[str, Any], replacement: str
) -> None:
    with pytest.warns(DeprecationWarning, match="= is deprecated and will be removed") as caught:
        found = current_arguments({"strategy": None}, given, "shard()")
    assert any(replacement in str(each.message) for each in caught)
    assert len(caught) == len(given)
    default = {"strategy": None, "extensions": [], "mp_policy": found.get("mp_policy")}
    default = default if "mp_policy" in found else {"strategy": None, "extensions": []}
    assert found == {**default, **expected}


@pytest.mark.filterwarnings("error")
def test_arguments_that_select_nothing_do_not_warn() -> None:
    given = {"config": None, "codec_rules": (), "checkpointing": False, "offload": None}
    assert current_arguments({}, given, "shard()") == {"extensions": []}
    assert replaced({"units": "layers.*"}, "shard()") == {"units": "layers.*"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrong_values_are_refused() -> None:
    for given, kind, message in (
        ({"layers": 3}, TypeError, r"shard\(\) got an unexpected keyword argument 'layers'"),
        ({"device_ids": [0]}, TypeError, "argument 'device_ids'; leave it out, it is not needed"),
        ({"level": "optim"}, TypeError, r"argument 'level'; use strategy="),
        ({"config": {}}, TypeError, "config: expected a DistributedDataParallelConfig"),
        ({"offload": "host"}, TypeError, "offload: expected an fe.Offload or None; found 'host'"),
        ({"checkpointing": "some"}, ValueError, "checkpointing: expected True, False"),
        ({"plan": object()}, ValueError, 'strategy: expected "auto" beside plan=; found None'),
    ):
        with pytest.raises(kind, match=message):
            current_arguments({}, given, "shard()")
    with pytest.raises(ValueError, match="config: expected None beside options; found both"):
        current_arguments({"options": fe.Options()}, {"config": Config()}, "shard()")
    many = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances: expected 1"):
        replaced({"config": many}, "simulate()")


def test_the_old_name_of_recompute_has_its_order_of_arguments() -> None:
    with pytest.warns(DeprecationWarning, match=r"use fsdp_engine\.Recompute"):
        found = fe.Checkpointing(2, "selective")
    assert (found.every, found.policy) == (2, "selective")
    assert isinstance(found, fe.Recompute)


@on_ranks(world_size=2)
def test_shard_warns_at_the_line_of_its_caller() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        engine = fe.shard(nn.Linear(4, 4), min_unit_size=0, checkpointing=True)
    assert {each.filename for each in caught} == {__file__}
    assert engine.options == fe.Options(min_unit_size=0)
    with pytest.raises(TypeError, match=r"shard\(\) got an unexpected keyword argument 'layers'"):
        fe.shard(nn.Linear(4, 4), layers=3)
    with pytest.raises(TypeError, match=r"within DistributedDataParallel.* Pass model.module"):
        fe.shard(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
