"""The host's work while a step is captured into a graph, and after replays, which run without it.

There is no graph here: the question whether the current stream is captured is answered by the test.
``tests/gpu/test_captured_steps.py`` captures steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.messages import watched
from tests.models import Skipping, vector_batch
from tests.pool import on_ranks
from tests.scenario import Scenario


@on_ranks(2)
def test_a_captured_step_sends_no_message_and_needs_each_gradient() -> None:
    for level in LEVELS:
        num_messages: list[int] = []

        @contextmanager
        def second_is_captured(engine: Any, found: list[int] = num_messages) -> Iterator[None]:
            found.append(0)

            def note(group: Any, tensor: Tensor, options: Any) -> None:
                found[-1] += tensor.dtype == torch.uint8

            captured = mock.patch.object(
                engine.reductions._message, "_is_capturing", return_value=len(found) == 2
            )
            with captured, watched(lambda group, tensor: None, note):
                yield

        run = Scenario(
            model=Skipping,
            batch=vector_batch,
            pair=(level, "no_shard"),
            steps=3,
            microbatches=1,
            around=second_is_captured,
        ).check()
        assert num_messages[1:] == [0, 1], level
        run.model.skip = True
        match = r"captured into a graph: expected a gradient .* blocks\.1\.\w+"
        with (
            mock.patch.object(run.engine.reductions._message, "_is_capturing", return_value=True),
            pytest.raises(RuntimeError, match=match),
        ):
            run.model(*vector_batch(2, 0)).backward()
        run.engine.reset()


@on_ranks(2)
def test_forward_after_a_capture_sees_weights_that_a_replay_has_changed() -> None:
    for level in LEVELS:
        for has_graphs in (False, True):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
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
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine = fe.shard(model, units=[nn.Linear])
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
