"""Checkpoints of a model with separate weights are loaded into a model in which they are tied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp

import fsdp_engine as fe
from fsdp_engine.checkpoint import folder as folder_module
from tests.checkpoint.scene import shared_folder, small
from tests.pool import on_ranks


def _save_dcp(folder: str, engine: fe.Engine) -> None:
    dcp.save({"model": engine.model.state_dict()}, checkpoint_id=folder)


def _save_run(folder: str, engine: fe.Engine) -> None:
    with closing(fe.Checkpointer(folder, engine)) as checkpointer:
        checkpointer.save(step=1)


def _load_run(folder: str, engine: fe.Engine) -> None:
    with closing(fe.Checkpointer(folder, engine)) as checkpointer:
        checkpointer.load()


def _load_folder(folder: str, engine: fe.Engine) -> None:
    fe.load_checkpoint(folder, engine)


FORMATS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "safetensors": (
        lambda folder, engine: fe.export_safetensors(engine, folder),
        lambda folder, engine: fe.load_safetensors(engine, folder),
    ),
    "pretrained": (
        lambda folder, engine: fe.export_safetensors(engine, folder),
        lambda folder, engine: fe.load_pretrained(engine, folder),
    ),
    "folder": (fe.save_checkpoint, _load_folder),
    "run": (_save_run, _load_run),
    "dcp": (_save_dcp, _load_folder),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_values_that_differ_are_refused_and_equal_values_load(name: str, level: str) -> None:
    save, load = FORMATS[name]
    folder = shared_folder()
    model, engine, _ = small(level, steps=0)
    save(f"{folder}/separate", engine)
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
    save(f"{folder}/equal", engine)

    tied, tied_engine, _ = small(level, seed=1, steps=0, tied=True)
    before = tied_engine.full_tensor("head.weight")
    message = r"different ones for \S*embedding\.weight and \S*head\.weight\. The model"
    with pytest.raises(ValueError, match=message):
        load(f"{folder}/separate", tied_engine)
    assert torch.equal(tied_engine.full_tensor("head.weight"), before)
    load(f"{folder}/equal", tied_engine)
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied_engine.full_tensor("head.weight"), engine.full_tensor("head.weight"))


@on_ranks(2)
def test_weights_that_were_tied_at_the_save_are_read_once() -> None:
    folder = shared_folder()
    _, engine, _ = small(steps=0, tied=True)
    _save_run(folder, engine)
    _, other, _ = small(seed=1, steps=0, tied=True)
    with mock.patch.object(folder_module, "read_entries", wraps=folder_module.read_entries) as spy:
        _load_run(folder, other)
    keys = [key for call in spy.call_args_list for key in call.args[2]]
    assert "model.embedding.weight" in keys
    assert "model.head.weight" not in keys
    assert torch.equal(other.full_tensor("head.weight"), engine.full_tensor("head.weight"))
