"""An actor and a critic: two engines, one optimizer, one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.checkpoint.manifest import MANIFEST
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.pool import on_few_ranks, on_ranks


def make_models() -> dict[str, nn.Module]:
    """Of the same names and shapes in part, so that names must tell them apart."""
    torch.manual_seed(0)
    return {
        "actor": nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)),
        "critic": nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
    }


def make_optimizer(models: dict[str, nn.Module], order: int = 1) -> torch.optim.AdamW:
    params = [p for model in models.values() for p in model.parameters()]
    return torch.optim.AdamW(params[::order], lr=0.01)


def loss_of(models: dict[str, nn.Module], x: Tensor) -> Tensor:
    value: Tensor = models["critic"](x)
    gain: Tensor = (models["actor"](x).softmax(-1)[:, :1] * value).mean()
    return value.square().mean() - gain


def train(models: dict[str, nn.Module], optimizer: torch.optim.Optimizer, seed: int) -> None:
    for step in range(2):
        torch.manual_seed(seed + step)
        loss_of(models, torch.randn(6, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(*levels: str) -> tuple[dict[str, nn.Module], dict[str, fe.Engine]]:
    models = make_models()
    return models, {
        name: fe.shard(model, strategy=level)
        for (name, model), level in zip(models.items(), levels, strict=True)
    }


def trained() -> tuple[dict[str, nn.Module], dict[str, fe.Engine], torch.optim.AdamW]:
    models, engines = sharded("optim_grads_params", "optim")
    optimizer = make_optimizer(models)
    train(models, optimizer, seed=0)
    return models, engines, optimizer


def everything(models: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, whole. A collective."""
    found = {}
    for role, model in models.items():
        for name, value in model.state_dict(keep_vars=True).items():
            found[f"{role}.{name}"] = reference.full(value)
            for key, state in optimizer.state.get(value, {}).items():
                found[f"{role}.{name}: {key}"] = reference.full(state)
    return found


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_one_optimizer_trains_two_engines_as_it_trains_two_modules(level: str) -> None:
    alone = make_models()
    models, _ = sharded(level, "optim_grads_params")
    for each in (alone, models):
        train(each, make_optimizer(each), seed=0)
    for role, model in models.items():
        reference.assert_same_weights(model, alone[role])


@on_few_ranks
def test_two_engines_come_back_from_one_checkpoint() -> None:
    folder = shared_folder()
    models, engines, optimizer = trained()
    expected = everything(models, optimizer)
    checkpointer = fe.Checkpointer(folder, engines, optimizer)
    checkpointer.save_async(2)
    checkpointer.wait()
    train(models, optimizer, seed=10)
    gone_on = everything(models, optimizer)

    again, others = sharded("no_shard", "optim_grads_params")
    fresh = make_optimizer(again, order=-1)
    assert fe.Checkpointer(folder, others, fresh).load().step == 2
    found = everything(again, fresh)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    train(again, fresh, seed=10)
    for name, value in everything(again, fresh).items():
        torch.testing.assert_close(value, gone_on[name], msg=lambda m, n=name: f"{n}: {m}")


@on_few_ranks
def test_a_folder_of_two_engines_says_which_entry_is_whose() -> None:
    folder = shared_folder()
    models, engines, optimizer = trained()
    expected = everything(models, optimizer)
    fe.save_checkpoint(folder, engines, optimizer, {"step": 2})
    again, others = sharded("optim", "optim")
    fresh = make_optimizer(again)
    with pytest.raises(ValueError, match=r"missing model\.player\.0\.weight"):
        fe.load_checkpoint(folder, {"player": others["actor"], "critic": others["critic"]})
    assert fe.load_checkpoint(folder, others, fresh) == {"step": 2}
    found = everything(again, fresh)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []

    fe.Checkpointer(f"{folder}/run", engines).save(1)
    manifest: dict[str, Any] = json.loads(
        (Path(folder) / "run/step-00000001" / MANIFEST).read_text()
    )
    assert manifest["strategy"]["inner"] == "optim_grads_params, optim"


@on_few_ranks
def test_an_optimizer_of_two_engines_is_not_saved_with_one() -> None:
    models, engines = sharded("optim", "optim")
    with pytest.raises(ValueError, match="expected parameters of the sharded model"):
        fe.Checkpointer(shared_folder(), engines["actor"], make_optimizer(models)).save(1)


@on_ranks(2)
def test_what_is_not_engines_by_name_is_refused() -> None:
    _, engines = sharded("optim", "optim")
    actor, critic = engines.values()
    folder = shared_folder()
    with pytest.raises(TypeError, match=r"engine\['actor'\]: expected.*found a Sequential"):
        fe.Checkpointer(folder, {"actor": actor.model})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"expected names without a dot; found 'an\.actor'"):
        fe.Checkpointer(folder, {"an.actor": actor})
    with pytest.raises(ValueError, match="each of them once"):
        fe.Checkpointer(folder, {"actor": actor, "critic": actor})
    with pytest.raises(ValueError, match="expected engines, each of them once; found none"):
        fe.Checkpointer(folder, {})
    mine = DeviceMesh("cpu", [dist.get_rank()])
    other = fe.shard(nn.Linear(2, 2), mine)
    with pytest.raises(ValueError, match="expected engines of the same ranks"):
        fe.Checkpointer(folder, {"critic": critic, "other": other})


@on_few_ranks
def test_a_newer_folder_without_manifest_is_not_the_latest_and_said_so() -> None:
    folder = shared_folder()
    _, engines = sharded("optim", "optim")
    checkpointer = fe.Checkpointer(folder, engines)
    checkpointer.save(1)
    checkpointer.save(3)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        (Path(folder) / "step-00000003" / MANIFEST).unlink()
        with pytest.warns(UserWarning, match=r"expected manifest\.json in \['step-00000003'\]"):
            assert checkpointer.load().step == 1
    else:
        assert checkpointer.load().step == 1


@on_few_ranks
def test_models_share_a_module_without_parameters() -> None:
    """As default arguments are shared: ``def __init__(self, activation=nn.Tanh())``."""
    shared = nn.Tanh()
    for level in LEVELS:
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        one, other, plain = (
            nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared) for _ in range(3)
        )
        engine = fe.shard(one, strategy=level, min_unit_size=0)
        other_engine = fe.shard(other, strategy=level, mp_policy=policy, min_unit_size=0)
        plain.load_state_dict(engine.full_state_dict())
        x = torch.randn(3, 4)
        assert torch.equal(one(x), plain(x))
        assert other(x).dtype == torch.bfloat16
        one(x).sum().backward()
        assert torch.equal(one(x), plain(x))
        with engine.unsharded(shared, one[2]), pytest.raises(ValueError, match="not part of it"):
            other_engine.unsharded(one[2]).__enter__()
        with pytest.raises(ValueError, match="found 0 in the hands of another engine"):
            fe.shard(nn.Sequential(one[2], nn.Linear(4, 4)))
