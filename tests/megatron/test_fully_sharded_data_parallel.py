"""``FullyShardedDataParallel`` and ``TorchFullyShardedDataParallel``: arguments and attributes."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.megatron import FullyShardedDataParallel, TorchFullyShardedDataParallel
from tests.megatron import core_on_cpu
from tests.megatron.configs import LEVEL_NAMES, Layers
from tests.models import vector_batch
from tests.pool import on_few_ranks, on_ranks

DIM, NUM_LAYERS = 16, 3
SHARDS = "optim_grads_params"
CLASSES = [FullyShardedDataParallel, TorchFullyShardedDataParallel]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(Layers):
    """Units of one size, the root's own layer and a buffer."""

    def __init__(self) -> None:
        super().__init__(DIM, 0)
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))


NUM_ELEMENTS = (1 + NUM_LAYERS) * DIM * DIM  # without padding on two ranks


def their_config(name: str = "DistributedDataParallelConfig", **fields: Any) -> Any:
    core_on_cpu.load()
    from megatron.core import distributed

    return getattr(distributed, name)(**fields)


torchs_config = functools.partial(their_config, "TorchFullyShardedDataParallelConfig")


def wrapped(cls: type[fe.DistributedDataParallel], config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return cls(**{"config": SimpleNamespace(), "ddp_config": config, "module": Model(), **more})


def batch(step: int) -> Tensor:
    return vector_batch(4, 10 * step + dist.get_rank(), DIM)[0]


def train(ddp: Any, microbatches: int = 2, stops: bool = False) -> list[Tensor]:
    """Two steps of SGD; the full weights."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(2):
        ddp.zero_grad_buffer()
        for index in range(microbatches):
            ddp(batch(2 * step + index)).backward()
        if stops:
            ddp.stop_communication()
        ddp.finish_grad_sync()
        optimizer.step()
        for _ in range(2 * stops):
            ddp.start_param_sync()
            ddp.stop_communication()
            assert "full" not in held(ddp)
    return [ddp.engine.full_tensor(name) for name, _ in ddp.module.named_parameters()]


def same_weights(cls: Any, config: Any, *, stops: bool = False, **more: Any) -> Any:
    """The wrapper, trained; its weights are those of the unsharded one."""
    ddp = wrapped(cls, config, **more)
    plain = wrapped(fe.DistributedDataParallel, fe.DistributedDataParallelConfig())
    # Stops are also tried with overlap: all microbatches but the last would need no_sync.
    microbatches = 1 if stops else 2
    trained = train(ddp, microbatches, stops)
    torch.testing.assert_close(trained, train(plain, microbatches), rtol=1e-6, atol=1e-7)
    return ddp


def held(ddp: Any) -> dict[str, int]:
    return {role: size for role, size in ddp.engine.memory_bytes().items() if size}


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_the_strategy_is_the_level_whatever_the_flags(level: str) -> None:
    for flags in ({}, {"use_custom_fsdp": True}, {"use_megatron_fsdp": True}):
        config = their_config(data_parallel_sharding_strategy=level, **flags)
        before = dataclasses.replace(config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            ddp = wrapped(FullyShardedDataParallel, config)
        assert ddp.engine.strategy.inner.name == level
        assert config == before
        assert set(ddp.fsdp_unit_modules) == ({nn.Linear, Layer} if level == SHARDS else set())
    ddp = wrapped(FullyShardedDataParallel, their_config(), fsdp_unit_modules=[])
    assert ddp.engine.strategy.inner.name == "no_shard"


@on_ranks(2)
@pytest.mark.parametrize("cls", CLASSES)
def test_it_is_taken_for_the_class_that_it_replaces(cls: Any) -> None:
    ddp = wrapped(cls, their_config())
    from megatron.core import distributed, utils

    # Pickles must also load in processes that cannot import megatron.
    assert b"megatron" not in pickle.dumps(torch.ones(2))
    assert isinstance(ddp, getattr(distributed, cls.__name__))
    assert not isinstance(ddp, distributed.DistributedDataParallel)
    assert utils.unwrap_model([ddp]) == [ddp.module]
    # An error on one rank raises on all.
    model = Model()
    given = {"no_such": 1} if dist.get_rank() else {}
    with pytest.raises((TypeError, RuntimeError), match="no_such"):
        wrapped(cls, their_config(), module=model, **given)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(2)
def test_unit_classes_and_their_paths() -> None:
    config = their_config(data_parallel_sharding_strategy=SHARDS)
    for classes in ([Layer], [f"{__name__}.Layer"], (Layer,), {Layer}):
        ddp = wrapped(FullyShardedDataParallel, config, fsdp_unit_modules=classes)
        assert ddp.fsdp_unit_modules == [Layer]
        assert [unit.num_elements for unit in ddp.engine.units] == [DIM * DIM] * (1 + NUM_LAYERS)
    for given in ({Layer}, [Layer, nn.Conv2d]):
        ddp = same_weights(
            TorchFullyShardedDataParallel, torchs_config(), sub_modules_to_wrap=given
        )
        assert [unit.num_elements for unit in ddp.engine.units] == [DIM * DIM] * (1 + NUM_LAYERS)
    marked = Model()
    marked._fsdp_modules = [Layer]
    ddp = wrapped(TorchFullyShardedDataParallel, torchs_config(), module=marked)
    assert len(ddp.engine.units) == 1 + NUM_LAYERS


@on_ranks(4)
def test_arguments_by_position_and_process_groups() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("dp")
    ranks = dist.get_process_group_ranks(group)
    given = SimpleNamespace()
    by_name = wrapped(TorchFullyShardedDataParallel, torchs_config(), process_group=group)
    by_place = TorchFullyShardedDataParallel(given, torchs_config(), Model(), {Layer}, False, group)
    for ddp in (by_name, by_place):
        assert ddp.engine.mesh.size == ddp.device_mesh.size() == 2
        assert dist.get_process_group_ranks(ddp.process_group) == ranks
    config = their_config(data_parallel_sharding_strategy="optim")
    cpu, groups = torch.device("cpu"), SimpleNamespace(dp_cp=group)
    ddp = FullyShardedDataParallel(given, config, Model(), None, True, cpu, groups)
    assert ddp.config is given
    assert ddp.bucket_size is None
    assert ddp.device == cpu
    assert ddp.dp_cp_group is group


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_stop_communication_waits_and_frees_prefetched_parameters(
    level: str, overlap: bool
) -> None:
    config = their_config(
        data_parallel_sharding_strategy=level,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    same_weights(FullyShardedDataParallel, config, stops=True, fsdp_unit_modules=[Layer])


@on_ranks(2)
def test_calls_of_its_buffer() -> None:
    config = their_config(data_parallel_sharding_strategy=SHARDS)
    ddp = wrapped(FullyShardedDataParallel, config)
    ddp(batch(0)).backward()
    ddp.finish_grad_sync()
    before = [param.grad.full_tensor() for param in ddp.parameters()]
    ddp.param_and_grad_buffer.scale_gradients(0.5)
    for param, grad in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(param.grad.full_tensor(), 0.5 * grad)
    ddp.param_and_grad_buffer.zero_grad()
    assert all(param.grad is None for param in ddp.parameters())
    loss = ddp(batch(1)).detach()
    with torch.no_grad():
        for param in ddp.parameters():
            param.mul_(0.5)
    ddp.param_and_grad_buffer.copy_main_weights_to_model_weights()
    assert not torch.equal(ddp(batch(1)).detach(), loss)
    with pytest.raises(RuntimeError, match="manual_buffer_registration: expected nccl_ub=True"):
        ddp.param_and_grad_buffer.manual_buffer_registration()


@on_few_ranks
@pytest.mark.parametrize(
    "name", ["TorchFullyShardedDataParallelConfig", "DistributedDataParallelConfig"]
)
def test_a_default_config_shards_everything(name: str) -> None:
    config = their_config(name)
    before = dataclasses.replace(config)
    ddp = same_weights(TorchFullyShardedDataParallel, config)
    assert config == before
    assert ddp.engine.strategy.inner.name == SHARDS
    ranks = dist.get_world_size()
    expected = {"model": 4 * NUM_ELEMENTS // ranks, "grad": 4 * NUM_ELEMENTS // ranks}
    assert held(ddp) == expected, (held(ddp), expected)
    assert sum(param.to_local().numel() for param in ddp.parameters()) == NUM_ELEMENTS // ranks


@on_ranks(2)
def test_reshard_after_forward() -> None:
    for reshards in (True, False):
        config = torchs_config(reshard_after_forward=reshards)
        ddp = same_weights(TorchFullyShardedDataParallel, config)
        ddp.zero_grad_buffer()
        loss = ddp(batch(9))
        # A root with which backward begins stays full until the end of backward.
        full = held(ddp).get("full", 0)
        assert (full == 4 * NUM_ELEMENTS) == (not reshards), full
        loss.backward()
        ddp.finish_grad_sync()
        assert "full" not in held(ddp)
        with torch.no_grad():
            ddp(batch(9))
    for number in (1, 2):  # number of ranks
        config = torchs_config(reshard_after_forward=number)
        ddp = wrapped(TorchFullyShardedDataParallel, config)
        stays = {unit.options.keeps_after_forward for unit in ddp.engine.units}
        assert stays == {number == 1}


UNITS = "fsdp_unit_modules: expected "
RESHARD, PATHS = "reshard_after_forward: expected a", f"{UNITS}classes of modules, or their"
# Kind and words of the error, fields of the config, by the class of wrapper and of the config.
WRONG_FIELDS: dict[Any, list[tuple[str, dict[str, Any]]]] = {
    (FullyShardedDataParallel, their_config): [
        ("fsdp_manual_registration: expected nccl_ub=True", {"fsdp_manual_registration": True}),
        ("align_param_gather: expected overlap_param_gather", {"align_param_gather": True}),
        ("outer_dp_sharding_strategy: expected a lev", {"outer_dp_sharding_strategy": "optim"}),
        ("nccl_ub: expected", {"nccl_ub": True, "fsdp_manual_registration": True}),
    ],
    (TorchFullyShardedDataParallel, their_config): [
        (rf"ddp_config\.{name}: expected its default, (False|'no_shard'), since", {name: value})
        for name, value in [
            ("use_distributed_optimizer", True),
            ("use_megatron_fsdp", True),
            ("use_custom_fsdp", True),
            ("data_parallel_sharding_strategy", "optim"),
        ]
    ],
    (TorchFullyShardedDataParallel, torchs_config): [
        (RESHARD, {"reshard_after_forward": 3}),
        (RESHARD, {"reshard_after_forward": "yes"}),
    ],
}
# By the class of wrapper, other arguments.
WRONG_ARGUMENTS: dict[Any, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    FullyShardedDataParallel: [
        (ValueError, "device: expected this rank's cpu or None; found cuda", {"device": "cuda:3"}),
        (ValueError, f"{UNITS}classes of modules with param", {"fsdp_unit_modules": [nn.Conv2d]}),
        (ValueError, PATHS, {"fsdp_unit_modules": ["no.such.Class"]}),
        (ValueError, PATHS, {"fsdp_unit_modules": [nn.Linear(1, 1)]}),
        (TypeError, f"{UNITS}module classes in a list", {"fsdp_unit_modules": Layer}),
    ],
    TorchFullyShardedDataParallel: [
        (ValueError, "sub_modules_to_wrap: expected classes", {"sub_modules_to_wrap": {nn.Conv2d}}),
        (TypeError, "process_group: expected a ProcessGroup; found 3", {"process_group": 3}),
    ],
}


@on_ranks(2)
def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    model = Model()
    for (cls, make), fields_of in WRONG_FIELDS.items():
        for words, fields in fields_of:
            with pytest.raises(ValueError, match=words):
                wrapped(cls, make(**fields), module=model)
    level = {"data_parallel_sharding_strategy": SHARDS}
    for cls, rows in WRONG_ARGUMENTS.items():
        config = torchs_config() if cls is TorchFullyShardedDataParallel else their_config(**level)
        for kind, words, given in rows:
            with pytest.raises(kind, match=words):
                wrapped(cls, config, module=model, **given)
    group = dist.group.WORLD
    groups = {"process_group": group, "pg_collection": SimpleNamespace(dp_cp=group)}
    with pytest.raises(ValueError, match="process_group, mesh, pg_collection: expected one"):
        wrapped(TorchFullyShardedDataParallel, torchs_config(), module=model, **groups)
    for other in (fe.DistributedDataParallel, FullyShardedDataParallel):
        with pytest.raises(ValueError, match=r"Wrap by fsdp_engine\.megatron\.TorchFullySh"):
            wrapped(other, torchs_config(), module=model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(3)
def test_an_error_of_one_rank_is_raised_on_the_ranks_of_its_mesh() -> None:
    mesh, rank = DeviceMesh("cpu", [0, 1]), dist.get_rank()
    for (cls, (_, words, wrong)), config in (
        ((FullyShardedDataParallel, WRONG_ARGUMENTS[FullyShardedDataParallel][1]), their_config()),
        (
            (TorchFullyShardedDataParallel, WRONG_ARGUMENTS[TorchFullyShardedDataParallel][0]),
            torchs_config(),
        ),
    ):
        if rank < 2:
            with pytest.raises(ValueError, match=words):
                wrapped(cls, config, mesh=mesh, **(wrong if rank == 1 else {}))
    # Collective over all ranks, also those that had no error.
    wrapped(FullyShardedDataParallel, their_config())
