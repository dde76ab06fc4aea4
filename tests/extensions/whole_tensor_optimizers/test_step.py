"""Optimizers that need whole tensors: each is stepped by its owner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.optim.owned_step import OwnedStep
from fsdp_engine.optim.owner_messages import ChunkMessages
from fsdp_engine.optim.shadow import step_hook_of
from fsdp_engine.optim.state_leaves import leaves_of
from tests.extensions.whole_tensor_optimizers.owned import (
    MAKERS,
    SIZES,
    Exchanging,
    Whitening,
    WhitensOrAverages,
    assert_close,
    inputs,
    is_mine,
    late_disk,
    make,
    matrices,
    mine,
    plain_model,
    train,
    trained,
    values,
)
from tests.pairs import PAIRS
from tests.pool import Ranks, on_few_ranks, on_ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def check_training(pair: tuple[str, str], name: str, mesh: Any = None) -> None:
    model, _, optimizer = make(pair, name, mesh)
    before = values(model)
    train(model, optimizer, range(4), sharded=True)
    expected = trained(name)
    assert_close(values(model), expected, name)
    assert not torch.equal(before[0], expected[0])
    for group in optimizer.param_groups:
        assert group.get("num_steps", 4) == 4


@pytest.mark.parametrize("name", MAKERS)
@on_few_ranks
def test_training_equals_one_process(name: str) -> None:
    for level in ("no_shard", "optim_grads_params"):
        check_training((level, "no_shard"), name)


@pytest.mark.parametrize("name", ["Muon", "Whitening"])
@on_ranks(4)
def test_replicas_share_the_work(name: str) -> None:
    check_training(("optim_grads_params", "no_shard"), name, (2, 2))
    check_training(("optim_grads_params", "optim"), name, (2, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", MAKERS)
@on_ranks(4)
def test_every_strategy(pair: tuple[str, str], name: str) -> None:
    check_training(pair, name, (2, 2))


@on_ranks(3)
def test_three_ranks() -> None:
    check_training(("optim_grads_params", "no_shard"), "Whitening")


@on_ranks(4)
def test_each_parameter_is_stepped_on_one_rank() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening", (2, 2))
    train(model, optimizer, range(2), sharded=True)
    owned = [bool(optimizer.state[p]) for p in model.parameters()]
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, owned)
    assert [sum(each) for each in zip(*everywhere, strict=True)] == [1] * len(owned)
    assert all(sum(each) for each in everywhere), "a rank owns nothing"


@on_ranks(2)
def test_descriptions_have_shares() -> None:
    model, engine, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    text = str(engine.describe())
    assert "Whitening: 0 parameters are stepped on slices, 5 whole, each on one rank" in text
    work = [
        float(p.shape[0] * p.numel() // p.shape[0] * min(p.shape[0], p.numel() // p.shape[0]))
        for p in model.parameters()
    ]
    owned = sum(w for w, p in zip(work, model.parameters(), strict=True) if is_mine(optimizer, p))
    assert f"share of the work of 5 is {2 * owned / sum(work):.2f} of the mean of 2 ranks" in text
    del optimizer
    assert "stepped on slices" not in str(engine.describe()), "it is still alive"


@on_ranks(2)
def test_weights_travel_to_owners_only_if_they_were_changed() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    reference = plain_model()
    plain = MAKERS["Whitening"](reference)
    num_sent = []
    with pytest.MonkeyPatch.context() as patch:
        bring = ChunkMessages.bring_weights

        def counted(*args: Any, **kwargs: Any) -> Any:
            num_sent.append(1)
            return bring(*args, **kwargs)

        patch.setattr(ChunkMessages, "bring_weights", counted)
        for step in range(5):
            train(model, optimizer, [step], sharded=True)
            train(reference, plain, [step], sharded=False)
            assert len(num_sent) == (1 if step < 3 else 2)
            if step == 2:
                with torch.no_grad():
                    for each in (model, reference):
                        for p in each.parameters():
                            p.mul_(0.9)
    assert_close(values(model), values(reference), "")


@on_few_ranks
def test_gradients_that_are_none_and_skipped_steps() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    reference = plain_model()
    plain = MAKERS["Whitening"](reference)
    for each, one, sharded in ((model, optimizer, True), (reference, plain, False)):
        for step in range(4):
            batch = inputs(step)
            each(mine(batch) if sharded else batch).square().mean().backward()
            if step == 1:
                next(each.parameters()).grad = None
            if step != 2:
                one.step()
                one.zero_grad()  # gradients of the skipped step stay
    assert_close(values(model), values(reference), "")
    assert optimizer.state_dict()["state"][0]["num"] == 2
    assert optimizer.state_dict()["state"][1]["num"] == 3


@on_ranks(2)
def test_a_gradient_on_some_ranks_only_is_an_error_on_all() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    train(model, optimizer, [0], sharded=True)
    before = values(model)
    model(mine(inputs(1))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    if dist.get_rank() == 1:
        next(model.parameters()).grad = None
    with pytest.raises(RuntimeError, match=r"0\.weight: expected a gradient on all ranks, or on n"):
        optimizer.step()
    assert all(map(torch.equal, before, values(model)))
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    optimizer.step()


@on_ranks(2)
def test_a_step_that_raises_on_its_owner_raises_on_all_ranks() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    train(model, optimizer, [0], sharded=True)
    optimizer.fails = True  # type: ignore[attr-defined]
    model(mine(inputs(1))).sum().backward()
    is_owner = bool(optimizer.state[model[2].weight])  # type: ignore[index]
    kind = ZeroDivisionError if is_owner else RuntimeError
    with pytest.raises(kind, match="the step fails" if is_owner else "raised on another rank"):
        optimizer.step()
    optimizer.fails = False  # type: ignore[attr-defined]
    optimizer.step()
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, is_owner)
    assert sorted(everywhere) == [False, True]


@on_few_ranks
def test_clipping_schedules_and_groups() -> None:
    found = []
    for sharded in (True, False):
        model = plain_model()
        if sharded:
            engine = fe.shard(model, None, "optim_grads_params", units=[nn.Linear], min_unit_size=0)
        groups = [
            {"params": matrices(model)[:2]},
            {"params": matrices(model)[2:], "lr": 0.5},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.001},
        ]
        optimizer = Whitening(groups)
        if sharded:
            fe.shard_optimizer(optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            batch = inputs(step)
            model(mine(batch) if sharded else batch).square().mean().backward()
            if sharded:
                engine.clip_grad_norm_(0.01)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found.append(values(model))
    assert_close(found[0], found[1], "")


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
    "reversed": lambda optimizer: optimizer.param_groups.reverse(),
    "replaced": replace,
    "merged": merge,
    "swapped": lambda optimizer: optimizer.param_groups[0].update(
        params=optimizer.param_groups[1]["params"], lr=0.5
    ),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("level", LEVELS)
@on_few_ranks
def test_param_groups_may_be_edited(level: str, edit: str) -> None:
    found = []
    for sharded in (True, False):
        model = plain_model()
        if sharded:
            fe.shard(model, None, level, units=[nn.Linear], min_unit_size=0)
        params = list(model.parameters())
        optimizer: Any = Whitening([{"params": params[:3]}, {"params": params[3:], "lr": 0.005}])
        if sharded:
            fe.shard_optimizer(optimizer)
        train(model, optimizer, range(2), sharded=sharded)
        EDITS[edit](optimizer)
        train(model, optimizer, range(2, 4), sharded=sharded)
        found.append(values(model))
        del optimizer.param_groups[1:]  # what left returns with the state that it had
        optimizer.param_groups[0]["params"] = params[:3]
        optimizer.add_param_group({"params": params[3:]})
        train(model, optimizer, range(4, 6), sharded=sharded)
        found[-1] += values(model)
        packed = optimizer.state_dict()["state"]
        found[-1] += [
            leaf.full_tensor()
            if isinstance(leaf, fe.FlatDTensor)
            else torch.as_tensor(leaf).double()
            for index in sorted(packed)
            for leaf in leaves_of(packed[index])
        ]
    assert_close(found[0], found[1], "")


@on_few_ranks
def test_a_slice_that_comes_to_be_stepped_whole_keeps_its_state() -> None:
    found = []
    for sharded in (True, False):
        model = plain_model()
        if sharded:
            fe.shard(model, None, "optim_grads_params", units=[nn.Linear], min_unit_size=0)
        params = list(model.parameters())
        optimizer: Any = WhitensOrAverages([{"params": params}, {"params": [], "whitens": True}])
        optimizer.param_groups[1]["params"] = [params.pop()]
        optimizer.param_groups[0]["params"] = params
        if sharded:
            fe.shard_optimizer(optimizer)
        train(model, optimizer, range(2), sharded=sharded)
        optimizer.param_groups[1]["params"].append(params.pop(0))
        train(model, optimizer, range(2, 4), sharded=sharded)
        found.append(values(model))
    assert_close(found[0], found[1], "")


@on_few_ranks
def test_parameters_that_are_stepped_at_once_stay_together() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Coupled")
    params = optimizer.param_groups[0]["params"]
    last = params.pop()
    train(model, optimizer, range(1), sharded=True)  # one that left is not stepped
    assert torch.equal(values(model)[-1], values(plain_model())[-1])
    params.append(last)
    extra = nn.Linear(3, 3).double()
    fe.shard(extra, None, "optim_grads_params")
    optimizer.add_param_group({"params": extra.parameters()})
    before = values(model)
    with pytest.raises(ValueError, match="expected it among the parameters that it was with"):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("reset", ["cleared", "loaded"])
@on_few_ranks
def test_a_state_dict_after_a_reset_has_no_state_on_any_rank(reset: str) -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    train(model, optimizer, range(2), sharded=True)
    RESETS[reset](optimizer)
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, [2], sharded=True)
    assert optimizer.state_dict()["state"][0]["num"] == 1


@on_few_ranks
def test_a_closure_of_a_step_is_called_once() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss: Tensor = model(mine(inputs(len(calls) - 1))).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(4)]
    assert len(calls) == 4
    assert losses[3] < losses[0]
    assert_close(values(model), trained("Whitening"), "")


@on_few_ranks
def test_a_line_search_calls_its_closure_with_the_weights_of_each_trial() -> None:
    check_line_search("optim_grads_params")


@on_ranks(4)
def test_a_line_search_where_ranks_have_empty_slices() -> None:
    check_line_search("optim")


def check_line_search(level: str) -> None:
    found = []
    for sharded in (True, False):
        # The last layer has fewer elements than slices have room for.
        model = plain_model()
        model.append(nn.Linear(SIZES[-1], 1, bias=False).double())
        if sharded:
            fe.shard(model, None, level, units=[nn.Linear], min_unit_size=0)
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, line_search_fn="strong_wolfe", max_iter=5
        )
        if sharded:
            fe.shard_optimizer(optimizer)
        batch = mine(inputs(0)) if sharded else inputs(0)

        def closure(model: Any = model, optimizer: Any = optimizer, batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        found.append([*values(model), torch.tensor(losses)])
    assert found[1][-1][2] < 0.5 * found[1][-1][0]
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-7


# --- state ---


@on_few_ranks
def test_state_dicts_have_all_state_on_all_ranks() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    train(model, optimizer, range(3), sharded=True)
    reference = plain_model()
    plain = MAKERS["Whitening"](reference)
    train(reference, plain, range(3), sharded=False)
    packed, expected = optimizer.state_dict(), plain.state_dict()
    assert list(packed["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        found = packed["state"][index]
        assert list(found) == list(state)
        assert (found["num"], found["flag"]) == (3, True)
        assert found["rate"] == state["rate"]
        for one, other in zip(found["grams"], state["grams"], strict=True):
            assert_close([one.full_tensor()], [other], "")
    assert packed["param_groups"] == expected["param_groups"]


@on_few_ranks
def test_state_is_loaded_from_its_own_and_from_plain_dicts() -> None:
    reference = plain_model()
    plain = MAKERS["Whitening"](reference)
    train(reference, plain, range(2), sharded=False)
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Whitening")
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.state_dict()["state"][1]["num"] == 2
    train(model, optimizer, [2], sharded=True)
    again, _, other = make(("optim_grads_params", "no_shard"), "Whitening")
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, other, [3], sharded=True)
    assert_close(values(again), trained("Whitening"), "")


class Restoring(Whitening):
    """Reads and changes what torch has loaded, as optimizers of pytorch_optimizer do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                loaded = state_dict["state"][index]
                self.state[p] = {key: self.state[p][key] for key in loaded}
                self.state[p]["grams"] = [*loaded["grams"]]


