"""A model whose state lies elsewhere, its training, and disks that fail."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.extensions.offload.places import ROLES
from tests.checkpoint.scene import update
from tests.models import Small, vector_batch
from tests.optim.optimizers import MAKERS
from tests.reference import rank_and_size
from tests.scenario import Scenario, assert_same_bits

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


def on_disk(folder: str | Path, roles: Sequence[str] = STATE) -> fe.Offload:
    return fe.Offload(folder=folder, **dict.fromkeys(roles, "disk"))


def all_roles(level: str) -> tuple[str, ...]:
    """Everything that can lie elsewhere at a level."""
    return ROLES if level.startswith("optim_grads") else ROLES[:2]


def scenario(
    pair: tuple[str, str] = FULL,
    name: str = "AdamW-fused",
    offload: fe.Offload | None = None,
    **options: Any,
) -> Scenario:
    """Training by an optimizer of two groups. ``options`` are those of ``shard``."""

    def make_optimizer(parameters: Iterable[Tensor]) -> Any:
        params = list(parameters)
        return MAKERS[name]([{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}])

    return Scenario(
        model=functools.partial(Small, 2),
        batch=vector_batch,
        pair=pair,
        mesh=(2, 2) if rank_and_size()[1] == 4 else None,
        options={"min_unit_size": 0, "offload": offload, **options},
        optimizer=make_optimizer,
        wrap=functools.partial(fe.shard_optimizer, elementwise=name == "Lion"),
        steps=3,
        max_norm=0.5,
    )


def make(*args: Any, **options: Any) -> tuple[Any, fe.Engine, Any]:
    """A model, its engine and its optimizer, by the arguments of :func:`scenario`."""
    given = scenario(*args, **options)
    model, engine = given.sharded_model()
    return model, engine, given.wrap(given.optimizer(model.parameters()))


def step(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """A step on this rank's rows."""
    rank, size = rank_and_size()
    rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
    update(model(*(part[rows] for part in vector_batch(4, number))), optimizer)


def compare(folder: str | Path, roles: Sequence[Sequence[str]], given: Scenario) -> None:
    """Assert that training has the same bits with each of ``roles`` on a disk."""
    expected = given.sharded()
    for each in roles:
        found = given.but(options={"offload": on_disk(folder, each)}).sharded()
        assert_same_bits(found, expected)
        assert "optimizer" not in found.engine.memory_bytes()
    assert not os.listdir(folder)  # its files have no names


@contextmanager
def failing(name: str, number: int, result: int | OSError) -> Iterator[list[int]]:
    """Let call ``number`` of ``os.<name>`` fail or return ``result``. Yields the count of calls."""
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
