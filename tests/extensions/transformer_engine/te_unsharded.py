"""The same training twice: by Transformer Engine alone, and sharded. Every bit must be the same.

    alone     fp32 main weights beside the model; after each step all quantised weights are made
              from them by Transformer Engine's own ``quantize_master_weights``
    sharded   ``fe.shard``

Both build one model from one seed, see the same batches, and take the same steps with an
elementwise optimizer. Ranks have the same data, so that the mean of their gradients is exactly
each rank's: worlds are powers of two, and a gradient's half or quarter is exact. So main weights
are compared with ``torch.equal``, and so are bytes and scales of both encodings whenever a module
is about to multiply with them. This only needs a device that repeats a computation bit for bit.

Models are Transformer Engine's modules on CUDA, and on a CPU ``QuantisedStack`` over the stand-ins.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.quantized_codec import RECIPES, is_quantized
from fsdp_engine.runtime.inputs import iter_tensors
from tests.extensions.transformer_engine.te_on_cpu import (
    QuantisedLinear,
    QuantisedStack,
    load,
    make_recipe,
)
from tests.extensions.transformer_engine.te_vectors import read_encodings

BF16 = torch.bfloat16
NUM_STEPS, NUM_MICRO = 3, 2
# Results of a training, with names: losses, bytes and scales in use, final main weights.
Found = list[tuple[str, Tensor]]
# DIM and HIDDEN are multiples of 32, the block of MXFP8, but not of 128, that of the block recipe.
DIM, HIDDEN, TOKENS = 192, 320, (32, 4)


class LinearBlock(nn.Module):
    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=BF16, device="cuda")
        self.up = te.Linear(DIM, HIDDEN, params_dtype=BF16, device="cuda")
        self.down = te.Linear(HIDDEN, DIM, bias=False, params_dtype=BF16, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LayerBlock(nn.Module):
    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.layer = te.TransformerLayer(
            DIM,
            HIDDEN,
            num_attention_heads=DIM // 64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,  # a quantised weight cannot be split into three
            params_dtype=BF16,
            device="cuda",
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Stack(nn.Module):
    """Blocks, and a quantised head that belongs to the root; a scalar loss."""

    def __init__(self, block: type[nn.Module]) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = te.Linear(DIM, DIM, bias=False, params_dtype=BF16, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the output less ``x``, (sequence, batch, DIM)."""
        y = x
        for block in self.blocks:
            y = block(y)
        return (self.head(y).float() - x.float()).square().mean()


class ImitatedStack(QuantisedStack):
    def __init__(self, recipe: str) -> None:
        super().__init__(recipe, num_blocks=2, features=8)
        dim = self.embed.out_features
        self.last = QuantisedLinear(dim, dim, recipe, bias=False, dtype=self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.to(self.dtype))
        for block in self.blocks:
            y = block(y)
        y = self.head(self.norm(self.last(y)))
        return (y.float() - x.float()).square().mean()


def make_model(kind: str, recipe: Any, name: str) -> nn.Module:
    """A model of ``kind``: "linear" and "layer" on CUDA, "imitation" on a CPU."""
    torch.manual_seed(0)
    if kind == "imitation":
        return ImitatedStack(name)
    import transformer_engine.pytorch as te

    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return Stack({"linear": LinearBlock, "layer": LayerBlock}[kind])


