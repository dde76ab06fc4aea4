"""Optimizers with state in 8 and 4 bits give exactly the values of one process of plain torch: on
any number of ranks, at every level, and through checkpoints of other ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states

import fsdp_engine as fe
from tests.integrations.trainer_scene import LEVELS
from tests.pool import Ranks
from tests.programs.packages import LOW_BIT, with_torchao

pytestmark = LOW_BIT
OPTIMIZERS = (
    "torchao.AdamW8bit",
    "torchao.AdamW4bit",
    "torchao.AdamWFp8",
    "torchao.Adam8bit",
    "bitsandbytes.AdamW8bit",
    "bitsandbytes.Lion8bit",
    "bitsandbytes.AdEMAMix8bit",
    # Main weights are in bf16; FlashAdamW adds 8 bits to each.
    "torchao.AdamW8bit in bf16",
    "bitsandbytes.AdamW8bit in bf16",
    "pytorch_optimizer.FlashAdamW in bf16",
)
NUM_STEPS = 6
# The steps after which the first and the second job save.
SAVED = (2, 4)


def _model(name: str = "") -> nn.Module:
    """Weights with and without a multiple of 256 elements; below and above 4,096 elements."""
    torch.manual_seed(0)
    layers = [nn.Linear(67, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 128)]
    return nn.Sequential(*layers, nn.Linear(128, 128, False), nn.Linear(128, 50)).to(
        torch.bfloat16 if name.endswith(" in bf16") else torch.float32
    )


def _optimizer(name: str, model: nn.Module, **options: Any) -> Any:
    library, _, kind = name.removesuffix(" in bf16").partition(".")
    if kind == "FlashAdamW":
        options["master_weight_bits"] = 24
    with with_torchao():
        is_flat = library == "pytorch_optimizer"
        module = importlib.import_module(library if is_flat else f"{library}.optim")
    return getattr(module, kind)(model.parameters(), lr=1e-2, **options)


def _shard(model: nn.Module, level: str, mesh: Any = None, **options: Any) -> fe.Engine:
    for param in model.parameters():
        param.gradient_divisor = 1 / dist.get_world_size()  # type: ignore[attr-defined]
    dtype = next(model.parameters()).dtype
    options |= {"mp_policy": fe.MixedPrecisionPolicy(main_params_dtype=dtype)}
    return fe.shard(model, mesh, level, options=fe.Options(min_unit_size=0), **options)


def _train(model: nn.Module, optimizer: Any, first: int, last: int, is_first=False) -> None:
    """Only the first rank has a gradient, so that its sum has the bits of one process'."""
    is_first = is_first or not dist.is_initialized() or dist.get_rank() == 0
    dtype = next(model.parameters()).dtype
    with torch.compiler.set_stance("force_eager"):
        for step in range(first, last):
            batch = torch.randn(16, 67, generator=torch.Generator().manual_seed(step)).to(dtype)
            (model(batch) * is_first).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _alone(name: str) -> dict[str, Tensor]:
    model = _model(name)
    _train(model, _optimizer(name, model), 0, NUM_STEPS)
    return dict(model.state_dict())


def _is_equal(found: Any, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    return {name: ranks.run(_alone, name, world_size=1)[0] for name in OPTIMIZERS}


def _sharded(
    name: str, level: str, expected: dict[str, Tensor], mesh: tuple[int, ...] | None = None
) -> bool:
    model = _model(name)
    engine = _shard(model, level, mesh, outer_strategy=None if mesh is None else "optim")
    optimizer = fe.shard_optimizer(_optimizer(name, model), elementwise=True)
    _train(model, optimizer, 0, NUM_STEPS)
    return _is_equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_one_process(ranks: Ranks, alone, name: str, level: str) -> None:
    for world_size in (1, 2, 3, 4):
        assert all(ranks.run(_sharded, name, level, alone[name], world_size=world_size))
    if level == LEVELS[3]:  # on two axes
        assert all(ranks.run(_sharded, name, level, alone[name], (2, 2), world_size=4))


def _states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    with torch.compiler.set_stance("force_eager"):
        of_optimizer = torch_states.get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": of_optimizer}


def _save(keeper: str, folder: str, model: nn.Module, engine: Any, optimizer: Any) -> None:
    if keeper == "checkpointer":
        fe.save_checkpoint(folder, engine, optimizer)
    elif keeper == "torch.save":
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, f"{folder}.{dist.get_rank()}")
    else:
        dcp.save(_states(model, optimizer), checkpoint_id=folder)


