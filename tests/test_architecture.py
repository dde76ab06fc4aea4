"""The house rules, read off the syntax trees of ``fsdp_engine``.

Each rule is a function ``(source) -> [(line, message), ...]``, tried here on the package and on
planted violations.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fsdp_engine"

# Imports go down only. A fraction is a mezzanine: it may use its floor, its floor may not use it.
FLOORS: dict[str, float] = {
    # values and integers
    "layout": 0,
    "strategies": 0,
    "precision": 0,
    "config": 0,
    "placement": 0,
    "order": 0,
    "buckets": 0,
    "patterns": 0,
    "trees": 0,
    "recurrent": 0,
    "inputs": 0.5,
    "terminal": 0,
    # devices and communication
    "watch": 0.25,
    "meeting": 0.5,
    "mesh": 1,
    "memory": 1,
    "host_memory": 1.25,
    "lanes": 1,
    "collectives": 1.5,
    "nccl_pool": 1.75,
    # sharded storage
    "param_hooks": 1.25,
    "outside_reads": 1.5,
    "buffer": 2,
    "flat_dtensor": 2,
    "codecs": 2,
    "clip": 2,
    "model_parallel_groups": 2,
    "router_bias": 2,
    # the two towers
    "ascent": 3,
    "passage": 3.25,
    "weight_tower": 3.4,
    "reducing_again": 3,
    "gradient_scale": 3,
    "grad_tower": 3.25,
    "shown_gradients": 3.4,
    "param_and_grad_buffer": 3.5,
    # lifecycle and order
    "assignment": 4,
    "materialize": 4,
    "installing": 3.75,
    "unit": 4,
    "footprint": 4,
    "gradient_checks": 4,
    "step_message": 4.25,
    "plan": 4.25,
    "marked_grads": 4,
    "initial_values": 4.4,
    "build": 4.5,
    "roster": 4.5,
    "description": 4.5,
    "reductions": 4.5,
    "scheduler": 4.75,
    # where events meet the engine
    "hooks": 5,
    "bucket_hooks": 5.25,
    "plane_hooks": 5.25,
    "delayed_gradients": 5.25,
    "optimizer": 5,
    "checkpoint": 5.5,
    # what people call
    "engine": 6,
    "sharding": 6.25,
    "distributed_data_parallel": 6.5,
    "finalize_model_grads": 6.5,
    "planner": 6.5,
    "cli": 6.75,
    "__init__": 7,
    "__main__": 7.5,
}
# Files of these floors are values that may name each other.
SIDEWAYS_FLOORS = {0}

MAX_LINES = 450

LEVEL_NAMES = {"no_shard", "optim", "optim_grads", "optim_grads_params"}
LEVEL_OBJECTS = {"NO_SHARD", "OPTIM", "OPTIM_GRADS", "OPTIM_GRADS_PARAMS"}

COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "P2POp",
}
# Methods of a ProcessGroup; no tensor has a method of such a name.
GROUP_METHODS = {"allgather", "allreduce", "alltoall", "alltoall_base", "_allgather_base"}
GROUP_METHODS |= {"_reduce_scatter_base"}
COLLECTIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn")
GROUP_MAKERS = {
    "DeviceMesh",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
# Free: torch.tensor and torch.scalar_tensor, a shape of (), and the meta device.
ALLOCATORS = {"empty", "empty_like", "empty_strided", "full", "full_like", "ones", "ones_like"}
ALLOCATORS |= {"rand", "randn", "zeros", "zeros_like", "UntypedStorage"}
ALLOCATING_METHODS = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}
ALLOCATING_METHODS |= {"resize_", "resize_as_", "set_"}
STREAM_NAMES = {"Event", "Stream", "StreamContext", "current_stream", "default_stream"}
STREAM_NAMES |= {"record_function", "set_stream", "stream", "synchronize"}
STREAM_METHODS = {"record_stream", "wait_stream"}

Finding = tuple[int, str]


@dataclass
class Source:
    """One file of the package: its dotted path below ``fsdp_engine`` and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The file, or the subpackage it belongs to, that has a floor."""
        return self.path.split(".")[0]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for, dotted."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{self.origin(node)}.{alias.name}"
        return found

    def origin(self, node: ast.ImportFrom) -> str:
        """The absolute module that ``from ... import`` names."""
        if not node.level:
            return node.module or ""
        # An __init__ counts as a file of its package, so one level is its package for both.
        parts = ["fsdp_engine", *self.path.split(".")]
        parts = parts[: len(parts) - node.level]
        return ".".join([*parts, node.module] if node.module else parts)

    def dotted(self, node: ast.AST) -> str:
        """``node`` as a dotted name with aliases resolved; "" where it is no plain name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def mentions(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of every name used and every name imported from somewhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Name):
                yield node.lineno, self.dotted(node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.lineno, f"{self.origin(node)}.{alias.name}"

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted module or name) of every import."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.lineno, f"{self.origin(node)}.{alias.name}"

    def calls(self) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node


