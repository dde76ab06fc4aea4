"""Values that users assign to sharded parameters, and entries of the model without valid values.

Assigned values are checked and copied into the sharded parameter, because optimizers and units
reference it.

[Note: Missing values]
Forwards and saves raise until missing values are loaded. Two cases leave tensors without values:
``shard(..., initial_values="empty")`` only allocates their memory, and a load that fails half way
replaces some of them. A load writes directly into the parameters, because a second copy would not
fit into memory. Everything that can be checked in advance is checked in advance; a damaged block or
a failing disk is found only while reading.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import is_replicated, slice_of_distributed
from fsdp_engine.runtime.unit import Unit


class MissingValues:
    """The entries of one model that have no valid values.

    While there are any, each module of the model has a forward pre-hook that raises.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keys: set[Hashable] = set()
        self._message = ""
        self._handles: list[RemovableHandle] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def check(self) -> None:
        """Check that all entries have values.

        Raises:
            RuntimeError: some have none; the message says why, and how to load them.
        """
        if self._keys:
            raise RuntimeError(self._message)

    def mark_empty(self, names: Iterable[str]) -> None:
        """Mark entries that have memory and no values, because none were loaded yet.

        Args:
            names: of the entries in ``model.state_dict()``.
        """
        self._mark(
            set(names),
            "weights: expected values; found none, since the model was sharded on the meta device "
            'with initial_values="empty". Load them: fe.load_pretrained, fe.load_safetensors, a '
            "checkpoint",
        )

    @contextmanager
    def replacing(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Context in which a load replaces entries. An exception marks all of them as missing.

        Entries that were missing before and are not among ``keys`` stay missing, so the model is
        usable again when every entry of every failed load has been replaced.

        Args:
            keys: names in ``model.state_dict()``; other hashable keys for state outside the model.
        """
        replaced = set(keys)
        before, message = self._keys, self._message
        self._mark(set(), "")
        try:
            yield
        except BaseException as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._mark(
                before | replaced,
                "weights: expected those of one checkpoint; found them partly replaced by a load "
                f"that failed ({reason}). Load a checkpoint again",
            )
            raise
        self._mark(before - replaced, message)

    def _mark(self, keys: set[Hashable], message: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._keys, self._message = keys, message
        self._handles = [
            module.register_forward_pre_hook(self._refuse_forward, prepend=True)
            for module in (self._model.modules() if keys else ())
        ]

    def _refuse_forward(self, module: nn.Module, args: Any) -> None:
        raise RuntimeError(self._message)


@dataclass(frozen=True)
class Owner:
    """One place of one parameter: its name, names tied to it, and its two tensors."""

    name: str
    others: tuple[str, ...]
    module: nn.Module
    attribute: str
    full: Tensor
    sharded: Tensor


class AssignedValues:
    """Of the parameters of some units.

    Args:
        units: whose parameters.

    Attributes:
        owners: every place of every parameter.
        names: of parameters, by ``id`` of the sharded ones.
        assigned: parameters of users' own whose values were taken, with their names.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.owners = [
            Owner(record.aliases[0], tuple(record.aliases[1:]), module, attribute, full, sharded)
            for unit in units
            for buffer in unit.buffers
            for record, full, sharded in zip(
                buffer.records, buffer.full_params, buffer.sharded_params, strict=True
            )
            for module, attribute in record.owners
        ]
        self.names = {id(owner.sharded): owner.name for owner in self.owners}
        self.assigned: list[tuple[str, weakref.ref[Tensor]]] = []
        self._storages: set[int] | None = None

    def owner_of(self, sharded: Tensor) -> Owner:
        """Returns the first place of a sharded parameter."""
        return next(owner for owner in self.owners if owner.sharded is sharded)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Whether it steps a tensor that was assigned to a parameter, instead of the parameter.

        Raises:
            RuntimeError: it does; names the parameter.
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
                        f"found one of the tensor that was assigned to it, whose values the "
                        "sharded parameter has taken. Build the optimizer from "
                        "model.parameters() after the assignment"
                    )

    def _is_of_another(self, value: Tensor, sharded: Tensor) -> bool:
        if self._storages is None:
            self._storages = {_address(owner.sharded)[0] for owner in self.owners}
        storage, first = _address(value)
        return storage > 0 < first and storage in self._storages and first != _address(sharded)[1]

    def take(self, owner: Owner, value: Tensor, target: Tensor | None) -> Tensor:
        """``target``, with the values of ``value``.

        Raises:
            ValueError: see :meth:`check_value`.
        """
        assert target is not None
        self.check_value(owner, value)
        with torch.no_grad():
            if not isinstance(value, DTensor):
                target.copy_(value.detach())
            elif isinstance(target, FlatDTensor):
                target.copy_(value)
            else:
                target.copy_(value.to_local())  # each rank holds all elements of both
        if target.requires_grad is not value.requires_grad:
            target.requires_grad_(value.requires_grad)
        target.grad = None
        self.remember(owner, value)
        return target

    def remember(self, owner: Owner, value: Tensor) -> None:
        """``value`` was taken: an optimizer that holds it would step nothing."""
        if isinstance(value, nn.Parameter):
            self.assigned.append((owner.name, weakref.ref(value)))

    def check_value(self, owner: Owner, value: Tensor, *, as_tied: bool = False) -> None:
        """Whether the parameter can take ``value``.

        Args:
            owner: the place that it is assigned to.
            as_tied: the caller sees to it that all names of a tied parameter get one value.

        Raises:
            ValueError: it cannot; names the parameter.
        """
        sharded = owner.sharded
        tied = self.names.get(id(value))
        problem = ""
        if tied is not None:
            problem = f"{tied}, which would tie them. Tie parameters before shard()"
        elif owner.others and not as_tied:
            others = ", ".join(owner.others)
            problem = (
                f"an assignment to one name of a parameter that is tied ({others})."
                " Copy values into it, under torch.no_grad(), or untie before shard()"
            )
        elif self._is_of_another(value, sharded):
            problem = "memory of another of its parameters. Tie parameters before shard()"
        elif isinstance(value, FlatDTensor):
            mine = sharded.flat_placement if isinstance(sharded, FlatDTensor) else None
            given = value.flat_placement
            # By name, too: on one rank the slices of two parameters can both be empty.
            if mine is None or given != mine or given.name != mine.name:
                problem = f"another slice, {given}. Assign value.full_tensor()"
        elif isinstance(value, DTensor):
            if not _has_elements_of(value, sharded):
                problem = f"a DTensor over {value.device_mesh}. Assign value.full_tensor()"
        elif type(value) not in (Tensor, nn.Parameter):
            problem = f"a {type(value).__name__}. Assign a plain tensor"
        elif value.is_meta:
            problem = "a tensor on the meta device, which has none"
        if not problem and value.shape != sharded.shape:
            problem = f"shape {tuple(value.shape)}. Change shapes before shard()"
        if not problem and torch.promote_types(value.dtype, sharded.dtype) != sharded.dtype:
            problem = f"{value.dtype}. Cast it, to round on purpose"
        if problem:
            raise ValueError(
                f"{owner.name}: expected values of shape {tuple(sharded.shape)}, {sharded.dtype}, "
                f"for a parameter of a sharded model; found {problem}"
            )


def _has_elements_of(value: DTensor, sharded: Tensor) -> bool:
    """Whether this rank holds the elements of ``sharded`` in ``value``: ``distribute_tensor`` made
    it by the parameter's placements or over the mesh of tensor parallelism, or it is replicated."""
    if not isinstance(sharded, FlatDTensor):
        return is_replicated(value)
    flat = sharded.flat_placement
    if flat.spread is not None:
        return value.device_mesh in (flat.spread.mesh, flat.device_mesh)
    return slice_of_distributed(value, flat) is not None


def _address(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its memory, and of its first element in it; zeros if it has none."""
    local = tensor.local if isinstance(tensor, FlatDTensor) else tensor
    if isinstance(local, DTensor) or type(local) not in (Tensor, nn.Parameter) or local.is_meta:
        return 0, 0
    return local.untyped_storage().data_ptr(), local.data_ptr() if local.numel() else 0
