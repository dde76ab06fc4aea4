"""An actor and a critic: two engines, one optimizer, one checkpoint."""

from __future__ import annotations

import copy
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
from tests.models import Chain, Mlp, vector_batch
from tests.pool import on_few_ranks, on_ranks


def make_models() -> dict[str, nn.Module]:
    """Some parameters have the same names and shapes, so the models' names must distinguish
    them."""
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


@on_ranks(2)
def test_one_optimizer_trains_two_engines_as_it_trains_two_modules() -> None:
    alone = make_models()
    train(alone, make_optimizer(alone), seed=0)
    for level in LEVELS:
        models, _ = sharded(level, "optim_grads_params")
        train(models, make_optimizer(models), seed=0)
        for role, model in models.items():
            reference.assert_same_weights(model, alone[role])


@on_ranks(2)
def test_a_critic_passes_gradients_on_to_a_method_of_its_generator() -> None:
    generator, critic = Chain(Mlp(), Mlp()), Chain(Mlp())
    alone = copy.deepcopy((generator, critic))
    fe.shard(generator)
    fe.shard(critic, strategy="optim")
    fe.register_forward_method(generator, "predict")
    x, y = vector_batch(3, seed=4)
    for first, second in ((generator, critic), alone):
        second(first.predict(x), y).backward()
    for model, plain in zip((generator, critic), alone, strict=True):
        gradients = reference.full_gradients(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, rtol=2e-5, atol=2e-6)


@on_few_ranks
def test_two_engines_come_back_from_one_checkpoint() -> None:
    folder = shared_folder()
    models, engines, optimizer = trained()
    expected = everything(models, optimizer)
    checkpointer = fe.Checkpointer(folder, engines, optimizer)
    fe.save_checkpoint(f"{folder}/plain", engines, optimizer, {"step": 2})
    checkpointer.save_async(2)
    checkpointer.wait()
    train(models, optimizer, seed=10)
    gone_on = everything(models, optimizer)

    manifest: dict[str, Any] = json.loads((Path(folder) / "step-00000002" / MANIFEST).read_text())
    assert manifest["strategy"]["inner"] == "optim_grads_params, optim"
    again, others = sharded("no_shard", "optim_grads_params")
    fresh = make_optimizer(again, order=-1)
    renamed = {"player": others["actor"], "critic": others["critic"]}
    with pytest.raises(ValueError, match=r"missing model\.player\.0\.weight"):
        fe.load_checkpoint(f"{folder}/plain", renamed)
    assert fe.load_checkpoint(f"{folder}/plain", others, fresh) == {"step": 2}
    assert [n for n, v in everything(again, fresh).items() if not torch.equal(v, expected[n])] == []
    train(again, fresh, seed=5)
    assert fe.Checkpointer(folder, others, fresh).load().step == 2
    found = everything(again, fresh)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    train(again, fresh, seed=10)
    for name, value in everything(again, fresh).items():
        torch.testing.assert_close(value, gone_on[name], msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_what_is_not_engines_by_name_with_their_optimizer_is_refused() -> None:
    models, engines = sharded("optim", "optim")
    actor, critic = engines.values()
    folder = shared_folder()
    other = fe.shard(nn.Linear(2, 2), DeviceMesh("cpu", [dist.get_rank()]))
    for given, kind, words in (
        ({"actor": actor.model}, TypeError, r"engine\['actor'\]: expected.*found a Sequential"),
        ({"an.actor": actor}, ValueError, r"expected names without a dot; found 'an\.actor'"),
        ({"actor": actor, "critic": actor}, ValueError, "each engine under one name"),
        ({}, ValueError, "expected at least one engine.*; found none"),
        ({"critic": critic, "other": other}, ValueError, "expected engines of the same ranks"),
    ):
        with pytest.raises(kind, match=words):
            fe.Checkpointer(folder, given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected parameters of the sharded model"):
        fe.Checkpointer(folder, actor, make_optimizer(models)).save(1)


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
    """Default arguments share modules: ``def __init__(self, activation=nn.Tanh())``."""
    shared = nn.Tanh()
    for level in LEVELS:
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        one, other, plain = (
            nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared) for _ in range(3)
        )
        engine = fe.shard(one, strategy=level, options=fe.Options(min_unit_size=0))
        other_engine = fe.shard(
            other, strategy=level, mp_policy=policy, options=fe.Options(min_unit_size=0)
        )
        plain.load_state_dict(engine.full_state_dict())
        x = torch.randn(3, 4)
        assert torch.equal(one(x), plain(x))
        assert other(x).dtype == torch.bfloat16
        one(x).sum().backward()
        assert torch.equal(one(x), plain(x))
        with engine.unsharded(shared, one[2]), pytest.raises(ValueError, match="not part of it"):
            other_engine.unsharded(one[2]).__enter__()
        with pytest.raises(ValueError, match="found 0, which another engine has sharded"):
            fe.shard(nn.Sequential(one[2], nn.Linear(4, 4)))
