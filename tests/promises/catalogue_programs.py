"""What people write around a model: loops of trainers, averages, adapters, odd inputs, outputs."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.promises.scene import ROWS, WIDTH, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries


# --- loops ---


@tries("gradient accumulation without no_sync")
def _accumulate(s: Scene) -> Any:
    optimizer = s.sgd()
    for _ in range(2):
        for part in s.x.tensor_split(ROWS):
            (s.loss(part) / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()


@tries("gradient accumulation, clip_grad_norm_, a scheduler")
def _trainer(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms = []
    for _ in range(3):
        s.loss().backward()
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


@tries("a forward without gradients between forward and backward")
def _between(s: Scene) -> Any:
    loss = s.loss()
    with torch.no_grad():
        y = s.model(s.x * 2)
    loss.backward()
    return s.rows(y)


@tries("two forwards, then two backwards in order")
def _two_in_order(s: Scene) -> Any:
    one, two = s.loss(), s.loss(s.x * 2)
    one.backward()
    two.backward()


@tries("two forwards, then two backwards in reverse")
def _two_in_reverse(s: Scene) -> Any:
    one, two = s.loss(), s.loss(s.x * 2)
    two.backward()
    one.backward()


@tries("two forwards, one backward of the sum")
def _two_in_one(s: Scene) -> Any:
    (s.loss() + s.loss(s.x * 2)).backward()


@tries("a forward whose output is dropped")
def _dropped(s: Scene) -> Any:
    s.model(s.x * 3)
    s.loss().backward()


@tries("a forward under set_grad_enabled(False), then True")
def _grad_modes(s: Scene) -> Any:
    found = []
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            found.append(s.rows(s.model(s.x)))
    s.loss().backward()
    return found


@tries("two optimizers over parts of the model")
def _two_optimizers(s: Scene) -> Any:
    first = torch.optim.SGD(s.model.blocks.parameters(), lr=0.1)
    second = torch.optim.AdamW(s.model.head.parameters(), lr=0.01)
    for _ in range(2):
        s.loss().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()


@tries("another optimizer in the middle")
def _swap(s: Scene) -> Any:
    s.step(s.sgd())
    return s.step(torch.optim.AdamW(s.model.parameters(), lr=0.01))


@tries("groups without weight decay, by name and ndim")
def _groups(s: Scene) -> Any:
    named = list(s.model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return s.step(optimizer), s.step(optimizer)


# --- weights by hand ---


@tries("an average of weights by hand (EMA)")
def _ema(s: Scene) -> Any:
    average = {name: p.detach().clone() for name, p in s.model.named_parameters()}
    optimizer = s.sgd()
    for _ in range(2):
        s.step(optimizer)
        for name, p in s.model.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    kept = {name: p.detach().clone() for name, p in s.model.named_parameters()}
    with torch.no_grad():
        for name, p in s.model.named_parameters():
            p.copy_(average[name])
        y = s.rows(s.model(s.x))
        for name, p in s.model.named_parameters():
            p.copy_(kept[name])
    return y, average


@tries("p.data = ...")
def _data(s: Scene) -> Any:
    for p in s.model.parameters():
        p.data = torch.full(tuple(p.shape), 0.05)
    return s.mean(s.loss())


@tries("p.data.mul_()")
def _data_mul(s: Scene) -> Any:
    s.loss().backward()
    for p in s.model.parameters():
        p.data.mul_(0.5)
    return s.mean(s.loss())


@tries("p.copy_() of a whole tensor")
def _copy(s: Scene) -> Any:
    with torch.no_grad():
        for p in s.model.parameters():
            p.copy_(torch.full(tuple(p.shape), 0.05))
    return s.mean(s.loss())


@tries("SGD by hand: p -= lr * p.grad")
def _by_hand(s: Scene) -> Any:
    for _ in range(2):
        s.loss().backward()
        with torch.no_grad():
            for p in s.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return s.mean(s.loss())


@tries("p.grad by hand: mul_, a new tensor, None")
def _grad_by_hand(s: Scene) -> Any:
    s.loss().backward()
    named = dict(s.model.named_parameters())
    named["head.weight"].grad.mul_(2)
    named["head.bias"].grad = named["head.bias"].grad * 3
    named["blocks.0.norm.weight"].grad = None


@tries("one row or element of a weight is read")
def _row(s: Scene) -> Any:
    with torch.no_grad():
        return s.model.head.weight[0]


@tries("one row of a weight is written")
def _write_row(s: Scene) -> Any:
    with torch.no_grad():
        s.model.head.weight[0] = 0.0
    return s.mean(s.loss())


@tries("weights by numpy()")
def _numpy(s: Scene) -> Any:
    return torch.from_numpy(s.model.head.weight.detach().cpu().numpy())


@tries("parameters as keys, hash and equality of objects")
def _keys(s: Scene) -> Any:
    names = {p: name for name, p in s.model.named_parameters()}
    s.loss().backward()
    return [names[p] for p in s.model.parameters()], len(set(s.model.parameters()))


@tries("number of parameters, bytes, shapes")
def _counts(s: Scene) -> Any:
    parameters = list(s.model.parameters())
    return (
        sum(p.numel() for p in parameters),
        sum(p.numel() * p.element_size() for p in parameters),
        [tuple(p.shape) for p in parameters],
        [isinstance(p, nn.Parameter) for p in parameters],
        [p.is_leaf for p in parameters],
    )


@tries("a statistic of weights and gradients: norm, mean, std, max")
def _statistics(s: Scene) -> Any:
    s.loss().backward()
    with torch.no_grad():
        return [
            (s.full(p.norm()), s.full(p.mean()), s.full(p.abs().max()), s.full(p.grad.norm()))
            for p in s.model.parameters()
        ]


@tries("the standard deviation of a weight")
def _std(s: Scene) -> Any:
    return s.model.head.weight.detach().std()


@tries("an L2 term over model.parameters() in the loss")
def _l2(s: Scene) -> Any:
    for _ in range(2):
        penalty = sum(p.square().sum() for p in s.model.parameters())
        (s.loss() + 1e-3 * penalty).backward()
        s.model.zero_grad(set_to_none=False)


# --- hooks ---


@tries("p.register_hook that changes the gradient")
def _hook(s: Scene) -> Any:
    s.model.head.weight.register_hook(lambda g: g * 2)
    s.loss().backward()


class Hooked(Model):
    """With a hook from before it was sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda g: g * 2)


