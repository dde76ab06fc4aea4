"""Functions of torch that take modules, parameters or optimizers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.optim import swa_utils
from torch.utils import checkpoint as ckpt

from tests.promises.scene import WIDTH, Catalogue, Model, Scene

catalogue = Catalogue([])
tries = catalogue.tries


def _backward(s: Scene) -> None:
    s.loss().backward()


# --- torch.nn.utils ---

catalogue.excludes("of convolutions and packed sequences, takes no parameter", "utils.rnn")
catalogue.excludes(
    "a namespace, tried below", "utils.parametrizations", "utils.parametrize", "utils.stateless"
)
catalogue.excludes(
    "of convolutions",
    "utils.convert_conv2d_weight_memory_format",
    "utils.convert_conv3d_weight_memory_format",
)
catalogue.excludes("makes a module before it is sharded", "utils.skip_init")


@tries("utils.clip_grad_norm_", "utils.clip_grad_norm")
def _clip(s: Scene) -> Any:
    _backward(s)
    norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    return s.full(norm)


@tries("utils.clip_grad_norm_, foreach=False, inf")
def _clip_inf(s: Scene) -> Any:
    _backward(s)
    return s.full(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, float("inf"), foreach=False))


@tries("utils.clip_grad_value_")
def _clip_value(s: Scene) -> Any:
    _backward(s)
    nn.utils.clip_grad_value_(s.model.parameters(), 0.001)


@tries("utils.get_total_norm", "utils.clip_grads_with_norm_")
def _total_norm(s: Scene) -> Any:
    _backward(s)
    norm = nn.utils.get_total_norm([p.grad for p in s.model.parameters()])
    nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.1, norm)
    return s.full(norm)


@tries("utils.parameters_to_vector")
def _to_vector(s: Scene) -> Any:
    return nn.utils.parameters_to_vector(s.model.parameters())


@tries("utils.vector_to_parameters")
def _from_vector(s: Scene) -> Any:
    count = sum(p.numel() for p in s.model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-0.1, 0.1, count), s.model.parameters())
    return s.mean(s.loss())


def _parametrizes(name: str, function: Any) -> None:
    @tries(name)
    def _parametrize(s: Scene) -> Any:
        function(s.model.blocks[0].linear)
        loss = s.loss()
        loss.backward()
        return s.mean(loss)


_parametrizes("utils.weight_norm", nn.utils.weight_norm)
_parametrizes("utils.spectral_norm", nn.utils.spectral_norm)
_parametrizes("parametrizations.weight_norm", parametrizations.weight_norm)
_parametrizes("parametrizations.spectral_norm", parametrizations.spectral_norm)
_parametrizes("parametrizations.orthogonal", parametrizations.orthogonal)


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


_parametrizes(
    "parametrize.register_parametrization",
    lambda module: parametrize.register_parametrization(module, "weight", _Halved()),
)


class Parametrized(Model):
    """Parametrised in all ways before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.blocks[0].linear)
        parametrizations.spectral_norm(self.blocks[1].linear)
        parametrize.register_parametrization(self.head, "weight", _Halved())


@tries("parametrizations before shard", make=Parametrized)
def _parametrized(s: Scene) -> Any:
    loss = s.loss()
    loss.backward()
    return s.mean(loss)


@tries("parametrize.remove_parametrizations", make=Parametrized)
def _unparametrize(s: Scene) -> Any:
    parametrize.remove_parametrizations(s.model.head, "weight")
    return s.mean(s.loss())


@tries("parametrize.cached", make=Parametrized)
def _cached(s: Scene) -> Any:
    with parametrize.cached():
        loss = s.loss()
    loss.backward()
    return s.mean(loss)


class OldNorms(Model):
    """With the hooks of ``weight_norm`` and ``spectral_norm``."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.blocks[0].linear)
        nn.utils.spectral_norm(self.blocks[1].linear)


@tries("utils.weight_norm and spectral_norm before shard", make=OldNorms)
def _old_norms(s: Scene) -> Any:
    loss = s.loss()
    loss.backward()
    return s.mean(loss)


@tries("utils.remove_weight_norm", "utils.remove_spectral_norm", make=OldNorms)
def _remove_norms(s: Scene) -> Any:
    nn.utils.remove_weight_norm(s.model.blocks[0].linear)
    nn.utils.remove_spectral_norm(s.model.blocks[1].linear)
    return s.mean(s.loss())


class WithBatchNorm(nn.Module):
    """For fusing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@tries("utils.fuse_linear_bn_eval", "utils.fuse_conv_bn_eval", make=WithBatchNorm, goes_on=False)
