"""State of optimizers that step whole tensors lies on a disk between steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.extensions.offload.disk_memory import DiskBlock
from tests import reference
from tests.extensions.whole_tensor_optimizers import owned
from tests.pool import on_few_ranks

whitening = owned.MAKERS["Whitening"]


class Exchanging(torch.optim.Optimizer):
    """Exchanges the two tensors of its state in each step."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["one"], state["other"] = torch.zeros_like(p), torch.zeros_like(p)
                state["one"], state["other"] = state["other"], state["one"]
                state["one"].mul_(0.5).add_(p.grad)
                p.sub_(state["one"] + 0.5 * state["other"], alpha=group["lr"])


@contextmanager
def late_disk() -> Iterator[None]:
    """Delay reads and writes of state. If a step did not wait for a read, the read would end after
    new state has replaced the old state."""
    with owned.small_chunks() as patch:
        for name, seconds in (("read", 0.003), ("write", 0.006)):
            call = getattr(DiskBlock, name)

            def late(*args: Any, call: Any = call, seconds: float = seconds) -> None:
                time.sleep(seconds)
                call(*args)

            patch.setattr(DiskBlock, name, late)
        yield


@on_few_ranks
def test_main_weights_of_whole_tensors_stay_on_the_device(tmp_path: Path) -> None:
    offload = fe.Offload(optimizer_state="disk", main_weights="disk", folder=tmp_path)
    with pytest.raises(ValueError, match=r"offload\.main_weights: expected 'device', since Muon s"):
        owned.sharded(owned.MAKERS["Muon"], extensions=[offload])


def assert_same_on_a_disk(
    body: Callable[[owned.Side], object], maker: Callable[[Any], Any], folder: Path, **options: Any
) -> list[owned.Side]:
    """Training with state on a disk has the bits of training with state on the device."""
    disk = fe.Offload(optimizer_state="disk", folder=folder)
    sides = [owned.sharded(maker, extensions=given, **options) for given in ([], [disk])]
    for side in sides:
        body(side)
    assert all(map(torch.equal, *(owned.values(side.model) for side in sides)))
    return sides


def partly_whole(model: nn.Module) -> torch.optim.Optimizer:
    """An elementwise optimizer; some parameters are stepped whole."""
    return torch.optim.AdamW(model.parameters(), 0.02)


@pytest.mark.parametrize("name", [*owned.MAKERS, "mixed"])
@on_few_ranks
def test_state_on_a_disk(name: str, tmp_path: Path) -> None:
    maker, options = owned.MAKERS.get(name, partly_whole), {}
    if maker is partly_whole:
        options = {"whole": ["0.*", "2.*"]}

    def body(side: owned.Side) -> None:
        side.train(0, 1)
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
        side.train(2)

    sides = assert_same_on_a_disk(body, maker, tmp_path, **options)
    if name in ("Muon", "mixed"):
        assert sides[1].engine.memory_bytes("disk")["optimizer"] > 0
    expected, found = (side.optimizer.state_dict()["state"] for side in sides)
    assert found.keys() == expected.keys()
    for one, other in zip(owned.tensors_of(found), owned.tensors_of(expected), strict=True):
        assert torch.equal(reference.held(one), reference.held(other))


def lbfgs(search: str | None) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.LBFGS(m.parameters(), 0.5, max_iter=2, line_search_fn=search)


def exchanging(model: nn.Module) -> torch.optim.Optimizer:
    return Exchanging(model.parameters())


# By a change of state in a step: the optimizer, and options of ``shard_optimizer``.
CHANGES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    **dict.fromkeys(owned.RESETS, (whitening, {})),
    "tensors exchanged": (exchanging, {"whole": True}),
    "slices exchanged": (exchanging, {"elementwise": True}),
    "called again": (lbfgs(None), {}),
    "searching": (lbfgs("strong_wolfe"), {}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("level", owned.LEVELS)
@on_few_ranks
def test_state_on_a_disk_may_be_reset_and_exchanged_and_closures_called_again(
    level: str, name: str, tmp_path: Path
) -> None:
    def body(side: owned.Side) -> None:
        for step in range(4):
            if step == 2 and name in owned.RESETS:
                owned.RESETS[name](side.optimizer)
            side.optimizer.step(side.closure(step))

    maker, options = CHANGES[name]
    with late_disk():
        assert_same_on_a_disk(body, maker, tmp_path, level=level, **options)
