"""Saves and loads sharded tensors within ``extra``, such as averages of the weights.

A pickle of ``extra`` would contain one rank's slice, which another number of ranks cannot load.
Therefore each sharded tensor is a separate entry, like a parameter:

    extra_tensors.<name>       the tensor, of which each rank writes its slice
    extra, ranks.<rank>        pickles, which contain a reference instead of the tensor

The pickler finds the tensors in any container or object, and its memo ensures that a tensor that
occurs twice is loaded as one object. A loaded tensor has the placement of the corresponding
parameter in the loading job. At ``no_shard``, or if the model has no such parameter, it is a plain
full tensor.

Older checkpoints contain slices within the pickles. :meth:`ExtraTargets.foreign_slices` finds the
slices among them that do not belong to the loading rank.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_engine.checkpoint.model_state import EXTRA, EXTRA_TENSORS, Saved, Targets
from fsdp_engine.checkpoint.sharded_model import SavedParam, ShardedModel, saved_params
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.memory import allocator


@dataclass(frozen=True, repr=False)
class Reference:
    """Replaces a sharded tensor in a pickle.

    Attributes:
        key: The name of the tensor's entry, without the section.
        param: The name of the parameter that is sharded like the tensor; "" if there is none in the
            engine.
        shape: The shape of the full tensor.
        requires_grad: Whether the tensor required grad.
        placement: The placement of the saved slice, if ``param`` is "".
    """

    key: str
    param: str
    shape: tuple[int, ...]
    requires_grad: bool
    placement: FlatPlacement | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<sharded tensor {[*self.shape]}>"

    def __reduce__(self) -> Any:
        args = (self.key, self.param, self.shape, self.requires_grad, self.placement)
        return restore_reference, args


def restore_reference(*args: Any) -> Any:
    """Returns the tensor of a reference within :meth:`ExtraTargets.reading`, else the reference.
    Pickles of ``extra`` call this function."""
    reference = Reference(*args)
    targets = _TARGETS.get()
    return reference if targets is None else targets.tensor_of(reference)


torch.serialization.add_safe_globals([restore_reference])
_TARGETS: ContextVar[ExtraTargets | None] = ContextVar("extra targets", default=None)


class ExtraTensors:
    """Collects the sharded tensors of ``extra`` that this rank saves.

    Args:
        engine: The engine. A sharded tensor with the placement of one of its parameters is saved
            like this parameter.

    Attributes:
        entries: The tensors by name. They are complete after :meth:`pack`.
    """

    def __init__(self, engine: ShardedModel) -> None:
        self.entries: dict[str, Tensor] = {}
        self._num_ranks = engine.ranks.size
        self._references: dict[int, Reference] = {}
        self._held: list[Tensor] = []  # keeps the ids in ``_references`` valid
        self._params: dict[str, list[SavedParam]] = {}
        for param in saved_params(engine).values():
            if isinstance(param.held, FlatDTensor):
                self._params.setdefault(param.held.flat_placement.name, []).append(param)

    def pack(self, value: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Serialize ``value``, with references instead of sharded tensors.

        Args:
            value: The value to serialize, which contains ``extra``.
            extra: The user's values by name.

        Raises:
            ValueError: A sharded tensor cannot be saved; the message names it.
        """
        names = {id(tensor): name for name, tensor in _named_tensors(extra)}
        taken, unnamed = set(names.values()), 0

        def reduce(tensor: DTensor) -> Any:
            nonlocal unnamed
            if id(tensor) in self._references:
                return self._references[id(tensor)].__reduce__()
            name = names.get(id(tensor))
            while name is None or (id(tensor) not in names and name in taken):
                unnamed += 1
                name = f"unnamed.{unnamed}"
            reference = self._references[id(tensor)] = self._add(name, tensor)
            self._held.append(tensor)
            return reference.__reduce__()

        return _dumps(value, lambda each: reduce(each) if _is_sharded(each) else NotImplemented)

    def _add(self, name: str, tensor: DTensor) -> Reference:
        if not isinstance(tensor, FlatDTensor):
            raise ValueError(
                f"{EXTRA}: expected plain tensors, and tensors that are sharded like parameters; "
                f"found {name}, a DTensor {tensor.placements} over {tensor.device_mesh}. Save "
                "its full_tensor()"
            )
        flat = tensor.flat_placement
        param = self._param_of(flat)
        if type(tensor.local) is not Tensor:
            raise ValueError(
                f"{EXTRA}: expected slices that are plain tensors; found {name}, whose slice is a "
                f"{type(tensor.local).__name__}. For an optimizer, call "
                "fe.shard_optimizer(optimizer)"
            )
        if param is None and flat.device_mesh.size() != self._num_ranks:
            raise ValueError(
                f"{EXTRA}: expected tensors that are sharded like parameters of the engine, or "
                f"over its {self._num_ranks} ranks; found {name}, {flat}. Save its full_tensor(), "
                "or save the engine that it belongs to, too"
            )
        saved: Tensor = tensor.detach() if param is None else param.as_saved(tensor.detach())
        self.entries[name] = saved
        return Reference(
            name,
            "" if param is None else param.name,
            tuple(saved.shape),
            tensor.requires_grad,
            flat if param is None else None,
        )

    def _param_of(self, flat: FlatPlacement) -> SavedParam | None:
        """Returns the parameter with this placement. Placements of several parameters may contain
        the same name, because there may be several engines."""
        found = self._params.get(flat.name, ())
        placed = [(_placement(param), param) for param in found]
        same = [param for placement, param in placed if placement is flat]
        equal = [param for placement, param in placed if placement == flat]
        return next(iter([*same, *equal]), None)

    @property
    def section(self) -> dict[str, Any]:
        """The section of a checkpoint with the tensors; empty if there are none."""
        return {EXTRA_TENSORS: self.entries} if self.entries else {}

    @property
    def signature(self) -> list[str]:
        """A line for each tensor. The lines must be equal on all ranks."""
        return sorted(
            f"{each.key} (like {each.param or 'no parameter'}, of shape {each.shape}, "
            f"{self.entries[each.key].dtype})"
            for each in self._references.values()
        )


