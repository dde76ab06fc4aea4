"""A model whose state lies elsewhere, its training, and disks that fail."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.extensions.offload.places import ROLES
from tests.models import Small, vector_batch
from tests.optim.optimizers import MAKERS
from tests.reference import rank_and_size

STATE = ("optimizer_state",)
# All combinations but that of state alone.
COMBINATIONS = [
    roles for count in (1, 2, 3) for roles in itertools.combinations(ROLES, count) if roles != STATE
]
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FULL = ("optim_grads_params", "no_shard")
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "fp32": None,
    "bf16": BF16,
    "bf16 gradients": fe.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16
    ),
    "bf16 alone": fe.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_params_dtype=torch.bfloat16
    ),
}
# Called with a model, its engine, its optimizer and the number of a step, before the step.
Change = Callable[[Any, fe.Engine, Any, int], object]


def on_disk(folder: str | Path, roles: Sequence[str] = STATE) -> fe.Offload:
    return fe.Offload(folder=folder, **dict.fromkeys(roles, "disk"))


def all_roles(level: str) -> tuple[str, ...]:
    """Everything that can lie elsewhere at a level."""
    return ROLES if level.startswith("optim_grads") else ROLES[:2]


def make(
    pair: tuple[str, str] = FULL,
    name: str = "AdamW",
    offload: fe.Offload | None = None,
    **options: Any,
) -> tuple[Any, fe.Engine, Any]:
    """A model, its engine, and an optimizer of two groups."""
    torch.manual_seed(0)
    model = Small(2)
    mesh = (2, 2) if rank_and_size()[1] == 4 else None
    engine = fe.shard(model, mesh, *pair, offload=offload, min_unit_size=0, **options)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
    optimizer = MAKERS[name](groups)
    fe.shard_optimizer(optimizer, elementwise=name == "Lion")
    return model, engine, optimizer


def step(model: Any, engine: fe.Engine, optimizer: Any, number: int, micro: int = 1) -> list[Any]:
    """One step, of which every third is skipped, on this rank's rows; losses and norms."""
    rank, size = rank_and_size()
    device, found = engine.mesh.device, list[Any]()
    for index in range(micro):
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
        batch = [part[rows].to(device) for part in vector_batch(4, 10 * number + index)]
        with nullcontext() if index == micro - 1 else engine.no_sync():
            loss = model(*batch) / micro
            loss.backward()
        found.append(("loss", number, loss.detach()))
    if micro == 2:
        found.append(("norm", number, engine.clip_grad_norm_(0.5)))
    if number % 3 != 2:
        optimizer.step()
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    return found


def values(optimizer: Any) -> list[Any]:
    """State and hyperparameters, in order."""
    packed = optimizer.state_dict()
    found: list[Any] = []
    for index in sorted(packed["state"]):
        for key in sorted(packed["state"][index]):
            value = packed["state"][index][key]
            local = getattr(value, "local", value)
            found.append((index, key, local.clone() if isinstance(local, Tensor) else local))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in packed["param_groups"]]
    return [*found, groups, getattr(optimizer, "num_steps", None)]


def weights(engine: fe.Engine) -> list[Any]:
    """Full weights, as :func:`assert_same` takes them. A collective."""
    return [(key, "", value) for key, value in engine.full_state_dict().items()]


def train(
    offload: fe.Offload | None,
    pair: tuple[str, str] = FULL,
    name: str = "AdamW-fused",
    change: Change = lambda *args: None,
    micro: int = 2,
    **options: Any,
) -> list[Any]:
    """Losses, norms, weights and state of four steps, one of which is skipped. With two
    microbatches gradients are clipped. ``options`` are those of ``shard``."""
    model, engine, optimizer = make(pair, name, offload, **options)
    found = []
    for number in range(4):
        change(model, engine, optimizer, number)
        found += step(model, engine, optimizer, number, micro)
    assert "optimizer" not in engine.memory_bytes() or offload is None
    return [*found, *weights(engine), *values(optimizer)]


def compare(
    folder: str | Path, roles: Sequence[Sequence[str]], pair: tuple[str, str] = FULL, **given: Any
) -> None:
    """Assert that :func:`train` gives the same bits with each of ``roles`` on a disk."""
    expected = train(None, pair, **given)
    for each in roles:
        assert_same(train(on_disk(folder, each), pair, **given), expected)
    assert not os.listdir(folder)  # its files have no names


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, tuple) and isinstance(one[2], Tensor):
            assert one[:2] == other[:2]
            assert torch.equal(one[2].cpu(), other[2].cpu()), one[:2]
        else:
            assert one == other


@contextmanager
def failing(name: str, number: int, result: int | OSError) -> Iterator[list[int]]:
    """Within it the call of that number of a function of ``os`` fails or is short; the calls."""
    call, calls = getattr(os, name), [0]

    def broken(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == number + 1:
            if isinstance(result, OSError):
                raise result
            return result
        found: int = call(*args)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, broken)
        yield calls


def state_files() -> set[str]:
    """Files with state that this process has open."""
    folder = "/proc/self/fd"
    links = [os.path.join(folder, number) for number in os.listdir(folder)]
    found = {os.readlink(link) for link in links if os.path.lexists(link)}
    return {name for name in found if "fsdp_engine-state" in name}


def offloadings_of(engine: Any) -> list[Offloading]:
    """The objects that move the state of an engine."""
    return [part for part in engine.parts if isinstance(part, Offloading)]
