"""Programs of the kinds that public bug reports about sharding engines describe.

Functions of the user's own, hooks at odd places, weights that are written outside of an optimizer,
collectives of the user's, backwards within backwards, and tensors that modules keep.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from tests.promises.scene import ROWS, WIDTH, Block, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries

catalogue.elsewhere(
    "tests/extensions/nested_backwards/test_nested_backwards.py",
    "GradCache: forward and backward of mini-batches in a hook of an outer backward",
    "a tiled MLP, which is the unit",
    "a block applied until a fixed point, its gradient by a hook (deep equilibrium)",
)
catalogue.elsewhere(
    "tests/promises/test_kept_tensors.py",
    "early exits: kept tensors computed after the output",
    "early exits alone: the outputs get no gradient",
    "early exits, checkpointed by hand around blocks",
    "local losses: each unit returns a detached output",
    "logits kept in an attribute, computed with another module's weight",
    "outputs that are views, written in place",
)
catalogue.elsewhere(
    "tests/extensions/written_weights/test_written_weights.py",
    "forced weight normalisation in forward",
    "a forward pre-hook that clamps weights",
    "a pre-hook of the model that clamps all weights",
)
catalogue.elsewhere(
    "tests/flat_dtensor/test_gathered.py",
    "half of a layer is set: weight[:6], chunk, nn.init of a slice",
    "one expert of a stacked weight is set by torch._foreach_zero_",
)
catalogue.elsewhere(
    "tests/extensions/unsharded/test_unsharded.py",
    "weights within engine.unsharded(): weight.data = merged",
)
catalogue.elsewhere(
    "tests/promises/test_dtensor_face.py",
    "slices of weights written by a collective into p.to_local()",
)
catalogue.elsewhere(
    "tests/promises/test_outside_reads.py", "a gradient penalty on inputs (WGAN-GP)"
)
catalogue.elsewhere(
    "tests/promises/test_outside_reads.py",
    "gradients of two losses by autograd.grad over parameters (PCGrad)",
    "a fused loss outside of the model's forward, with the head's weight",
    "a Function of a norm's weight, outside of any unit",
    outcome="right at `no_shard`, else raises",
)


class Variant(Model):
    """A model whose second block is of the class that the attribute ``inner`` names."""

    inner: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.inner()


def variant(inner: type[nn.Module]) -> type[Model]:
    """A model class with a block of class ``inner``."""
    return type(f"With{inner.__name__}", (Variant,), {"inner": inner})


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


class _Identity(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class _Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class FunctionsBlock(Block):
    """Rounds one weight straight through, and computes with others by the functions above."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        rounded = weight + ((weight * 16).round() / 16 - weight).detach()
        y = F.linear(self.norm(x), rounded, self.linear.bias)
        y = y + 0.1 * F.linear(x, 2 * _Identity.apply(weight))
        y = _Dirty.apply(y) + _SetupContext.apply(self.norm(x), weight)
        return x + _Scaled.apply(F.gelu(y), self.norm.weight)


