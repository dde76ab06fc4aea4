"""Programs of the kinds that public bug reports about sharding engines describe.

Functions of the user's own, hooks at odd places, weights that are written outside of an optimizer,
collectives of the user's, backwards within backwards, and tensors that modules keep.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.promises.scene import ROWS, WIDTH, Block, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries


class Variant(Model):
    """A model whose second block is of the class that the attribute ``inner`` names."""

    inner: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.inner()


def variant(inner: type[nn.Module]) -> type[Model]:
    """A model class with a block of class ``inner``."""
    return type(f"With{inner.__name__}", (Variant,), {"inner": inner})


def train(s: Scene, optimizer: torch.optim.Optimizer | None = None, steps: int = 2) -> list[Tensor]:
    """Some steps of training; their losses."""
    optimizer = s.sgd() if optimizer is None else optimizer
    return [s.step(optimizer) for _ in range(steps)]


# --- functions of the user's own ---


class _LinearLoss(Function):
    """The mean square of ``x @ weight.T``, whose gradients are computed in forward, by rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, make: Any) -> Tensor:
        grad_x, grad_weight = torch.empty_like(x), make(weight)
        loss = x.new_zeros(())
        count = x.shape[0] * weight.shape[0]
        for i in range(x.shape[0]):
            y = x[i : i + 1] @ weight.t()
            loss += y.square().sum() / count
            grad_x[i : i + 1] = 2 * y @ weight / count
            grad_weight += 2 * y.t() @ x[i : i + 1] / count
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad, grad_weight * grad, None


class FusedLoss(Model):
    """The head's weight is used by a function in the root's forward, as fused losses do."""

    make = staticmethod(torch.zeros_like)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return _LinearLoss.apply(x, self.head.weight, self.make).sqrt()


class FusedLossNewZeros(FusedLoss):
    make = staticmethod(lambda weight: weight.new_zeros(weight.shape))


@tries("a fused loss: gradients of the head in forward, by zeros_like", make=FusedLoss)
@tries("a fused loss: gradients of the head in forward, by new_zeros", make=FusedLossNewZeros)
def _fused(s: Scene) -> Any:
    return train(s)


@tries("a fused loss outside of the model's forward, with the head's weight")
def _fused_outside(s: Scene) -> Any:
    hidden = s.model.blocks[1](s.model.blocks[0](s.x))
    _LinearLoss.apply(hidden, s.model.head.weight, torch.zeros_like).backward()


class _Scaled(Function):
    """``x * gain``, whose gradient of the gain is written into a copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return grad * gain, torch.empty_like(gain).copy_((grad * x).sum(0))


class ScaledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + _Scaled.apply(F.gelu(self.linear(self.norm(x))), self.norm.weight)


@tries("a Function whose gradient is written into empty_like", make=variant(ScaledBlock))
def _scaled(s: Scene) -> Any:
    return train(s)


@tries("a Function of a norm's weight, outside of any unit")
def _scaled_outside(s: Scene) -> Any:
    y = _Scaled.apply(s.model.blocks[0](s.x), s.model.blocks[1].norm.weight)
    s.model.blocks[1](y).square().mean().backward()


class _SetupContext(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight


class SetupContextBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + _SetupContext.apply(self.norm(x), self.linear.weight) + self.linear.bias


@tries("a Function with setup_context and needs_input_grad", make=variant(SetupContextBlock))
def _setup_context(s: Scene) -> Any:
    s.model.blocks[1].linear.weight.requires_grad_(False)
    first = train(s, torch.optim.SGD([p for p in s.model.parameters() if p.requires_grad], lr=0.1))
    s.model.blocks[1].linear.weight.requires_grad_(True)
    return first, train(s)


class _Identity(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm().clamp(min=1.0)


class IdentityBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(self.norm(x), 2 * _Identity.apply(self.linear.weight))


@tries("a Function that returns a view of a weight", make=variant(IdentityBlock), goes_on=False)
def _identity(s: Scene) -> Any:
    # The loss is small, so that the gradient's norm, of which each rank has its own, is below 1.
    (0.01 * s.loss()).backward()


class _Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class DirtyBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _Dirty.apply(self.linear(x)) + x


@tries("a Function that marks its input dirty", make=variant(DirtyBlock))
def _dirty(s: Scene) -> Any:
    return train(s)


class _Again(Function):
    """A checkpoint by hand: forward without gradients, once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


class AgainInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(x, super().forward)


class AgainOutside(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = _Again.apply(x, block)
        return self.head(x)


@tries("a checkpoint by hand within a unit", make=variant(AgainInside))
@tries("a checkpoint by hand around units", make=AgainOutside)
def _again(s: Scene) -> Any:
    return train(s)


class _Tiled(Function):
    """An MLP over slices of the rows, whose backward runs forward and backward of each slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any, *params: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(part) for part in x.split(1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        parts = []
        for part, one in zip(x.split(1), grad.split(1), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(part)
            torch.autograd.backward(y, one)
            parts.append(part.grad)
        return torch.cat(parts), None, *[None] * (len(ctx.needs_input_grad) - 2)


class TiledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _Tiled.apply(x, super().forward, *self.parameters())


@tries("a tiled MLP, which is the unit", make=variant(TiledBlock))
def _tiled(s: Scene) -> Any:
    return train(s)


class _Coupling(Function):
    """A reversible pair of blocks: backward computes the inputs from the outputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module) -> Any:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> Any:
        a, b = (each.detach() for each in ctx.saved_tensors)
        a.requires_grad_()
        with torch.enable_grad():
            out = ctx.g(a)
        torch.autograd.backward(out, grad_b)
        b = (b - out.detach()).requires_grad_()
        grad_a = grad_a + a.grad
        with torch.enable_grad():
            out = ctx.f(b)
        torch.autograd.backward(out, grad_a)
        return grad_a, grad_b + b.grad, None, None


class Reversible(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        a, b = _Coupling.apply(x, x * 2, *self.blocks)
        return self.head(a + b)


@tries("a reversible network", make=Reversible)
def _reversible(s: Scene) -> Any:
    return train(s)


class Quantized(Block):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        rounded = weight + ((weight * 16).round() / 16 - weight).detach()
        return x + F.linear(self.norm(x), rounded, self.linear.bias)


@tries("quantisation-aware training (straight-through rounding)", make=variant(Quantized))
def _quantized(s: Scene) -> Any:
    return train(s)


# --- hooks ---


@tries("a forward hook that replaces outputs, removed later")
def _replaces(s: Scene) -> Any:
    handle = s.model.blocks[0].register_forward_hook(lambda m, args, out: out * 0.5)
    first = train(s)
    handle.remove()
    return first, train(s)


@tries("a forward pre-hook that replaces inputs")
def _replaces_inputs(s: Scene) -> Any:
    s.model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    return train(s)


@tries("full backward hooks: one reads, one scales")
def _backward_hooks(s: Scene) -> Any:
    seen: list[Tensor] = []
    s.model.blocks[0].register_full_backward_hook(
        lambda m, given, out: seen.append(s.per_row(out[0]).clone())
    )
    s.model.blocks[1].register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,))
    return train(s), seen


@tries("a full backward pre-hook that scales")
def _backward_pre_hook(s: Scene) -> Any:
    s.model.blocks[1].register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,))
    return train(s)


@tries("an activation that a hook keeps, with retain_grad")
def _retained(s: Scene) -> Any:
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    s.model.blocks[0].register_forward_hook(keep)
    s.loss().backward()
    return s.per_row(kept[0].grad)


@tries("a forward hook that computes an auxiliary loss of a unit's output")
def _deep_supervision(s: Scene) -> Any:
    kept: list[Tensor] = []
    s.model.blocks[0].register_forward_hook(
        lambda m, args, out: kept.append(m.linear(out).square().mean())
    )
    (s.loss() + kept[0]).backward()


class EarlyExit(Block):
    """It keeps a tensor that it computed from its output."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = self.linear(out)
        return out


class EarlyExits(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([EarlyExit(), EarlyExit(), EarlyExit()])


@tries("early exits: kept tensors computed after the output", make=EarlyExits)
def _early_exits(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    for _ in range(2):
        loss = s.loss() + sum(block.kept.square().mean() for block in s.model.blocks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    for block in s.model.blocks:
        block.kept = None
    return losses


@tries("early exits alone: the outputs get no gradient", make=EarlyExits)
def _exits_alone(s: Scene) -> Any:
    s.model(s.x)
    sum(block.kept.square().mean() for block in s.model.blocks).backward()
    for block in s.model.blocks:
        block.kept = None


@tries("early exits, checkpointed by hand around blocks", make=EarlyExits)
def _checkpointed_exits(s: Scene) -> Any:
    x, losses = s.x.clone().requires_grad_(), []
    for block in s.model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
        losses.append(block.kept.square().mean())
        block.kept = None
    (s.model.head(x).square().mean() + sum(losses)).backward()
    for block in s.model.blocks:
        block.kept = None


class LocalLoss(Block):
    """Greedy training: each block's input is detached."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = out.square().mean()
        return out.detach()


