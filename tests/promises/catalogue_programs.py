"""What people write around a model: loops of trainers, averages, adapters, odd inputs, outputs."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.promises.scene import WIDTH, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries

catalogue.elsewhere(
    "tests/promises/test_gradients.py",
    "gradient accumulation without no_sync",
    "p.grad by hand: mul_, a new tensor, None",
    "an L2 term over model.parameters() in the loss",
    "an output within a class of the user's",
    "an auxiliary loss kept on a module",
    "only a part of the model is trained (model.blocks[0](x))",
)
catalogue.elsewhere(
    "tests/promises/test_param_hooks.py",
    "p.register_hook that changes the gradient",
    "p.register_hook before shard",
    "p.register_post_accumulate_grad_hook that steps an optimizer",
)
catalogue.elsewhere(
    "tests/promises/test_inputs.py",
    "lists and dicts that units fill",
    "in-place operations on two inputs of a unit",
)
catalogue.elsewhere("tests/promises/test_outside_reads.py", "a 0-d parameter read outside forward")
catalogue.elsewhere("tests/flat_dtensor/test_gathered.py", "one row of a weight is written")
catalogue.elsewhere(
    "tests/extensions/parameter_guard/test_modules.py",
    "adapters (LoRA) put in after shard",
    outcome="raises",
)


# --- loops ---


@tries("gradient accumulation, clip_grad_norm_, a scheduler")
def _trainer(s: Scene) -> Any:
    optimizer = AdamW(s.model.parameters(), lr=0.01, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms = []
    for _ in range(3):
        s.backward()
        norms.append(s.full(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return norms


@tries("evaluation between steps: eval(), inference_mode, train()")
def _evaluation(s: Scene) -> Any:
    optimizer, seen = s.sgd(), []
    for _ in range(2):
        s.step(optimizer)
        s.model.eval()
        with torch.inference_mode():
            seen.append(s.rows(s.model(s.x)).clone())
        s.model.train()
    return seen


@tries(
    "a forward without gradients between forward and backward",
    "a forward whose output is dropped",
    "a forward under set_grad_enabled(False), then True",
)
def _between(s: Scene) -> Any:
    loss, found = s.loss(), []
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            found.append(s.rows(s.model(s.x * 2)))
    loss.backward()
    s.backward()
    return found


@tries("two forwards, then two backwards in order")
@tries("two forwards, then two backwards in reverse")
@tries("two forwards, one backward of the sum")
def _two(s: Scene) -> Any:
    for order in ([0, 1], [1, 0]):
        losses = [s.loss(), s.loss(s.x * 2)]
        for index in order:
            losses[index].backward()
    (s.loss() + s.loss(s.x * 2)).backward()


@tries("two optimizers over parts of the model")
def _two_optimizers(s: Scene) -> Any:
    optimizers = [SGD(s.model.blocks.parameters(), 0.1), AdamW(s.model.head.parameters(), 0.01)]
    for _ in range(2):
        s.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@tries("another optimizer in the middle", "groups without weight decay, by name and ndim")
def _groups(s: Scene) -> Any:
    named = list(s.model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return s.train(s.sgd(), 1), s.train(AdamW(groups, lr=0.01))


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


catalogue.changes(
    {
        "p.data = ...": _set_data,
        ("p.data.mul_()", "weights clamped after each step (p.data.clamp_)"): _scale_data,
        (
            "p.copy_() of a whole tensor",
            "evolution strategies: weights moved by seeded noise, and back",
        ): _copy,
        "SGD by hand: p -= lr * p.grad": _by_hand,
    }
)


@tries("weights by numpy()")
def _numpy(s: Scene) -> Any:
    return torch.from_numpy(s.model.head.weight.detach().cpu().numpy())


@tries("parameters as keys, hash and equality of objects", "number of parameters, bytes, shapes")
def _keys(s: Scene) -> Any:
    names = {p: name for name, p in s.model.named_parameters()}
    s.backward()
    parameters = list(s.model.parameters())
    return (
        [names[p] for p in parameters],
        [(p.numel(), p.numel() * p.element_size(), tuple(p.shape)) for p in parameters],
        [(isinstance(p, nn.Parameter), p.is_leaf) for p in parameters],
        len(set(parameters)),
    )


@tries(
    "a statistic of weights and gradients: norm, mean, std, max",
    "one row or element of a weight is read",
    "the standard deviation of a weight",
    "foreach functions over gradients",
)
@torch.no_grad()
def _statistics(s: Scene) -> Any:
    with torch.enable_grad():
        s.backward()
    parameters = list(s.model.parameters())
    gradients = [p.grad for p in parameters]
    found = [p.norm() for p in parameters] + [g.norm() for g in gradients]
    found += [p.mean() for p in parameters] + [p.abs().max() for p in parameters]
    torch._foreach_mul_(gradients, 0.5)
    found += torch._foreach_norm(gradients)
    return [s.full(each) for each in found], s.model.head.weight[0], s.model.head.weight.std()


# --- buffers ---


@tries("a buffer is edited in place and replaced")
def _buffer(s: Scene) -> Any:
    s.model.calls.add_(3)
    s.backward()
    s.model.calls = torch.tensor(7.0)
    s.model.zero_grad()
    s.backward()
    return s.model.calls


# --- models of other forms ---


class Outputs(Model):
    """Returns a dict with None, a list, a number, and outputs without gradients."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "none": None, "list": [y * 2, y.detach()], "n": 3, "ids": y.argmax(-1)}


