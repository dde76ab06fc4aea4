"""``checkpointing="selective"`` and ``fe.Checkpointing``: operations that do not run again, and
compiled blocks. Training and memory are in ``test_checkpointing.py``."""

from __future__ import annotations

import functools
from collections import Counter
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
from fsdp_engine.backend import Backend
from tests import reference
from tests.extensions.activations.checkpointed import made
from tests.models import Transformer, token_batch
from tests.pool import on_ranks

aten = torch.ops.aten
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
EVERY_SECOND = fe.Checkpointing(every=2)
OFFLOAD = fe.OffloadActivations(min_bytes=0)


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
    """Six products, every second one with a bias, and a batched product."""

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
    [(F.scaled_dot_product_attention, FLASH), (flex_attention, "flex_attention")],
)
def test_attention_does_not_run_again(
    kernel: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise torch compiles flex_attention, which dispatch modes do not allow.
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


class Ahead(Backend):
    """Treats the CPU as an asynchronous device, so that ``shard`` offloads its activations."""

    def runs_ahead(self, device: torch.device) -> bool:
        return True


@functools.cache
def compiled(when: str, checkpointing: Any) -> tuple[dict[str, Tensor | None], int]:
    """Gradients of compiled blocks, and the number of products in their backward graphs.

    Args:
        when: Blocks are compiled before or after ``shard``, or replaced as a whole.
    """
    num_products = 0

    def forward_of(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward_of(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal num_products
        names = [str(node.target) for node in graph.graph.nodes]
        num_products += sum(name in ("aten.mm.default", "aten.addmm.default") for name in names)
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(
        fw_compiler=forward_of,
        bw_compiler=backward_of,
        partition_fn=min_cut_rematerialization_partition,
    )
    counters.clear()
    torch._dynamo.reset()
    torch.manual_seed(1)
    model: Any = Transformer(2)
    if when == "whole":
        model.blocks = nn.ModuleList(torch.compile(each, backend=backend) for each in model.blocks)
    for block in model.blocks if when == "before" else ():
        block.compile(backend=backend)
    with Ahead().used():
        engine = fe.shard(model, min_unit_size=0, checkpointing=checkpointing)
    for block in model.blocks if when == "after" else ():
        block.compile(backend=backend)
    for _ in range(2):
        model(*token_batch(2, 0)).backward()
    assert not counters["graph_break"]
    assert all(moves.pool._most_in_use for moves in engine.parts)
    found = reference.full_gradients(model)
    return {name.replace("._orig_mod", ""): each for name, each in found.items()}, num_products


@pytest.mark.parametrize("checkpointing", [True, "selective", EVERY_SECOND, OFFLOAD], ids=str)
@pytest.mark.parametrize("when", ["before", "after", "whole"])
@on_ranks(1)
def test_compiled_blocks_train_the_same(when: str, checkpointing: Any) -> None:
    expected, kept = compiled("before", False)
    found, num_products = compiled(when, checkpointing)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    _, all_again = compiled("before", True)
    if when == "whole" or checkpointing == OFFLOAD:
        # A checkpoint around compiled code runs it again as it is; offloading runs nothing again.
        assert num_products == kept
    elif checkpointing == "selective":
        assert kept < num_products < all_again
    else:
        assert num_products == (all_again if checkpointing is True else kept + all_again)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every": 0}, ValueError, "every: expected 1 or more; found 0"),
        ({"every": 2.0}, TypeError, "every: expected an integer; found 2.0"),
        ({"every": True}, TypeError, "every: expected an integer; found True"),
        ({"policy": "op"}, TypeError, "policy: expected None, 'selective', a function"),
        ({"policy": [aten.mm]}, TypeError, "policy: expected operations such as .*; found <OpOver"),
        ({"policy": ["mm"]}, TypeError, "policy: expected operations such as .*; found 'mm'"),
    ],
)
def test_wrong_options(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fe.Checkpointing(**given)


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
