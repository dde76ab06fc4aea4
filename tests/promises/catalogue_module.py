"""Every public method of ``nn.Module``, of ``nn.Parameter`` within a model, and of optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.promises.scene import WIDTH, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries

catalogue.excludes(
    "no method: an attribute of the class",
    *(f"Module.{n}" for n in ("T_destination", "dump_patches", "call_super_init")),
)
catalogue.excludes(
    "a device that is not there", *(f"Module.{n}" for n in ("cuda", "ipu", "xpu", "mtia"))
)

catalogue.excludes("its own tests: tests/runtime/test_schedule.py", "Module.compile")


# --- what only looks ---


@tries("Module.buffers", "Module.named_buffers")
def _buffers(s: Scene) -> Any:
    return list(s.model.buffers()), dict(s.model.named_buffers())


@tries("Module.children", "Module.named_children")
def _children(s: Scene) -> Any:
    return list(s.model.children()), dict(s.model.named_children())


@tries("Module.modules", "Module.named_modules")
def _modules(s: Scene) -> Any:
    return [type(m).__name__ for m in s.model.modules()], [n for n, _ in s.model.named_modules()]


@tries("Module.parameters", "Module.named_parameters")
def _parameters(s: Scene) -> Any:
    every = dict(s.model.named_parameters(remove_duplicate=False))
    s.loss().backward()
    return list(s.model.parameters()), every, list(s.model.blocks.parameters(recurse=False))


@tries("Module.get_buffer", "Module.get_parameter", "Module.get_submodule")
def _getters(s: Scene) -> Any:
    m = s.model
    return m.get_buffer("calls"), m.get_parameter("head.weight"), m.get_submodule("blocks.0.norm")


@tries("Module.extra_repr", "Module.__repr__")
def _repr(s: Scene) -> Any:
    return s.model.head.extra_repr(), repr(s.model.head)


class WithExtra(Model):
    """A model with a state of its own."""

    note = "a"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@tries("Module.get_extra_state", "Module.set_extra_state", make=WithExtra)
def _extra_state(s: Scene) -> Any:
    state = s.model.state_dict()
    state["_extra_state"] = {"note": "b"}
    s.model.load_state_dict(state)
    return s.model.note


# --- calls ---


@tries("Module.__call__")
def _call(s: Scene) -> Any:
    return s.rows(s.model(s.x))


@tries("Module.forward")
def _forward(s: Scene) -> Any:
    y = s.model.forward(s.x)
    y.square().mean().backward()
    return s.rows(y)


@tries("Module.forward of a block")
def _forward_block(s: Scene) -> Any:
    return s.rows(s.model.blocks[0].forward(s.x))


@tries("Module.__call__ of a block, without the root's")
def _call_block(s: Scene) -> Any:
    y = s.model.blocks[1](s.x)
    y.square().mean().backward()
    return s.rows(y)


@tries("Module.eval", "Module.train")
def _eval(s: Scene) -> Any:
    s.model.eval()
    with torch.no_grad():
        y = s.model(s.x)
    s.model.train()
    s.loss().backward()
    return s.rows(y), s.model.blocks[0].training


@tries("Module.apply")
def _apply(s: Scene) -> Any:
    seen: list[str] = []
    s.model.apply(lambda module: seen.append(type(module).__name__))
    return seen


@tries("Module.apply, filling weights")
def _apply_init(s: Scene) -> Any:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)
            nn.init.zeros_(module.bias)

    s.model.apply(fill)
    return s.mean(s.loss())


# --- dtypes, devices ---


def _converts(name: str, *args: Any) -> None:
    @tries(f"Module.{name}" + (f"({', '.join(map(str, args))})" if args else ""), goes_on=False)
    def _convert(s: Scene) -> Any:
        getattr(s.model, name)(*args)
        x = s.x.to(s.model.head.weight.dtype)
        return s.model.head.weight.dtype, s.rows(s.model(x)).dtype


for _name in ("half", "bfloat16", "double", "float", "cpu"):
    _converts(_name)
_converts("to", torch.bfloat16)
_converts("to", "cpu")
_converts("to", "meta")
_converts("type", torch.float64)
_converts("to_empty")


@tries("Module.to_empty", goes_on=False)
def _to_empty(s: Scene) -> Any:
    s.model.to_empty(device="cpu")
    for p in s.model.parameters():
        nn.init.constant_(p, 0.05)
    s.model.calls.zero_()
    return s.mean(s.loss())


@tries("Module.to_empty of another device", goes_on=False)
def _to_empty_meta(s: Scene) -> Any:
    s.model.to_empty(device="meta")
    return s.model.head.weight.device.type


@tries("Module.share_memory")
def _share(s: Scene) -> Any:
    s.model.share_memory()
    return s.mean(s.loss())


# --- what changes the tree ---


@tries("Module.add_module", "Module.register_module")
def _add_activation(s: Scene) -> Any:
    s.model.add_module("extra", nn.ReLU())
    s.model.register_module("more", nn.Identity())
    return s.mean(s.loss())


@tries("Module.add_module with parameters", "Module.register_module with parameters")
def _add_linear(s: Scene) -> Any:
    torch.manual_seed(s.rank if s.engine else 0)
    s.model.blocks[0].add_module("extra", nn.Linear(2, 2))
    return s.mean(s.loss())


@tries("Module.set_submodule")
def _set_activation(s: Scene) -> Any:
    s.model.set_submodule("blocks.1", nn.Tanh())
    return s.mean(s.loss())


@tries("Module.set_submodule with parameters")
def _set_linear(s: Scene) -> Any:
    torch.manual_seed(s.rank if s.engine else 0)
    s.model.set_submodule("blocks.1", nn.Linear(WIDTH, WIDTH))
    return s.mean(s.loss())


@tries("Module.register_buffer")
def _register_buffer(s: Scene) -> Any:
    s.model.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
    s.model.blocks[0].register_buffer("other", torch.ones(2))
    return list(s.model.state_dict()), s.mean(s.loss())


@tries("Module.register_parameter")
def _register_parameter(s: Scene) -> Any:
    torch.manual_seed(s.rank if s.engine else 0)
    s.model.register_parameter("scale", nn.Parameter(torch.randn(3)))
    return s.mean(s.loss())


@tries("Module.register_parameter of None")
def _register_none(s: Scene) -> Any:
    s.model.register_parameter("scale", None)
    return s.mean(s.loss())


@tries("Module.__setattr__ of a known parameter")
def _assign(s: Scene) -> Any:
    s.model.head.weight = nn.Parameter(torch.full((7, WIDTH), 0.03))
    return s.mean(s.loss())


@tries("Module.__setattr__, tying")
def _tie(s: Scene) -> Any:
    s.model.blocks[0].linear.weight = s.model.blocks[1].linear.weight
    return s.mean(s.loss())


@tries("Module.__delattr__ of a parameter")
def _delete(s: Scene) -> Any:
    del s.model.head.bias
    s.model.head.bias = None
    return s.mean(s.loss())


@tries("Module.__delattr__ of a block")
def _delete_block(s: Scene) -> Any:
    del s.model.blocks[1]
    return s.mean(s.loss())


# --- state dicts ---


@tries("Module.state_dict")
def _state_dict(s: Scene) -> Any:
    return s.model.state_dict(), s.model.state_dict(prefix="a.", keep_vars=True)


def _whole(s: Scene) -> dict[str, Tensor]:
    state = {
        key: torch.full(tuple(value.shape), 0.04) for key, value in s.model.state_dict().items()
    }
    return state


@tries("Module.load_state_dict")
def _load(s: Scene) -> Any:
    found = s.model.load_state_dict(_whole(s))
    return list(found.missing_keys), s.mean(s.loss())


@tries("Module.load_state_dict of its own")
def _load_own(s: Scene) -> Any:
    state = {key: value * 0.5 for key, value in s.model.state_dict().items()}
    s.model.load_state_dict(state)
    return s.mean(s.loss())


@tries("Module.load_state_dict, strict=False")
def _load_part(s: Scene) -> Any:
    state = {**_whole(s), "unknown": torch.ones(2)}
    del state["head.bias"]
    found = s.model.load_state_dict(state, strict=False)
    return list(found.missing_keys), list(found.unexpected_keys), s.mean(s.loss())


@tries("Module.load_state_dict, assign=True")
def _load_assign(s: Scene) -> Any:
    s.model.load_state_dict(_whole(s), assign=True)
    return s.mean(s.loss())


@tries("Module.load_state_dict, of another shape")
def _load_shape(s: Scene) -> Any:
    s.model.load_state_dict({**_whole(s), "head.weight": torch.ones(2, 2)})


def _drop_calls(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    del state["calls"]


@tries("Module.register_state_dict_post_hook", "Module.register_state_dict_pre_hook")
def _state_hooks(s: Scene) -> Any:
    seen: list[str] = []
    s.model.register_state_dict_pre_hook(lambda *args: seen.append("pre"))
    s.model.register_state_dict_post_hook(_drop_calls)
    return list(s.model.state_dict()), seen


@tries("Module.register_load_state_dict_pre_hook", "Module.register_load_state_dict_post_hook")
def _load_hooks(s: Scene) -> Any:
    seen: list[str] = []
    s.model.register_load_state_dict_pre_hook(
        lambda m, state, *rest: state.update(calls=torch.ones(()))
    )
    s.model.register_load_state_dict_post_hook(lambda m, keys: seen.append("post"))
    s.model.load_state_dict(_whole(s))
    return seen, s.mean(s.loss())


# --- hooks of calls ---


@tries("Module.register_forward_hook", "Module.register_forward_pre_hook")
def _forward_hooks(s: Scene) -> Any:
    seen: list[Tensor] = []
    block = s.model.blocks[0]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    block.register_forward_hook(lambda m, args, output: output + 1)
    s.model.head.register_forward_hook(lambda m, args, out: seen.append(s.rows(out.detach())))
    s.loss().backward()
    return seen


@tries("Module.register_forward_hook that reads a weight")
def _hook_reads(s: Scene) -> Any:
    seen: list[Tensor] = []
    s.model.blocks[0].linear.register_forward_hook(
        lambda m, args, output: seen.append(m.weight.detach().clone())
    )
    s.loss().backward()
    return seen


@tries(
    "Module.register_full_backward_hook",
    "Module.register_full_backward_pre_hook",
    "Module.register_backward_hook",
)
def _backward_hooks(s: Scene) -> Any:
    seen: list[Any] = []
    block = s.model.blocks[0]
    block.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
    block.register_full_backward_hook(lambda m, gin, gout: seen.append(s.per_row(gout[0])))
    s.model.head.register_backward_hook(lambda m, gin, gout: seen.append(s.per_row(gout[0])))
    s.loss(s.x.requires_grad_()).backward()
    return seen


# --- gradients ---


@tries("Module.requires_grad_")
def _freeze(s: Scene) -> Any:
    s.model.blocks[0].requires_grad_(False)
    s.loss().backward()
    gradients = [p.grad for p in s.model.parameters()]
    s.model.blocks[0].requires_grad_(True)
    s.model.zero_grad()
    s.loss().backward()
    return gradients


class Frozen(Model):
    """Its first block is frozen before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


