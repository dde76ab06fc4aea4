"""``checkpoint_units``: what it wraps, and that nothing but memory is different with it."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import VOCABULARY, Block, Transformer, token_batch
from tests.pool import on_ranks
from tests.simulation.live_storages import LiveStorages

WIDTH = 12


class Dropping(nn.Module):
    """A block that drops, reads an argument by name, and counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        self.runs += 1
        return x + F.dropout(self.inner(x), 0.3, self.training) * debug


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, debug=0.5)  # a name that torch's checkpoint takes for itself
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def made() -> Model:
    torch.manual_seed(1)
    return Model()


def test_blocks_are_checkpointed_and_nothing_else_changes() -> None:
    model = made()
    names = [name for name, _ in model.named_modules()]
    assert fe.checkpoint_units(model) == ("blocks.0", "blocks.1", "blocks.2")
    assert [name for name, _ in model.named_modules()] == names
    assert type(model.blocks[0]) is Dropping
    assert str(inspect.signature(model.blocks[0].forward)).startswith("(x: ")
    batch = token_batch(2, 0)
    model(*batch).backward()
    assert [block.runs for block in model.blocks] == [2, 2, 2]
    with torch.no_grad():
        model(*batch)
    assert [block.runs for block in model.blocks] == [3, 3, 3]


def test_a_second_call_changes_nothing() -> None:
    model = made()
    first = fe.checkpoint_units(model)
    assert fe.checkpoint_units(model) == first
    model(*token_batch(2, 0)).backward()
    assert model.blocks[0].runs == 2


@pytest.mark.parametrize(
    ("units", "names"),
    [
        (["blocks.0"], ("blocks.0",)),
        ([nn.Embedding, Dropping], ("blocks.0", "blocks.1", "blocks.2")),
        # Each contains the next.
        ([Block, "blocks.1"], ("blocks.0.inner", "blocks.1", "blocks.2.inner")),
        ([("blocks.0", "head")], ("blocks.0", "head")),
    ],
)
def test_units_are_named_as_for_shard(units: Any, names: tuple[str, ...]) -> None:
    model = made()
    assert fe.checkpoint_units(model, units) == names
    model(*token_batch(2, 0)).backward()


def test_what_cannot_be_checkpointed() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module; found int"):
        fe.checkpoint_units(3)
    with pytest.raises(ValueError, match=r"units: expected pattern 'layers\.\*' to match a module"):
        fe.checkpoint_units(made(), "layers.*")
    assert fe.checkpoint_units(nn.Linear(2, 2)) == ()


