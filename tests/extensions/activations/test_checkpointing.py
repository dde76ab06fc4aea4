"""``checkpoint_units`` and ``fe.shard(checkpointing=)`` wrap the right modules, and change nothing
but memory."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.extensions.activations.checkpointed import BLOCKS, WIDTH, Dropping, made, scenario_at
from tests.models import VOCABULARY, Block, Transformer, token_batch, vector_batch
from tests.planner.simulation.live_storages import LiveStorages
from tests.pool import on_ranks
from tests.scenario import Scenario, assert_same_bits

ALL_BLOCKS = tuple(f"blocks.{number}" for number in range(BLOCKS))
EVERY_SECOND = fe.Recompute(every=2)


def test_blocks_are_checkpointed_and_nothing_else_changes() -> None:
    model = made()
    names = [name for name, _ in model.named_modules()]
    for _ in range(2):  # a second call changes nothing
        assert fe.checkpoint_units(model) == ALL_BLOCKS
    assert [name for name, _ in model.named_modules()] == names
    assert type(model.blocks[0]) is Dropping
    assert str(inspect.signature(model.blocks[0].forward)).startswith("(x: ")
    batch = token_batch(2, 0)
    model(*batch).backward()
    assert [block.runs for block in model.blocks] == [2] * BLOCKS
    with torch.no_grad():
        model(*batch)
    assert [block.runs for block in model.blocks] == [3] * BLOCKS


@pytest.mark.parametrize(
    ("units", "names"),
    [
        (["blocks.0"], ("blocks.0",)),
        ([nn.Embedding, Dropping], ALL_BLOCKS),
        # blocks.1 contains blocks.1.inner, which is a Block, too.
        ([Block, "blocks.1"], ("blocks.0.inner", "blocks.1", "blocks.2.inner", "blocks.3.inner")),
        ([("blocks.0", "head")], ("blocks.0", "head")),
    ],
)
def test_units_are_named_as_for_shard(units: Any, names: tuple[str, ...]) -> None:
    model = made()
    assert fe.checkpoint_units(model, units) == names
    model(*token_batch(2, 0)).backward()


def test_every_kth_block_is_recomputed() -> None:
    for every, expected in ((1, [2, 2, 2, 2]), (2, [1, 2, 1, 2]), (3, [1, 1, 2, 1])):
        model = made()
        names = fe.checkpoint_units(model, None, fe.Recompute(every=every))
        assert names == ALL_BLOCKS[every - 1 :: every]
        model(*token_batch(2, 0)).backward()
        assert [block.runs for block in model.blocks] == expected


def test_what_cannot_be_checkpointed() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module; found int"):
        fe.checkpoint_units(3)
    with pytest.raises(ValueError, match=r"units: expected pattern 'layers\.\*' to match a module"):
        fe.checkpoint_units(made(), "layers.*")
    assert fe.checkpoint_units(nn.Linear(2, 2)) == ()
    for given in ("select", False, "offload", 2):
        with pytest.raises(ValueError, match=r"checkpointing: expected True, 'selective' or fe\.R"):
            fe.checkpoint_units(made(), None, given)


def test_a_forward_of_the_instance_s_own_is_run() -> None:
    model = made()
    block = model.blocks[0]
    block.forward = lambda x, **_: 2 * x
    fe.checkpoint_units(model)
    x = torch.ones(1, 2, WIDTH, requires_grad=True)
    assert torch.equal(block(x), 2 * x)


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_recomputes_with_its_own_weights(copied: Callable[[nn.Module], Any]) -> None:
    model, alone = made(), made()
    fe.checkpoint_units(model)
    other = copied(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for each in (other, alone):
        torch.manual_seed(2)
        each(*token_batch(2, 0)).backward()
    for param, expected in zip(other.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)
    assert other.blocks[0].runs == 2
    assert model.blocks[0].runs == 0


WAYS: dict[str, Any] = {
    "checkpoint_units before": False,
    "checkpoint_units after": False,
    "selective": "selective",
    "every second": EVERY_SECOND,
    "every second, selective": fe.Recompute("selective", 2),
}


@pytest.mark.parametrize("units", [None, [Block, Dropping, nn.Embedding]], ids=["blocks", "nested"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_training_is_the_same_to_the_last_bit(way: str, level: str, units: Any) -> None:
    scenario = scenario_at(level, units=units)
    model = scenario.made()
    if way == "checkpoint_units before":
        fe.checkpoint_units(model, units)
    options = {**scenario.options, "checkpointing": WAYS[way]}
    engine = fe.shard(model, strategy=level, **options)
    if way == "checkpoint_units after":
        fe.checkpoint_units(model, units)
    assert_same_bits(scenario.train(model, engine), scenario.sharded())
    num_runs = 2 * 2 * BLOCKS
    again = num_runs // 2 if way.startswith("every second") else num_runs
    assert sum(block.runs for block in model.blocks) == num_runs + again


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_training_proceeds_after_exceptions(level: str) -> None:
    def raising(*_: Any) -> None:
        raise KeyError("on purpose")

    def fail(model: Any, step: int) -> None:
        """A block raises in a forward; then, after a complete forward, in the recomputation."""
        for is_late in (False, True) if step == 1 else ():
            loss = model(*token_batch(2, 0)) if is_late else None
            hook = model.blocks[2].inner.register_forward_hook(raising)
            with pytest.raises(KeyError, match="on purpose"):
                loss.backward() if is_late else model(*token_batch(2, 0))
            hook.remove()
            engine.reset()
        torch.manual_seed(step)

    scenario = scenario_at(level)
    model, engine = scenario.but(options={"checkpointing": "selective"}).sharded_model()
    assert_same_bits(scenario.but(before_step=fail).train(model, engine), scenario.sharded())


@pytest.mark.parametrize(
    "level", [pytest.param("no_shard", marks=pytest.mark.thorough), "optim_grads_params"]
)
@on_ranks(2)
def test_memory_is_between_that_of_all_and_of_nothing(level: str) -> None:
    peaks = []
    for checkpointing in (True, "selective", EVERY_SECOND, False):
        with LiveStorages() as watch:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(Block(32), nn.Tanh()) for _ in range(6)))
            fe.shard(model, strategy=level, min_unit_size=0, checkpointing=checkpointing)
            x = torch.zeros(4, 64, 32)
            for _ in range(2):
                watch.restart()
                model(x).sum().backward()
            peaks.append(watch.peak)
        del model
    of_all, selective, every_second, of_nothing = peaks
    assert of_all < 0.5 * of_nothing
    assert of_all < 0.8 * selective < 0.7 * of_nothing
    assert of_all < 0.8 * every_second < 0.7 * of_nothing


def test_a_recomputation_gathers_nothing() -> None:
    def gathers(checkpointing: Any) -> int:
        found = fe.simulate(
            lambda: Transformer(3),
            8,
            batch=token_batch(4, 0),
            strategy="optim_grads_params",
            min_unit_size=0,
            checkpointing=checkpointing,
        )
        return sum(span.lane == "inner gather" for span in found.spans)

    (count,) = {gathers(how) for how in (True, "selective", EVERY_SECOND, False)}
    assert count > 0


class Skipping(nn.Module):
    """Blocks that put tensors into a list, and others that take them out, as those of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Pushing(WIDTH), Pushing(WIDTH)])
        self.up = nn.ModuleList([Popping(WIDTH), Popping(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in (*self.down, *self.up):
            x = block(x, skips=skips) if block is self.up[1] else block(x, skips)
        assert not skips
        return x.square().mean()


class Pushing(Block):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = super().forward(x)
        skips.append(y * 2)
        return y


class Popping(Pushing):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return Block.forward(self, x + skips.pop())


class Nested(Skipping):
    """As above; the list is within a tuple, or within a dict in a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in (*self.down, *self.up):
            x = block(x, skips=({"skips": skips},)) if block is self.up[1] else block(x, (skips,))
        return x.square().mean()

    def __init__(self) -> None:
        super().__init__()
        for block in (*self.down, *self.up):
            block.forward = partial(with_unpacked_skips, block.forward)  # type: ignore[method-assign]


def with_unpacked_skips(forward: Any, x: Tensor, skips: Any) -> Tensor:
    (inner,) = skips
    found: Tensor = forward(x, inner["skips"] if isinstance(inner, dict) else inner)
    return found


class Delegating(nn.Module):
    """A wrapper that has the attributes of the module within it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_modules", {}).get("inner")
        if inner is None or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Delegated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Delegating(Block(WIDTH)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def sequences(rows: int, seed: int) -> reference.Batch:
    return (vector_batch(4 * rows, seed, WIDTH)[0].view(rows, 4, WIDTH),)


@pytest.mark.parametrize("make", [Skipping, Nested, Delegated])
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_lists_that_blocks_change_and_wrappers_that_delegate(level: str, make: Any) -> None:
    options = {"checkpointing": True, "min_unit_size": 0}
    Scenario(model=make, batch=sequences, pair=(level, "no_shard"), options=options).check()


@on_ranks(1)
def test_a_cache_of_transformers_is_left_out() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCABULARY}
    layers = {"num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, **layers, use_cache=True)
    for checkpointing in (True, "selective"):
        Scenario(
            model=partial(transformers.LlamaForCausalLM, config),
            options={"checkpointing": checkpointing, "min_unit_size": 0},
            loss_of=lambda model, batch: model(batch[0], labels=batch[0]).loss,
        ).check()


def test_checkpointing_of_transformers_beside_that_of_the_engine_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    model = nn.ModuleList([transformers.LlamaForCausalLM(config) for _ in range(2)])
    fe.checkpoint_units(model, "0.model.layers.*")
    model[1].gradient_checkpointing_enable()
    fe.checkpoint_units(model, "0.model.layers.*")  # fine: these are blocks of model[0]
    model[0].gradient_checkpointing_enable()
    message = r"0\.model: expected one kind .* in 3 modules"  # the model and its two layers
    with pytest.warns(UserWarning, match=message) as found:
        fe.checkpoint_units(model, "0.model.layers.*")
    assert found[0].filename == __file__


class Cached(Block):
    """Takes an argument with the name of the cache of ``transformers``."""

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return super().forward(x) * cache["scale"]


def test_an_argument_named_cache_is_the_module_s() -> None:
    torch.manual_seed(1)
    model = nn.ModuleList([Cached(WIDTH), Cached(WIDTH)])
    x, cache = torch.randn(2, 4, WIDTH), {"scale": torch.tensor(0.5)}
    expected = model[1](model[0](x, cache=cache), cache=cache)
    assert fe.checkpoint_units(model) == ("0", "1")
    assert torch.equal(model[1](model[0](x, cache=cache), cache=cache), expected)
