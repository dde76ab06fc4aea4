"""Loads and saves twenty model families of transformers, and compares bit for bit.

    python benchmarks/pretrained_families.py     # a few minutes

Small random models, written by transformers' ``save_pretrained``, loaded by ``fe.load_pretrained``
on 1, 2 and 4 gloo ranks at levels 0 and 3, and compared with ``from_pretrained``: all parameters
and buffers. Then saved by ``fe.save_pretrained`` and compared with the files of transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

import fsdp_engine as fe
from tests.pretrained.families import FAMILIES, build, builder
from tests.pretrained.test_load import read_by_transformers

LEVELS = ("no_shard", "optim_grads_params")
RANKS = (1, 2, 4)


def in_files(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """Names that are in one of them only, or whose tensors differ in any bit."""
    same = [
        name
        for name in found.keys() & expected.keys()
        if found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
    ]
    return len(found.keys() | expected.keys()) - len(same)


def load_and_save(root: str) -> dict[str, dict[str, dict[str, int]]]:
    """Tensors that differ after loading and after saving, by family and level."""
    results: dict[str, dict[str, dict[str, int]]] = {}
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)  # wav2vec2 creates a parameter that is not on the meta device
    for family in FAMILIES:
        theirs = Path(root) / family
        expected = {n: t.detach() for n, t in read_by_transformers(family, str(theirs)).items()}
        for level in LEVELS:
            model = builder(family)()
            engine = fe.shard(model, strategy=level, initial_values="empty")
            fe.load_pretrained(engine, theirs)
            found = {name: engine.full_tensor(name) for name, _ in model.named_parameters()}
            found |= dict(model.named_buffers())
            ours = Path(root) / f"{family}, {dist.get_world_size()} ranks, {level}"
            fe.save_pretrained(engine, ours)
            results.setdefault(family, {})[level] = {
                "after loading": differing(found, expected),
                "after saving": differing(in_files(ours), in_files(theirs)),
            }
    return results


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        torch.manual_seed(0)
        names: dict[str, dict[str, int]] = {}
        for family in FAMILIES:
            model: Any = build(family)
            model.save_pretrained(Path(root) / family)
            files, memory = set(in_files(Path(root) / family)), set(model.state_dict())
            names[family] = {
                "in files": len(files),
                "in memory": len(memory),
                "in files alone": len(files - memory),
                "in memory alone": len(memory - files),
            }
        runs = {num: harness.run_ranks(load_and_save, num, root) for num in RANKS}
    rows, results = [], {}
    for family, (name, *_) in FAMILIES.items():
        ways = {
            f"{num} ranks, {level}": runs[num][family][level] for num in RANKS for level in LEVELS
        }
        results[family] = {"class": name, "names": names[family], "tensors that differ": ways}
        equal = [
            f"{sum(way[when] == 0 for way in ways.values())} of {len(ways)}"
            for when in ("after loading", "after saving")
        ]
        rows.append([family, *map(str, names[family].values()), *equal])
    columns = ["family", *next(iter(names.values())), "loads bit-equal", "saves bit-equal"]
    harness.print_table("families of transformers", columns, rows)
    harness.write_results("pretrained_families", results)


if __name__ == "__main__":
    main()