def imports_go_down(source: Source) -> Iterator[Finding]:
    """A file imports from lower floors, and from its own only inside a subpackage."""
    if source.room not in FLOORS:
        yield 1, f"{source.room} has no floor in FLOORS"
        return
    floor = FLOORS[source.room]
    for line, name in source.imports():
        parts = name.split(".")
        if parts[0] != "fsdp_engine":
            continue
        room = parts[1] if len(parts) > 1 else "__init__"
        if room not in FLOORS:
            if (PACKAGE / f"{room}.py").exists() or (PACKAGE / room).is_dir():
                continue  # reported where it is
            room = "__init__"
        sideways = FLOORS[room] == floor and (room == source.room or floor in SIDEWAYS_FLOORS)
        if FLOORS[room] >= floor and not sideways:
            yield line, f"floor {floor} imports {name} from floor {FLOORS[room]}"


def only_collectives_communicates(source: Source) -> Iterator[Finding]:
    """Collectives and sends of torch.distributed are called in collectives.py only."""
    if source.path == "collectives":
        return
    for line, name in source.mentions():
        module, _, last = name.rpartition(".")
        of_dist = module.startswith("torch.distributed") and last in COLLECTIVES
        if of_dist or name.startswith(COLLECTIVE_MODULES):
            yield line, f"{name} belongs to collectives.py"
    for call in source.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in GROUP_METHODS:
            base = source.dotted(call.func.value)
            if not base.startswith("fsdp_engine"):
                yield call.lineno, f".{call.func.attr}() belongs to collectives.py"


def only_mesh_makes_groups(source: Source) -> Iterator[Finding]:
    """Process groups and device meshes are made in mesh.py only; annotations may name them."""
    if source.path == "mesh":
        return
    for call in source.calls():
        name = source.dotted(call.func)
        if name.startswith("torch.distributed") and GROUP_MAKERS & set(name.split(".")):
            yield call.lineno, f"{name}() belongs to mesh.py"


def only_memory_allocates(source: Source) -> Iterator[Finding]:
    """Tensors are allocated, and storages resized, in memory.py only, but on the meta device."""
    if source.path == "memory":
        return
    for call in source.calls():
        if any(
            keyword.arg == "device"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value == "meta"
            for keyword in call.keywords
        ):
            continue
        if call.args and isinstance(call.args[0], ast.Tuple) and not call.args[0].elts:
            continue  # one element
        name = source.dotted(call.func)
        module, _, last = name.rpartition(".")
        if module == "torch" and last in ALLOCATORS:
            yield call.lineno, f"{name}() belongs to memory.py"
        elif isinstance(call.func, ast.Attribute) and call.func.attr in ALLOCATING_METHODS:
            yield call.lineno, f".{call.func.attr}() belongs to memory.py"


def only_lanes_knows_streams(source: Source) -> Iterator[Finding]:
    """Streams, events and profiler labels live in lanes.py only."""
    if source.path == "lanes":
        return
    for line, name in source.mentions():
        if name.startswith("torch.") and name.rpartition(".")[2] in STREAM_NAMES:
            yield line, f"{name} belongs to lanes.py"
    for call in source.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in STREAM_METHODS:
            yield call.lineno, f".{call.func.attr}() belongs to lanes.py"


def only_its_codec_imports_transformer_engine(source: Source) -> Iterator[Finding]:
    """Transformer Engine is imported in codecs/transformer_engine.py only."""
    if source.path == "codecs.transformer_engine":
        return
    for line, name in source.imports():
        if name.split(".")[0] in {"transformer_engine", "transformer_engine_torch"}:
            yield line, f"{name} belongs to codecs/transformer_engine.py"
    for call in source.calls():
        for argument in call.args:
            if (
                source.dotted(call.func).rpartition(".")[2] in {"import_module", "__import__"}
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
                and argument.value.startswith("transformer_engine")
            ):
                yield call.lineno, f"{argument.value} belongs to codecs/transformer_engine.py"


