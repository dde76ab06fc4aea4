"""``FSDPModule``: what modules can be asked once ``fully_shard`` was called on them."""

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

from fsdp_engine.codecs.phase import FORWARD
from fsdp_engine.devices.lanes import compute_waits_for
from fsdp_engine.fsdp2.conversion import convert
from fsdp_engine.fsdp2.errors import WrongUse
from fsdp_engine.fsdp2.group import Group, group_of
from fsdp_engine.fsdp2.outermost import ensure_engine
from fsdp_engine.runtime.hooks import hooks_of
from fsdp_engine.runtime.unit import Unit

# torch's fully_shard.state(module) is stored under the function that its decorator wraps.
_TORCHS_KEY: Any = inspect.unwrap(fsdp.fully_shard)


class UnshardHandle(fsdp.UnshardHandle):
    """Of an :meth:`FSDPModule.unshard` that is under way."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """On return compute may use the full parameters, and the modules have them."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.unsharded is not None:
            unit.wait()
            unit.install()


class FSDPModule(fsdp.FSDPModule):
    """Methods that ``fully_shard`` adds to the class of a module.

    A subclass of ``torch.distributed.fsdp.FSDPModule``: programs that test for torch's class treat
    these modules as FSDP2's. Every method of torch's class is overridden.
    """

    _orig_cls_mro_index = 3  # [FSDP<Class>, FSDPModule, torch's FSDPModule, Class, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of the class is one that ``fully_shard`` was not called on: slices of a
        container, say, are made so."""
        own: Any = cls.__mro__[cls._orig_cls_mro_index]
        module = own.__new__(own)
        module.__init__(*args, **kwargs)
        return module

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters. They stay until :meth:`reshard`, or until its next
        forward or backward is over. Collective.

        Args:
            async_op: return at once, with a handle to wait on; forward waits by itself.
        """
        unit = _unit_of(self)
        if unit.needs_gather(FORWARD):
            unit.gather(FORWARD)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let the full parameters of this module go, and put the sharded ones back.

        Raises:
            RuntimeError: its forward or backward is under way.
        """
        unit = _unit_of(self)
        if unit.uses:
            raise RuntimeError(
                f"reshard() of {unit.label}: expected no forward or backward of it under way; "
                "found one"
            )
        unit.release()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards reduce gradients along all axes. Axes that cut gradients are
        reduced all the same, so that nothing grows."""
        for unit in _units(self, recurse):
            unit.options.syncs = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients along axes that do not cut them."""
        for unit in _units(self, recurse):
            unit.options.syncs = bool(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Taken for what it is, a hint: every backward ends with what it has sent."""
        _unit_of(self)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters go when forward is over.

        Raises:
            ValueError: not a bool.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.options.keeps_after_forward = not reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full parameters go when backward is over."""
        for unit in _units(self, recurse):
            unit.options.keeps_after_backward = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward reads this module's parameters."""
        _unit_of(self).options.gathers_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Modules to prefetch when this module's forward begins, in place of the next ones of the
        recorded order."""
        group = _group_of(self)
        prefetched = _of_one_model(group, _all_groups("forward", modules))
        group.unit.options.prefetch_in_forward = prefetched

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Modules to prefetch when this module's backward begins."""
        group = _group_of(self)
        prefetched = _of_one_model(group, _all_groups("backward", modules))
        group.unit.options.prefetch_in_backward = prefetched

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of gradients are divided by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor: expected a positive number; found {factor!r}")
        group = _group_of(self)
        group.divisor = float(factor)
        group.divide_gradients()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """An older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only ever sum: they do, whatever is asked."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether ranks may use different parameters: they may, whatever is asked."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reductions have a process group of their own.

        Raises:
            NotImplementedError: they are not to have one.
        """
        if not enable:
            _refuse("set_separate_reduce_scatter_group(False)", "reductions keep their own group")

    def set_post_optim_event(self, event: Any) -> None:
        """What computes from here on, gathers included, waits for ``event``, which is
        on the optimizer's stream behind its step."""
        compute_waits_for(event)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """False is what there is.

        Raises:
            NotImplementedError: True.
        """
        if enable:
            _refuse(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "use fsdp_engine.shard(model, config=DistributedDataParallelConfig(nccl_ub=True))",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises NotImplementedError: registered memory is ``nccl_ub`` here."""
        _refuse(
            "set_symm_mem_for_comm()",
            "use fsdp_engine.shard(model, config=DistributedDataParallelConfig(nccl_ub=True))",
        )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Raises NotImplementedError: staging has a budget of elements."""
        _refuse(
            "set_reduce_scatter_max_input_buffers()",
            "staged gradients have a budget of two mean units; for another one use "
            "fsdp_engine.shard with suggested_communication_unit_size",
        )

    def set_custom_all_gather(self, comm: object) -> None:
        """Raises NotImplementedError: gathers are the engine's."""
        _refuse("set_custom_all_gather()", "gathers are the engine's own, in place")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Raises NotImplementedError: reductions are the engine's."""
        _refuse("set_custom_reduce_scatter()", "reductions are the engine's own, in place")

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: object = None
    ) -> None:
        """Raises NotImplementedError: reductions along a second axis are a mesh of two axes."""
        _refuse(
            "set_all_reduce_hook()",
            "give a 2-D mesh for a second axis; hooks on sharded parameters "
            "(register_post_accumulate_grad_hook) see reduced gradients",
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers are asynchronous: they are, whatever is asked."""
        _check_bool("async_op", async_op)

    def reset_iter_state(self) -> None:
        """Back to rest after an exception in forward or backward; gradients are dropped, weights
        stay. On all ranks.

        Raises:
            RuntimeError: the module is not the outermost one.
        """
        group = _group_of(self)
        if group.engine is None:
            return
        if group.engine.model is not self:
            raise RuntimeError(
                f"reset_iter_state() of {group.unit.label}: expected the outermost module; found "
                f"one within a {type(group.engine.model).__name__}"
            )
        group.engine.reset()

    def _get_fsdp_state(self) -> Any:
        return vars(self)[STATE_KEY][_TORCHS_KEY]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # Past torch's class, whose own _apply looks for FSDP2's state.
        plain_apply = super(fsdp.FSDPModule, self)._apply  # type: ignore[misc]
        apply = functools.partial(plain_apply, fn, recurse)
        if _group_of(self).engine is None:
            convert(cast(nn.Module, self), fn, apply)
        else:
            apply()  # within the conversion of the model
        return self


class _TorchState:
    """The part of FSDP2's module state that functions of torch use on modules of its class.

    - ``register_fsdp_forward_method``: ``_pre_forward`` and ``_post_forward``.
    - ``share_comm_ctx``: ``_comm_ctx``, which has no effect since units share their queues.
    - the pipeline stage of ``torch.distributed.pipelining``: at the end of a step it runs FSDP2's
      reductions by hand (``perform_reduce_grad``), those of each unit, of which there are none
      here, then the root's final callback.
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


def become_fsdp_module(module: nn.Module) -> None:
    """Insert FSDPModule before the class of ``module``."""
    own: Any = type(module)
    module.__class__ = _fsdp_class(own)
    states: Any = module.__dict__.setdefault(STATE_KEY, {})
    states[_TORCHS_KEY] = _TorchState(module)


@functools.cache
def _fsdp_class(own: Any) -> Any:
    return type(f"FSDP{own.__name__}", (FSDPModule, own), {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(self: object, memo: object) -> NoReturn:
    raise WrongUse(
        "deepcopy: expected a module that is not sharded, since FSDP does not support deepcopy; "
        "found one that fully_shard() was called on. Copy it before, and shard the copy alike; or "
        "save a state dict"
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather the module's parameters, as its forward does.

    Nothing is done if ``fully_shard`` was not called on ``module``.

    Raises:
        ValueError: it has no such method.
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
    """Units on one device share their queues of communication anyway.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the modules.
    """
    _all_groups("share_comm_ctx", modules)


def _group_of(module: object) -> Group:
    group = group_of(cast(nn.Module, module))
    assert group is not None, "fully_shard() gives a module its class and its group together"
    return group


def _unit_of(module: object) -> Unit:
    return _group_of(module).unit


def _units(module: object, recurse: bool) -> Iterable[Unit]:
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    groups = {id(group): group for each in modules if (group := group_of(each)) is not None}
    return [group.unit for group in groups.values()]


def _all_groups(what: str, modules: Sequence[Any]) -> list[Group]:
    for each in modules:
        if not isinstance(each, FSDPModule):
            raise ValueError(
                f"modules ({what}): expected modules that fully_shard() was called on; found a "
                f"{type(each).__name__}"
            )
    return [_group_of(each) for each in modules]


def _of_one_model(group: Group, ahead: list[Group]) -> list[Group]:
    if group.engine is not None and any(each.engine is not group.engine for each in ahead):
        raise ValueError(
            f"modules: expected those of one model with {group.unit.label}; found others"
        )
    return ahead


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected a bool; found {value!r}")


def _refuse(call: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{call}: expected not to be called, since {instead}; found a call")
