"""Determines the initial values of sharded parameters, and whether all ranks have the same ones.

Each rank keeps its shard of every parameter, so shards are consistent only if all ranks have built
the same values. Three cases are distinguished before anything is changed:

    values of the ranks                          initial values of the sharded parameters
    ==========================================   ==========================================
    equal on all ranks                           these; nothing is sent
    values on the first rank, meta on others     the first rank's, broadcast unit by unit
    different on some rank                       an error names the first different tensor;
                                                 with ``initial_values="rank0"`` the first rank's

Ranks compare checksums of every parameter and of every persistent buffer. Ranks send one digest of
all checksums, and the checksums themselves only if digests differ. Experts are compared among the
ranks that share them (their *scope*).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import broadcast_together_, gather_objects
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.units.plan import Plan, is_expert

SAME, FIRST, EMPTY, OWN = "same", "rank0", "empty", "own"
# Of other interfaces: parameters start from the first rank's values, which are not compared.
FIRST_PARAMETERS = "rank0 parameters"
CHOICES = (SAME, FIRST, EMPTY)  # of shard(); FSDP2 lets each rank keep slices of its own values

# Words of a row: sums of rows and sums of columns tell apart two words that changed places.
_ROW = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Start(NamedTuple):
    """The agreement of all ranks.

    Attributes:
        seed: of the values of tensors that are on the meta device on all ranks.
        from_first: parameters are those of the first rank.
        whole: so are buffers, and only the first rank needs to have values.
        tag: the first that all ranks have free for messages.
        is_empty: tensors that are on the meta device on all ranks get memory, and their values
            later.
    """

    seed: int = 0
    from_first: bool = False
    whole: bool = False
    tag: int = 0
    is_empty: bool = False


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
            scope: (_digest(holding.metas), _digest(holding.sums.items()))
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
            yield self._scope(_has_experts(module)), name, buffer, saved

    def _scope(self, is_of_experts: bool) -> str:
        return self._expert_scope if is_of_experts else ""


def decide(
    plan: Plan,
    holdings: Holdings,
    digests: Sequence[dict[str, tuple[str, str]]],
    choice: str,
    mesh: DataMesh,
) -> tuple[bool, bool]:
    """``from_first`` and ``whole`` of a :class:`Start`. Collective where ranks differ.

    Args:
        digests: of all ranks.
        choice: what the user says, one of ``CHOICES``; or ``OWN``: values that differ are no error,
            but a warning.

    Raises:
        ValueError: on all ranks: values differ, the first rank has not got one that others have,
            or a module on the meta device cannot make its own.
    """
    firsts: dict[str, tuple[str, str]] = {}
    for each in digests:
        for scope, pair in each.items():
            firsts.setdefault(scope, pair)
    pairs = [(firsts[scope], pair) for each in digests for scope, pair in each.items()]
    if any(first[0] != pair[0] for first, pair in pairs):
        _check_first_has_all(plan, holdings, mesh)
        return True, True
    if plan.lacks and choice != EMPTY:
        raise ValueError(plan.lacks)
    if choice != FIRST and any(first[1] != pair[1] for first, pair in pairs):
        name, rank, other = _first_other_value(holdings, mesh)
        found = f"{name}: expected the same initial values on all ranks; found others on "
        found += f"data-parallel rank {rank} than on rank {other}"
        if choice != OWN:
            raise ValueError(
                f"{found}. Build the model from one seed (torch.manual_seed) or load one "
                'checkpoint on all ranks before shard(), or give initial_values="rank0" to start '
                "from the first rank's; what ranks shall have of their own they can set afterwards"
            )
        warnings.warn(
            f"{found}. Each rank keeps its slice of its own, as with FSDP2: seed all ranks alike, "
            "or give parameters values afterwards",
            stacklevel=2,
        )
    return choice == FIRST, choice == FIRST


def _check_first_has_all(plan: Plan, holdings: Holdings, mesh: DataMesh) -> None:
    """Some ranks have values where others are on the meta device: the first must have them."""
    found: list[Any] = gather_objects((holdings.details, plan.lacks), mesh.control_group)
    firsts: dict[str, tuple[int, set[str]]] = {}
    for rank, (details, lacks) in enumerate(found):
        for scope, (metas, _) in details.items():
            if scope not in firsts:
                if lacks and metas:
                    raise ValueError(lacks)
                firsts[scope] = rank, set(metas)
            first, first_metas = firsts[scope]
            held = first_metas.difference(metas)
            if held:
                name = next(each for each in found[first][0][scope][0] if each in held)
                raise ValueError(
                    f"{name}: expected values on data-parallel rank {first}, the first, from which "
                    f"others on the meta device get them; found it on the meta device there, and "
                    f"values on rank {rank}. Build the model with values on rank {first} (and on "
                    "the meta device on the others, if you like), or on the meta device on all"
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


def broadcast_buffers(model: nn.Module, mesh: DataMesh, experts: DataMesh | None) -> None:
    """Give all ranks the first one's buffers; experts, the first of theirs. Collective.

    A buffer that several modules have on the first rank becomes one buffer on all ranks. On ranks
    that were moved to the meta device, torch has made a tensor for each module.

    Raises:
        ValueError: ranks have buffers of other names, shapes or dtypes; on all ranks.
    """
    places: dict[bool, dict[str, tuple[nn.Module, str]]] = {False: {}, True: {}}
    for prefix, module in model.named_modules():
        is_expert_module = experts is not None and _has_experts(module)
        for attribute, buffer in module._buffers.items():
            if type(buffer) is Tensor and buffer.layout == torch.strided:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places[is_expert_module][name] = module, attribute
    for of_experts, own in places.items():
        ranks = experts if of_experts and experts is not None else mesh
        if ranks is mesh or experts is not None:
            _broadcast(own, ranks)


def _broadcast(places: dict[str, tuple[nn.Module, str]], ranks: DataMesh) -> None:
    """Give ``ranks`` the buffers of the first of them.

    Args:
        places: module and attribute of each buffer, by name.
        ranks: of the same buffers.
    """
    buffers = {name: module._buffers[attribute] for name, (module, attribute) in places.items()}
    first_names: dict[int, str] = {}
    owners = {name: first_names.setdefault(id(buffer), name) for name, buffer in buffers.items()}
    mine = [f"{n}: shape {tuple(b.shape)}, {b.dtype}" for n, b in buffers.items() if b is not None]
    told: list[Any] = gather_objects(
        (_digest(mine), owners if ranks.is_first else None), ranks.control_group
    )
    if any(digest != told[0][0] for digest, _ in told):
        _raise_first_other_buffer(mine, ranks)
    sent: list[Tensor] = []
    for name, owner in told[0][1].items():
        module, attribute = places[name]
        if owner != name:
            other, of_other = places[owner]
            module._buffers[attribute] = other._buffers[of_other]
            continue
        buffer = module._buffers[attribute]
        assert buffer is not None
        if not buffer.numel():
            continue
        # Two modules may have one buffer here and two on the first rank. An expanded tensor
        # cannot be written to.
        if owners[name] != name or 0 in buffer.stride():
            buffer = module._buffers[attribute] = buffer.clone(
                memory_format=torch.contiguous_format
            )
        sent.append(buffer.detach())
    values = [buffer.reshape(-1).view(torch.uint8) for buffer in sent]
    broadcast_together_(values, ranks.control_group)
    for value, buffer in zip(values, sent, strict=True):
        buffer.copy_(value.view(buffer.dtype).view(buffer.shape))


def _raise_first_other_buffer(mine: list[str], ranks: DataMesh) -> None:
    found: list[Any] = gather_objects(mine, ranks.control_group)
    for rank, other in enumerate(found):
        for one, two, has, lacks in ((found[0], other, 0, rank), (other, found[0], rank, 0)):
            for line in one:
                if line not in two:
                    raise ValueError(
                        f"{line.partition(': ')[0]}: expected the same buffers on all ranks, which "
                        f"get the first rank's values; found [{line}] on data-parallel rank {has} "
                        f"and not on rank {lacks}. Build the same model on all ranks"
                    )
    raise ValueError("buffers: expected the same order on all ranks; found others")


def _has_experts(module: nn.Module) -> bool:
    return any(param is not None and is_expert(param) for param in module._parameters.values())


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter)
    return known and tensor.layout == torch.strided and not tensor.is_quantized


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
