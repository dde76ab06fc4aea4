"""``fe.EMA``: averages of sharded weights equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint import cli
from fsdp_engine.comm.agreement import agree
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.models import DIM, Chain, Normalised, lora_model, odd_model, vector_batch
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.reference import full_weights

DECAY = 0.75
BF16 = torch.bfloat16
OFFLOADS = (
    fe.Offload("host"),
    fe.Offload("host", main_weights="host", gradients="host", step_on="host"),
)
# By name: arguments of shard, and of the average.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no_shard": ({"strategy": "no_shard"}, {}),
    "optim": ({"strategy": "optim"}, {}),
    "optim_grads_params": ({"strategy": "optim_grads_params"}, {"warmup": True}),
    "bf16 compute weights": (
        {"strategy": "optim", "mp_policy": fe.MixedPrecisionPolicy(param_dtype=BF16)},
        {"every": 2},
    ),
    "bf16 main weights": (
        {
            "strategy": "optim_grads_params",
            "mp_policy": fe.MixedPrecisionPolicy(main_params_dtype=BF16, param_dtype=BF16),
        },
        {},
    ),
    "averages in bf16": ({"strategy": "optim_grads"}, {"dtype": BF16}),
    **{
        f"offloaded, stepped on the {offload.step_on}": (
            {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=BF16), "extensions": [offload]},
            {},
        )
        for offload in OFFLOADS
    },
}


def build(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """A model, its engine and its optimizer."""
    torch.manual_seed(1)
    model = make()
    engine = fe.shard(model, **arguments)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    return model, engine, optimizer


def statistics() -> nn.Module:
    """A model with running statistics."""
    return Chain(Normalised())


def batch(seed: int, width: int = 7) -> tuple[Tensor, Tensor]:
    return vector_batch(2, seed, width)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, width: int = 7) -> None:
    model(*batch(seed, width)).backward()
    optimizer.step()
    optimizer.zero_grad()


def averages(ema: fe.EMA) -> dict[str, Tensor]:
    """Full averages by the names of parameters."""
    return {name: reference.full(each) for name, each in ema.state_dict()["shadow"].items()}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Full main weights of trainable parameters."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    weights = full_weights(model)
    return {name: weights[name].clone() for name in names}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_averages_follow_the_formula_and_stand_in_for_the_weights(way: str) -> None:
    arguments, options = WAYS[way]
    model, engine, optimizer = build(odd_model, arguments)
    ema = fe.EMA(engine, DECAY, **options)
    assert engine.memory_bytes()["ema"] > 0
    dtype = options.get("dtype", torch.float32)
    expected = {name: weight.to(dtype) for name, weight in trained(model).items()}
    updates = 0
    for number in range(4):
        step(model, optimizer, number)
        ema.update()
        if (number + 1) % options.get("every", 1):
            continue
        decay = min(DECAY, (1 + updates) / (10 + updates)) if "warmup" in options else DECAY
        updates += 1
        for name, weight in trained(model).items():
            same = weight.dtype == dtype
            torch.lerp(expected[name], weight, 1 - decay, out=expected[name]) if same else (
                expected[name].mul_(decay).add_(weight, alpha=1 - decay)
            )
    assert ema.num_updates == updates
    found, before = averages(ema), trained(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        loss = model(*batch(50))
        with ema.swapped():
            for name, weight in trained(model).items():
                torch.testing.assert_close(weight, found[name].to(weight.dtype), rtol=0, atol=0)
            assert model(*batch(50)) != loss
        with pytest.raises(KeyError), ema.swapped():
            raise KeyError
        assert model(*batch(50)) == loss
    # The model has its trained weights again, and the averages are as before.
    torch.testing.assert_close(trained(model), before, rtol=0, atol=0)
    torch.testing.assert_close(averages(ema), found, rtol=0, atol=0)
    # ``tests/checkpoint/test_extra.py`` loads such a state on other ranks and levels.
    again = fe.EMA(engine, DECAY, **options)
    again.load_state_dict(ema.state_dict())
    torch.testing.assert_close(averages(again), found, rtol=0, atol=0)
    assert again.num_updates == updates
    step(model, optimizer, 9)
    del ema, again
    assert "ema" not in engine.memory_bytes()


@on_few_ranks
def test_frozen_weights_have_no_average_and_buffers_have_one_on_request() -> None:
    model, engine, _ = build(lora_model, {})
    assert averages(fe.EMA(engine)).keys() == trained(model).keys()
    model, engine, optimizer = build(statistics, {})
    plain, ema = fe.EMA(engine, DECAY), fe.EMA(engine, DECAY, average_buffers=True)
    mean = dict(model.named_buffers())["blocks.0.norm.running_mean"]
    expected = mean.clone()
    for number in range(3):
        step(model, optimizer, number, DIM)
        ema.update()
        expected.lerp_(mean, 1 - DECAY)
    current = mean.clone()
    with plain.swapped():
        torch.testing.assert_close(mean, current, rtol=0, atol=0)
    with ema.swapped():
        torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(mean, current, rtol=0, atol=0)


@on_ranks(1)
def test_averages_of_buffers_in_16_bits_approach_the_buffers() -> None:
    model = nn.BatchNorm1d(DIM).to(BF16)
    mean = model.running_mean
    assert mean is not None
    ema = fe.EMA(fe.shard(model), 0.99, average_buffers=True)
    expected = torch.zeros(DIM)
    for _ in range(300):
        mean.copy_(torch.ones(DIM))
        ema.update()
        expected.lerp_(torch.ones(DIM), 0.01)
    with ema.swapped():
        assert torch.equal(mean, expected.to(BF16))
        mean[0] = 3.0
    torch.testing.assert_close(ema.state_dict()["buffers"]["running_mean"][1:], expected[1:])
    assert ema.state_dict()["buffers"]["running_mean"][0] == 3
    assert torch.equal(mean, torch.ones(DIM, dtype=BF16))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads_params"])
@on_ranks(2)
def test_averages_of_torchs_averaged_model_continue(level: str) -> None:
    alone = statistics()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    averaged = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for number in range(6):
        if number == 3:
            weights, given = copy.deepcopy((alone.state_dict(), values_of(averaged.module)))
        step(alone, optimizer, number, DIM)
        averaged.update_parameters(alone)
    model = statistics()
    engine = fe.shard(model, strategy=level, initial_values="rank0")
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = fe.EMA(engine, DECAY, average_buffers=True)
    state = ema.state_dict()
    for kind in ("shadow", "buffers"):
        state[kind] = {name: given[name] for name in state[kind]}
    ema.load_state_dict(state)
    for number in range(3, 6):
        step(model, optimizer, number, DIM)
        ema.update()
    expected = values_of(averaged.module)
    for name, average in {**averages(ema), **ema.state_dict()["buffers"]}.items():
        torch.testing.assert_close(average, expected[name])


@on_ranks(2)
def test_averages_begin_as_torchs_averaged_model_begins_them_on_request() -> None:
    alone = statistics()
    averaged = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    model = statistics()
    model.load_state_dict(alone.state_dict())
    engine = fe.shard(model, initial_values="rank0")
    alone.load_state_dict(engine.full_state_dict())
    ema = fe.EMA(engine, DECAY, copy_first=True)
    for each, update in ((alone, partial(averaged.update_parameters, alone)), (model, ema.update)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for number in range(3):
            step(each, optimizer, number, DIM)
            update()
            if number == 0 and each is model:
                again = fe.EMA(engine, DECAY, copy_first=True)
                again.load_state_dict(ema.state_dict())
                ema = again
                update = ema.update
    expected = dict(averaged.module.named_parameters())
    for name, average in averages(ema).items():
        torch.testing.assert_close(average, expected[name].detach())


@on_ranks(2)
def test_a_rank_that_enters_the_context_alone_is_told_so() -> None:
    for level in ("optim", "optim_grads_params"):
        _, engine, _ = build(odd_model, {"strategy": level})
        ema = fe.EMA(engine)
        other = partial(agree, "evaluation", None, engine.ranks.control_group)
        call: Callable[[], Any] = ema.swapped().__enter__ if dist.get_rank() == 0 else other
        with pytest.raises(RuntimeError, match=r"rank 0 in EMA\.swapped\(\), rank 1 in evaluation"):
            call()


@on_ranks(2)
def test_averages_are_swapped_outside_of_unsharded_only() -> None:
    for level in LEVELS:
        model, engine, optimizer = build(odd_model, {"strategy": level})
        ema = fe.EMA(engine, DECAY)
        step(model, optimizer, 0)
        ema.update()
        with ema.swapped():
            expected = engine.full_state_dict()
        with ema.swapped(), engine.unsharded():
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected[name]), (level, name)
        trained = engine.full_state_dict()
        assert any(not torch.equal(value, expected[name]) for name, value in trained.items())
        if level == "no_shard":
            continue
        with engine.unsharded():
            for what, call in (("swapped", ema.swapped().__enter__), ("update", ema.update)):
                with pytest.raises(RuntimeError, match=rf"EMA\.{what}\(\): expected .* sharded;"):
                    call()
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, trained[name])


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_loads_of_weights_are_refused_while_the_model_has_the_averages(level: str) -> None:
    model, engine, optimizer = build(odd_model, {"strategy": level})
    ema = fe.EMA(engine, DECAY)
    folder = shared_folder()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    checkpointer.save(1)
    fe.export_safetensors(engine, f"{folder}/weights")
    step(model, optimizer, 0)
    ema.update()
    before = trained(model)
    momenta = [reference.full(each["exp_avg"]).clone() for each in optimizer.state.values()]
    state = engine.full_state_dict()
    with ema.swapped():
        for load in (
            checkpointer.load,
            partial(model.load_state_dict, state),
            partial(fe.load_safetensors, engine, f"{folder}/weights"),
        ):
            with pytest.raises(RuntimeError, match=r"load of weights: expected the trained weigh"):
                load()
    assert all(torch.equal(value, before[name]) for name, value in trained(model).items())
    for values, momentum in zip(optimizer.state.values(), momenta, strict=True):
        assert torch.equal(reference.full(values["exp_avg"]), momentum)
    checkpointer.load()
    checkpointer.close()


def tied() -> nn.Module:
    """A model with running statistics, a frozen parameter and a tied weight."""
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
    model["c"].weight, model["norm"] = model["a"].weight, nn.BatchNorm1d(6)
    model["b"].weight.requires_grad_(False)
    return model


def save_with_averages(folder: str, level: str) -> None:
    torch.manual_seed(1)
    policy = fe.MixedPrecisionPolicy(main_params_dtype=BF16)
    engine = fe.shard(model := tied(), strategy=level, mp_policy=policy)
    ema = fe.EMA(engine, DECAY, average_buffers=True)
    with torch.no_grad():
        for value in (*model.parameters(), model["norm"].running_mean):
            value.mul_(1.5).add_(1)
    ema.update()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    fe.Checkpointer(folder, engine, extra={"ema": ema, "other": other}).save(1)
    with ema.swapped():
        fe.export_safetensors(engine, f"{folder}/expected")
    with pytest.raises(ValueError, match=r"averages: expected None for an engine; found 'ema'"):
        fe.export_safetensors(engine, f"{folder}/expected", averages="ema")


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_averages_are_exported_from_a_checkpoint(ranks: Ranks, tmp_path: Path, level: str) -> None:
    ranks.run(save_with_averages, str(tmp_path / "run"), level, world_size=2)

    def export(*options: str, code: int = 0) -> str:
        command = ["export", str(tmp_path / "run"), str(tmp_path / "out"), *options]
        found = CliRunner().invoke(cli.app, command, catch_exceptions=False)
        assert found.exit_code == code, found.output
        return found.output

    assert "also has averages: --averages ema writes them" in export()
    expected = load_file(tmp_path / "run" / "expected" / "model.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    differing = {name for name in expected if not torch.equal(expected[name], weights[name])}
    biases = {f"{name}.bias" for name in ("a", "b", "c", "norm")}
    assert differing == {"a.weight", "norm.weight", "norm.running_mean", *biases}
    assert "also has" not in export("--averages", "ema")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "found 'mean', and the names there: 'ema', 'other'" in export(
        "--averages", "mean", code=2
    )
    assert "found no tensors at 'other'" in export("--averages", "other", code=2)
    export("--averages", "ema.shadow")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in expected if not torch.equal(found[name], expected[name])} == {
        "norm.running_mean"
    }


class State(dict[str, Any]):
    state_dict, load_state_dict = dict.copy, dict.update


def save_with_other_tensors(folder: str, kind: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    engine = fe.shard(model, initial_values="rank0")
    shadow = fe.EMA(engine).state_dict()["shadow"]
    extra = {
        "two": {"fast": shadow, "slow": {"b.weight": torch.zeros(4, 4)}},
        "unknown": {"b.weight": shadow["b.weight"], "module.a.weight": torch.zeros(4, 4)},
        "shape": {"b.weight": torch.zeros(4)},
        "dtype": {"b.weight": torch.zeros(4, 4, dtype=torch.complex64)},
        "alias": {"c.weight": torch.full((4, 4), 7.0)},
    }[kind]
    fe.Checkpointer(folder, engine, extra={"m.a": State(extra), "sharded": State(shadow)}).save(1)


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "two": r"found m\.a\.fast\.b\.weight and m\.a\.slow\.b\.weight for b\.weight",
        "unknown": r"found m\.a\.module\.a\.weight, and no tensor module\.a\.weight of the model",
        "shape": r"expected shape \(4, 4\), float32 for b\.weight.*found shape \(4,\)",
        "dtype": "found .*complex64 at m.a.b.weight",
        "alias": "",
    }.items(),
)
def test_averages_are_not_guessed(ranks: Ranks, tmp_path: Path, kind: str, message: str) -> None:
    ranks.run(save_with_other_tensors, str(tmp_path / "run"), kind, world_size=2)
    (folder,) = (tmp_path / "run").glob("step-*")
    if not message:
        fe.export_safetensors(folder, tmp_path / "out", averages="m.a")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(found["a.weight"], torch.full((4, 4), 7.0))
        return
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fe.export_safetensors(folder, tmp_path / "out", averages="m.a")
    command = ["export", str(folder), str(tmp_path / "trained")]
    output = CliRunner().invoke(cli.app, command, catch_exceptions=False).output
    assert "also has averages: --averages sharded writes them" in output
    fe.export_safetensors(
        folder, tmp_path / "out", averages="m.a.fast" if kind == "two" else "sharded"
    )


@on_ranks(2)
def test_bad_arguments_and_calls_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Ema'\. Did you mean: 'EMA'\?"):
        fe.Ema  # noqa: B018
    model, engine, optimizer = build(odd_model, {})
    for call, error, words in (
        (lambda: fe.EMA(model), TypeError, "engine: expected the result of fe.shard"),
        (lambda: fe.EMA(engine, 1.0), ValueError, "decay: expected.*below 1; found 1.0"),
        (lambda: fe.EMA(engine, "0.9"), ValueError, "decay: expected.*found '0.9'"),
        (lambda: fe.EMA(engine, every=0), ValueError, "every: expected.*at least 1; found 0"),
        (lambda: fe.EMA(engine, dtype=torch.int8), TypeError, "dtype: expected.*torch.int8"),
    ):
        with pytest.raises(error, match=words):
            call()
    ema = fe.EMA(engine)
    state = ema.state_dict()
    name = next(iter(state["shadow"]))
    missing = {**state, "shadow": {k: v for k, v in state["shadow"].items() if k != name}}
    longer = {**state, "shadow": {**state["shadow"], name: torch.zeros(99)}}
    for given, words in (
        (missing, f"'{name}' is missing"),
        ({"shadow": {}}, "is missing"),
        (longer, rf"{name}: expected shape \(.*found \(99,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            ema.load_state_dict(given)
    of_batch_norm = fe.shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    pair = [fe.EMA(of_batch_norm, average_buffers=each) for each in (False, True)]
    for mine, other in (pair, pair[::-1]):
        words = f"expected average_buffers={other is pair[1]}.*found.*={mine is pair[1]}"
        with pytest.raises(ValueError, match=words):
            mine.load_state_dict(other.state_dict())
    model(*batch(0)).backward()
    with ema.swapped():
        for inside in (
            *(ema.update, ema.state_dict, optimizer.step, ema.swapped().__enter__),
            lambda: optimizer.step(lambda: 0.0),
        ):
            with pytest.raises(RuntimeError, match=r"within EMA\.swapped\(\)"):
                inside()
    optimizer.step()
    ema.update()


@on_ranks(2)
def test_buffers_that_are_broadcast_within_the_context_stay_so() -> None:
    model, engine, optimizer = build(statistics, {})
    ema = fe.EMA(engine, DECAY, average_buffers=True)
    step(model, optimizer, dist.get_rank(), DIM)
    ema.update()
    own = {name: each.clone() for name, each in model.named_buffers()}
    with ema.swapped():
        for each in model.buffers():
            dist.broadcast(each, 0)
    for name, each in model.named_buffers():
        if each.is_floating_point():
            assert torch.equal(each, own[name])
    for each in ema.state_dict()["buffers"].values():
        first = each.clone()
        dist.broadcast(first, 0)
        assert torch.equal(each, first)


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_a_backward_is_of_the_trained_weights(level: str) -> None:
    """A backward within the context raises. After it, backwards of earlier forwards are right."""
    model, engine, optimizer = build(odd_model, {"strategy": level})
    ema = fe.EMA(engine, DECAY)
    step(model, optimizer, 1)
    ema.update()
    step(model, optimizer, 2)
    model(*batch(3)).backward()
    expected = [reference.full(each.grad) for each in model.parameters() if each.grad is not None]
    optimizer.zero_grad()
    loss = model(*batch(3))
    with ema.swapped(), torch.no_grad():
        model(*batch(4))
    loss.backward()
    found = [reference.full(each.grad) for each in model.parameters() if each.grad is not None]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    optimizer.zero_grad()
    with ema.swapped():
        loss = model(*batch(3))
        with pytest.raises(RuntimeError, match=r"backward: expected the trained weights"):
            loss.backward()
    engine.reset()