def make_batches(kind: str, seed: int) -> list[list[Tensor]]:
    """Microbatches of each step, in bf16, to which an engine would cast them. Drawn on the CPU, so
    that every process has the same. All microbatches of a step are equal, so that sums of their
    gradients are not rounded: where gradients are sharded, each rank's fraction of the second bf16
    gradient is added to an equal first one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (16, 8) if kind == "imitation" else (*TOKENS, DIM)
    device = "cpu" if kind == "imitation" else "cuda"
    steps = (torch.randn(shape, generator=generator).to(device, BF16) for _ in range(NUM_STEPS))
    return [[x] * NUM_MICRO for x in steps]


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """An elementwise optimizer; its results do not depend on how tensors are split."""
    return torch.optim.AdamW(params, lr=0.01, foreach=False, fused=False)


def scales_of(weight: Any, recipe: str) -> list[Any]:
    return [getattr(weight, n) for each in RECIPES if each.name == recipe for n in each.scales]


def quantised_weights(model: nn.Module, recipe: str) -> dict[str, tuple[Any, list[Any]]]:
    return {
        name: (param, scales_of(param, recipe))
        for name, param in model.named_parameters()
        if is_quantized(param)
    }


def watch(model: nn.Module, recipe: str, weights: dict[str, Any], found: Found) -> None:
    """Record the encodings of every quantised weight when its module is called, and when the
    gradient of the module's output is computed: after the hooks of an engine, if the model has one.
    Weights and their scales must stay the same tensors."""

    def note(name: str, when: str) -> None:
        prefix, _, key = name.rpartition(".")
        weight: Any = getattr(model.get_submodule(prefix), key)
        before, scales = weights[name]
        assert weight is before, f"{name} is another parameter in {when}"
        same = map(operator.is_, scales_of(weight, recipe), scales)
        assert all(same), f"{name}: other scales in {when}"
        encodings = read_encodings(weight)
        data, scale_inv = encodings[:2] if when == "forward" else encodings[2:4]
        assert data is not None, f"{name} has no columns in {when}"
        assert scale_inv is not None
        found.append((f"bytes of {name} in {when}", data.cpu().clone()))
        found.append((f"scales of {name} in {when}", scale_inv.cpu().clone()))

    def returned(name: str, module: nn.Module, args: Any, output: Any) -> None:
        # Some modules return their bias, too.
        first = next(tensor for tensor in iter_tensors(output) if tensor.requires_grad)
        first.grad_fn.register_prehook(lambda grads: note(name, "backward"))

    for name in weights:
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_forward_pre_hook(lambda module, args, name=name: note(name, "forward"))
        module.register_forward_hook(partial(returned, name))


@contextlib.contextmanager
def computing(kind: str, recipe: Any) -> Iterator[None]:
    if kind == "imitation":
        yield
        return
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=recipe):
        yield


def start(kind: str, name: str) -> tuple[Any, nn.Module]:
    """The recipe, and a new model. Transformer Engine is reset, since it keeps the scales of all
    models that ran."""
    load()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    recipe = make_recipe(name)
    return recipe, make_model(kind, recipe, name)


def run(model: nn.Module, kind: str, recipe: Any, x: Tensor, found: Found) -> None:
    with computing(kind, recipe):
        loss = model(x)
    (loss / NUM_MICRO).backward()
    found.append(("loss", loss.detach().cpu()))


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(model, QuantisedStack):
        model.update_scales()  # Transformer Engine does it at the end of ``autocast``
    optimizer.step()
    optimizer.zero_grad()


def train_alone(kind: str, name: str, batches: list[list[Tensor]]) -> Found:
    """Without an engine. On several ranks each does the same."""
    recipe, model = start(kind, name)
    from transformer_engine.pytorch.tensor.utils import (
        post_all_gather_processing,
        quantize_master_weights,
    )

    params: dict[str, Any] = dict(model.named_parameters())
    quantised = quantised_weights(model, name)
    main = {}
    for key, param in params.items():
        value = param.get_high_precision_init_val() if key in quantised else param.detach()
        main[key] = nn.Parameter(value.to(param.device, torch.float32, copy=True))
    optimizer = make_optimizer(main.values())
    found: Found = []
    watch(model, name, quantised, found)
    weights = [weight for weight, _ in quantised.values()]
    for step in batches:
        with torch.no_grad():
            quantize_master_weights(
                weights,
                [main[key].detach().view(-1) for key in quantised],
                [0] * len(weights),
                dist.group.WORLD,
                manual_post_all_gather_processing=True,
            )
            for weight in weights:
                weight.update_usage(rowwise_usage=True, columnwise_usage=name == "mxfp8")
            post_all_gather_processing(weights)
            for key in params.keys() - quantised.keys():
                params[key].copy_(main[key])
        for x in step:
            run(model, kind, recipe, x, found)
            for key, param in params.items():
                gradient, before = param.grad.float(), main[key].grad
                main[key].grad = gradient if before is None else before + gradient
                param.grad = None
        finish_step(model, optimizer)
    return [*found, *((f"main weights of {key}", main[key].detach().cpu()) for key in main)]


def train_sharded(
    kind: str, name: str, level: str, batches: list[list[Tensor]], outer: str | None = None
) -> Found:
    """By an engine on all ranks of the world; with an outer level, on two axes."""
    recipe, model = start(kind, name)
    names = [key for key, _ in model.named_parameters()]
    quantised = quantised_weights(model, name)
    device = next(model.parameters()).device.type
    found: Found = []
    size = dist.get_world_size()
    shape = (size,) if outer is None else (2, size // 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    # Without fp8_param_gather, which would also gather plain matrices in fp8.
    engine = fe.shard(model, mesh, level, outer)
    watch(model, name, quantised, found)
    optimizer = make_optimizer(model.parameters())
    for step in batches:
        for index, x in enumerate(step):
            last = index == len(step) - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                run(model, kind, recipe, x, found)
        finish_step(model, optimizer)
    return [*found, *((f"main weights of {key}", engine.full_tensor(key).cpu()) for key in names)]


def assert_same(found: Found, expected: Found) -> None:
    for (what, ours), (also, theirs) in zip(found, expected, strict=True):
        assert what == also
        assert torch.equal(ours, theirs), what


def assert_changes(found: Found) -> None:
    """Assert that bytes change in every step. Otherwise equal bytes would prove nothing."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for what, tensor in found:
        if what.startswith("bytes") and what.endswith("forward"):
            rows[what].append(tensor)
    for what, tensors in rows.items():
        assert len(tensors) == NUM_STEPS * NUM_MICRO
        for before, after in zip(tensors[:-NUM_MICRO], tensors[NUM_MICRO:], strict=True):
            assert not torch.equal(before, after), what


def train_both(kind: str, name: str, level: str, outer: str | None = None) -> None:
    """With the same data on every rank, sharded training equals training alone."""
    batches = make_batches(kind, seed=1)
    expected = train_alone(kind, name, batches)
    assert_changes(expected)
    assert_same(train_sharded(kind, name, level, batches, outer), expected)


def train_apart(kind: str, name: str, level: str) -> None:
    """Ranks with data of their own: bytes, scales and main weights are the same on all of them."""
    found = train_sharded(kind, name, level, make_batches(kind, seed=1 + dist.get_rank()))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [each for each in found if each[0] != "loss"])
    for other in everybody:
        assert_same(other, everybody[0])
    assert_changes(found)


def train_alone_twice(kind: str, name: str) -> None:
    batches = make_batches(kind, seed=1)
    assert_same(train_alone(kind, name, batches), train_alone(kind, name, batches))
