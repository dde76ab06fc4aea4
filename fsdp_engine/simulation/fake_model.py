"""Builds a model of fake tensors, and converts its inputs.

A simulation does not need initial values. Functions of ``torch.nn.init`` that read the values that
they have drawn get False or 0, so that they do not draw again. Models also read numbers from
generated ranges (``[x.item() for x in torch.linspace(0, rate, depth)]``); the values of such
ranges are computed and kept in addition to the fake tensors.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from fsdp_engine.devices.memory import empty_like
from fsdp_engine.simulation.simulation_error import as_simulation_error

_aten = torch.ops.aten
_ROWS = (_aten.linspace.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_CPU = torch.device("cpu")


def build_fake_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model, with its tensors on the meta device replaced by fake tensors on the CPU.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
        ValueError: no parameter of the model requires grad.
    """
    model = build_module(build)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "build: expected a model with parameters that require grad; found none among "
            f"{sum(1 for _ in model.parameters())} of {type(model).__name__}"
        )
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = replaced.setdefault(id(tensor), _to_fake_cpu(tensor))
    return model


def build_module(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model under the caller's fake mode and default device.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
    """
    with as_simulation_error("building the model"), _DeepCopies(), _FirstValues():
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(
            "build: expected a function that returns a torch.nn.Module; found "
            f"{type(model).__name__}"
        )
    return model


def to_fake(batch: Any, fake: FakeTensorMode) -> Any:
    """The batch with fake tensors on the CPU instead of tensors on any device."""

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.device.type != "cpu":
            twin = empty_like(tensor.detach(), _CPU)
            return twin.requires_grad_(tensor.requires_grad)
        return tensor if _is_fake(tensor) else fake.from_tensor(tensor)

    return tree_map_only(Tensor, converted, batch)


class _DeepCopies(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` works for fake tensors, for ``nn.TransformerEncoder``, which
    copies its layer. torch's implementation (2.11, 2.13) reads the address of the data, which fake
    tensors do not have, and copies their mode."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy fake leaves; call any other function."""
        is_copy = func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor)
        if is_copy and args[0].is_leaf:
            return _deepcopied(*args)
        return func(*args, **(kwargs or {}))


def _deepcopied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) in memo:
        copied: Tensor = memo[id(tensor)]
        return copied
    twin = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin)
    twin.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = twin
    if tensor.grad is not None:
        twin.grad = copy.deepcopy(tensor.grad, memo)
    twin.__dict__.update(copy.deepcopy(_user_attributes(tensor, twin), memo))
    return twin


class _FirstValues(TorchDispatchMode):
    """Mode for building a model; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return values of ranges and of initializers; run any other operation."""
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            row = self._rows.get(args[0].untyped_storage()._cdata)
            if row is not None:
                with _disable_current_modes():
                    return row[args[0].storage_offset()].item()
            if _is_in_init():
                return False if args[0].dtype == torch.bool else 0
        out = func(*args, **kwargs)
        if func in _ROWS:
            with _disable_current_modes():
                row = func(*args, **{**kwargs, "device": _CPU})
            storage = out.untyped_storage()
            self._rows[storage._cdata] = row
            weakref.finalize(storage, self._rows.pop, storage._cdata, None).atexit = False
        elif func._schema.is_mutable:
            for each in args[:1]:  # the first argument is the one that is modified
                if isinstance(each, Tensor):
                    self._rows.pop(each.untyped_storage()._cdata, None)
        return out


def _is_in_init() -> bool:
    """Whether a function of ``torch.nn.init`` is on the call stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return True
        frame = frame.f_back
    return False


def _to_fake_cpu(tensor: Tensor) -> Tensor:
    twin = empty_like(tensor.detach(), _CPU)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    twin.__dict__.update(_user_attributes(tensor, twin))
    return twin


def _user_attributes(tensor: Tensor, twin: Tensor) -> dict[str, Any]:
    """The user's attributes of ``tensor``, without those of fake tensors (such as the device in
    torch 2.11)."""
    marks = {key: mark for key, mark in vars(tensor).items() if key not in vars(twin)}
    return {key: mark for key, mark in marks.items() if key[0] != "_"}


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")
