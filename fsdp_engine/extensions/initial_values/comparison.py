"""Comparison of the models of all ranks, by checksums of each parameter and persistent buffer.

Ranks send one digest of all checksums, and the checksums only if digests differ. Experts are
compared among the ranks that share them (their *scope*).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.units.plan import Plan, is_expert

# Number of 64-bit words in a row. Sums of rows and of columns, weighted by place, differ if two
# words are swapped, except for few pairs of places.
_ROW = 1024
# Odd numbers, whose products wrap around. With small factors an exchange of two words may have no
# effect: with 5 and 7, that of words which are 7 columns and 5 rows apart.
_FACTORS = (
    *(-7046029254386353131, 6364136223846793005),
    *(-4417276706812531889, 2862933555777941757),
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Holding:
    """Tensors of this rank in one scope: names of meta tensors, and checksums of the others."""

    metas: list[str] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)


class Holdings:
    """Tensors of this rank, to compare them with other ranks.

    Args:
        plan: The plan of the model.
        experts: The ranks that share experts. None: there are no experts.
        compare: Whether to compute checksums.
    """

    def __init__(self, plan: Plan, experts: DataMesh | None, *, compare: bool) -> None:
        # The first of the ranks that share experts identifies their scope.
        ranks = experts.device_mesh.mesh if experts is not None else None
        self._expert_scope = f"experts of {int(ranks.min())}" if ranks is not None else ""
        self._scopes: dict[str, _Holding] = {}
        names: list[tuple[str, str]] = []
        sums: list[Tensor] = []
        for scope, name, tensor, counts in self._tensors(plan):
            holding = self._scopes.setdefault(scope, _Holding())
            if tensor.is_meta:
                holding.metas.append(name)
            elif compare and counts and _is_plain(tensor):
                names.append((scope, name))
                sums.append(checksum(tensor))
        for (scope, name), value in zip(names, _to_host(sums), strict=True):
            self._scopes[scope].sums[name] = value

    @property
    def digests(self) -> dict[str, tuple[str, str]]:
        """For each scope, digests of the names of meta tensors and of the checksums."""
        return {
            scope: (digest_of(holding.metas), digest_of(holding.sums.items()))
            for scope, holding in self._scopes.items()
        }

    @property
    def details(self) -> dict[str, tuple[list[str], dict[str, int]]]:
        """For each scope, the names of meta tensors and the checksums."""
        return {scope: (holding.metas, holding.sums) for scope, holding in self._scopes.items()}

    def _tensors(self, plan: Plan) -> Iterator[tuple[str, str, Tensor, bool]]:
        """Yields scope, name and tensor of parameters and buffers, and whether to compare them."""
        for unit in plan.units:
            for part in unit.buffers:
                codec, scope = part.make_codec(), self._scope(part.kind.is_expert)
                for record in part.records:
                    meta = record.param.is_meta
                    value = record.param if meta else codec.initial_value(record.shard)
                    yield scope, record.name, value, True
        for name, module, attribute, buffer in named_buffers(plan.root):
            saved = attribute not in module._non_persistent_buffers_set
            yield self._scope(has_experts(module)), name, buffer, saved

    def _scope(self, is_of_experts: bool) -> str:
        return self._expert_scope if is_of_experts else ""


class Comparison:
    """Comparison of the models of all data-parallel ranks.

    Args:
        holdings: The holdings of this rank.
        digests: :attr:`Holdings.digests` of each rank.
        mesh: The data-parallel ranks.
    """

    def __init__(
        self, holdings: Holdings, digests: Sequence[Mapping[str, tuple[str, str]]], mesh: DataMesh
    ) -> None:
        self.holdings = holdings
        self.mesh = mesh
        self._digests = digests

    @property
    def metas_differ(self) -> bool:
        """Whether the sets of tensors on the meta device differ between ranks."""
        return self._differ(0)

    def other_value(self) -> str:
        """Returns a text that names the first tensor whose values differ; "" if all are equal.
        Collective if values differ."""
        if not self._differ(1):
            return ""
        name, rank, other = _first_other_value(self.holdings, self.mesh)
        return (
            f"{name}: expected the same initial values on all ranks; found different values on "
            f"data-parallel ranks {other} and {rank}"
        )

    def check_values(self) -> None:
        """Check that all ranks have built the same values. Collective if values differ.

        Raises:
            ValueError: Values differ. Raised on all ranks.
        """
        if found := self.other_value():
            raise ValueError(
                f"{found}. Build the model from one seed (torch.manual_seed) or load one "
                'checkpoint on all ranks before shard(), or pass initial_values="rank0" to start '
                "from the values of the first rank. Set values that differ between ranks afterwards"
            )

    def _differ(self, place: int) -> bool:
        firsts: dict[str, str] = {}
        return any(
            firsts.setdefault(scope, pair[place]) != pair[place]
            for each in self._digests
            for scope, pair in each.items()
        )


def _first_other_value(holdings: Holdings, mesh: DataMesh) -> tuple[str, int, int]:
    """Returns the first parameter whose values differ, the rank on which they differ, and the first
    rank that has the parameter. Collective."""
    found: list[Any] = gather_objects(holdings.details, mesh.control_group)
    firsts: dict[str, tuple[int, dict[str, int]]] = {}
    for rank, details in enumerate(found):
        for scope, (_, sums) in details.items():
            first, expected = firsts.setdefault(scope, (rank, sums))
            for name, value in sums.items():
                if expected.get(name) != value:
                    return name, rank, first
    raise AssertionError("digests differ but checksums do not")


def checksum(tensor: Tensor) -> Tensor:
    """Returns a 0-d int64 tensor that depends on the values and their order, not on the device.

    Args:
        tensor: A plain tensor with values, of any shape and dtype.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    per_word = 8 // flat.dtype.itemsize
    if flat.storage_offset() % per_word or flat.data_ptr() % 8:
        flat = flat.clone()  # The view below needs 64-bit alignment.
    num_words = flat.numel() // per_word
    words = flat[: num_words * per_word].view(torch.int64)
    rest = flat[num_words * per_word :].view(_INTEGERS[flat.dtype.itemsize])
    num_rows = num_words // _ROW
    rows, tail = words[: num_rows * _ROW].view(-1, _ROW), words[num_rows * _ROW :]
    total = _in_order(tail)
    if num_rows:
        # Both sums read the words at memory bandwidth. A cumulative sum of all words would need
        # memory for a copy.
        total = total * _FACTORS[0] + _in_order(rows.sum(0)) * _FACTORS[1]
        total = total + _in_order(rows.sum(1)) * _FACTORS[2]
    return total * _FACTORS[3] + _in_order(rest) if rest.numel() else total


def _in_order(values: Tensor) -> Tensor:
    """Returns the sum of the values, each weighted by the number of values from it on."""
    return values.cumsum(0, dtype=torch.int64).sum()


def _to_host(sums: Sequence[Tensor]) -> list[int]:
    """Returns the values, with one host sync for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(place)
    values = [0] * len(sums)
    for places in by_device.values():
        found = torch.stack([sums[place] for place in places]).tolist()
        for place, value in zip(places, found, strict=True):
            values[place] = value
    return values


def named_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields the name, module, attribute and tensor of each buffer once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, buffer


def has_experts(module: nn.Module) -> bool:
    """Returns whether ``module`` has parameters of experts."""
    return any(param is not None and is_expert(param) for param in module._parameters.values())


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter)
    return known and tensor.layout == torch.strided and not tensor.is_quantized


def digest_of(lines: Any) -> str:
    """Returns a digest of the texts of some objects."""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