@tries("p.register_hook before shard", make=Hooked)
def _hook_before(s: Scene) -> Any:
    s.loss().backward()


@tries("p.register_post_accumulate_grad_hook that steps an optimizer")
def _step_in_hook(s: Scene) -> Any:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in s.model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        s.loss().backward()


# --- buffers ---


@tries("a buffer is edited in place and replaced")
def _buffer(s: Scene) -> Any:
    s.model.calls.add_(3)
    s.loss().backward()
    s.model.calls = torch.tensor(7.0)
    s.model.zero_grad()
    s.loss().backward()
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


@dataclass
class Result:
    """What a model of the user's returns."""

    y: Tensor


class Hidden(nn.Module):
    """Its output is hidden in an unknown class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x).tanh()

        class Answer:
            y = x

        return Answer()


@tries("an output within a class of the user's", make=Hidden, goes_on=False)
def _hidden(s: Scene) -> Any:
    for _ in range(2):
        s.model.zero_grad()
        s.model(s.x).y.square().mean().backward()


class Lists(nn.Module):
    """Blocks that take a list and a dict, and append to them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Appends(), _Appends()])

    def forward(self, x: Tensor) -> Tensor:
        history: list[Tensor] = [x]
        cache: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block(history, cache, index)
        return history[-1] + cache["0"] + len(history)


class _Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, history: list[Tensor], cache: dict[str, Tensor], index: int) -> None:
        y = self.linear(history[-1])
        history.append(y)
        cache[str(index)] = y


@tries("lists and dicts that units fill", make=Lists)
def _lists(s: Scene) -> Any:
    s.loss().backward()