def nobody_asks_which_level_runs(source: Source) -> Iterator[Finding]:
    """Outside strategies/ no level's name, object or value is compared, matched or looked up."""
    if source.room == "strategies":
        return
    for node in ast.walk(source.tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Dict):
            asked = [key for key in node.keys if key is not None]
        for expression in asked:
            for part in ast.walk(expression):
                if what := _names_a_level(source, part):
                    yield expression.lineno, f"asks for {what}"
        if isinstance(node, ast.Attribute) and node.attr == "value" and _is_level(node.value):
            yield node.lineno, f"reads {ast.unparse(node)}"


def _names_a_level(source: Source, node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in LEVEL_NAMES:
        return repr(node.value)
    if isinstance(node, ast.Attribute | ast.Name):
        name = source.dotted(node)
        module, _, last = name.rpartition(".")
        if name.startswith("fsdp_engine") and last in LEVEL_OBJECTS and not module.endswith("Role"):
            return name
        if isinstance(node, ast.Attribute) and node.attr == "name" and _is_level(node.value):
            return ast.unparse(node)
    return None


def _is_level(node: ast.expr) -> bool:
    """Whether an expression reads like a level: ``strategy.inner``, ``.outer``, ``.level(...)``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "level"
    if isinstance(node, ast.Attribute):
        return node.attr in {"inner", "outer"} and "strategy" in ast.unparse(node.value)
    return False


def files_are_short(source: Source) -> Iterator[Finding]:
    """No file is longer than a reader's patience."""
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_LINES:
        yield num_lines, f"{num_lines} lines; at most {MAX_LINES}"


def public_things_have_docstrings(source: Source) -> Iterator[Finding]:
    """Modules, and their public functions and classes, say what they are."""
    if ast.get_docstring(source.tree) is None:
        yield 1, "the module has no docstring"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in [each for each in source.tree.body if isinstance(each, kinds)]:
        if not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.lineno, f"{node.name} has no docstring"


RULES: list[Callable[[Source], Iterator[Finding]]] = [
    imports_go_down,
    only_collectives_communicates,
    only_mesh_makes_groups,
    only_memory_allocates,
    only_lanes_knows_streams,
    only_its_codec_imports_transformer_engine,
    nobody_asks_which_level_runs,
    files_are_short,
    public_things_have_docstrings,
]


def package_sources() -> list[Source]:
    sources = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        sources.append(Source(path, file.read_text()))
    return sources


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Source], Iterator[Finding]]) -> None:
    broken = [
        f"fsdp_engine/{source.path.replace('.', '/')}.py:{line}: {message}"
        for source in package_sources()
        for line, message in rule(source)
    ]
    assert not broken, "\n".join([f"{rule.__name__}: {rule.__doc__}", *broken])


DIST = "import torch.distributed as dist\n"
MESH = "from torch.distributed import DeviceMesh\n"

