"""Optimizer state in host memory, stepped on the device: numbers, order, memory, waits of the
host."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from fsdp_engine.comm.offloading import Offloading
from fsdp_engine.memory.home import HostHome
from fsdp_engine.optim import offloaded_step
from fsdp_engine.simulation import state_links
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import (
    Job,
    assert_same,
    compare,
    differences,
    on_device,
    random_delays,
    state_of,
    step_by_step,
    train,
    train_with,
)
from tests.models import Transformer, token_batch
from tests.optim.optimizers import MAKERS, counting_chunks
from tests.pairs import EVERY_PAIR, PAIRS
from tests.pool import Ranks, on_ranks

ranks = device.ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
HOST = (("offload", fe.Offload(optimizer_state="host")),)


def make_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(torch.optim.AdamW(params, lr=1e-2))


def job(pair: tuple[str, str], **options: Any) -> Job:
    return Job(pair=pair, options=HOST, make_optimizer=make_adamw, num_micro=1, **options)


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    for seed in range(3):
        with counting_chunks() as counts:
            assert not compare(job((inner, outer), sizes=(1, 2)), seed=seed)
        assert max(counts) == 2


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(1)
def test_every_optimizer_steps_as_with_state_on_the_device(name: str) -> None:
    def maker(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = MAKERS[name](params)
        return fe.shard_optimizer(found, elementwise=name == "Lion")

    given = job(("optim_grads_params", "no_shard"), sizes=(1,))
    given = dataclasses.replace(given, make_optimizer=maker)
    there = train(given, on.NAME)
    here = train(dataclasses.replace(given, options=()), on.NAME)
    assert there.losses == here.losses
    for key, value in here.weights.items():
        assert torch.equal(there.weights[key], value), key


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(1)
def test_state_is_pinned_on_the_host_and_a_step_does_not_wait_for_it(level: str) -> None:
    model = Transformer(3)
    engine = fe.shard(model.to(on.NAME), strategy=level, min_unit_size=0, **dict(HOST))
    optimizer = make_adamw(model.parameters())
    step = step_by_step(engine, optimizer)
    for number in range(2):
        step(number)
    with on.delays(copy=5e-3), on.count_host_syncs() as syncs:
        step(2)
        step(3)
    assert not syncs
    packed = optimizer.state_dict()  # waits for the last copies
    for state in packed["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            local = getattr(state[key], "local", state[key])
            assert local.device.type == "cpu"
            assert local.is_pinned()
            assert bool(local.any())


@on_ranks(1)
def test_waits_of_compute_for_copies_of_state_are_measured() -> None:
    model = Transformer(3)
    engine = fe.shard(model.to(on.NAME), strategy="optim_grads_params", **dict(HOST))
    optimizer = make_adamw(model.parameters())
    assert set(engine.memory_bytes("host")) == {"optimizer"}
    batch = on_device(token_batch(4, 0), engine.mesh.device)
    model(*batch).backward()
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    model(*batch).backward()
    with on.delays(copy=2e-2), engine.measure() as measured:
        optimizer.step()
    assert {each.phase for each in measured.waited} == {"step"}
    units = {unit.label for unit in engine.units if unit.buffers}
    for lane in ("state in", "state out"):
        assert {each.unit for each in measured.waited if each.lane == lane} == units
    assert {each.lane for each in measured.waited} == {"state in", "state out"}
    assert sum(each.seconds for each in measured.waited) > 0
    assert "state out" in str(measured)
    del optimizer
    gc.collect()
    assert engine.memory_bytes("host") == {}


@on_ranks(1)
def test_state_that_a_constructor_makes_goes_home() -> None:
    model = Transformer(2).to(on.NAME)
    fe.shard(model, strategy="optim", min_unit_size=0, **dict(HOST))
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    fe.shard_optimizer(optimizer)
    sums = [getattr(state["sum"], "local", state["sum"]) for state in optimizer.state.values()]
    assert {each.device.type for each in sums} == {"cpu"}
    assert all(bool((each == 0.5).all()) for each in sums)


@on_ranks(1)
def test_a_deleted_optimizer_waits_for_copies_into_its_memory() -> None:
    model = Transformer(2).to(on.NAME)
    engine = fe.shard(model, strategy="optim", min_unit_size=0, **dict(HOST))
    optimizer = make_adamw(model.parameters())
    lane: Any = offloaded_step._OFFLOADS[next(model.parameters())].unit.offload.state_out
    batch = on_device(token_batch(4, 0), engine.mesh.device)
    with on.delays(copy=0.2):
        model(*batch).backward()
        optimizer.step()
        assert not lane._target().query()
        del optimizer
        assert lane._target().query()


# Main weights and gradients there, too.

EVERYTHING = dict.fromkeys(("optimizer_state", "main_weights", "gradients"), "host")
WEIGHTS = {**EVERYTHING, "optimizer_state": "device"}
KINDS = {
    "weights and gradients": fe.Offload(**WEIGHTS),
    "everything": fe.Offload(**EVERYTHING),
    "stepped there": fe.Offload(**EVERYTHING, step_on="host"),
}
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = ("optim_grads_params", "no_shard")
# Pairs whose main weights are no part of compute weights.
FP32_PAIRS = [FULL, ("optim_grads_params", "optim_grads_params")]
BF16_PAIRS = [pair for pair in PAIRS if pair[0].startswith("optim_grads")]


def everything(kind: str, pair: tuple[str, str], **options: Any) -> Job:
    given = job(pair, sizes=(1, 2))
    policy = {} if pair in FP32_PAIRS else {"mp_policy": BF16}
    shard = {"offload": KINDS[kind], **policy, **options}
    return dataclasses.replace(given, options=tuple(shard.items()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "outer"), BF16_PAIRS)
@on_ranks(2)
def test_weights_and_gradients_on_the_host_train_as_on_the_cpu(
    inner: str, outer: str, kind: str
) -> None:
    for seed in range(2):
        with counting_chunks() as counts:
            assert not compare(everything(kind, (inner, outer)), seed=seed)
        assert max(counts) == (0 if kind == "stepped there" else 2)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_microbatches_add_to_gradients_on_the_host(kind: str) -> None:
    """The CPU adds in another order: compared with the device."""
    given = dataclasses.replace(everything(kind, FULL), num_micro=3)
    expected = train(dataclasses.replace(given, options=()), on.NAME)
    with random_delays(1):
        assert not differences(train(given, on.NAME), expected)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_parameters_and_gradients_are_pinned_and_nothing_is_held(kind: str) -> None:
    model = Transformer(3)
    engine = fe.shard(model.to(on.NAME), min_unit_size=0, offload=KINDS[kind])
    optimizer = make_adamw(model.parameters())
    batch = on_device(token_batch(4, 0), engine.mesh.device)
    for _ in range(2):
        model(*batch).backward()
        assert not engine.memory_bytes()
        for param in model.parameters():
            assert param.device.type == param.grad.device.type == "cpu"
            assert param.local.is_pinned()
            assert param.grad.local.is_pinned()
        optimizer.step()
        optimizer.zero_grad()
        assert set(engine.memory_bytes("host")) >= {"main", "grad"}
    assert torch.isfinite(engine.clip_grad_norm_(1.0))


@on_ranks(2)
def test_what_users_do_to_parameters_on_the_host_is_ordered() -> None:
    """Reads after steps, and changes while the device still gathers."""
    results = []
    for device_type in ("cpu", on.NAME):
        torch.manual_seed(1)
        given = everything("everything", FULL)
        engine = given.shard(given.make_model(), device_type)
        model: Any = engine.model
        optimizer = make_adamw(model.parameters())
        batch = on_device(token_batch(4, 0), engine.mesh.device)
        found = []
        with on.delays(copy=5e-3, compute=1e-3):
            for number in range(3):
                model(*batch).backward()
                optimizer.step()
                found += [param.detach().clone() for param in model.parameters()]
                optimizer.zero_grad()
                with torch.no_grad():
                    loss = model(*batch)
                    for param in model.parameters():
                        param.mul_(1.0 + number / 16)
                found += [loss.cpu(), *(param.full_tensor() for param in model.parameters())]
                model.load_state_dict(engine.full_state_dict())
        results.append([getattr(each, "local", each).cpu() for each in found])
    for one, other in zip(*results, strict=True):
        # Not to the bit: AdamW of torch 2.14 rounds otherwise where it steps many tensors at once.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def change_data(params: list[Any], optimizer: Any) -> None:
    for param in params:
        param.data.mul_(1.5)


def change_slices(params: list[Any], optimizer: Any) -> None:
    for param in params:
        (param.to_local() if isinstance(param, fe.FlatDTensor) else param).mul_(1.5)


def change_lists(params: list[Any], optimizer: Any) -> None:
    torch._foreach_mul_(params, 1.5)


def step_late(params: list[Any], optimizer: Any) -> None:
    optimizer.step()


def after_a_backward(options: Any) -> tuple[Any, torch.optim.Optimizer, tuple[Tensor, ...]]:
    """A model with gradients, its optimizer and the batch."""
    torch.manual_seed(1)
    given = dataclasses.replace(job(FULL, sizes=(1,)), options=options)
    engine = given.shard(given.make_model(), on.NAME)
    model: Any = engine.model
    optimizer = make_adamw(model.parameters())
    batch = on_device(token_batch(4, 0), engine.mesh.device)
    model(*batch).backward()
    return model, optimizer, batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [change_data, change_slices, change_lists, step_late])
@on_ranks(1)
def test_a_change_waits_for_what_an_evaluation_reads(change: Any, kind: str) -> None:
    results = []
    for options in ((), (("offload", KINDS[kind]),)):
        model, optimizer, batch = after_a_backward(options)
        with on.delays(copy=1e-2, compute=1e-3), torch.no_grad():
            loss = model(*batch)
            change(list(model.parameters()), optimizer)
            results.append([loss.cpu(), model(*batch).cpu()])
    assert torch.equal(torch.stack(results[1]), torch.stack(results[0]))


@on_ranks(1)
def test_a_step_waits_for_a_forward_without_a_backward() -> None:
    results = []
    for options in ((), (("offload", KINDS["stepped there"]),)):
        model, optimizer, batch = after_a_backward(options)
        with on.delays(copy=1e-2, compute=1e-3):
            loss = model(*batch)
            optimizer.step()
            results.append(loss.detach().cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("offload", "level", "problem"),
    [
        ({"main_weights": "host"}, FULL[0], "offload.gradients: expected 'host', where main_w"),
        ({"gradients": "host"}, FULL[0], "offload.gradients: expected 'device', where main_w"),
        (
            WEIGHTS,
            "optim_grads",
            "offload.main_weights: expected main weights of .* found .optim_grads, no_shard.",
        ),
    ],
)
@on_ranks(1)
def test_places_that_cannot_be_are_refused(
    offload: dict[str, str], level: str, problem: str
) -> None:
    model = Transformer(2).to(on.NAME)
    with pytest.raises(ValueError, match=problem):
        fe.shard(model, strategy=level, offload=fe.Offload(**offload))  # type: ignore[arg-type]
    fe.shard(model)


@pytest.mark.parametrize("left_out", ["bring", "take", "wait"])
@on_ranks(1)
def test_without_a_copy_or_a_wait_of_weights_training_is_wrong(left_out: str) -> None:
    """The control of the others: they would notice."""
    given = dataclasses.replace(everything("stepped there", FULL), sizes=(1,))
    expected = train(given, "cpu")
    with pytest.MonkeyPatch.context() as patch, on.delays(copy=2e-2):
        if left_out == "wait":
            patch.setattr(Offloading, "wait", lambda self: None)
        else:
            patch.setattr(HostHome, left_out, lambda self, *args: iter(()))
        assert differences(train(given, on.NAME), expected)


@pytest.mark.parametrize("lane", [0, 1])
@on_ranks(1)
def test_a_step_on_the_stream_of_a_lane_is_the_same(lane: int) -> None:
    """Of streams there are few: the caller's can be those of lanes."""
    found = []
    for device_type in ("cpu", on.NAME):
        torch.manual_seed(1)
        given = job(("optim", "no_shard"), sizes=(1,))
        engine = given.shard(given.make_model(), device_type)
        model: Any = engine.model
        optimizer = make_adamw(model.parameters())
        data = given.data()
        stream = None
        if device_type == on.NAME:
            stream = engine._offloadings[0].lanes[lane]._stream  # type: ignore[attr-defined]
        with on.delays(copy=2e-2, compute=1e-2), torch.deferred.stream(stream):
            result = train_with(engine, optimizer, data)
        found.append(result)
    assert not differences(found[1], found[0])


