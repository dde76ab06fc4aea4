"""Checkpoints and state dicts of state on a disk."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from tests.async_device import device as on
from tests.async_device.scene import assert_same, differences, state_of, train_with
from tests.checkpoint import moved_state
from tests.extensions.offload.device_jobs import job, trained
from tests.extensions.offload.offloaded import LEVELS, all_roles, make, on_disk, step
from tests.optim.optimizers import counting_chunks
from tests.pool import Ranks

OPTIM = ("optim", "no_shard")


def test_a_state_dict_of_torch_goes_home_and_state_that_is_replaced_does_too(
    tmp_path: Path,
) -> None:
    model, engine, optimizer = make()
    for number in range(2):
        step(model, engine, optimizer, number)
    saved = copy.deepcopy(optimizer.state_dict())  # torch would share counters of steps
    other, other_engine, offloaded = make(offload=on_disk(tmp_path))
    other.load_state_dict(engine.full_state_dict())
    with counting_chunks() as counts:
        offloaded.load_state_dict(saved)
    assert counts == [0]
    assert_same(state_of(other_engine, offloaded), state_of(engine, optimizer))
    for each in (optimizer, offloaded):
        state = each.state[next(iter(each.state))]
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    for number in (3, 4):
        step(model, engine, optimizer, number)
        step(other, other_engine, offloaded, number)
    assert_same(state_of(other_engine, offloaded), state_of(engine, optimizer))


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_fp32_state_of_bf16_weights_stays_fp32(level: str, is_loaded: bool, tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    policy = fe.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
    for offload in (None, on_disk(tmp_path, all_roles(level))):
        model, engine, optimizer = make((level, "no_shard"), "RMSprop", offload, mp_policy=policy)
        if not found or not is_loaded:
            step(model, engine, optimizer, 0)
            optimizer.state_dict()  # waits for copies of state
            for state in optimizer.state.values():
                state |= {key: state[key].float() for key in ("square_avg", "momentum_buffer")}
            if is_loaded:
                fe.save_checkpoint(tmp_path / "saved", engine, optimizer)
        if is_loaded:
            fe.load_checkpoint(tmp_path / "saved", engine, optimizer)
        for number in (1, 3):
            step(model, engine, optimizer, number)
        found.append(state_of(engine, optimizer))
    for name, value in found[1].items():
        is_whole = name.endswith(("square_avg", "momentum_buffer", "step"))
        assert value.dtype == (torch.float32 if is_whole else torch.bfloat16), name
    assert_same(found[1], found[0])


def test_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, engine, optimizer = make(OPTIM, "Adam-amsgrad")
    step(model, engine, optimizer, 0)
    fe.save_checkpoint(tmp_path / "saved", engine, optimizer)
    model, engine, optimizer = make(OPTIM, "AdamW", on_disk(tmp_path))
    step(model, engine, optimizer, 0)
    before, saved = state_of(engine, optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"the state exp_avg, exp_avg_sq, .*'max_exp_avg"):
        fe.load_checkpoint(tmp_path / "saved", engine, optimizer)
    last = max(saved["state"])
    for key, value, problem in (
        ("max_exp_avg_sq", saved["state"][last]["exp_avg_sq"], "exp_avg, exp_avg_sq, .*found 'max"),
        ("exp_avg", torch.ones(1), r"'exp_avg' .* in its shape, .*found \(1,\)"),
    ):
        state = {**saved["state"], last: {**saved["state"][last], key: value}}
        with pytest.raises(ValueError, match=problem):
            optimizer.load_state_dict({**saved, "state": state})
    assert_same(state_of(engine, optimizer), before)
    step(model, engine, optimizer, 1)


def save_and_load_on_the_device(folder: str, level: str, places: list[str | None]) -> None:
    """Save during training with state at each of ``places``. Optimizers with and without state, at
    the same or another place, load these checkpoints."""
    pair = (level, "no_shard")
    data = job(None, sizes=(dist.get_world_size(),)).data()
    engine, optimizer, _ = trained(None, pair=pair, device_type="cpu")
    train_with(engine, optimizer, data, clips=False)
    at_the_call = state_of(engine, optimizer)
    rest = train_with(engine, optimizer, data, clips=False)
    first = places[0]
    pairs = [(first, each) for each in places] + [(each, first) for each in places[1:]]
    stream = torch.deferred.stream(torch.deferred.Stream())
    with stream, on.delays(copy=1e-3), counting_chunks() as counts:
        for place in places:
            engine, optimizer, _ = trained(place, pair=pair)
            train_with(engine, optimizer, data, clips=False)
            checkpointer = fe.Checkpointer(f"{folder}/{place}", engine, optimizer)
            in_steps = len(counts)
            checkpointer.save_async(0)
            assert len(counts) == in_steps
            assert not differences(train_with(engine, optimizer, data, clips=False), rest)
            checkpointer.close()
        for number, (saved, place) in enumerate(pairs):
            engine, optimizer, _ = trained(place, pair=pair, seed=2)
            if number % 2 == 0:
                train_with(engine, optimizer, data, clips=False)
            in_steps = len(counts)
            fe.Checkpointer(f"{folder}/{saved}", engine, optimizer).load()
            assert_same(state_of(engine, optimizer), at_the_call)
            assert len(counts) == in_steps
            assert not differences(train_with(engine, optimizer, data, clips=False), rest)
    assert max(counts) == 2


@pytest.mark.parametrize(
    ("level", "places"),
    [
        ("no_shard", ["state on the host", None]),
        ("optim_grads_params", ["all on a disk", "all on the host"]),
        pytest.param("optim_grads_params", ["all on a disk", None], marks=pytest.mark.thorough),
    ],
)
def test_saving_and_loading_bring_no_state_to_the_device(
    device_ranks: Ranks, level: str, places: list[str | None], tmp_path: Path
) -> None:
    device_ranks.run(save_and_load_on_the_device, str(tmp_path), level, places, world_size=2)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def wrapped(parameters: Any) -> Any:
    return fe.shard_optimizer(adamw(parameters))


def check_moved_state() -> None:
    options = {"offload": fe.Offload("disk", tempfile.gettempdir())}
    moved_state.check_wider_dtypes(wrapped, moved_state.MOVES, adamw, **options)
    moved_state.check_plain_dict_state(fe.shard_optimizer, **options)
    moved_state.check_missing_state(wrapped, "exp_avg", keeps_optimizer=False, **options)


@pytest.mark.parametrize(
    ("world_size", "group"),
    [(2, True), *(pytest.param(1, each, marks=pytest.mark.thorough) for each in (True, False))],
)
def test_offloaded_state_follows_its_parameter_and_is_resumed_or_refused_by_name(
    ranks: Ranks, world_size: int, group: bool
) -> None:
    ranks.run(check_moved_state, world_size=world_size, group=group)
