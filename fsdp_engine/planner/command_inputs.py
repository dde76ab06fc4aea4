"""Models and batches that are given on the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_engine.kernel_interface import allocator
from fsdp_engine.planner.option_values import import_function
from fsdp_engine.planner.simulation.simulation_error import read_json

_CPU = torch.device("cpu")
# Suffixes of classes with one label per row. Other models have one label per token.
_ONE_LABEL_A_ROW = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def model_builder(spec: str, what: str) -> Callable[[], nn.Module]:
    """Returns a function that builds a model on the meta device.

    Args:
        spec: ``module:function``, a file such as a config.json of transformers, or a folder that
            contains a config.json.
        what: Name of the argument, for errors.

    Raises:
        ValueError: There is no such function, file or class.
    """
    path = Path(spec)
    if path.is_dir():
        path = path / "config.json"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and path.suffix != ".json":
        raise ValueError(
            f"{what}: expected module:function, a config.json or a folder that contains one; found "
            f"{spec!r}, which is not a folder. Download a model of the Hugging Face Hub "
            f"first: hf download {spec} config.json --local-dir {path.name}"
        )
    make = _of_config(path, what) if path.suffix == ".json" else import_function(spec, what)

    def build() -> nn.Module:
        with torch.device("meta"):
            return make()

    return build


def in_fp8(build: Callable[[], nn.Module], what: str) -> Callable[[], nn.Module]:
    """Returns a function that builds the model with torchao's linears, which multiply in fp8 with a
    scale for each tensor (torchao's "tensorwise" recipe). As in torchtitan, two kinds of linears
    are not converted: those with a size that is not a multiple of 16, which the kernels do not
    take, and the head of a model of transformers.

    Args:
        build: The function that builds the unconverted model.
        what: Name of the argument, for errors.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise ValueError(
            f"{what}: expected torchao installed (pip install torchao); found {error}"
        ) from error

    def build_converted() -> nn.Module:
        model = build()
        of_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = of_head()

        def is_converted(module: nn.Module, name: str) -> bool:
            sizes = module.weight.shape if isinstance(module, nn.Linear) else ()
            return module is not head and not any(size % 16 for size in sizes)

        found: nn.Module = convert_to_float8_training(model, module_filter_fn=is_converted)
        return found

    return build_converted


def _of_config(path: Path, what: str) -> Callable[[], nn.Module]:
    if not path.is_file():
        raise ValueError(f"{what}: expected a config.json of transformers; found no file {path}")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{what}: expected transformers installed, to read {path} "
            f"(pip install 'fsdp_engine[transformers]'); found {error}"
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
        config = transformers.AutoConfig.from_pretrained(str(path))
    except Exception as error:  # transformers may raise any type for a value in the file
        raise ValueError(
            f"{what}: expected a config.json that transformers reads; found {path}: {error}"
        ) from error
    return lambda: architecture(config)


def batch_shape(spec: str) -> tuple[int, ...] | None:
    """Returns the sizes of a text such as "4x4096"; None for any other text."""
    parts = spec.lower().split("x")
    if not all(part.isdigit() for part in parts):
        return None
    return tuple(map(int, parts))


def example_inputs(model: nn.Module, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Returns example inputs of a model of transformers, with names and shapes from the signature
    of its forward and from its config. All values are zero.

    Args:
        model: The model, on any device including meta.
        sizes: Number of rows, and of tokens or samples per row. Images and spectrograms need only
            the number of rows.

    Raises:
        ValueError: The model is not of transformers, or the sizes do not match its inputs.
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


def default_loss(output: Any) -> Tensor:
    """Returns the ``loss`` of a model's output, or else its only 0-d floating-point tensor, or the
    sum of its first floating-point tensor.

    Raises:
        ValueError: The output contains no floating-point tensor.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple())
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    scalars = [leaf for leaf in found if not leaf.ndim]
    if len(scalars) == 1:
        return scalars[0]
    if found:
        return found[0].sum()
    raise ValueError(
        f"loss: expected a floating-point tensor in the output; found {type(output).__name__}"
    )


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
    return allocator.zeros(tuple(shape), dtype, _CPU)
