"""The contents of a Hugging Face folder, in its files and in transformers."""

from __future__ import annotations

from pathlib import Path

import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.pretrained.families import FAMILIES


def in_files(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def read_by_transformers(family: str, folder: str) -> dict[str, Tensor]:
    """All parameters and buffers, those that are not saved, too."""
    name, *_ = FAMILIES[family]
    model = getattr(transformers, name).from_pretrained(folder)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
