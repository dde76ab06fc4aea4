"""Optimizer state on a disk: training, checkpoints and errors, against state in memory."""

from __future__ import annotations

import copy
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint.joint_optimizer import join_optimizers
from fsdp_engine.optim import offloaded_step
from tests.extensions.offload.offloaded import (
    all_roles,
    assert_same,
    load,
    make,
    on_disk,
    save,
    step,
    values,
)
from tests.models import Transformer, token_batch
from tests.optim.optimizers import MAKERS, Lion, counting_chunks
from tests.pairs import FEW_PAIRS, PAIRS
from tests.pool import Ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """``shard`` makes a group for a process that has none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def compare(pair: tuple[str, str], name: str, micro: int, folder: str) -> None:
    """Train with state in memory, with it on disk, and with everything there."""
    results = []
    everything = on_disk(folder, all_roles(pair[0]))
    for offload in (None, on_disk(folder), everything)[: 1 + micro]:
        model, engine, optimizer = make(pair, name, offload)
        with counting_chunks() as counts:
            losses = [step(model, engine, optimizer, k, micro) for k in range(NUM_STEPS)]
        weights = engine.full_state_dict()
        has_state = any(isinstance(each, tuple) and each[2].ndim for each in values(optimizer))
        results.append((losses, weights, values(optimizer)))
        most = 2 if has_state and offload is not None else 0
        # Of an optimizer without state, gradients and weights are brought all the same.
        assert max(counts) in {most, 2 if offload is everything else most}
        assert "optimizer" not in engine.memory_bytes()
        assert not os.listdir(folder)  # its files have no names
    for found in results[1:]:
        assert found[0] == results[0][0]
        for key, value in results[0][1].items():
            assert torch.equal(value, found[1][key]), key
        assert_same(found[2], results[0][2])


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
def test_training_has_the_bits_of_state_in_memory(
    name: str, level: str, micro: int, tmp_path: Path
) -> None:
    compare((level, "no_shard"), name, micro, str(tmp_path))


@pytest.mark.parametrize("name", ["AdamW-fused", "Lion"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_so_it_has_on_two_axes(
    ranks: Ranks, pair: tuple[str, str], name: str, tmp_path: Path
) -> None:
    ranks.run(compare, pair, name, 2, str(tmp_path), world_size=4)


def test_the_first_step_and_a_model_without_blocks_are_like_others(tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        fe.shard(model, strategy="optim_grads_params", offload=offload)
        optimizer = fe.shard_optimizer(torch.optim.Adam(model.parameters()))
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        found.append(values(optimizer))
    assert_same(found[1], found[0])


class Closure:
    """Another batch in each call."""

    num_calls = 0

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    def __call__(self) -> Tensor:
        self.num_calls += 1
        self._optimizer.zero_grad()
        loss: Tensor = self._model(*token_batch(4, self.num_calls))
        loss.backward()
        return loss


def test_a_closure_is_called_once_for_all_units(tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        model, _, optimizer = make(("optim_grads_params", "no_shard"), "AdamW", offload)
        closure = Closure(model, optimizer)
        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert closure.num_calls == 3
        found.append([losses, *values(optimizer)])
    assert_same(found[1], found[0])


def test_hooks_change_gradients_and_hyperparameters_before_the_first_unit_steps(
    tmp_path: Path,
) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        model, engine, optimizer = make(("optim_grads_params", "no_shard"), "AdamW", offload)

        def change(optimizer: Any, *args: object, engine: fe.Engine = engine) -> None:
            engine.clip_grad_norm_(0.01)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

        optimizer.register_step_pre_hook(change)
        for number in range(3):
            step(model, engine, optimizer, number)
        found.append(values(optimizer))
    assert_same(found[1], found[0])


def test_hooks_after_a_step_see_what_it_stored(tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        model = Transformer()
        engine = fe.shard(model, strategy="optim", offload=offload, min_unit_size=0)
        optimizer: Any = Lion(model.parameters())
        seen: list[Any] = []

        def look(optimizer: Any, *args: object, seen: list[Any] = seen) -> None:
            has_state = [len(optimizer.state[param]) for param in optimizer.state]
            seen.append((has_state, optimizer.param_groups[0]["k"], optimizer.num_steps))

        optimizer.register_step_post_hook(look)
        fe.shard_optimizer(optimizer, elementwise=True)
        for number in range(2):
            step(model, engine, optimizer, number)
        found.append(seen)
    assert found[1] == found[0]


class Scalars(torch.nn.Module):
    """A vector, if there is one, and parameters of no dimension."""

    def __init__(self, has_vector: bool) -> None:
        super().__init__()
        self.scale, self.shift = (torch.nn.Parameter(torch.tensor(k)) for k in (1.0, 2.0))
        self.vector = torch.nn.Parameter(torch.ones(3)) if has_vector else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        return x if self.vector is None else x * self.vector


class Counting(torch.optim.Optimizer):
    """Counts its steps in its state, in place, and takes smaller ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["count"] = torch.zeros(())  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.state["count"].add_(1)  # type: ignore[index]
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.sub_(average.mul_(0.9).add_(param.grad) / count, alpha=group["lr"])


