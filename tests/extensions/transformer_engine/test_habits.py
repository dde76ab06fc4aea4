"""Transformer Engine's weights in what else engines do: frozen under adapters, tied, at planned
addresses, in Megatron-Core's wrapper, after exceptions, and read or changed between steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine.te_on_cpu import (
    RECIPES,
    QuantisedBlock,
    QuantisedLinear,
    QuantisedStack,
)
from tests.extensions.transformer_engine.te_training import (
    CUT,
    LEVELS,
    Watch,
    assert_all_same,
    counting,
    make_batch,
    make_stack,
    preserved_values,
    same_at,
    scenario_of,
    watched,
)
from tests.megatron.configs import config_of, train_wrapped
from tests.pool import on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough

Config = fe.DistributedDataParallelConfig
both_kinds = pytest.mark.parametrize("recipe", ["block", "mxfp8"])


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
    def adapted() -> QuantisedStack:
        model = make_stack(recipe)
        for block in model.blocks:
            block.__class__ = AdaptedBlock
            block.adapt()
        return model

    with counting(TransformerEngineCodec, "encode") as encode:
        found = same_at(LEVELS, scenario_of(recipe, model=adapted))
    assert encode.call_count == len(LEVELS) * 2  # each block once
    for name, value in preserved_values(make_stack(recipe)).items():
        assert torch.equal(found[0][0].weights[name], value), name


@both_kinds
@on_ranks(2)
def test_a_tied_weight_is_one(recipe: str) -> None:
    def tied() -> QuantisedStack:
        model = make_stack(recipe, num_blocks=3)
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model

    for run, _ in same_at(LEVELS, scenario_of(recipe, model=tied)):
        state = run.engine.full_state_dict()
        assert torch.equal(state["blocks.0.up.weight"], state["blocks.2.up.weight"])


@both_kinds
@on_ranks(4)
def test_planned_addresses_change_nothing_and_hold_all_encodings(recipe: str) -> None:
    for pair in ((CUT, "optim"), ("optim", "optim")):
        scenario = scenario_of(recipe, num_blocks=4, pair=pair, mesh=mesh_of(2, 2))
        run, watch = watched(scenario.but(options={"config": Config(fsdp_double_buffer=True)}))
        assert_all_same([run, scenario.sharded()])
        held = watch.engine.memory_bytes()
        watch.train(scenario.but(steps=1))
        assert watch.engine.memory_bytes() == held


@both_kinds
@on_ranks(2)
def test_the_wrapper_trains_as_the_engine_does_with_one_bucket_or_several(recipe: str) -> None:
    for level in ("no_shard", "optim", CUT):
        config = Config(fp8_param_gather=True)
        scenario = scenario_of(recipe, pair=(level, "no_shard"), options={"config": config})
        expected = scenario.sharded()
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
            watch = Watch(model, ddp.engine)
            found = []
            make = reference.once(reference.sgd)
            for step in scenario.data():
                watch.expect()
                found += train_wrapped(ddp, [step], make)
                model.update_scales()
            count = 3 * 2 * len(watch.layers)
            assert watch.looks == {"rows": count, "columns": count}
            # Gradients may be added in another order.
            lines = reference.differences(found, expected.steps, 3e-2, first=2e-5)
            assert not lines, (level, overlap, lines[:6])
            if bucket_size is not None:
                codecs = [buffer.weights.codec for buffer in ddp.engine.buffers]
                assert sum(isinstance(each, TransformerEngineCodec) for each in codecs) > 1


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_the_wrapper_gives_all_ranks_the_first_one_s_weights_and_so_its_scales(recipe: str) -> None:
    for level in ("no_shard", "optim", CUT):
        model = make_stack(recipe, seed=1 + dist.get_rank())
        config = config_of(level, fp8_param_gather=True)
        ddp = fe.DistributedDataParallel(model, config, mesh_of(2))
        watch = Watch(model, ddp.engine)
        for name, value in preserved_values(make_stack(recipe)).items():
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
        scenario = scenario_of(recipe, num_blocks=3, pair=(level, "no_shard"), steps=1)
        runs = []
        for fails in (False, True):
            _, watch = watched(scenario)
            if fails:
                watch.expect()
                hook = fail if where == "forward" else fail_later
                handle = watch.model.blocks[1].down.register_forward_hook(hook)
                with pytest.raises(Fails):
                    watch.model(*make_batch(2, 3)).backward()
                handle.remove()
                watch.engine.reset()
            runs.append(watch.train(scenario.but(steps=2)))
        assert_all_same(runs)


@both_kinds
@on_ranks(2)
def test_edits_of_full_weights_are_encoded_and_parameters_stay_what_they_are(recipe: str) -> None:
    for level in LEVELS:
        scenario = scenario_of(recipe, pair=(level, "no_shard"), steps=1)
        run, watch = watched(scenario)
        own = dict(watch.weights)
        with watch.engine.unsharded(), torch.no_grad():
            for name, layer in watch.layers.items():
                assert torch.equal(layer.weight, run.weights[name])
                assert layer.weight.dtype == torch.float32
                layer.weight.mul_(1.7)
        after = watch.engine.full_state_dict()
        for name in watch.layers:
            assert torch.equal(after[name], run.weights[name] * 1.7)
        watch.train(scenario)
        assert all(watch.weights[name] is weight for name, weight in own.items())


@both_kinds
@on_ranks(2)
def test_looks_between_steps_change_nothing(recipe: str) -> None:
    def look(model: Any, step: int, watch: Watch) -> None:
        if step:
            watch.engine.start_param_sync(wait=step == 2)
        state = watch.engine.full_state_dict()
        assert state.keys() == model.state_dict().keys()
        for name in watch.layers:
            assert state[name].dtype == torch.float32
            assert torch.equal(watch.engine.full_tensor(name), state[name])
        watch.expect(state)
        with torch.no_grad():
            model(*make_batch(2, 77))
        model.eval()
        model(*make_batch(2, 78))  # its backward is never called
        model.train()
        watch.engine.start_param_sync()  # nothing has changed, but sharded units are prefetched

    def loss_of(model: nn.Module, batch: reference.Batch) -> Tensor:
        loss: Tensor = model(*batch)
        with torch.no_grad():  # between forward and backward
            model(*make_batch(2, 79))
        return loss

    for level in LEVELS:
        scenario = scenario_of(recipe, pair=(level, "no_shard"), microbatches=1)
        watch = Watch(*scenario.sharded_model())
        looking = scenario.but(
            before_step=lambda model, step, watch=watch: look(model, step, watch), loss_of=loss_of
        )
        assert_all_same([watch.train(looking, num_forwards=4), scenario.sharded()])


@on_ranks(2)
def test_two_recipes_and_plain_weights_share_a_unit_in_buffers_of_their_own() -> None:
    def mixed() -> QuantisedStack:
        model = make_stack("mxfp8")
        for block in model.blocks:
            hidden, dim = block.up.weight.shape
            block.down = QuantisedLinear(hidden, dim, "current", bias=False)
        return model

    for _, watch in same_at(LEVELS, scenario_of("mxfp8", model=mixed)):
        kinds = [
            buffer.kind.codec.split()[2]
            for unit in watch.engine.units[1:]
            for buffer in unit.buffers
            if buffer.kind.codec.startswith("transformer")
        ]
        assert set(kinds) == {"mxfp8", "current"}


@both_kinds
@on_ranks(2)
def test_weights_that_are_frozen_and_thawed_train_bit_by_bit_alike(recipe: str) -> None:
    name = "blocks.0.up.weight"

    def freeze(model: Any, step: int) -> None:
        model.blocks[0].requires_grad_(step != 1)

    for run, _ in same_at(("no_shard", "optim", CUT), scenario_of(recipe, before_step=freeze)):
        first, second, third = (step.weights[name] for step in run.steps)
        assert torch.equal(first, second)
        assert not torch.equal(second, third)


@both_kinds
@on_ranks(2)
def test_weights_that_change_while_they_are_full_are_encoded_and_gathered_again(
    recipe: str,
) -> None:
    for level, tied in itertools.product(("optim", CUT), (False, True)):
        scenario = scenario_of(recipe, num_blocks=3, pair=(level, "no_shard"), steps=1)
        model = scenario.made()
        if tied:  # the root has it, and stays full
            model.blocks[2].up.weight = model.blocks[0].up.weight
        watch = Watch(model, fe.shard(model, strategy=level))
        watch.train(scenario)
        for ahead in (False, True, True):
            if ahead:
                watch.engine.start_param_sync()
            else:
                watch.expect()
                model(*make_batch(2, dist.get_rank()))  # its backward is never called
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.3)
            watch.train(scenario)
