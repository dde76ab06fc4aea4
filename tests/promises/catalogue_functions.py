"""Functions of torch that take modules, parameters or optimizers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, autograd, func, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.optim import swa_utils

from tests.promises.scene import WIDTH, Catalogue, Model, Scene, names

catalogue = Catalogue([])
tries = catalogue.tries


# --- torch.nn.utils ---

catalogue.excludes("of convolutions and packed sequences, takes no parameter", "utils.rnn")
catalogue.excludes(
    "a namespace, tried below", "utils.parametrizations", "utils.parametrize", "utils.stateless"
)
catalogue.excludes(
    "of convolutions",
    *(f"utils.convert_conv{n}d_weight_memory_format" for n in (2, 3)),
    "init.dirac_",
)
catalogue.excludes("makes a module before it is sharded", "utils.skip_init")


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@tries(
    *names("utils", "clip_grad_norm_", "clip_grad_norm", "clip_grad_norm_, foreach=False, inf"),
    *names("utils", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"),
    *names("utils", "parameters_to_vector", "vector_to_parameters"),
)
def _clip(s: Scene) -> Any:
    parameters, utils = list(s.model.parameters()), nn.utils
    s.backward()
    norms = [utils.clip_grad_norm_(parameters, 0.1)]
    norms.append(utils.clip_grad_norm_(parameters, 0.01, float("inf"), foreach=False))
    norms.append(utils.get_total_norm([p.grad for p in parameters]))
    utils.clip_grads_with_norm_(parameters, 0.005, norms[-1])
    utils.clip_grad_value_(parameters, 0.0001)
    vector = utils.parameters_to_vector(parameters)
    utils.vector_to_parameters(torch.linspace(-0.1, 0.1, vector.numel()), parameters)
    return [s.full(norm) for norm in norms], vector, s.mean_loss()


def _halve(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _Halved())


# Each puts a new parameter into a module.
for _name, _function, *_args in (
    ("utils.weight_norm", nn.utils.weight_norm),
    ("utils.spectral_norm", nn.utils.spectral_norm),
    ("parametrizations.weight_norm", parametrizations.weight_norm),
    ("parametrizations.spectral_norm", parametrizations.spectral_norm),
    ("parametrizations.orthogonal", parametrizations.orthogonal),
    ("parametrize.register_parametrization", _halve),
    ("prune.identity", prune.identity, "weight"),
    ("prune.l1_unstructured", prune.l1_unstructured, "weight", 0.3),
    ("prune.random_unstructured", prune.random_unstructured, "weight", 0.3),
    ("prune.ln_structured", prune.ln_structured, "weight", 0.3, 2, 0),
    ("prune.random_structured", prune.random_structured, "weight", 0.3, 0),
    ("prune.custom_from_mask", prune.custom_from_mask, "weight", torch.ones(7, WIDTH).tril()),
):
    catalogue.changes({_name: lambda s, f=_function, args=_args: f(s.model.head, *args)})
catalogue.changes(
    {
        "prune.global_unstructured": lambda s: prune.global_unstructured(
            [(s.model.head, "weight")], prune.L1Unstructured, amount=0.2
        )
    }
)


class Parametrized(Model):
    """Parametrised in all ways before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.blocks[0].linear)
        parametrizations.spectral_norm(self.blocks[1].linear)
        _halve(self.head)