def test_an_entry_of_the_state_that_is_of_no_parameter_changes_once_in_a_step(
    tmp_path: Path,
) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = Transformer()
        engine = fe.shard(model, strategy="optim", offload=offload, min_unit_size=0)
        optimizer = fe.shard_optimizer(Counting(model.parameters()), elementwise=True)
        assert optimizer.state["count"] == 0  # type: ignore[index]
        for number in (0, 1, 3):
            step(model, engine, optimizer, number)
        assert optimizer.state["count"] == 3  # type: ignore[index]
        found.append(list(engine.full_state_dict().values()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Keeping(torch.optim.SGD):
    """Keeps state of each parameter elsewhere than in tensors of its shape."""

    def __init__(self, params: Any, state: Any) -> None:
        super().__init__(params, lr=0.1)
        self._made = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["kept"] = self._made


@pytest.mark.parametrize(
    ("state", "found"),
    [({}, "'kept' of dict"), ([torch.zeros(3)], "'kept' of list"), (torch.zeros(2), r"shape \(2,")],
)
def test_state_that_is_no_tensor_of_the_parameters_shape_is_refused(
    state: Any, found: str, tmp_path: Path
) -> None:
    model = Transformer()
    fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    with pytest.raises(ValueError, match=f"state in tensors of the parameter's shape.*{found}"):
        fe.shard_optimizer(Keeping(model.parameters(), state), elementwise=True)


class Rounding(torch.optim.SGD):
    """Rounds its state after two steps."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_steps += 1
        for param in self.param_groups[0]["params"]:
            if self.num_steps > 2:
                self.state[param]["momentum_buffer"] = self.state[param]["momentum_buffer"].half()


def test_state_that_a_later_step_makes_in_another_dtype_is_an_error(tmp_path: Path) -> None:
    model = Transformer()
    engine = fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    optimizer = Rounding(model.parameters(), lr=0.1, momentum=0.9)
    fe.shard_optimizer(optimizer, elementwise=True)
    for number in (0, 1):
        step(model, engine, optimizer, number)
    with pytest.raises(RuntimeError, match=r"'momentum_buffer' in torch.float32.*torch.float16"):
        step(model, engine, optimizer, 3)


class Remembering(torch.optim.Optimizer):
    """Sets the state of a parameter that has none, and keeps some of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "all" not in self.state:
            self.state["all"] = {"first": self.param_groups[0]["lr"]}  # type: ignore[index]
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state:
                    self.state[param] = {"average": torch.zeros_like(param), "none": None}
                average = self.state[param]["average"]
                param.sub_(average.mul_(0.9).add_(param.grad), alpha=group["lr"])
                group["lr"] *= 0.5  # of the next step


@pytest.mark.parametrize("has_vector", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_state_of_scalars_of_other_tensors_and_of_none_is_kept(
    level: str, has_vector: bool, tmp_path: Path
) -> None:
    found: list[list[Any]] = []
    for offload in (None, on_disk(tmp_path)):
        model, other = Scalars(has_vector), torch.nn.Parameter(torch.ones(3))
        engine = fe.shard(model, strategy=level, offload=offload)
        groups = [{"params": [param]} for param in [*model.parameters(), other]]
        optimizer = fe.shard_optimizer(Remembering(groups), elementwise=True)
        for _ in range(3):
            (model(torch.ones(2, 3)).sum() * other.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        packed = optimizer.state_dict()
        assert packed["state"].pop("all") == {"first": 0.1}
        state = [packed["state"][index]["average"] for index in sorted(packed["state"])]
        full = [getattr(each, "local", each) for each in state]
        found.append([*full, *engine.full_state_dict().values(), other.detach()])
    for one, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(one, expected)


def test_a_parameter_moves_to_another_group_and_a_group_without_any_is_added(
    tmp_path: Path,
) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        model, engine, optimizer = make(("optim", "no_shard"), "AdamW", offload)
        for number in range(3):
            step(model, engine, optimizer, number)
            first, second, *_ = optimizer.param_groups
            second["params"].insert(0, first["params"].pop())
            optimizer.add_param_group({"params": []})
        step(model, engine, optimizer, 3)
        found.append(values(optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_scaler_skips_a_step(level: str, fused: bool, tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = Transformer()
        fe.shard(model, strategy=level, offload=offload, min_unit_size=0)
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(3):
            loss = scaler.scale(model(*token_batch(4, number)))
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        assert scaler.get_scale() == 4.0
        found.append(values(optimizer))
    assert_same(found[1], found[0])


class Odd(torch.nn.Module):
    """Frozen, tied, tiny, unused and sometimes used layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.one, self.tied = (torch.nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.one.weight
        self.tiny, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)
        self.sometimes = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor, number: int) -> Tensor:
        y = self.tied(self.one(self.frozen(x)))
        if number % 2:
            y = self.sometimes(y)
        return (y.sum(-1, keepdim=True) + self.tiny(x[..., :1])).square().mean()


def compare_odd(pair: tuple[str, str], folder: str) -> None:
    found = []
    for offload in (None, on_disk(folder)):
        torch.manual_seed(0)
        model = Odd()
        options = {"units": [torch.nn.Linear], "min_unit_size": 0}
        engine = fe.shard(model, (2, 2), *pair, offload=offload, **options)
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for number in range(4):
            torch.manual_seed(number + dist.get_rank())
            model(torch.randn(2, 3), number).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 3 == 0)
        weights = engine.full_state_dict()
        found.append([*values(optimizer), *((key, "", each) for key, each in weights.items())])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="-".join)
def test_units_without_gradients_or_elements_step_as_in_memory(
    ranks: Ranks, pair: tuple[str, str], tmp_path: Path
) -> None:
    ranks.run(compare_odd, pair, str(tmp_path), world_size=4)


# Saving and loading.


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_loads_on_other_ranks_with_state_elsewhere(
    ranks: Ranks, saves: bool, loads: bool, steps_before: int, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    place = [on_disk(disk) if there else None for there in (saves, loads)]
    first, second = ("optim_grads_params", "no_shard"), ("optim", "no_shard")
    expected = ranks.run(save, str(tmp_path), place[0], first, world_size=2)[0]
    found = ranks.run(load, str(tmp_path), place[1], second, steps_before, world_size=1)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_state_dict_of_torch_goes_home_and_state_that_is_replaced_does_too(
    tmp_path: Path,
) -> None:
    pair = ("optim_grads_params", "no_shard")
    model, engine, optimizer = make(pair, "AdamW", None)
    for number in range(2):
        step(model, engine, optimizer, number)
    saved = copy.deepcopy(optimizer.state_dict())  # torch would share counters of steps
    weights = engine.full_state_dict()
    other, other_engine, offloaded = make(pair, "AdamW", on_disk(tmp_path))
    other.load_state_dict(weights)
    with counting_chunks() as counts:
        offloaded.load_state_dict(saved)
    assert counts == [0]
    assert_same(values(offloaded), values(optimizer))
    param = next(iter(offloaded.state))
    for each, each_param in ((optimizer, next(iter(optimizer.state))), (offloaded, param)):
        each.state[each_param]["exp_avg"] = torch.zeros_like(each.state[each_param]["exp_avg"])
    for number in (3, 4):
        step(model, engine, optimizer, number)
        step(other, other_engine, offloaded, number)
    assert_same(values(offloaded), values(optimizer))


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_fp32_state_of_bf16_weights_stays_fp32(level: str, is_loaded: bool, tmp_path: Path) -> None:
    found: list[list[Any]] = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = Transformer()
        policy = fe.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
        options = {"mp_policy": policy, "offload": offload, "min_unit_size": 0}
        engine = fe.shard(model, strategy=level, **options)
        optimizer = fe.shard_optimizer(MAKERS["RMSprop"](model.parameters()))
        if not found or not is_loaded:
            step(model, engine, optimizer, 0)
            optimizer.state_dict()  # waits until state is home
            for state in optimizer.state.values():
                state |= {key: state[key].float() for key in ("square_avg", "momentum_buffer")}
            if is_loaded:
                fe.save_checkpoint(tmp_path / "saved", engine, optimizer)
        if is_loaded:
            fe.load_checkpoint(tmp_path / "saved", engine, optimizer)
        for number in (1, 3):
            step(model, engine, optimizer, number)
            assert not os.listdir(tmp_path) or is_loaded
        found.append(values(optimizer))
    kinds = {each[1]: each[2].dtype for each in found[1] if isinstance(each, tuple)}
    half = {"grad_avg": torch.bfloat16}
    whole = dict.fromkeys(("square_avg", "momentum_buffer", "step"), torch.float32)
    assert kinds == half | whole
    assert_same(found[1], found[0])


def test_several_optimizers_of_an_engine_are_saved_and_loaded_as_one(tmp_path: Path) -> None:
    found = []
    for saves in (True, False):
        torch.manual_seed(0)
        model = Transformer()
        engine = fe.shard(model, strategy="optim_grads", offload=on_disk(tmp_path))
        params = list(model.parameters())
        optimizers = [
            fe.shard_optimizer(torch.optim.AdamW(part)) for part in (params[:4], params[4:])
        ]
        if saves:
            model(*token_batch(4, 0)).backward()
            for optimizer in optimizers:
                optimizer.step()
            fe.save_checkpoint(tmp_path / "saved", engine, join_optimizers(optimizers))
        else:
            fe.load_checkpoint(tmp_path / "saved", engine, join_optimizers(optimizers))
        found.append([each for optimizer in optimizers for each in values(optimizer)])
    assert_same(found[1], found[0])


def test_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, engine, optimizer = make(("optim", "no_shard"), "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 0)
    before, saved = values(optimizer), copy.deepcopy(optimizer.state_dict())
    last = max(saved["state"])
    for key, value, problem in (
        ("max_exp_avg_sq", saved["state"][last]["exp_avg_sq"], "exp_avg, exp_avg_sq, .*found 'max"),
        ("exp_avg", torch.ones(1), r"'exp_avg' .* in its shape, .*found \(1,\)"),
    ):
        state = {**saved["state"], last: {**saved["state"][last], key: value}}
        with pytest.raises(ValueError, match=problem):
            optimizer.load_state_dict({**saved, "state": state})
    assert_same(values(optimizer), before)
    step(model, engine, optimizer, 1)


def test_a_checkpoint_with_more_state_changes_nothing(tmp_path: Path) -> None:
    pair = ("optim", "no_shard")
    model, engine, optimizer = make(pair, "Adam-amsgrad", None)
    step(model, engine, optimizer, 0)
    fe.save_checkpoint(tmp_path / "saved", engine, optimizer)
    model, engine, optimizer = make(pair, "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 1)
    before = values(optimizer)
    with pytest.raises(ValueError, match=r"the state exp_avg, exp_avg_sq, .*'max_exp_avg"):
        fe.load_checkpoint(tmp_path / "saved", engine, optimizer)
    assert_same(values(optimizer), before)
    step(model, engine, optimizer, 3)


# Changes and errors.


def test_parameters_that_are_added_have_a_home_of_their_own(tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path)):
        torch.manual_seed(0)
        model = Transformer()
        engine = fe.shard(model, strategy="optim_grads", offload=offload, min_unit_size=0)
        params = list(model.parameters())
        optimizer = fe.shard_optimizer(torch.optim.AdamW(params[:4]))
        for number in range(3):
            if number == 1:
                optimizer.add_param_group({"params": params[4:], "lr": 0.01})
            step(model, engine, optimizer, number)
        found.append(values(optimizer))
    assert_same(found[1], found[0])


def test_a_step_that_raises_in_any_unit_keeps_no_memory_and_the_next_one_steps(
    tmp_path: Path,
) -> None:
    class Failing(Lion):
        calls_left = -1

        def step(self, closure: Any = None) -> Any:
            Failing.calls_left -= 1
            if not Failing.calls_left:
                raise ArithmeticError("planted")
            return super().step(closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAKERS, "Lion", Failing)
        model, engine, optimizer = make(("optim", "no_shard"), "Lion", on_disk(tmp_path))
    Failing.calls_left = 0
    step(model, engine, optimizer, 0)
    num_calls = -Failing.calls_left
    assert num_calls > 3
    for number in range(num_calls):
        Failing.calls_left = 1 + number
        with pytest.raises(ArithmeticError, match="planted"):
            step(model, engine, optimizer, 1)
        assert "optimizer" not in engine.memory_bytes()
        step(model, engine, optimizer, 3)
    assert optimizer.num_steps == 1 + num_calls


def test_an_optimizer_that_was_not_sharded_is_refused_at_its_step(tmp_path: Path) -> None:
    model = Transformer()
    fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    model(*token_batch(4, 0)).backward()
    for closure in (None, lambda: 0.0):
        with pytest.raises(RuntimeError, match=r"fe.shard_optimizer\(optimizer\) before its first"):
            optimizer.step(closure)
    fe.shard_optimizer(optimizer)
    optimizer.step()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload.optimizer_state: expected one of"):
        fe.Offload(optimizer_state="gpu")
    with pytest.raises(ValueError, match=r"offload.folder: expected one for 'disk'"):
        fe.Offload(optimizer_state="disk")
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=r"offload.folder: .*can be written; found .*missing"):
        fe.shard(Transformer(), offload=on_disk(missing))
    with pytest.raises(TypeError, match=r"offload: expected an fe.Offload or None; found 'host'"):
        fe.shard(Transformer(), offload="host")  # type: ignore[arg-type]
    fe.shard(Transformer(), offload=fe.Offload(optimizer_state="host"))


def shard_unevenly(folder: str) -> str:
    with pytest.raises(ValueError, match="expected the same parameters and options") as caught:
        fe.shard(Transformer(), offload=on_disk(folder) if dist.get_rank() else None)
    return str(caught.value)


def test_an_offload_of_one_rank_is_an_error_of_all(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(shard_unevenly, str(tmp_path), world_size=2):
        assert "'optimizer_state': 'disk'" in message


def test_a_disk_that_is_too_small_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = Transformer()
    fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"expected \d+ bytes for state; found \d+"):
        fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    assert not os.listdir(tmp_path)


def test_a_read_that_fails_ends_the_step_with_the_disks_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine, optimizer = make(("optim", "no_shard"), "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 0)

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(ValueError, match=r"state on disk: .*Input/output error"):
            step(model, engine, optimizer, 1)
    step(model, engine, optimizer, 3)


@pytest.mark.parametrize("number", range(5))
def test_after_a_write_that_failed_the_next_step_steps(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine, optimizer = make(("optim", "no_shard"), "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 0)
    write, calls = os.pwritev, []

    def broken(*args: Any) -> int:
        calls.append(args)
        if len(calls) == number + 1:
            raise OSError(errno.EIO, "Input/output error")
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(ValueError, match=r"state on disk: .*Input/output error"):
            step(model, engine, optimizer, 1)
    assert "optimizer" not in engine.memory_bytes()
    step(model, engine, optimizer, 3)


def test_a_deleted_optimizer_frees_its_files(tmp_path: Path) -> None:
    model, engine, optimizer = make(("optim", "no_shard"), "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 0)
    folder = "/proc/self/fd"

    def count() -> int:
        links = [os.path.join(folder, name) for name in os.listdir(folder)]
        return sum(str(tmp_path) in os.readlink(each) for each in links if os.path.islink(each))

    gc.collect()
    gc.disable()
    try:
        assert count()
        del optimizer
        assert not count()
    finally:
        gc.enable()


def test_state_in_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer()
    fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    monkeypatch.setattr(offloaded_step, "is_blockwise", lambda optimizer: True)
    with pytest.raises(ValueError, match=r"plain tensors.*found AdamW, whose state is quantised"):
        fe.shard_optimizer(torch.optim.AdamW(model.parameters()))


def test_an_optimizer_of_two_engines_is_refused(tmp_path: Path) -> None:
    models = [Transformer(), Transformer()]
    for model in models:
        fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    params = [param for model in models for param in model.parameters()]
    with pytest.raises(ValueError, match="Make an optimizer for each engine"):
        fe.shard_optimizer(torch.optim.AdamW(params))
