"""Tensors within ``extra``: sharded ones belong to every number of ranks, plain ones to a rank."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint import extra_tensors
from fsdp_engine.checkpoint.inspection import describe
from fsdp_engine.checkpoint.manifest import Manifest
from fsdp_engine.checkpoint.offline import StoredCheckpoint, verify
from fsdp_engine.checkpoint.run_state import pack
from tests import reference
from tests.checkpoint.scene import Config, Ema, Values, label, run_on, shard, shared_folder
from tests.models import Mlp
from tests.pool import Ranks, on_ranks

LEVELS = ("no_shard", "optim_grads_params")
# By world size; 0 is one process without a process group.
CONFIGS: dict[int, list[Config]] = {
    0: [{"strategy": "optim_grads_params", "outer": "no_shard", "shape": ()}],
    1: [{"strategy": "no_shard", "outer": "no_shard", "shape": (1,)}],
    2: [{"strategy": level, "outer": "no_shard", "shape": (2,)} for level in LEVELS],
    4: [{"strategy": "optim_grads_params", "outer": "optim", "shape": (2, 2)}],
}


def begin(config: Config, folder: str, seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model = Mlp()
    engine = shard(model, config)
    ema = Ema(model)
    # An optimizer has sharded tensors in its state, too.
    other = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    extra = {"ema": ema, "other": other}
    return model, ema, other, fe.Checkpointer(folder, engine, extra=extra)


def averages(ema: Ema, other: Any) -> list[Tensor]:
    momenta = [other.state[p]["momentum_buffer"] for p in ema.model.parameters()]
    return [reference.full(each) for each in [*ema.shadow.values(), *momenta]]


def save(configs: list[Config], folder: str) -> list[list[Tensor]]:
    saved = []
    for config in configs:
        model, ema, other, checkpointer = begin(config, f"{folder}/{label(config)}", 1)
        for param in model.parameters():
            param.grad = param.detach() * 2
        other.step()
        other.zero_grad()
        ema.update()
        saved.append(averages(ema, other))
        checkpointer.save_async(1)
        for tensor in ema.shadow.values():
            tensor.zero_()
        checkpointer.close()
    return saved


def load(configs: list[Config], folder: str, saved: dict[str, list[Tensor]]) -> None:
    for config, (name, expected) in itertools.product(configs, saved.items()):
        model, ema, other, checkpointer = begin(config, f"{folder}/{name}", 2)
        checkpointer.load()
        for found, wanted in zip(averages(ema, other), expected, strict=True):
            assert torch.equal(found, wanted), f"{name} -> {label(config)}"
        if "no_shard-no" not in name:
            for key, param in model.named_parameters():
                assert type(ema.shadow[key]) in (type(param), Tensor)
        before = reference.full_weights(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        other.step()  # moves by the loaded momenta alone
        momenta = dict(zip(before, expected[len(before) :], strict=True))
        for key, param in model.named_parameters():
            wanted = before[key] - 1e-3 * 0.9 * momenta[key]
            torch.testing.assert_close(reference.full(param), wanted)


@pytest.mark.parametrize("num_sources", [2, pytest.param(9, marks=pytest.mark.thorough)])
def test_averages_and_momenta_are_loaded_by_any_ranks(
    ranks: Ranks, tmp_path: Path, num_sources: int
) -> None:
    saved: dict[str, list[Tensor]] = {}
    for world_size, configs in CONFIGS.items():
        found = run_on(ranks, world_size, save, configs, str(tmp_path))[0]
        saved |= dict(zip(map(label, configs), found, strict=True))
    for number, (world_size, configs) in enumerate(CONFIGS.items()):
        some = {name: saved[name] for name in [*saved, *saved][number + 2 :][:num_sources]}
        run_on(ranks, world_size, load, configs, str(tmp_path), some)


@dataclass
class Shadow:
    weights: dict[str, Tensor]


class Pair(NamedTuple):
    first: Tensor
    others: Any


class Own:
    """An object that only a pickle looks into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