class Functions(variant(FunctionsBlock)):  # type: ignore[misc]
    """The head's weight is used by a function in the root's forward, as fused losses do."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        makers = (torch.zeros_like, lambda weight: weight.new_zeros(weight.shape))
        return sum(_LinearLoss.apply(x, self.head.weight, make) for make in makers).sqrt()  # type: ignore[no-any-return]


@tries(
    "a fused loss: gradients of the head in forward, by new_zeros",
    "a fused loss: gradients of the head in forward, by zeros_like",
    "a Function whose gradient is written into empty_like",
    "a Function with setup_context and needs_input_grad",
    "a Function that returns a view of a weight",
    "a Function that marks its input dirty",
    "quantisation-aware training (straight-through rounding)",
    make=Functions,
)
def _functions(s: Scene) -> Any:
    weight = s.model.blocks[1].linear.weight.requires_grad_(False)
    first = s.train()
    weight.requires_grad_(True)
    losses = s.train()
    s.backward()
    return first, losses


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


catalogue.trains(
    {
        "a checkpoint by hand around units": AgainOutside,
        "a checkpoint by hand within a unit": variant(AgainInside),
        "a reversible network": Reversible,
    }
)

# --- hooks ---


@tries(
    "a forward hook that replaces outputs, removed later",
    "a forward pre-hook that replaces inputs",
    "full backward hooks: one reads, one scales",
    "a full backward pre-hook that scales",
    "a hook on every module (register_module_forward_hook)",
)
def _hooks(s: Scene) -> Any:
    blocks, seen, names = s.model.blocks, [], []
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: names.append(type(module).__name__)
    )
    handles = [
        everywhere,
        blocks[0].register_forward_hook(lambda m, args, out: out * 0.5),
        blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
        blocks[0].register_full_backward_hook(
            lambda m, given, out: seen.append(s.per_row(out[0]).clone())
        ),
        blocks[1].register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,)),
        blocks[1].register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,)),
    ]
    try:
        losses = s.train()
    finally:
        for handle in handles:
            handle.remove()
    return losses, s.train(), seen, names


@tries(
    "an activation that a hook keeps, with retain_grad",
    "a forward hook that computes an auxiliary loss of a unit's output",
    "register_multi_grad_hook over activations",
)
def _kept_by_hooks(s: Scene) -> Any:
    kept: list[Tensor] = []
    losses: list[Tensor] = []
    counts: list[int] = []

    def keep(module: Any, args: Any, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)
        losses.append(module.linear(out).square().mean())

    for block in s.model.blocks:
        block.register_forward_hook(keep)
    loss = s.loss()
    torch.autograd.graph.register_multi_grad_hook(
        kept, lambda grads: counts.append(len([each for each in grads if each is not None]))
    )
    (loss + losses[0]).backward()
    return [s.per_row(each.grad) for each in kept], counts  # type: ignore[arg-type]


@tries("saved_tensors_hooks around forward: copies, and save_on_cpu")
def _saved_hooks(s: Scene) -> Any:
    graph = torch.autograd.graph
    with graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), graph.save_on_cpu():
        loss = s.loss()
    loss.backward()


# --- buffers ---


class Counting(Block):
    """Its buffers are made anew, moved, and written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH) % 3 > 0).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        size = 4 * int(self.steps)
        if self.table is None or len(self.table) < size:
            self.table = torch.arange(size, dtype=torch.float32) / size
        self.average.lerp_(self.linear.weight.detach().mean(0), 0.1)
        y = F.linear(self.norm(x), self.linear.weight * self.mask, self.linear.bias)
        return x + y * self.table[-1] + self.average


@tries(
    "buffers that grow, count, and follow weights in forward",
    "pruning by a mask in forward, applied to weights at the end",
    make=variant(Counting),
)
def _buffers(s: Scene) -> Any:
    losses = s.train(steps=3)
    with torch.no_grad():
        s.model.blocks[1].linear.weight.mul_(s.model.blocks[1].mask)
    return losses, s.train()


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


@tries("weights swapped with their average for an evaluation (p.data)")
def _swapped(s: Scene) -> Any:
    named = dict(s.model.named_parameters())
    average = {n: p.detach().clone() for n, p in named.items()}
    losses = s.train()
    for name, p in named.items():
        average[name].lerp_(p.detach(), 0.5)
    evaluated = []
    for _ in range(2):  # swapped in, and out
        for name, p in named.items():
            p.data, average[name] = average[name], p.data
        with torch.no_grad():
            evaluated.append(s.mean_loss())
    return losses, evaluated, s.train()


@tries(
    "an average of weights by hand (EMA)",
    "an average by torch._foreach_lerp_, copied in and out",
    "Lookahead: slow weights by hand",
)
def _foreach(s: Scene) -> Any:
    params = list(s.model.parameters())
    average = [p.detach().clone() for p in params]
    losses = s.train()
    with torch.no_grad():
        torch._foreach_lerp_(average, params, 0.5)
        for each, p in zip(average, params, strict=True):
            each.mul_(0.9).add_(p.detach(), alpha=0.1)
        kept = [p.clone() for p in params]
        torch._foreach_copy_(params, average)
        evaluated = s.mean_loss()
        torch._foreach_copy_(params, kept)
        for each, p in zip(average, params, strict=True):
            each += 0.5 * (p - each)
            p.copy_(each)
    return losses, evaluated, average, s.train()