@tries("Module.requires_grad_, frozen before and thawed after", make=Frozen)
def _thaw(s: Scene) -> Any:
    s.loss().backward()
    s.model.zero_grad()
    s.model.requires_grad_(True)
    s.loss().backward()
    return [p.grad for p in s.model.parameters()]


def _zeroes(set_to_none: bool) -> None:
    @tries(f"Module.zero_grad, set_to_none={set_to_none}")
    def _zero_grad(s: Scene) -> Any:
        s.loss().backward()
        s.model.zero_grad(set_to_none=set_to_none)
        cleared = [p.grad for p in s.model.parameters()]
        s.model.blocks[0](s.x).square().mean().backward()
        return cleared


_zeroes(True)
_zeroes(False)


# --- copies ---


@tries("copy.deepcopy of the model")
def _deepcopy(s: Scene) -> Any:
    other = copy.deepcopy(s.model)
    other(s.x).square().mean().backward()
    return [p.grad for p in other.parameters()]


@tries("pickle of the model")
def _pickle(s: Scene) -> Any:
    other = pickle.loads(pickle.dumps(s.model))
    return s.rows(other(s.x))


@tries("torch.save of the model")
def _save(s: Scene) -> Any:
    file = io.BytesIO()
    torch.save(s.model, file)
    file.seek(0)
    return s.rows(torch.load(file, weights_only=False)(s.x))


