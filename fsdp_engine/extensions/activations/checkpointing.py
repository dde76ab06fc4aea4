"""Activation checkpointing of units: backward recomputes their forward.

Only the ``forward`` of each instance is replaced. Classes, names, hooks and the arguments of hooks
are unchanged, so a model may be sharded before or after. The recomputation runs within the backward
of the unit, in which its full parameters are gathered anyway.

[Note: Selective checkpointing]
The contexts of ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` are dispatch modes.
One keeps, in forward, the outputs of the operations that a policy selects; the other returns them
in the recomputation. They number operations by kind, so both runs must have the same operations.
Hooks of units within a block (which gather and cast) run different operations in the two runs, so
they run outside of these modes (``_outside_selection`` in ``runtime/hooks.py``).

The policy "selective" is that of torchtitan's ``SelectiveAC``. It keeps the outputs of attention
kernels, convolutions, batched, scaled and grouped matrix products, reductions over ranks, the
choice of experts (``topk``, whose recomputation may differ), copies from a device to the host,
compiled regions, and every second matrix product. Products with a bias (``addmm``) are counted
together with those without, as torchtitan counts ``linear``. If forward changes an output in place,
keeping it has no benefit: the recomputation needs its original value and computes it again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_engine.callers import user_stacklevel
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.blocks import find_blocks
from fsdp_engine.units.build import EngineSetup, Resources

# Arguments with which layers of `transformers` fill a cache of keys and values. The recomputation
# would fill it again, so the checkpointing of `transformers` removes them, too. From 5.24 on the
# argument is `cache`, a name that other modules may use for anything: see `_is_cache`.
_NO_CACHE = {
    "use_cache": False,
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
}
_CACHES = "transformers.cache_utils"

SELECTIVE = "selective"

# The operations of [Note: Selective checkpointing].
_PRODUCTS = {"aten.mm", "aten.addmm", "aten.linear"}
_KEPT = {
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "torch_attn._varlen_attn",
    "flex_attention",
    "inductor_compiled_code",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "aten.convolution",
    "aten.upsample_bilinear2d",
    "aten.topk",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
    "deepep.dispatch",
    "deepep.combine",
}
# `max` over all elements, which fp8 scales need. `max` along a dimension is not kept.
_KEPT_OVERLOADS = {"aten.max.default"}

# Part of torch's error for outputs that were changed after they were kept.
_IS_CHANGED = "cached during selective activation checkpoint has been mutated"

_Policy = Callable[..., Any] | Sequence[Any] | str


@dataclass(frozen=True)
class Recompute(EngineExtension):
    """Recomputes the forward of blocks in backward, except for selected operations.

    Attributes:
        policy: None: recompute all operations. "selective": keep the outputs of attention kernels,
            reductions over ranks and every second matrix product. Or a policy of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: a function, or a list
            of operations whose outputs are kept.
        every: Checkpoint only every ``every``-th block; other blocks keep their activations.

    Raises:
        TypeError, ValueError: ``every`` is not an integer of at least 1, or ``policy`` is invalid.
    """

    policy: _Policy | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool):
            raise TypeError(f"every: expected an integer; found {self.every!r}")
        if self.every < 1:
            raise ValueError(f"every: expected 1 or more; found {self.every}")
        policy = self.policy
        if policy is None or policy == SELECTIVE or callable(policy):
            return
        if isinstance(policy, str) or not isinstance(policy, Sequence):
            raise TypeError(
                f"policy: expected None, {SELECTIVE!r}, a function, or a list of operations; "
                f"found {policy!r}"
            )
        for each in policy:
            if not isinstance(each, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
                raise TypeError(
                    f"policy: expected operations such as torch.ops.aten.mm.default; found {each!r}"
                )
        object.__setattr__(self, "policy", tuple(policy))

    def signature(self) -> str:
        """See the base class. Omits addresses of functions, which differ between ranks."""
        return str(self)

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """Wrap the blocks of the model."""
        checkpoint_units(setup.model, setup.units, self)

    @classmethod
    def of(cls, checkpointing: object) -> Recompute | None:
        """Returns the extension that the argument ``checkpointing`` selects; None if none."""
        if isinstance(checkpointing, cls):
            return checkpointing
        if checkpointing is True:
            return cls()
        return cls(policy=SELECTIVE) if checkpointing == SELECTIVE else None

    def __str__(self) -> str:
        policy = self.policy
        if callable(policy):
            policy = f"{policy.__module__}.{getattr(policy, '__qualname__', type(policy).__name__)}"
        elif isinstance(policy, tuple):
            policy = ", ".join(map(str, policy))
        return f"Recompute(policy={policy}, every={self.every})"


class Checkpointing(Recompute):
    """Deprecated name of ``Recompute``, with its arguments in the other order."""

    def __init__(self, every: int = 1, policy: _Policy | None = None) -> None:
        warnings.warn(
            "fsdp_engine.Checkpointing is deprecated and will be removed in 0.3; use "
            "fsdp_engine.Recompute",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(policy, every)


def checkpoint_units(
    model: nn.Module,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    checkpointing: bool | str | Recompute = True,
) -> tuple[str, ...]:
    """Checkpoint the activations of every module that is a unit of ``fsdp_engine.shard``.

    Forwards run under ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: only their inputs
    are kept until backward, which runs the forward again with the same random numbers. Under
    ``no_grad`` forwards are unchanged. Call it before or after ``shard``. Modules that are already
    checkpointed are skipped.

    By default the blocks are checkpointed (the children of every ``nn.ModuleList`` and
    ``nn.Sequential``), each on its own, even if ``shard`` joins several blocks in one unit. Other
    modules are not, nor are embeddings, which keep no activations. Of nested units, only the
    outermost is checkpointed. Key and value caches that are passed to a layer of ``transformers``
    stay empty in a checkpointed forward. If forward changes lists or dicts in its arguments, also
    nested ones and those within tuples, the caller gets the changes of the first run, and the
    second run gets copies of the original contents. Buffers that forward updates (running
    statistics, the vectors of spectral norm) are updated in both runs, as with torch's
    ``checkpoint``: gradients through spectral norm are then those of the second update.

    Args:
        model: Any module.
        units: The same units as for ``shard``.
        checkpointing: True: recompute the whole forward. "selective": keep the outputs of attention
            kernels and of every second matrix product. Or a ``Recompute``.

    Returns:
        Names of the checkpointed modules in module order. Empty if no blocks are found.

    Raises:
        TypeError: ``model`` is not a module, or a selector in ``units`` is invalid.
        ValueError: A selector in ``units`` matches nothing, or ``checkpointing`` is invalid.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; found {type(model).__name__}")
    how = Recompute.of(checkpointing)
    if how is None:
        raise ValueError(
            f"checkpointing: expected True, {SELECTIVE!r} or fe.Recompute; found {checkpointing!r}"
        )
    found = list(find_blocks(model, units).items())
    blocks = dict(found[how.every - 1 :: how.every])
    _warn_of_other_checkpointing(model, blocks)
    for module in blocks.values():
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            # Wrap a forward that the user has set on the instance, too. `setattr` is avoided, since
            # a wrapper module of the user may forward it to the module that it contains.
            own = vars(module).get("forward")
            vars(module)["forward"] = CheckpointedForward(module, own, how.policy)
    return tuple(blocks)