def _fuse(s: Scene) -> Any:
    linear, norm = s.model.blocks[0]
    fused = nn.utils.fuse_linear_bn_eval(linear, norm)
    return s.rows(fused(s.x))


@tries(
    "utils.fuse_linear_bn_weights", "utils.fuse_conv_bn_weights", make=WithBatchNorm, goes_on=False
)
def _fuse_weights(s: Scene) -> Any:
    linear, bn = s.model.blocks[0]
    return nn.utils.fuse_linear_bn_weights(
        linear.weight, linear.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
    )


def _prunes(name: str, *args: Any, **kwargs: Any) -> None:
    @tries(f"prune.{name}")
    def _prune(s: Scene) -> Any:
        getattr(prune, name)(s.model.head, "weight", *args, **kwargs)
        return s.mean(s.loss())


_prunes("identity")
_prunes("l1_unstructured", 0.3)
_prunes("random_unstructured", 0.3)
_prunes("ln_structured", 0.3, 2, 0)
_prunes("random_structured", 0.3, 0)


@tries("prune.global_unstructured")
def _prune_global(s: Scene) -> Any:
    pairs = [(s.model.head, "weight"), (s.model.blocks[0].linear, "weight")]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.2)
    return s.mean(s.loss())


@tries("prune.custom_from_mask")
def _prune_mask(s: Scene) -> Any:
    mask = (torch.arange(7 * WIDTH) % 2).reshape(7, WIDTH)
    prune.custom_from_mask(s.model.head, "weight", mask)
    return s.mean(s.loss())


class Pruned(Model):
    """Pruned before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.3)


@tries("prune before shard", "prune.is_pruned", make=Pruned)
def _pruned(s: Scene) -> Any:
    loss = s.loss()
    loss.backward()
    return s.mean(loss), prune.is_pruned(s.model)


@tries("prune.remove", make=Pruned)
def _prune_remove(s: Scene) -> Any:
    prune.remove(s.model.head, "weight")
    return s.mean(s.loss())


# --- torch.nn.init ---


def _initialises(name: str, *args: Any) -> None:
    @tries(f"init.{name}")
    def _init(s: Scene) -> Any:
        getattr(nn.init, name)(s.model.head.weight, *args)
        getattr(nn.init, name)(s.model.blocks[0].linear.weight, *args)
        return s.mean(s.loss())


for _name, *_args in (
    ("constant_", 0.1),
    ("eye_",),
    ("kaiming_normal_",),
    ("kaiming_uniform_",),
    ("normal_",),
    ("ones_",),
    ("orthogonal_",),
    ("sparse_", 0.1),
    ("trunc_normal_",),
    ("uniform_",),
    ("xavier_normal_",),
    ("xavier_uniform_",),
    ("zeros_",),
):
    _initialises(_name, *_args)
catalogue.excludes("of convolutions", "init.dirac_")


# --- torch.func ---


class Pure(Model):
    """Without a buffer that forward changes, which transformations refuse."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _own(s: Scene) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in s.model.named_parameters()}


def _given(s: Scene) -> dict[str, Tensor]:
    """Whole weights of the user's."""
    with torch.no_grad():
        return {
            name: torch.linspace(-0.1, 0.1, p.numel()).reshape(p.shape)
            for name, p in s.model.named_parameters()
        }


@tries("func.functional_call")
def _functional_call(s: Scene) -> Any:
    return s.rows(torch.func.functional_call(s.model, _given(s), (s.x,)))


@tries("func.functional_call of its own weights")
def _functional_own(s: Scene) -> Any:
    weights = {name: p.detach() * 0.5 for name, p in s.model.named_parameters()}
    return s.rows(torch.func.functional_call(s.model, weights, (s.x,)))


@tries("func.functional_call of other buffers")
def _functional_buffers(s: Scene) -> Any:
    y = torch.func.functional_call(s.model, {"calls": torch.ones(())}, (s.x,))
    y.square().mean().backward()
    return s.rows(y)


@tries("stateless.functional_call")
def _stateless(s: Scene) -> Any:
    return s.rows(stateless.functional_call(s.model, _given(s), (s.x,)))


def _of_weights(name: str, function: Any) -> None:
    @tries(f"func.{name}", make=Pure)
    def _transformed(s: Scene) -> Any:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(s.model, weights, (s.x,)).square().mean()

        return function(loss, _given(s), s)


def _first(tree: Any) -> Any:
    return tree["head.weight"].shape


