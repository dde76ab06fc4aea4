"""Small optimizers with quantised state, like those of torchao and bitsandbytes. The optimizers of
the packages train in ``tests/programs/test_low_bit_state.py``."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

import fsdp_engine as fe
from fsdp_engine.extensions.low_bit_state.low_bit_formats import LowBitFormats
from fsdp_engine.optim.sharded_step import is_elementwise
from tests.checkpoint.scene import shared_folder
from tests.composition.tensor_parallel import mesh_of
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.reference import rank_and_size

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


BLOCK, LEAST = 256, 4096
MAP = torch.tensor([-0.5, 0.0, 0.5, 1.0])


def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``MAP``, and a scale for each block, of which the last may be shorter."""
    padded = nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1).clamp(min=1e-12)
    distance = ((padded / scale.unsqueeze(1)).unsqueeze(2) - MAP).abs()
    codes = distance.argmin(2).view(-1)[: values.numel()].view(values.shape)
    return codes.to(torch.uint8), scale


def values_of(codes: Tensor, scale: Tensor) -> Tensor:
    return MAP[codes.long()] * scale.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)


class Codes(torch.Tensor):
    """A quantised tensor, as in torchao."""

    block_size = BLOCK

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        made = {"dtype": scale.dtype, "device": codes.device}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **made)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale, self.qmap = codes, scale, MAP

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    def dequantize(self) -> Any:
        return values_of(self.codes, self.scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            codes, scale = codes_of(args[1])
            args[0].codes.copy_(codes)
            args[0].scale.copy_(scale)
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class MomentumOfCodes(torch.optim.Optimizer):
    """SGD with momentum that is quantised as in torchao, if a parameter has whole blocks."""

    block_size = BLOCK

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = self._new_buffer(param, True)
                held = state["exp_avg"]
                value = held.dequantize() if isinstance(held, Codes) else held
                value = 0.9 * value + param.grad
                held.copy_(value)
                param.add_(value, alpha=-group["lr"])

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        assert signed
        if p.numel() < LEAST or p.numel() % self.block_size:
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, self.block_size)

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
        codes = torch.ones(p.shape, dtype=torch.uint8, device=p.device)
        made: Tensor = Codes(codes, torch.zeros(p.numel() // block_size, device=p.device))
        return made


MomentumOfCodes.__module__ = "torchao.optim.adam"


class Momentum8bit(torch.optim.Optimizer):
    """SGD with momentum that is quantised as in bitsandbytes, into tensors of the state."""

    def __init__(self, params: Any, lr: float, min_8bit_size: int = LEAST) -> None:
        super().__init__(params, {"lr": lr})
        self.args = SimpleNamespace(optim_bits=8, min_8bit_size=min_8bit_size, max_unorm=0.0)
        self.optimizer_name = "momentum"
        self.overridden: dict[int, dict[str, Any]] = {}
        self.index2config: dict[tuple[int, int], dict[str, Any]] = {}
        self.initialized = False

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
        config = {**vars(self.args), "lr": group["lr"]}
        return {**config, **self.index2config.get((gindex, pindex), {})}

    def check_overrides(self) -> None:
        for gindex, group in enumerate(self.param_groups):
            for pindex, param in enumerate(group["params"]):
                if id(param) in self.overridden:
                    self.index2config[gindex, pindex] = self.overridden[id(param)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.initialized:
            self.check_overrides()
            self.initialized = True
        for gindex, group in enumerate(self.param_groups):
            for pindex, param in enumerate(group["params"]):
                if not self.state[param]:
                    self.init_state(group, param, gindex, pindex)
                self.update_step(group, param, gindex, pindex)

    def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        config, state = self.get_config(gindex, pindex, group), self.state[p]
        state["step"] = 0
        if config["optim_bits"] == 32 or p.numel() < config["min_8bit_size"]:
            state["state1"] = torch.zeros_like(p)
        else:
            state["state1"] = torch.ones_like(p, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(-(-p.numel() // BLOCK))
            state["qmap1"] = torch.zeros(BLOCK)

    def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        state["step"] += 1
        if state["state1"].dtype is torch.uint8:
            assert p.numel()
            value = 0.9 * values_of(state["state1"], state["absmax1"]) + p.grad
            codes, scale = codes_of(value)
            state["state1"].copy_(codes)
            state["absmax1"].copy_(scale)
        else:
            value = state["state1"].mul_(0.9).add_(p.grad)
        p.add_(value, alpha=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        name = "__bnb_optimizer_quant_state__"
        packed["state"] = {
            key: {"step": state["step"], name: {k: v for k, v in state.items() if k != "step"}}
            for key, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        states = {}
        for key, state in state_dict["state"].items():
            inner = state.pop("__bnb_optimizer_quant_state__", {})
            states[params[key]] = {**state, **inner}
        self.__setstate__({"state": states, "param_groups": self.param_groups})


Momentum8bit.__module__ = "bitsandbytes.optim.optimizer"
KINDS: dict[str, Any] = {"torchao": MomentumOfCodes, "bitsandbytes": Momentum8bit}


def model_of() -> nn.Module:
    """Weights of 4,224 and 4,992 elements (16.5 and 19.5 blocks) and of 4,608 (18), and biases that
    are too small to be quantised."""
    torch.manual_seed(0)
    layers = [nn.Linear(66, 64), nn.Tanh(), nn.Linear(64, 72), nn.Linear(72, 64), nn.Linear(64, 78)]
    return nn.Sequential(*layers)


def sharded(level: str, **options: Any) -> tuple[nn.Module, fe.Engine]:
    model = model_of()
    for param in model.parameters():
        param.gradient_divisor = 1 / rank_and_size()[1]  # type: ignore[attr-defined]
    return model, fe.shard(model, strategy=level, min_unit_size=0, **options)


def train(model: nn.Module, optimizer: Any, first: int, last: int, *, alone: bool = False) -> None:
    """Only the first rank has a gradient, so that sums over ranks have the bits of one process."""
    for step in range(first, last):
        batch = torch.randn(8, 66, generator=torch.Generator().manual_seed(step))
        (model(batch) * (alone or rank_and_size()[0] == 0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


@functools.cache
def finish_alone(kind: str, num_steps: int) -> dict[str, Tensor]:
    alone = model_of()
    train(alone, KINDS[kind](alone.parameters(), 1e-3), 0, num_steps, alone=True)
    return dict(alone.state_dict())


def check_bits(kind: str, level: str) -> None:
    model, engine = sharded(level)
    optimizer = KINDS[kind](model.parameters(), 1e-3)
    if kind == "torchao" and any(isinstance(param, DTensor) for param in model.parameters()):
        with pytest.raises(RuntimeError, match=r"MomentumOfCodes: expected fe.shard_optimizer"):
            train(model, optimizer, 0, 1)
        assert not optimizer.state
        optimizer.zero_grad()
    fe.shard_optimizer(optimizer)
    train(model, optimizer, 0, 4)
    assert_equal(engine.full_state_dict(), finish_alone(kind, 4))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_ranks_and_level_and_need_sharding(
    ranks: Ranks, kind: str, level: str, world_size: int
) -> None:
    ranks.run(check_bits, kind, level, world_size=world_size)


def resume(kind: str, level: str, folder: str, part: int) -> dict[str, Tensor]:
    """Load the checkpoint of the part before, train, and save."""
    model, engine = sharded(level)
    optimizer = fe.shard_optimizer(KINDS[kind](model.parameters(), 1e-3))
    if part:
        fe.load_checkpoint(f"{folder}/{part - 1}", engine, optimizer)
    train(model, optimizer, 2 * part, 2 * part + 2)
    fe.save_checkpoint(f"{folder}/{part}", engine, optimizer)
    return dict(engine.full_state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_bits_through_checkpoints_of_other_ranks(ranks: Ranks, tmp_path: Any, kind: str) -> None:
    for part, world_size in enumerate((2, 3, 1)):
        arguments = (kind, LEVELS[3 - part], str(tmp_path), part)
        found = ranks.run(resume, *arguments, world_size=world_size)
    assert_equal(found[0], finish_alone(kind, 6))


@pytest.mark.parametrize("how", ["own", "whole"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@on_few_ranks
def test_state_dicts_keep_codes_and_scales(level: str, kind: str, how: str) -> None:
    model, engine = sharded(level)
    optimizer = fe.shard_optimizer(KINDS[kind](model.parameters(), 1e-3))
    again, engine_again = sharded(level)
    optimizer_again = fe.shard_optimizer(KINDS[kind](again.parameters(), 1e-3))
    train(model, optimizer, 0, 2)
    again.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    if how == "whole":
        saved["state"] = tree_map_only(DTensor, lambda each: each.full_tensor(), saved["state"])
    expected = [parts(state) for state in optimizer.state.values()]
    assert any("codes" in each for each in expected)
    optimizer_again.load_state_dict(saved)
    train(model, optimizer, 2, 3)
    train(again, optimizer_again, 2, 3)
    assert_equal(engine_again.full_state_dict(), engine.full_state_dict())
    found = [parts(state) for state in optimizer_again.state.values()]
    expected = [parts(state) for state in optimizer.state.values()]
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def parts(state: Any) -> dict[str, Tensor]:
    """The tensors of a parameter's state, or of its slice."""
    found = {}
    for key, value in state.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, Codes):
            found |= {"codes": local.codes, "scale": local.scale}
        elif isinstance(local, Tensor):
            found["codes" if local.dtype is torch.uint8 else key] = local
    return found


@on_ranks(3)
def test_boundaries_within_blocks_are_refused_on_all_ranks() -> None:
    match = r"weight: expected shard boundaries on multiples of 256"
    for kind in KINDS.values():
        model, _ = sharded("optim", granule=lambda name, param: 64 if param.numel() == 4608 else 1)
        with pytest.raises(ValueError, match=f"2.{match}"):
            fe.shard_optimizer(kind(model.parameters(), 1e-3))
    model = nn.Linear(10, 10)
    fe.shard(model, strategy="optim")
    with pytest.raises(ValueError, match=match):  # a small parameter that is quantised
        fe.shard_optimizer(Momentum8bit(model.parameters(), 1e-3, min_8bit_size=64))


def test_norms_of_whole_parameters_are_not_known_to_be_elementwise() -> None:
    for name, value in (("max_unorm", 1.0), ("percentile_clipping", 5), ("block_wise", False)):
        optimizer = Momentum8bit(nn.Linear(2, 2).parameters(), 1e-3)
        setattr(optimizer.args, name, value)
        assert not is_elementwise(optimizer, LowBitFormats.of(optimizer))
    optimizer = Momentum8bit(nn.Linear(2, 2).parameters(), 1e-3)
    assert is_elementwise(optimizer, LowBitFormats.of(optimizer))


@on_ranks(2)
def test_a_parameter_keeps_its_override() -> None:
    model, _ = sharded("optim_grads_params")
    optimizer = Momentum8bit(model.parameters(), 1e-3)
    optimizer.overridden[id(model[0].weight)] = {"optim_bits": 32}  # type: ignore[index]
    fe.shard_optimizer(optimizer)
    train(model, optimizer, 0, 1)
    dtypes = [optimizer.state[each]["state1"].dtype for each in model.parameters() if each.ndim > 1]
    assert dtypes == [torch.float32, *[torch.uint8] * 3]


def assert_scales_are_not_saved(model: nn.Module, engine: fe.Engine, match: str) -> None:
    optimizer = fe.shard_optimizer(Momentum8bit(model.parameters(), 1e-3))
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=rf"^optimizer: expected state of .*{match}"):
        fe.save_checkpoint(shared_folder(), engine, optimizer)


@on_ranks(4)
def test_scales_of_experts_and_of_tensor_parallel_parameters_are_not_saved() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    experts: Any = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(64, 72, bias=False)])})
    experts.forward = lambda x: experts["experts"][0](x)
    for param in experts.parameters():
        param.allreduce = False
    engine = fe.shard(experts, strategy="optim", expert_mesh=mesh["copies"])
    found = "an expert's parameter, in the parameter's shape; found 'absmax1'"
    assert_scales_are_not_saved(experts, engine, found)

    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallelize_module(nn.Linear(64, 144, bias=False), mesh["tp"], ColwiseParallel())
    engine = fe.shard(model, mesh["dp"], "optim")
    found = "weight in its shape, or a scale for each block"
    assert_scales_are_not_saved(model, engine, found)
