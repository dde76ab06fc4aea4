"""Values that users assign to sharded parameters.

Assigned values are checked and copied into the sharded parameter, because optimizers and units
refer to that tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.extensions.parameter_guard.places import ParamPlace
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import is_replicated, slice_of_distributed


class AssignedValues:
    """Copies assigned values into the sharded parameters.

    Args:
        places: Every place of every parameter.

    Attributes:
        assigned: For each ``nn.Parameter`` of the user whose values were copied: the name of the
            parameter that has taken them, and a weak reference to the user's ``nn.Parameter``.
    """

    def __init__(self, places: Sequence[ParamPlace]) -> None:
        self.assigned: list[tuple[str, weakref.ref[Tensor]]] = []
        self._places = places
        self._names = {id(place.sharded): place.name for place in places}
        self._storages: set[int] | None = None

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer steps no tensor that the user has assigned to a parameter. It
        must step the parameter instead.

        Raises:
            RuntimeError: The optimizer steps such a tensor; names the parameter.
        """
        if not self.assigned:
            return
        self.assigned = [each for each in self.assigned if each[1]() is not None]
        names = {id(reference()): name for name, reference in self.assigned}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in names:
                    raise RuntimeError(
                        f"{names[id(param)]}: expected an optimizer of the model's parameters; "
                        f"found one of the tensor that was assigned to the parameter, which only "
                        "copied its values. Build the optimizer from model.parameters() after the "
                        "assignment"
                    )

    def _is_of_another(self, value: Tensor, sharded: Tensor) -> bool:
        if self._storages is None:
            self._storages = {_address(place.sharded)[0] for place in self._places}
        storage, first = _address(value)
        return storage > 0 < first and storage in self._storages and first != _address(sharded)[1]

    def take(self, place: ParamPlace, value: Tensor) -> Tensor:
        """Copy ``value`` into the sharded parameter and return that parameter.

        Raises:
            ValueError: See :meth:`check_value`.
        """
        self.check_value(place, value)
        target = place.sharded
        with torch.no_grad():
            if not isinstance(value, DTensor):
                target.copy_(value.detach())
            elif isinstance(target, FlatDTensor):
                target.copy_(value)
            else:
                target.copy_(value.to_local())  # Each rank holds all elements of both tensors.
        if target.requires_grad is not value.requires_grad:
            target.requires_grad_(value.requires_grad)
        target.grad = None
        self.remember(place, value)
        return target

    def remember(self, place: ParamPlace, value: Tensor) -> None:
        """Record that ``value`` was copied: stepping it would not step the parameter."""
        if isinstance(value, nn.Parameter):
            self.assigned.append((place.name, weakref.ref(value)))

    def check_value(self, place: ParamPlace, value: Tensor, *, as_tied: bool = False) -> None:
        """Check that a parameter can take ``value``.

        Args:
            place: The place that is assigned to.
            value: The assigned tensor.
            as_tied: The caller ensures that all names of a tied parameter get the same value.

        Raises:
            ValueError: The parameter cannot take ``value``; names the parameter.
        """
        sharded = place.sharded
        tied = self._names.get(id(value))
        problem = ""
        if tied is not None:
            problem = f"{tied}, which would tie them. Tie parameters before shard()"
        elif place.others and not as_tied:
            others = ", ".join(place.others)
            problem = (
                f"an assignment to one name of a parameter that is tied ({others})."
                " Copy values into it, under torch.no_grad(), or untie before shard()"
            )
        elif self._is_of_another(value, sharded):
            problem = "memory of another of its parameters. Tie parameters before shard()"
        elif isinstance(value, FlatDTensor):
            mine = sharded.flat_placement if isinstance(sharded, FlatDTensor) else None
            given = value.flat_placement
            # Compare names, too: on one rank the slices of two parameters may both be empty.
            if mine is None or given != mine or given.name != mine.name:
                problem = f"another slice, {given}. Assign value.full_tensor()"
        elif isinstance(value, DTensor):
            if not _has_elements_of(value, sharded):
                problem = f"a DTensor over {value.device_mesh}. Assign value.full_tensor()"
        elif type(value) not in (Tensor, nn.Parameter):
            problem = f"a {type(value).__name__}. Assign a plain tensor"
        elif value.is_meta:
            problem = "a tensor on the meta device, which has no values"
        if not problem and value.shape != sharded.shape:
            problem = f"shape {tuple(value.shape)}. Change shapes before shard()"
        if not problem and not _can_take(sharded.dtype, value.dtype):
            problem = f"{value.dtype}. Cast it to the parameter's dtype first"
        if problem:
            raise ValueError(
                f"{place.name}: expected values of shape {tuple(sharded.shape)}, {sharded.dtype}, "
                f"for a parameter of a sharded model; found {problem}"
            )


def _can_take(dtype: torch.dtype, found: torch.dtype) -> bool:
    """Returns whether a parameter of ``dtype`` takes values of ``found``, which it must not round.

    Integers are not converted to floating-point numbers, which cannot represent large ones.
    """
    is_integer = [not (each.is_floating_point or each.is_complex) for each in (dtype, found)]
    return torch.promote_types(found, dtype) == dtype and is_integer[0] == is_integer[1]


def _has_elements_of(value: DTensor, sharded: Tensor) -> bool:
    """Returns whether ``value`` holds this rank's elements of ``sharded``. It does if
    ``distribute_tensor`` created it with the parameter's placements or over the mesh of tensor
    parallelism, or if it is replicated."""
    if not isinstance(sharded, FlatDTensor):
        return is_replicated(value)
    flat = sharded.flat_placement
    if flat.spread is not None:
        return value.device_mesh in (flat.spread.mesh, flat.device_mesh)
    return slice_of_distributed(value, flat) is not None


def _address(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of the tensor's storage and first element; 0 where there is no
    memory."""
    local = tensor.local if isinstance(tensor, FlatDTensor) else tensor
    if isinstance(local, DTensor) or type(local) not in (Tensor, nn.Parameter) or local.is_meta:
        return 0, 0
    return local.untyped_storage().data_ptr(), local.data_ptr() if local.numel() else 0