_of_weights("grad", lambda loss, w, s: _first(torch.func.grad(loss)(w)))
_of_weights("grad_and_value", lambda loss, w, s: _first(torch.func.grad_and_value(loss)(w)[0]))
_of_weights("vjp", lambda loss, w, s: _first(torch.func.vjp(loss, w)[1](torch.ones(()))[0]))
_of_weights("jvp", lambda loss, w, s: torch.func.jvp(loss, (w,), (w,))[1].shape)
_of_weights("jacrev", lambda loss, w, s: _first(torch.func.jacrev(loss)(w)))
_of_weights("jacfwd", lambda loss, w, s: _first(torch.func.jacfwd(loss)(w)))
_of_weights("linearize", lambda loss, w, s: torch.func.linearize(loss, w)[1](w).shape)
_of_weights(
    "hessian",
    lambda loss, w, s: (
        torch.func.hessian(lambda b: loss({**w, "head.bias": b}))(w["head.bias"]).shape
    ),
)
_of_weights("functionalize", lambda loss, w, s: torch.func.functionalize(loss)(w).shape)


@tries("func.vmap", make=Pure)
def _vmap(s: Scene) -> Any:
    return s.rows(torch.func.vmap(s.model)(s.x))


@tries("func.grad of an input", make=Pure)
def _grad_of_input(s: Scene) -> Any:
    return s.per_row(torch.func.grad(lambda x: s.model(x).square().mean())(s.x))


@tries("func.jvp of an input", make=Pure)
def _jvp_of_input(s: Scene) -> Any:
    return s.rows(torch.func.jvp(s.model, (s.x,), (torch.ones_like(s.x),))[1])


@tries("func.stack_module_state")
def _stack(s: Scene) -> Any:
    return torch.func.stack_module_state([s.model.blocks[0], s.model.blocks[1]])


@tries("func.replace_all_batch_norm_modules_")
def _replace_norms(s: Scene) -> Any:
    torch.func.replace_all_batch_norm_modules_(s.model)
    return s.mean(s.loss())


catalogue.excludes("takes no model", "func.rearrange", "func.debug_unwrap")


# --- torch.autograd ---


@tries("autograd.backward")
def _autograd_backward(s: Scene) -> Any:
    torch.autograd.backward([s.loss()])


@tries("autograd.backward, inputs=")
def _backward_inputs(s: Scene) -> Any:
    s.loss().backward(inputs=list(s.model.head.parameters()))
    return [p.grad for p in s.model.parameters()]


@tries("autograd.backward, inputs= the input")
def _backward_to_input(s: Scene) -> Any:
    x = s.x.requires_grad_()
    s.loss(x).backward(inputs=[x])
    return s.per_row(x.grad), [p.grad for p in s.model.parameters()]


@tries("autograd.grad of parameters")
def _autograd_grad(s: Scene) -> Any:
    found = torch.autograd.grad(s.loss(), list(s.model.parameters()))
    return [s.mean(gradient) for gradient in found]  # each rank's own


@tries("autograd.grad of an input")
def _autograd_grad_input(s: Scene) -> Any:
    x = s.x.requires_grad_()
    return s.per_row(torch.autograd.grad(s.loss(x), x)[0])


@tries("autograd.grad, create_graph=True")
def _penalty(s: Scene) -> Any:
    x = s.x.requires_grad_()
    y = s.model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + g.square().mean()).backward()


@tries("autograd.backward, retain_graph=True, twice")
def _retain(s: Scene) -> Any:
    loss = s.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@tries("autograd.functional.jacobian", "autograd.functional.vjp", "autograd.functional.jvp")
def _jacobian(s: Scene) -> Any:
    f = torch.autograd.functional
    one = s.x[:1].clone() if s.engine else s.rows(s.x)[:1].clone()
    with torch.no_grad():
        ones = torch.ones(1, 7)
    return f.jacobian(s.model, one), f.vjp(s.model, one, ones)[1]


@tries("autograd.functional.jvp of a model")
def _functional_jvp(s: Scene) -> Any:
    one = s.x[:1].clone() if s.engine else s.rows(s.x)[:1].clone()
    return torch.autograd.functional.jvp(s.model, one, torch.ones_like(one))[1]


@tries("autograd.functional.hvp", "autograd.functional.vhp", "autograd.functional.hessian")
def _hvp(s: Scene) -> Any:
    one = s.x[:1].clone() if s.engine else s.rows(s.x)[:1].clone()
    f = torch.autograd.functional
    return f.hvp(lambda x: s.model(x).square().sum(), one, torch.ones_like(one))[1]


@tries("autograd.forward_ad")
def _forward_ad(s: Scene) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(s.x, torch.ones_like(s.x))
        return s.rows(torch.autograd.forward_ad.unpack_dual(s.model(dual)).tangent)