def _load(keeper: str, folder: str, model: nn.Module, engine: Any, optimizer: Any) -> None:
    if keeper == "checkpointer":
        fe.load_checkpoint(folder, engine, optimizer)
        return
    if keeper == "torch.save":
        states = torch.load(f"{folder}.{dist.get_rank()}")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        return
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    model.load_state_dict(states["model"])
    torch_states.set_optimizer_state_dict(model, optimizer, states["optimizer"])


def _resume(
    name: str, level: str | None, keeper: str, folder: str, part: int, expected: dict[str, Tensor]
) -> bool:
    """Run job ``part`` of three: load the previous job's checkpoint, if any, and train. The first
    two save. The last returns whether the weights equal ``expected``."""
    steps = (0, *SAVED, NUM_STEPS)
    model = _model(name)
    engine = None if level is None else _shard(model, level)
    optimizer = fe.shard_optimizer(_optimizer(name, model), elementwise=True)
    if part:
        _load(keeper, f"{folder}/{part - 1}", model, engine, optimizer)
    _train(model, optimizer, steps[part], steps[part + 1])
    if part < 2:
        _save(keeper, f"{folder}/{part}", model, engine, optimizer)
        return True
    return _is_equal(model.state_dict() if engine is None else engine.full_state_dict(), expected)


# AdEMAMix keeps two parts of its state in one tensor, so each rank has a slice of each part.
RESHARDED = [name for name in OPTIMIZERS if "AdEMAMix" not in name]


@pytest.mark.parametrize("keeper", ["checkpointer", "dcp", "torch.save"])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("name", RESHARDED)
def test_bits_through_checkpoints_of_other_ranks(ranks, alone, tmp_path, name, first, keeper):
    levels: list[str | None] = [LEVELS[(first + part) % 4] for part in range(3)]
    if keeper == "dcp" and first == 0:
        levels[2] = None  # a model that is not sharded
    if keeper == "torch.save":  # each rank its own state
        levels = [LEVELS[first]] * 3
    for part, world_size in enumerate((2, 2, 2) if keeper == "torch.save" else (2, 3, 1)):
        arguments = (name, levels[part], keeper, str(tmp_path), part, alone[name])
        assert all(ranks.run(_resume, *arguments, world_size=world_size))


def _save_alone(name: str, path: str, as_values: bool) -> None:
    model = _model(name)
    optimizer = _optimizer(name, model)
    if as_values:
        fe.shard_optimizer(optimizer, elementwise=True)
    _train(model, optimizer, 0, SAVED[0])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def _load_alone(name: str, level: str, path: str, expected: dict[str, Tensor]) -> bool:
    model = _model(name)
    with with_torchao():
        states = torch.load(path)
    model.load_state_dict(states["model"])
    engine = _shard(model, level)
    optimizer = fe.shard_optimizer(_optimizer(name, model), elementwise=True)
    optimizer.load_state_dict(states["optimizer"])
    _train(model, optimizer, SAVED[0], NUM_STEPS)
    return _is_equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("as_values", [False, True])
@pytest.mark.parametrize("name", RESHARDED)
def test_state_of_one_process_is_loaded(ranks, alone, tmp_path, name: str, as_values: bool):
    path = str(tmp_path / "alone.pt")
    ranks.run(_save_alone, name, path, as_values, world_size=1)
    assert all(ranks.run(_load_alone, name, LEVELS[3], path, alone[name], world_size=3))


