"""Lists the attributes of a wrapped model that megatron-core uses, from its sources.

    python tools/megatron_attributes.py                  # of the installed wheel
    python tools/megatron_attributes.py FOLDER_OR_WHEEL  # of another one
    python tools/megatron_attributes.py --write          # update docs/internals/megatron.md

Does not import megatron-core. An expression is considered a wrapped model if it is a name or an
attribute in ``MODELS``, or an element of one of ``LISTS``. The list contains attributes that are
read, called, assigned, tested (``hasattr``, ``getattr``), or looked up in it and in the modules
that it wraps (``get_attr_wrapped_model``).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "internals" / "megatron.md"
BEGIN, END = "<!-- megatron_attributes -->", "<!-- end of megatron_attributes -->"

# Relative to megatron/. The training folder is in the wheel from 0.19 on.
FOLDERS = (
    "core/distributed",
    "core/optimizer",
    "core/pipeline_parallel",
    "core/transformer",
    "core/utils.py",
    "training",
)
# Megatron-FSDP, which the wrapper replaces.
LEFT_OUT = ("core/distributed/fsdp/",)
MODELS = {
    "b_model",
    "ddp_model",
    "f_model",
    "model",
    "model_chunk",
    "model_module",
}
LISTS = {"model", "model_chunks", "models"}  # lists of wrapped models
LOOKUP = "get_attr_wrapped_model"

_OF_MODEL = "read of the model within the wrapper"
_OF_FSDP = "used where `ddp_config.use_megatron_fsdp`, which is False here"
_OF_OPTIMIZER = "called by its `DistributedOptimizer`, which raises an error with this wrapper"
_NO_WRAPPER = "called on a list named `model`"
# Attributes that the wrapper does not have, with the reason why they are not needed.
NOT_THERE = {
    "_start_bucket_group_param_sync": "called with elements of `bucket_groups`, which is empty",
    "append": _NO_WRAPPER,
    "compute_language_model_loss": _OF_MODEL,
    "free_overlap_buffers": "the engine frees gathered parameters after their last use",
    "hide_loss_modules": _OF_MODEL,
    "language_model": _OF_MODEL,
    "model_type": _OF_MODEL,
    "output_layer": _OF_MODEL,
    "reset_param_sync_dispatch_state": _OF_OPTIMIZER,
    "synchronize_param_gather": _OF_FSDP,
    "_make_forward_pre_hook": "replayed CUDA graphs would run the hooks that it makes, not the "
    "modules' own; leave `cuda_graph_impl` at its default",
    "param_and_grad_buffer": _OF_FSDP,
    "position_embedding_type": _OF_MODEL,
    "position_embeddings": _OF_MODEL,
    "share_embeddings_and_output_weights": _OF_MODEL,
    "shared_embedding_or_output_weight": _OF_MODEL,
    "vp_stage": "its own wrapper has none either; None is expected",
}


@dataclass
class Use:
    """One attribute of wrapped models.

    Attributes:
        kinds: "assigned", "called", "looked up", "read", "tested".
        places: file below megatron/ and line.
    """

    kinds: set[str] = field(default_factory=set)
    places: list[str] = field(default_factory=list)


def sources(where: Path) -> Iterator[tuple[str, str]]:
    """(path relative to megatron/, text) of each relevant file in a wheel or in its folder."""
    if where.is_file():
        with zipfile.ZipFile(where) as wheel:
            names = [name.removeprefix("megatron/") for name in sorted(wheel.namelist())]
            found = [(name, f"megatron/{name}") for name in names if _is_wanted(name)]
            yield from ((name, wheel.read(path).decode()) for name, path in found)
        return
    root = where / "megatron" if (where / "megatron").is_dir() else where
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if _is_wanted(name):
            yield name, file.read_text()


def _is_wanted(name: str) -> bool:
    return name.endswith(".py") and name.startswith(FOLDERS) and not name.startswith(LEFT_OUT)


def installed() -> Path:
    """The folder of the installed wheel.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("megatron-core: expected it to be installed; found none")
    return Path(next(iter(spec.submodule_search_locations)))


def uses_of(where: Path) -> dict[str, Use]:
    """Uses of attributes of wrapped models in the sources, by the attribute's name."""
    found: dict[str, Use] = {}
    for name, text in sources(where):
        for attribute, kind, line in uses_in(text):
            use = found.setdefault(attribute, Use())
            use.kinds.add(kind)
            use.places.append(f"{name}:{line}")
    return dict(sorted(found.items()))


def uses_in(text: str) -> Iterator[tuple[str, str, int]]:
    """(attribute, kind, line) of each use in one file."""
    tree = ast.parse(text)
    strings: dict[str, list[str]] = {}  # string arguments by keyword
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            strings.setdefault(node.arg or "", []).append(str(node.value.value))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_model(node.value):
            kind = "called" if id(node) in called else "read"
            yield node.attr, kind if isinstance(node.ctx, ast.Load) else "assigned", node.lineno
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_model(node.args[0]):
            function, name = _last_name(node.func), node.args[1]
            kinds = {"getattr": "tested", "hasattr": "tested", "setattr": "assigned"}
            kinds[LOOKUP] = "looked up"
            if function in kinds and isinstance(name, ast.Constant):
                yield str(name.value), kinds[function], node.lineno
            elif function in kinds and isinstance(name, ast.Name):
                for each in strings.get(name.id, []):
                    yield each, kinds[function], node.lineno


def _is_model(node: ast.expr) -> bool:
    """Whether the expression is considered a wrapped model."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value) in LISTS
    return _last_name(node) in MODELS


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def table(uses: dict[str, Use], wrapper: object) -> list[str]:
    """Lines of the table in docs/internals/megatron.md.

    Raises:
        ValueError: an attribute is neither in ``wrapper`` nor in ``NOT_THERE``; names it.
    """
    lines = ["| attribute | what megatron-core does | in | here |", "|---|---|---|---|"]
    for name, use in uses.items():
        files = list(dict.fromkeys(place.rpartition(":")[0] for place in use.places))
        shown = ", ".join(f"`{file.removeprefix('core/')}`" for file in files)
        lines.append(
            f"| `{name}` | {', '.join(sorted(use.kinds))} | {shown} | {_here(name, use, wrapper)} |"
        )
    return lines


def _here(name: str, use: Use, wrapper: object) -> str:
    if hasattr(wrapper, name):
        return "yes"
    if use.kinds == {"looked up"}:
        return "no: looked for in the wrapper, found in the model within"
    if name not in NOT_THERE:
        raise ValueError(
            f"{name}: expected an attribute of the wrapper or a reason in NOT_THERE; found "
            f"neither. megatron-core: {', '.join(sorted(use.kinds))} in {', '.join(use.places)}"
        )
    return f"no: {NOT_THERE[name]}"


def make_wrapper() -> object:
    """A wrapper on one rank, whose attributes are tested."""
    import torch

    import fsdp_engine as fe

    return fe.DistributedDataParallel(torch.nn.Linear(2, 2))


def with_table(text: str, lines: list[str]) -> str:
    """A document's text with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *lines, END + after])


def main() -> None:
    """Print the table, or write it into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", nargs="?", type=Path, help="a wheel, or a folder with megatron/")
    parser.add_argument("--write", action="store_true", help="write it into the page")
    options = parser.parse_args()
    lines = table(uses_of(options.where or installed()), make_wrapper())
    if options.write:
        DOCS.write_text(with_table(DOCS.read_text(), lines))
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