CONTAINERS: dict[str, Any] = {
    "list": lambda t: [1, [t, t]],
    "tuple": lambda t: (t, {"a.b": t.double(), "a": {"b": t + 1}}),
    "named": lambda t: Pair(t, {3: t, None: "x"}),
    "dataclass": lambda t: Shadow({"w": t}),
    "ordered": lambda t: OrderedDict(z=t, y=deque([t, t * 2])),
    "object": lambda t: Own(t),
    "grad": lambda t: {"leaf": t.clone().requires_grad_(), "mask": t > 0},
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Own | Shadow):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    is_row = isinstance(value, list | tuple | deque)
    return [tensor for each in value for tensor in tensors_in(each)] if is_row else []


def sharded_mlp(seed: int = 1) -> tuple[Mlp, fe.Engine]:
    torch.manual_seed(seed)
    model = Mlp()
    return model, fe.shard(model)


def save_containers(folder: str) -> dict[str, list[Tensor]]:
    model, engine = sharded_mlp()
    tensor = model.up.weight.detach().clone()
    values = {name: make(tensor) for name, make in CONTAINERS.items()}
    extra = {name: Values(value) for name, value in values.items()}
    fe.Checkpointer(f"{folder}/run", engine, extra=extra).save(0)
    local = fe.LocalCheckpointer(f"{folder}/local", engine, extra=extra)
    local.save(0)
    local.close()
    fe.save_checkpoint(f"{folder}/one", engine, extra=values)
    return {name: list(map(reference.full, tensors_in(each))) for name, each in values.items()}


def load_containers(folder: str, expected: dict[str, list[Tensor]]) -> None:
    model, engine = sharded_mlp(2)
    for kind in (fe.Checkpointer, fe.LocalCheckpointer):
        extra = {name: Values() for name in CONTAINERS}
        where = "run" if kind is fe.Checkpointer else "local"
        kind(f"{folder}/{where}", engine, extra=extra).load(trust=True)
        check_containers({name: each.value for name, each in extra.items()}, model, expected)
    loaded = fe.load_checkpoint(f"{folder}/one", engine, trust=True)
    check_containers(loaded, model, expected)


def check_containers(loaded: dict[str, Any], model: Mlp, expected: Any) -> None:
    for name, make in CONTAINERS.items():
        found = tensors_in(loaded[name])
        for one, other in zip(found, expected[name], strict=True):
            assert torch.equal(reference.full(one), other), name
            assert one.dtype == other.dtype, name
            assert type(one) is type(model.up.weight.detach())
        assert type(loaded[name]) is type(make(torch.ones(2)))
        same = [one is other for one, other in itertools.combinations(found, 2)]
        assert any(same) == (name in ("list", "tuple", "named", "ordered") and name != "tuple")
    assert loaded["grad"]["leaf"].requires_grad