class OldNorms(Model):
    """With the hooks of ``weight_norm`` and ``spectral_norm``."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.blocks[0].linear)
        nn.utils.spectral_norm(self.blocks[1].linear)


def _cached(s: Scene) -> None:
    with parametrize.cached():
        loss = s.loss()
    loss.backward()


_REMOVED = ("remove_weight_norm", "remove_spectral_norm")


def _remove_norms(s: Scene) -> None:
    for name, block in zip(_REMOVED, s.model.blocks, strict=True):
        getattr(nn.utils, name)(block.linear)


catalogue.trains(
    {
        "parametrizations before shard": Parametrized,
        "utils.weight_norm and spectral_norm before shard": OldNorms,
    }
)
catalogue.changes(
    {
        "parametrize.remove_parametrizations": (
            lambda s: parametrize.remove_parametrizations(s.model.head, "weight")
        ),
        "parametrize.cached": _cached,
    },
    make=Parametrized,
)
catalogue.changes({tuple(names("utils", *_REMOVED)): _remove_norms}, make=OldNorms)


class WithBatchNorm(nn.Module):
    """A linear and a batch norm that can be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@tries(
    *names("utils", "fuse_linear_bn_eval", "fuse_conv_bn_eval"),
    *names("utils", "fuse_linear_bn_weights", "fuse_conv_bn_weights"),
    make=WithBatchNorm,
    goes_on=False,
)
def _fuse(s: Scene) -> Any:
    linear, bn = s.model.blocks[0]
    weights = nn.utils.fuse_linear_bn_weights(
        linear.weight, linear.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
    )
    return weights, s.rows(nn.utils.fuse_linear_bn_eval(linear, bn)(s.x))


class Pruned(Model):
    """Pruned before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.3)


catalogue.table(
    {
        ("prune before shard", "prune.is_pruned"): lambda s: (s.train(), prune.is_pruned(s.model)),
        "prune.remove": lambda s: (prune.remove(s.model.head, "weight"), s.mean_loss()),
    },
    make=Pruned,
)


# --- torch.nn.init ---


for _name, *_args in (("eye_",), ("orthogonal_",), ("zeros_",), ("sparse_", 0.1)):
    _fill = getattr(nn.init, _name)
    catalogue.changes(
        {f"init.{_name}": lambda s, f=_fill, args=_args: f(s.model.head.weight, *args)}
    )
catalogue.elsewhere(
    "tests/promises/test_random_values.py",
    *names("init", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "trunc_normal_"),
    *names("init", "uniform_", "xavier_normal_", "xavier_uniform_", "constant_"),
)


# --- torch.func ---

catalogue.elsewhere(
    "tests/promises/test_outside_reads.py",
    *names("func", "functional_call", "functional_call of its own weights"),
    outcome="right at `no_shard`, else raises",
)
catalogue.excludes("takes no model", *names("func", "rearrange", "debug_unwrap"))


class Pure(Model):
    """Without a buffer that forward changes, which transformations refuse."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _given(s: Scene) -> dict[str, Tensor]:
    """Full weights that a user passes to a function."""
    with torch.no_grad():
        return {
            name: torch.linspace(-0.1, 0.1, p.numel()).reshape(p.shape)
            for name, p in s.model.named_parameters()
        }


@tries("func.functional_call of other buffers")
def _functional_buffers(s: Scene) -> Any:
    y = func.functional_call(s.model, {"calls": torch.ones(())}, (s.x,))
    y.square().mean().backward()
    return s.rows(y)


@tries("stateless.functional_call")
def _stateless(s: Scene) -> Any:
    return s.rows(stateless.functional_call(s.model, _given(s), (s.x,)))


def _of_weights(transform: Any) -> Any:
    def transformed(s: Scene) -> Any:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return func.functional_call(s.model, weights, (s.x,)).square().mean()

        return transform(loss, _given(s))

    return transformed


catalogue.table(
    {
        tuple(names("func", "grad", "grad_and_value", "vjp", "jacrev", "hessian")): _of_weights(
            lambda loss, w: func.grad(loss)(w)["head.weight"].shape
        ),
        ("func.jvp", "func.jacfwd"): _of_weights(lambda loss, w: func.jvp(loss, (w,), (w,))[1]),
        "func.linearize": _of_weights(lambda loss, w: func.linearize(loss, w)[1](w).shape),
        "func.functionalize": _of_weights(lambda loss, w: func.functionalize(loss)(w).shape),
    },
    make=Pure,
)


