"""Programs that people write around a model, and those that public reports about sharding engines
describe.

Those with tests of their own are listed by hand in ``docs/internals/promises.md``.
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
from torch.optim import SGD

from tests.promises.scene import ROWS, WIDTH, Block, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries

# --- weights by hand ---


def _set_data(s: Scene) -> None:
    for p in s.model.parameters():
        p.data = torch.full(tuple(p.shape), 0.05)


def _scale_data(s: Scene) -> None:
    s.backward()
    for p in s.model.parameters():
        p.data.mul_(0.5)
        p.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def _copy(s: Scene) -> None:
    for p in s.model.parameters():
        whole = s.full(p.detach()).clone()
        for factor in (0.01, -0.02, 0.01):  # moved by noise, and back
            p.copy_(s.full(p.detach()) + factor * torch.sin(torch.ones(p.shape).cumsum(0)))
        p.copy_(whole * 0.5)


def _by_hand(s: Scene) -> None:
    for _ in range(2):
        s.backward()
        with torch.no_grad():
            for p in s.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


def _of_another(s: Scene) -> None:
    torch.default_generator.manual_seed(3)
    teacher = Model()
    s.model.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        target = teacher(s.x)
    F.mse_loss(s.model(s.x), target + 1).backward()


catalogue.changes(
    {
        "p.data = ...": _set_data,
        ("p.data.mul_()", "weights clamped after each step (p.data.clamp_)"): _scale_data,
        (
            "p.copy_() of a whole tensor",
            "evolution strategies: weights moved by seeded noise, and back",
        ): _copy,
        "SGD by hand: p -= lr * p.grad": _by_hand,
        "weights of an unsharded model: teacher and student": _of_another,
    }
)


@tries(
    "weights swapped with their average for an evaluation (p.data)",
    "an average of weights by hand (EMA)",
    "an average by torch._foreach_lerp_, copied in and out",
    "Lookahead: slow weights by hand",
    "sharpness-aware minimisation (SAM)",
)
def _averages(s: Scene) -> Any:
    params, losses = list(s.model.parameters()), s.train()
    average = [p.detach().clone() for p in params]
    for _ in range(2):  # swapped in, and out
        for index, p in enumerate(params):
            p.data, average[index] = average[index], p.data
        with torch.no_grad():
            losses.append(s.mean_loss())
    losses += s.train()
    with torch.no_grad():
        torch._foreach_lerp_(average, params, 0.5)
        for each, p in zip(average, params, strict=True):
            each.mul_(0.9).add_(p.detach(), alpha=0.1)
        kept = [p.clone() for p in params]
        torch._foreach_copy_(params, average)
        losses.append(s.mean_loss())
        torch._foreach_copy_(params, kept)
        for each, p in zip(average, params, strict=True):
            each += 0.5 * (p - each)
            p.copy_(each)
    optimizer = s.sgd()
    s.backward()
    grads = [p.grad.clone() for p in params]
    for sign in (1, -1):
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.add_(g, alpha=0.05 * sign)
        if sign == 1:
            optimizer.zero_grad()
            s.backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses, average, s.train()


# --- models of other forms ---


class Containers(Model):
    """Parameters in lists and dicts, modules in a plain dict; the output is computed with the
    transposed weight of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})
        self.by_name = {"first": self.blocks[0], "second": self.blocks[1]}

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.by_name.values()):
            x = block(x) * self.scales[index] + self.biases["a"]
        return self.head(x) + (x @ self.blocks[0].linear.weight).mean(1, keepdim=True)


class Forces(Model):
    """Forces are the gradient of an energy, computed in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


def with_blocks(block: type[nn.Module]) -> type[Model]:
    """A model class with blocks of this class."""

    class Variant(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block(), block()])

    return Variant


class Caching(Block):
    """Its buffers are made anew, moved, and written in forward; a function of its weight is kept
    until the user drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH) % 3 > 0).view(WIDTH, WIDTH))
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        size = 4 * int(self.steps)
        if self.table is None or len(self.table) < size:
            self.table = torch.arange(size, dtype=torch.float32) / size
        self.average.lerp_(self.linear.weight.detach().mean(0), 0.1)
        if self.cache is None:
            self.cache = self.linear.weight.detach().t()
        y = F.linear(self.norm(x), self.linear.weight * self.mask, self.linear.bias)
        return x + y * self.table[-1] + self.average + self.norm(x) @ self.cache