def _flat(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([weight.detach().float().view(-1) for weight in weights])


def _round_stochastically(mesh: tuple[int, ...], level: str) -> tuple[list[Tensor], float, bool]:
    """Weights; their difference from stochastic rounding in one process, relative to the change by
    training; whether the user's random numbers are unchanged."""
    torch.manual_seed(dist.get_rank())
    name = "torchao.AdamW8bit in bf16"
    alone, model = _model(name), _model(name)
    before = _flat(alone.parameters())
    optimizer = fe.shard_optimizer(_optimizer(name, alone, bf16_stochastic_round=True))
    engine = _shard(model, level, mesh)
    sharded = fe.shard_optimizer(_optimizer(name, model, bf16_stochastic_round=True))
    torch.manual_seed(dist.get_rank())
    first = torch.rand(())
    torch.manual_seed(dist.get_rank())
    _train(model, sharded, 0, NUM_STEPS)
    is_unchanged = bool(torch.rand(()) == first)
    _train(alone, optimizer, 0, NUM_STEPS, is_first=True)
    weights = list(engine.full_state_dict().values())
    apart = _flat(weights) - _flat(alone.parameters())
    change = _flat(alone.parameters()) - before
    return weights, (apart.norm() / change.norm()).item(), is_unchanged


@pytest.mark.parametrize(
    ("mesh", "level"), [((4,), "no_shard"), ((4,), "optim"), ((2, 2), "optim_grads_params")]
)
def test_replicas_round_alike(ranks: Ranks, mesh: tuple[int, ...], level: str) -> None:
    """Random numbers depend on the elements that a rank holds. So bits differ from those of one
    process, but all ranks have the same."""
    found = ranks.run(_round_stochastically, mesh, level, world_size=4)
    for weights, apart, is_unchanged in found:
        assert all(map(torch.equal, weights, found[0][0]))
        assert apart < 0.2
        assert is_unchanged


def _try_to_save(name: str, elementwise: bool | None, folder: str) -> str:
    model = _model()
    engine = _shard(model, "no_shard" if elementwise is None else LEVELS[3])
    optimizer = _optimizer(name, model)
    if elementwise is not None:
        fe.shard_optimizer(optimizer, elementwise=elementwise)
    _train(model, optimizer, 0, 1)
    with pytest.raises(ValueError, match=r"^optimizer: expected ") as caught:
        fe.save_checkpoint(folder, engine, optimizer)
    if elementwise is None:
        fe.save_checkpoint(folder, engine, fe.shard_optimizer(optimizer))
    return str(caught.value)


def test_state_that_checkpoints_cannot_read_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """State of two parts in one tensor; state of an optimizer without shard_optimizer."""
    arguments = ("bitsandbytes.AdEMAMix8bit", True, str(tmp_path / "parts"))
    for error in ranks.run(_try_to_save, *arguments, world_size=2):
        assert "expected state of 0.weight in its shape" in error
        assert "found 'absmax1' of shape (2, " in error
    arguments = ("torchao.AdamW8bit", None, str(tmp_path / "not sharded"))
    for error in ranks.run(_try_to_save, *arguments, world_size=2):
        assert "found a OptimState8bit in 'exp_avg'. Call fe.shard_opt" in error


def _keep_in_32_bits() -> tuple[list[str], list[str]]:
    """The dtype of each weight's state, in one process and in a sharded model, if only the state of
    the first weight is kept in 32 bits."""
    found = []
    for is_sharded in (False, True):
        model = _model()
        if is_sharded:
            _shard(model, LEVELS[3])
        optimizer = _optimizer("bitsandbytes.AdamW8bit", model)
        manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        manager.register_module_override(model[0], "weight", {"optim_bits": 32})
        fe.shard_optimizer(optimizer, elementwise=True)
        _train(model, optimizer, 0, 1)
        weights = [param for param in model.parameters() if param.ndim == 2]
        found.append([str(optimizer.state[weight]["state1"].dtype) for weight in weights])
        manager.initialize()
    return found[0], found[1]


def test_weights_that_are_kept_in_32_bits(ranks: Ranks) -> None:
    expected = ["torch.float32", *["torch.uint8"] * 3]
    assert ranks.run(_keep_in_32_bits, world_size=2) == [(expected, expected)] * 2


def _refused(name: str, options: dict[str, Any], granule: int) -> str:
    model = _model()
    _shard(model, LEVELS[3], granule=lambda _, param: granule if param.ndim == 2 else 1)
    with pytest.raises(ValueError, match="weight: expected shard boundaries") as caught:
        fe.shard_optimizer(_optimizer(name, model, **options), elementwise=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("torchao.AdamW8bit", {}, 256),
        ("torchao.AdamW8bit", {"block_size": 512}, 512),
        ("bitsandbytes.AdamW8bit", {}, 256),
    ],
)
def test_boundaries_within_blocks_are_refused(
    ranks: Ranks, name: str, options: dict[str, Any], size: int
) -> None:
    for error in ranks.run(_refused, name, options, 32, world_size=3):
        assert f"expected shard boundaries on multiples of {size} elements" in error
        assert name.partition(".")[2] in error