@tries("local losses: each unit returns a detached output", make=variant(LocalLoss))
def _local_losses(s: Scene) -> Any:
    losses = []
    for _ in range(2):
        loss = s.loss() + s.model.blocks[1].kept
        loss.backward()
        losses.append(s.mean(loss))
    s.model.blocks[1].kept = None
    return losses


@tries("a hook on every module (register_module_forward_hook)")
def _global_hook(s: Scene) -> Any:
    names: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: names.append(type(module).__name__)
    )
    try:
        losses = train(s)
    finally:
        handle.remove()
    return losses, names


@tries("register_multi_grad_hook over activations")
def _multi_grad(s: Scene) -> Any:
    kept: list[Tensor] = []
    s.model.blocks[0].register_forward_hook(lambda m, args, out: kept.append(out))
    s.model.blocks[1].register_forward_hook(lambda m, args, out: kept.append(out))
    loss, norms = s.loss(), []
    torch.autograd.graph.register_multi_grad_hook(
        kept, lambda grads: norms.append(len([each for each in grads if each is not None]))
    )
    loss.backward()
    return norms


@tries("saved_tensors_hooks around forward: copies, and save_on_cpu")
def _saved_hooks(s: Scene) -> Any:
    optimizer = s.sgd()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = s.loss()
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        loss = s.loss()
    loss.backward()
    optimizer.step()


# --- buffers ---


class Counting(Block):
    """Its buffers are made anew, moved, and written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        size = 4 * int(self.steps)
        if self.table is None or len(self.table) < size:
            self.table = torch.arange(size, dtype=torch.float32) / size
        self.average.lerp_(self.linear.weight.detach().mean(0), 0.1)
        return super().forward(x) * self.table[-1] + self.average


@tries("buffers that grow, count, and follow weights in forward", make=variant(Counting))
def _buffers(s: Scene) -> Any:
    return train(s, steps=3)


class Masked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH) % 3 > 0).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(self.norm(x), self.linear.weight * self.mask, self.linear.bias)


@tries("pruning by a mask in forward, applied to weights at the end", make=variant(Masked))
def _masked(s: Scene) -> Any:
    losses = train(s)
    with torch.no_grad():
        s.model.blocks[1].linear.weight.mul_(s.model.blocks[1].mask)
    return losses, train(s)


class CachedWeight(Block):
    """A function of its weight is kept between forwards, until the user drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.linear.weight.detach().t()
        return x + self.norm(x) @ self.cache


