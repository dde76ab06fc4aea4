"""shard_optimizer: steps on slices, FlatDTensors everywhere else."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.optim import shard_optimizer
from fsdp_engine.optim.state_format import QUANTIZING_PACKAGES, StateFormat
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.optim.step_placement import StepPlacement
from fsdp_engine.optim.whole_tensor_steps import WholeTensorSteps
from tests.models import odd_model, vector_batch
from tests.optim.optimizers import FUSED, OPTIMIZERS
from tests.optim.pair import Counting, Pair, check_state, flat, mesh_in_name_only, step_both
from tests.pool import Ranks
from tests.reference import full, nothing


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with mesh_in_name_only() as made:
        yield made


# --- steps ---


FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        each
        for each in itertools.product(OPTIMIZERS, FORMS)
        if each[1] != "fused" or each[0] in FUSED
    ],
)
def test_a_step_is_that_of_plain_tensors(mesh: DeviceMesh, name: str, form: str) -> None:
    """With ``shard_optimizer``, and with plain torch optimizers on sharded parameters."""
    for wrap in (shard_optimizer, lambda optimizer: optimizer):
        pair = Pair(mesh)
        sharded = wrap(OPTIMIZERS[name](pair.flat, **FORMS[form]))
        plain = OPTIMIZERS[name](pair.plain, **FORMS[form])
        step_both(pair, sharded, plain, num_steps=4)
        pair.check(sharded, plain)


def made(
    mesh: DeviceMesh, make: Any = torch.optim.AdamW, slices: Any = None, **options: Any
) -> tuple[Pair, Any, Any]:
    """Parameters, the sharded optimizer of the sharded ones, and a plain one of the others."""
    pair = Pair(mesh, slices)
    return pair, shard_optimizer(make(pair.flat, **options)), make(pair.plain, **options)


def test_the_optimizer_is_changed_in_place_and_once_and_makes_no_state(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    before = [p.local.clone() for p in pair.flat]
    optimizer = torch.optim.AdamW(pair.flat)
    assert shard_optimizer(optimizer) is optimizer
    assert shard_optimizer(optimizer) is optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], pair.flat, strict=True))
    assert not optimizer.state
    assert all(torch.equal(p.local, b) for p, b in zip(pair.flat, before, strict=True))


def test_a_parameter_without_gradient_is_left_alone(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh)
    step_both(pair, sharded, plain)
    for missing in (0, 3):
        pair.set_grads()
        pair.flat[missing].grad = pair.plain[missing].grad = None
        sharded.step()
        plain.step()
    pair.check(sharded, plain)


def test_gradients_changed_in_place_and_replaced_are_used(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh, torch.optim.SGD, lr=0.1)
    step_both(pair, sharded, plain)
    for p, q in zip(pair.flat, pair.plain, strict=True):
        p.grad.local.add_(1)
        assert q.grad is not None
        q.grad.add_(1)
    sharded.step()
    plain.step()
    sharded.zero_grad(set_to_none=False)
    assert all(p.grad.zeroed for p in pair.flat)
    sharded.step()
    pair.check()
    sharded.zero_grad()
    sharded.step()
    pair.check()


def test_gradients_of_another_dtype_are_cast(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh, foreach=True)
    for p, (shape, start, stop) in zip(pair.flat, pair.slices, strict=True):
        p.grad_dtype = torch.bfloat16
        p.grad = flat(mesh, shape, start, stop, torch.empty_like(p.local, dtype=torch.bfloat16))
    for _ in range(2):
        for p, q in zip(pair.flat, pair.plain, strict=True):
            p.grad.local.copy_(torch.randn_like(q))
            q.grad = p.grad.local.float()
        sharded.step()
        plain.step()
    pair.check(sharded, plain)


def test_plain_parameters_pass_through(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    extra, other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    other.data.copy_(extra.data)
    sharded = shard_optimizer(torch.optim.AdamW([extra, *pair.flat]))
    plain = torch.optim.AdamW([other, *pair.plain])
    for _ in range(3):
        extra.grad = torch.randn(3)
        other.grad = extra.grad.clone()
        step_both(pair, sharded, plain)
    pair.check()
    assert torch.equal(extra, other)
    assert torch.equal(sharded.state[extra]["exp_avg"], plain.state[other]["exp_avg"])
    sharded.load_state_dict(copy.deepcopy(sharded.state_dict()))
    step_both(pair, sharded, plain)
    assert torch.equal(extra, other)


# --- groups, schedulers, hooks ---


def test_groups_keep_their_hyperparameters_and_may_be_added(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    optimizers = []
    for params in (pair.flat, pair.plain):
        groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:4], "weight_decay": 0.3}]
        optimizers.append(torch.optim.AdamW(groups, lr=0.1))
    sharded, plain = shard_optimizer(optimizers[0]), optimizers[1]
    step_both(pair, sharded, plain)
    sharded.add_param_group({"params": pair.flat[4:], "lr": 0.01})
    plain.add_param_group({"params": pair.plain[4:], "lr": 0.01})
    step_both(pair, sharded, plain, num_steps=2)
    pair.check(sharded, plain)


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_work_whenever_they_are_made(mesh: DeviceMesh, first: bool) -> None:
    pair = Pair(mesh)
    sharded, plain = (torch.optim.SGD(each, momentum=0.9) for each in (pair.flat, pair.plain))
    if first:
        shard_optimizer(sharded)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.5, total_steps=9)
        for each in (sharded, plain)
    ]
    if not first:
        shard_optimizer(sharded)
    for _ in range(4):
        step_both(pair, sharded, plain)
        for scheduler in schedulers:
            scheduler.step()
    pair.check(sharded, plain)


def test_hooks_see_the_optimizer_and_its_sharded_parameters(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    optimizer = torch.optim.AdamW(pair.flat, lr=0.1)
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(hooked: Any, args: Any, kwargs: Any) -> None:
            assert hooked is optimizer
            assert all(type(p) is FlatDTensor for p in hooked.param_groups[0]["params"])
            seen.append(name)

        return hook

    handles = [
        optimizer.register_step_pre_hook(note("before")),
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    shard_optimizer(optimizer)
    handles.append(optimizer.register_step_pre_hook(note("late before")))
    handles.append(optimizer.register_step_post_hook(note("after")))
    pair.set_grads()
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["global before", "before", "late before", "after", "global after"]


def test_gradients_and_rates_that_a_later_hook_sets_are_used(mesh: DeviceMesh) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.grad / 2
        optimizer.param_groups[0]["lr"] = 0.7

    pair, sharded, plain = made(mesh, torch.optim.SGD, lr=0.1)
    for optimizer in (sharded, plain):
        optimizer.register_step_pre_hook(halve)
    step_both(pair, sharded, plain)
    pair.check(sharded, plain)


class Listener:
    """Appends its number to ``called`` after a step."""

    def __init__(self, number: int, called: list[int]) -> None:
        self.number, self.called = number, called

    optimizer_steps = nothing

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.called.append(self.number)


def test_listeners_are_called_in_the_order_in_which_they_were_registered() -> None:
    called: list[int] = []
    listeners = [Listener(number, called) for number in range(64)]
    for listener in listeners:
        add_step_listener(listener)
    del listeners[10:20]
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert called == [*range(10), *range(20, 63), 63]


def test_a_closure_computes_with_the_sharded_parameters(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh, slices=[((6, 5), 0, 30), ((7,), 0, 7)])

    def closure_of(optimizer: Any, params: list[Any], kind: type) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            assert all(isinstance(p, kind) for p in optimizer.param_groups[0]["params"])
            loss = sum(((p - 1) ** 2).sum() for p in params)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        found = sharded.step(closure_of(sharded, pair.flat, FlatDTensor))
        expected = plain.step(closure=closure_of(plain, pair.plain, nn.Parameter))
        torch.testing.assert_close(found, expected)
    sharded.step(closure=closure_of(sharded, pair.flat, FlatDTensor))
    plain.step(closure_of(plain, pair.plain, nn.Parameter))
    for p, q in zip(pair.flat, pair.plain, strict=True):
        torch.testing.assert_close(p.local, q.detach())


class Failing(torch.optim.AdamW):
    """Fails in the middle of a step, or right after it, when told to."""

    fail: str = ""

    def step(self, closure: Any = None) -> Any:
        if self.fail == "before":
            raise ZeroDivisionError
        if self.fail == "middle":
            _, first, *_ = self.param_groups[0]["params"]
            self.state[first]["note"] = torch.zeros_like(first)
            self.param_groups[0]["note"] = 3
            raise ZeroDivisionError
        result = super().step(closure)
        if self.fail == "after":
            raise ZeroDivisionError
        return result


@pytest.mark.parametrize("fail", ["before", "middle", "after", "hook", "closure"])
def test_an_exception_leaves_the_optimizer_whole(mesh: DeviceMesh, fail: str) -> None:
    pair = Pair(mesh)
    sharded = shard_optimizer(Failing(pair.flat), elementwise=True)
    plain = Failing(pair.plain)
    step_both(pair, sharded, plain)
    pair.set_grads()

    def raising(*args: Any) -> None:
        raise ZeroDivisionError

    for optimizer in (sharded, plain):
        optimizer.fail = fail
        handle = optimizer.register_step_pre_hook(raising) if fail == "hook" else None
        with pytest.raises(ZeroDivisionError):
            optimizer.step(raising if fail == "closure" else None)
        optimizer.fail = ""
        if handle is not None:
            handle.remove()
    for p, q in zip(sharded.param_groups[0]["params"], pair.flat, strict=True):
        assert p is q
    assert sharded.param_groups[0].get("note") == plain.param_groups[0].get("note")
    check_state(pair, sharded, plain)
    step_both(pair, sharded, plain, num_steps=2)
    pair.check(sharded, plain)


# --- state ---


@pytest.mark.parametrize("stepped", [False, True])
def test_a_loaded_state_is_used_at_the_next_step(mesh: DeviceMesh, stepped: bool) -> None:
    pair, sharded, plain = made(mesh)
    step_both(pair, sharded, plain, num_steps=2)
    saved = copy.deepcopy(sharded.state_dict())
    for state in saved["state"].values():
        assert type(state["exp_avg"]) is FlatDTensor
        assert type(state["step"]) is Tensor
    saved["param_groups"][0]["lr"] = plain.param_groups[0]["lr"] = 0.3
    fresh = shard_optimizer(torch.optim.AdamW(pair.flat))
    if stepped:
        kept = [p.local.clone() for p in pair.flat]
        pair.set_grads()
        fresh.step()
        for p, before in zip(pair.flat, kept, strict=True):
            p.local.copy_(before)
    fresh.load_state_dict(saved)
    step_both(pair, fresh, plain, num_steps=2)
    pair.check(fresh, plain)
    assert fresh.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


def test_state_of_whole_tensors_is_cut(mesh: DeviceMesh) -> None:
    slices = [((6, 5), 7, 19), ((7,), 2, 5)]
    pair, sharded, plain = made(mesh, slices=slices)
    whole = [nn.Parameter(torch.randn(shape)) for shape, *_ in slices]
    source = torch.optim.AdamW(whole)
    for p in whole:
        p.grad = torch.randn(p.shape)
    source.step()
    sharded.load_state_dict(source.state_dict())
    for p, q, (_, start, stop) in zip(whole, pair.plain, slices, strict=True):
        plain.state[q] = {
            key: value.reshape(-1)[start:stop].clone() if value.ndim else value.clone()
            for key, value in source.state[p].items()
        }
    step_both(pair, sharded, plain, num_steps=2)
    pair.check(sharded, plain)


def test_state_of_another_slice_is_refused(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh, slices=[((6, 5), 7, 19)])
    step_both(pair, sharded, plain)
    sharded.state[pair.flat[0]]["exp_avg"] = flat(mesh, (6, 5), 8, 20)
    with pytest.raises(ValueError, match=r"state 'exp_avg' of .*: expected elements \[7, 19\)"):
        sharded.step()


def set_value(state: Any, param: Any) -> None:
    state[param]["exp_avg"] = torch.ones_like(param, requires_grad=False)


def set_entry(state: Any, param: Any) -> None:
    other = {key: value.clone() for key, value in state[param].items()}
    state[param] = {**other, "exp_avg_sq": torch.ones_like(param, requires_grad=False)}


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "entry": set_entry,
    "value": set_value,
    "clear": lambda state, param: state.clear(),
    "in place": lambda state, param: state[param]["exp_avg"].mul_(3),
    "pop": lambda state, param: state.pop(param),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_state_are_used_at_the_next_step(mesh: DeviceMesh, change: str) -> None:
    pair, sharded, plain = made(mesh)
    step_both(pair, sharded, plain, num_steps=2)
    for optimizer, params in ((sharded, pair.flat), (plain, pair.plain)):
        CHANGES[change](optimizer.state, params[0])
    step_both(pair, sharded, plain, num_steps=2)
    pair.check(sharded, plain)


def test_state_shares_memory_and_objects_stay(mesh: DeviceMesh) -> None:
    pair, sharded, plain = made(mesh)
    step_both(pair, sharded, plain)
    shown = [dict(sharded.state[p]) for p in pair.flat]
    step_both(pair, sharded, plain, num_steps=2)
    for p, before in zip(pair.flat, shown, strict=True):
        assert all(before[key] is value for key, value in sharded.state[p].items())
        assert float(before["step"]) == 3
    pair.check(sharded, plain)


class Renamed(torch.optim.AdamW):
    """A subclass with AdamW's own step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.02)


