"""MXFP8 weights that travel as values through the gradients' memory: same bytes, fewer messages, no
memory beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from tests.extensions.transformer_engine import te_on_cpu as te
from tests.megatron.configs import Config
from tests.messages import Messages
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of, traced

# Where gradients are whole.
PAIRS = [("no_shard", "no_shard"), ("optim", "no_shard"), ("optim", "optim")]
FEATURES = 7


def config_of(reuses: bool) -> Config:
    return Config(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=reuses)


def batch(step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(4, FEATURES, generator=generator)


def make_stack(inner: str, outer: str, reuses: bool) -> tuple[te.QuantisedStack, Any]:
    torch.manual_seed(0)
    model = te.QuantisedStack("mxfp8", num_blocks=2)
    # Nothing but quantised weights is to be gathered as fp8.
    rules = [fe.Float8(exclude=("**",))]
    engine = fe.shard(
        model, mesh_of(2, 2), inner, outer, config=config_of(reuses), codec_rules=rules
    )
    return model, engine


def bytes_in_use(model: te.QuantisedStack) -> list[Tensor]:
    found = []
    for layer in (each for block in model.blocks for each in (block.up, block.down)):
        layer.register_forward_pre_hook(
            lambda module, args: found.extend(
                t.clone()
                for t in (
                    module.weight._rowwise_data,
                    module.weight._columnwise_data,
                    module.weight._rowwise_scale_inv,
                    module.weight._columnwise_scale_inv,
                )
            )
        )
    return found


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
@on_ranks(4)
def test_it_trains_bit_for_bit_as_two_gathers_do(inner: str, outer: str) -> None:
    results = []
    for reuses in (False, True):
        model, engine = make_stack(inner, outer, reuses)
        found = bytes_in_use(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            with engine.no_sync():
                model(batch(step)).backward()
            loss = model(batch(step, 1))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    losses.append(model(batch(9)))  # while gradients are there
                    found.extend(p.grad.to_local().clone() for p in fp8_params(engine))
            optimizer.zero_grad(set_to_none=step != 0)
        results.append([*losses, *found, *engine.full_state_dict().values()])
    for one, other in zip(*results, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)


def fp8_buffers(engine: Any) -> list[Any]:
    return [b for b in engine.buffers if b.kind.codec.startswith("transformer engine")]


def fp8_params(engine: Any) -> list[Any]:
    return [param for buffer in fp8_buffers(engine) for param in buffer.sharded_params]


@on_ranks(4)
def test_it_sends_one_message_of_values_and_none_of_amaxes() -> None:
    for inner, outer in PAIRS[1:]:
        sent, amaxes_sent, gathers = {}, {}, {}
        for reuses in (False, True):
            model, engine = make_stack(inner, outer, reuses)
            messages = Messages()
            with messages.counting(), torch.no_grad():
                model(batch(0))
            axes = [engine.mesh.inner] + ([engine.mesh.outer] if outer == "optim" else [])
            names = [axis.gather_group.group_name for axis in axes]
            sent[reuses] = sum(messages.sent[name] for name in names)
            amaxes_sent[reuses] = sum(messages.calls[name, "allreduce_"] for name in names)
            gathers[reuses] = sum(messages.calls[name, "send"] for name in names)
        assert amaxes_sent == {False: 2 * len(axes), True: 0}  # a buffer in each of two blocks
        assert gathers[False] - gathers[True] == 2 * len(axes)
        # Two encodings are as many bytes as the values. What differs is the messages of amaxes, of
        # two bytes for each scale: of two ranks, each sends half of them twice.
        scales = [state for b in fp8_buffers(engine) for state in b.weights.codec.state]
        amaxes = len(axes) * sum(2 * state.numel() for state in scales)
        assert sent[False] - sent[True] == amaxes


@on_ranks(4)
def test_it_takes_no_memory_but_while_gradients_are_there_and_leaves_zeros() -> None:
    model, engine = make_stack("optim", "no_shard", reuses=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine.peak_memory_bytes(reset=True)  # views are made over memory that is there
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
    with torch.no_grad():
        model(batch(2))  # gradients of the step are there
    numel = max(buffer.layout.numel for buffer in fp8_buffers(engine))
    assert engine.peak_memory_bytes()["full"] >= 2 * numel
    assert "full" not in engine.memory_bytes()


@on_ranks(4)
def test_accumulated_gradients_are_no_scratch_when_weights_change_between_microbatches() -> None:
    gradients = []
    for reuses in (False, True):
        torch.manual_seed(0)
        ddp = fe.DistributedDataParallel(
            config=Config(
                use_distributed_optimizer=True,
                fp8_param_gather=True,
                reuse_grad_buf_for_mxfp8_param_ag=reuses,
            ),
            module=te.QuantisedStack("mxfp8", num_blocks=1),
        )
        ddp.zero_grad_buffer()
        for micro in range(2):
            ddp(batch(0, micro)).backward()
            for param in ddp.parameters():
                param.detach().mul_(1.01)
        ddp.finish_grad_sync()
        gradients.append([p.grad.to_local() for p in fp8_params(ddp.engine)])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@on_ranks(4)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_going_through_scratch_makes_no_race(inner: str, outer: str) -> None:
    def body(model: Any, engine: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch(step)).backward()
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    model(batch(9))
            optimizer.zero_grad(set_to_none=step != 0)

    traced(
        lambda: te.QuantisedStack("mxfp8", num_blocks=2),
        body,
        mesh=mesh_of(2, 2),
        strategy=inner,
        outer_strategy=outer,
        config=config_of(True),
    )


@pytest.mark.parametrize("inner", ["optim_grads", "optim_grads_params"])
def test_levels_that_cut_gradients_are_refused(ranks: Ranks, inner: str) -> None:
    ranks.run(refused, inner, world_size=2)


def refused(inner: str) -> None:
    model = te.QuantisedStack("mxfp8", num_blocks=1)
    with pytest.raises(ValueError, match=r"reuse_grad_buf_for_mxfp8_param_ag: expected whole grad"):
        fe.shard(model, strategy=inner, config=config_of(True))
    fe.shard(model, strategy=inner, config=config_of(False))  # nothing was changed


def test_other_recipes_are_refused(ranks: Ranks) -> None:
    ranks.run(refused_recipe, world_size=2)


def refused_recipe() -> None:
    model = te.QuantisedStack("block", num_blocks=1)
    with pytest.raises(ValueError, match="quantised by the MXFP8 recipe; found none"):
        fe.shard(model, strategy="optim", config=config_of(True))
