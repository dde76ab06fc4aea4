"""``FSDPModule``: the methods that ``fully_shard`` adds to modules."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import STATE_KEY

from fsdp_engine.comm.copy_lanes import compute_waits_for
from fsdp_engine.fsdp2.param_group import ParamGroup, UsageError, group_of
from fsdp_engine.fsdp2.root_module import convert, ensure_engine
from fsdp_engine.runtime.hooks import hooks_of
from fsdp_engine.runtime.unit import FORWARD, State, Unit

# The key of torch's fully_shard.state(module): the function inside torch's decorator.
_TORCH_STATE_KEY: Any = inspect.unwrap(fsdp.fully_shard)
_USE_NCCL_UB = (
    "registered memory is an option of "
    "fsdp_engine.shard(model, extensions=[fsdp_engine.Arenas(registered=True)])"
)


class UnshardHandle(fsdp.UnshardHandle):
    """Handle of an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make compute wait for the gather, and install the full parameters in the modules."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.state is not State.SHARDED:
            unit.install()


class FSDPModule(fsdp.FSDPModule):
    """Methods that ``fully_shard`` adds to the class of a module.

    The class is a subclass of ``torch.distributed.fsdp.FSDPModule``, so that programs that test for
    torch's class treat these modules as FSDP2's. It overrides every method of torch's class.
    """

    _orig_cls_mro_index = 3  # [FSDP<Class>, FSDPModule, torch's FSDPModule, Class, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a module of the original class, without ``fully_shard``. Slicing a container,
        for example, constructs modules this way."""
        own: Any = cls.__mro__[cls._orig_cls_mro_index]
        module = own.__new__(own)
        module.__init__(*args, **kwargs)
        return module

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters until :meth:`reshard`, or until the end of its next
        forward or backward. Collective, except within ``engine.together()``, where ranks may
        unshard different modules.

        Args:
            async_op: Return a handle to wait on. If the caller does not call its ``wait``, forward
                waits.
        """
        group = _group_of(self)
        unit = group.unit
        if group.engine is not None:
            group.engine.gather_ahead(unit)
        elif unit.needs_gather(FORWARD):
            unit.gather(FORWARD)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's full parameters and install the sharded ones.

        Raises:
            RuntimeError: A forward or backward of this module is in progress.
        """
        unit = _unit_of(self)
        if unit.uses:
            raise RuntimeError(
                f"reshard() of {unit.label}: expected no forward or backward of it in progress; "
                "found one"
            )
        unit.release()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the next backwards reduce gradients along all axes. Gradients are always
        reduced along the axes over which they are sharded, so that memory does not grow."""
        for group in _groups(self, recurse):
            group.requires_gradient_sync = group.unit.options.syncs = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients along axes over which gradients are not
        sharded. ``set_requires_gradient_sync(False)`` takes precedence."""
        for group in _groups(self, recurse):
            group.unit.options.syncs = group.requires_gradient_sync and bool(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: every backward finishes the reductions that it issued."""
        _unit_of(self)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether full parameters are freed after forward.

        Raises:
            ValueError: ``reshard_after_forward`` is not a bool.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        for group in _groups(self, recurse):
            group.unit.options.keeps_after_forward = not reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether full parameters are freed after backward."""
        for group in _groups(self, recurse):
            group.unit.options.keeps_after_backward = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's parameters, and therefore gathers them."""
        _unit_of(self).options.gathers_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the modules to prefetch when this module's forward begins, instead of the next ones
        in the recorded order. An empty list restores the recorded order."""
        group = _group_of(self)
        group.unit.options.prefetch_in_forward = _prefetched(group, "forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the modules to prefetch when this module's backward begins, instead of the next ones
        in the recorded order. An empty list restores the recorded order."""
        group = _group_of(self)
        group.unit.options.prefetch_in_backward = _prefetched(group, "backward", modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` instead of by the number of ranks.

        Raises:
            ValueError: ``factor`` is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor: expected a positive number; found {factor!r}")
        group = _group_of(self)
        group.divisor = float(factor)
        group.divide_gradients()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, the newer name of this method."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: the engine's collectives always sum."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: ranks may always use different parameters."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Do nothing: reductions always have a separate process group.

        Raises:
            NotImplementedError: ``enable`` is False.
        """
        if not enable:
            reason = "reductions always have a separate process group"
            _refuse("set_separate_reduce_scatter_group(False)", reason)

    def set_post_optim_event(self, event: Any) -> None:
        """Make subsequent computation and gathers wait for ``event``, which the caller recorded on
        the optimizer's stream after its step."""
        compute_waits_for(event)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: memory is never allocated from the process group.

        Raises:
            NotImplementedError: ``enable`` is True.
        """
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm(True)", _USE_NCCL_UB)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise NotImplementedError: ``fe.Arenas`` provides registered memory."""
        _refuse("set_symm_mem_for_comm()", _USE_NCCL_UB)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Raise NotImplementedError: the limit on staging buffers is in elements."""
        _refuse(
            "set_reduce_scatter_max_input_buffers()",
            "the limit on staging buffers is in elements, by default twice the mean size of a "
            "unit; for another limit use fsdp_engine.shard with fe.Options(staging_limit=...)",
        )

    def set_custom_all_gather(self, comm: object) -> None:
        """Raise NotImplementedError: the engine implements all-gathers itself."""
        _refuse("set_custom_all_gather()", "the engine implements all-gathers itself, in place")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Raise NotImplementedError: the engine implements reductions itself."""
        _refuse("set_custom_reduce_scatter()", "the engine implements reductions itself, in place")

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: object = None
    ) -> None:
        """Raise NotImplementedError. Use a mesh of two axes, or hooks on sharded parameters."""
        _refuse(
            "set_all_reduce_hook()",
            "a 2-D mesh reduces along its second axis, and hooks on sharded parameters "
            "(register_post_accumulate_grad_hook) receive reduced gradients",
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are always asynchronous."""
        _check_bool("async_op", async_op)

    def reset_iter_state(self) -> None:
        """Reset the engine after an exception in forward or backward. Gradients are dropped, and
        weights are kept. Call this method on all ranks.

        Raises:
            RuntimeError: The module is not the root module.
        """
        group = _group_of(self)
        if group.engine is None:
            return
        if cast(Any, group.engine.model) is not self:  # self is also the module
            raise RuntimeError(
                f"reset_iter_state() of {group.unit.label}: expected the root module; found "
                f"one within a {type(group.engine.model).__name__}"
            )
        group.engine.reset()

    def _get_fsdp_state(self) -> Any:
        return vars(self)[STATE_KEY][_TORCH_STATE_KEY]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # This call skips torch's FSDPModule, whose _apply requires FSDP2's state.
        plain_apply = super(fsdp.FSDPModule, self)._apply  # type: ignore[misc]
        apply = functools.partial(plain_apply, fn, recurse)
        if _group_of(self).engine is None:
            convert(cast(nn.Module, self), fn, apply)
        else:
            apply()  # the engine converts its parameters
        return self


class _TorchState:
    """The attributes of FSDP2's module state that functions of torch read on modules of its class.

    - ``register_fsdp_forward_method``: ``_pre_forward`` and ``_post_forward``.
    - ``share_comm_ctx``: ``_comm_ctx``, which has no effect since units share their lanes.
    - The pipeline stage of ``torch.distributed.pipelining``: at the end of a step its
      ``perform_reduce_grad`` calls FSDP2's reductions for each entry of ``all_states``, which is
      empty here, then the root's final callback.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._state_ctx = SimpleNamespace(all_states=())
        self._comm_ctx: object = None
        self._fsdp_param_groups = ()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        ensure_engine(module)
        hooks = hooks_of(module)
        inputs = None if hooks is None else hooks.before(args, kwargs)
        return (args, kwargs) if inputs is None else inputs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        hooks = hooks_of(module)
        replaced = None if hooks is None else hooks.after(output)
        return output if replaced is None else replaced

    def _root_post_backward_final_callback(self) -> None:
        engine = _group_of(self._module()).engine
        if engine is not None:
            engine.finish_grad_sync()


def make_fsdp_module(module: nn.Module) -> None:
    """Change the class of ``module`` to a subclass of it and of FSDPModule."""
    own: Any = type(module)
    module.__class__ = _fsdp_class(own)
    states: Any = module.__dict__.setdefault(STATE_KEY, {})
    states[_TORCH_STATE_KEY] = _TorchState(module)


@functools.cache
def _fsdp_class(own: Any) -> Any:
    return type(f"FSDP{own.__name__}", (FSDPModule, own), {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(self: object, memo: object) -> NoReturn:
    raise UsageError(
        "deepcopy: expected a module that is not sharded, since FSDP does not support deepcopy; "
        "found one that fully_shard() was called on. Copy the module before fully_shard(), and "
        "shard both modules; or save a state dict"
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` gather the module's parameters, as its forward does.

    Does nothing if ``fully_shard`` was not called on ``module``.

    Raises:
        ValueError: The module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"method_name: expected a method of {type(module).__name__}; found {method_name!r}"
        )

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ensure_engine(cast(nn.Module, module))
        hooks = hooks_of(cast(nn.Module, module))
        return (method if hooks is None else hooks.around(method))(*args, **kwargs)

    setattr(module, method_name, wrapper)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Do nothing: units on one device always share their communication lanes.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the modules.
    """
    _all_groups("share_comm_ctx", modules)


def _group_of(module: object) -> ParamGroup:
    group = group_of(cast(nn.Module, module))
    assert group is not None, "fully_shard() gives a module its class and its group together"
    return group


def _unit_of(module: object) -> Unit:
    return _group_of(module).unit


def _groups(module: object, recurse: bool) -> Iterable[ParamGroup]:
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    groups = {id(group): group for each in modules if (group := group_of(each)) is not None}
    return groups.values()


def _all_groups(what: str, modules: Sequence[Any]) -> list[ParamGroup]:
    for each in modules:
        if not isinstance(each, FSDPModule):
            raise ValueError(
                f"modules ({what}): expected modules that fully_shard() was called on; found a "
                f"{type(each).__name__}"
            )
    return [_group_of(each) for each in modules]


def _prefetched(group: ParamGroup, what: str, modules: Sequence[Any]) -> list[ParamGroup] | None:
    prefetched = _all_groups(what, modules)
    if group.engine is not None and any(each.engine is not group.engine for each in prefetched):
        raise ValueError(
            f"modules: expected modules of the same model as {group.unit.label}; found some of "
            "another model"
        )
    return prefetched or None


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected a bool; found {value!r}")


def _refuse(call: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"{call}: expected not to be called, since {reason}; found a call")
