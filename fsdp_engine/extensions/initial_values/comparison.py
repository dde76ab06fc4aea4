"""Compares what ranks have built, by checksums of every parameter and of every persistent buffer.

Ranks send one digest of all checksums, and the checksums themselves only if digests differ. Experts
are compared among the ranks that share them (their *scope*).
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

# Words of a row: sums of rows and sums of columns tell apart two words that changed places.
_ROW = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Holding:
    """What this rank has in one scope: names on the meta device, checksums of the others."""

    metas: list[str] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)


class Holdings:
    """What this rank has, for a comparison with other ranks.

    Args:
        plan: the model's.
        experts: the ranks that share experts, if there are any.
        compare: take checksums.
    """

    def __init__(self, plan: Plan, experts: DataMesh | None, *, compare: bool) -> None:
        # The first of the ranks that share experts names their scope.
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
        """For each scope, of the names on the meta device and of the checksums."""
        return {
            scope: (digest_of(holding.metas), digest_of(holding.sums.items()))
            for scope, holding in self._scopes.items()
        }

    @property
    def details(self) -> dict[str, tuple[list[str], dict[str, int]]]:
        """What ``digests`` are of."""
        return {scope: (holding.metas, holding.sums) for scope, holding in self._scopes.items()}

    def _tensors(self, plan: Plan) -> Iterator[tuple[str, str, Tensor, bool]]:
        """(scope, name, tensor, whether its values count) of parameters and buffers."""
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
    """Of what all data-parallel ranks have built.

    Args:
        holdings: The holdings of this rank.
        digests: :attr:`Holdings.digests` of all of them.
        mesh: these ranks.
    """

    def __init__(
        self, holdings: Holdings, digests: Sequence[Mapping[str, tuple[str, str]]], mesh: DataMesh
    ) -> None:
        self.holdings = holdings
        self.mesh = mesh
        self._digests = digests

    @property
    def metas_differ(self) -> bool:
        """Whether other tensors are on the meta device on some ranks than on others."""
        return self._differ(0)

    def other_value(self) -> str:
        """Returns a text that names the first tensor whose values differ; "": all are equal.
        Collective where they differ."""
        if not self._differ(1):
            return ""
        name, rank, other = _first_other_value(self.holdings, self.mesh)
        return (
            f"{name}: expected the same initial values on all ranks; found others on "
            f"data-parallel rank {rank} than on rank {other}"
        )

    def check_values(self) -> None:
        """Check that all ranks have built the same values. Collective where they have not.

        Raises:
            ValueError: they have not; on all ranks.
        """
        if found := self.other_value():
            raise ValueError(
                f"{found}. Build the model from one seed (torch.manual_seed) or load one "
                'checkpoint on all ranks before shard(), or give initial_values="rank0" to start '
                "from the first rank's; what ranks shall have of their own they can set afterwards"
            )

    def _differ(self, place: int) -> bool:
        firsts: dict[str, str] = {}
        return any(
            firsts.setdefault(scope, pair[place]) != pair[place]
            for each in self._digests
            for scope, pair in each.items()
        )


def _first_other_value(holdings: Holdings, mesh: DataMesh) -> tuple[str, int, int]:
    """The first parameter whose values differ, the rank of the others, and the first that has it.
    Collective."""
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
    """An integer, 0-d, that tells values apart, and their order; the same on any device.

    Args:
        tensor: plain, of any shape and dtype, on a device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    per_word = 8 // flat.dtype.itemsize
    if flat.storage_offset() % per_word or flat.data_ptr() % 8:
        flat = flat.clone()  # 64-bit words must lie where such words may
    num_words = flat.numel() // per_word
    words = flat[: num_words * per_word].view(torch.int64)
    rest = flat[num_words * per_word :].view(_INTEGERS[flat.dtype.itemsize])
    num_rows = num_words // _ROW
    rows, tail = words[: num_rows * _ROW].view(-1, _ROW), words[num_rows * _ROW :]
    total = _in_order(tail)
    if num_rows:
        # Two passes at the speed of memory; a whole running sum would need memory of its own.
        total = total * 3 + _in_order(rows.sum(0)) * 5 + _in_order(rows.sum(1)) * 7
    return total * 9 + _in_order(rest) if rest.numel() else total


def _in_order(values: Tensor) -> Tensor:
    """A sum in which each value counts as often as there are values from it on."""
    return values.cumsum(0, dtype=torch.int64).sum()


def _to_host(sums: Sequence[Tensor]) -> list[int]:
    """Their values, with one wait for each device."""
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
    """(name, module, attribute, buffer) of each buffer once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, buffer


def has_experts(module: nn.Module) -> bool:
    """Whether parameters of ``module`` are experts'."""
    return any(param is not None and is_expert(param) for param in module._parameters.values())


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter)
    return known and tensor.layout == torch.strided and not tensor.is_quantized


def digest_of(lines: Any) -> str:
    """Returns the digest of some objects, by their texts."""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