@tries("autograd.graph.save_on_cpu")
def _save_on_cpu(s: Scene) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = s.loss()
    loss.backward()


@tries("autograd.graph.saved_tensors_hooks")
def _saved_hooks(s: Scene) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = s.loss()
    loss.backward()


@tries(
    "autograd.graph.disable_saved_tensors_hooks", "autograd.graph.allow_mutation_on_saved_tensors"
)
def _disable_hooks(s: Scene) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        loss = s.loss()
    loss.backward()


@tries("autograd.graph.register_multi_grad_hook")
def _multi_hook(s: Scene) -> Any:
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(s.model.head.parameters()), lambda grads: seen.append(len(grads))
    )
    s.loss().backward()
    return seen


@tries("autograd.graph.get_gradient_edge")
def _edge(s: Scene) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(s.model.head.weight)
    return s.mean(torch.autograd.grad(s.loss(), [edge])[0])  # each rank's own


@tries("autograd.graph.increment_version")
def _increment(s: Scene) -> Any:
    torch.autograd.graph.increment_version(s.model.head.weight)
    s.loss().backward()


@tries("autograd.detect_anomaly")
def _anomaly(s: Scene) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        s.loss().backward()


@tries("autograd.inference_mode")
def _inference(s: Scene) -> Any:
    with torch.inference_mode():
        y = s.model.head(s.x).clone()
        z = s.model.blocks[0](s.x)
    return s.rows(y), s.rows(z)


@tries("autograd.no_grad", "autograd.enable_grad", "autograd.set_grad_enabled")
def _modes(s: Scene) -> Any:
    with torch.no_grad():
        before = s.model(s.x)
        with torch.enable_grad():
            s.loss().backward()
    torch.set_grad_enabled(False)
    inside = s.model(s.x)
    torch.set_grad_enabled(True)
    s.model.zero_grad()
    s.loss().backward()
    return s.rows(before), s.rows(inside)


# --- torch.amp ---


@tries("amp.autocast")
def _autocast(s: Scene) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = s.model(s.x)
    s.loss().backward()
    return y.dtype


