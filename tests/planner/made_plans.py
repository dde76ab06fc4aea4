"""A handmade plan of a 70B model on 1,024 ranks, some of whose rows do not fit, and small models
that are simulated in a short time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.planner import strategy_search
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.outcome import Outcome, Setting, Times, sorted_outcomes
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.strategies import ALL_STRATEGIES
from tests.composition.tensor_parallel import Model

SETTING = Setting(
    *("LlamaForCausalLM", 70_000_000_000, "8 x H100 SXM a node, 400 Gb/s a GPU", 1024, 8),
    *(67 * 2.0**30, "tokens", 4),
    machine_memory=80e9,
    machine_family="H100",
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


class Words(nn.Module):
    """An embedding, and blocks of one linear each."""

    def __init__(self, num_blocks: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(num_blocks)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


LENGTH = 16


def words(size: int = 4, sequence: int = LENGTH) -> Tensor:
    """A batch of :class:`Words`."""
    return torch.zeros(size, sequence, dtype=torch.long)


def quick_plan(*args: Any, fitting: float = math.inf, **options: Any) -> fe.StrategyPlan:
    """A quick plan, which stops once ``fitting`` candidates fit; by default it tries all."""
    with patch.object(strategy_search, "QUICK_FITTING", fitting):
        return fe.plan(*args, quick=True, **options)


def simulated_as(candidate: Candidate, build: Any, batch: Any, **options: Any) -> fe.Simulation:
    """A step of a candidate without a pipeline."""
    names = ("mesh", "strategy", "outer_strategy", "checkpointing", "offload")
    names += ("tensor_parallel", "context_parallel")
    given = {name: getattr(candidate, name) for name in names}
    num_ranks = candidate.data_parallel * candidate.tensor_parallel
    return fe.simulate(build, num_ranks, batch=batch, **given, **options)


def times_of(outcome: Outcome) -> Times:
    """The times of a simulated outcome."""
    assert outcome.times is not None
    return outcome.times


def assert_outcome_of(found: fe.Simulation, outcome: Outcome) -> None:
    """The outcome is that of the simulation."""
    times = times_of(outcome)
    assert times.step == pytest.approx(found.seconds, rel=1e-12)
    assert (outcome.memory, outcome.elsewhere) == (found.memory, found.elsewhere)
    assert outcome.sent == found.sent_bytes
    assert times.exposed_sum == pytest.approx(found.exposed_seconds)
    assert sum(times.shares().values()) == pytest.approx(1.0)


def assert_same_outcome(found: Outcome, expected: Outcome) -> None:
    """Outcomes are equal, except for rounding of times."""
    for name in ("candidate", "memory", "elsewhere", "items", "checkpoint_bytes"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.sent == pytest.approx(expected.sent)
    assert found.model_flops == pytest.approx(expected.model_flops)
    ours, theirs = times_of(found), times_of(expected)
    for name in ("step", "compute", "mfu"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9), name
    assert ours.shares() == pytest.approx(theirs.shares(), abs=1e-9)


def small_llama(layers: int) -> nn.Module:
    """A small Llama with this number of layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": layers}, use_cache=False)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def llama_batch(size: int = 4) -> dict[str, Tensor]:
    """Sequences of 32 tokens."""
    tokens = torch.zeros(size, 32, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


@cache
def rows(*, is_offloaded: bool = False) -> tuple[Outcome, ...]:
    """Outcomes of all pairs of levels, of growing memory and speed. ``is_offloaded`` adds one
    that is offloaded to the host."""
    found = []
    for number, pair in enumerate(ALL_STRATEGIES):
        candidate = Candidate((128, 8), pair.inner.name, pair.outer.name, number % 2 == 0)
        memory = dict.fromkeys(KINDS, (number + 1) * 2**31)
        times = Times(12.3456 - 0.5 * number, 5.0, {"inner": 1.5, "outer": 0.5}, at_peak=4.0)
        sent = {"inner": 2.0**38, "outer": 2.0**35}
        lacking = max(sum(memory.values()) - SETTING.memory, 0.0)
        work = {"model_flops": 4e15, "checkpoint_bytes": 840 * 10**9}
        found.append(Outcome(candidate, memory, sent, lacking, 10**7, times, **work))
    if is_offloaded:
        offload = fe.Offload(optimizer_state="host", main_weights="host", gradients="host")
        candidate = replace(
            found[0].candidate, offload=offload, checkpointing="offload", microbatch_size=16
        )
        found.append(replace(found[0], candidate=candidate, elsewhere={"host": 2**36}))
    return sorted_outcomes(found)


def made_plan(**changes: object) -> fe.StrategyPlan:
    """The plan of :func:`rows`; ``changes`` replace fields of its setting."""
    return fe.StrategyPlan(replace(SETTING, **changes), rows())  # type: ignore[arg-type]


TOKENS = torch.arange(8 * 32).view(8, 32) % 64


def loss_of_logits(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Losses of two steps of a model that returns a loss, or of a Llama."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        is_linears = isinstance(model, Model)
        loss = model(TOKENS % 16) if is_linears else loss_of_logits(model(TOKENS).logits, TOKENS)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def noting_dtensors() -> Iterator[list[bool]]:
    """Whether each model that is sharded in this context had DTensors before."""
    found: list[bool] = []
    original = fe.sharding.make_engine

    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> fe.Engine:
        found.append(any(isinstance(each, DTensor) for each in model.parameters()))
        return original(model, *args, **kwargs)

    with patch.object(sys.modules["fsdp_engine.sharding"], "make_engine", noting):
        yield found
