"""A model with experts, over expert and data parallel ranks, whose checkpoints tests load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from tests.checkpoint.scene import update

NUM_EXPERTS, WIDTH = 4, 8


class Grouped(nn.Module):
    """Experts in one tensor."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, WIDTH, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eij->bj", x, self.weight)


class Layer(nn.Module):
    """A linear shared by all ranks, ``num`` experts as modules, and ``num`` experts in one
    tensor."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))
        self.grouped = nn.ModuleDict({"inner": Grouped(num)})
        if num < NUM_EXPERTS:
            for experts in (self.experts, self.grouped):
                for param in experts.parameters():
                    param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        y = self.grouped["inner"](x)
        for expert in self.experts:
            y = y + expert(x)
        return x + y


class Model(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(num) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def own_part(name: str, value: Tensor, rank: int, size: int) -> tuple[str, Tensor | None]:
    """This rank's name and part of a weight of the unsharded model; None: not on this rank."""
    each = NUM_EXPERTS // size
    if ".experts." in name:
        before, rest = name.split(".experts.")
        number, _, last = rest.partition(".")
        local = int(number) - rank * each
        return f"{before}.experts.{local}.{last}", value if 0 <= local < each else None
    if ".grouped." in name:
        return name, value[rank * each : (rank + 1) * each]
    return name, value


def built(
    size: int, level: str, seed: int, *, on_meta: bool = False, values: str = "same"
) -> tuple[fe.Engine, int]:
    """A model whose experts are spread over ``size`` ranks, with the values of one full model, and
    this rank's index among them."""
    world = dist.get_world_size()
    if size == 1:
        torch.manual_seed(seed)
        with torch.device("meta" if on_meta else "cpu"):
            model = Model(NUM_EXPERTS)
        return fe.shard(model, strategy=level, initial_values=values), 0
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("copies", "experts"))
    rank = mesh["experts"].get_local_rank()
    torch.manual_seed(seed)
    with torch.device("meta" if on_meta else "cpu"):
        whole, model = Model(NUM_EXPERTS).state_dict(), Model(NUM_EXPERTS // size)
    if not on_meta:
        parts = [own_part(name, value, rank, size) for name, value in whole.items()]
        model.load_state_dict({name: part for name, part in parts if part is not None})
    experts = mesh["copies"]
    return fe.shard(model, strategy=level, expert_mesh=experts, initial_values=values), rank


def stepped(engine: fe.Engine, steps: int) -> Any:
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + engine.mesh.rank)
        update(engine.model(torch.randn(3, WIDTH)), optimizer)
    return optimizer