def _vmapped(s: Scene) -> Any:
    with torch.no_grad():
        return s.rows(func.vmap(s.model)(s.x))


@tries("func.vmap, backward", make=Pure)
def _vmapped_backward(s: Scene) -> Any:
    y = func.vmap(s.model)(s.x)
    y.square().mean().backward()
    return s.rows(y)


catalogue.table(
    {
        "func.vmap": _vmapped,
        "func.grad of an input": (
            lambda s: s.per_row(func.grad(lambda x: s.model(x).square().mean())(s.x))
        ),
        "func.jvp of an input": (
            lambda s: s.rows(func.jvp(s.model, (s.x,), (torch.ones_like(s.x),))[1])
        ),
        "func.stack_module_state": lambda s: func.stack_module_state(list(s.model.blocks)),
    },
    make=Pure,
)
catalogue.changes(
    {
        "func.replace_all_batch_norm_modules_": (
            lambda s: func.replace_all_batch_norm_modules_(s.model)
        )
    }
)


# --- torch.autograd ---


@tries(
    *names("autograd", "backward", "backward, inputs= the input", "grad of an input"),
    *names("autograd", "grad, create_graph=True", "backward, retain_graph=True, twice"),
    *names("autograd", "detect_anomaly", "graph.increment_version", "no_grad", "enable_grad"),
)
def _backwards(s: Scene) -> Any:
    x, model = s.x.requires_grad_(), s.model
    s.loss(x).backward(inputs=[x])
    found = [s.per_row(x.grad).clone(), s.per_row(autograd.grad(s.loss(x), x)[0])]  # type: ignore[arg-type]
    found += [p.grad for p in model.parameters()]
    autograd.backward([s.loss()])
    y = model(x)
    (slope,) = autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
    loss.backward(retain_graph=True)
    autograd.graph.increment_version(model.head.weight)
    with torch.no_grad(), torch.enable_grad(), autograd.detect_anomaly(check_nan=True):
        s.backward()
    again = s.loss()
    for _ in range(2):
        again.backward(retain_graph=True)
    return found, s.mean(loss)


@tries(
    *names("autograd.graph", "save_on_cpu", "saved_tensors_hooks"),
    *names("autograd.graph", "disable_saved_tensors_hooks", "allow_mutation_on_saved_tensors"),
)
def _saved_hooks(s: Scene) -> Any:
    for context in (
        autograd.graph.save_on_cpu(),
        autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        autograd.graph.disable_saved_tensors_hooks("no hooks"),
    ):
        with context:
            loss = s.loss()
        loss.backward()


@tries(
    *names("autograd.functional", "jacobian", "vjp", "jvp", "jvp of a model"),
    *names("autograd.functional", "hvp", "vhp", "hessian"),
    "autograd.forward_ad",
)
def _functional(s: Scene) -> Any:
    f, ad = autograd.functional, autograd.forward_ad
    row = (s.x if s.engine else s.rows(s.x))[:1].clone()
    ones = torch.ones_like(row)
    with ad.dual_level():
        tangent = ad.unpack_dual(s.model(ad.make_dual(s.x, torch.ones_like(s.x)))).tangent
    return (
        f.jacobian(s.model, row),
        f.vjp(s.model, row, torch.ones(1, 7))[1],
        f.jvp(s.model, row, ones)[1],
        f.hvp(lambda x: s.model(x).square().sum(), row, ones)[1],
        s.rows(tangent),
    )


def _multi_hook(s: Scene) -> Any:
    seen: list[int] = []
    autograd.graph.register_multi_grad_hook(
        list(s.model.head.parameters()), lambda grads: seen.append(len(grads))
    )
    s.backward()
    return seen


def _edge(s: Scene) -> Any:
    edge = autograd.graph.get_gradient_edge(s.model.head.weight)
    return s.mean(autograd.grad(s.loss(), [edge])[0])  # not averaged over ranks


