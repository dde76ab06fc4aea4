"""Optimizers that need whole tensors: each is stepped by its owner."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.whole_tensor_optimizers.owned_step import OwnedStep
from fsdp_engine.extensions.whole_tensor_optimizers.owner_messages import ChunkMessages
from fsdp_engine.optim.shadow import step_hook_of
from fsdp_engine.optim.state_leaves import leaves_of
from tests import reference
from tests.extensions.whole_tensor_optimizers import owned
from tests.pairs import EVERY_PAIR
from tests.pool import Ranks, on_few_ranks, on_ranks

whitening = owned.MAKERS["Whitening"]


def check_training(
    name: str, level: str = owned.CUT, outer: str = "no_shard", mesh: Any = None
) -> owned.Side:
    side = owned.sharded(owned.MAKERS[name], level, outer=outer, mesh=mesh)
    before = owned.values(side.model)
    side.train(*range(4))
    expected = owned.trained(name)
    owned.assert_close(owned.values(side.model), expected, name)
    assert not torch.equal(before[0], expected[0])
    for group in side.optimizer.param_groups:
        assert group.get("num_steps", 4) == 4
    return side


@pytest.mark.parametrize("name", owned.MAKERS)
@on_few_ranks
def test_training_equals_one_process(name: str) -> None:
    for level in ("no_shard", owned.CUT):
        check_training(name, level)


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@pytest.mark.parametrize("name", owned.MAKERS)
@on_ranks(4)
def test_replicas_share_the_work_and_one_rank_steps_each_parameter(
    name: str, inner: str, outer: str
) -> None:
    side = check_training(name, inner, outer, (2, 2))
    if name in ("Muon", "Whitening"):
        held = [bool(side.optimizer.state[p]) for p in owned.params_of(side.optimizer)]
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, held)
        assert [sum(each) for each in zip(*everywhere, strict=True)] == [1] * len(held)
        assert any(held) or name == "Muon", "a rank owns nothing"  # three matrices for four ranks


@on_ranks(2)
def test_descriptions_have_shares_and_measured_memory_has_state() -> None:
    side = owned.sharded(whitening).train(0)
    model, optimizer, engine = side
    text = str(engine.describe())
    assert "Whitening: 0 parameters are stepped on slices, 5 whole, each on one rank" in text
    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in model.parameters()]
    work = [float(rows * columns * min(rows, columns)) for rows, columns in shapes]
    share = sum(
        w for w, p in zip(work, model.parameters(), strict=True) if owned.is_mine(optimizer, p)
    )
    assert f"share of the work of 5 is {2 * share / sum(work):.2f} of the mean of 2 ranks" in text
    leaves = leaves_of(dict(optimizer.state))
    held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    with engine.measure() as measured:
        side.train(1)
    assert 0 < held <= measured.memory["optimizer"]
    del optimizer, side
    assert "stepped on slices" not in str(engine.describe()), "the optimizer is still alive"


@on_ranks(2)
def test_errors_of_one_rank_are_raised_on_all_and_the_next_step_is_taken() -> None:
    side = owned.sharded(whitening).train(0)
    before = owned.values(side.model)
    side.loss(1).backward()
    first = next(side.model.parameters())
    grad = first.grad
    if dist.get_rank() == 1:
        first.grad = None
    with pytest.raises(RuntimeError, match=r"0\.weight: expected a gradient on all ranks, or on n"):
        side.optimizer.step()
    assert all(map(torch.equal, before, owned.values(side.model)))
    first.grad = grad
    side.optimizer.fails = True
    is_owner = bool(side.optimizer.state[side.model[2].weight])
    kind = ZeroDivisionError if is_owner else RuntimeError
    with pytest.raises(kind, match="the step fails" if is_owner else "raised on another rank"):
        side.optimizer.step()
    side.optimizer.fails = False
    side.optimizer.step()
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, is_owner)
    assert sorted(everywhere) == [False, True]


def leave(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]


def move(optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.add_param_group({"params": [moved], "lr": 0.0})


def replace(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups[:] = [dict(second, params=[*second["params"]]), dict(first)]


def merge(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups.remove(first)
    second["params"] = [*second["params"], *first["params"]]


EDITS: dict[str, Callable[[Any], object]] = {
    "left": leave,
    "moved": move,
    "emptied": lambda optimizer: optimizer.param_groups[1]["params"].clear(),
    "removed": lambda optimizer: optimizer.param_groups.pop(0),
    "replaced": replace,
    "merged": merge,
    "swapped": lambda optimizer: optimizer.param_groups[0].update(
        params=optimizer.param_groups[1]["params"], lr=0.5
    ),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("level", owned.LEVELS)
@on_ranks(2)
def test_param_groups_may_be_edited(level: str, edit: str) -> None:
    def maker(model: nn.Module) -> owned.Whitening:
        params = list(model.parameters())
        return owned.Whitening([{"params": params[:3]}, {"params": params[3:], "lr": 0.005}])

    def body(side: owned.Side) -> list[Tensor]:
        params = list(side.model.parameters())
        side.train(0)
        EDITS[edit](side.optimizer)
        side.train(1, 2)
        found = owned.values(side.model)
        del side.optimizer.param_groups[1:]  # removed parameters return with their state
        side.optimizer.param_groups[0]["params"] = params[:3]
        side.optimizer.add_param_group({"params": params[3:]})
        side.train(3)
        packed = side.optimizer.state_dict()["state"]
        leaves = [leaf for index in sorted(packed) for leaf in owned.tensors_of(packed[index])]
        return found + [reference.full(leaf).double() for leaf in leaves]

    owned.assert_alike(body, maker, level)


@on_ranks(2)
def test_parameters_that_are_stepped_at_once_stay_together() -> None:
    model, optimizer, _ = side = owned.sharded(owned.MAKERS["Coupled"])
    params = optimizer.param_groups[0]["params"]
    last = params.pop()
    side.train(0)  # one that left is not stepped
    assert torch.equal(owned.values(model)[-1], owned.values(owned.plain_model())[-1])
    params.append(last)
    extra = nn.Linear(3, 3).double()
    fe.shard(extra, None, owned.CUT)
    optimizer.add_param_group({"params": extra.parameters()})
    before = owned.values(model)
    with pytest.raises(ValueError, match="expected the same group of parameters as when"):
        optimizer.step()
    assert all(map(torch.equal, owned.values(model), before))


# Uses of an optimizer, with a sharded model and in one process.


def change_weights(side: owned.Side) -> None:
    """Weights are sent to owners only if they were changed."""
    bring = ChunkMessages.bring_weights
    with mock.patch.object(
        ChunkMessages, "bring_weights", autospec=True, side_effect=bring
    ) as sent:
        side.train(*range(3))
        num_before = sent.call_count
        with torch.no_grad():
            for p in side.model.parameters():
                p.mul_(0.9)
        side.train(3, 4)
    assert (num_before, sent.call_count) == ((0, 0) if side.engine is None else (1, 2))


def leave_gradients_and_steps_out(side: owned.Side) -> None:
    for step in range(4):
        side.loss(step).backward()
        if step == 1:
            next(side.model.parameters()).grad = None
        if step != 2:
            side.optimizer.step()
            side.optimizer.zero_grad()  # the skipped step's gradients add to the next one's
    states = side.optimizer.state_dict()["state"]
    assert (states[0]["num"], states[1]["num"]) == (2, 3)


def three_groups(model: nn.Module) -> owned.Whitening:
    first, *rest = owned.matrices(model)
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": first}, {"params": rest, "lr": 0.5}, {"params": biases, "lr": 0.001}]
    return owned.Whitening(groups)


def clip_by_a_schedule(side: owned.Side) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
    params = list(side.model.parameters())
    for step in range(3):
        side.loss(step).backward()
        if side.engine is not None:
            side.engine.clip_grad_norm_(0.01)
        else:
            nn.utils.clip_grad_norm_(params, 0.01)
        side.optimizer.step()
        side.optimizer.zero_grad()
        schedule.step()


def scale_losses(side: owned.Side) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(4):
        loss = side.loss(step) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


def add_groups_and_freeze(side: owned.Side) -> None:
    weights = owned.matrices(side.model)
    side.train(0, 1)
    side.optimizer.add_param_group({"params": weights[1:], "lr": 0.01})
    for step in (2, 3, 4):
        weights[0].requires_grad_(step != 3)
        side.train(step)
    assert len(side.optimizer.state_dict()["state"]) == len(weights)


def last_whole(model: nn.Module) -> owned.WhitensOrAverages:
    *params, last = model.parameters()
    return owned.WhitensOrAverages([{"params": params}, {"params": [last], "whitens": True}])


def step_a_slice_whole(side: owned.Side) -> None:
    side.train(0, 1)
    slices, whole = (group["params"] for group in side.optimizer.param_groups)
    whole.append(slices.pop(0))
    side.train(2, 3)


def step_with_a_closure(side: owned.Side) -> list[Tensor]:
    """The closure is called once in a step."""
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        return side.closure(len(calls) - 1)()

    losses = [side.optimizer.step(closure) for _ in range(4)]
    assert len(calls) == 4
    assert losses[3] < losses[0]
    return owned.values(side.model)


USES: dict[Callable[[owned.Side], Any], Callable[[nn.Module], torch.optim.Optimizer]] = {
    change_weights: whitening,
    leave_gradients_and_steps_out: whitening,
    clip_by_a_schedule: three_groups,
    scale_losses: whitening,
    add_groups_and_freeze: lambda model: owned.Whitening(owned.matrices(model)[:1]),
    step_a_slice_whole: last_whole,
    step_with_a_closure: whitening,
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_what_users_do_is_as_in_one_process(use: Callable[[owned.Side], Any]) -> None:
    owned.assert_alike(use, USES[use])


@pytest.mark.parametrize("level", [owned.CUT, pytest.param("optim", marks=pytest.mark.thorough)])
@on_ranks(4)
def test_a_line_search_calls_its_closure_with_the_weights_of_each_trial(level: str) -> None:
    def model() -> nn.Module:
        # The last layer has fewer elements than one shard: some ranks hold none of them.
        return owned.plain_model().append(nn.Linear(owned.SIZES[-1], 1, bias=False).double())

    def maker(model: nn.Module) -> torch.optim.LBFGS:
        options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "max_iter": 3}
        return torch.optim.LBFGS(model.parameters(), lr=0.5, **options)

    found = []
    for side in (owned.sharded(maker, level, model), owned.plain(maker, model)):
        losses = [float(side.optimizer.step(side.closure(0))) for _ in range(3)]
        found.append([*owned.values(side.model), torch.tensor(losses)])
    assert losses[2] < 0.5 * losses[0]
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-7


class Retrying(torch.optim.LBFGS):
    """An optimizer whose step calls the closure again after an error."""

    def step(self, closure: Any) -> Any:
        def twice() -> Any:
            try:
                return closure()
            except ValueError:
                return closure()

        return super().step(twice)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Retrying])
@pytest.mark.parametrize("failing_call", [1, 2])
@on_ranks(2)
def test_an_error_of_a_closure_is_raised_at_once_and_training_continues(
    kind: type[torch.optim.LBFGS], failing_call: int
) -> None:
    side = owned.sharded(lambda model: kind(model.parameters(), lr=0.1, max_iter=3))
    before = side.optimizer.step(side.closure(0))
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == failing_call:
            raise ValueError("bad batch")
        return side.closure(0)()

    with pytest.raises(ValueError, match="bad batch"):
        side.optimizer.step(closure)
    assert len(calls) == failing_call
    side.engine.reset()
    side.optimizer.step(side.closure(0))
    assert side.optimizer.step(side.closure(0)) < before


@on_ranks(2)
def test_a_closure_that_leaves_a_gradient_on_some_ranks_only_fails_on_all() -> None:
    side = owned.sharded(lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure() -> Tensor:
        loss = side.closure(0)()
        if dist.get_rank() == 1:
            side.model[0].weight.grad = None
        return loss

    with pytest.raises(RuntimeError, match=r"0\.weight: expected a gradient on all ranks"):
        side.optimizer.step(closure)


class Restoring(owned.Whitening):
    """Reads and changes the state that torch has loaded, as pytorch_optimizer does."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                loaded = state_dict["state"][index]
                self.state[p] = {key: self.state[p][key] for key in loaded}
                self.state[p]["grams"] = [*loaded["grams"]]


