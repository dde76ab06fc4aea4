"""A model of fake tensors, and what it is called with.

Nobody needs a model's first values, so initialisers that look at what they have drawn are told that
it will do, and that is all they are told. Models also read how deep they are off a row of numbers
(``[x.item() for x in torch.linspace(0, rate, depth)]``): such rows are kept as they are, beside
their fake tensors.
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
from fsdp_engine.simulation.errors import explained

_aten = torch.ops.aten
_ROWS = (_aten.linspace.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_CPU = torch.device("cpu")


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """The model; what it has on the meta device gets off it, where nothing needs values.

    Raises:
        SimulationError: ``build`` raised.
        TypeError: ``build`` makes something else.
        ValueError: nothing in it is trained.
    """
    model = made_by(build)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "build: expected a model with parameters that require grad; found none among "
            f"{sum(1 for _ in model.parameters())} of {type(model).__name__}"
        )
    made: dict[int, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = made.setdefault(id(tensor), _off_meta(tensor))
    return model


def made_by(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, under the caller's fake mode and on the device that the caller has set.

    Raises:
        SimulationError: ``build`` raised.
        TypeError: ``build`` makes something else.
    """
    with explained("building the model"), _DeepCopies(), _FirstValues():
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"build: expected a function that makes a torch.nn.Module; found {type(model).__name__}"
        )
    return model


def on_no_device(batch: Any, fake: FakeTensorMode) -> Any:
    """The same of fake tensors, on the CPU: what is elsewhere, or nowhere, too."""

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.device.type != "cpu":
            twin = empty_like(tensor.detach(), _CPU)
            return twin.requires_grad_(tensor.requires_grad)
        return tensor if _is_fake(tensor) else fake.from_tensor(tensor)

    return tree_map_only(Tensor, converted, batch)


class _DeepCopies(TorchFunctionMode):
    """Within it ``copy.deepcopy`` copies fake tensors, as ``nn.TransformerEncoder`` copies its
    layer. torch's own (2.11, 2.13) reads the address of their data, which they do not have, and
    copies their mode."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """A function of torch's that the user calls."""
        is_copy = func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor)
        if is_copy and args[0].is_leaf:
            return _copied(*args)
        return func(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
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
    twin.__dict__.update(copy.deepcopy(_marks(tensor, twin), memo))
    return twin


class _FirstValues(TorchDispatchMode):
    """Within it a model is built. See the module docstring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """An operation of the user's."""
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            row = self._rows.get(args[0].untyped_storage()._cdata)
            if row is not None:
                with _disable_current_modes():
                    return row[args[0].storage_offset()].item()
            if _initialises():
                return False if args[0].dtype == torch.bool else 0
        out = func(*args, **kwargs)
        if func in _ROWS:
            with _disable_current_modes():
                row = func(*args, **{**kwargs, "device": _CPU})
            storage = out.untyped_storage()
            self._rows[storage._cdata] = row
            weakref.finalize(storage, self._rows.pop, storage._cdata, None).atexit = False
        elif func._schema.is_mutable:
            for each in args[:1]:  # what is written to is the first of them
                if isinstance(each, Tensor):
                    self._rows.pop(each.untyped_storage()._cdata, None)
        return out


def _initialises() -> bool:
    """Whether a function of ``torch.nn.init`` asks."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return True
        frame = frame.f_back
    return False


def _off_meta(tensor: Tensor) -> Tensor:
    twin = empty_like(tensor.detach(), _CPU)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    twin.__dict__.update(_marks(tensor, twin))
    return twin


def _marks(tensor: Tensor, twin: Tensor) -> dict[str, Any]:
    """The user's attributes of ``tensor``, without those that a fake tensor keeps (torch 2.11: its
    device, say)."""
    marks = {key: mark for key, mark in vars(tensor).items() if key not in vars(twin)}
    return {key: mark for key, mark in marks.items() if key[0] != "_"}


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")