@on_few_ranks
def test_an_optimizer_reads_what_it_has_loaded() -> None:
    made = []
    for _ in range(2):
        model = plain_model()
        fe.shard(model, None, "optim_grads_params", units=[nn.Linear], min_unit_size=0)
        made.append((model, fe.shard_optimizer(Restoring(model.parameters()))))
    (model, optimizer), (again, other) = made
    train(model, optimizer, range(2), sharded=True)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    packed = other.state_dict()["state"]
    assert {leaf.shape for state in packed.values() for leaf in state["grams"]}
    train(again, other, range(2, 4), sharded=True)
    assert_close(values(again), trained("Whitening"), "")
    assert all(
        not isinstance(leaf, fe.FlatDTensor)
        for state in other.state.values()
        for leaf in leaves_of(state)
    )


def _save(folder: str, name: str, level: str) -> None:
    model, engine, optimizer = make((level, "no_shard"), name)
    train(model, optimizer, range(2), sharded=True)
    fe.save_checkpoint(folder, engine, optimizer)


def _resume(folder: str, name: str, level: str) -> list[Tensor]:
    model, engine, optimizer = make((level, "no_shard"), name)
    fe.load_checkpoint(folder, engine, optimizer)
    train(model, optimizer, range(2, 4), sharded=True)
    return values(model)


