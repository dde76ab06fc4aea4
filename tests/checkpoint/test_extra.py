"""Tensors within ``extra``: sharded ones load on any number of ranks, plain ones belong to one
rank."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict, deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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
from tests.checkpoint.scene import (
    Config,
    Ema,
    Values,
    label,
    raises_each,
    run_on,
    shard,
    shared_folder,
    update,
    warned_first,
)
from tests.models import Mlp
from tests.pool import Ranks, on_ranks

LEVEL_3 = {"strategy": "optim_grads_params", "outer": "no_shard"}
# By world size; 0 is one process without a process group.
CONFIGS: dict[int, list[Config]] = {
    0: [{**LEVEL_3, "shape": ()}],
    1: [{**LEVEL_3, "strategy": "no_shard", "shape": (1,)}],
    2: [{**LEVEL_3, "shape": (2,)}, {**LEVEL_3, "strategy": "no_shard", "shape": (2,)}],
    4: [{**LEVEL_3, "outer": "optim", "shape": (2, 2)}],
}


@dataclass
class Shadow:
    weights: dict[str, Tensor]


class Pair(NamedTuple):
    first: Tensor
    others: Any


class Own:
    """An object whose contents only pickle can save."""

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
WAYS = ("Checkpointer", "LocalCheckpointer", "save_checkpoint")


def tensors_in(value: Any) -> list[Tensor]:
    value = vars(value) if isinstance(value, Own | Shadow) else value
    value = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, Tensor):
        return [value]
    is_row = isinstance(value, list | tuple | deque)
    return [tensor for each in value for tensor in tensors_in(each)] if is_row else []


def sharded_mlp(seed: int = 1) -> tuple[Mlp, fe.Engine]:
    torch.manual_seed(seed)
    model = Mlp()
    return model, fe.shard(model)


class Scene:
    """A model, an average of its weights, an optimizer with momenta, and containers of tensors."""

    def __init__(self, config: Config, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Mlp()
        self.engine = shard(self.model, config)
        self.ema = Ema(self.model)
        self.other = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.values = {name: Values() for name in CONTAINERS}
        self.extra = {"ema": self.ema, "other": self.other, **self.values}

    def tensors(self) -> list[Tensor]:
        momenta = [self.other.state[p]["momentum_buffer"] for p in self.model.parameters()]
        values = [tensors_in(each.value) for each in self.values.values()]
        return [*self.ema.shadow.values(), *momenta, *itertools.chain(*values)]


def save(configs: list[Config], folder: str) -> dict[str, list[Tensor]]:
    saved = {}
    for config in configs:
        scene = Scene(config, 1)
        update(sum(p.square().sum() for p in scene.model.parameters()), scene.other)  # type: ignore[arg-type]
        scene.ema.update()
        for name, each in scene.values.items():
            each.value = CONTAINERS[name](scene.model.up.weight.detach().clone())
        saved[label(config)] = list(map(reference.full, scene.tensors()))
        root = f"{folder}/{label(config)}"
        states = {name: each.state_dict() for name, each in scene.extra.items()}
        fe.save_checkpoint(f"{root}/save_checkpoint", scene.engine, extra=states)
        with closing(
            fe.LocalCheckpointer(f"{root}/{WAYS[1]}", scene.engine, extra=scene.extra)
        ) as c:
            c.save(1)
        with closing(fe.Checkpointer(f"{root}/{WAYS[0]}", scene.engine, extra=scene.extra)) as c:
            c.save_async(1)
            for tensor in scene.ema.shadow.values():
                tensor.zero_()
    return saved


def load(configs: list[Config], folder: str, saved: dict[str, list[Tensor]], number: int) -> None:
    for config, (name, expected) in itertools.product(configs, saved.items()):
        way = WAYS[number % 3]
        number += 1
        scene = Scene(config, 2)
        if way == "save_checkpoint":
            for key, state in fe.load_checkpoint(
                f"{folder}/{name}/{way}", scene.engine, trust=True
            ).items():
                scene.extra[key].load_state_dict(state)
        else:
            kind = getattr(fe, way)
            kind(f"{folder}/{name}/{way}", scene.engine, extra=scene.extra).load(trust=True)
        case = f"{way}: {name} -> {label(config)}"
        for one, wanted in zip(scene.tensors(), expected, strict=True):
            assert torch.equal(reference.full(one), wanted), case
            assert one.dtype == wanted.dtype, case
            assert "no_shard-no" in name or type(one) is type(scene.model.up.weight.detach()), case
        for key, each in scene.values.items():
            assert type(each.value) is type(CONTAINERS[key](torch.ones(2)))
            pairs = itertools.combinations(tensors_in(each.value), 2)
            assert any(one is other for one, other in pairs) == (
                key in ("list", "named", "ordered")
            )
        assert scene.values["grad"].value["leaf"].requires_grad
        before = reference.full_weights(scene.model)
        momenta = dict(zip(before, expected[len(before) :], strict=False))
        for param in scene.model.parameters():
            param.grad = torch.zeros_like(param)
        scene.other.step()  # gradients are 0: only the loaded momenta change weights
        for key, found in reference.full_weights(scene.model).items():
            torch.testing.assert_close(found, before[key] - 1e-3 * 0.9 * momenta[key])


def test_averages_momenta_and_tensors_in_any_container_are_loaded_by_any_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved: dict[str, list[Tensor]] = {}
    for world_size, configs in CONFIGS.items():
        saved |= run_on(ranks, world_size, save, configs, str(tmp_path))[0]
    for number, (world_size, configs) in enumerate(CONFIGS.items()):
        some = {name: saved[name] for name in [*saved, *saved][number + 2 :][:2]}
        run_on(ranks, world_size, load, configs, str(tmp_path), some, number)


def other_tensors(folder: str, expected: Tensor | None = None) -> Tensor:
    """Save, or load, tensors of two engines whose parameters have the same name."""
    model, engine = sharded_mlp()
    other, _ = sharded_mlp(2)
    values = Values({"w": other.up.weight.detach().clone(), "mine": model.up.weight.detach()})
    checkpointer = fe.Checkpointer(folder, engine, extra={"other": values})
    if expected is None:
        checkpointer.save(0)
    else:
        checkpointer.load()
        assert torch.equal(reference.full(values.value["w"]), expected)
    return reference.full(other.up.weight)


def test_slices_of_an_engine_that_is_not_saved_are_loaded_by_any_ranks_and_tools(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(other_tensors, str(tmp_path), world_size=2)[0]
    for world_size in (2, 1):
        ranks.run(other_tensors, str(tmp_path), expected, world_size=world_size)
    (folder,) = tmp_path.glob("step-*")
    described = describe(StoredCheckpoint(folder))
    assert described.sections["extra"].tensors == 2
    assert described.extra["other"] == "2 tensors, 408 elements"
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
        one = partial(fe.save_checkpoint, f"{folder}/{name}", engine, extra={name: value})
        raises_each(
            (ValueError, message, partial(checkpointer.save, 0)), (ValueError, message, one)
        )
        assert checkpointer.steps() == []
        assert not list(Path(folder).glob(".saving*"))
        checkpointer.close()
    replicated = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    fe.Checkpointer(folder, engine, extra={"norm": Values([replicated])}).save(0)


@on_ranks(2)
def test_tensors_within_objects_have_other_names_than_those_of_the_user() -> None:
    folder = shared_folder()
    model, engine = sharded_mlp()
    tensor = model.up.weight.detach().clone()
    saved = {"unnamed": [tensor, tensor + 1], "own": Own(tensor + 2), "a": {"b": tensor + 3}}
    saved |= {"a.b#2": tensor + 4, "a.b": tensor + 5}
    expected = list(map(reference.full, [each for v in saved.values() for each in tensors_in(v)]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a load refuses it")
        fe.save_checkpoint(folder, engine, extra=saved)
    loaded = fe.load_checkpoint(folder, engine, trust=True)
    found = list(map(reference.full, [each for v in loaded.values() for each in tensors_in(v)]))
    assert len(found) == len(expected) == 6
    assert all(map(torch.equal, found, expected))


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
    with warned_first(r"different values of data\.lists\.1, data\.t; every"):
        report = checkpointer.load()
    assert report.of_rank_0 == ["data.lists.1", "data.t"]
    assert values.value["lists"] == [1, 0]


def test_values_of_rank_0_are_named_where_ranks_had_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_plain, str(tmp_path), world_size=2)
    for world_size in (2, 1, 3):
        ranks.run(load_plain, str(tmp_path), world_size=world_size)


def save_as_before(folder: str) -> None:
    """Save in the format of version 0.1, which pickles slices."""
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
    with pytest.raises(ValueError, match=r"extra: expected full tensors.*number of ranks"):
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
