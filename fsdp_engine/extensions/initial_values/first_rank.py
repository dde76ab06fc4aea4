"""Initial values of the first rank: checks that it has them, and broadcasts of buffers.

Parameters are broadcast when the buffers of their units are built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import broadcast_together_, gather_objects
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.initial_values.comparison import Comparison, digest_of, has_experts
from fsdp_engine.memory.allocator import as_bytes


def check_first_has_all(comparison: Comparison, lacks: str) -> None:
    """Check that the first rank has all values that other ranks have.

    Args:
        comparison: The comparison of all data-parallel ranks.
        lacks: Error text that names values that this rank cannot initialize; "" for none.

    Raises:
        ValueError: The first rank lacks a value. Raised on all ranks.
    """
    found: list[Any] = gather_objects(
        (comparison.holdings.details, lacks), comparison.mesh.control_group
    )
    firsts: dict[str, tuple[int, set[str]]] = {}
    for rank, (details, missing) in enumerate(found):
        for scope, (metas, _) in details.items():
            if scope not in firsts:
                if missing and metas:
                    raise ValueError(missing)
                firsts[scope] = rank, set(metas)
            first, first_metas = firsts[scope]
            held = first_metas.difference(metas)
            if held:
                name = next(each for each in found[first][0][scope][0] if each in held)
                raise ValueError(
                    f"{name}: expected values on data-parallel rank {first}, the first, since "
                    f"other ranks copy them from there; found it on the meta device there, and "
                    f"values on rank {rank}. Build the model with values on rank {first}, or on "
                    "the meta device on all ranks"
                )


def broadcast_buffers(model: nn.Module, mesh: DataMesh, experts: DataMesh | None) -> None:
    """Copy the buffers of the first rank to all ranks. Buffers of experts are copied from the first
    of the ranks that share them. Collective.

    A buffer that several modules share on the first rank becomes shared on all ranks. Where the
    model was moved to the meta device, torch has created a separate tensor for each module.

    Raises:
        ValueError: Names, shapes or dtypes of buffers differ. Raised on all ranks.
    """
    places: dict[bool, dict[str, tuple[nn.Module, str]]] = {False: {}, True: {}}
    for prefix, module in model.named_modules():
        is_expert_module = experts is not None and has_experts(module)
        for attribute, buffer in module._buffers.items():
            if type(buffer) is Tensor and buffer.layout == torch.strided:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places[is_expert_module][name] = module, attribute
    for of_experts, own in places.items():
        _broadcast(own, experts if of_experts and experts is not None else mesh)


def _broadcast(places: dict[str, tuple[nn.Module, str]], ranks: DataMesh) -> None:
    """Copy buffers from the first of ``ranks`` to the others.

    Args:
        places: Module and attribute of each buffer, by name.
        ranks: The ranks that have these buffers.
    """
    buffers = {name: module._buffers[attribute] for name, (module, attribute) in places.items()}
    first_names: dict[int, str] = {}
    owners = {name: first_names.setdefault(id(buffer), name) for name, buffer in buffers.items()}
    mine = [f"{n}: shape {tuple(b.shape)}, {b.dtype}" for n, b in buffers.items() if b is not None]
    answers: list[Any] = gather_objects(
        (digest_of(mine), owners if ranks.is_first else None), ranks.control_group
    )
    if any(digest != answers[0][0] for digest, _ in answers):
        _raise_first_other_buffer(mine, ranks)
    sent: list[Tensor] = []
    for name, owner in answers[0][1].items():
        module, attribute = places[name]
        if owner != name:
            other, of_other = places[owner]
            module._buffers[attribute] = other._buffers[of_other]
            continue
        buffer = module._buffers[attribute]
        assert buffer is not None
        if not buffer.numel():
            continue
        # A buffer that two modules share here may be two buffers on the first rank. Expanded
        # tensors cannot be written to. In both cases a copy replaces the buffer.
        if owners[name] != name or 0 in buffer.stride():
            buffer = module._buffers[attribute] = buffer.clone(
                memory_format=torch.contiguous_format
            )
        sent.append(buffer.detach())
    values = [as_bytes(buffer) for buffer in sent]
    broadcast_together_(values, ranks.control_group)
    for value, buffer in zip(values, sent, strict=True):
        if value.data_ptr() != buffer.data_ptr():  # a copy, since the buffer is not contiguous
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
    raise ValueError("buffers: expected the same order on all ranks; found different orders")
