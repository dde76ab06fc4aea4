"""Sharded parameters without an engine, and plain ones beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement

# Shape of the parameter, elements [start, stop) held here.
SLICES: list[tuple[tuple[int, ...], int, int]] = [
    ((6, 5), 7, 19),
    ((), 0, 1),
    ((), 0, 0),
    ((6, 5), 4, 4),
    ((7,), 0, 7),
    ((9,), 3, 4),
]


def flat(
    mesh: DeviceMesh, shape: tuple[int, ...], start: int, stop: int, local: Tensor | None = None
) -> FlatDTensor:
    placement = FlatPlacement.on_mesh(shape, start, stop, mesh, 1)
    local = torch.randn(stop - start) if local is None else local.detach().clone()
    return FlatDTensor.from_flat_local(local, placement)


class Pair:
    """Sharded parameters, and plain ones that hold the same slices."""

    def __init__(self, mesh: DeviceMesh, slices: list[Any] | None = None) -> None:
        self.mesh = mesh
        self.slices = SLICES if slices is None else slices
        self.flat: list[Any] = [nn.Parameter(flat(mesh, *each)) for each in self.slices]
        self.plain = [nn.Parameter(p.local.clone()) for p in self.flat]

    def set_grads(self) -> None:
        for p, q, each in zip(self.flat, self.plain, self.slices, strict=True):
            p.grad = flat(self.mesh, *each)
            q.grad = p.grad.local.clone()

    def check(self, *optimizers: Any) -> None:
        """Parameters are equal bit by bit. With both optimizers, their state is, too."""
        for p, q in zip(self.flat, self.plain, strict=True):
            assert torch.equal(p.local, q.detach())
        if optimizers:
            check_state(self, *optimizers)


def check_state(pair: Pair, sharded: Any, plain: Any) -> None:
    assert all(isinstance(key, FlatDTensor) for key in sharded.state)
    for p, q in zip(pair.flat, pair.plain, strict=True):
        found, expected = sharded.state[p], plain.state[q]
        assert found.keys() == expected.keys()
        for value, other in zip(found.values(), expected.values(), strict=True):
            if isinstance(other, Tensor) and other.shape == q.shape:
                assert type(value) is FlatDTensor
                assert value.flat_placement == p.flat_placement
                assert torch.equal(value.local, other)
            else:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other))


def step_both(pair: Pair, sharded: Any, plain: Any, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        pair.set_grads()
        sharded.step()
        plain.step()


@contextmanager
def mesh_in_name_only() -> Iterator[DeviceMesh]:
    """A mesh of four ranks, of which only this one, rank 1, exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class Counting(torch.optim.Optimizer):
    """SGD with signs, with unusual state: Python numbers, state of no parameter, deletions,
    defaults. It reads its state in every way that a dict allows: by ``in``, ``get`` and in
    loops."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        self.state["all"] = {"num_calls": self.num_calls}
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p] = {}
                state = self.state.get(p, {})
                state.setdefault("num_steps", 0)
                state["num_steps"] += 1
                state.update(last=p.grad.sign(), scratch=torch.ones(2))
                state |= {"union": torch.ones(3)}
                del state["scratch"]
                state.pop("absent", None)
                state["latest"] = torch.ones(4)
                assert state.popitem()[0] == "latest"
                p.sub_(state["last"], alpha=group["lr"] / state["num_steps"])
        for key, state in self.state.items():
            if key != "all":
                state["last"].mul_(0.5)
                assert key.shape == state["last"].shape
        last = self.param_groups[0]["params"][-1]
        if last in self.state:
            state = self.state.pop(last)
            assert last not in self.state
            self.state[last] = state
        assert len(self.state) == len(list(self.state.values()))
