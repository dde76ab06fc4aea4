"""What real models do, and what training must make of it: the same as one plain process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import Transformer, token_batch, vector_batch
from tests.pool import on_ranks
from tests.reference import full_weights, relative_error
from tests.scenario import assert_trains_alike

pytestmark = pytest.mark.thorough

SHARDED_LEVELS = [name for name, level in LEVELS.items() if level.value]


def at_every_level(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int, int], reference.Batch] = vector_batch,
    **options: Any,
) -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        assert_trains_alike(make_model(), make_batch, strategy, **options)


def width_7(rows: int, seed: int) -> reference.Batch:
    return vector_batch(rows, seed, 7)


@on_ranks(2)
def test_scalar_empty_and_non_contiguous_parameters_train() -> None:
    at_every_level(models.odd_model, width_7)


@on_ranks(4)
def test_tensors_smaller_than_the_world_train() -> None:
    at_every_level(lambda: models.Chain(nn.Linear(1, 1), nn.Linear(1, 1)), width_1)


def width_1(rows: int, seed: int) -> reference.Batch:
    return vector_batch(rows, seed, 1)


@on_ranks(2)
def test_several_dtypes_in_one_unit_train() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.mixed_model()
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
        assert_trains_alike(model, vector_batch, strategy, compute_dtype=dtypes, later=1e-2)


@on_ranks(2)
def test_results_in_containers_train_and_keep_their_type() -> None:
    at_every_level(models.NestedModel)
    model = models.NestedModel()
    fe.shard(model)
    model(*vector_batch(2, 0)).backward()
    kinds = [dict, models.Output, tuple, models.Pair, models.Bag, defaultdict]
    assert model.types == kinds


@on_ranks(2)
def test_a_unit_that_is_called_twice_trains() -> None:
    at_every_level(models.CalledTwice)


@on_ranks(2)
def test_a_unit_that_is_never_called_gets_no_gradient() -> None:
    def skipping() -> nn.Module:
        model = models.Skipping()
        model.skip = True
        return model

    at_every_level(skipping)


@on_ranks(2)
def test_a_unit_that_is_called_in_some_steps_only_trains() -> None:
    def before_step(model: nn.Module, step: int) -> None:
        model.skip = step % 2 == 1  # type: ignore[assignment]

    at_every_level(models.Skipping, num_steps=4, before_step=before_step)


@on_ranks(2)
def test_units_that_run_in_another_order_in_every_step_train() -> None:
    class Shuffled(models.Chain):
        turn = 0

        def predict(self, x: Tensor) -> Tensor:
            order = [(0, 1, 2), (2, 0, 1), (1, 1, 0)][self.turn]
            for index in order:
                x = self.blocks[index](x)
            return x

    def before_step(model: nn.Module, step: int) -> None:
        model.turn = step % 3  # type: ignore[assignment]

    at_every_level(
        lambda: Shuffled(models.Mlp(), models.Mlp(), models.Mlp()),
        num_steps=4,
        before_step=before_step,
    )


@on_ranks(2)
def test_a_parameter_that_nothing_reads_has_no_gradient() -> None:
    at_every_level(models.unused_model)


@on_ranks(2)
def test_a_weight_shared_by_two_units_trains() -> None:
    at_every_level(models.shared_model)
    model = models.shared_model()
    fe.shard(model)
    first, last = model.blocks[0], model.blocks[2]  # type: ignore[index]
    assert first.up.weight is last.up.weight


@on_ranks(2)
def test_a_module_shared_by_two_units_trains() -> None:
    for units in ("blocks.*", [models.WithShared], [models.WithShared, models.Mlp], None):
        at_every_level(models.shared_module_model, units=units)
    at_every_level(models.shared_module_model, min_unit_size=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@on_ranks(2)
def test_a_transformer_trains(tied: bool) -> None:
    at_every_level(
        lambda: Transformer(num_blocks=3, tied=tied),
        token_batch,
        make_optimizer=reference.adamw,
    )


@on_ranks(2)
def test_frozen_first_blocks_stay_as_they_are_and_the_rest_trains() -> None:
    at_every_level(models.frozen_first_model)


@on_ranks(2)
def test_adapters_on_frozen_weights_train() -> None:
    # Without prefetch a unit that is released too early really loses its memory.
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)
    at_every_level(models.lora_model)
    at_every_level(models.lora_model, config=config)


@on_ranks(2)
def test_a_memory_that_every_layer_reads_gets_its_gradient() -> None:
    at_every_level(models.EncoderDecoder)


@on_ranks(2)
def test_units_inside_units_train() -> None:
    at_every_level(models.NestedUnits)


@on_ranks(2)
def test_a_units_result_may_be_changed_in_place() -> None:
    at_every_level(models.InPlace)


@on_ranks(2)
def test_a_unit_may_return_its_input() -> None:
    def before_step(model: nn.Module, step: int) -> None:
        model.blocks[1].active = step % 2 == 0  # type: ignore[index, union-attr]

    at_every_level(
        lambda: models.Chain(models.Mlp(), models.MaybeIdentity(), models.Mlp()),
        num_steps=3,
        before_step=before_step,
    )


@on_ranks(2)
def test_results_that_nobody_uses_do_no_harm() -> None:
    at_every_level(models.UnusedOutput)


@on_ranks(2)
def test_a_recurrent_unit_trains() -> None:
    at_every_level(lambda: models.Chain(models.Recurrent(), models.Recurrent()))


@on_ranks(2)
def test_buffers_stay_with_their_modules() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.Chain(models.Normalised(), models.Normalised())
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        assert [name for name, _ in model.named_buffers()] == [
            name for name, _ in alone.named_buffers()
        ]
        x, y = vector_batch(4, seed=1)
        # The same data everywhere: batch statistics are those of one process.
        torch.testing.assert_close(model(x, y), alone(x, y))
        for (name, found), (_, expected) in zip(
            model.named_buffers(), alone.named_buffers(), strict=True
        ):
            torch.testing.assert_close(found, expected, msg=name)


UNITS: dict[str, Any] = {
    "default": None,
    "classes": (models.Block, nn.Embedding),
    "one_class": models.Block,
    "patterns": ["blocks.*", "embedding"],
    "predicate": lambda name, module: isinstance(module, nn.Linear),
    "nothing_but_the_root": (),
}


@pytest.mark.parametrize("kind", UNITS)
@on_ranks(2)
def test_any_choice_of_units_trains_alike(kind: str) -> None:
    assert_trains_alike(Transformer(tied=True), token_batch, units=UNITS[kind])


@on_ranks(2)
def test_forwards_without_gradient_may_come_between() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer()
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        optimizer, alone_optimizer = None, None
        data = reference.make_data(token_batch, 3, 1, dist.get_world_size())
        optimizer = reference.once(reference.adamw)
        alone_optimizer = reference.once(reference.adamw)
        tokens, targets = token_batch(3, seed=5)
        for number, step in enumerate(data):
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    found, expected = model(tokens, targets), alone(tokens, targets)
                torch.testing.assert_close(found, expected, msg=f"{strategy}, step {number}")
            found_step = reference.train_sharded(model, engine, [step], optimizer)
            expected_step = reference.train(alone, [step], alone_optimizer)
            assert not reference.differences(found_step, expected_step, 2e-5)


@on_ranks(2)
def test_an_evaluation_between_forward_and_backward_does_no_harm() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        tokens, targets = token_batch(2, seed=3)
        alone(tokens, targets).backward()
        loss = model(tokens, targets)
        with torch.no_grad():
            model(tokens)
        loss.backward()
        assert_same_gradients(model, alone, strategy)


def assert_same_gradients(model: nn.Module, alone: nn.Module, label: str) -> None:
    """Gradients of ``model`` on all ranks are those of ``alone``."""
    expected = {name: p.grad for name, p in alone.named_parameters()}
    found = reference.full_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        other = expected[name]
        assert (gradient is None) == (other is None), f"{label}: {name}"
        if gradient is not None and other is not None:
            error = relative_error(gradient, other)
            assert error < 2e-5, f"{label}: {name} is off by {error:.1e}"


@on_ranks(2)
def test_a_registered_method_generates_as_the_plain_model_does() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer()
        tokens, targets = token_batch(2, seed=3)
        expected = model.generate(tokens, 4)
        fe.shard(model, strategy=strategy)
        fe.register_forward_method(model, "generate")
        assert torch.equal(model.generate(tokens, 4), expected)
        model(tokens, targets).backward()
        assert torch.equal(model.generate(tokens, 4), expected)


@on_ranks(2)
def test_a_registered_method_trains() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        fe.register_forward_method(model, "logits")
        tokens, _ = token_batch(2, seed=3)
        model.logits(tokens).square().mean().backward()
        alone.logits(tokens).square().mean().backward()
        assert_same_gradients(model, alone, strategy)


class Checkpointed(models.Regression):
    """Activation checkpointing of each unit, inside each unit, or over two units at once."""

    def __init__(self, where: str, use_reentrant: bool) -> None:
        super().__init__()
        self.where = where
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList([CheckpointedInside(self) for _ in range(4)])

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "two units":
            for index in (0, 2):
                x = self.again(lambda x, i=index: self.blocks[i + 1](self.blocks[i](x)), x)
            return x
        for block in self.blocks:
            x = self.again(block, x) if self.where == "unit" else block(x)
        return x


class CheckpointedInside(nn.Module):
    """A block of which the inner part may be recomputed."""

    def __init__(self, model: Checkpointed) -> None:
        super().__init__()
        self.model = [model]  # in a list: not a submodule
        self.inside = models.Mlp()
        self.outside = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        model = self.model[0]
        x = model.again(self.inside, x) if model.where == "inside" else self.inside(x)
        return self.outside(torch.tanh(x))


@pytest.mark.parametrize("where", ["unit", "inside", "two units"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@on_ranks(2)
def test_activation_checkpointing_trains_alike(where: str, use_reentrant: bool) -> None:
    at_every_level(lambda: Checkpointed(where, use_reentrant))


@on_ranks(2)
def test_checkpointed_adapters_on_frozen_weights_train() -> None:
    class Model(models.Chain):
        def predict(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    at_every_level(lambda: Model(*models.lora_model().blocks))  # type: ignore[arg-type]


@on_ranks(2, timeout=180)
def test_units_compiled_before_sharding_train() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        engine = fe.shard(model, strategy=strategy)
        data = reference.make_data(token_batch, 2, 2, dist.get_world_size())
        found = reference.train_sharded(model, engine, data)
        lines = reference.differences(found, reference.train(alone, data), 2e-5)
        assert not lines, f"{strategy}: {lines}"


@on_ranks(2, timeout=280)
def test_units_compiled_by_the_default_compiler_train() -> None:
    model = models.Chain(models.Mlp(), models.Mlp())
    alone = copy.deepcopy(model)
    for block in model.blocks:
        block.compile()
    engine = fe.shard(model)
    data = reference.make_data(vector_batch, 2, 1, dist.get_world_size())
    found = reference.train_sharded(model, engine, data)
    lines = reference.differences(found, reference.train(alone, data), 2e-5)
    assert not lines, lines


@on_ranks(2)
def test_a_model_copied_before_sharding_is_a_model_of_its_own() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        original = Transformer()
        before = reference.full_weights(original)
        model, average = copy.deepcopy(original), copy.deepcopy(original)
        engine = fe.shard(model, strategy=strategy)
        fe.shard(average, strategy=strategy)
        data = reference.make_data(token_batch, 2, 1, dist.get_world_size())
        reference.train_sharded(model, engine, data)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.25)
        new, averaged = full_weights(model), full_weights(average)
        for name, weight in original.named_parameters():
            assert torch.equal(weight, before[name]), name
            assert not torch.equal(weight, new[name]), name
            expected = before[name].lerp(new[name], 0.25)
            torch.testing.assert_close(averaged[name], expected, msg=name)


@on_ranks(2)
def test_a_sharded_model_keeps_its_classes_names_and_modules() -> None:
    for strategy in LEVELS:
        model = Transformer(tied=True)
        names = [name for name, _ in model.named_parameters()]
        shapes = [parameter.shape for parameter in model.parameters()]
        modules = dict(model.named_modules())
        classes = {name: type(module) for name, module in modules.items()}
        keys = list(model.state_dict())
        fe.shard(model, strategy=strategy)
        assert [name for name, _ in model.named_parameters()] == names
        assert [parameter.shape for parameter in model.parameters()] == shapes
        assert list(model.state_dict()) == keys
        for name, module in model.named_modules():
            assert module is modules[name]
            assert type(module) is classes[name]
        assert isinstance(model.head.weight, fe.FlatDTensor) == (strategy in SHARDED_LEVELS)


@on_ranks(2)
def test_a_model_on_the_meta_device_is_materialised_alike_on_every_rank() -> None:
    for strategy in LEVELS:
        torch.manual_seed(100 + dist.get_rank())
        with torch.device("meta"):
            model = Transformer(num_blocks=2)
        engine = fe.shard(model, strategy=strategy)
        weights = engine.full_state_dict()
        assert not any(weight.is_meta for weight in weights.values())
        assert torch.equal(weights["norm.weight"], torch.ones(models.DIM))
        assert torch.equal(weights["blocks.1.norm2.bias"], torch.zeros(models.DIM))
        deviation = weights["embedding.weight"].std().item()
        assert 0.8 < deviation < 1.2, "nn.Embedding starts from N(0, 1)"
        for name, weight in weights.items():
            others = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
            dist.all_gather(others, weight.contiguous())
            assert all(torch.equal(other, weight) for other in others), name
        alone = Transformer(num_blocks=2)
        alone.load_state_dict(weights)
        data = reference.make_data(token_batch, 2, 1, dist.get_world_size())
        found = reference.train_sharded(model, engine, data)
        assert not reference.differences(found, reference.train(alone, data), 2e-5)


@on_ranks(2)
def test_a_tied_head_on_the_meta_device_stays_tied() -> None:
    with torch.device("meta"):
        model = Transformer(num_blocks=1, tied=True)
    engine = fe.shard(model)
    assert model.head.weight is model.embedding.weight
    assert engine.full_tensor("embedding.weight").abs().sum() > 0


class Fragile(models.Chain):
    """Raises in the forward or in the backward of its middle block, when told to."""

    fails_in = ""

    def predict(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fails_in == "forward":
                raise ArithmeticError("planted in forward")
            if index == 1 and self.fails_in == "backward":
                x = FailingBackward.apply(x)
        return x


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("planted in backward")


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@on_ranks(2)
def test_after_an_exception_reset_returns_to_rest_with_the_weights_intact(fails_in: str) -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Fragile(*(models.Mlp() for _ in range(4)))
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        data = reference.make_data(vector_batch, 3, 2, dist.get_world_size())
        optimizer = reference.once(reference.adamw)
        alone_optimizer = reference.once(reference.adamw)
        for step in data:
            before = full_weights(model)
            model.fails_in = fails_in
            with pytest.raises(ArithmeticError, match="planted"):
                model(*vector_batch(2, seed=1)).backward()
            model.fails_in = ""
            engine.reset()
            after = full_weights(model)
            assert all(torch.equal(after[name], before[name]) for name in before)
            assert all(parameter.grad is None for parameter in model.parameters())
            found = reference.train_sharded(model, engine, [step], optimizer)
            expected = reference.train(alone, [step], alone_optimizer)
            lines = reference.differences(found, expected, 2e-5)
            assert not lines, f"{strategy}: {lines}"


@on_ranks(2)
def test_reset_at_rest_changes_nothing() -> None:
    model = Transformer()
    alone = copy.deepcopy(model)
    engine = fe.shard(model)
    engine.reset()
    engine.reset()
    data = reference.make_data(token_batch, 2, 1, dist.get_world_size())
    found = reference.train_sharded(model, engine, data)
    assert not reference.differences(found, reference.train(alone, data), 2e-5)


@on_ranks(2)
def test_autocast_over_fp32_weights_trains() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer()
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        tokens, targets = token_batch(2, seed=3)
        for each in (model, alone):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(tokens, targets)
            loss.backward()
        assert_same_gradients(model, alone, strategy)


@on_ranks(2)
def test_two_models_train_side_by_side() -> None:
    generator, critic = models.Chain(models.Mlp(), models.Mlp()), models.Chain(models.Mlp())
    alone_generator, alone_critic = copy.deepcopy(generator), copy.deepcopy(critic)
    fe.shard(generator)
    fe.shard(critic, strategy="optim")
    fe.register_forward_method(generator, "predict")
    x, y = vector_batch(3, seed=4)
    critic(generator.predict(x), y).backward()
    alone_critic(alone_generator.predict(x), y).backward()
    assert_same_gradients(generator, alone_generator, "generator")
    assert_same_gradients(critic, alone_critic, "critic")


@on_ranks(2)
def test_an_engine_and_its_threads_go_away_with_the_model() -> None:
    def train_one() -> weakref.ref[fe.Engine]:
        model = Transformer(num_blocks=1)
        engine = fe.shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(*token_batch(2, 1)).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        return weakref.ref(engine)

    for _ in range(2):
        engine = train_one()
        gc.collect()
        assert engine() is None


@on_ranks(2)
def test_an_engine_that_nobody_holds_serves_its_model() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=strategy)
        gc.collect()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        tokens, targets = token_batch(2, seed=3)
        for _ in range(2):
            for each, its_optimizer in ((model, optimizer), (alone, alone_optimizer)):
                each(tokens, targets).backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
            gc.collect()
        torch.testing.assert_close(model(tokens), alone(tokens), msg=strategy)