@tries("sharpness-aware minimisation (SAM)")
def _sam(s: Scene) -> Any:
    optimizer, losses = s.sgd(), []
    params = list(s.model.parameters())
    for _ in range(2):
        s.backward()
        grads = [p.grad.clone() for p in params]
        for sign in (1, -1):
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.add_(g, alpha=0.05 * sign)
            if sign == 1:
                optimizer.zero_grad()
                losses.append(s.mean_loss())
                s.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@tries("a view of views is written: view_as, t, flatten, unbind")
@torch.no_grad()
def _views(s: Scene) -> Any:
    weight = s.model.blocks[0].linear.weight
    weight.t()[0].fill_(0.5)
    weight.flatten()[5:9].zero_()
    weight.unbind()[2].mul_(2.0)
    weight.view_as(weight)[1].add_(1.0)


@tries("the head starts anew within training (reset_parameters)")
def _reset(s: Scene) -> Any:
    losses = s.train()
    torch.manual_seed(3)
    s.model.head.reset_parameters()
    return losses, s.train()


@tries("one weight of two is frozen between forward and backward")
def _freezes(s: Scene) -> Any:
    loss = s.loss()
    s.model.blocks[0].linear.weight.requires_grad_(False)
    loss.backward()
    s.model.blocks[0].linear.weight.requires_grad_(True)
    s.backward()


class TransposedTie(Model):
    """The output is computed with the transposed weight of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + (x @ self.blocks[0].linear.weight).mean(1, keepdim=True)


catalogue.trains({"the weight of a block read in the model's forward, transposed": TransposedTie})


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


def _switch(s: Scene, active: bool) -> None:
    for block in s.model.blocks:
        block.active = active


@tries(
    "adapters switched off for reference logits within a step",
    "adapters switched off in one forward of two that are backpropagated",
    "adapters merged by hand: weight += up @ down",
    make=AdaptedModel,
)
def _adapters(s: Scene) -> Any:
    def loss() -> Tensor:
        _switch(s, False)
        with torch.no_grad():
            reference = s.model(s.x)
        one = s.loss()
        _switch(s, True)
        return (s.model(s.x) - reference).square().mean() + s.loss(s.x * 2) + one

    losses = s.train(loss=loss)
    loss().backward()
    with torch.no_grad():
        for block in s.model.blocks:
            update = s.full(block.up.weight) @ s.full(block.down.weight)
            block.linear.weight.copy_(s.full(block.linear.weight) + update)
            block.active = False
        return losses, s.mean_loss()


@tries(
    "layers thawed one after the other (gradual unfreezing)",
    "a different block is frozen in each step",
)
def _gradual(s: Scene) -> Any:
    losses = []
    s.model.requires_grad_(False)
    for part in (s.model.head, s.model.blocks[1], s.model.blocks[0]):
        part.requires_grad_(True)
        losses += s.train()
    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    for step in range(4):
        for index, block in enumerate(s.model.blocks):
            block.requires_grad_(index == step % 2)
        losses += s.train(optimizer, 1)
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


def _of_ranks(call: Callable[[Tensor], object]) -> Any:
    """A trial of a collective for each parameter of a sharded model, between steps."""

    def trial(s: Scene) -> Any:
        losses = s.train()
        s.backward()
        for p in s.model.parameters() if s.engine is not None else ():
            call(p)
        return losses, s.train()

    return trial


def _average(p: Tensor) -> None:
    dist.all_reduce(p.data)
    p.data /= dist.get_world_size()


def _average_gradient(p: Any) -> None:
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


catalogue.table(
    {
        "weights are broadcast at the start (dist.broadcast(p.data, 0))": _of_ranks(
            lambda p: dist.broadcast(p.data, 0)
        ),
        "models are averaged over ranks (dist.all_reduce(p.data))": _of_ranks(_average),
        "gradients are averaged by hand once more (dist.all_reduce(p.grad))": _of_ranks(
            _average_gradient
        ),
    }
)


# --- backwards within backwards, several backwards ---


class Forces(Model):
    """Forces are the gradient of an energy, computed in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


