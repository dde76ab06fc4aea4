"""``checkpointing="selective"`` and ``fe.Checkpointing``: operations that do not run again, the
same bits, and less memory than without."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import VOCABULARY, Block, Transformer, token_batch
from tests.pool import on_ranks
from tests.simulation.live_storages import LiveStorages

WIDTH = 12
BLOCKS = 4
aten = torch.ops.aten
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
EVERY_SECOND = fe.Checkpointing(every=2)


class Dropping(nn.Module):
    """A block within which another unit may be, that drops, and counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(WIDTH)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + F.dropout(self.inner(x), 0.3, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def made() -> Model:
    torch.manual_seed(1)
    return Model()


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def supports_higher_order_operators(self) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def again(function: nn.Module, x: Tensor, checkpointing: Any) -> Counter[str]:
    """Operations of a backward with this checkpointing, beyond those of one without."""
    found = []
    for how in (None, checkpointing):
        model = nn.Sequential(function, nn.Identity())
        vars(function).pop("forward", None)
        if how is not None:
            assert fe.checkpoint_units(model, "0", how) == ("0",)
        with Operations() as operations:
            loss = model(x).sum()
            operations.counts.clear()
            loss.backward()
        found.append(operations.counts)
    vars(function).pop("forward", None)
    return found[1] - found[0]


class Products(nn.Module):
    """Six products, by turns with a bias, and batched ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 1) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.bmm(x[None], x[None].mT).exp()


class Attention(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(torch.cos(x), x, x) * self.scale


class Changed(nn.Module):
    """Changes outputs that the policy keeps: of products, and of the choice of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)
        self.gate = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x), inplace=True)
        values, chosen = self.gate(x).softmax(-1).topk(2)
        values /= values.sum(-1, keepdim=True)
        return self.down(hidden).add_(x) * values.sum(-1, keepdim=True) + chosen.sum()


@pytest.mark.parametrize(
    "policy",
    ["selective", fe.Checkpointing(policy=[aten.addmm.default, aten.topk.default])],
    ids=str,
)
def test_outputs_that_are_changed_in_place_are_computed_again(policy: Any) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    found = []
    for how in (None, policy):
        torch.manual_seed(0)
        model = nn.Sequential(Changed(), nn.Identity())
        if how is not None:
            assert fe.checkpoint_units(model, "0", how) == ("0",)
        for _ in range(2):
            model(x).square().sum().backward()
        found.append([x.grad, *(param.grad for param in model.parameters())])
        x.grad = None
    for without, with_policy in zip(*found, strict=True):
        assert torch.equal(without, with_policy)


