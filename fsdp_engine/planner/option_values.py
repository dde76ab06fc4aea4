"""Parses values of the command line's options. This module does not import torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# A value of several options. For `offload`: try offloads only if no candidate fits without one. For
# `tensor_parallel`: try the powers of two that fit a node and that the model's `tp_plan` allows.
# For `context_parallel`: if sequences are long, try the powers of two that fit a node. For
# `pipeline`: try powers of two up to the number of nodes, and at most 16.
AUTO = "auto"
# Values of `checkpointing`: selective recomputation, and offloaded activations.
SELECTIVE = "selective"
OFFLOAD = "offload"
# Names of dtypes on the command line.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
# Names of machines whose figures are part of the package.
PRESET_NAMES = ("a100", "h100", "h200", "b200")


def import_optimizer(spec: str, what: str) -> Callable[..., Any]:
    """Returns the optimizer class of ``torch.optim`` with this name, in upper or lower case, or the
    function ``module:function``.

    Args:
        spec: The name.
        what: Name of the argument, for errors.

    Raises:
        ValueError: There is no such class, module or function.
    """
    if ":" in spec:
        return import_function(spec, what)
    from torch import optim

    optimizers = {
        name.lower(): each
        for name, each in vars(optim).items()
        if isinstance(each, type) and issubclass(each, optim.Optimizer)
    }
    if (found := optimizers.get(spec.lower())) is None:
        raise ValueError(
            f"{what}: expected a class of torch.optim, such as AdamW, or module:function; found "
            f"{spec!r}"
        )
    return found


def import_function(spec: str, what: str) -> Callable[..., Any]:
    """Import the function of ``module:function``. The working directory is added to ``sys.path``.

    Args:
        spec: The name, as ``module:function``.
        what: Name of the argument, for errors.

    Raises:
        ValueError: There is no such module or function.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{what}: expected module:function; found {spec!r}")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{what}: expected a module that can be imported; found {module_name!r} ({error})"
        ) from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"{what}: expected a function {attribute!r} in {module_name}; found {function!r}"
        )
    return function


def parsed_sizes(text: str, option: str) -> list[int]:
    """Returns the numbers of a text such as "1,2,4".

    Args:
        text: The text.
        option: Name of the option, for errors.

    Raises:
        ValueError: The text is not a list of positive numbers.
    """
    try:
        sizes = [int(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{option}: expected positive numbers, such as 1,2,4; found {text!r}")
    return sizes


def parsed_degrees(text: str, option: str) -> list[int] | str:
    """Returns the numbers of a text such as "1,2,4"; "auto" is returned unchanged."""
    return text if text == AUTO else parsed_sizes(text, option)


def parsed_bytes(gib: float, option: str) -> float:
    """Returns the number of bytes in ``gib`` GiB.

    Raises:
        ValueError: The number is not positive.
    """
    if not 0 < gib < float("inf"):
        raise ValueError(f"{option}: expected GiB, more than 0; found {gib}")
    return gib * 2**30


def parsed_count(text: str, option: str = "--global-batch") -> float:
    """Returns the number of a text such as "4M". The suffix k stands for 2^10, M for 2^20.

    Args:
        text: The text.
        option: Name of the option, for errors.

    Raises:
        ValueError: The text is not a number.
    """
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower())
    try:
        return float(text) if factor is None else factor * float(text[:-1])
    except ValueError:
        raise ValueError(
            f"{option}: expected a number such as 4M or 4194304; found {text!r}"
        ) from None


def parsed_dtype(name: str, option: str) -> torch.dtype:
    """Returns the dtype of a name: "bf16", "bfloat16" or "torch.bfloat16".

    Raises:
        ValueError: The planner does not support the dtype.
    """
    import torch

    full = _DTYPES.get(name, name.removeprefix("torch."))
    if full not in _DTYPES.values():
        known = ", ".join(f"{short} ({long})" for short, long in _DTYPES.items())
        raise ValueError(f"{option}: expected one of {known}; found {name!r}")
    found: torch.dtype = getattr(torch, full)
    return found


def parsed_number(value: float, option: str) -> float:
    """Returns the number unchanged, after a check.

    Raises:
        ValueError: The number is not positive.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{option}: expected a number, more than 0; found {value}")
    return value


def parsed_prices(text: str, option: str) -> tuple[float, ...]:
    """Returns the prices of a text such as "2.5,3.2".

    Raises:
        ValueError: A price is not a positive number.
    """
    try:
        prices = tuple(float(each) for each in text.split(","))
    except ValueError:
        prices = ()
    if not prices or not all(0 < each < float("inf") for each in prices):
        raise ValueError(
            f"{option}: expected dollars per GPU hour, more than 0, such as 2.5,3.2; found {text!r}"
        )
    return prices


def parsed_names(text: str, _option: str) -> tuple[str, ...]:
    """Returns the names of a text such as "h100,h200"."""
    return tuple(text.split(","))