catalogue.table(
    {
        "autograd.backward, inputs=": (
            lambda s: s.loss().backward(inputs=list(s.model.head.parameters()))
        ),
        "autograd.graph.register_multi_grad_hook": _multi_hook,
        "autograd.graph.get_gradient_edge": _edge,
    }
)


# --- torch.optim.swa_utils ---


_FUNCTIONS = ("get_ema_multi_avg_fn", "get_swa_multi_avg_fn", "get_ema_avg_fn", "get_swa_avg_fn")


@tries(*names("swa_utils", "AveragedModel", *_FUNCTIONS))
def _average(s: Scene) -> Any:
    averages = [
        swa_utils.AveragedModel(s.model, **options)
        for options in ({}, *({n[8:]: getattr(swa_utils, n)()} for n in _FUNCTIONS))
    ]
    optimizer = s.sgd()
    for _ in range(2):
        s.step(optimizer)
        for average in averages:
            average.update_parameters(s.model)
    return [dict(average.module.named_parameters()) for average in averages]


@tries(*names("swa_utils", "SWALR", "update_bn"))
def _swalr(s: Scene) -> Any:
    optimizer = s.sgd()
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
    losses = [s.step(optimizer)]
    scheduler.step()
    losses.append(s.step(optimizer))
    swa_utils.update_bn([s.x], s.model)
    return losses, scheduler.get_last_lr()


# --- torch.distributed.checkpoint.state_dict ---

catalogue.excludes(
    "no function: a type",
    *names("state_dict", "FQNS_T", "PrimitiveType", "ValueType", "DictValueType"),
    *names("state_dict", "ListDictValueType", "OptimizerStateType"),
)

_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", full_state_dict": {"full_state_dict": True},
    ", full_state_dict, cpu_offload": {"full_state_dict": True, "cpu_offload": True},
    ", cpu_offload": {"cpu_offload": True},
    ", keep_submodule_prefixes=False": {"keep_submodule_prefixes": False},
    ", flatten_optimizer_state_dict": {"flatten_optimizer_state_dict": True},
    ", ignore_frozen_params": {"ignore_frozen_params": True},
    ", dsd_fqn_modifiers": {"dsd_fqn_modifiers": "_fqn_modifiers"},
}
_STATES = [f"{do}_{of}state_dict" for do in ("get", "set") for of in ("model_", "optimizer_", "")]


def _gets(suffix: str, options: dict[str, Any]) -> None:
    @tries(*names("state_dict", *(name + suffix for name in _STATES), "StateDictOptions"))
    def _get_and_set(s: Scene) -> Any:
        chosen = StateDictOptions(**options)
        optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
        s.step(optimizer)
        found = copy.deepcopy(dcp.get_state_dict(s.model, optimizer, options=chosen))
        assert dcp.get_model_state_dict(s.model, options=chosen).keys() == found[0].keys()
        if is_of_rank_0 := options.keys() >= {"full_state_dict", "cpu_offload"}:
            chosen = StateDictOptions(full_state_dict=True)
        model_state, state = dcp.get_state_dict(s.model, optimizer, options=chosen)
        kept = {key: value.detach().clone() for key, value in model_state.items()}
        state = copy.deepcopy(state)
        s.step(optimizer)
        dcp.set_model_state_dict(s.model, kept, options=chosen)
        dcp.set_optimizer_state_dict(s.model, optimizer, state, options=chosen)
        return s.step(optimizer), None if is_of_rank_0 and s.rank else found


for _suffix, _options in _OPTIONS.items():
    _gets(_suffix, _options)


@tries("state_dict.set_model_state_dict, strict=False")
def _set_part(s: Scene) -> Any:
    given = {"head.bias": torch.full((7,), 0.3)}
    dcp.set_model_state_dict(
        s.model, given, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    return s.mean_loss()
