"""A checkpoint on the device has the values at the call of the save, even if streams lag."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.checkpoint import checkpointer as checkpointer_module
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import (
    FULL_AND_THOROUGH,
    Job,
    assert_same,
    differences,
    on_cpu,
    on_device,
    random_delays,
    small_job,
    state_of,
    train_with,
    weights_of,
)
from tests.pool import Ranks, on_ranks
from tests.reference import adamw

ranks = device.ranks

LEVEL_3 = "optim_grads_params"
JOB = small_job(make_optimizer=adamw, num_micro=1)


def job_at(level: str) -> Job:
    return dataclasses.replace(JOB, pair=(level, "no_shard"), sizes=(dist.get_world_size(),))


def prepare(level: str, device_type: str = on.NAME) -> tuple[fe.Engine, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = JOB.make_model()
    return job_at(level).shard(model, device_type), JOB.make_optimizer(model.parameters())


def run_steps(engine: fe.Engine, optimizer: torch.optim.Optimizer, data: Any) -> None:
    """The steps of ``train_with``; the host reads nothing and does not wait for the device."""
    model: Any = engine.model
    for (parts,) in data:
        model(*on_device(parts[dist.get_rank()], engine.mesh.device)).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def save_while_training(level: str, folder: str) -> None:
    """Saves in the background, trains on at once, and loads the checkpoint into another run."""
    expected, data = prepare(level, "cpu"), JOB.data()
    train_with(*expected, data)
    at_the_call = state_of(*expected)
    rest = train_with(*expected, data)

    # Training is on a stream of its own: torch's writer synchronises the default one, which would
    # hide a copy that races.
    with torch.deferred.stream(torch.deferred.Stream()):
        engine, optimizer = prepare(level)
        checkpointer = fe.Checkpointer(folder, engine, optimizer)
        # Compute is slow: when `save_async` is called, the last step's kernels have not run.
        # Kernels of later steps overwrite weights and state while files are written.
        with on.delays(compute=1e-3, copy=5e-3, collective=2e-3):
            run_steps(engine, optimizer, data)
            checkpointer.save_async(1)
            run_steps(engine, optimizer, data)
            checkpointer.wait()
        assert_same(weights_of(engine), rest.weights)

    for device_type in (on.NAME, "cpu"):
        engine, optimizer = prepare(level, device_type)
        with random_delays(seed=1):
            fe.Checkpointer(folder, engine, optimizer).load()
        assert_same(state_of(engine, optimizer), at_the_call)
        assert not differences(train_with(engine, optimizer, data), rest)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("level", FULL_AND_THOROUGH)
def test_an_asynchronous_save_holds_the_moment_of_the_call_bit_for_bit(
    ranks: Ranks, level: str, num_ranks: int, tmp_path: Path
) -> None:
    ranks.run(save_while_training, level, str(tmp_path), world_size=num_ranks)


def race_shows(folder: str, delay: float) -> bool:
    """Save without waiting for the compute stream, whose jobs take ``delay`` seconds each. Returns
    whether the checkpoint is wrong."""
    with (
        torch.deferred.stream(torch.deferred.Stream()),
        on.delays(compute=delay, copy=5 * delay),
        pytest.MonkeyPatch.context() as patch,
    ):
        engine, optimizer = prepare(LEVEL_3)
        checkpointer = fe.Checkpointer(folder, engine, optimizer)
        # The writer may read host memory that the copy has not written yet. Another step is saved
        # first, so that this memory does not hold the right bytes of an earlier run.
        run_steps(engine, optimizer, JOB.data())
        checkpointer.save(0)
        patch.setattr(checkpointer_module.copy_lanes, "finish_compute", lambda device: None)
        run_steps(engine, optimizer, JOB.data())
        checkpointer.save_async(1)
        checkpointer.wait()
        expected = weights_of(engine)
    engine, optimizer = prepare(LEVEL_3)
    fe.Checkpointer(folder, engine, optimizer).load()
    found = weights_of(engine)
    return not all(torch.equal(found[name], expected[name]) for name in expected)


def save_with_a_copy_that_races(folder: str) -> None:
    # If the host is busy and slow, short jobs have ended before it calls the save, so try longer
    # ones.
    delays = (1e-3, 1e-2, 5e-2, 1e-2, 5e-2, 0.2)
    assert any(race_shows(f"{folder}/{number}", each) for number, each in enumerate(delays))


def test_a_save_whose_copy_does_not_wait_for_the_stream_is_seen(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_with_a_copy_that_races, str(tmp_path), world_size=1)


def save_and_load_plainly(folder: str) -> None:
    data = JOB.data()
    expected = train_with(*prepare(LEVEL_3, "cpu"), data)
    engine, optimizer = prepare("optim")
    with on.delays(compute=1e-3, copy=1e-3, collective=2e-3):
        run_steps(engine, optimizer, data)
        fe.save_checkpoint(f"{folder}/dcp", engine, optimizer)
        fe.export_safetensors(engine, f"{folder}/tensors")
        fe.Checkpointer(f"{folder}/run", engine, optimizer).save(3)
    assert_same(weights_of(engine), expected.weights)
    for level in ("no_shard", LEVEL_3):
        for load in (
            lambda e, o: fe.load_checkpoint(f"{folder}/dcp", e, o),
            lambda e, o: fe.load_safetensors(e, f"{folder}/tensors"),
            lambda e, o: fe.Checkpointer(f"{folder}/run", e, o).load(),
        ):
            engine, optimizer = prepare(level)
            with random_delays(seed=2):
                load(engine, optimizer)
            assert_same(weights_of(engine), expected.weights)


def test_each_kind_of_checkpoint_saved_on_the_device_loads_there(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_and_load_plainly, str(tmp_path), world_size=2)


def edit_and_read() -> None:
    for level in ("optim", LEVEL_3):
        model: Any = JOB.make_model()
        alone = copy.deepcopy(model)
        engine = job_at(level).shard(model, on.NAME)
        with random_delays(seed=3), torch.no_grad():
            with engine.unsharded(model):
                for parameter in model.parameters():
                    parameter.mul_(2).add_(1)
            for name, parameter in alone.named_parameters():
                assert torch.equal(engine.full_tensor(name).cpu(), parameter * 2 + 1), name


def test_edits_of_full_weights_are_written_back(ranks: Ranks) -> None:
    for num_ranks in (1, 2):
        ranks.run(edit_and_read, world_size=num_ranks)


@pytest.mark.parametrize("level", ["optim_grads", LEVEL_3])
@on_ranks(2)
def test_training_goes_on_after_an_error_and_a_reset(level: str) -> None:
    """Forward and backward raise with gathers in flight; ``reset()`` keeps the weights."""
    job = job_at(level)
    expected = on_cpu(job)
    engine, optimizer = prepare(level)
    model: Any = engine.model
    batch = on_device(job.make_batch(2, 5), on.DEVICE)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with random_delays(seed=4):
        for where in (
            model.last.register_forward_hook,
            model.blocks[0].register_full_backward_hook,
        ):
            handle = where(fail)
            with pytest.raises(ZeroDivisionError):
                model(*batch).backward()
            handle.remove()
            engine.reset()
        assert not differences(train_with(engine, optimizer, job.data()), expected)
