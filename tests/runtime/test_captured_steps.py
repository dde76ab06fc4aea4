"""Work of the host while a step is captured into a graph, and after replays that it does not see.

There is no graph here: the question whether the current stream is captured is answered by the test.
``tests/gpu/test_captured_steps.py`` captures steps.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.messages import watched
from tests.pool import on_ranks
from tests.reference import full_weights


class TwoParts(nn.Module):
    """A model of which ``skips`` leaves out the second part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.skips else self.second(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.full((2, 3), rank + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_captured_step_sends_no_message_and_needs_each_gradient() -> None:
    for level in LEVELS:
        model, plain = TwoParts(), TwoParts()
        engine = fe.shard(model, strategy=level)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        rank = dist.get_rank()
        step(model, optimizers[0], rank)
        num_messages = []

        def note(group: Any, tensor: Tensor, options: Any) -> None:
            num_messages.append(tensor.dtype == torch.uint8)  # noqa: B023

        message = engine.reductions._message
        with (
            mock.patch.object(message, "_is_capturing", return_value=True),
            watched(lambda group, tensor: None, note),
        ):
            step(model, optimizers[0], rank)
        assert sum(num_messages) == 0, level
        with watched(lambda group, tensor: None, note):
            step(model, optimizers[0], rank)
        assert sum(num_messages) == 1, level
        for _ in range(3):
            for other in range(2):
                (plain(torch.full((2, 3), other + 1.0)).square().mean() / 2).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        torch.testing.assert_close(
            full_weights(model), {n: p.detach() for n, p in plain.named_parameters()}
        )
        model.skips = True
        match = r"captured into a graph: expected a gradient .* second\.\w+"
        with (
            mock.patch.object(message, "_is_capturing", return_value=True),
            pytest.raises(RuntimeError, match=match),
        ):
            step(model, optimizers[0], rank)
        engine.reset()


@on_ranks(2)
def test_forward_after_a_capture_sees_weights_that_a_replay_has_changed() -> None:
    for level in LEVELS:
        for has_graphs in (False, True):
            model = TwoParts()
            policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            engine = fe.shard(model, strategy=level, mp_policy=policy)
            x = torch.ones(2, 3)
            with torch.no_grad():
                before = model(x)
                for buffer in engine.buffers:
                    # A replay writes memory without a new version of the tensor.
                    buffer.weights.main.tensor.detach().numpy()[:] *= -2
                stream = engine.reductions.stream
                with mock.patch.object(stream, "_is_capturing", return_value=has_graphs):
                    during = model(x)
                after = model(x)
            assert torch.equal(during, after)
            is_seen = (
                has_graphs or level == "optim_grads_params"
            )  # level 3 sends main weights each time
            assert torch.equal(before, after) != is_seen, (level, has_graphs)


@on_ranks(2)
def test_a_capture_frees_units_that_are_full_before_it_writes_them() -> None:
    model = TwoParts()
    options = fe.Options(min_unit_size=0)
    engine = fe.shard(model, units=[nn.Linear], options=options)
    stream = engine.reductions.stream
    with torch.no_grad():
        expected = model(torch.ones(2, 3))
        engine.start_param_sync()
        held = engine.memory_bytes()["full"]
        assert held > 0
        freed = []
        free_all = engine.scheduler.schedule.free_all

        def note() -> None:
            free_all()
            freed.append("full" not in engine.memory_bytes())

        with (
            mock.patch.object(stream, "_is_capturing", return_value=True),
            mock.patch.object(engine.scheduler.schedule, "free_all", note),
        ):
            assert torch.equal(model(torch.ones(2, 3)), expected)
            assert torch.equal(model(torch.ones(2, 3)), expected)
        assert freed == [True]