def test_sharded_tensors_are_found_in_any_container(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(save_containers, str(tmp_path), world_size=2)[0]
    for world_size in (2, 1):
        ranks.run(load_containers, str(tmp_path), expected, world_size=world_size)


def save_other_tensors(folder: str) -> Tensor:
    model, engine = sharded_mlp()
    other, _ = sharded_mlp(2)
    # Of another engine, whose parameter has the same name.
    value = {"w": other.up.weight.detach().clone(), "mine": model.up.weight.detach().clone()}
    fe.Checkpointer(folder, engine, extra={"other": Values(value)}).save(0)
    return reference.full(other.up.weight)


def load_other_tensors(folder: str, expected: Tensor) -> None:
    _, engine = sharded_mlp()
    values = Values()
    fe.Checkpointer(folder, engine, extra={"other": values}).load()
    assert torch.equal(reference.full(values.value["w"]), expected)


def test_slices_of_an_engine_that_is_not_saved_are_loaded_by_any_ranks_and_tools(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(save_other_tensors, str(tmp_path), world_size=2)[0]
    for world_size in (2, 1):
        ranks.run(load_other_tensors, str(tmp_path), expected, world_size=world_size)
    (folder,) = tmp_path.glob("step-*")
    described = describe(StoredCheckpoint(folder))
    assert described.sections["extra"].tensors == 2
    assert "Reference" in described.extra["other"]
    assert verify(folder).damages == []
    assert Manifest.read(folder).tensors[-1].name == "extra_tensors.other.mine"


@on_ranks(2)
def test_extras_that_cannot_be_saved_raise_on_all_ranks_by_name() -> None:
    folder, rank = shared_folder(), dist.get_rank()
    model, engine = sharded_mlp()
    tensor = model.up.weight.detach().clone()
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    cases: dict[str, tuple[Any, str]] = {
        "one": ({"shadow": tensor} if rank else {}, "found one.shadow .like up.weight.* on data"),
        "two": ([tensor] if rank else [tensor.half()], "found two.0 .*float16"),
        "three": ({"rows": [rows]}, r"found three\.rows\.0, a DTensor"),
    }
    for name, (value, message) in cases.items():
        checkpointer = fe.Checkpointer(folder, engine, extra={name: Values(value)})
        with pytest.raises(ValueError, match=message):
            checkpointer.save(0)
        with pytest.raises(ValueError, match=message):
            fe.save_checkpoint(f"{folder}/{name}", engine, extra={name: value})
        assert checkpointer.steps() == []
        assert not list(Path(folder).glob(".saving*"))
        checkpointer.close()
    replicated = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    fe.Checkpointer(folder, engine, extra={"norm": Values([replicated])}).save(0)


def save_plain(folder: str) -> None:
    _, engine = sharded_mlp()
    rank = dist.get_rank()
    value = {"same": torch.ones(3), "lists": [1, rank], "t": torch.tensor([rank]), "s": {"a", "b"}}
    extra = {"data": Values(value), "unused": Values(rank)}
    fe.Checkpointer(folder, engine, extra=extra).save(0)


def load_plain(folder: str) -> None:
    _, engine = sharded_mlp()
    values = Values()
    checkpointer = fe.Checkpointer(folder, engine, extra={"data": values})
    if dist.get_world_size() == 2:
        assert checkpointer.load().of_rank_0 == []
        assert values.value["lists"] == [1, dist.get_rank()]
        return
    with pytest.warns(UserWarning, match=r"different values of data\.lists\.1, data\.t; every"):
        report = checkpointer.load()
    assert report.of_rank_0 == ["data.lists.1", "data.t"]
    assert values.value["lists"] == [1, 0]


def test_values_of_rank_0_are_named_where_ranks_had_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_plain, str(tmp_path), world_size=2)
    for world_size in (2, 1, 3):
        ranks.run(load_plain, str(tmp_path), world_size=world_size)


def save_as_before(folder: str) -> None:
    """As version 0.1 did: slices within the pickles."""
    _, engine = sharded_mlp()
    with patch.object(extra_tensors.ExtraTensors, "pack", lambda self, value, extra: pack(value)):
        ema = Ema(engine.model)
        fe.Checkpointer(f"{folder}/run", engine, extra={"ema": ema}).save(0)
        fe.save_checkpoint(f"{folder}/one", engine, extra={"ema": ema.state_dict()})


def load_from_before(folder: str) -> None:
    model, engine = sharded_mlp(2)
    weights = reference.full_weights(model)
    ema = Ema(model)
    checkpointer = fe.Checkpointer(f"{folder}/run", engine, extra={"ema": ema})
    is_same_job = dist.get_world_size() == 2
    message = r"'?extra\['ema'\]: expected full tensors.*slices of other ranks.*up.weight, elements"
    if not is_same_job:
        with pytest.raises(ValueError, match=message):
            checkpointer.load()
    with pytest.raises(ValueError, match=r"extra: expected full tensors.*as many ranks"):
        fe.load_checkpoint(f"{folder}/one", engine)
    for name, value in reference.full_weights(model).items():
        assert torch.equal(value, weights[name])
    problems = checkpointer.load(strict=is_same_job).problems
    assert len(problems) == (0 if is_same_job else 2)
    for name, param in model.named_parameters():
        expected = reference.full(param) if is_same_job else weights[name]
        assert torch.equal(reference.full(ema.shadow[name]), expected)


@pytest.mark.filterwarnings("ignore:.*missing extra.ema")
def test_slices_in_older_checkpoints_are_loaded_by_the_same_ranks_only(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_as_before, str(tmp_path), world_size=2)
    for world_size in (2, 1):
        ranks.run(load_from_before, str(tmp_path), world_size=world_size)