catalogue.trains({"forces: the gradient of an energy, within forward": Forces})


@tries(
    "two losses, two backwards with retain_graph",
    "two losses in one torch.autograd.backward",
)
def _two_losses(s: Scene) -> Any:
    y = s.model(s.x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()
    y = s.model(s.x)
    torch.autograd.backward([y.square().mean(), y.abs().mean()])


@tries(
    "backward by hand at a cut: detached leaf, then the rest",
    "a head called for chunks, each with its own backward (chunked loss)",
)
def _chunked(s: Scene) -> Any:
    optimizer, scale = s.sgd(), 1 / ROWS / (s.size if s.engine is None else 1)
    for _ in range(2):
        hidden = s.model.blocks[0](s.x)
        leaf = hidden.detach().requires_grad_()
        last = s.model.blocks[1](leaf)
        cut = last.detach().requires_grad_()
        for part in cut.split(1):
            (s.model.head(part).square().mean() * scale).backward()
        last.backward(cut.grad)
        hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()


@tries("truncated backpropagation through time")
def _truncated(s: Scene) -> Any:
    states = [torch.zeros_like(s.x)]

    def loss() -> Tensor:
        states.append(s.model.blocks[0](states[-1].detach() + s.x))
        return s.model.head(s.model.blocks[1](states[-1])).square().mean()  # type: ignore[no-any-return]

    return s.train(steps=3, loss=loss)


@tries("a module called with and without gradients in one forward (a target network)")
def _target(s: Scene) -> Any:
    first, second = s.model.blocks

    def loss() -> Tensor:
        y = first(s.x)
        with torch.no_grad():
            target = second(first(s.x + 1.0))
        return (second(y) - target).square().mean()  # type: ignore[no-any-return]

    return s.train(s.sgd(), loss=loss)


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
    first, second = (torch.optim.SGD(each, 0.1) for each in (makers, model.other.parameters()))
    for _ in range(2):
        made = model.blocks[1](model.blocks[0](s.x))
        s.train(second, 1, lambda y=made: model.other(y.detach()).mean() - model.other(s.x).mean())
        model.other.requires_grad_(False)
        loss = -model.other(made).mean() + model.head(made).square().mean()
        losses += s.train(first, 1, lambda loss=loss: loss)
        model.other.requires_grad_(True)
    return losses


class Momentum(Model):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)


@tries("a momentum encoder: target.lerp_(online) after each step", make=Momentum)
def _momentum(s: Scene) -> Any:
    (first, second), (target1, target2) = s.model.blocks, s.model.target
    losses = []

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = target2(target1(s.x))
        return (second(first(s.x * 1.1)) - wanted).square().mean() + s.loss()  # type: ignore[no-any-return]

    for _ in range(2):
        losses += s.train(steps=1, loss=loss)
        with torch.no_grad():
            for q, p in zip(s.model.target.parameters(), s.model.blocks.parameters(), strict=True):
                q.lerp_(p, 0.5)
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


catalogue.trains({"parameters in lists and dicts, modules in a plain dict": Containers})


class Cache:
    """A cache object that modules fill."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def loss(self) -> Tensor:
        return torch.stack([key.square().mean() for key in self.keys]).sum()


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
@tries("a cache object alone is backpropagated, the output dropped", make=CachingModel)
def _cache_object(s: Scene) -> Any:
    cache, alone = Cache(), Cache()
    y = s.model(s.x, cache)
    (y.square().mean() + cache.loss()).backward()
    s.model(s.x, alone)
    alone.loss().backward()