@on_ranks(1)
def test_a_scale_of_the_device_divides_gradients_on_the_host() -> None:
    """torch sends it there, and does not wait."""
    found = []
    for device_type in ("cpu", on.NAME):
        torch.manual_seed(1)
        given = dataclasses.replace(everything("stepped there", FULL), sizes=(1,))
        engine = given.shard(given.make_model(), device_type)
        model: Any = engine.model
        optimizer = make_adamw(model.parameters())
        scaler = torch.amp.GradScaler(device_type, init_scale=256.0)
        batch = on_device(token_batch(4, 0), engine.mesh.device)
        with sdpa_kernel(SDPBackend.MATH):
            scaler.scale(model(*batch)).backward()
        with on.delays(copy=1e-2):
            scaler.unscale_(optimizer)
            found.append([param.grad.local.clone() for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def prepare(level: str, device_type: str, seed: int = 1) -> tuple[fe.Engine, Any]:
    torch.manual_seed(seed)
    options = HOST if device_type == on.NAME else ()
    given = Job(pair=(level, "no_shard"), sizes=(dist.get_world_size(),), options=options)
    model = given.make_model()
    engine = given.shard(model, device_type)
    return engine, make_adamw(model.parameters())


def save_and_load(level: str, folder: str) -> None:
    """Saves in the background and trains at once; loads into optimizers with and without state."""
    data = job((level, "no_shard"), sizes=(dist.get_world_size(),)).data()
    expected = prepare(level, "cpu")
    train_with(*expected, data)
    at_the_call = state_of(*expected)
    rest = train_with(*expected, data)
    at_the_end = state_of(*expected)
    with (
        torch.deferred.stream(torch.deferred.Stream()),
        on.delays(copy=1e-3),
        counting_chunks() as counts,
    ):
        engine, optimizer = prepare(level, on.NAME)
        train_with(engine, optimizer, data)
        checkpointer = fe.Checkpointer(folder, engine, optimizer)
        in_steps = len(counts)
        checkpointer.save_async(0)
        assert len(counts) == in_steps
        assert not differences(train_with(engine, optimizer, data), rest)
        checkpointer.wait()
        for has_stepped in (False, True):
            engine, optimizer = prepare(level, on.NAME, seed=2)
            if has_stepped:
                train_with(engine, optimizer, data)
            in_steps = len(counts)
            fe.Checkpointer(folder, engine, optimizer).load()
            assert_same(state_of(engine, optimizer), at_the_call)
            assert len(counts) == in_steps
            assert not differences(train_with(engine, optimizer, data), rest)
        packed = copy.deepcopy(optimizer.state_dict())
        other_engine, other = prepare(level, on.NAME, seed=3)
        other_engine.model.load_state_dict(engine.model.state_dict())
        in_steps = len(counts)
        other.load_state_dict(packed)
        assert_same(state_of(other_engine, other), at_the_end)
        assert len(counts) == in_steps
    assert max(counts) == 2


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_saving_and_loading_bring_no_state_to_the_device(
    ranks: Ranks, level: str, tmp_path: Path
) -> None:
    ranks.run(save_and_load, level, str(tmp_path / "saved"), world_size=2)


@pytest.mark.parametrize("left_out", ["state in", "state out"])
@on_ranks(1)
def test_without_a_wait_or_a_copy_training_is_wrong(left_out: str) -> None:
    """The control of the others: they would notice."""
    given = job(("optim", "no_shard"), sizes=(1,))
    expected = train(given, "cpu")
    with pytest.MonkeyPatch.context() as patch, on.delays(copy=2e-2):
        if left_out == "state in":
            patch.setattr(offloaded_step._Chunk, "await_brought", lambda self: None)
        else:
            patch.setattr(HostHome, "take", lambda self, work: iter(()))
        assert differences(train(given, on.NAME), expected)


@on_ranks(1)
def test_the_link_to_the_host_is_measured() -> None:
    device = torch.device(on.NAME, 0)
    delay = 2e-3  # of each copy, also of a small one
    with pytest.MonkeyPatch.context() as patch, on.delays(copy=delay):
        patch.setattr(state_links, "_LARGE_ON_DEVICE", 2**20)
        found = state_links.measure_host_link(device, 0.02, lambda value: value)
    assert found.latency >= delay / 2
    for rate in (found.into, found.out):
        assert 0 < rate <= 2 * 2**20 / delay
    assert found.both > 0
    assert found.both <= found.into + found.out