PLANTED: list[tuple[Callable[[Source], Iterator[Finding]], str, str]] = [
    (imports_go_down, "layout", "from fsdp_engine.mesh import DataMesh"),
    (imports_go_down, "mesh", "import fsdp_engine.engine"),
    (imports_go_down, "mesh", "import fsdp_engine as fe"),
    (imports_go_down, "mesh", "from fsdp_engine import shard"),
    (imports_go_down, "memory", "from fsdp_engine import lanes"),
    (imports_go_down, "codecs.cast", "from ..unit import Unit"),
    (imports_go_down, "hooks", "def f():\n    from .engine import Engine"),
    (imports_go_down, "attic", "x = 1"),
    (
        only_collectives_communicates,
        "buffer",
        DIST + "dist.all_reduce(x)",
    ),
    (only_collectives_communicates, "buffer", "import torch\ntorch.distributed.barrier()"),
    (only_collectives_communicates, "mesh", "from torch.distributed import all_gather_object as g"),
    (
        only_collectives_communicates,
        "engine",
        "from torch import distributed as d\nd.send",
    ),
    (only_collectives_communicates, "unit", "self.group.allreduce([x]).wait()"),
    (only_collectives_communicates, "unit", "import torch.distributed.nn as n\nn.functional.f(x)"),
    (only_mesh_makes_groups, "engine", DIST + "dist.new_group([0])"),
    (
        only_mesh_makes_groups,
        "planner",
        MESH + "DeviceMesh('cpu', [0])",
    ),
    (
        only_mesh_makes_groups,
        "unit",
        MESH + "DeviceMesh.from_group(g)",
    ),
    (only_memory_allocates, "buffer", "import torch\nx = torch.empty(3, device='cpu')"),
    (only_memory_allocates, "unit", "from torch import zeros_like as z\nz(x)"),
    (only_memory_allocates, "unit", "x.untyped_storage().resize_(0)"),
    (only_memory_allocates, "unit", "x.new_zeros(3)"),
    (only_lanes_knows_streams, "scheduler", "import torch\ns: torch.cuda.Stream = f()"),
    (only_lanes_knows_streams, "unit", "from torch.profiler import record_function as r"),
    (only_lanes_knows_streams, "memory", "x.record_stream(s)"),
    (only_lanes_knows_streams, "engine", "from torch import cuda\ncuda.current_stream()"),
    (
        only_its_codec_imports_transformer_engine,
        "engine",
        "import transformer_engine.torch",
    ),
    (
        only_its_codec_imports_transformer_engine,
        "codecs.fp8",
        "from transformer_engine import pytorch",
    ),
    (
        only_its_codec_imports_transformer_engine,
        "cli",
        "import importlib\nimportlib.import_module('transformer_engine')",
    ),
    (nobody_asks_which_level_runs, "unit", "if strategy == 'no_shard':\n    pass"),
    (nobody_asks_which_level_runs, "unit", "x = name in ('optim', 'optim_grads')"),
    (nobody_asks_which_level_runs, "unit", "x = strategy.inner.value"),
    (nobody_asks_which_level_runs, "engine", "x = self.strategy.level(axis).value"),
    (nobody_asks_which_level_runs, "engine", "x = {'optim': 1}[name]"),
    (nobody_asks_which_level_runs, "engine", "match name:\n    case 'optim':\n        pass"),
    (nobody_asks_which_level_runs, "engine", "x = strategy.outer.name != other"),
    (
        nobody_asks_which_level_runs,
        "buffer",
        "from fsdp_engine.strategies import OPTIM\nx = level is OPTIM",
    ),
    (files_are_short, "buffer", "\n" * (MAX_LINES + 1)),
    (public_things_have_docstrings, "buffer", '"""Here."""\nclass Buffer:\n    pass'),
    (public_things_have_docstrings, "buffer", '"""Here."""\ndef f():\n    return 1'),
    (public_things_have_docstrings, "buffer", "x = 1"),
]


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_caught(
    rule: Callable[[Source], Iterator[Finding]], path: str, text: str
) -> None:
    found = list(rule(Source(path, text)))
    assert found
    assert all(1 <= line <= len(text.splitlines()) for line, _ in found)


LAWFUL: list[tuple[str, str]] = [
    ("placement", "from fsdp_engine.layout import Layout"),
    ("codecs.cast", "from fsdp_engine.codecs.base import ParamCodec"),
    ("engine", "from fsdp_engine import mesh, collectives\ncollectives.all_reduce(x)"),
    ("engine", "def shard(strategy: str = 'optim_grads_params') -> None:\n    pass"),
    (
        "engine",
        MESH + "mesh: DeviceMesh",
    ),
    ("engine", "import torch\nx = torch.tensor(0.0)\ny = torch.empty(3, device='meta')"),
    ("clip", "import torch\nx = torch.zeros((), dtype=dtype)"),
    ("collectives", DIST + "dist.all_reduce(x)"),
    ("mesh", DIST + "dist.new_group([0])"),
    ("memory", "import torch\nx = torch.empty(3)"),
    ("lanes", "import torch\nx = torch.cuda.Stream()"),
    ("codecs.transformer_engine", "import transformer_engine"),
    ("strategies.pair", "x = name == 'optim'"),
    ("buffer", "from fsdp_engine.strategies import Role\nx = role is Role.OPTIM"),
]


@pytest.mark.parametrize(("path", "text"), LAWFUL)
def test_lawful_code_is_left_alone(path: str, text: str) -> None:
    source = Source(path, f'"""A file."""\n{text.replace("-> None:", "-> None:  # documented")}')
    rules = [rule for rule in RULES if rule is not public_things_have_docstrings]
    assert [finding for rule in rules for finding in rule(source)] == []


def test_every_floor_has_its_files() -> None:
    rooms = {source.room for source in package_sources()}
    assert {FLOORS[room] for room in rooms if room in FLOORS} >= set(range(7))


def test_training_needs_no_library_beside_torch_and_einops() -> None:
    others = [
        "crc32c",
        "matplotlib",
        "numpy",
        "rich",
        "safetensors",
        "tqdm",
        "transformer_engine",
        "typer",
    ]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({others}))  # None: an import of it fails
import torch, fsdp_engine as fe
model = torch.nn.Linear(3, 2)
fe.shard(model)
model(torch.ones(1, 3)).sum().backward()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)