def _bytes_of_training(kind: str) -> tuple[int, int]:
    bf16, is_flash = torch.bfloat16, kind == "FlashAdamW"
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    main = {"main_params_dtype": bf16, "main_grads_dtype": bf16} if is_flash else {}
    policy = fe.MixedPrecisionPolicy(param_dtype=bf16, **main)
    engine = fe.shard(model, mp_policy=policy, options=fe.Options(min_unit_size=0))
    name = "pytorch_optimizer.FlashAdamW in bf16"
    made = _optimizer(name, model) if is_flash else torch.optim.AdamW(model.parameters())
    optimizer = fe.shard_optimizer(made, elementwise=True)
    model(torch.ones(1, 512, dtype=bf16)).sum().backward()
    optimizer.step()
    num_elements = sum(param.to_local().numel() for param in model.parameters())
    return sum(engine.memory_bytes().values()) + _held(optimizer), num_elements


@pytest.mark.parametrize(("kind", "limit"), [("AdamW", 16.01), ("FlashAdamW", 7.14)])
def test_bytes_of_training_of_an_element(ranks: Ranks, kind: str, limit: float) -> None:
    for num_bytes, num_elements in ranks.run(_bytes_of_training, kind, world_size=2):
        assert limit - 0.1 < num_bytes / num_elements <= limit


def test_a_simulation_knows_state_in_8_bits() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))

    def make(params: Any) -> Any:
        with with_torchao():
            return importlib.import_module("torchao.optim").AdamW8bit(params)

    with torch.compiler.set_stance("force_eager"):
        found = fe.simulate(
            build, 8, batch=torch.ones(4, 512), loss=torch.sum, optimizer=make, strategy=LEVELS[3]
        )
    assert 2 < found.memory["optimizer"] / (2 * 512 * 512 / 8) < 2.1


def _held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the state; tensors that states share are counted once."""
    held: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            local = value._local_tensor if isinstance(value, fe.FlatDTensor) else value
            inner = [local]
            if hasattr(local, "__tensor_flatten__"):
                inner = [getattr(local, each) for each in local.__tensor_flatten__()[0]]
            held.update((part.data_ptr(), part.nbytes) for part in inner if torch.is_tensor(part))
    return sum(held.values())


def _bytes_of_state(name: str) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    dtype = torch.bfloat16 if name.endswith(" in bf16") else torch.float32
    model.to(dtype)
    _shard(model, LEVELS[3])
    optimizer = fe.shard_optimizer(_optimizer(name, model), elementwise=True)
    model(torch.ones(1, 512, dtype=dtype)).sum().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    params = list(model.parameters())
    return _held(optimizer), sum(param.to_local().numel() for param in params)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("torchao.AdamW8bit", 2.1),
        ("torchao.AdamWFp8", 2.1),
        ("bitsandbytes.AdamW8bit", 2.1),
        ("torchao.AdamW4bit", 1.1),
        # Codes of two states, 8 bits of weights, two scales of 16 bits for each 32 elements.
        ("pytorch_optimizer.FlashAdamW in bf16", 3.13),
    ],
)
def test_bytes_of_state_of_an_element(ranks: Ranks, name: str, limit: float) -> None:
    """Two codes, two scales for each block, and all else: maps of codes, counters of steps."""
    for num_bytes, num_elements in ranks.run(_bytes_of_state, name, world_size=4):
        assert num_elements == 4 * 512 * 512 // 4
        assert num_bytes <= limit * num_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS[:4])
def test_values_in_state_dicts_have_the_codes_and_scales(name: str, dtype: torch.dtype) -> None:
    """Tests blocks of many magnitudes, whose largest element is positive, negative or zero."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(1024, 256, dtype=dtype))
    optimizer = fe.shard_optimizer(_optimizer(name, nn.ParameterList([param])))
    param.grad = torch.ones_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    signed, unsigned = (optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq"))
    values = torch.randn(1024, 256) * torch.logspace(-30, 10, 1024).unsqueeze(1)
    values[5] = 0
    values[600] = values[600].clamp(max=0)
    signed.copy_(values)
    unsigned.copy_(values.square())
    expected = [(each.codes.clone(), each.scale.clone()) for each in (signed, unsigned)]
    saved = optimizer.state_dict()
    assert saved["state"][0]["exp_avg"].dtype is torch.float32
    optimizer.load_state_dict(saved)
    found = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
    for each, (codes, scale) in zip(found, expected, strict=True):
        assert torch.equal(each.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(each.scale, scale)
