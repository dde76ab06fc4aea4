"""Scripts of torchtitan's pattern train with this engine's face as with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine import fsdp2
from fsdp_engine.fsdp2.root_module import inputs_on
from tests.fsdp2.programs import APIS, Log, adamw, parallelize, sgd, train
from tests.fsdp2.scene import both, on_meta, seeded
from tests.pool import on_ranks


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@on_ranks(2)
def test_trains_as_fsdp2(make_optimizer: Any) -> None:
    def script(api: Any) -> Log:
        model = parallelize(api, seeded())
        return train(model, make_optimizer(model.parameters()), range(4))

    both(script)


@pytest.mark.parametrize("steps_in_between", [False, True], ids=["each", "synced"])
@on_ranks(2)
def test_accumulates_as_fsdp2(steps_in_between: bool) -> None:
    """Microbatches that are all reduced, or the last one alone."""

    def sync(model: Any, index: int, is_last: bool) -> None:
        if steps_in_between:
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last)

    def script(api: Any) -> Log:
        model = parallelize(api, seeded())
        optimizer = sgd(model.parameters())
        return train(model, optimizer, range(3), num_microbatches=3, before=sync)

    both(script)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
        {"reduce_dtype": torch.bfloat16},
    ],
    ids=["param", "reduce in fp32", "output", "reduce"],
)
@on_ranks(2)
def test_mixed_precision_is_fsdp2s(dtypes: dict[str, torch.dtype]) -> None:
    def script(api: Any) -> Log:
        model = parallelize(api, seeded(), mp_policy=api.MixedPrecisionPolicy(**dtypes))
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        optimizer = sgd(model.parameters())
        found = model(torch.zeros(2, 6, dtype=torch.int64))
        assert found.dtype == dtypes.get("output_dtype", dtypes.get("param_dtype", torch.float32))
        log = train(model, optimizer, range(3), num_microbatches=2)
        log.weights = {}
        return log

    logs = [script(api) for api in APIS.values()]
    torch.testing.assert_close(logs[0].losses, logs[1].losses, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(logs[0].norms, logs[1].norms, rtol=2e-2, atol=2e-3)


@on_ranks(2)
def test_bf16_parameters_remain_bf16() -> None:
    """Main weights have the parameter's dtype, sums ``reduce_dtype``."""

    def script(api: Any) -> Log:
        policy = api.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model = parallelize(api, seeded().to(torch.bfloat16), mp_policy=policy)
        log = train(model, sgd(model.parameters()), range(3))
        assert {each.dtype for each in model.state_dict().values()} == {torch.bfloat16}
        log.weights = {}
        return log

    logs = [script(api) for api in APIS.values()]
    torch.testing.assert_close(logs[0].losses, logs[1].losses, rtol=1e-2, atol=1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("all_reduces", [True, False])
@on_ranks(4)
def test_hsdp_trains_as_fsdp2(all_reduces: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def sync(model: Any, index: int, is_last: bool) -> None:
        if not all_reduces:
            model.set_requires_all_reduce(is_last)

    def script(api: Any) -> Log:
        model = parallelize(api, seeded(), mesh)
        optimizer = adamw(model.parameters())
        return train(model, optimizer, range(3), num_microbatches=2, before=sync)

    both(script)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@on_ranks(2)
def test_every_level_trains_as_fsdp2(strategy: str) -> None:
    reference = parallelize(fsdp, seeded())
    log = train(reference, sgd(reference.parameters()), range(3), num_microbatches=2)
    model = parallelize(fsdp2, seeded(), strategy=strategy)
    own = train(model, sgd(model.parameters()), range(3), num_microbatches=2)
    assert log == own


@on_ranks(2)
def test_meta_models_get_values_afterwards() -> None:
    """``to_empty`` and ``init_weights``: the values are those of a model that is not sharded."""
    model = parallelize(fsdp2, on_meta())
    assert all(each.is_meta for each in model.parameters())
    with pytest.raises(RuntimeError, match=r"embeddings\.weight.*to_empty"):
        model(torch.zeros(2, 6, dtype=torch.int64))
    model.to_empty(device="cpu")
    optimizer = sgd(model.parameters())
    torch.manual_seed(3)
    model.init_weights()
    own = train(model, optimizer, range(3))
    reference = parallelize(fsdp, seeded())
    assert train(reference, sgd(reference.parameters()), range(3)) == own


@on_ranks(2)
def test_dtype_changes_before_the_first_forward() -> None:
    def script(api: Any) -> Log:
        model = parallelize(api, seeded()).to(torch.float64)
        assert model.to(torch.float64) is model
        assert {each.dtype for each in model.parameters()} == {torch.float64}
        return train(model, sgd(model.parameters()), range(3))

    both(script)


@on_ranks(2)
def test_several_roots() -> None:
    def script(api: Any) -> Log:
        model = seeded()
        for layer in model.layers.values():
            api.fully_shard(layer)
        api.fully_shard(model.embeddings)
        api.fully_shard(model.head)
        # A norm that is not sharded, equal on all ranks because it is frozen.
        model.norm.requires_grad_(False)
        parameters = [each for each in model.parameters() if each.requires_grad]
        return train(model, sgd(parameters), range(3), max_norm=1e6, num_microbatches=2)

    both(script)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_each_rank_keeps_slices_of_its_own_values(api: str) -> None:
    linear: Any = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight.fill_(dist.get_rank())
    if api == "fsdp2":
        APIS[api].fully_shard(linear)
    else:  # FSDP2 does not warn
        with pytest.warns(UserWarning, match="weight: expected the same initial values"):
            APIS[api].fully_shard(linear)
    assert linear.weight.to_local().unique().tolist() == [dist.get_rank()]


class Sum(nn.Module):
    """Has no parameters."""

    def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x + ys[0] + ys[1] + 1


@on_ranks(2)
def test_a_module_without_parameters() -> None:
    model = fsdp2.fully_shard(Sum())
    x = torch.ones(3)
    torch.testing.assert_close(model(x, (x, x)), torch.full((3,), 4.0))


def test_inputs_are_moved_to_the_parameters_device() -> None:
    x = torch.ones(3)
    args, kwargs = inputs_on(((x, [x]), {"y": (x, 2)}), torch.device("meta"))
    assert [args[0].is_meta, args[1][0].is_meta, kwargs["y"][0].is_meta] == [True] * 3
    inputs = ((x,), {})
    assert inputs_on(inputs, torch.device("cpu")) is inputs


@on_ranks(2)
def test_calls_within_a_meta_device_context() -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (model[0], model):
            fsdp2.fully_shard(module)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), expected(x))
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fe.shard(other)
    assert torch.isfinite(other(x)).all()


@on_ranks(2)
def test_parameters_frozen_before_the_first_forward_and_thawed_later() -> None:
    def script(api: Any) -> list[float]:
        model = parallelize(api, seeded())
        optimizer = sgd(model.parameters())
        model.layers["0"].requires_grad_(False)
        log = train(model, optimizer, range(2))
        model.layers["0"].requires_grad_(True)
        return log.losses + train(model, optimizer, range(2, 4)).losses

    found = {name: script(api) for name, api in APIS.items()}
    torch.testing.assert_close(found["fsdp_engine"], found["fsdp2"], rtol=1e-5, atol=1e-6)
