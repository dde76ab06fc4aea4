"""Models built on the meta device: real values, one unit at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_engine.memory import empty_like
from fsdp_engine.param_and_grad_buffer import ParamRecord


def check_meta(model: nn.Module, records: Sequence[ParamRecord]) -> bool:
    """Whether any parameter or buffer is on the meta device.

    Raises:
        ValueError: a module with meta tensors has no ``reset_parameters`` to give them values.
    """
    on_meta = False
    for name, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        metas = [attribute for attribute, tensor in own if tensor is not None and tensor.is_meta]
        if metas:
            on_meta = True
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"{name or 'the root module'} ({type(module).__name__}): expected a method "
                    f"reset_parameters() that gives {', '.join(metas)} values; found none, and "
                    "the model is on the meta device"
                )
    return on_meta


def materialize(records: Sequence[ParamRecord], device: torch.device, seed: int) -> None:
    """Give the meta parameters of one unit real values, with ``reset_parameters``.

    Args:
        records: the unit's parameters; ``record.param`` and the modules get the real ones.
        device: where.
        seed: the same on all ranks, so that all ranks draw the same values.
    """
    owners: dict[int, nn.Module] = {}
    for record in records:
        if not record.param.is_meta:
            continue
        real = nn.Parameter(
            empty_like(record.param, device), requires_grad=record.param.requires_grad
        )
        real.__dict__.update(record.param.__dict__)
        record.param = real
        for module, attribute in record.sites:
            module._parameters[attribute] = real
            owners[id(module)] = module
    for module in owners.values():
        _real_buffers(module, device)
    _reset(list(owners.values()), device, seed)


def materialize_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Real values for modules that own meta buffers but no meta parameter, and move the others."""
    lonely = [
        module
        for module in model.modules()
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
    ]
    for module in lonely:
        _real_buffers(module, device)
    _reset(lonely, device, seed)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _real_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = empty_like(buffer, device)


def _reset(modules: Sequence[nn.Module], device: torch.device, seed: int) -> None:
    if not modules:
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for module in modules:
            module.reset_parameters()  # type: ignore[operator]
