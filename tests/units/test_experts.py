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

import fsdp_engine as fe
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.pool import Ranks, on_ranks
from tests.reference import full, relative_error
from tests.units.experts import DIM, Mixture, batches, build


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
            level, overlap=overlap, average_in_collective=average, gradient_reduce_div_fusion=fused
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