@tries("amp.GradScaler")
def _scaler(s: Scene) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = s.sgd()
    for _ in range(2):
        scaler.scale(s.loss()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


@tries("amp.GradScaler with an overflow on one rank")
def _overflow(s: Scene) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = s.sgd()
    loss = s.loss()
    if s.engine is None or s.rank == 0:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


# --- torch.utils.checkpoint ---


def _checkpoints(reentrant: bool) -> None:
    @tries(f"checkpoint.checkpoint, use_reentrant={reentrant}", "checkpoint.checkpoint")
    def _checkpoint(s: Scene) -> Any:
        x = s.x.requires_grad_()
        for block in s.model.blocks:
            x = ckpt.checkpoint(block, x, use_reentrant=reentrant)
        s.model.head(x).square().mean().backward()


_checkpoints(True)
_checkpoints(False)


class Checkpointed(Model):
    """Blocks are checkpointed from within."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = ckpt.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@tries("checkpoint within the model", make=Checkpointed)
def _checkpoint_within(s: Scene) -> Any:
    s.loss().backward()


@tries("checkpoint.checkpoint_sequential")
def _sequential(s: Scene) -> Any:
    x = s.x.requires_grad_()
    y = ckpt.checkpoint_sequential(list(s.model.blocks), 2, x, use_reentrant=False)
    s.model.head(y).square().mean().backward()


@tries("checkpoint.create_selective_checkpoint_contexts")
def _selective(s: Scene) -> Any:
    ops = [torch.ops.aten.addmm.default]
    x = s.x.requires_grad_()
    y = ckpt.checkpoint(
        s.model,
        x,
        use_reentrant=False,
        context_fn=lambda: ckpt.create_selective_checkpoint_contexts(ops),
    )
    y.square().mean().backward()


# --- torch.optim.swa_utils ---


def _averages(name: str, **options: Any) -> None:
    @tries(name)
    def _average(s: Scene) -> Any:
        average = swa_utils.AveragedModel(s.model, **{k: v() for k, v in options.items()})
        optimizer = s.sgd()
        for _ in range(2):
            s.step(optimizer)
            average.update_parameters(s.model)
        with torch.no_grad():
            return s.rows(average(s.x)), dict(average.module.named_parameters())


_averages("swa_utils.AveragedModel")
_averages("swa_utils.get_ema_multi_avg_fn", multi_avg_fn=swa_utils.get_ema_multi_avg_fn)
_averages("swa_utils.get_swa_multi_avg_fn", multi_avg_fn=swa_utils.get_swa_multi_avg_fn)
_averages("swa_utils.get_ema_avg_fn", avg_fn=swa_utils.get_ema_avg_fn)
_averages("swa_utils.get_swa_avg_fn", avg_fn=swa_utils.get_swa_avg_fn)


@tries("swa_utils.SWALR")
def _swalr(s: Scene) -> Any:
    optimizer = s.sgd()
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
    s.step(optimizer)
    scheduler.step()
    return s.step(optimizer), scheduler.get_last_lr()


@tries("swa_utils.update_bn")
def _update_bn(s: Scene) -> Any:
    swa_utils.update_bn([s.x], s.model)
    return s.mean(s.loss())


# --- torch.distributed.checkpoint.state_dict ---

catalogue.excludes(
    "no function: a type",
    *(
        f"state_dict.{n}"
        for n in (
            "FQNS_T",
            "PrimitiveType",
            "ValueType",
            "DictValueType",
            "ListDictValueType",
            "OptimizerStateType",
        )
    ),
)

_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "full_state_dict": {"full_state_dict": True},
    "full_state_dict, cpu_offload": {"full_state_dict": True, "cpu_offload": True},
    "cpu_offload": {"cpu_offload": True},
    "keep_submodule_prefixes=False": {"keep_submodule_prefixes": False},
    "flatten_optimizer_state_dict": {"flatten_optimizer_state_dict": True},
    "ignore_frozen_params": {"ignore_frozen_params": True},
    "dsd_fqn_modifiers": {"dsd_fqn_modifiers": "_fqn_modifiers"},
}


def _gets(label: str, options: dict[str, Any]) -> None:
    suffix = f", {label}" if label else ""

    @tries(f"state_dict.get_model_state_dict{suffix}", "state_dict.StateDictOptions")
    def _get_model(s: Scene) -> Any:
        if s.rank and options.get("cpu_offload") and options.get("full_state_dict"):
            dcp.get_model_state_dict(s.model, options=StateDictOptions(**options))
            return None  # only rank 0 has it
        return dcp.get_model_state_dict(s.model, options=StateDictOptions(**options))

    @tries(f"state_dict.get_optimizer_state_dict{suffix}", f"state_dict.get_state_dict{suffix}")
    def _get_optimizer(s: Scene) -> Any:
        optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
        s.step(optimizer)
        found = dcp.get_state_dict(s.model, optimizer, options=StateDictOptions(**options))
        if s.rank and options.get("cpu_offload") and options.get("full_state_dict"):
            return None
        return found

    @tries(
        f"state_dict.set_model_state_dict{suffix}",
        f"state_dict.set_optimizer_state_dict{suffix}",
        f"state_dict.set_state_dict{suffix}",
    )
    def _set(s: Scene) -> Any:
        if "cpu_offload" in options and "full_state_dict" in options:
            chosen = StateDictOptions(full_state_dict=True)
        else:
            chosen = StateDictOptions(**options)
        optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
        s.step(optimizer)
        model_state, state = dcp.get_state_dict(s.model, optimizer, options=chosen)
        kept = {key: value.detach().clone() for key, value in model_state.items()}
        state = copy.deepcopy(state)
        s.step(optimizer)
        dcp.set_model_state_dict(s.model, kept, options=chosen)
        dcp.set_optimizer_state_dict(s.model, optimizer, state, options=chosen)
        return s.step(optimizer)


for _label, _options in _OPTIONS.items():
    _gets(_label, _options)


@tries("state_dict.set_model_state_dict, strict=False")
def _set_part(s: Scene) -> Any:
    given = {"head.bias": torch.full((7,), 0.3)}
    dcp.set_model_state_dict(
        s.model, given, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    return s.mean(s.loss())


@tries("state_dict.set_model_state_dict, broadcast_from_rank0")
def _broadcast(s: Scene) -> Any:
    has = s.engine is None or s.rank == 0
    given = {**_given(s), "calls": torch.ones(())} if has else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=s.engine is not None)
    dcp.set_model_state_dict(s.model, given, options=options)
    return s.mean(s.loss())


@tries("state_dict.set_optimizer_state_dict, broadcast_from_rank0")
def _broadcast_optimizer(s: Scene) -> Any:
    optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.01)
    s.step(optimizer)
    full = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(dcp.get_optimizer_state_dict(s.model, optimizer, options=full))
    s.step(optimizer)
    if s.engine is not None:
        state = state if s.rank == 0 else {}
        full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_optimizer_state_dict(s.model, optimizer, state, options=full)
    return s.step(optimizer)