@tries("a view of a weight cached for the microbatches of a step", make=variant(CachedWeight))
def _cached_view(s: Scene) -> Any:
    optimizer, losses = torch.optim.SGD(s.model.parameters(), lr=0.1), []
    for _ in range(2):
        for part in s.x.tensor_split(ROWS):
            loss = s.loss(part) / ROWS
            loss.backward()
            losses.append(s.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        s.model.blocks[1].cache = None
    return sum(losses)


# --- weights written at odd places ---


@tries("weights clamped after each step (p.data.clamp_)")
def _clamped(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    for _ in range(2):
        losses += train(s, optimizer, 1)
        for p in s.model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return losses


class Forced(Block):
    """Forced weight normalisation, as in EDM2."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.linear.weight.copy_(F.normalize(self.linear.weight, dim=1))
        return super().forward(x)


@tries("forced weight normalisation in forward", make=variant(Forced))
def _forced(s: Scene) -> Any:
    return train(s, steps=3)


@tries("a forward pre-hook that clamps weights")
def _clamps_before(s: Scene) -> Any:
    def clamp(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.linear.weight.clamp_(-0.1, 0.1)

    s.model.blocks[0].register_forward_pre_hook(clamp)
    return train(s)


@tries("a pre-hook of the model that clamps all weights")
def _clamps_all(s: Scene) -> Any:
    def clamp(module: Any, args: Any) -> None:
        for p in module.parameters():
            p.data.clamp_(-0.1, 0.1)

    s.model.register_forward_pre_hook(clamp)
    return train(s)


@tries("weights swapped with their average for an evaluation (p.data)")
def _swapped(s: Scene) -> Any:
    average = {n: p.detach().clone() for n, p in s.model.named_parameters()}
    losses = train(s)
    named = dict(s.model.named_parameters())
    for name, p in named.items():
        average[name].lerp_(p.detach(), 0.5)
    for name, p in named.items():
        p.data, average[name] = average[name], p.data
    with torch.no_grad():
        evaluated = s.mean(s.loss())
    for name, p in named.items():
        p.data, average[name] = average[name], p.data
    return losses, evaluated, train(s)


@tries("an average by torch._foreach_lerp_, copied in and out")
def _foreach(s: Scene) -> Any:
    params = list(s.model.parameters())
    average = [p.detach().clone() for p in params]
    losses = train(s)
    with torch.no_grad():
        torch._foreach_lerp_(average, params, 0.5)
        kept = [p.clone() for p in params]
        torch._foreach_copy_(params, average)
        evaluated = s.mean(s.loss())
        torch._foreach_copy_(params, kept)
    return losses, evaluated, train(s)


@tries("sharpness-aware minimisation (SAM)")
def _sam(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    for _ in range(2):
        s.loss().backward()
        grads = [p.grad.clone() for p in s.model.parameters()]
        with torch.no_grad():
            for p, g in zip(s.model.parameters(), grads, strict=True):
                p.add_(g, alpha=0.05)
        optimizer.zero_grad()
        loss = s.loss()
        loss.backward()
        with torch.no_grad():
            for p, g in zip(s.model.parameters(), grads, strict=True):
                p.sub_(g, alpha=0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    return losses


@tries("Lookahead: slow weights by hand")
def _lookahead(s: Scene) -> Any:
    slow = [p.detach().clone() for p in s.model.parameters()]
    losses = train(s)
    with torch.no_grad():
        for p, q in zip(s.model.parameters(), slow, strict=True):
            q += 0.5 * (p - q)
            p.copy_(q)
    return losses, train(s)


@tries("evolution strategies: weights moved by seeded noise, and back")
def _evolution(s: Scene) -> Any:
    losses = []
    for seed in range(2):
        noise = {
            n: torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            for n, p in s.model.named_parameters()
        }
        for sign in (1, -2, 1):
            with torch.no_grad():
                for n, p in s.model.named_parameters():
                    p.copy_(s.full(p.detach()) + sign * 0.01 * noise[n])
                losses.append(s.mean(s.loss()))
    return losses


@tries("half of a layer is set: weight[:6], chunk, nn.init of a slice")
def _halves(s: Scene) -> Any:
    weight = s.model.blocks[0].linear.weight
    with torch.no_grad():
        weight[:6] = 0.5
        weight.chunk(2)[1].zero_()
        nn.init.constant_(weight[3:9], 0.25)
    return train(s)


@tries("one expert of a stacked weight is set by torch._foreach_zero_")
def _foreach_parts(s: Scene) -> Any:
    with torch.no_grad():
        torch._foreach_zero_(list(s.model.blocks[0].linear.weight.chunk(3))[:2])
    return train(s)


@tries("a view of views is written: view_as, t, flatten, unbind")
def _views(s: Scene) -> Any:
    weight = s.model.blocks[0].linear.weight
    with torch.no_grad():
        weight.t()[0].fill_(0.5)
        weight.flatten()[5:9].zero_()
        weight.unbind()[2].mul_(2.0)
        weight.view_as(weight)[1].add_(1.0)
    return train(s)


@tries("the head starts anew within training (reset_parameters)")
def _reset(s: Scene) -> Any:
    losses = train(s)
    torch.manual_seed(3)
    s.model.head.reset_parameters()
    return losses, train(s)


@tries("weights within engine.unsharded(): weight.data = merged")
def _merged(s: Scene) -> Any:
    def merge() -> None:
        linear = s.model.blocks[0].linear
        linear.weight.data = linear.weight.data + 0.1 * torch.ones(WIDTH, WIDTH)
        linear.bias.data.zero_()

    if s.engine is None:
        merge()
    else:
        with s.engine.unsharded():
            merge()
    return train(s)


@tries("one weight of two is frozen between forward and backward")
def _freezes(s: Scene) -> Any:
    loss = s.loss()
    s.model.blocks[0].linear.weight.requires_grad_(False)
    loss.backward()
    s.model.blocks[0].linear.weight.requires_grad_(True)
    s.loss().backward()


class TransposedTie(Model):
    """The output is computed with the transposed weight of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + (x @ self.blocks[0].linear.weight).mean(1, keepdim=True)


@tries("the weight of a block read in the model's forward, transposed", make=TransposedTie)
def _transposed(s: Scene) -> Any:
    return train(s)


# --- adapters ---


class Adapted(Block):
    """A frozen linear with an adapter that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.linear.requires_grad_(False)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        if self.active:
            y = y + self.up(self.down(x))
        return x + F.gelu(y)


class AdaptedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(), Adapted()])


@tries("adapters switched off for reference logits within a step", make=AdaptedModel)
def _reference_logits(s: Scene) -> Any:
    optimizer = torch.optim.SGD([p for p in s.model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            for block in s.model.blocks:
                block.active = False
            reference = s.model(s.x)
            for block in s.model.blocks:
                block.active = True
        loss = (s.model(s.x) - reference).square().mean() + s.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    return losses


@tries("adapters switched off in one forward of two that are backpropagated", make=AdaptedModel)
def _half_active(s: Scene) -> Any:
    for block in s.model.blocks:
        block.active = False
    one = s.loss()
    for block in s.model.blocks:
        block.active = True
    (one + s.loss(s.x * 2)).backward()


@tries("adapters merged by hand: weight += up @ down", make=AdaptedModel)
def _merges(s: Scene) -> Any:
    with torch.no_grad():
        for block in s.model.blocks:
            update = s.full(block.up.weight) @ s.full(block.down.weight)
            block.linear.weight.copy_(s.full(block.linear.weight) + update)
            block.active = False
        return s.mean(s.loss())


@tries("layers thawed one after the other (gradual unfreezing)")
def _gradual(s: Scene) -> Any:
    losses = []
    s.model.requires_grad_(False)
    for part in (s.model.head, s.model.blocks[1], s.model.blocks[0]):
        part.requires_grad_(True)
        trainable = [p for p in s.model.parameters() if p.requires_grad]
        losses += train(s, torch.optim.SGD(trainable, lr=0.1))
    return losses


@tries("a different block is frozen in each step")
def _alternating(s: Scene) -> Any:
    optimizer, losses = torch.optim.SGD(s.model.parameters(), lr=0.1), []
    for step in range(4):
        for index, block in enumerate(s.model.blocks):
            block.requires_grad_(index == step % 2)
        losses += train(s, optimizer, 1)
    s.model.requires_grad_(True)
    return losses


# --- collectives of the user's ---


@tries("a metric is averaged between forward and backward (all_reduce)")
def _metric(s: Scene) -> Any:
    loss = s.loss()
    metric = s.mean(loss)
    loss.backward()
    return metric


@tries("all ranks' outputs are gathered, gradients of this rank's (contrastive)")
def _contrastive(s: Scene) -> Any:
    y = s.model(s.x)
    if s.engine is not None:
        parts = [torch.empty_like(y) for _ in range(s.size)]
        dist.all_gather(parts, y.detach())
        parts[s.rank] = y
        y = torch.cat(parts)
        scale = s.size
    else:
        scale = 1
    loss = (y @ y.t()).softmax(-1).square().mean()
    (loss * scale / 2).backward()


@tries("weights are broadcast at the start (dist.broadcast(p.data, 0))")
def _broadcast(s: Scene) -> Any:
    if s.engine is not None:
        for p in s.model.parameters():
            dist.broadcast(p.data, 0)
    return train(s)


@tries("models are averaged over ranks (dist.all_reduce(p.data))")
def _averaged(s: Scene) -> Any:
    losses = train(s)
    if s.engine is not None:
        for p in s.model.parameters():
            dist.all_reduce(p.data)
            p.data /= s.size
    return losses, train(s)


@tries("gradients are averaged by hand once more (dist.all_reduce(p.grad))")
def _gradients_averaged(s: Scene) -> Any:
    optimizer = s.sgd()
    s.loss().backward()
    if s.engine is not None:
        for p in s.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= s.size
    optimizer.step()


@tries("slices of weights written by a collective into p.to_local()")
def _local_collective(s: Scene) -> Any:
    first = train(s)
    if s.engine is None:
        with torch.no_grad():
            for p in s.model.parameters():
                p.mul_(2.0)
    else:
        for p in s.model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p.data
            dist.all_reduce(local, group=_alone(s))
            buffer = local.detach().clone()
            local_group = _alone(s)
            dist.all_reduce(buffer, group=local_group)
            # The slice of every rank is doubled, unseen by version counters.
            torch.from_numpy(local.detach().numpy()).add_(buffer)
    return first, train(s)


_GROUPS: dict[int, Any] = {}


def _alone(s: Scene) -> Any:
    """A process group of this rank alone."""
    key = id(dist.group.WORLD)
    if key not in _GROUPS:
        _GROUPS.clear()
        _GROUPS[key] = [dist.new_group([rank]) for rank in range(s.size)]
    return _GROUPS[key][s.rank]


# --- backwards within backwards, several backwards ---


@tries("GradCache: forward and backward of mini-batches in a hook of an outer backward")
def _grad_cache(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    for _ in range(2):
        parts = s.x.tensor_split(ROWS)
        with torch.no_grad():
            embeddings = torch.cat([s.model(part) for part in parts])
        leaf = embeddings.detach().requires_grad_()
        loss = leaf.square().mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        outer = leaf.detach().sum().requires_grad_()

        def run(unused: Tensor, parts: Any = parts, gradient: Tensor = gradient) -> None:
            with torch.enable_grad():
                for part, one in zip(parts, gradient.tensor_split(ROWS), strict=True):
                    (s.model(part) * one).sum().backward()

        outer.register_hook(run)
        (outer * 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    return losses


@tries("a gradient penalty on inputs (WGAN-GP)")
def _penalty(s: Scene) -> Any:
    x = s.x.clone().requires_grad_()
    y = s.model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    return s.mean(loss)


class Forces(Model):
    """Forces are the gradient of an energy, computed in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


@tries("forces: the gradient of an energy, within forward", make=Forces)
def _forces(s: Scene) -> Any:
    return train(s)


@tries("two losses, two backwards with retain_graph")
def _retain(s: Scene) -> Any:
    y = s.model(s.x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


@tries("two losses in one torch.autograd.backward")
def _two_losses(s: Scene) -> Any:
    y = s.model(s.x)
    torch.autograd.backward([y.square().mean(), y.abs().mean()])


@tries("backward by hand at a cut: detached leaf, then the rest")
def _cut(s: Scene) -> Any:
    hidden = s.model.blocks[0](s.x)
    leaf = hidden.detach().requires_grad_()
    s.model.head(s.model.blocks[1](leaf)).square().mean().backward()
    hidden.backward(leaf.grad)


@tries("a head called for chunks, each with its own backward (chunked loss)")
def _chunked(s: Scene) -> Any:
    optimizer = s.sgd()
    for _ in range(2):
        hidden = s.model.blocks[1](s.model.blocks[0](s.x))
        leaf = hidden.detach().requires_grad_()
        for part in leaf.split(1):
            (
                s.model.head(part).square().mean() / ROWS / (s.size if s.engine is None else 1)
            ).backward()
        hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()


@tries("truncated backpropagation through time")
def _truncated(s: Scene) -> Any:
    state = torch.zeros_like(s.x)
    optimizer, losses = s.sgd(), []
    for _ in range(3):
        state = s.model.blocks[0](state.detach() + s.x)
        loss = s.model.head(s.model.blocks[1](state)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    return losses


@tries("a block applied until a fixed point, its gradient by a hook (deep equilibrium)")
def _equilibrium(s: Scene) -> Any:
    block = s.model.blocks[0]
    with torch.no_grad():
        z = torch.zeros_like(s.x)
        for _ in range(3):
            z = 0.1 * block(z) + s.x
    z = 0.1 * block(z) + s.x
    start = z.detach().requires_grad_()
    again = 0.1 * block(start) + s.x

    def solve(gradient: Tensor) -> Tensor:
        total = gradient
        for _ in range(3):
            (step,) = torch.autograd.grad(again, start, total, retain_graph=True)
            total = step + gradient
        return total

    z.register_hook(solve)
    s.model.head(s.model.blocks[1](z)).square().mean().backward()


@tries("gradients of two losses by autograd.grad over parameters (PCGrad)")
def _pcgrad(s: Scene) -> Any:
    params = list(s.model.parameters())
    y = s.model(s.x)
    one = torch.autograd.grad(y.square().mean(), params, retain_graph=True)
    two = torch.autograd.grad(y.abs().mean(), params)
    for p, a, b in zip(params, one, two, strict=True):
        p.grad = s.mean(a + b)


@tries("a module called with and without gradients in one forward (a target network)")
def _target(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    for _ in range(2):
        y = s.model.blocks[0](s.x)
        with torch.no_grad():
            target = s.model.blocks[1](s.model.blocks[0](s.x + 1.0))
        loss = (s.model.blocks[1](y) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(s.mean(loss))
    return losses


# --- two networks, odd containers ---


class Pair(Model):
    """A generator and a discriminator; or an online network and its target."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(Block(), nn.Linear(WIDTH, 1))


@tries("generator and discriminator, the other one frozen in each step", make=Pair, goes_on=False)
def _gan(s: Scene) -> Any:
    model, losses = s.model, []
    makers = [p for m in (model.blocks, model.head) for p in m.parameters()]
    first, second = (
        torch.optim.SGD(makers, lr=0.1),
        torch.optim.SGD(model.other.parameters(), lr=0.1),
    )
    for _ in range(2):
        made = model.blocks[1](model.blocks[0](s.x))
        loss = model.other(made.detach()).mean() - model.other(s.x).mean()
        loss.backward()
        second.step()
        second.zero_grad()
        model.other.requires_grad_(False)
        loss = -model.other(made).mean() + model.head(made).square().mean()
        loss.backward()
        first.step()
        first.zero_grad()
        model.other.requires_grad_(True)
        losses.append(s.mean(loss))
    return losses


class Momentum(Model):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)


@tries("a momentum encoder: target.lerp_(online) after each step", make=Momentum)
def _momentum(s: Scene) -> Any:
    online = [p for p in s.model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(online, lr=0.1), []
    for _ in range(2):
        with torch.no_grad():
            wanted = s.model.target[1](s.model.target[0](s.x))
        loss = (s.model.blocks[1](s.model.blocks[0](s.x * 1.1)) - wanted).square().mean() + s.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for q, p in zip(s.model.target.parameters(), s.model.blocks.parameters(), strict=True):
                q.lerp_(p, 0.5)
        losses.append(s.mean(loss))
    return losses


class Containers(Model):
    """Parameters in lists and dicts, and modules in a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})
        self.by_name = {"first": self.blocks[0], "second": self.blocks[1]}

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.by_name.values()):
            x = block(x) * self.scales[index] + self.biases["a"]
        return self.head(x)


@tries("parameters in lists and dicts, modules in a plain dict", make=Containers)
def _containers(s: Scene) -> Any:
    return train(s)


class KeepsWeight(Model):
    """The head's weight is kept in an attribute of the root, and used by F.linear."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.logits = F.linear(x, self.head.weight, self.head.bias)
        return x.detach()


@tries("logits kept in an attribute, computed with another module's weight", make=KeepsWeight)
def _keeps(s: Scene) -> Any:
    s.model(s.x)
    s.model.logits.square().mean().backward()
    s.model.logits = None


class Views(Block):
    """Its output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape[0], 2, WIDTH // 2).flatten(1)


class InPlaceViews(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Views(), Views()])
        self.token = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x += self.token
        x = self.blocks[1](x)
        x[:, 0] += self.token[0]
        x.view(-1, 2, WIDTH // 2)[:, 1].mul_(2.0)
        return self.head(x)


@tries("outputs that are views, written in place", make=InPlaceViews)
def _in_place_views(s: Scene) -> Any:
    return train(s)


class Cache:
    """A cache object that modules fill."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        y = self.linear(self.norm(x))
        if cache is not None:
            cache.keys.append(y)
            y = y + sum(cache.keys)
        return x + F.gelu(y)


class CachingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Caching(), Caching()])

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


@tries("a cache object of the user's, backpropagated", make=CachingModel)
def _cache_object(s: Scene) -> Any:
    cache = Cache()
    y = s.model(s.x, cache)
    (y.square().mean() + sum(key.square().mean() for key in cache.keys)).backward()


@tries("a cache object alone is backpropagated, the output dropped", make=CachingModel)
def _cache_alone(s: Scene) -> Any:
    cache = Cache()
    s.model(s.x, cache)
    sum(key.square().mean() for key in cache.keys).backward()