def test_a_forward_of_the_instance_s_own_is_run() -> None:
    model = made()
    block = model.blocks[0]
    block.forward = lambda x, **_: 2 * x
    fe.checkpoint_units(model)
    x = torch.ones(1, 2, WIDTH, requires_grad=True)
    assert torch.equal(block(x), 2 * x)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_recomputes_with_its_own_weights(how: str) -> None:
    model = made()
    fe.checkpoint_units(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    alone = made()
    for each in (other, alone):
        torch.manual_seed(2)
        each(*token_batch(2, 0)).backward()
    for param, expected in zip(other.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)
    assert other.blocks[0].runs == 2
    assert model.blocks[0].runs == 0


def trained(level: str, when: str, units: Any = None) -> tuple[list[float], list[Tensor], Any]:
    model = made()
    if when == "before":
        fe.checkpoint_units(model, units)
    engine = fe.shard(model, strategy=level, min_unit_size=0, units=units)
    if when == "after":
        fe.checkpoint_units(model, units)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, gradients = [], []
    for step in range(3):
        torch.manual_seed(step)
        for micro in range(2):
            rank = torch.distributed.get_rank()
            loss = model(*token_batch(2, 10 * step + 2 * micro + rank))
            loss.backward()
            losses.append(loss.item())
        gradients += [
            param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad.clone()
            for param in model.parameters()
        ]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, engine


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_training_is_the_same_to_the_last_bit(level: str) -> None:
    losses, gradients, _ = trained(level, "never")
    for when in ("before", "after"):
        found = trained(level, when)
        assert found[0] == losses
        assert all(map(torch.equal, found[1], gradients))


@on_ranks(2)
def test_units_within_units_train_the_same() -> None:
    units = [Block, Dropping, nn.Embedding]
    losses, gradients, _ = trained("optim_grads_params", "never", units)
    found = trained("optim_grads_params", "after", units)
    assert found[0] == losses
    assert all(map(torch.equal, found[1], gradients))


class Deep(nn.Module):
    """Blocks that keep much, and have few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(32), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_activations_take_less_memory(level: str) -> None:
    peaks = []
    for checkpointed in (False, True):
        with LiveStorages() as watch:
            model = Deep()
            if checkpointed:
                fe.checkpoint_units(model)
            engine = fe.shard(model, strategy=level, min_unit_size=0)
            x = torch.zeros(4, 64, 32)
            for _ in range(2):
                watch.restart()
                model(x).backward()
            peaks.append(watch.peak)
        del engine, model
    assert peaks[1] < 0.5 * peaks[0]


class Skipping(nn.Module):
    """Blocks that put tensors into a list, and others that take them out, as those of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Pushing(), Pushing()])
        self.up = nn.ModuleList([Popping(), Popping()])

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in (*self.down, *self.up):
            x = block(x, skips=skips) if block is self.up[1] else block(x, skips)
        assert not skips
        return x.square().mean()


class Pushing(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = super().forward(x)
        skips.append(y * 2)
        return y


class Popping(Pushing):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return Block.forward(self, x + skips.pop())


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
        self.blocks = nn.ModuleList(Delegating(Block(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("make", [Skipping, Delegated])
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_lists_that_blocks_change_and_wrappers_that_delegate(level: str, make: Any) -> None:
    torch.manual_seed(1)
    model = make()
    alone = copy.deepcopy(model)
    fe.shard(model, strategy=level, checkpointing=True, min_unit_size=0)
    x = torch.randn(3, 4, WIDTH)
    for each in (model, alone):
        for _ in range(2):
            each(x).backward()
    expected = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        found = param.grad.full_tensor() if isinstance(param.grad, fe.FlatDTensor) else param.grad
        torch.testing.assert_close(found, expected[name].grad, msg=f"{name}")


@pytest.mark.parametrize("checkpointing", [True, "selective"])
@on_ranks(1)
def test_a_cache_of_transformers_is_left_out(checkpointing: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        use_cache=True,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    alone = copy.deepcopy(model)
    fe.shard(model, strategy="no_shard", checkpointing=checkpointing, min_unit_size=0)
    tokens = torch.randint(VOCABULARY, (2, 7))
    for each in (model, alone):
        each(input_ids=tokens, labels=tokens).loss.backward()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad, msg=name)


class Cached(nn.Module):
    """A block that takes an argument of its own that is named as the cache of ``transformers``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(WIDTH)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return self.inner(x) * cache["scale"]


def test_an_argument_named_cache_is_the_module_s() -> None:
    torch.manual_seed(1)
    model = nn.ModuleList([Cached(), Cached()])
    x, cache = torch.randn(2, 4, WIDTH), {"scale": torch.tensor(0.5)}
    expected = model[1](model[0](x, cache=cache), cache=cache)
    assert fe.checkpoint_units(model) == ("0", "1")
    assert torch.equal(model[1](model[0](x, cache=cache), cache=cache), expected)


def test_a_recomputation_gathers_nothing() -> None:
    def gathers(checkpointed: bool) -> int:
        def build() -> nn.Module:
            model = Transformer(3)
            if checkpointed:
                fe.checkpoint_units(model)
            return model

        found = fe.simulate(
            build, 8, batch=token_batch(4, 0), strategy="optim_grads_params", min_unit_size=0
        )
        return sum(span.lane == "inner gather" for span in found.spans)

    assert gathers(True) == gathers(False) > 0