class Shared(nn.Module):
    """One block called twice, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([one, nn.Linear(WIDTH, WIDTH), one])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


@tries("shared modules and tied weights", make=Shared)
def _shared(s: Scene) -> Any:
    names = [name for name, _ in s.model.named_parameters(remove_duplicate=False)]
    s.loss().backward()
    return names


class Nested(nn.Module):
    """A Sequential of Sequentials, one of them within a list."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(OrderedDict(a=nn.Linear(WIDTH, 20), b=nn.Linear(20, WIDTH)))
        self.body = nn.Sequential(inner, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale.exp()


@tries("nested containers and a 0-d parameter", make=Nested)
def _nested(s: Scene) -> Any:
    s.loss().backward()


@tries("a 0-d parameter read outside forward", make=Nested)
def _scale_outside(s: Scene) -> Any:
    (s.model(s.x) * s.model.scale.exp()).square().mean().backward()


class Unused(Model):
    """A block that only gets a gradient sometimes."""

    skip = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if not self.skip:
            x = self.blocks[1](x)
        return self.head(x)


@tries("a block that is not used", make=Unused)
def _unused(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01, weight_decay=0.5)
    s.step(optimizer)
    s.model.skip = False
    s.step(optimizer)


class Dropouts(Model):
    """With dropout of the same mask on every rank, since nothing is dropped in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


@tries("dropout in eval", make=Dropouts, goes_on=False)
def _dropout(s: Scene) -> Any:
    s.model.eval()
    s.loss().backward()


class Auxiliary(Model):
    """Keeps a loss on a module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.extra = x.square().mean()
        return self.head(self.blocks[1](x))


@tries("an auxiliary loss kept on a module", make=Auxiliary)
def _auxiliary(s: Scene) -> Any:
    for _ in range(2):
        s.model.zero_grad()
        loss = s.loss()
        (loss + s.model.extra).backward()
    s.model.extra = None


@tries("only a part of the model is trained (model.blocks[0](x))")
def _part(s: Scene) -> Any:
    for _ in range(2):
        s.model.zero_grad()
        s.model.blocks[0](s.x).square().mean().backward()


@tries("an inner module is called (model.blocks[0].linear(x))")
def _inner(s: Scene) -> Any:
    return s.rows(s.model.blocks[0].linear(s.x))


@tries("an input that requires grad; its gradient")
def _input_gradient(s: Scene) -> Any:
    x = s.x.requires_grad_()
    s.loss(x).backward()
    return s.per_row(x.grad)


@tries("keyword arguments")
def _keywords(s: Scene) -> Any:
    y = s.model(x=s.x)
    y.square().mean().backward()
    return s.rows(y)


class InPlace(Model):
    """Its blocks change their input in place."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.mul(1.0)).add_(1)
        return F.relu_(self.head(x))


@tries("in-place operations on outputs of units", make=InPlace)
def _in_place(s: Scene) -> Any:
    s.loss().backward()


class _InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x += 1
        y *= 2
        return self.linear(x) + y


class InPlaceInputs(nn.Module):
    """Its block changes two inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([_InPlaceBlock()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.blocks[0](x, x * 2)


@tries("in-place operations on two inputs of a unit", make=InPlaceInputs)
def _in_place_inputs(s: Scene) -> Any:
    s.loss().backward()


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


@tries("adapters (LoRA) put in before shard", make=Lora)
def _lora(s: Scene) -> Any:
    optimizer = torch.optim.AdamW([p for p in s.model.parameters() if p.requires_grad], lr=0.01)
    return s.step(optimizer), s.step(optimizer)


@tries("adapters (LoRA) put in after shard")
def _lora_after(s: Scene) -> Any:
    for block in s.model.blocks:
        block.linear = Adapter(block.linear)
    return s.mean(s.loss())


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
    s.loss().backward()


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
    s.loss().backward()


@tries("foreach functions over gradients")
def _foreach(s: Scene) -> Any:
    s.loss().backward()
    gradients = [p.grad for p in s.model.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    norms = torch._foreach_norm(gradients)
    return [s.full(norm) for norm in norms]