def digest_of(signature: Sequence[str]) -> int:
    """Returns a checksum of a signature, by which ranks compare their signatures."""
    return zlib.crc32("\n".join(signature).encode())


def check_same_tensors(
    digests: Sequence[int], signature: Sequence[str], group: ProcessGroup | None
) -> None:
    """Check that all ranks save slices of the same tensors. Collective if they do not.

    Args:
        digests: The digest of each rank.
        signature: The signature of this rank.
        group: The process group of all ranks.

    Raises:
        ValueError: A tensor that one rank saves is not saved by another rank. The message names the
            tensor. All ranks raise.
    """
    if len(set(digests)) < 2:
        return
    found: list[Any] = gather_objects(list(signature), group, "a save of extra")
    for rank, lines in enumerate(found):
        for one, other, where in ((found[0], lines, (0, rank)), (lines, found[0], (rank, 0))):
            for line in one:
                if line not in other:
                    raise ValueError(
                        f"{EXTRA}: expected the same sharded tensors on all ranks, because each "
                        f"rank saves its slice; found {line} on data-parallel rank {where[0]} and "
                        f"not on rank {where[1]}"
                    )


class ExtraTargets:
    """Allocates the tensors for the references in the pickles of a checkpoint.

    Args:
        saved: The keys of the checkpoint.
        params: The parameters of the loading model. If empty, all tensors are full.
        is_same_job: Whether the number of ranks is the same as at the save. If it is, a tensor
            without a corresponding parameter gets the saved placement.

    Attributes:
        targets: The tensors to read, on the CPU, by key.
    """

    def __init__(
        self, saved: Saved, params: Sequence[SavedParam] = (), *, is_same_job: bool = False
    ) -> None:
        self.targets: Targets = {}
        self._saved = saved
        self._is_same_job = is_same_job
        self._params = {alias: param for param in params for alias in param.aliases}
        self._tensors: dict[str, Tensor] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which unpickling ``extra`` allocates tensors, which are read afterwards."""
        token = _TARGETS.set(self)
        try:
            yield
        finally:
            _TARGETS.reset(token)

    def tensor_of(self, reference: Reference) -> Tensor:
        """Allocate the tensor of a reference.

        Raises:
            ValueError: The checkpoint does not contain the tensor.
        """
        key = f"{EXTRA_TENSORS}.{reference.key}"
        if self._saved.shape(key) != reference.shape:
            found = self._saved.describe(key) if key in self._saved.entries else "nothing"
            raise ValueError(f"{key}: expected a tensor of shape {reference.shape}; found {found}")
        if key not in self._tensors:
            self._tensors[key] = self._allocate(key, reference)
        return self._tensors[key].requires_grad_(reference.requires_grad)

    def _allocate(self, key: str, reference: Reference) -> Tensor:
        dtype = self._saved.entries[key].properties.dtype  # type: ignore[union-attr]
        param = self._params.get(reference.param)
        if param is not None and param.saved.shape == reference.shape:
            self.targets[key] = zeros = param.zeros(dtype, torch.device("cpu"))
            return param.as_held(zeros)
        placement = reference.placement
        is_slice = isinstance(placement, FlatPlacement) and placement.shape == reference.shape
        if placement is not None and is_slice and self._is_same_job:
            local = allocator.zeros(placement.numel, dtype, "cpu")
            self.targets[key] = FlatDTensor.from_flat_local(local, placement)
        else:
            self.targets[key] = allocator.zeros(reference.shape, dtype, "cpu")
        target: Tensor = self.targets[key]
        return target

    def foreign_slices(self, extra: Any, engine: ShardedModel, *, is_own: bool) -> list[str]:
        """Describe the slices within ``extra`` that do not belong to this rank. Only older
        checkpoints contain slices in pickles.

        Args:
            extra: The unpickled values.
            engine: The engine that loads them.
            is_own: Whether the same rank, of the same number of ranks, has saved ``extra``.
        """
        placements = [
            placement
            for param in saved_params(engine).values()
            if (placement := _placement(param)) is not None
        ]
        meshes = [engine.mesh.device_mesh, *(each.mesh for each in placements)]
        known = set(map(id, self._tensors.values()))
        found: list[str] = []

        def note(each: Any) -> Any:
            if isinstance(each, FlatDTensor) and id(each) not in known:
                flat = each.flat_placement
                same = [p for p in placements if (p.name, p.shape) == (flat.name, flat.shape)]
                is_mine = is_own or flat.mesh.size() == 1
                if not is_mine or flat.mesh not in meshes or (same and flat not in same):
                    found.append(f"{flat.name or 'a tensor'}, {flat}")
            return (int, ()) if isinstance(each, Tensor) else NotImplemented

        # If an object cannot be pickled, only the objects before it are examined.
        with suppress(Exception):
            _pickler(note)(_Discard()).dump(extra)
        return found


def _placement(param: SavedParam) -> FlatPlacement | None:
    return param.held.flat_placement if isinstance(param.held, FlatDTensor) else None


def _is_sharded(value: Any) -> bool:
    if isinstance(value, FlatDTensor):
        return True
    return isinstance(value, DTensor) and not all(each.is_replicate() for each in value.placements)


def _dumps(value: Any, reduce: Callable[[Any], Any]) -> bytes:
    """Serialize as ``torch.save`` does, with ``reduce`` as the pickler's ``reducer_override``."""
    packed = io.BytesIO()
    torch.save(value, packed, SimpleNamespace(__name__="pickle", Pickler=_pickler(reduce)))
    return packed.getvalue()


class _Discard(io.RawIOBase):
    def write(self, content: Any) -> int:
        return len(content)


def _pickler(reduce: Callable[[Any], Any]) -> type[pickle.Pickler]:
    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce(value)

    return Pickler


def _named_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the sharded tensors in containers, each with a unique name."""
    taken: set[str] = set()
    for path, tensor in _paths(value, (), set()):
        first = name = ".".join(map(str, path))
        number = 1
        while name in taken:
            number += 1
            name = f"{first}#{number}"
        taken.add(name)
        yield name, tensor


def _paths(
    value: Any, path: tuple[Any, ...], seen: set[int]
) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if id(value) in seen:
        return
    if _is_sharded(value):
        seen.add(id(value))
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _paths(each, (*path, key), seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _paths(vars(value), path, seen)
