"""Models built on the meta device: real values, one unit at a time.

A module gives itself values with ``reset_parameters``, as torch's own modules do. Where the model
has a method ``_init_weights(module)``, as those of ``transformers`` and many others, it is called
after that, and for modules without ``reset_parameters``, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_engine.memory import empty_like
from fsdp_engine.param_and_grad_buffer import ParamRecord


def check_meta(model: nn.Module) -> tuple[bool, str]:
    """Whether any parameter or buffer is on the meta device, and what cannot give itself values.

    The second is the text of an error, or "": a module with meta tensors that has no
    ``reset_parameters``, in a model without an ``_init_weights``.
    """
    on_meta, lacks = False, ""
    knows_modules = callable(getattr(model, "_init_weights", None))
    for name, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        metas = [attribute for attribute, tensor in own if tensor is not None and tensor.is_meta]
        if metas:
            on_meta = True
            knows_itself = callable(getattr(module, "reset_parameters", None))
            if not (knows_modules or knows_itself or lacks):
                lacks = (
                    f"{name or 'the root module'} ({type(module).__name__}): expected a method "
                    f"reset_parameters() that gives {', '.join(metas)} values; found none, and "
                    "the model is on the meta device on all ranks. With values on rank 0 alone, "
                    "the other ranks get those"
                )
    return on_meta, lacks


def materialize(
    model: nn.Module, records: Sequence[ParamRecord], device: torch.device, seed: int
) -> None:
    """Give the meta parameters of one unit real values.

    Args:
        model: the whole one.
        records: the unit's parameters; ``record.param`` and the modules get the real ones.
        device: where.
        seed: the same on all ranks, so that all ranks draw the same values.

    Raises:
        ValueError: ``_init_weights`` left a tensor without values.
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
    _reset(model, list(owners.values()), device, seed)


def materialize_buffers(
    model: nn.Module, device: torch.device, seed: int, *, values: bool = True
) -> None:
    """Real values for modules that own meta buffers but no meta parameter, and move the others.

    Args:
        values: False: memory alone, for somebody else's values.
    """
    lonely = [
        module
        for module in model.modules()
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
    ]
    for module in lonely:
        _real_buffers(module, device)
    if values:
        _reset(model, lonely, device, seed)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _real_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = empty_like(buffer, device)


def _reset(model: nn.Module, modules: Sequence[nn.Module], device: torch.device, seed: int) -> None:
    if not modules:
        return
    devices = [device] if device.type == "cuda" else []
    init_weights = getattr(model, "_init_weights", None)
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for module in modules:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            else:
                _fill_with_nan(module)
            if callable(init_weights):
                init_weights(module)
            if not callable(reset):
                _check_filled(module)


def _own_floats(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: t for name, t in own.items() if t is not None and t.is_floating_point()}


def _fill_with_nan(module: nn.Module) -> None:
    for tensor in _own_floats(module).values():
        tensor.fill_(torch.nan)


def _check_filled(module: nn.Module) -> None:
    for name, tensor in _own_floats(module).items():
        if tensor.isnan().any():
            raise ValueError(
                f"{type(module).__name__}.{name}: expected the model's _init_weights() to give it "
                "values, since its module has no reset_parameters(); found that it does not"
            )
