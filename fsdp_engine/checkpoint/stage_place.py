"""Finds the place of a model among the models of one job, such as its stage in a pipeline.

Stages may have parameters of the same names and shapes, so a stage could load the checkpoint of
another stage. The place of a model is its stage, which ``PipelineStage`` gives to the engine, and
the coordinate of its ranks along each dimension of the job's mesh that the engine does not use:

    mesh ("pp", "dp") of (2, 4) ranks, engine on mesh["dp"]: {"pp": "1 of 2"} on ranks 4 to 7

Dimensions along which ranks hold the same weights (recognized by names of data and context
parallelism) are ignored. A folder belongs to the place that first saved into it; a small file
contains that place.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.comm.groups import Ranks

# The place of a model: values such as "1 of 2" by dimension of the mesh, or by "stage".
Place = dict[str, str]

_MARKER = ".stage"
_SAME_WEIGHTS = re.compile(
    r"^(dp|ddp|fsdp|hsdp|cp|sp|data|context|sequence|outer|inner|node)|repl|shard", re.I
)


def place_of(ranks: Ranks, stage: str = "") -> Place:
    """Returns the place of a model. It is empty if the job has only one model.

    Args:
        ranks: The ranks of the model.
        stage: The stage of a pipeline, such as "1 of 2". "": unknown.
    """
    place = {"stage": stage} if stage else {}
    root = _root_of(ranks.device_mesh)
    here = root.get_coordinate()
    if here is None or root.mesh_dim_names is None:
        return place
    own = set(ranks.ranks)
    for dim, (name, size) in enumerate(zip(root.mesh_dim_names, root.mesh.shape, strict=True)):
        index: Any = (*here[:dim], slice(None), *here[dim + 1 :])
        row = root.mesh[index].tolist()
        if len(own.intersection(row)) == 1 and size > 1 and not _SAME_WEIGHTS.search(name):
            place[name] = f"{here[dim]} of {size}"
    return place


def differences(saved: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Describe how the places of a checkpoint and of a model differ. Returns "" if the keys that
    both places have are equal."""
    keys = [key for key in saved if key in own and saved[key] != own[key]]
    if not keys:
        return ""
    expected, found = (", ".join(f"{key} {each[key]}" for key in keys) for each in (own, saved))
    return f"expected the checkpoint of {expected}; found that of {found}"


def claim_folder(folder: Path, place: Place) -> None:
    """Create ``folder``, and mark it as belonging to ``place``. Does nothing if ``place`` is empty.

    Raises:
        ValueError: Another place has saved into the folder.
        OSError: The folder cannot be written.
    """
    if not place:
        return
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    content = json.dumps(place).encode()
    try:
        _create(marker, content)
    except FileExistsError:
        if text := differences(read_place(marker.read_bytes()), place):
            raise ValueError(
                f"{folder}: {text}. Each stage saves into a folder of its own, such as "
                f'f"{{folder}}/stage-{{index}}"; remove {_MARKER} to use this one for another stage'
            ) from None


def _create(path: Path, content: bytes) -> None:
    """Create a file by a link, so that no process finds it without its content.

    Raises:
        FileExistsError: The file exists.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(path, "xb") as file:
            file.write(content)
    finally:
        temporary.unlink()


def read_place(content: Any) -> Place:
    """Returns a place from its JSON. It is empty if ``content`` is not such JSON."""
    try:
        found = json.loads(content)
    except (ValueError, TypeError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    root: DeviceMesh | None = getattr(mesh, "_get_root_mesh", lambda: None)()
    return mesh if root is None else root
