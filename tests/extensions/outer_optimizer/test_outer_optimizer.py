"""``fe.OuterOptimizer``: replicas that exchange weights train as those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from tests import reference
from tests.extensions.outer_optimizer.replica import Replica, simulated
from tests.extensions.outer_optimizer.simulation import batch_of, make_model
from tests.pool import Ranks, on_ranks
from tests.reference import full_weights
from tests.training import mesh_of

STEPS = 10
# By name: arguments of the extension, which `simulated` translates for the simulation.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3},
    "every step": {"every": 1},
    "delayed": {"every": 3, "delay": 2},
    "fragments": {"every": 3, "fragments": 2},
    "units, delayed, mixed": {"every": 5, "fragments": "units", "delay": 3, "alpha": 0.25},
    "more fragments than steps": {"every": 2, "fragments": 4, "delay": 1},
    "another outer optimizer": {
        "every": 3,
        "delay": 1,
        "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    },
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_replicas_train_as_those_of_one_process(way: str) -> None:
    shape = (4, 1) if way in ("plain", "fragments") else (2, 2)
    run, expected = Replica(shape, WAYS[way]), simulated(shape, WAYS[way])
    for steps in (4, STEPS - 4):
        run.train(steps)
        run.check(expected.run(steps))
    expected.synchronize()
    run.outer.synchronize(run.engine)
    run.check(expected.weights())
    # And on from there.
    run.train(4)
    run.check(expected.run(4))


DELAYED = {"every": 3, "delay": 1, "fragments": 2}
BF16 = torch.bfloat16
# By name: the level, arguments of shard, of the extension and of the replica, and the tolerance.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "no_shard": ("no_shard", {}, {}, 2e-5),
    "optim": ("optim", {}, {}, 2e-5),
    "optim_grads": ("optim_grads", {}, {}, 2e-5),
    "outer weights on the host": ("optim_grads_params", {}, {"on_host": True}, 2e-5),
    "offloaded": (
        "optim_grads_params",
        {
            "extensions": [
                fe.Offload("host", main_weights="host", gradients="host", step_on="host")
            ],
            "wrap": fe.shard_optimizer,
        },
        {},
        2e-5,
    ),
    "on a disk": (
        "optim_grads_params",
        {"wrap": fe.shard_optimizer},
        {},
        2e-5,
    ),
    "offloaded, bf16": (
        "optim",
        {
            "extensions": [fe.Offload("host")],
            "wrap": fe.shard_optimizer,
            "mp_policy": fe.MixedPrecisionPolicy(param_dtype=BF16),
        },
        {},
        3e-2,
    ),
    "bf16 main weights": (
        "optim_grads",
        {"mp_policy": fe.MixedPrecisionPolicy(main_params_dtype=BF16, param_dtype=BF16)},
        {},
        6e-2,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_every_level_and_home(kind: str, tmp_path: Path) -> None:
    strategy, arguments, options, tolerance = KINDS[kind]
    if kind == "on a disk":
        offload = fe.Offload("disk", main_weights="disk", folder=tmp_path)
        arguments = {**arguments, "extensions": [offload]}
    run = Replica((2, 2), {**DELAYED, **options}, strategy, **arguments)
    run.train(STEPS)
    run.check(simulated((2, 2), DELAYED).run(STEPS), tolerance)
    places = ("device", "host")
    held = {place: run.engine.memory_bytes(place).get("outer weights", 0) for place in places}
    on_host = bool(options) or kind == "on a disk"  # on a CPU, an offload to the host does nothing
    assert bool(held["host"]) == on_host
    assert bool(held["device"]) != on_host


@on_ranks(4)
def test_an_optimizer_of_whole_tensors_is_within() -> None:
    muon = partial(torch.optim.Muon, lr=0.02)

    def make(params: Any) -> torch.optim.Optimizer:
        return muon([each for each in params if each.ndim == 2])

    run = Replica((2, 2), DELAYED, make_inner=make, wrap=fe.shard_optimizer)
    run.train(STEPS)
    # The inner optimizer computes in bf16, which enlarges differences from the order of sums.
    run.check(simulated((2, 2), DELAYED, make_inner=make).run(STEPS), 2e-3)


def saved(folder: Path, run: Replica, replica: int | None = None) -> fe.Checkpointer:
    number = run.place[0] if replica is None else replica
    return fe.Checkpointer(
        folder / f"replica{number}",
        run.engine,
        run.optimizer,
        extra={"outer": run.outer.state(run.engine)},
    )


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_runs_resume_on_other_ranks_while_an_exchange_runs(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    way = {
        "every": 5,
        "delay": 2,
        "fragments": 2,
        "optimizer": WAYS["another outer optimizer"]["optimizer"],
    }
    ranks.run(save_in_an_exchange, str(tmp_path), way, strategy, world_size=4)
    ranks.run(resume_on_one_rank, str(tmp_path), way, world_size=2)


def save_in_an_exchange(folder: str, way: dict[str, Any], strategy: str) -> None:
    run = Replica((2, 2), way, strategy)
    run.train(6)
    exchanges = [each.exchange is not None for each in run.outer.state(run.engine).fragments]
    assert any(exchanges)
    saved(Path(folder), run).save(6)


def resume_on_one_rank(folder: str, way: dict[str, Any]) -> None:
    run = Replica((2, 1), way, "optim")
    saved(Path(folder), run).load()
    run.count = 6
    # The batches of two inner ranks, on one.
    for step in range(6, 12):
        for inner in range(2):
            with run.engine.no_sync() if not inner else nullcontext():
                (run.model(*batch_of(step, run.place[0], inner)) / 2).backward()
        run.engine.clip_grad_norm_(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.outer.step(run.engine)
    run.check(simulated((2, 2), way).run(12))


def test_another_number_of_replicas_starts_from_the_outer_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    way = {**DELAYED, "every": 5, "delay": 2}
    ranks.run(save_in_an_exchange, str(tmp_path), way, "optim_grads_params", world_size=4)
    ranks.run(start_with_three, str(tmp_path), way, world_size=3)


def start_with_three(folder: str, way: dict[str, Any]) -> None:
    run = Replica((3, 1), way)
    saved(Path(folder), run, run.place[0] % 2).load()
    with pytest.raises(RuntimeError, match=r"found the state of 2 replicas.*restart"):
        run.model(*batch_of(6, *run.place)).backward()
    run.engine.reset()
    run.outer.restart(run.engine)
    before = simulated((2, 2), way)
    before.run(6)
    shared = {name: value.detach() for name, value in before.shared.items()}
    run.check([shared] * 3)
    run.count = 6
    run.train(3)
    run.outer.synchronize(run.engine)
    for value in full_weights(run.model).values():
        values = [torch.empty_like(value) for _ in range(3)]
        dist.all_gather(values, value)
        assert all(torch.equal(values[0], each) for each in values)


@on_ranks(1)
def test_one_replica_of_one_rank_moves_by_the_outer_optimizer() -> None:
    outer = fe.OuterOptimizer(every=2, delay=1)
    model = make_model()
    engine = fe.shard(model, extensions=[outer])
    optimizer = reference.adamw(model.parameters())
    expected = simulated((1, 1), {"every": 2, "delay": 1})
    for step in range(5):
        model(*batch_of(step, 0, 0)).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        outer.step(engine)
    weights = expected.run(5)[0]
    for name, value in full_weights(model).items():
        torch.testing.assert_close(value, weights[name], rtol=2e-5, atol=2e-5)
    assert outer.replica(engine) == 0
    assert len(outer.optimizers(engine)) == 1


@on_ranks(2)
def test_a_step_without_an_exchange_is_an_error() -> None:
    run = Replica((2, 1), {"every": 3})
    with pytest.raises(RuntimeError, match="expected a backward before the first step"):
        run.outer.step(run.engine)
    with pytest.raises(ValueError, match="with this OuterOptimizer in extensions"):
        fe.OuterOptimizer(every=4).step(run.engine)
    empty = run.outer.state(run.engine).state_dict()
    assert empty["count"] == 0
    run.outer.state(run.engine).load_state_dict(empty)
    run.train(1)
    run.model(*batch_of(1, *run.place)).backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"AdamW.step: expected OuterOptimizer.step"):
        run.optimizer.step()
    run.outer.step(run.engine)
    run.optimizer.step()
    run.outer.step(run.engine)
    own, shared = full_weights(run.model), run.outer.state(run.engine).state_dict()["weights"]
    with run.outer.swapped(run.engine):
        for name, value in full_weights(run.model).items():
            assert torch.equal(value, reference.full(shared[name]))
        loss = run.model(*batch_of(5, 0, 0))
        for call in (
            loss.backward,
            run.optimizer.step,
            lambda: run.outer.step(run.engine),
            run.outer.state(run.engine).state_dict,
        ):
            with pytest.raises(RuntimeError, match="found outer weights"):
                call()
        run.engine.reset()
    torch.testing.assert_close(full_weights(run.model), own, rtol=0, atol=0)
    run.train(2)
    other = fe.shard(make_model(), mesh_of(2, 1))
    with pytest.raises(ValueError, match="with this OuterOptimizer in extensions"):
        run.outer.step(other)


@on_ranks(4)
def test_replicas_that_start_with_other_weights_are_an_error_on_all_ranks() -> None:
    run = Replica((2, 2), {"every": 3})
    last = list(run.model.parameters())[-1]
    before = full_weights(run.model)

    def scale(factor: float) -> None:
        if run.place == (1, 1):  # the rank that has the last elements
            last.local.mul_(factor)  # type: ignore[attr-defined]

    with torch.no_grad():
        scale(2)
        with pytest.raises(ValueError, match=r"same outer weights.*replicas 0 and 1.*blocks\."):
            run.outer.synchronize(run.engine)
    with pytest.raises(ValueError, match=r"same outer weights.*replicas 0 and 1.*blocks\."):
        run.train(1)
    run.engine.reset()
    with torch.no_grad():
        scale(0.5)
    run.train(1)
    assert not torch.equal(full_weights(run.model)["blocks.3.turned"], before["blocks.3.turned"])


def _row_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


def _of_others(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))])


def _by_rank(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 * (1 + dist.get_rank()))


# By name: arguments of the extension on rank 0 and on rank 1, of shard, and the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "an outer level": ({}, {}, {"outer_strategy": "optim"}, r'outer_strategy: expected "no_shard"'),
    "other arguments": ({"every": 3}, {"every": 4}, {}, "every=4"),
    "too many fragments": ({"fragments": 5}, {"fragments": 5}, {}, r"at most 4.*found 5"),
    "whole tensors": (
        {"optimizer": _row_optimizer},
        {"optimizer": _row_optimizer},
        {},
        "optimizer: expected an elementwise one",
    ),
    "no optimizer": ({"optimizer": list}, {"optimizer": list}, {}, "it made a list"),
    "of other parameters": (
        {"optimizer": _of_others},
        {"optimizer": _of_others},
        {},
        "over the parameters that the function was given",
    ),
    "other numbers": ({"optimizer": _by_rank}, {"optimizer": _by_rank}, {}, "same model"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_has_no_meaning_is_refused_on_all_ranks(case: str) -> None:
    *both, others, words = REFUSED[case]
    outer = fe.OuterOptimizer(**{"every": 3, **both[dist.get_rank()]})
    model = make_model()
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=words):
        fe.shard(model, (2, 1), extensions=[outer], **others)
    assert all(type(each) is nn.Parameter for each in model.parameters())
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


@on_ranks(2)
def test_replicas_must_have_one_model_and_all_have_the_extension() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 3 + rank))
    with pytest.raises(ValueError, match=r"same model.*found different ones on ranks 0 and 1"):
        fe.shard(model, (2, 1), extensions=[fe.OuterOptimizer(every=3)])
    extensions = [fe.OuterOptimizer(every=3)] if rank else []
    with pytest.raises(ValueError, match="OuterOptimizer"):
        fe.shard(make_model(), (2, 1), extensions=extensions)
    with pytest.raises((ValueError, RuntimeError), match="units"):
        fe.shard(
            make_model(),
            (2, 1),
            units="nothing.*" if rank else None,
            extensions=[fe.OuterOptimizer(every=3)],
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every: expected an integer of at least 1; found 0"),
        ({"every": True}, "every: expected"),
        ({"every": 3, "delay": 3}, "delay: expected less than every=3"),
        ({"every": 3, "delay": -1}, "delay: expected"),
        ({"every": 3, "bits": 2}, "bits: expected 8, 4 or None; found 2"),
        ({"every": 3, "fragments": "blocks"}, "fragments: expected"),
        ({"every": 3, "fragments": 0}, "fragments: expected"),
        ({"every": 3, "alpha": 1.5}, r"alpha: expected a number in \[0, 1\]; found 1.5"),
        ({"every": 3, "bits": 8.0}, "bits: expected 8, 4 or None; found 8.0"),
        ({"every": 3, "on_host": "yes"}, "on_host: expected a bool; found 'yes'"),
        ({"every": 3, "optimizer": 0.7}, "optimizer: expected a function"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        fe.OuterOptimizer(**given)


@on_ranks(2)
def test_replicas_with_permuted_or_later_loaded_weights() -> None:
    """Permuted weights raise although their sum is equal. Loads before the first step are used."""
    run = Replica((2, 1), {"every": 3})
    state = make_model().state_dict()
    with torch.no_grad():
        state["blocks.0.first.weight"].fill_(0)[0] = 1
        run.model.load_state_dict(state)
    run.model(*batch_of(0, *run.place)).backward()
    run.optimizer.zero_grad()
    if run.place[0]:
        state["blocks.0.first.weight"] = state["blocks.0.first.weight"].flip(0)
    run.model.load_state_dict(state)
    with pytest.raises(ValueError, match=r"same outer weights.*blocks\.0\."):
        run.train(1)
    run.engine.reset()
    run.model.load_state_dict(make_model().state_dict())
    run.count = 0
    run.train(4)
    run.check(simulated((2, 1), {"every": 3}).run(4))


@on_ranks(2)
def test_replicas_at_other_steps_or_with_other_outer_optimizers_are_an_error() -> None:
    run = Replica((2, 1), {"every": 5})
    run.train(2)
    if run.place[0]:
        run.outer.step(run.engine)
    with pytest.raises(ValueError, match=r"replica 0 after step 2 and replica 1 after step 3"):
        run.outer.synchronize(run.engine)
    if not run.place[0]:
        run.outer.step(run.engine)
    (optimizer,) = run.outer.optimizers(run.engine)
    optimizer.param_groups[0]["lr"] = 0.5 + 0.1 * run.place[0]
    with pytest.raises(ValueError, match=r"same outer optimizer.*'lr': 0.6.*replica 1"):
        run.outer.synchronize(run.engine)
    optimizer.param_groups[0]["lr"] = 0.5
    run.outer.synchronize(run.engine)


@on_ranks(2)
def test_a_state_has_hyperparameters_and_the_last_exchange() -> None:
    run = Replica((2, 1), {"every": 2})
    run.train(1)
    (optimizer,) = run.outer.optimizers(run.engine)
    optimizer.param_groups[0]["lr"] = 0.25
    run.train(1)
    state, weights = run.outer.state(run.engine).state_dict(), full_weights(run.model)
    saved = {**state, "weights": {k: reference.full(v) for k, v in state["weights"].items()}}
    saved["optimizer"] = {
        key: {k: reference.full(v) for k, v in values.items()}
        for key, values in state["optimizer"].items()
    }
    again = Replica((2, 1), {"every": 2})
    again.model.load_state_dict(weights)
    again.outer.state(again.engine).load_state_dict(saved)
    again.outer.synchronize(again.engine)  # nothing has moved since the last exchange
    torch.testing.assert_close(full_weights(again.model), weights, rtol=0, atol=0)
    assert again.outer.optimizers(again.engine)[0].param_groups[0]["lr"] == 0.25
    other = Replica((2, 1), {"every": 2, "optimizer": partial(torch.optim.AdamW, lr=0.1)})
    before = full_weights(other.model)
    first = next(iter(saved["weights"]))
    for change, words in (
        ({}, "expected state of the outer optimizer AdamW; found state of SGD"),
        ({"count": "x"}, "expected 'count' of type int; found a str"),
        ({"weights": {**saved["weights"], first: [1]}}, f"{first}: expected shape"),
        ({"weights": {first: saved["weights"][first]}}, "is missing"),
        ({"fragments": []}, "in a fragment; found it in none"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            other.outer.state(other.engine).load_state_dict({**saved, **change})
    missing = {"momentum_buffer": {first: saved["optimizer"]["momentum_buffer"][first]}}
    with pytest.raises(ValueError, match="expected momentum_buffer of"):
        again.outer.state(again.engine).load_state_dict({**saved, "optimizer": missing})
    torch.testing.assert_close(full_weights(other.model), before, rtol=0, atol=0)
    with (
        pytest.warns(UserWarning, match=r"the state of replica 1; found the state of replica 0")
        if (run.place[0])
        else nullcontext()
    ):
        again.outer.state(again.engine).load_state_dict({**saved, "replica": 0})


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_a_parameter_that_is_frozen_later_keeps_its_outer_weights(strategy: str) -> None:
    run = Replica((2, 1), {"every": 2}, strategy)
    run.train(2)
    name = "blocks.1.turned"
    kept = full_weights(run.model)
    dict(run.model.named_parameters())[name].requires_grad_(False)
    run.train(4)
    found = full_weights(run.model)
    assert torch.equal(found[name], kept[name])
    assert not torch.equal(found["blocks.0.turned"], kept["blocks.0.turned"])


@on_ranks(2)
def test_steps_that_only_make_state_or_have_closures() -> None:
    run = Replica((2, 1), {"every": 3})
    run.optimizer.step()  # as torch.distributed.checkpoint does to make state
    run.train(1)
    run.optimizer.step()
    run.outer.state(run.engine).load_state_dict(run.outer.state(run.engine).state_dict())
    run.train(1)  # no error: loading the state ended the inner step

    def closure() -> Any:
        run.optimizer.zero_grad()
        loss = run.model(*batch_of(9, *run.place))
        loss.backward()
        return loss

    run.optimizer.step(closure)
    with pytest.raises(RuntimeError, match="found two steps without it"):
        run.optimizer.step(closure)


@on_ranks(2)
def test_weights_that_change_before_backward_are_an_error_where_autograd_sees_it() -> None:
    run = Replica((2, 1), {"every": 1}, "no_shard")
    run.train(1)
    loss = run.model(*batch_of(1, *run.place))
    run.outer.step(run.engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.engine.reset()