@pytest.mark.parametrize("name", MAKERS)
def test_checkpoints_are_loaded_on_other_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, folder, name, "optim_grads_params", world_size=2)
    expected = trained(name)
    for num_ranks, level in ((1, "no_shard"), (3, "optim_grads_params"), (2, "optim")):
        for found in ranks.run(_resume, folder, name, level, world_size=num_ranks):
            assert_close(found, expected, name)


def _two_optimizers(folder: str, saves: bool) -> list[Tensor]:
    model = plain_model()
    engine = fe.shard(model, None, "optim_grads_params", units=[nn.Linear], min_unit_size=0)
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices(model), lr=0.02),
        torch.optim.AdamW(biases, lr=0.02),
    ]
    for optimizer in optimizers:
        fe.shard_optimizer(optimizer)
    if not saves:
        fe.load_checkpoint(folder, engine, optimizers)
    for step in range(2) if saves else range(2, 4):
        model(mine(inputs(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if saves and step == 1:
            fe.save_checkpoint(folder, engine, optimizers)
    return values(model)


def test_several_optimizers_are_saved_as_one(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(_two_optimizers, folder, True, world_size=2)
    model = plain_model()
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizers = torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(biases, lr=0.02)
    for step in range(4):
        model(inputs(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks.run(_two_optimizers, folder, False, world_size=3):
        assert_close(found, values(model), "Muon")


# --- choices ---


@on_few_ranks
def test_the_user_says_what_is_whole() -> None:
    model, _, optimizer = make(("optim_grads_params", "no_shard"), "Adafactor", whole=["0.*"])
    step = step_hook_of(optimizer, OwnedStep)
    assert isinstance(step, OwnedStep)
    assert {name for name, needs in step.needs.items() if needs} >= {"0.weight", "0.bias"}
    sgd = torch.optim.SGD(plain := list(model.parameters()), lr=0.1)
    fe.shard_optimizer(sgd, whole=True)
    step = step_hook_of(sgd, OwnedStep)
    assert step is not None
    assert len(step.needs) == len(plain)
    with pytest.raises(ValueError, match="whole: expected nothing beside elementwise=True"):
        fe.shard_optimizer(torch.optim.SGD(plain), elementwise=True, whole=True)


# --- state elsewhere ---


@pytest.mark.parametrize("name", [*MAKERS, "mixed"])
@on_few_ranks
def test_state_on_a_disk(name: str, tmp_path: Path) -> None:
    found: list[list[Tensor]] = []
    packed: list[Any] = []
    for offload in (None, fe.Offload(optimizer_state="disk", folder=tmp_path)):
        model = plain_model()
        engine = fe.shard(
            model, None, "optim_grads_params", units=[nn.Linear], min_unit_size=0, offload=offload
        )
        if name == "mixed":  # elementwise, but some are stepped whole
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
            fe.shard_optimizer(optimizer, whole=["0.*", "2.*"])
        else:
            optimizer = fe.shard_optimizer(MAKERS[name](model))
        train(model, optimizer, range(2), sharded=True)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, range(2, 4), sharded=True)
        found.append(values(model))
        packed.append(optimizer.state_dict()["state"])
    assert all(map(torch.equal, *found))
    assert packed[0].keys() == packed[1].keys()
    if name in ("Muon", "mixed"):
        assert engine.memory_bytes("disk")["optimizer"] > 0
    for index, state in packed[0].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                one, other = value, packed[1][index][key]
                if isinstance(value, fe.FlatDTensor):
                    one, other = one.local, other.local  # type: ignore[attr-defined]
                assert torch.equal(one, other)


def train_on_a_disk(
    level: str,
    make_optimizer: Callable[[nn.Module], Any],
    folder: Path,
    reset: Callable[[Any], None] = lambda optimizer: None,
) -> None:
    """Training with state on a disk has the bits of training with state on the device."""
    found = []
    for offload in (None, fe.Offload(optimizer_state="disk", folder=folder)):
        model = plain_model()
        fe.shard(model, None, level, units=[nn.Linear], min_unit_size=0, offload=offload)
        optimizer = make_optimizer(model)
        for step in range(5):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(mine(inputs(step))).square().mean()
                loss.backward()
                return loss

            if step == 2:
                reset(optimizer)
            optimizer.step(closure)
        found.append(values(model))
    assert all(map(torch.equal, *found))


RESETS: dict[str, Callable[[Any], Any]] = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "loaded": lambda optimizer: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
    "of each": lambda optimizer: [optimizer.state[p].clear() for p in params_of(optimizer)],
    "of some": lambda optimizer: [optimizer.state.pop(p, None) for p in params_of(optimizer)[::2]],
}


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("level", LEVELS)
@on_few_ranks
def test_state_on_a_disk_may_be_reset(level: str, reset: str, tmp_path: Path) -> None:
    make = lambda model: fe.shard_optimizer(MAKERS["Whitening"](model))  # noqa: E731
    with late_disk():
        train_on_a_disk(level, make, tmp_path, RESETS[reset])


@pytest.mark.parametrize("options", [{"whole": True}, {"elementwise": True}])
@on_few_ranks
def test_tensors_of_state_on_a_disk_may_be_exchanged(options: Any, tmp_path: Path) -> None:
    def make(model: nn.Module) -> Any:
        return fe.shard_optimizer(Exchanging(model.parameters()), **options)

    train_on_a_disk("optim_grads_params", make, tmp_path)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@on_few_ranks
def test_a_closure_that_is_called_again_does_not_bring_old_state(
    search: str | None, tmp_path: Path
) -> None:
    def make(model: nn.Module) -> Any:
        lbfgs = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn=search)
        return fe.shard_optimizer(lbfgs)

    train_on_a_disk("optim_grads_params", make, tmp_path)


@on_few_ranks
def test_weights_of_owners_stay_on_the_device(tmp_path: Path) -> None:
    model = plain_model()
    offload = fe.Offload(optimizer_state="disk", main_weights="disk", folder=tmp_path)
    fe.shard(model, None, "optim_grads_params", units=[nn.Linear], offload=offload)
    with pytest.raises(ValueError, match=r"offload\.main_weights: expected 'device', since Muon s"):
        fe.shard_optimizer(MAKERS["Muon"](model))