def test_every_second_product_runs_again() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    all_of_them = again(Products(), x, True)
    assert (all_of_them["aten.mm.default"], all_of_them["aten.addmm.default"]) == (3, 3)
    assert all_of_them["aten.bmm.default"] == 1
    # The second, the fourth and the sixth, which have a bias.
    some = again(Products(), x, "selective")
    assert (some["aten.mm.default"], some["aten.addmm.default"]) == (0, 3)
    assert some["aten.bmm.default"] == 0
    assert some["aten.tanh.default"] == 6


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (F.scaled_dot_product_attention, FLASH),
        (flex_attention, "flex_attention"),
    ],
)
def test_attention_does_not_run_again(
    kernel: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else torch compiles it by itself, which dispatch modes do not allow.
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    # Flexible attention has no backward on a CPU (torch 2.13): the scale alone has a gradient.
    x = torch.randn(1, 2, 16, 16, requires_grad=operation != "flex_attention")
    assert again(Attention(kernel), x, True)[operation] == 1
    some = again(Attention(kernel), x, "selective")
    assert (some[operation], some["aten.cos.default"]) == (0, 1)


def test_memory_that_is_written_is_written_again() -> None:
    def product(x: Tensor, *_: Tensor) -> Tensor:
        written = torch.empty(4, 4)
        torch.mm(x.detach(), x.detach().t(), out=written)
        return written

    x = torch.randn(4, 8, requires_grad=True)
    assert again(Attention(product), x, "selective")["aten.mm.out"] == 1


def test_other_policies() -> None:
    def keeps_tanh(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = func is aten.tanh.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(4, 8, requires_grad=True)
    for policy in (keeps_tanh, [aten.tanh.default], (aten.tanh.default,)):
        some = again(Products(), x, fe.Checkpointing(policy=policy))
        assert (some["aten.tanh.default"], some["aten.mm.default"]) == (0, 3)


def test_every_kth_block_is_recomputed() -> None:
    for every, expected in ((1, [2, 2, 2, 2]), (2, [1, 2, 1, 2]), (3, [1, 1, 2, 1])):
        model = made()
        names = fe.checkpoint_units(model, None, fe.Checkpointing(every=every))
        assert names == tuple(f"blocks.{i}" for i in range(every - 1, BLOCKS, every))
        model(*token_batch(2, 0)).backward()
        assert [block.runs for block in model.blocks] == expected


# ---- Training ------------------------------------------------------------------------------------


def trained(
    level: str, checkpointing: Any, units: Any = None, fails: bool = False
) -> tuple[list[float], list[Tensor]]:
    model = made()
    engine = fe.shard(
        model, strategy=level, units=units, min_unit_size=0, checkpointing=checkpointing
    )
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    rank = torch.distributed.get_rank()
    losses, gradients = [], []
    for step in range(3):
        torch.manual_seed(step)
        if fails and step == 1:
            _fail(model, engine)
            torch.manual_seed(step)
        for micro in range(2):
            with engine.no_sync() if not micro else nullcontext():
                loss = model(*token_batch(2, 10 * step + 2 * micro + rank))
                loss.backward()
            losses.append(loss.item())
        for param in model.parameters():
            grad = param.grad
            full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            gradients.append(full)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def _fail(model: Model, engine: fe.Engine) -> None:
    """A forward raises in a block; then, after the blocks ran again, a backward does."""

    def raising(*_: Any) -> None:
        raise KeyError("on purpose")

    hook = model.blocks[2].inner.register_forward_hook(raising)
    with pytest.raises(KeyError, match="on purpose"):
        model(*token_batch(2, 0))
    hook.remove()
    engine.reset()
    loss = model(*token_batch(2, 0))
    hook = model.blocks[2].inner.register_forward_hook(raising)
    with pytest.raises(KeyError, match="on purpose"):
        loss.backward()
    hook.remove()
    engine.reset()


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_training_is_the_same_to_the_last_bit(level: str) -> None:
    units = [Block, Dropping, nn.Embedding]  # a unit within each block
    for given in (None, units):
        losses, gradients = trained(level, False, given)
        for checkpointing in ("selective", EVERY_SECOND, fe.Checkpointing(2, "selective")):
            found = trained(level, checkpointing, given)
            assert found[0] == losses
            assert all(map(torch.equal, found[1], gradients))


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_training_proceeds_after_exceptions(level: str) -> None:
    losses, gradients = trained(level, False)
    found = trained(level, "selective", fails=True)
    assert found[0] == losses
    assert all(map(torch.equal, found[1], gradients))


@pytest.mark.parametrize("when", ["before", "after", "whole"])
@on_ranks(1)
def test_compiled_blocks_train_the_same(when: str) -> None:
    found, products = [], []

    def forward_of(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward_of(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        products[-1] += sum(name in ("aten.mm.default", "aten.addmm.default") for name in names)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_of,
        bw_compiler=backward_of,
        partition_fn=min_cut_rematerialization_partition,
    )
    for checkpointing in (False, True, "selective", EVERY_SECOND):
        products.append(0)
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        model = Transformer(2)
        if when == "before":
            for block in model.blocks:
                block.compile(backend=backend)
        if when == "whole":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend=backend)
        fe.shard(model, min_unit_size=0, checkpointing=checkpointing)
        if when == "after":
            for block in model.blocks:
                block.compile(backend=backend)
        for _ in range(2):
            model(*token_batch(2, 0)).backward()
        found.append([each.grad.full_tensor() for each in model.parameters()])
        assert not counters["graph_break"]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    kept, all_again, some_again, every_second = products
    if when == "whole":  # the checkpoint is around compiled code, which runs again as it is
        assert products == 4 * [kept]
    else:
        assert kept < some_again < all_again
        assert every_second == kept + all_again  # two graphs


@pytest.mark.parametrize("level", LEVELS)
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
    assert peaks[0] < 0.8 * peaks[1]
    for some in peaks[1:3]:
        assert peaks[0] < 0.8 * some < 0.7 * peaks[3]


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

    assert gathers("selective") == gathers(EVERY_SECOND) == gathers(False) > 0


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every": 0}, ValueError, "every: expected 1 or more; found 0"),
        ({"every": 2.0}, TypeError, "every: expected a whole number; found 2.0"),
        ({"every": True}, TypeError, "every: expected a whole number; found True"),
        ({"policy": "op"}, TypeError, "policy: expected None, 'selective', a function"),
        ({"policy": 3}, TypeError, "policy: expected None, 'selective', a function"),
        ({"policy": [aten.mm]}, TypeError, "policy: expected operations such as .*; found <OpOver"),
        ({"policy": ["mm"]}, TypeError, "policy: expected operations such as .*; found 'mm'"),
    ],
)
def test_wrong_options(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fe.Checkpointing(**given)


@pytest.mark.parametrize("given", ["select", False, "offload", 2])
def test_checkpoint_units_says_what_it_takes(given: Any) -> None:
    with pytest.raises(ValueError, match=r"checkpointing: expected True, 'selective' or fe\.Check"):
        fe.checkpoint_units(made(), None, given)


@on_ranks(2)
def test_ranks_must_have_the_same() -> None:
    every = 1 + torch.distributed.get_rank()
    with pytest.raises(ValueError, match="every=1"):
        fe.shard(made(), checkpointing=fe.Checkpointing(every))
    # Addresses of functions may differ.
    policy = fe.Checkpointing(policy=lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    fe.shard(made(), checkpointing=policy)
    with pytest.raises((ValueError, RuntimeError), match="checkpointing: expected True, False, 's"):
        fe.shard(made(), checkpointing="some")
