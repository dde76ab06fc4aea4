"""``FullyShardedDataParallel`` and ``TorchFullyShardedDataParallel``: arguments and attributes."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.megatron import FullyShardedDataParallel, TorchFullyShardedDataParallel
from tests.megatron import core_on_cpu
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks

DIM, NUM_LAYERS = 16, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


NUM_ELEMENTS = (1 + NUM_LAYERS) * DIM * DIM  # without padding on two ranks


def their_config(name: str = "DistributedDataParallelConfig", **fields: Any) -> Any:
    """One of Megatron-Core's config classes."""
    core_on_cpu.load()
    from megatron.core import distributed

    return getattr(distributed, name)(**fields)


@on_ranks(1)
def test_pickles_are_read_by_processes_without_megatron_core() -> None:
    their_config()
    assert b"megatron" not in pickle.dumps(torch.ones(2))


def wrapped(cls: type[fe.DistributedDataParallel], config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return cls(config=SimpleNamespace(), ddp_config=config, module=Model(), **more)


def batch(step: int) -> Tensor:
    dice = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, DIM, generator=dice)


def train(ddp: Any, num_microbatches: int = 2) -> list[Tensor]:
    """Two steps of SGD; the weights, whole."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(2):
        ddp.zero_grad_buffer()
        for index in range(num_microbatches):
            ddp(batch(2 * step + index)).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return [ddp.engine.full_tensor(name) for name, _ in ddp.module.named_parameters()]


def same_weights(cls: type[fe.DistributedDataParallel], config: Any, **more: Any) -> Any:
    """The wrapper, trained; its weights are those of the unsharded one."""
    ddp = wrapped(cls, config, **more)
    plain = wrapped(fe.DistributedDataParallel, fe.DistributedDataParallelConfig())
    for mine, expected in zip(train(ddp), train(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)
    return ddp


def held(ddp: Any) -> Counter[str]:
    return Counter({role: size for role, size in ddp.engine.memory_bytes().items() if size})


@on_few_ranks
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_the_strategy_is_the_level(level: str) -> None:
    config = their_config(use_megatron_fsdp=True, data_parallel_sharding_strategy=level)
    before = dataclasses.replace(config)
    ddp = same_weights(FullyShardedDataParallel, config)
    assert ddp.engine.strategy.inner.name == level
    assert config == before
    assert ddp.fsdp_unit_modules == ([nn.Linear, Layer] if level == LEVEL_NAMES[3] else [])
    ddp = same_weights(FullyShardedDataParallel, their_config(), fsdp_unit_modules=[])
    assert ddp.engine.strategy.inner.name == "no_shard"


@on_ranks(2)
@pytest.mark.parametrize("cls", [FullyShardedDataParallel, TorchFullyShardedDataParallel])
def test_its_helpers_unwrap_it_as_the_class_it_replaces(cls: Any) -> None:
    from megatron.core import distributed, utils

    ddp = wrapped(cls, their_config())
    assert isinstance(ddp, getattr(distributed, cls.__name__))
    assert not isinstance(ddp, distributed.DistributedDataParallel)
    assert utils.unwrap_model([ddp]) == [ddp.module]


@on_ranks(2)
def test_isinstance_holds_for_megatron_cores_class() -> None:
    for flags in ({}, {"use_custom_fsdp": True}, {"use_megatron_fsdp": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = their_config(data_parallel_sharding_strategy="optim_grads", **flags)
            ddp = wrapped(FullyShardedDataParallel, config)
        assert ddp.engine.strategy.inner.name == "optim_grads"


@on_ranks(2)
def test_unit_classes_and_their_paths() -> None:
    config = their_config(data_parallel_sharding_strategy="optim_grads_params")
    for classes in ([Layer], [f"{__name__}.Layer"], (Layer,), {Layer}):
        ddp = same_weights(FullyShardedDataParallel, config, fsdp_unit_modules=classes)
        assert ddp.fsdp_unit_modules == [Layer]
        sizes = [unit.num_elements for unit in ddp.engine.units]
        assert sizes == [DIM * DIM] * (1 + NUM_LAYERS)
    for wrong, message in (
        (
            [nn.Conv2d],
            "fsdp_unit_modules: expected classes of modules with parameters; found Conv",
        ),
        (["no.such.Class"], "fsdp_unit_modules: expected classes of modules, or their paths"),
        ([Layer()], "fsdp_unit_modules: expected classes of modules, or their paths"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapped(FullyShardedDataParallel, config, fsdp_unit_modules=wrong)
    with pytest.raises(TypeError, match="fsdp_unit_modules: expected module classes in a list"):
        wrapped(FullyShardedDataParallel, config, fsdp_unit_modules=Layer)


@on_ranks(2)
def test_arguments_by_position() -> None:
    config = their_config(data_parallel_sharding_strategy="optim")
    groups = SimpleNamespace(dp_cp=dist.group.WORLD)
    model = SimpleNamespace()
    ddp = FullyShardedDataParallel(model, config, Model(), None, True, torch.device("cpu"), groups)
    assert ddp.config is model
    assert ddp.bucket_size is None
    assert ddp.device == torch.device("cpu")
    assert ddp.dp_cp_group is dist.group.WORLD
    with pytest.raises(ValueError, match="device: expected this rank's cpu or None; found cuda"):
        wrapped(FullyShardedDataParallel, config, device="cuda:3")


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
    ddp = wrapped(FullyShardedDataParallel, config, fsdp_unit_modules=[Layer])
    plain = wrapped(fe.DistributedDataParallel, fe.DistributedDataParallelConfig())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ddp, plain)]
    for step in range(3):
        for each, optimizer in zip((ddp, plain), optimizers, strict=True):
            stops = each is ddp
            each.zero_grad_buffer()
            each(batch(step)).backward()
            if stops:
                each.stop_communication()
            each.finish_grad_sync()
            optimizer.step()
            if stops:
                each.start_param_sync()
                each.stop_communication()
                assert "full" not in held(each)
                each.stop_communication()
    names = [name for name, _ in ddp.module.named_parameters()]
    for name in names:
        torch.testing.assert_close(
            ddp.engine.full_tensor(name), plain.engine.full_tensor(name), rtol=1e-6, atol=1e-7
        )


@on_ranks(2)
def test_calls_of_its_buffer() -> None:
    config = their_config(data_parallel_sharding_strategy="optim_grads_params")
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


@on_ranks(2)
def test_fields_without_an_effect_are_refused() -> None:
    for fields, message in (
        ({"fsdp_manual_registration": True}, "fsdp_manual_registration: expected nccl_ub=True"),
        (
            {"align_param_gather": True},
            "align_param_gather: expected overlap_param_gather=True",
        ),
        ({"outer_dp_sharding_strategy": "optim"}, "outer_dp_sharding_strategy: expected a lev"),
        ({"nccl_ub": True, "fsdp_manual_registration": True}, "nccl_ub: expected"),
    ):
        model = Model()
        with pytest.raises(ValueError, match=message):
            FullyShardedDataParallel(SimpleNamespace(), their_config(**fields), model)
        assert all(type(param) is nn.Parameter for param in model.parameters())


@on_few_ranks
@pytest.mark.parametrize(
    "name", ["TorchFullyShardedDataParallelConfig", "DistributedDataParallelConfig"]
)
def test_a_default_config_shards_everything(name: str) -> None:
    config = their_config(name)
    before = dataclasses.replace(config)
    ddp = same_weights(TorchFullyShardedDataParallel, config)
    assert config == before
    assert ddp.engine.strategy.inner.name == "optim_grads_params"
    ranks = dist.get_world_size()
    expected = {"model": 4 * NUM_ELEMENTS // ranks, "grad": 4 * NUM_ELEMENTS // ranks}
    assert held(ddp) == expected, (held(ddp), expected)
    assert sum(param.to_local().numel() for param in ddp.parameters()) == NUM_ELEMENTS // ranks


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_reshard_after_forward(reshards: bool) -> None:
    config = their_config("TorchFullyShardedDataParallelConfig", reshard_after_forward=reshards)
    ddp = same_weights(TorchFullyShardedDataParallel, config)
    ddp.zero_grad_buffer()
    loss = ddp(batch(9))
    # A root that backward begins with stays in any case, until backward is over.
    full = held(ddp).get("full", 0)
    assert (full == 4 * NUM_ELEMENTS) == (not reshards), full
    loss.backward()
    ddp.finish_grad_sync()
    assert "full" not in held(ddp)
    with torch.no_grad():
        ddp(batch(9))


@on_ranks(2)
def test_a_number_of_ranks_to_reshard_to() -> None:
    for number in (1, 2):
        config = their_config("TorchFullyShardedDataParallelConfig", reshard_after_forward=number)
        ddp = wrapped(TorchFullyShardedDataParallel, config)
        stays = {unit.options.keeps_after_forward for unit in ddp.engine.units}
        assert stays == {number == 1}
    for wrong in (3, "yes"):
        config = their_config("TorchFullyShardedDataParallelConfig", reshard_after_forward=wrong)
        with pytest.raises(ValueError, match="reshard_after_forward: expected a"):
            wrapped(TorchFullyShardedDataParallel, config)


@on_ranks(2)
def test_sub_modules_to_wrap() -> None:
    config = their_config("TorchFullyShardedDataParallelConfig")
    for given in ({Layer}, [Layer, nn.Conv2d]):
        ddp = same_weights(TorchFullyShardedDataParallel, config, sub_modules_to_wrap=given)
        assert [unit.num_elements for unit in ddp.engine.units] == [DIM * DIM] * 4
    marked = Model()
    marked._fsdp_modules = [Layer]  # type: ignore[assignment]
    ddp = TorchFullyShardedDataParallel(SimpleNamespace(), config, marked)
    assert len(ddp.engine.units) == 1 + NUM_LAYERS
    with pytest.raises(ValueError, match="sub_modules_to_wrap: expected classes of modules wi"):
        wrapped(TorchFullyShardedDataParallel, config, sub_modules_to_wrap={nn.Conv2d})


@on_ranks(4)
def test_process_group_selects_the_ranks() -> None:
    config = their_config("TorchFullyShardedDataParallelConfig")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("dp")
    by_name = wrapped(TorchFullyShardedDataParallel, config, process_group=group)
    by_place = TorchFullyShardedDataParallel(
        SimpleNamespace(), config, Model(), {Layer}, False, group
    )
    for ddp in (by_name, by_place):
        assert ddp.engine.mesh.size == 2
        assert dist.get_process_group_ranks(ddp.process_group) == (
            dist.get_process_group_ranks(group)
        )
        assert ddp.device_mesh.size() == 2
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup; found 3"):
        wrapped(TorchFullyShardedDataParallel, config, process_group=3)
    groups = SimpleNamespace(dp_cp=group)
    with pytest.raises(ValueError, match="process_group, mesh, pg_collection: expected one"):
        wrapped(TorchFullyShardedDataParallel, config, process_group=group, pg_collection=groups)


@on_ranks(2)
def test_other_levels_are_refused() -> None:
    for fields in (
        {"use_distributed_optimizer": True},
        {"use_megatron_fsdp": True},
        {"use_custom_fsdp": True},
        {"data_parallel_sharding_strategy": "optim"},
    ):
        (field,) = fields
        model = Model()
        with pytest.raises(ValueError, match=rf"ddp_config\.{field}: expected its default, since"):
            TorchFullyShardedDataParallel(SimpleNamespace(), their_config(**fields), model)
        assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(2)
def test_its_config_does_not_choose_a_level_of_another_wrapper() -> None:
    config = their_config("TorchFullyShardedDataParallelConfig")
    for cls in (fe.DistributedDataParallel, FullyShardedDataParallel):
        with pytest.raises(ValueError, match=r"Wrap by fsdp_engine\.megatron\.TorchFullySh"):
            wrapped(cls, config)


@on_ranks(2)
@pytest.mark.parametrize("cls", [FullyShardedDataParallel, TorchFullyShardedDataParallel])
def test_an_error_on_one_rank_raises_on_all(cls: Any) -> None:
    model = Model()
    given: dict[str, Any] = {"no_such": 1} if dist.get_rank() else {}
    with pytest.raises((TypeError, RuntimeError), match="no_such"):
        cls(config=SimpleNamespace(), ddp_config=their_config(), module=model, **given)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("cls", [FullyShardedDataParallel, TorchFullyShardedDataParallel])
def test_checkpoints_are_those_of_the_wrapped_module(cls: Any) -> None:
    config = their_config(data_parallel_sharding_strategy="no_shard")
    ddp, other = wrapped(cls, config), wrapped(cls, config)
    train(ddp)
    assert ddp.state_dict_for_save_checkpoint().keys() == ddp.module.state_dict().keys()
    other.load_state_dict(ddp.state_dict())
    assert torch.equal(other(batch(5)), ddp(batch(5)))
    full = ddp.engine.full_state_dict()
    train(other)
    other.load_state_dict(full)
    assert torch.equal(other(batch(5)), ddp(batch(5)))
