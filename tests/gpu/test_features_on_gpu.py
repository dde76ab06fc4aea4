"""The engine with other features of torch, on a CUDA device. Skipped where there is none.

One rank runs over NCCL; several share the device over gloo, whose collectives go through host
memory.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from fsdp_engine.planner.simulation.calibrate import calibrate
from tests.gpu.scene import (
    LEVEL_3,
    LEVELS,
    ON_GPU,
    WIDTH,
    Batches,
    Model,
    Trained,
    assert_same,
    make_batches,
    make_model,
    make_sgd,
    process_group,
    requested_bytes,
    train_sharded,
)
from tests.pool import Ranks

pytestmark = ON_GPU

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("no_shard", "optim_grads_params"),
    ("optim", "optim"),
    ("no_shard", "optim_grads"),
    ("optim", "optim_grads_params"),
    ("optim_grads_params", "optim_grads_params"),
]


def with_adamw(
    mesh: DeviceMesh, level: str = LEVEL_3, offload: fe.Offload | None = None, **options: Any
) -> tuple[Model, fe.Engine, torch.optim.Optimizer]:
    model = make_model()
    options |= {"extensions": [] if offload is None else [offload]}
    options |= {"options": fe.Options(min_unit_size=0), "strategy": level}
    engine = fe.shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, engine, fe.shard_optimizer(optimizer)


def everything(place: str, **options: Any) -> fe.Offload:
    roles = dict.fromkeys(("optimizer_state", "main_weights", "gradients"), place)
    return fe.Offload(**roles, **options)


def steps(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses = []
    for x, target in batches:
        loss = model(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Compiled and checkpointed blocks.


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_blocks_train_as_they_do_uncompiled(mesh: DeviceMesh, level: str) -> None:
    found = []
    for compiles in (False, True):
        model = make_model()
        for block in model.blocks if compiles else ():
            block.compile()
        found.append(train_sharded(model, fe.shard(model, mesh=mesh, strategy=level), batches()))
    assert_same(found[1], found[0], tolerance=1e-4)


def batches() -> Batches:
    return make_batches(6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpointed_blocks_train_as_they_do_without(
    mesh: DeviceMesh, level: str, use_reentrant: bool
) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            x.requires_grad_()  # re-entrant checkpoints need an input with a gradient
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return nn.functional.mse_loss(self.head(x).float(), target.float())

    found = []
    for kind in (Model, Checkpointed):
        model = make_model(kind)
        found.append(train_sharded(model, fe.shard(model, mesh=mesh, strategy=level), batches()))
    assert_same(found[1], found[0], tolerance=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_grad_scaler_skips_the_step_with_an_infinite_gradient(
    mesh: DeviceMesh, level: str
) -> None:
    model = make_model()
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.float16)
    engine = fe.shard(model, mesh=mesh, strategy=level, mp_policy=policy)
    optimizer = make_sgd(model)
    fe.shard_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    weights, scales = [], []
    for number, (x, target) in enumerate(make_batches(3)):
        loss = model(x, target)
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        engine.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(engine.full_state_dict()["head.weight"])
        scales.append(scaler.get_scale())
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert bool(weights[2].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2s_calls_train_as_fsdp2_does(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    from torch.distributed import fsdp as torch_fsdp

    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=dtype)
    kinds = [({}, 1e-2)]
    if dtype == torch.float32:
        kinds = [({}, 1e-5), ({"offload_policy": torch_fsdp.CPUOffloadPolicy()}, 1e-4)]
    for options, rel in kinds:
        losses = []
        for shard in (torch_fsdp.fully_shard, fully_shard):
            model = make_model()
            for module in (*model.blocks, model):
                shard(module, mesh=mesh, mp_policy=policy, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses.append(steps(model, optimizer, batches()))
            place = {param.device.type for param in model.parameters()}
            assert place == {"cpu" if options else "cuda"}
        assert losses[1] == pytest.approx(losses[0], rel=rel)


# Several ranks on one device.


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_axes_on_one_device_train_like_one_process(ranks: Ranks, pair: tuple[str, str]) -> None:
    with process_group("nccl", 1) as one:
        model = make_model()
        expected = train_sharded(model, fe.shard(model, mesh=one, strategy="no_shard"), batches())
    results = ranks.run(_train_over_two_axes, *pair, world_size=4, timeout=200)
    each = [losses for losses, _ in results]
    losses = [sum(values) / 4 for values in zip(*each, strict=True)]
    for _, weights in results:
        assert_same((losses, weights), expected, tolerance=2e-5)


def _train_over_two_axes(outer: str, inner: str) -> Trained:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    model = make_model()
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=inner,
        outer_dp_sharding_strategy=outer,
    )
    engine = fe.shard(model, mesh=mesh, config=config)
    mine = [(x.chunk(4)[rank], target.chunk(4)[rank]) for x, target in make_batches(6)]
    return train_sharded(model, engine, mine)


class Skipping(Model):
    """Leaves out its second block on odd ranks, and on even ranks the third in every second use."""

    uses = 0

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.uses += 1
        rank = dist.get_rank() if dist.get_world_size() > 1 else self.rank
        for number, block in enumerate(self.blocks):
            if not self.leaves_out(rank, number):
                x = block(x)
        return nn.functional.mse_loss(self.head(x).float(), target.float())

    rank = 0

    def leaves_out(self, rank: int, number: int) -> bool:
        return number == 1 if rank % 2 else number == 2 and self.uses % 2 == 0


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_that_leave_out_different_blocks_train_like_one_process(
    ranks: Ranks, level: str
) -> None:
    model = make_model(Skipping)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with process_group("nccl", 1):
        for x, target in make_batches(4):
            for model.rank in (0, 1):
                (model(x.chunk(2)[model.rank], target.chunk(2)[model.rank]) / 2).backward()
                model.uses -= model.rank == 0
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    for weights in ranks.run(_train_with_blocks_left_out, level, world_size=2, timeout=200):
        assert_same(([], weights), ([], expected), tolerance=2e-5)


def _train_with_blocks_left_out(level: str) -> dict[str, Tensor]:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2,))
    rank = dist.get_rank()
    model = make_model(Skipping)
    engine = fe.shard(model, mesh=mesh, strategy=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fe.shard_optimizer(optimizer)
    for x, target in make_batches(4):
        with engine.together():
            model(x.chunk(2)[rank], target.chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_optimizer_state_on_the_host_trains_as_on_the_device(mesh: DeviceMesh, level: str) -> None:
    found = []
    host = fe.Offload(optimizer_state="host")
    for offload in (None, host, dataclasses.replace(host, overlap_forward=True)):
        model, engine, optimizer = with_adamw(mesh, level, offload)
        losses = steps(model, optimizer, batches())
        found.append((losses, engine.full_state_dict()))
        for state in optimizer.state_dict()["state"].values():
            local = getattr(state["exp_avg"], "local", state["exp_avg"])
            assert local.is_cuda == (offload is None)
    for each in found[1:]:
        assert_same(each, found[0])


def test_a_step_beside_forward_trains_as_one_before_it(mesh: DeviceMesh) -> None:
    """The host does not wait for the device between steps, and memory is reused many times."""
    found = []
    host = fe.Offload(optimizer_state="host")
    for offload in (host, dataclasses.replace(host, overlap_forward=True)):
        model, engine, optimizer = with_adamw(mesh, "optim_grads_params", offload)
        norms, averages = [], [torch.zeros_like(each) for each in model.parameters()]
        for x, target in batches() * 5:
            model(x, target).backward()
            norms.append(engine.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
            taken = torch.full((2**20,), float("nan"), device="cuda")
            if len(norms) % 4 == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
            del taken
        found.append([*norms, *(each.full_tensor() for each in averages)])
        found[-1] += engine.full_state_dict().values()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("step_on", ["device", "host"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_everything_on_the_host_trains_as_on_the_device(
    mesh: DeviceMesh, compute: torch.dtype, step_on: str
) -> None:
    found = []
    policy = fe.MixedPrecisionPolicy(param_dtype=compute)
    for offload in (None, everything("host", step_on=step_on)):
        model, engine, optimizer = with_adamw(mesh, offload=offload, mp_policy=policy)
        losses = []
        for x, target in make_batches(4):
            for part, its_target in zip(x.chunk(2), target.chunk(2), strict=True):
                loss = model(part, its_target)
                loss.backward()
                losses.append(loss.item())
            engine.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        if offload is not None:
            assert not engine.memory_bytes()
            assert all(param.local.is_pinned() for param in model.parameters())
        weights = {name: value.cpu() for name, value in engine.full_state_dict().items()}
        found.append((losses, weights))
    # With offload, the host computes norms and optimizer steps. With weights rounded to bf16 a
    # difference of one bit can change a gradient of about 0, and with it the direction of AdamW's
    # step.
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-4)
    atol = 1e-3 if compute == torch.float32 else 4e-3  # four steps of 1e-3
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=atol)


def test_everything_on_a_disk_trains_as_on_the_device(mesh: DeviceMesh, tmp_path: Path) -> None:
    found = []
    for offload in (None, everything("disk", folder=tmp_path)):
        model, engine, optimizer = with_adamw(mesh, offload=offload)
        losses = steps(model, optimizer, batches())
        if offload is not None:
            assert not engine.memory_bytes()
            assert set(engine.memory_bytes("host")) == {"staging"}
            assert set(engine.memory_bytes("disk")) == {"optimizer", "main", "grad"}
        found.append((losses, engine.full_state_dict()))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("level", LEVELS)
def test_activations_on_the_host_train_as_on_the_device_in_less_memory(
    mesh: DeviceMesh, level: str
) -> None:
    rows = 4096
    # Saved: the inputs of the norm and of its three following layers; two of these inputs are four
    # times as wide.
    saved_by_a_block = 10 * 4 * rows * WIDTH
    found, peaks = [], []
    for checkpointing in (False, fe.OffloadActivations(in_flight=0)):
        model, engine, optimizer = with_adamw(mesh, level, checkpointing=checkpointing)
        first, *rest = make_batches(4, rows)
        losses = steps(model, optimizer, [first])
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        losses += steps(model, optimizer, rest)
        peaks.append(requested_bytes("peak") - before)
        found.append((losses, engine.full_state_dict()))
    assert_same(found[1], found[0])
    # One of four blocks is held on the device. Of the other three, one and a half are left as a
    # margin: for inputs and gradients between blocks, and for workspaces of kernels, such as sums
    # of bias gradients, which take up to the size of the gradient.
    assert peaks[1] <= peaks[0] - 1.5 * saved_by_a_block


# Checkpoints.


@pytest.mark.parametrize("level", [*LEVELS, "to directories of nodes"])
def test_a_save_holds_its_step_and_loads_at_another_level(
    mesh: DeviceMesh, level: str, tmp_path: Path
) -> None:
    levels = (LEVEL_3, LEVEL_3)
    if level in LEVELS:
        levels = (level, LEVELS[(LEVELS.index(level) + 1) % 4])
    found = []
    for number, strategy in enumerate(levels):
        model, engine, optimizer = with_adamw(mesh, strategy)
        kind = fe.Checkpointer if level in LEVELS else fe.LocalCheckpointer
        checkpointer: Any = kind(tmp_path, engine, optimizer)
        if number == 0:
            steps(model, optimizer, batches()[:2])
            (checkpointer.save_async if level in LEVELS else checkpointer.save)(2)
        else:
            assert checkpointer.load().step == 2
        # In the first run an asynchronous save is being written.
        found.append((steps(model, optimizer, batches()[2:]), engine.full_state_dict()))
        checkpointer.close()
    assert_same(found[1], found[0], tolerance=1e-6)


# Measuring.


def test_measure_reads_waits_from_events_of_the_device(mesh: DeviceMesh) -> None:
    model = make_model()
    engine = fe.shard(model, mesh=mesh)
    optimizer = make_sgd(model)
    steps(model, optimizer, batches()[:2])
    with engine.measure():
        steps(model, optimizer, batches()[2:])
    text = str(engine.describe())
    assert "Block" in text or "blocks" in text, text


def test_calibrate_measures_the_device_and_its_links(mesh: DeviceMesh) -> None:
    machine = calibrate(seconds=0.5)
    assert torch.cuda.get_device_name() in machine.name
    assert machine.host_runs_ahead
    assert machine.processor.memory_bytes == torch.cuda.mem_get_info()[1]
    flops = machine.processor.matrix_flops
    assert flops[torch.bfloat16] > 1.5 * flops[torch.float32] > 0
    link = machine.host_link
    assert link is not None
    for rate in (link.into, link.out, link.both):  # PCIe or NVLink-C2C
        assert 1e9 < rate < 1e12
    assert machine.host_memory_bandwidth is not None
    assert 1e9 < machine.host_memory_bandwidth < 1e13


# Programs.


LAUNCHERS = [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["python", "torchrun"])
@pytest.mark.parametrize("example", ["train_gpt", "train_transformers", "train_fsdp2"])
def test_an_example_trains_on_the_device(
    example: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    if example == "train_transformers":
        pytest.importorskip("transformers")
    program = f"examples/{example}.py"
    done = subprocess.run(
        [sys.executable, *launcher, program, "--steps", "20", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