@tries("torch.save of a state_dict")
def _save_state(s: Scene) -> Any:
    file = io.BytesIO()
    torch.save(s.model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    s.model.load_state_dict(state)
    return state


# --- optimizers ---

_MAKERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01),
}
for _name in (
    "Adam",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
):
    _MAKERS[_name] = lambda ps, kind=_name: getattr(torch.optim, kind)(ps, lr=0.01)


def _steps(kind: str) -> None:
    @tries(f"optim.{kind}.step")
    def _two_steps(s: Scene) -> Any:
        optimizer = _MAKERS[kind](s.model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = s.loss()
            loss.backward()
            return s.mean(loss)

        return [optimizer.step(closure) for _ in range(2)]


for _name in _MAKERS:
    if hasattr(torch.optim, _name):
        _steps(_name)

catalogue.excludes("takes sparse gradients only", "optim.SparseAdam.step")
catalogue.excludes(
    "no method: the type of a hook",
    "Optimizer.OptimizerPreHook",
    "Optimizer.OptimizerPostHook",
)
catalogue.excludes("the profiler's, not for users", "Optimizer.profile_hook_step")


@tries("Optimizer.step", "Optimizer.zero_grad")
def _optimizer_step(s: Scene) -> Any:
    optimizer = s.sgd()
    losses = [s.step(optimizer)]
    s.loss().backward()
    optimizer.zero_grad(set_to_none=False)
    cleared = [p.grad for p in s.model.parameters()]
    return losses, cleared


@tries("Optimizer.add_param_group")
def _add_group(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.blocks.parameters(), lr=0.01)
    losses = [s.step(optimizer)]
    optimizer.add_param_group({"params": list(s.model.head.parameters()), "lr": 0.1})
    return [*losses, s.step(optimizer), s.step(optimizer)]


@tries("Optimizer.state_dict", "Optimizer.load_state_dict")
def _optimizer_state(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
    s.step(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    s.step(optimizer)
    other = torch.optim.AdamW(s.model.parameters(), lr=0.01)
    other.load_state_dict(state)
    return state, s.step(other), other.state_dict()["state"]


@tries("Optimizer.load_state_dict of one process")
def _optimizer_state_whole(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
    s.step(optimizer)
    state = optimizer.state_dict()
    for values in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = torch.full(tuple(values[key].shape), 0.1)
    optimizer.load_state_dict(state)
    return s.step(optimizer)


@tries("Optimizer.register_step_pre_hook", "Optimizer.register_step_post_hook")
def _step_hooks(s: Scene) -> Any:
    optimizer, seen = s.sgd(), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    return s.step(optimizer), seen


@tries(
    "Optimizer.register_state_dict_pre_hook",
    "Optimizer.register_state_dict_post_hook",
    "Optimizer.register_load_state_dict_pre_hook",
    "Optimizer.register_load_state_dict_post_hook",
)
def _optimizer_state_hooks(s: Scene) -> Any:
    optimizer, seen = s.sgd(), []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("post"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    s.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return s.step(optimizer), seen


@tries("optim.lr_scheduler")
def _scheduler(s: Scene) -> Any:
    optimizer = s.sgd()
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], [2])
    losses = []
    for _ in range(3):
        losses.append(s.step(optimizer))
        scheduler.step()
    return losses, scheduler.get_last_lr()
