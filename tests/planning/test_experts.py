"""Experts: parameters that only some data-parallel ranks share.

Four ranks, two experts: ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1. Each rank has its own
tokens; a token goes to the expert that its first feature says, on whichever rank of the pair. One
process with both experts on all tokens says what must come out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fsdp_engine as fe
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.pool import Ranks, on_ranks
from tests.reference import full, relative_error

DIM = 6
NUM_EXPERTS = 2


class Gathered(torch.autograd.Function):
    """Rows of all ranks of a group; gradients are summed back to their rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.rows
        return grad[start : start + ctx.rows], None


class Scattered(torch.autograd.Function):
    """The sum over a group of this rank's rows; gradients of all rows come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Mixture(nn.Module):
    """A linear, then experts of which this rank holds ``held``; ``group`` holds all of them."""

    def __init__(self, held: list[int], group: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(NUM_EXPERTS, DIM, DIM, generator=generator) / DIM**0.5
        self.first = nn.Linear(DIM, DIM)
        self.experts = nn.ParameterDict({str(e): nn.Parameter(weights[e].clone()) for e in held})
        self.last = nn.Linear(DIM, 1)
        self.group = group
        self.fill: float | None = None  # instead of a loss: gradients that are this everywhere
        for expert in self.experts.values():
            expert.allreduce = group is None

    def mix(self, x: Tensor) -> Tensor:
        whole = x if self.group is None else Gathered.apply(x, self.group)
        goes_to = (whole.detach()[:, 0] > 0).long()
        out = whole * 0.0  # in the graph, also where no token comes
        for name, weight in self.experts.items():
            chosen = (goes_to == int(name)).unsqueeze(1)
            if not chosen.any():
                continue
            out = out + torch.where(chosen, torch.tanh(whole @ weight), 0.0)
        return out if self.group is None else Scattered.apply(out, self.group)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fill is not None:
            self.mix(self.first(x))  # every module is called
            return sum((p.sum() * self.fill for p in self.parameters()), torch.zeros(()))
        return F.mse_loss(self.last(self.mix(self.first(x))), y)


def batches(num_micro: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(7)

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randn(5, DIM, generator=generator), torch.randn(5, 1, generator=generator)

    return [[rows() for _ in range(4)] for _ in range(num_micro)]


def build(held: list[int], group: Any = None) -> Mixture:
    torch.manual_seed(2)
    return Mixture(held, group)


def wrapped(config: Any) -> tuple[fe.DistributedDataParallel, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    held = mesh["experts"].get_local_rank()
    model = build([held], mesh["experts"].get_group())
    # Same name for every rank's expert, as layers of experts have it.
    return fe.DistributedDataParallel(model, config, expert_mesh=mesh["copies"]), held


def compare(level: str) -> list[str]:
    found = []
    for overlap, average, fused in itertools.product((False, True), repeat=3):
        config = config_of(
            level,
            overlap=overlap,
            average_in_collective=average,
            gradient_reduce_div_fusion=fused,
        )
        ddp, _ = wrapped(config)
        alone = build([0, 1])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.3)
        for step in range(2):
            data = batches(2)
            for micro in data:
                x, y = (torch.cat(parts) for parts in zip(*micro, strict=True))
                (alone(x, y) / len(data)).backward()
            ddp.zero_grad_buffer()
            for index, micro in enumerate(data):
                with ddp.no_sync() if overlap and index == 0 else torch.enable_grad():
                    (ddp(*micro[dist.get_rank()]) / len(data)).backward()
            ddp.finish_grad_sync()
            params = dict(alone.named_parameters())
            pairs: list[tuple[str, Tensor, Tensor]] = []
            for name, param in ddp.module.named_parameters():
                assert param.grad is not None
                other = params[name]
                assert other.grad is not None
                pairs.append((f"gradient of {name}", full(param.grad), other.grad.clone()))
            norm = ddp.engine.clip_grad_norm_(0.05)
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            pairs.append(("norm", norm, expected))
            optimizer.step()
            alone_optimizer.step()
            alone_optimizer.zero_grad()
            for name, param in ddp.module.named_parameters():
                pairs.append((f"weight {name}", full(param), params[name].detach()))
            case = f"overlap={overlap}, average={average}, fused={fused}, step {step}"
            found += [
                f"{case}: {what}: {relative_error(a, b):.1e}"
                for what, a, b in pairs
                if relative_error(a, b) > 2e-5
            ]
    return found


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_experts_train_as_one_process_that_holds_all_of_them(ranks: Ranks, level: str) -> None:
    for rank, lines in enumerate(ranks.run(compare, level)):
        assert not lines, f"rank {rank}: " + "\n".join(lines)


@on_ranks()
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_an_expert_that_got_no_token_anywhere_keeps_no_gradient(level: str) -> None:
    ddp, held = wrapped(config_of(level, overlap=True))
    state = ddp.state_dict()
    state["first.weight"] = torch.zeros(DIM, DIM)
    state["first.bias"] = torch.ones(DIM)  # every token goes to expert 1
    ddp.load_state_dict(state)
    ddp(*batches(1)[0][dist.get_rank()]).backward()
    ddp.finish_grad_sync()
    has_gradient = {name: p.grad is not None for name, p in ddp.module.named_parameters()}
    assert has_gradient.pop(f"experts.{held}") is (held == 1)
    assert all(has_gradient.values())


@on_ranks()
def test_experts_whose_names_differ_between_ranks_are_saved_under_them(tmp_path: Path) -> None:
    def values(ddp: fe.DistributedDataParallel, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for param in ddp.parameters():
            found += [full(param.detach()), full(optimizer.state[param]["exp_avg"])]
        return found

    def trained(seed: int) -> tuple[fe.DistributedDataParallel, Any]:
        ddp, _ = wrapped(config_of("optim"))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1 * seed)
        ddp(*batches(1)[0][dist.get_rank()]).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        return ddp, optimizer

    ddp, optimizer = trained(1)
    expected = [value.clone() for value in values(ddp, optimizer)]
    fe.save_checkpoint(tmp_path / "checkpoint", ddp.engine, optimizer)
    other, its_optimizer = trained(2)
    fe.load_checkpoint(tmp_path / "checkpoint", other.engine, its_optimizer)
    for mine, theirs in zip(values(other, its_optimizer), expected, strict=True):
        assert torch.equal(mine, theirs)


@on_ranks()
def test_an_expert_without_ranks_of_its_own_is_refused_by_name() -> None:
    model = build([0], dist.group.WORLD)
    with pytest.raises(ValueError, match=r"experts\.0: expected expert_mesh.*allreduce=False"):
        fe.DistributedDataParallel(model)


@on_ranks()
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_data_and_expert_ranks_are_told_apart_by_values(level: str) -> None:
    # Rank r's gradients are 2^r everywhere: a sum over other ranks than the right ones differs.
    ddp, held = wrapped(config_of(level))
    rank = dist.get_rank()
    assert isinstance(ddp.module, Mixture)
    ddp.module.fill = 2.0**rank
    ddp(*batches(1)[0][rank]).backward()
    ddp.finish_grad_sync()
    for name, param in ddp.module.named_parameters():
        assert param.grad is not None
        sharing = [held, held + 2] if "experts" in name else range(4)
        # The mean over all four ranks, of the gradients of those that share the parameter.
        expected = sum(2.0**other for other in sharing) / 4
        assert torch.equal(full(param.grad), torch.full(param.shape, expected)), name
