"""Every public method of ``nn.Module``, of ``nn.Parameter`` within a model, and of optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.init import constant_
from torch.optim import AdamW, lr_scheduler

from tests.promises import catalogue_programs
from tests.promises.scene import WIDTH, Catalogue, Model, Scene, names

catalogue = Catalogue([])
tries = catalogue.tries

catalogue.excludes(
    "no method: an attribute of the class",
    *names("Module", "T_destination", "dump_patches", "call_super_init"),
)
catalogue.excludes("a device that is not there", *names("Module", "cuda", "ipu", "xpu", "mtia"))
catalogue.excludes("its own tests: tests/promises/test_compile.py", "Module.compile")


@tries(
    *names("Module", "buffers", "named_buffers", "children", "named_children", "modules"),
    *names("Module", "named_modules", "parameters", "named_parameters", "get_buffer"),
    *names("Module", "get_parameter", "get_submodule", "apply", "extra_repr", "__repr__"),
    *names("Module", "state_dict", "eval", "train", "__call__", "forward"),
    "Module.__call__ of a block, without the root's",
)
def _looks(s: Scene) -> Any:
    model, seen, made = s.model, [], []
    model.eval()
    assert not model.blocks[0].training
    with torch.no_grad():
        made.append(s.rows(model(s.x)))
    model.train()
    for call in (model, model.forward, model.blocks[1]):
        y = call(s.x)
        y.square().mean().backward()
        made.append(s.rows(y))
    model.apply(lambda module: seen.append(type(module).__name__))
    return [
        [made, model.blocks[0].training, model.head.extra_repr(), repr(model.head)],
        [model.buffers(), dict(model.named_buffers()), model.get_buffer("calls")],
        [model.children(), dict(model.named_children()), model.get_submodule("blocks.0.norm")],
        [seen, [type(m).__name__ for m in model.modules()], [n for n, _ in model.named_modules()]],
        [model.parameters(), dict(model.named_parameters(remove_duplicate=False))],
        [model.blocks.parameters(recurse=False), model.get_parameter("head.weight")],
        [model.state_dict(), model.state_dict(prefix="a.", keep_vars=True)],
    ]


@tries("Module.forward of a block")
def _forward_of_a_block(s: Scene) -> Any:
    return s.rows(s.model.blocks[0].forward(s.x))


class WithExtra(Model):
    """A model with a state of its own."""

    note = "a"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@tries(*names("Module", "get_extra_state", "set_extra_state"), make=WithExtra)
def _extra_state(s: Scene) -> Any:
    s.model.load_state_dict({**s.model.state_dict(), "_extra_state": {"note": "b"}})
    return s.model.note


# --- dtypes, devices ---


def _converts(name: str, *args: Any) -> None:
    @tries(f"Module.{name}" + (f"({', '.join(map(str, args))})" if args else ""), goes_on=False)
    def _convert(s: Scene) -> Any:
        getattr(s.model, name)(*args)
        x = s.x.to(s.model.head.weight.dtype)
        return s.model.head.weight.dtype, s.rows(s.model(x)).dtype


for _name in ("half", "bfloat16", "double", "float", "cpu", "to_empty"):
    _converts(_name)
for _name, _argument in (("to", torch.bfloat16), ("to", "cpu"), ("to", "meta")):
    _converts(_name, _argument)
_converts("type", torch.float64)


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


def _modules_without_parameters(s: Scene) -> None:
    s.model.add_module("extra", nn.ReLU())
    s.model.register_module("more", nn.Identity())
    s.model.set_submodule("blocks.1", nn.Tanh())
    s.model.register_parameter("scale", None)


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
        (
            *names("Module", "add_module", "register_module", "set_submodule"),
            "Module.register_parameter of None",
        ): _modules_without_parameters,
        ("Module.add_module with parameters", "Module.register_module with parameters"): (
            lambda s: _apart(s).blocks[0].add_module("extra", nn.Linear(2, 2))
        ),
        "Module.set_submodule with parameters": lambda s: _apart(s).set_submodule(
            "blocks.1", nn.Linear(WIDTH, WIDTH)
        ),
        "Module.register_buffer": _register_buffers,
        "Module.register_parameter": lambda s: _apart(s).register_parameter(
            "scale", nn.Parameter(torch.randn(3))
        ),
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
    *names("Module", "register_state_dict_post_hook", "register_state_dict_pre_hook"),
    *names("Module", "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
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


tries(
    *names("Module", "register_forward_hook", "register_forward_pre_hook"),
    *names("Module", "register_forward_hook that reads a weight", "register_backward_hook"),
    *names("Module", "register_full_backward_hook", "register_full_backward_pre_hook"),
)(catalogue_programs.hooks)


# --- gradients ---


def _gradients(s: Scene) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in s.model.parameters()]


@tries(
    *names("Module", "requires_grad_", "zero_grad, set_to_none=True"),
    "Module.zero_grad, set_to_none=False",
)
def _freeze(s: Scene) -> Any:
    found = []
    s.model.blocks[0].requires_grad_(False)
    s.backward()
    found.append(_gradients(s))
    s.model.blocks[0].requires_grad_(True)
    for set_to_none in (True, False):
        s.model.zero_grad(set_to_none=set_to_none)
        found.append(_gradients(s))
        s.model.blocks[0](s.x).square().mean().backward()
        found.append(_gradients(s))
        s.backward()
    return found


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
    "no method: the type of a hook", *names("Optimizer", "OptimizerPreHook", "OptimizerPostHook")
)
catalogue.excludes("the profiler's, not for users", "Optimizer.profile_hook_step")


@tries(*names("Optimizer", "step", "zero_grad", "add_param_group"), "optim.lr_scheduler")
def _groups(s: Scene) -> Any:
    optimizer = AdamW(s.model.blocks.parameters(), lr=0.01)
    losses = s.train(optimizer, 1)
    optimizer.add_param_group({"params": list(s.model.head.parameters()), "lr": 0.1})
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], [2])
    for _ in range(3):
        losses.append(s.step(optimizer))
        scheduler.step()
    s.backward()
    optimizer.zero_grad(set_to_none=False)
    return losses, scheduler.get_last_lr(), _gradients(s)


@tries(*names("Optimizer", "state_dict", "load_state_dict", "load_state_dict of one process"))
def _optimizer_state(s: Scene) -> Any:
    optimizer, other = (AdamW(s.model.parameters(), lr=0.01) for _ in range(2))
    s.step(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    losses = [s.step(optimizer)]
    other.load_state_dict(state)
    losses.append(s.step(other))
    whole = copy.deepcopy(state)
    for values in whole["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = torch.full(tuple(values[key].shape), 0.1)
    optimizer.load_state_dict(whole)
    return state, losses, s.step(optimizer), other.state_dict()["state"]


_HOOKS = [
    f"{kind}_{when}"
    for kind in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


@tries(*(f"Optimizer.register_{each}_hook" for each in _HOOKS))
def _optimizer_hooks(s: Scene) -> Any:
    optimizer, seen = s.sgd(), []
    for each in _HOOKS:
        getattr(optimizer, f"register_{each}_hook")(lambda *args, name=each: seen.append(name))
    s.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return s.step(optimizer), seen
