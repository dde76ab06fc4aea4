"""Values of the model's own for what a folder does not have, where there are none yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from fsdp_engine.checkpoint.model_state import MODEL
from fsdp_engine.checkpoint.unfinished_load import has_nothing
from fsdp_engine.engine import Engine


def modules_without_values(engine: Engine, missing: Collection[str]) -> list[nn.Module]:
    """Modules whose tensors are not in the folder, and have no values, since the model was sharded
    with ``initial_values="empty"``; children first, as they were built.

    Args:
        engine: of the model.
        missing: names of its tensors.

    Raises:
        ValueError: a module has some of its tensors in the folder and some not: it can give itself
            values only as a whole.
    """
    model = engine.model
    without = {name for name in missing if has_nothing(engine, f"{MODEL}.{name}")}
    found = []
    for prefix, module in reversed(list(model.named_modules())):
        own = [
            f"{prefix}.{name}" if prefix else name
            for name, value in {**module._parameters, **module._buffers}.items()
            if value is not None and name not in module._non_persistent_buffers_set
        ]
        lacking = [name for name in own if name in without]
        if not lacking:
            continue
        if len(lacking) < len(own):
            there = next(name for name in own if name not in without)
            raise ValueError(
                f"{lacking[0]}: expected values for it where the folder has {there} of the same "
                'module, since the model was sharded with initial_values="empty"; found none. '
                'Shard it with its own values (initial_values="same") to keep those'
            )
        found.append(module)
    return found


def give_values(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Let each give itself values: by ``reset_parameters``, and the model's ``_init_weights``.

    Values are those of a model that is not sharded, drawn from the first rank's generator.
    """
    init_weights = getattr(model, "_init_weights", None)
    with torch.no_grad():
        for module in modules:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if callable(init_weights):
                init_weights(module)
            for name, tensor in module._parameters.items():
                if tensor is not None and tensor.isnan().any():
                    raise ValueError(
                        f"{type(module).__name__}.{name}: expected the model to give it values, "
                        "since the folder has none; found that it does not"
                    )