@on_ranks(2)
def test_state_dicts_have_all_state_and_are_loaded_from_plain_and_pickled_ones() -> None:
    alone = owned.plain(whitening).train(0, 1)
    side = owned.sharded(whitening)
    side.model.load_state_dict(alone.model.state_dict())
    side.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    assert side.optimizer.state_dict()["state"][1]["num"] == 2
    side.train(2)
    alone.train(2)
    packed, expected = side.optimizer.state_dict(), alone.optimizer.state_dict()
    assert list(packed["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        found = packed["state"][index]
        assert list(found) == list(state)
        assert (found["num"], found["flag"], found["rate"]) == (3, True, state["rate"])
        owned.assert_close([each.full_tensor() for each in found["grams"]], state["grams"])
    assert packed["param_groups"] == expected["param_groups"]

    file = io.BytesIO()
    torch.save(packed, file)
    for kind in (owned.Whitening, Restoring):
        file.seek(0)
        again = owned.sharded(lambda model, kind=kind: kind(model.parameters()))
        again.model.load_state_dict(side.model.state_dict())
        again.optimizer.load_state_dict(torch.load(file, weights_only=False))
        states = again.optimizer.state_dict()["state"].values()
        assert {leaf.shape for state in states for leaf in state["grams"]}
        again.train(3)
        owned.assert_close(owned.values(again.model), owned.trained("Whitening"))
        leaves = leaves_of(dict(again.optimizer.state))
        assert not any(isinstance(leaf, fe.FlatDTensor) for leaf in leaves)


@on_ranks(2)
def test_a_state_dict_after_a_reset_has_no_state_on_any_rank() -> None:
    side = owned.sharded(whitening)
    for reset in ("cleared", "loaded"):
        side.train(0, 1)
        owned.RESETS[reset](side.optimizer)
        assert side.optimizer.state_dict()["state"] == {}
        side.train(2)
        assert side.optimizer.state_dict()["state"][0]["num"] == 1


def _save(folder: str, name: str) -> None:
    side = owned.sharded(owned.MAKERS[name]).train(0, 1)
    fe.save_checkpoint(folder, side.engine, side.optimizer)


def _resume(folder: str, name: str, level: str) -> list[Tensor]:
    side = owned.sharded(owned.MAKERS[name], level)
    fe.load_checkpoint(folder, side.engine, side.optimizer)
    return owned.values(side.train(2, 3).model)


@pytest.mark.parametrize("name", owned.MAKERS)
@pytest.mark.parametrize(("num_ranks", "level"), [(1, "no_shard"), (3, owned.CUT)])
def test_checkpoints_are_loaded_on_other_ranks(
    ranks: Ranks, tmp_path: Path, name: str, num_ranks: int, level: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, folder, name, world_size=2)
    for found in ranks.run(_resume, folder, name, level, world_size=num_ranks):
        owned.assert_close(found, owned.trained(name), name)


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    biases = [p for p in model.parameters() if p.ndim == 1]
    return [torch.optim.Muon(owned.matrices(model), 0.02), torch.optim.AdamW(biases, 0.02)]


def train_both(side: owned.Side, *steps: int) -> list[Tensor]:
    for step in steps:
        side.loss(step).backward()
        for optimizer in side.optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return owned.values(side.model)


def _save_or_resume_both(folder: str, saves: bool) -> list[Tensor]:
    model = owned.plain_model()
    engine = fe.shard(model, None, owned.CUT, units=[nn.Linear], min_unit_size=0)
    side = owned.Side(model, [fe.shard_optimizer(each) for each in two_optimizers(model)], engine)
    if saves:
        train_both(side, 0, 1)
        fe.save_checkpoint(folder, engine, side.optimizer)
        return []
    fe.load_checkpoint(folder, engine, side.optimizer)
    return train_both(side, 2, 3)


def test_several_optimizers_are_saved_as_one(ranks: Ranks, tmp_path: Path) -> None:
    folder, model = str(tmp_path / "checkpoint"), owned.plain_model()
    ranks.run(_save_or_resume_both, folder, True, world_size=2)
    expected = train_both(owned.Side(model, two_optimizers(model)), *range(4))
    for found in ranks.run(_save_or_resume_both, folder, False, world_size=3):
        owned.assert_close(found, expected, "Muon")


@on_ranks(2)
def test_the_user_says_what_is_whole() -> None:
    side = owned.sharded(owned.MAKERS["Adafactor"], whole=["0.*"])
    step = step_hook_of(side.optimizer, OwnedStep)
    assert isinstance(step, OwnedStep)
    assert {name for name, needs in step.needs.items() if needs} >= {"0.weight", "0.bias"}
    sgd = torch.optim.SGD(params := list(side.model.parameters()), lr=0.1)
    fe.shard_optimizer(sgd, whole=True)
    step = step_hook_of(sgd, OwnedStep)
    assert step is not None
    assert len(step.needs) == len(params)
    with pytest.raises(ValueError, match="whole: expected no patterns with elementwise=True"):
        fe.shard_optimizer(torch.optim.SGD(params), elementwise=True, whole=True)
    with pytest.raises(TypeError, match=r"whole: expected a list of patterns .* found '0\.\*'"):
        fe.shard_optimizer(torch.optim.SGD(params), whole="0.*")