@tries(
    "buffers that grow, count, and follow weights in forward",
    "pruning by a mask in forward, applied to weights at the end",
    "a view of a weight cached for the microbatches of a step",
    make=with_blocks(Caching),
)
def _caches(s: Scene) -> Any:
    optimizer, losses = SGD(s.model.parameters(), lr=0.1), []
    for _ in range(2):
        for factor in (1.0, 0.5):
            loss = s.loss(s.x * factor) / 2
            loss.backward()
            losses.append(s.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        for block in s.model.blocks:
            block.cache = None
            with torch.no_grad():
                block.linear.weight.mul_(block.mask)
    return sum(losses)


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


class _Product(Function):
    """The gradient of the weight, if it is needed, is written into ``empty_like`` of the weight."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        is_needed = ctx.needs_input_grad[1]
        return grad @ weight, torch.empty_like(weight).copy_(grad.t() @ x) if is_needed else None


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
    """Rounds its weight straight through, and computes with it by the functions above."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        rounded = weight + ((weight * 16).round() / 16 - weight).detach()
        y = F.linear(self.norm(x), rounded, self.linear.bias)
        y = y + 0.1 * F.linear(x, 2 * _Identity.apply(weight))
        return x + F.gelu(_Dirty.apply(y) + _Product.apply(self.norm(x), weight))


class Functions(with_blocks(FunctionsBlock)):  # type: ignore[misc]
    """A function in the root's forward reads the head's weight, as fused losses do."""

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


class ReversibleBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        a, b = _Coupling.apply(self.norm(x), x * 2, nn.GELU(), self.linear)
        return a + b


class Reversible(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        a, b = _Coupling.apply(x, x * 2, *self.blocks)
        return self.head(a + b)


catalogue.trains(
    {
        (
            "parameters in lists and dicts, modules in a plain dict",
            "the weight of a block read in the model's forward, transposed",
        ): Containers,
        "forces: the gradient of an energy, within forward": Forces,
        ("a reversible network", "a checkpoint by hand around units"): Reversible,
        "a checkpoint by hand within a unit": with_blocks(ReversibleBlock),
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
def hooks(s: Scene) -> Any:
    """Hooks of every kind, and training after they are removed."""
    blocks, seen, names = s.model.blocks, [], []
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: names.append(type(module).__name__)
    )
    handles = [
        everywhere,
        blocks[0].register_forward_hook(lambda m, args, out: out * 0.5),
        blocks[0].linear.register_forward_hook(
            lambda m, args, out: seen.append(m.weight.detach().clone())
        ),
        blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
        blocks[0].register_full_backward_hook(
            lambda m, given, out: seen.append(s.per_row(out[0]).clone())
        ),
        blocks[1].register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,)),
        blocks[1].register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,)),
        s.model.head.register_backward_hook(lambda m, given, out: seen.append(s.per_row(out[0]))),
    ]
    try:
        losses = s.train()
    finally:
        for handle in handles:
            handle.remove()
    s.backward(s.x.requires_grad_())
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


# --- collectives of the user's ---


@tries("all ranks' outputs are gathered, gradients of this rank's (contrastive)")
def _contrastive(s: Scene) -> Any:
    y, scale = s.model(s.x), 1
    if s.engine is not None:
        parts = [torch.empty_like(y) for _ in range(s.size)]
        dist.all_gather(parts, y.detach())
        parts[s.rank] = y
        y, scale = torch.cat(parts), s.size
    loss = (y @ y.t()).softmax(-1).square().mean()
    (loss * scale / 2).backward()


def _of_each(collective: Callable[[Any], object]) -> Any:
    """A collective for each parameter of a sharded model."""

    def change(s: Scene) -> None:
        s.backward()
        for p in s.model.parameters() if s.engine is not None else ():
            collective(p)

    return change


catalogue.changes(
    {
        "weights are broadcast at the start (dist.broadcast(p.data, 0))": _of_each(
            lambda p: dist.broadcast(p.data, 0)
        ),
        "models are averaged over ranks (dist.all_reduce(p.data))": _of_each(
            lambda p: dist.all_reduce(p.data.div_(dist.get_world_size()))
        ),
        "gradients are averaged by hand once more (dist.all_reduce(p.grad))": _of_each(
            lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size()))
        ),
    }
)


# --- several backwards, two networks ---


@tries(
    "backward by hand at a cut: detached leaf, then the rest",
    "a head called for chunks, each with its own backward (chunked loss)",
    "truncated backpropagation through time",
    "a module called with and without gradients in one forward (a target network)",
)
def _parts(s: Scene) -> Any:
    (first, second), head = s.model.blocks, s.model.head
    scale = 1 / ROWS / (s.size if s.engine is None else 1)
    states = [torch.zeros_like(s.x)]

    def truncated() -> Tensor:
        states.append(first(states[-1].detach() + s.x))
        return head(second(states[-1])).square().mean()  # type: ignore[no-any-return]

    def of_a_target() -> Tensor:
        y = first(s.x)
        with torch.no_grad():
            target = second(first(s.x + 1.0))
        return (second(y) - target).square().mean()  # type: ignore[no-any-return]

    hidden = first(s.x)
    leaf = hidden.detach().requires_grad_()
    last = second(leaf)
    cut = last.detach().requires_grad_()
    for part in cut.split(1):
        (head(part).square().mean() * scale).backward()
    last.backward(cut.grad)
    hidden.backward(leaf.grad)
    return s.train(steps=3, loss=truncated), s.train(s.sgd(), loss=of_a_target)


class Pair(Model):
    """A generator and a discriminator, and a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)


@tries(
    "generator and discriminator, the other one frozen in each step",
    "a momentum encoder: target.lerp_(online) after each step",
    make=Pair,
    goes_on=False,
)
def _pair(s: Scene) -> Any:
    model, losses = s.model, []
    makers = [p for m in (model.blocks, model.head) for p in m.parameters()]
    first, second = (SGD(each, 0.1) for each in (makers, model.other.parameters()))
    for _ in range(2):
        made = model.blocks[1](model.blocks[0](s.x))
        s.train(second, 1, lambda y=made: model.other(y.detach()).mean() - model.other(s.x).mean())
        model.other.requires_grad_(False)
        with torch.no_grad():
            wanted = model.target[1](model.target[0](s.x))
        loss = model.head(made).square().mean() - model.other(made).mean()
        loss = loss + (made * 1.1 - wanted).square().mean()
        losses += s.train(first, 1, lambda loss=loss: loss)
        model.other.requires_grad_(True)
        with torch.no_grad():
            for q, p in zip(model.target.parameters(), model.blocks.parameters(), strict=True):
                q.lerp_(p, 0.5)
    return losses
