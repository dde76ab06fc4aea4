"""Megatron-Core itself, on a CPU: the real model, schedules, wrapper and optimizers over gloo.

It uses a small part of CUDA: devices named ``"cuda"``, ``tensor.cuda()``, names of tensor types,
the number of the current device. :func:`on_cpu` replaces these in its context. Transformer Engine
is treated as missing, so that Megatron-Core uses its local layers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_ABSENT = ("transformer_engine", "apex", "amp_C", "flash_attn", "triton")
# Triton kernels that megatron-core 0.19 imports without a check that Triton is there. Nothing here
# calls them.
_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
_MODULES = (
    "distributed",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "optimizer",
    "parallel_state",
    "pipeline_parallel.schedules",
    "process_groups_config",
    "tensor_parallel.random",
    "transformer.transformer_config",
)


class _OnCpu(TorchFunctionMode):
    """Functions use the CPU if a device argument is ``cuda``; tensor types have CUDA's names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _make_norm(cls: object, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """torch's layer norm with the marks that the fused norm, which needs CUDA, sets on
    parameters."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def load() -> None:
    """Import Megatron-Core while Transformer Engine, installed without its kernels, is hidden."""
    if all(f"megatron.core.{name}" in sys.modules for name in _MODULES):
        return
    hidden = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] in _ABSENT}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(_ABSENT))  # type: ignore[arg-type]
    sys.modules[_KERNELS] = mock.MagicMock()
    # The package puts its own function in the place of torch's, so that each pickled tensor of this
    # process would name a module of Megatron-Core, which processes without it cannot import.
    load_from_bytes = torch.storage._load_from_bytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MODULES:
                importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.storage._load_from_bytes = load_from_bytes
        for name in _ABSENT:
            sys.modules.pop(name, None)
        del sys.modules[_KERNELS]
        sys.modules.update(hidden)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-Core runs on this process's CPU within the block."""
    load()
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    dice = torch.Generator()  # in place of the device's generator

    def state_of_dice(*args: object, **kwargs: object) -> Tensor:
        return dice.get_state()

    answers = {
        "torch.cuda.current_device": lambda: _CPU,
        "torch.cuda.Stream": mock.MagicMock,
        "torch.cuda.current_stream": mock.MagicMock,
        "torch.cuda.stream": contextlib.nullcontext,
        "torch.cuda.synchronize": lambda *args: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.manual_seed": dice.manual_seed,
        "torch.cuda.get_rng_state": state_of_dice,
        "megatron.core.tensor_parallel.random._get_cuda_rng_state": state_of_dice,
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": lambda state, **_: (
            dice.set_state(state)
        ),
    }
    # Megatron-Core reads this name without checking that it exists.
    no_kernel = mock.patch(
        "megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_kernel)
        # Otherwise small functions would be compiled, which takes a minute.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.object(WrappedTorchNorm, "__new__", _make_norm))
        stack.enter_context(_OnCpu())
        yield
