"""MXFP8 weights that are gathered as values through the gradients' memory: the same bytes, fewer
messages, no further memory. Refusals are in ``test_errors.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from tests.extensions.transformer_engine.te_training import (
    assert_all_same,
    make_batch,
    make_stack,
    scenario_of,
    watched,
)
from tests.messages import Messages
from tests.pool import on_ranks
from tests.scenario import Scenario
from tests.training import mesh_of, traced

Config = fe.DistributedDataParallelConfig
# Where gradients are unsharded.
PAIRS = [("no_shard", "no_shard"), ("optim", "no_shard"), ("optim", "optim")]


def scenario(pair: tuple[str, str], reuses: bool) -> Scenario:
    config = Config(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=reuses)
    # Nothing but quantised weights is to be gathered as fp8.
    options = {"config": config, "codec_rules": [fe.Float8(exclude=("**",))]}
    return scenario_of("mxfp8", pair=pair, mesh=mesh_of(2, 2), options=options)


def batch(micro: int) -> Tensor:
    (x,) = make_batch(4, 10 * micro + dist.get_rank())
    return x


def fp8_buffers(engine: Any) -> list[Any]:
    return [b for b in engine.buffers if b.kind.codec.startswith("transformer engine")]


def fp8_params(engine: Any) -> list[Any]:
    return [param for buffer in fp8_buffers(engine) for param in buffer.sharded_params]


@on_ranks(4)
def test_it_trains_bit_for_bit_as_two_gathers_do() -> None:
    for pair in PAIRS:
        assert_all_same([watched(scenario(pair, reuses))[0] for reuses in (False, True)])


@on_ranks(4)
def test_it_sends_one_message_of_values_and_none_of_amaxes() -> None:
    for pair in PAIRS[1:]:
        found = []
        for reuses in (False, True):
            model, engine = scenario(pair, reuses).sharded_model()
            messages = Messages()
            with messages.counting(), torch.no_grad():
                model(batch(0))
            axes = [engine.mesh.inner] + ([engine.mesh.outer] if pair[1] == "optim" else [])
            names = [axis.gather_group.group_name for axis in axes]
            found.append(
                (
                    sum(messages.sent[name] for name in names),
                    sum(messages.calls[name, "allreduce_"] for name in names),
                    sum(messages.calls[name, "send"] for name in names),
                )
            )
        (sent, amaxes, gathers), (sent_once, none, gathers_once) = found
        assert (amaxes, none) == (2 * len(axes), 0)  # a buffer in each of two blocks
        assert gathers - gathers_once == 2 * len(axes)
        # Two encodings are as many bytes as the values. The difference is the messages of amaxes,
        # with two bytes for each scale. An all-reduce over two ranks sends each byte once.
        scales = [state for b in fp8_buffers(engine) for state in b.weights.codec.state]
        assert sent - sent_once == len(axes) * sum(2 * state.numel() for state in scales)


@on_ranks(4)
def test_it_takes_no_memory_but_while_gradients_are_there_and_leaves_zeros() -> None:
    model, engine = scenario(("optim", "no_shard"), reuses=True).sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine.peak_memory_bytes(reset=True)  # ``shard`` makes views over allocated memory
    model(batch(0)).backward()
    assert "full" not in engine.peak_memory_bytes()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        model(batch(1))
    assert "full" not in engine.peak_memory_bytes()
    for param in fp8_params(engine):
        assert not param.grad.to_local().any()
    model(batch(1)).backward()
    optimizer.step()
    before = [param.grad.to_local().clone() for param in fp8_params(engine)]
    with torch.no_grad():
        model(batch(2))  # gradients of the step are there
    assert all(map(torch.equal, before, [p.grad.to_local() for p in fp8_params(engine)]))
    numel = max(buffer.layout.numel for buffer in fp8_buffers(engine))
    assert engine.peak_memory_bytes()["full"] >= 2 * numel
    assert "full" not in engine.memory_bytes()


@on_ranks(4)
def test_accumulated_gradients_are_no_scratch_when_weights_change_between_microbatches() -> None:
    gradients = []
    for reuses in (False, True):
        config = Config(
            use_distributed_optimizer=True,
            fp8_param_gather=True,
            reuse_grad_buf_for_mxfp8_param_ag=reuses,
        )
        ddp = fe.DistributedDataParallel(config=config, module=make_stack("mxfp8", num_blocks=1))
        ddp.zero_grad_buffer()
        for micro in range(2):
            ddp(batch(micro)).backward()
            for param in ddp.parameters():
                param.detach().mul_(1.01)
        ddp.finish_grad_sync()
        gradients.append([p.grad.to_local() for p in fp8_params(ddp.engine)])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("pair", PAIRS)
@on_ranks(4)
def test_going_through_scratch_makes_no_race(pair: tuple[str, str]) -> None:
    run = scenario(pair, reuses=True).but(steps=2)
    shard = {"mesh": run.mesh, "strategy": pair[0], "outer_strategy": pair[1], **run.options}
    traced(partial(make_stack, "mxfp8"), lambda m, e: run.train(m, e), **shard)