def _warn_of_other_checkpointing(model: nn.Module, blocks: Collection[str]) -> None:
    """Warn if ``transformers`` checkpoints the activations of blocks, or of modules in or around
    them, already."""
    names = [
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
        and any(each.__module__.startswith("transformers.") for each in type(module).__mro__)
        and any(f"{one}.".startswith(f"{name}." if name else "") for one in blocks)
        | any(f"{name}.".startswith(f"{one}.") for one in blocks)
    ]
    if names:
        warnings.warn(
            f"{names[0] or 'the model'}: expected one kind of activation checkpointing; found that "
            f"of transformers, too, in {len(names)} modules: backward would recompute them twice. "
            "Disable it in the model, or checkpointing= here",
            stacklevel=user_stacklevel(),
        )


class WrappedForward:
    """Replacement of a module's ``forward``. Copies of the module get a replacement of their own.

    Args:
        module: The module whose forward is replaced.
        own: The ``forward`` attribute of the instance; None: the class's forward is used.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._module = module
        self._own = own

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that is wrapped."""
        if self._own is not None:
            return self._own
        # Dynamo of torch 2.11 traces neither `__get__` nor `MethodType`.
        return partial(type(self._module).forward, self._module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


class CheckpointedForward(WrappedForward):
    """A forward that backward runs again.

    Args:
        module, own: See :class:`WrappedForward`.
        policy: The policy of :class:`Recompute`.
    """

    def __init__(
        self, module: nn.Module, own: Callable[..., Any] | None, policy: _Policy | None = None
    ) -> None:
        super().__init__(module, own)
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        kwargs |= {name: value for name, value in _NO_CACHE.items() if name in kwargs}
        # Layers that only read a cache may keep it: both runs read the same values.
        reads_only = getattr(self._module, "_can_checkpoint_with_cache", False)
        if not reads_only and _is_cache(kwargs.get("cache")):
            kwargs["cache"] = None
        # Bind keyword arguments, since `checkpoint` has keywords of its own.
        function = partial(self.original, **kwargs) if kwargs else self.original
        if _has_containers((*args, *kwargs.values())):
            function = _WithContainers(self.original, args, kwargs)
        if self._policy is None:
            return checkpoint(function, *args, use_reentrant=False)
        contexts = partial(_contexts, self._policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _is_cache(value: object) -> bool:
    """Returns whether ``value`` is a key and value cache of ``transformers``."""
    return any(each.__module__ == _CACHES for each in type(value).__mro__)


def _has_containers(values: tuple[Any, ...]) -> bool:
    """Returns whether there are lists or dicts among ``values``, also within tuples."""
    return any(
        type(each) in (list, dict) or (type(each) is tuple and _has_containers(each))
        for each in values
    )


class _WithContainers:
    """A forward with lists and dicts in its arguments, which it may change. The second run gets
    copies of their original contents.

    Args:
        forward: The forward of the module.
        args, kwargs: The arguments of the forward.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._forward = forward
        self._kwargs: dict[str, Any] | None = kwargs
        self._before = _copied(args), _copied(kwargs)

    def __call__(self, *args: Any) -> Any:
        kwargs, self._kwargs = self._kwargs, None
        if kwargs is None:
            before, kwargs = _copied(self._before)
            # Use the tensors that the checkpoint passes.
            args = tuple(
                own if type(own) in (list, dict, tuple) else given
                for own, given in zip(before, args, strict=True)
            )
        return self._forward(*args, **kwargs)


def _copied(value: Any) -> Any:
    """Returns a copy of nested lists, dicts and tuples, which shares all other elements."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value


def _contexts(policy: _Policy) -> Any:
    """Returns the contexts of a forward and of its recomputation."""
    chosen = _Selective() if policy == SELECTIVE else policy
    given = chosen if callable(chosen) else list(chosen)
    forward, recomputation = create_selective_checkpoint_contexts(given)
    changing = _Recomputation.__new__(_Recomputation)
    vars(changing).update(vars(recomputation))
    return forward, changing


class _Recomputation(torch_checkpoint._CachedTorchDispatchMode):
    """The mode of ``create_selective_checkpoint_contexts`` for the recomputation, except that it
    recomputes outputs that forward has changed in place (e.g. a matrix product, by ``relu_``).
    torch's mode raises an error for them."""

    supports_higher_order_operators = True  # as in torch's own class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _IS_CHANGED not in str(error):
                raise
        return func(*args, **(kwargs or {}))


class _Selective:
    """The policy "selective" for one forward. torch 2.11 also calls it in the recomputation."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(
        self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        keeps = _keeps(func)
        if keeps is None:
            self._products[context.is_recompute] += 1
            keeps = self._products[context.is_recompute] % 2 == 1
        elif func is torch.ops.aten._to_copy.default:
            target = kwargs.get("device")
            to_host = target is not None and torch.device(target).type == "cpu"
            keeps = to_host and args[0].device.type != "cpu"
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _keeps(func: Any) -> bool | None:
    """Returns whether the outputs of an operation are kept; None: those of every second call."""
    name = packet = str(func)
    if isinstance(func, torch._ops.OpOverload):
        if func._schema.is_mutable:
            return False  # `mm.out` of compiled code, for example, must write to its output.
        packet = name.rpartition(".")[0]
    if packet in _PRODUCTS:
        return None
    return packet in _KEPT or name in _KEPT_OVERLOADS
