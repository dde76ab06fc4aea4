"""Transformer Engine's weights in what else engines do: frozen under adapters, tied, at planned
addresses, in Megatron-Core's wrapper, after exceptions, and read or changed between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.codecs import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, QuantisedBlock, QuantisedStack
from tests.extensions.transformer_engine.te_training import (
    Watch,
    counting_encodes,
    make_batch,
    make_stack,
    quantised_layers,
    train_watched,
)
from tests.megatron.configs import config_of, train_wrapped
from tests.pool import on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough

CUT = "optim_grads_params"
LEVELS = ("no_shard", "optim", "optim_grads", CUT)
Config = fe.DistributedDataParallelConfig
both_kinds = pytest.mark.parametrize("recipe", ["block", "mxfp8"])


def assert_same(states: list[dict[str, Tensor]]) -> None:
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, value in states[0].items():
            assert torch.equal(value, other[name]), name


def assert_looked(watch: Watch, count: int) -> None:
    assert watch.looks == {"rows": count, "columns": count}


class AdaptedBlock(QuantisedBlock):
    """Its quantised layers are frozen; low-rank layers beside them learn."""

    def adapt(self) -> None:
        self.requires_grad_(False)
        dim = self.norm.weight.numel()
        self.narrow = nn.Linear(dim, 4, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(self.narrow(x))


@both_kinds
@on_ranks(2)
def test_frozen_weights_under_adapters_are_encoded_once_and_serve_backward(recipe: str) -> None:
    states, losses = [], []
    for level in LEVELS:
        model = make_stack(recipe)
        for block in model.blocks:
            block.__class__ = AdaptedBlock
            block.adapt()
        before = {
            name: layer.weight.get_high_precision_init_val().clone()
            for name, layer in quantised_layers(model).items()
        }
        engine = fe.shard(model, strategy=level)
        watch = Watch(model, engine)
        with counting_encodes(TransformerEngineCodec) as encodes:
            losses.append(train_watched(model, engine, watch, num_steps=3))
        assert encodes == [len(model.blocks)], level
        assert_looked(watch, 3 * 2 * len(watch.layers))
        states.append(engine.full_state_dict())
        for name, value in before.items():
            assert torch.equal(states[-1][name], value), name
    assert losses == [losses[0]] * len(losses)
    assert_same(states)


@both_kinds
@on_ranks(2)
def test_a_tied_weight_is_one(recipe: str) -> None:
    states, losses = [], []
    for level in LEVELS:
        model = make_stack(recipe, num_blocks=3)
        first, _, last = model.blocks
        last.up.weight = first.up.weight
        engine = fe.shard(model, strategy=level)
        watch = Watch(model, engine)
        losses.append(train_watched(model, engine, watch, num_steps=3))
        assert_looked(watch, 3 * 2 * 6)
        states.append(engine.full_state_dict())
        assert torch.equal(states[-1]["blocks.0.up.weight"], states[-1]["blocks.2.up.weight"])
    assert losses == [losses[0]] * len(losses)
    assert_same(states)


@both_kinds
@on_ranks(4)
def test_planned_addresses_change_nothing_and_hold_all_encodings(recipe: str) -> None:
    for pair in ((CUT, "optim"), ("optim", "optim")):
        states, losses = [], []
        for planned in (False, True):
            model = make_stack(recipe, num_blocks=4)
            config = Config(fsdp_double_buffer=planned)
            engine = fe.shard(model, mesh_of(2, 2), *pair, config=config)
            watch = Watch(model, engine)
            losses.append(train_watched(model, engine, watch, num_steps=3))
            assert_looked(watch, 3 * 2 * len(watch.layers))
            states.append(engine.full_state_dict())
            if planned:
                held = engine.memory_bytes()
                train_watched(model, engine, watch, num_steps=1)
                assert engine.memory_bytes() == held
        assert losses[0] == losses[1]
        assert_same(states)


@both_kinds
@on_ranks(2)
def test_the_wrapper_trains_as_the_engine_does_with_one_bucket_or_several(recipe: str) -> None:
    data = reference.make_data(make_batch, 3, 2, 2)
    for level in ("no_shard", "optim", CUT):
        model = make_stack(recipe)
        engine = fe.shard(model, strategy=level, config=Config(fp8_param_gather=True))
        expected = reference.train_sharded(model, engine, data)
        for overlap, bucket_size in ((False, None), (True, 4000)):
            model = make_stack(recipe)
            config = config_of(
                level,
                overlap=overlap,
                bucket_size=bucket_size,
                fp8_param_gather=True,
                grad_reduce_in_fp32=True,  # or the wrapper keeps gradients in bf16
            )
            ddp = fe.DistributedDataParallel(model, config, mesh_of(2))
            quantised = [
                buffer
                for buffer in ddp.engine.buffers
                if isinstance(buffer.weights.codec, TransformerEngineCodec)
            ]
            watch = Watch(model, ddp.engine)
            found = []
            make = reference.once(reference.sgd)
            for step in data:
                watch.expect()
                found += train_wrapped(ddp, [step], make)
            assert_looked(watch, 3 * 2 * len(watch.layers))
            # Gradients may be added in another order.
            lines = reference.differences(found, expected, 3e-2, first=2e-5)
            assert not lines, (level, overlap, lines[:6])
            if bucket_size is not None:
                assert len(quantised) > 1


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_the_wrapper_gives_all_ranks_the_first_one_s_weights_and_so_its_scales(recipe: str) -> None:
    for level in ("no_shard", "optim", CUT):
        model = make_stack(recipe, seed=1 + dist.get_rank())
        first = make_stack(recipe)
        config = config_of(level, fp8_param_gather=True)
        ddp = fe.DistributedDataParallel(model, config, mesh_of(2))
        watch = Watch(model, ddp.engine)
        for name, layer in quantised_layers(first).items():
            value = layer.weight.get_high_precision_init_val()
            assert torch.equal(ddp.engine.full_tensor(name), value.float())
        optimizer = reference.sgd(ddp.parameters())
        for step in range(3):
            watch.expect()
            ddp.zero_grad_buffer()
            ddp(*make_batch(2, 10 * step + dist.get_rank())).backward()
            ddp.finish_grad_sync()
            model.update_scales()  # the next bytes are made right after the step
            optimizer.step()
        for name, scale in watch.scales().items():
            first_one_s = scale.clone()
            dist.broadcast(first_one_s, 0)
            assert torch.equal(scale, first_one_s), (level, name)


class Fails(Exception):
    pass


@both_kinds
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_after_an_exception_and_a_reset_training_is_as_if_nothing_had_been(
    recipe: str, where: str
) -> None:
    def fail(*_: Any) -> None:
        raise Fails

    def fail_later(module: Any, args: Any, y: Tensor) -> None:
        y.register_hook(fail)

    for level in ("optim", CUT):
        states, losses = [], []
        for fails in (False, True):
            model = make_stack(recipe, num_blocks=3)
            engine = fe.shard(model, strategy=level)
            watch = Watch(model, engine)
            train_watched(model, engine, watch, num_steps=1)
            if fails:
                watch.expect()
                hook = fail if where == "forward" else fail_later
                handle = model.blocks[1].down.register_forward_hook(hook)
                with pytest.raises(Fails):
                    model(*make_batch(2, 3)).backward()
                handle.remove()
                engine.reset()
            losses.append(train_watched(model, engine, watch, num_steps=2))
            states.append(engine.full_state_dict())
        assert losses[0] == losses[1]
        assert_same(states)


@both_kinds
@on_ranks(2)
def test_edits_of_full_weights_are_encoded_and_parameters_stay_what_they_are(recipe: str) -> None:
    for level in LEVELS:
        model = make_stack(recipe)
        engine = fe.shard(model, strategy=level)
        watch = Watch(model, engine)
        own = dict(watch.weights)
        train_watched(model, engine, watch, num_steps=1)
        before = engine.full_state_dict()
        with engine.unsharded(), torch.no_grad():
            for name, layer in watch.layers.items():
                assert torch.equal(layer.weight, before[name])
                assert layer.weight.dtype == torch.float32
                layer.weight.mul_(1.7)
        after = engine.full_state_dict()
        for name in watch.layers:
            assert torch.equal(after[name], before[name] * 1.7)
        train_watched(model, engine, watch, num_steps=1)
        assert_looked(watch, 2 * 2 * len(watch.layers))
        assert all(watch.weights[name] is weight for name, weight in own.items())


@both_kinds
@on_ranks(2)
def test_looks_between_steps_change_nothing(recipe: str) -> None:
    def look(model: QuantisedStack, engine: fe.Engine, watch: Watch) -> None:
        state = engine.full_state_dict()
        assert state.keys() == model.state_dict().keys()
        for name in watch.layers:
            assert state[name].dtype == torch.float32
            assert torch.equal(engine.full_tensor(name), state[name])
        watch.expect(state)
        with torch.no_grad():
            model(*make_batch(2, 77))
        model.eval()
        model(*make_batch(2, 78))  # its backward never comes
        model.train()
        engine.start_param_sync()  # nothing has changed, but sharded units are prefetched

    for level in LEVELS:
        states, losses = [], []
        for looks in (False, True):
            model = make_stack(recipe)
            engine = fe.shard(model, strategy=level)
            watch = Watch(model, engine)
            found = []
            optimizer = reference.sgd(model.parameters())
            for step in range(3):
                if looks:
                    look(model, engine, watch)
                watch.expect()
                loss = model(*make_batch(2, 10 * step + dist.get_rank()))
                if looks:
                    with torch.no_grad():  # between forward and backward
                        model(*make_batch(2, 79))
                loss.backward()
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                if looks:
                    engine.start_param_sync(wait=step == 1)
            losses.append(found)
            states.append(engine.full_state_dict())
        assert losses[0] == losses[1], level
        assert_same(states)


@on_ranks(2)
def test_two_recipes_and_plain_weights_share_a_unit_in_buffers_of_their_own() -> None:
    states, losses = [], []
    for level in LEVELS:
        model = make_stack("mxfp8")
        other = make_stack("current", seed=3)
        for block, source in zip(model.blocks, other.blocks, strict=True):
            dim, hidden = block.up.weight.shape[1], block.up.weight.shape[0]
            torch.manual_seed(5)
            block.down = type(source.down)(hidden, dim, "current", bias=False)
        engine = fe.shard(model, strategy=level)
        kinds = {
            buffer.kind.codec.split()[2]
            for b in engine.units[1:]
            for buffer in b.buffers
            if buffer.kind.codec.startswith("transformer")
        }
        assert kinds == {"mxfp8", "current"}
        losses.append(train_watched(model, engine, None, num_steps=3))
        states.append(engine.full_state_dict())
    assert losses == [losses[0]] * len(losses)
    assert_same(states)