@tries("dict outputs with None, lists, and outputs without gradients", make=Outputs, goes_on=False)
def _outputs(s: Scene) -> Any:
    found = s.model(s.x)
    (found["y"].square().mean() + found["list"][0].mean()).backward()
    return s.rows(found["y"]), found["none"], found["n"], s.rows(found["ids"])


class Shared(nn.Module):
    """One block called twice, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([one, nn.Linear(WIDTH, WIDTH), one])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.blocks[1].weight
        assert len(list(self.named_parameters(remove_duplicate=False))) == 7

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


class Nested(nn.Module):
    """A Sequential of Sequentials, one of them within a list."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(OrderedDict(a=nn.Linear(WIDTH, 20), b=nn.Linear(20, WIDTH)))
        self.body = nn.Sequential(inner, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale.exp()


class Unused(Model):
    """A block that only gets a gradient sometimes."""

    skip = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.head(x if self.skip else self.blocks[1](x))


@tries("a block that is not used", make=Unused)
def _unused(s: Scene) -> Any:
    optimizer = AdamW(s.model.parameters(), lr=0.01, weight_decay=0.5)
    s.step(optimizer)
    s.model.skip = False
    s.step(optimizer)


class Dropouts(Model):
    """Nothing is dropped in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


@tries("dropout in eval", make=Dropouts, goes_on=False)
def _dropout(s: Scene) -> Any:
    s.model.eval()
    s.backward()


@tries("an inner module is called (model.blocks[0].linear(x))")
def _inner(s: Scene) -> Any:
    return s.rows(s.model.blocks[0].linear(s.x))


@tries("an input that requires grad; its gradient", "keyword arguments")
def _input_gradient(s: Scene) -> Any:
    x = s.x.requires_grad_()
    y = s.model(x=x)
    y.square().mean().backward()
    return s.rows(y), s.per_row(x.grad)  # type: ignore[arg-type]


class InPlace(Model):
    """Its blocks change their input in place."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.mul(1.0)).add_(1)
        return F.relu_(self.head(x))


# --- adapters ---


class Adapter(nn.Module):
    """LoRA by hand: a frozen matrix and two small ones."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, inner.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(inner.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


class Lora(Model):
    """All matrices frozen, under adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.linear = Adapter(block.linear)


catalogue.trains(
    {
        "shared modules and tied weights": Shared,
        "nested containers and a 0-d parameter": Nested,
        "in-place operations on outputs of units": InPlace,
        "adapters (LoRA) put in before shard": Lora,
    }
)


# --- processes, memory, errors ---


@tries("an exception in forward, then training continues")
def _exception(s: Scene) -> Any:
    def fail(module: Any, args: Any) -> None:
        raise KeyError("the user's own")

    handle = s.model.blocks[1].register_forward_pre_hook(fail)
    try:
        s.loss()
    except KeyError:
        handle.remove()
    if s.engine is not None:
        s.engine.reset()
    s.backward()


@tries("a loss that is NaN in one step, which is skipped")
def _nan(s: Scene) -> Any:
    optimizer = s.sgd()
    for factor in (1.0, math.nan, 1.0):
        loss = s.loss() * factor
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


@tries("a copy of the state_dict, loaded after training")
def _best(s: Scene) -> Any:
    best = copy.deepcopy(s.model.state_dict())
    s.step(s.sgd())
    s.model.load_state_dict(best)


@tries("weights of an unsharded model: teacher and student")
def _teacher(s: Scene) -> Any:
    torch.default_generator.manual_seed(3)
    teacher = Model()
    s.model.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        target = teacher(s.x)
    F.mse_loss(s.model(s.x), target + 1).backward()


@tries("p.share_memory_(), p.pin_memory(), p.data_ptr()")
def _memory(s: Scene) -> Any:
    for p in s.model.parameters():
        p.data_ptr()
        p.share_memory_()
    s.backward()
