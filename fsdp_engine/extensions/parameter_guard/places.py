"""Places of parameters: the modules and attributes that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fsdp_engine.runtime.unit import Unit


@dataclass(frozen=True)
class ParamPlace:
    """One place of a parameter.

    Attributes:
        name: The first name of the parameter.
        others: The other names of a tied parameter.
        module, attribute: The module that holds the parameter, and the name of its attribute.
        full: The full parameter, which the module holds in forward and backward.
        sharded: The sharded parameter, which the module holds otherwise.
    """

    name: str
    others: tuple[str, ...]
    module: nn.Module
    attribute: str
    full: Tensor
    sharded: Tensor


def places_of(units: Sequence[Unit]) -> list[ParamPlace]:
    """Returns every place of every parameter of ``units``."""
    return [
        ParamPlace(record.aliases[0], tuple(record.aliases[1:]), module, attribute, full, sharded)
        for unit in units
        for buffer in unit.buffers
        for record, full, sharded in zip(
            buffer.records, buffer.full_params, buffer.sharded_params, strict=True
        )
        for module, attribute in record.holders
    ]
