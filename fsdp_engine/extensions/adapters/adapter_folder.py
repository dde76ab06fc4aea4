"""Folders of PEFT's adapters: ``adapter_config.json`` and ``adapter_model.safetensors``.

Adapters are small, so they are gathered on the first rank, and PEFT writes them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.checkpoint.directory import sync_folder
from fsdp_engine.checkpoint.model_state import check_at_rest, check_shared
from fsdp_engine.checkpoint.reading_weights import Match, match, whole
from fsdp_engine.checkpoint.safetensors_folder import INDEX, SINGLE, read_header
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.extensions.adapters.peft_names import adapter_names, check_is_stored, peft_model

CARD = "README.md"
CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# The config of an older adapter, while it is being replaced.
BEFORE = "adapter_config.json.before"
STAGING = ".exporting-"
# Fields in the configs of PEFT's methods that determine the output of an adapter, in addition to
# its tensors.
_COMPUTES = (
    "peft_type",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "alpha",
    "randlora_alpha",
    "psoft_alpha",
    "scaling",
    "random_loc_seed",
    "projection_prng_key",
    "use_cayley_neumann",
    "num_cayley_neumann_terms",
    "use_idwt",
    "wavelet_family",
    "act_fn",
)


def holds_adapter(folder: Path) -> bool:
    """Returns whether a folder contains an adapter and no model."""
    is_model = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return (folder / CONFIG).is_file() and not is_model


def match_adapter(engine: Engine, folder: Path, adapter: str | None) -> tuple[Match, set[str]]:
    """Match an adapter's folder with a model.

    Args:
        engine: The engine of a PEFT model.
        folder: The folder of the adapter.
        adapter: Name of the adapter in the model. None: the model's only adapter, or "default" if
            it has several.

    Returns:
        The match, and the names in the model of all tensors of the adapter.

    Raises:
        ValueError: The model is not a PEFT model or has no such adapter, a setting that determines
            the output (such as ``lora_alpha``) differs between folder and model, or the weights are
            a pickle.
        OSError: A file is missing.
    """
    found, _ = peft_model(engine.model)
    if found is None:
        raise ValueError(
            f"{folder}: expected a base model's folder, since the model is not a PEFT model; "
            f"found {CONFIG}. To load an adapter, call peft.get_peft_model before fe.shard"
        )
    adapter = _chosen(found, adapter)
    _check_config(folder, found.peft_config[adapter], adapter)
    if not (folder / WEIGHTS).is_file() and (folder / PICKLE).is_file():
        raise ValueError(f"{folder}: expected {WEIGHTS}; found {PICKLE}, a pickle")
    check_is_stored(engine.model, adapter)
    stored = {each.name: each for each in read_header(folder / WEIGHTS)}
    own = adapter_names(engine.model, adapter)
    if not stored.keys() <= own.keys():
        # PEFT saves embeddings with an adapter that trains them, or if they were resized.
        more = adapter_names(engine.model, adapter, embeddings=True)
        own |= {name: place for name, place in more.items() if name in stored}
    pieces = {own.get(name, name): [whole(each)] for name, each in stored.items()}
    return match(engine, pieces, wanted=set(own.values())), set(own.values())


def save_adapters(engine: Engine, folder: Path, dtype: torch.dtype | None, tokenizer: Any) -> None:
    """Write every adapter as ``PeftModel.save_pretrained`` would: "default" into ``folder``, others
    into subfolders. Collective.

    An older ``adapter_config.json`` is renamed first and the new one written last, because without
    it the folder is not an adapter.

    Args:
        engine: The engine of a PEFT model.
        folder: A folder on storage of the first rank; created if it does not exist.
        dtype: The dtype of floating-point tensors. None: that of the main weights.
        tokenizer: An object with ``save_pretrained(folder)``.

    Raises:
        ValueError, RuntimeError, OSError: See ``save_pretrained`` of ``pretrained/save.py``.
    """
    what, group, is_first = "save_pretrained", engine.ranks.control_group, engine.ranks.rank == 0
    found, prefix = peft_model(engine.model)
    prompts = any(each.is_prompt_learning for each in found.peft_config.values())
    names: dict[str, dict[str, str]] = {}
    staging: Path | None = None
    error: Exception | None = None
    try:
        check_at_rest(engine)
        engine.missing_values.check()
        check_shared(what, engine)
        if prompts and dtype is not None:
            raise ValueError(
                "dtype: expected None for prompt learning, whose tensors PEFT computes; found "
                f"{dtype}"
            )
        # One rank finds the names: PEFT may query the hub whether a vocabulary was resized.
        if is_first:
            names = {
                each: adapter_names(engine.model, each, embeddings="auto")
                for each in found.peft_config
            }
            for each, own in names.items():
                if not own:
                    raise ValueError(
                        f"adapter {each!r}: expected tensors in the model; found none, as after "
                        "merge_and_unload(). Save the merged model with its own save_pretrained "
                        "within engine.unsharded()"
                    )
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{STAGING}*"):  # Left by jobs that were killed.
                shutil.rmtree(left, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
    except Exception as caught:
        error = caught
    try:
        names = agree(what, error, group, names)[0]
        wanted = dict.fromkeys(name for each in names.values() for name in each.values())
        tensors = _gathered(engine, list(wanted), dtype, keeps=is_first)
        # PEFT runs the module that computes prompts, so it must be unsharded.
        whole_prompts = engine.unsharded(found.prompt_encoder) if prompts else nullcontext()
        with whole_prompts, torch.no_grad():
            try:
                if staging is not None:
                    state = {name.removeprefix(prefix): value for name, value in tensors.items()}
                    _write(engine, found, folder, staging, names, state)
                    if tokenizer is not None:
                        tokenizer.save_pretrained(str(folder))
            except Exception as caught:
                error = caught
    except Exception as caught:  # Raised on all ranks.
        error = caught
    if staging is not None:
        shutil.rmtree(staging, ignore_errors=True)
    # All ranks return or raise after the folder has its final content.
    agree(what, error, group)


def _chosen(model: Any, adapter: str | None) -> str:
    known = list(model.peft_config)
    if adapter is None:
        adapter = known[0] if len(known) == 1 else "default"
    if adapter not in known:
        raise ValueError(f"adapter: expected one of {', '.join(known)}; found {adapter!r}")
    return adapter


def _check_config(folder: Path, own: Any, adapter: str) -> None:
    """Check that the settings of ``_COMPUTES`` are the same in the folder and the model."""
    path = folder / CONFIG
    try:
        stored = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: expected a JSON object; found {error}") from error
    values = own.to_dict()
    for key in _COMPUTES:
        expected = getattr(values.get(key), "value", values.get(key))
        if key in stored and key in values and stored[key] != expected:
            raise ValueError(
                f"{path}: expected {key} of the model's adapter {adapter!r}, {expected!r}; found "
                f"{stored[key]!r}"
            )


def _gathered(
    engine: Engine, names: list[str], dtype: torch.dtype | None, *, keeps: bool
) -> dict[str, Tensor]:
    """Gather tensors to host memory. Collective.

    Args:
        engine: The engine of the model.
        names: Names of the tensors.
        dtype: Dtype of floating-point tensors. None: that of each tensor.
        keeps: Whether this rank returns the tensors; other ranks return an empty dict.

    Raises:
        Exception: A tensor cannot be copied to host memory. All ranks raise.
    """
    found: dict[str, Tensor] = {}
    error: Exception | None = None
    params = {alias for b in engine.buffers for record in b.records for alias in record.aliases}
    state = engine.model.state_dict()
    for name in names:
        value = engine.full_tensor(name) if name in params else state[name]
        try:
            if keeps and error is None:
                found[name] = _copied_to_host(value, dtype)
        except Exception as caught:  # the other ranks gather the remaining tensors
            error = caught
            found.clear()
    agree("save_pretrained", error, engine.ranks.control_group)
    return found


def _copied_to_host(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", cast, copy=True)


def _write(
    engine: Engine,
    model: Any,
    folder: Path,
    staging: Path,
    names: Mapping[str, Mapping[str, str]],
    state: dict[str, Tensor],
) -> None:
    """Let PEFT write adapters with gathered tensors into ``staging``, then rename the files."""
    if (folder / CARD).is_file():
        shutil.copyfile(folder / CARD, staging / CARD)  # PEFT adds to the existing card.
    for adapter, stored in names.items():
        has_embeddings = len(stored) > len(adapter_names(engine.model, adapter))
        model.save_pretrained(
            str(staging),
            selected_adapters=[adapter],
            save_embedding_layers=has_embeddings,
            state_dict=dict(state),
        )
    if (staging / CARD).is_file():
        os.replace(staging / CARD, folder / CARD)
    for adapter in names:
        name = "" if adapter == "default" else adapter
        _publish(staging / name, folder / name)


def _publish(new: Path, old: Path) -> None:
    """Move the files of an adapter into place, replacing those of an older adapter."""
    old.mkdir(exist_ok=True)
    if (old / CONFIG).is_file():
        os.replace(old / CONFIG, old / BEFORE)
    for name in (WEIGHTS, CONFIG):
        with open(new / name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new / name, old / name)
    sync_folder(old)
    (old / BEFORE).unlink(missing_ok=True)
