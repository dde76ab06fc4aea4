"""Every public method of ``nn.Module``, of ``nn.Parameter`` within a model, and of optimizers."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.init import constant_
from torch.optim import AdamW, lr_scheduler

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
catalogue.elsewhere(
    "tests/extensions/parameter_guard/test_modules.py",
    "Module.__setattr__, tying",
    "Module.__delattr__ of a parameter",
    "copy.deepcopy of the model",
    "pickle of the model",
    "torch.save of the model",
    outcome="raises",
)
catalogue.elsewhere(
    "tests/promises/test_param_hooks.py",
    "Module.requires_grad_, frozen before and thawed after",
    outcome="raises",
)
catalogue.excludes("its own tests: tests/runtime/test_schedule.py", "Module.compile")


@tries(
    *(f"Module.{n}" for n in ("buffers", "named_buffers", "children", "named_children")),
    *(f"Module.{n}" for n in ("modules", "named_modules", "parameters", "named_parameters")),
    *(f"Module.{n}" for n in ("get_buffer", "get_parameter", "get_submodule", "apply")),
    *(f"Module.{n}" for n in ("extra_repr", "__repr__", "state_dict")),
)
def _looks(s: Scene) -> Any:
    model, seen = s.model, []
    s.backward()
    model.apply(lambda module: seen.append(type(module).__name__))
    return [
        [model.buffers(), dict(model.named_buffers()), model.get_buffer("calls")],
        [model.children(), dict(model.named_children()), model.get_submodule("blocks.0.norm")],
        [seen, [type(m).__name__ for m in model.modules()], [n for n, _ in model.named_modules()]],
        [model.parameters(), dict(model.named_parameters(remove_duplicate=False))],
        [model.blocks.parameters(recurse=False), model.get_parameter("head.weight")],
        [model.head.extra_repr(), repr(model.head)],
        [model.state_dict(), model.state_dict(prefix="a.", keep_vars=True)],
    ]


@tries("Module.forward of a block")
def _forward_block(s: Scene) -> Any:
    return s.rows(s.model.blocks[0].forward(s.x))


@tries("Module.__call__", "Module.forward", "Module.__call__ of a block, without the root's")
def _call(s: Scene) -> Any:
    made = []
    for call in (s.model, s.model.forward, s.model.blocks[1]):
        y = call(s.x)
        y.square().mean().backward()
        made.append(s.rows(y))
    return made


class WithExtra(Model):
    """A model with a state of its own."""

    note = "a"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@tries("Module.get_extra_state", "Module.set_extra_state", make=WithExtra)
def _extra_state(s: Scene) -> Any:
    s.model.load_state_dict({**s.model.state_dict(), "_extra_state": {"note": "b"}})
    return s.model.note


@tries("Module.eval", "Module.train")
def _eval(s: Scene) -> Any:
    s.model.eval()
    with torch.no_grad():
        y = s.model(s.x)
    s.model.train()
    s.backward()
    return s.rows(y), s.model.blocks[0].training


# --- dtypes, devices ---


def _converts(name: str, *args: Any) -> None:
    @tries(f"Module.{name}" + (f"({', '.join(map(str, args))})" if args else ""), goes_on=False)
    def _convert(s: Scene) -> Any:
        getattr(s.model, name)(*args)
        x = s.x.to(s.model.head.weight.dtype)
        return s.model.head.weight.dtype, s.rows(s.model(x)).dtype


for _name in ("half", "bfloat16", "double", "float", "cpu"):
    _converts(_name)
for _name, _argument in (("to", torch.bfloat16), ("to", "cpu"), ("to", "meta")):
    _converts(_name, _argument)
_converts("type", torch.float64)
_converts("to_empty")


@tries("Module.to_empty", goes_on=False)
def _to_empty(s: Scene) -> Any:
    s.model.to_empty(device="cpu")
    for p in s.model.parameters():
        constant_(p, 0.05)
    s.model.calls.zero_()
    return s.mean_loss()


@tries("Module.to_empty of another device", goes_on=False)
def _to_empty_meta(s: Scene) -> Any:
    return s.model.to_empty(device="meta").head.weight.device.type


# --- what changes the tree ---


def _apart(s: Scene) -> Any:
    """The model; each rank draws other values from now on."""
    torch.manual_seed(s.rank if s.engine else 0)
    return s.model


def _register_buffers(s: Scene) -> None:
    s.model.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
    s.model.blocks[0].register_buffer("other", torch.ones(2))
    assert {"scale", "blocks.0.other"} & set(s.model.state_dict()) == {"blocks.0.other"}


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        constant_(module.weight, 0.02)
        nn.init.zeros_(module.bias)


def _whole(s: Scene) -> dict[str, Tensor]:
    state = s.model.state_dict()
    return {key: torch.full(tuple(value.shape), 0.04) for key, value in state.items()}


def _half(s: Scene) -> dict[str, Tensor]:
    return {key: value * 0.5 for key, value in s.model.state_dict().items()}


catalogue.changes(
    {
        "Module.apply, filling weights": lambda s: s.model.apply(_fill),
        "Module.share_memory": lambda s: s.model.share_memory(),
        "Module.add_module": lambda s: s.model.add_module("extra", nn.ReLU()),
        "Module.register_module": lambda s: s.model.register_module("more", nn.Identity()),
        ("Module.add_module with parameters", "Module.register_module with parameters"): (
            lambda s: _apart(s).blocks[0].add_module("extra", nn.Linear(2, 2))
        ),
        "Module.set_submodule": lambda s: s.model.set_submodule("blocks.1", nn.Tanh()),
        "Module.set_submodule with parameters": lambda s: _apart(s).set_submodule(
            "blocks.1", nn.Linear(WIDTH, WIDTH)
        ),
        "Module.register_buffer": _register_buffers,
        "Module.register_parameter": lambda s: _apart(s).register_parameter(
            "scale", nn.Parameter(torch.randn(3))
        ),
        "Module.register_parameter of None": lambda s: s.model.register_parameter("scale", None),
        "Module.__setattr__ of a known parameter": lambda s: setattr(
            s.model.head, "weight", nn.Parameter(torch.full((7, WIDTH), 0.03))
        ),
        "Module.__delattr__ of a block": lambda s: s.model.blocks.pop(1),
        "Module.load_state_dict": lambda s: s.model.load_state_dict(_whole(s)),
        "Module.load_state_dict of its own": lambda s: s.model.load_state_dict(_half(s)),
        "Module.load_state_dict, assign=True": (
            lambda s: s.model.load_state_dict(_whole(s), assign=True)
        ),
        "Module.load_state_dict, of another shape": (
            lambda s: s.model.load_state_dict({**_whole(s), "head.weight": torch.ones(2, 2)})
        ),
    }
)


@tries("Module.load_state_dict, strict=False")
def _load_part(s: Scene) -> Any:
    state = {**_whole(s), "unknown": torch.ones(2)}
    del state["head.bias"]
    found = s.model.load_state_dict(state, strict=False)
    return list(found.missing_keys), list(found.unexpected_keys), s.mean_loss()


# --- hooks ---


def _drop_calls(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    del state["calls"]


@tries(
    "Module.register_state_dict_post_hook",
    "Module.register_state_dict_pre_hook",
    "Module.register_load_state_dict_pre_hook",
    "Module.register_load_state_dict_post_hook",
)
def _state_hooks(s: Scene) -> Any:
    seen: list[str] = []
    s.model.register_state_dict_pre_hook(lambda *args: seen.append("pre"))
    s.model.register_state_dict_post_hook(_drop_calls)
    s.model.register_load_state_dict_pre_hook(
        lambda m, state, *rest: state.update(calls=torch.ones(()))
    )
    s.model.register_load_state_dict_post_hook(lambda m, keys: seen.append("load post"))
    s.model.load_state_dict(_whole(s))
    return list(s.model.state_dict()), seen, s.mean_loss()


@tries(
    "Module.register_forward_hook",
    "Module.register_forward_pre_hook",
    "Module.register_forward_hook that reads a weight",
)
def _forward_hooks(s: Scene) -> Any:
    seen: list[Tensor] = []
    block = s.model.blocks[0]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    handle = block.register_forward_hook(lambda m, args, output: output + 1)
    block.linear.register_forward_hook(lambda m, args, out: seen.append(m.weight.detach().clone()))
    s.model.head.register_forward_hook(lambda m, args, out: seen.append(s.rows(out.detach())))
    losses = s.train()
    handle.remove()
    s.backward()
    return losses, seen


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
    s.model.blocks[1].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 0.5,))
    s.model.head.register_backward_hook(lambda m, gin, gout: seen.append(s.per_row(gout[0])))
    s.backward(s.x.requires_grad_())
    return seen


# --- gradients ---


def _gradients(s: Scene) -> list[Tensor | None]:
    return [p.grad for p in s.model.parameters()]


@tries("Module.requires_grad_")
def _freeze(s: Scene) -> Any:
    s.model.blocks[0].requires_grad_(False)
    s.backward()
    gradients = _gradients(s)
    s.model.blocks[0].requires_grad_(True)
    s.model.zero_grad()
    s.backward()
    return gradients


def _zeroes(set_to_none: bool) -> None:
    @tries(f"Module.zero_grad, set_to_none={set_to_none}")
    def _zero_grad(s: Scene) -> Any:
        s.backward()
        s.model.zero_grad(set_to_none=set_to_none)
        cleared = _gradients(s)
        s.model.blocks[0](s.x).square().mean().backward()
        return cleared


_zeroes(True)
_zeroes(False)

# --- copies ---


def _saved(value: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@tries("torch.save of a state_dict")
def _save_state(s: Scene) -> Any:
    state = _saved(s.model.state_dict(), True)
    s.model.load_state_dict(state)
    return state


# --- optimizers ---

_MAKERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: AdamW(ps, lr=0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01),
}
for _name in "Adam Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop".split():  # noqa: SIM905
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


def _adamw(s: Scene) -> AdamW:
    return AdamW(s.model.parameters(), lr=0.01)


@tries("Optimizer.step", "Optimizer.zero_grad")
def _optimizer_step(s: Scene) -> Any:
    optimizer = s.sgd()
    losses = s.train(optimizer, 1)
    s.backward()
    optimizer.zero_grad(set_to_none=False)
    return losses, _gradients(s)


@tries("Optimizer.add_param_group")
def _add_group(s: Scene) -> Any:
    optimizer = AdamW(s.model.blocks.parameters(), lr=0.01)
    losses = s.train(optimizer, 1)
    optimizer.add_param_group({"params": list(s.model.head.parameters()), "lr": 0.1})
    return losses, s.train(optimizer)


@tries("Optimizer.state_dict", "Optimizer.load_state_dict")
def _optimizer_state(s: Scene) -> Any:
    optimizer, other = _adamw(s), _adamw(s)
    s.step(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    s.step(optimizer)
    other.load_state_dict(state)
    return state, s.step(other), other.state_dict()["state"]


@tries("Optimizer.load_state_dict of one process")
def _optimizer_state_whole(s: Scene) -> Any:
    optimizer = _adamw(s)
    s.step(optimizer)
    state = optimizer.state_dict()
    for values in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = torch.full(tuple(values[key].shape), 0.1)
    optimizer.load_state_dict(state)
    return s.step(optimizer)


@tries(
    *(
        f"Optimizer.register_{kind}_{when}_hook"
        for kind in ("step", "state_dict", "load_state_dict")
        for when in ("pre", "post")
    )
)
def _optimizer_hooks(s: Scene) -> Any:
    optimizer, seen = s.sgd(), []
    for kind in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            register = getattr(optimizer, f"register_{kind}_{when}_hook")
            register(lambda *args, name=f"{kind} {when}": seen.append(name))
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