def test_a_subclass_with_its_ancestors_step_is_taken(mesh: DeviceMesh) -> None:
    for first in ("sharded", "plain"):
        kind: Any = type("Own", (Renamed,), {})  # torch wraps its step at the first instance
        pair = Pair(mesh)
        plain = kind(pair.plain) if first == "plain" else None
        sharded = shard_optimizer(kind(pair.flat))
        step_both(pair, sharded, plain or kind(pair.plain), num_steps=2)
        pair.check()


def test_any_elementwise_optimizer_may_be_declared_so(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    others = [nn.Parameter(torch.ones(3)) for _ in range(2)]  # parameters that are not sharded
    sharded = shard_optimizer(Counting([*pair.flat, others[0]]), elementwise=True)
    plain = Counting([*pair.plain, others[1]])

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            for other in others:
                other.grad = torch.tensor([1.0, 2.0, 3.0])
            step_both(pair, sharded, plain)
        assert torch.equal(*others)

    step(3)
    assert sharded.num_calls == 3
    assert sharded.param_groups[0]["num_steps"] == 3
    assert sharded.state.pop("all") == plain.state.pop("all") == {"num_calls": 3}
    sharded.load_state_dict(copy.deepcopy(sharded.state_dict()))
    step(1)
    assert sharded.state.pop(others[0]).keys() == plain.state.pop(others[1]).keys()
    del sharded.state["all"], plain.state["all"]
    pair.check(sharded, plain)


def test_differentiable_optimizers_and_other_objects_are_refused(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, [((6, 5), 7, 19)])
    with pytest.raises(ValueError, match="expected differentiable=False"):
        shard_optimizer(torch.optim.SGD(pair.flat, differentiable=True))
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer; found 3"):
        shard_optimizer(3)  # type: ignore[type-var]


def test_an_optimizer_that_needs_a_missing_extension_is_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    optimizer = Counting(params)
    with pytest.raises(ValueError, match=r"found Counting\. The extension whole_tensor_optimizers"):
        WholeTensorSteps.make_hook(optimizer, (), StepPlacement(optimizer))
    own = {"__module__": f"{QUANTIZING_PACKAGES[0]}optim.adam"}
    kind: Any = type("AdamW8bit", (torch.optim.AdamW,), own)
    with pytest.raises(ValueError, match=r"found AdamW8bit, .* The extension low_bit_state"):
        StateFormat.of(kind(params))


def test_a_dropped_optimizer_frees_its_state_at_once(mesh: DeviceMesh) -> None:
    pair, optimizer, plain = made(mesh)
    step_both(pair, optimizer, plain)
    gone = weakref.ref(optimizer), weakref.ref(optimizer.state[pair.flat[0]]["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_a_copy_can_be_sharded_again(mesh: DeviceMesh) -> None:
    for copied in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        pair, sharded, plain = made(mesh)
        step_both(pair, sharded, plain)
        other: Any = copied(sharded)
        pair.flat = other.param_groups[0]["params"]
        step_both(pair, shard_optimizer(other), plain, num_steps=2)
        pair.check(other, plain)


# --- on several ranks ---


def train(path: str, mesh: tuple[int, ...], load: bool, steps: range) -> None:
    """Steps on the same data on all ranks, compared with one process that began at step 0."""
    torch.manual_seed(3)
    model = odd_model()
    alone = copy.deepcopy(model)
    fe.shard(model, mesh, "optim_grads_params", "optim" if len(mesh) == 2 else None)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    expected = torch.optim.AdamW(alone.parameters(), lr=0.1)
    if load:
        weights, state = dcp_state.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        dcp_state.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for each, its_optimizer, its_steps in (
        (model, optimizer, steps),
        (alone, expected, range(steps.stop)),
    ):
        for step in its_steps:
            each(*vector_batch(4, step, width=7)).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    options = dcp_state.StateDictOptions(full_state_dict=True)
    whole = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())
        assert optimizer.state[p]["step"] == steps.stop
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(optimizer.state[p][key]) is FlatDTensor
            torch.testing.assert_close(full(optimizer.state[p][key]), expected.state[q][key])
            if dist.get_rank() == 0:
                assert type(whole[name][key]) is Tensor
                torch.testing.assert_close(whole[name][key], expected.state[q][key])
    if not load:
        weights, state = dcp_state.get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


@pytest.mark.parametrize(
    ("first", "second"),
    [((4,), (2,)), ((1,), (3,)), ((2, 2), (3,)), ((3,), (2, 2)), ((2, 2), (1, 4))],
)
def test_training_goes_on_with_other_ranks(
    ranks: Ranks, tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    path = str(tmp_path)
    ranks.run(train, path, first, False, range(2), world_size=math.prod(first))
    ranks.run(train, path, second, True, range(2, 4), world_size=math.prod(second))
