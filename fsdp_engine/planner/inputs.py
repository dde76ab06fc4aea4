"""What a command line names: functions, models of transformers, shapes of a batch."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_engine.devices import memory
from fsdp_engine.simulation.arguments import read_json

_CPU = torch.device("cpu")
# Of labels, one for each row; other models have one for each token.
_ONE_LABEL_A_ROW = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def named(spec: str, what: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Modules are looked for in the working directory,
    too.

    Args:
        spec: the name.
        what: whose it is, for messages.

    Raises:
        ValueError: there is no such module or function.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{what}: expected module:function; found {spec!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{what}: expected a module that can be imported; found {module_name!r} ({error})"
        ) from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"{what}: expected a function {attribute!r} in {module_name}; found {function!r}"
        )
    return function


def model_builder(spec: str, what: str) -> Callable[[], nn.Module]:
    """A function that builds a model on the meta device.

    Args:
        spec: ``module:function``, or a config.json of transformers, or the folder that it is in.
        what: whose it is, for messages.

    Raises:
        ValueError: there is no such thing.
    """
    path = Path(spec)
    if path.is_dir():
        path = path / "config.json"
    make = _of_config(path, what) if path.suffix == ".json" else named(spec, what)

    def build() -> nn.Module:
        with torch.device("meta"):
            return make()

    return build


def _of_config(path: Path, what: str) -> Callable[[], nn.Module]:
    if not path.is_file():
        raise ValueError(f"{what}: expected a config.json of transformers; found no {path}")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{what}: expected transformers installed, for {path} "
            "(pip install 'fsdp_engine[transformers]')"
        ) from error
    content = read_json(path, f"a config.json of transformers as {what}")
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    architecture = getattr(transformers, name, None) if isinstance(name, str) else None
    if architecture is None:
        raise ValueError(
            f"{what}: expected `architectures` of {path} to name a class of transformers; "
            f"found {name!r}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path.parent))
    except Exception as error:  # whatever a value of the file raises
        raise ValueError(
            f"{what}: expected a config.json that transformers reads; found {path}: {error}"
        ) from error
    return lambda: architecture(config)


def batch_shape(spec: str) -> tuple[int, ...] | None:
    """The sizes that "4x4096" says; None: it says none."""
    parts = spec.lower().split("x")
    if not all(part.isdigit() for part in parts):
        return None
    return tuple(map(int, parts))


def inputs_of(model: nn.Module, sizes: Sequence[int]) -> dict[str, Tensor]:
    """What a model of transformers is called with, by names and shapes from its forward's signature
    and its config. Values are zeros.

    Args:
        model: it, also on the meta device.
        sizes: rows, and tokens or samples of each; of images and spectrograms rows are enough.

    Raises:
        ValueError: it is no model of transformers, or takes something else.
    """
    main = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if main is None or config is None:
        raise ValueError(
            "batch: expected a function for a model that is not of transformers; found the sizes "
            f"{'x'.join(map(str, sizes))} for {type(model).__name__}"
        )
    takes = inspect.signature(model.forward).parameters
    shape = _main_shape(main, config, tuple(sizes))
    is_ids = main.endswith("ids")
    inputs = {main: _zeros(shape, torch.long if is_ids else torch.float32)}
    if "labels" in takes:
        one_a_row = type(model).__name__.endswith(_ONE_LABEL_A_ROW)
        labels = shape[:1] if one_a_row or not is_ids else shape
        inputs["labels"] = _zeros(labels, torch.long)
    elif getattr(config, "is_encoder_decoder", False) and is_ids:
        inputs["decoder_input_ids"] = _zeros(shape, torch.long)
    return inputs


def any_loss(output: Any) -> Tensor:
    """The loss that a model returns; else the sum of the first tensor of floating-point numbers.

    Raises:
        ValueError: there is none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    for leaf in tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.sum()
    raise ValueError(f"loss: expected a tensor in the output; found {type(output).__name__}")


def _main_shape(main: str, config: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if main == "pixel_values" and len(sizes) == 1:
        vision = getattr(config, "vision_config", config)
        side = vision.image_size
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return (*sizes, getattr(vision, "num_channels", 3), *sides)
    if main == "input_features" and len(sizes) == 1:
        return (*sizes, config.num_mel_bins, 2 * config.max_source_positions)
    if len(sizes) == 1:
        raise ValueError(f"batch: expected rows x length, such as 4x4096; found {sizes[0]}")
    return sizes


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return memory.zeros(tuple(shape), dtype, _CPU)
