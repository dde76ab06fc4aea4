"""The house rules, read off the syntax trees of ``fsdp_engine``.

Each rule is a function ``(source) -> [(line, message), ...]``, tried here on the package and on
planted violations.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from fsdp_engine.extension_list import EXTENSIONS
from fsdp_engine.extras import EXTRAS
from tools.style import count_words, own_private_names, private_attributes, words_to_replace

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "fsdp_engine"

# Imports go down only: between folders by this list, within a folder and on the lowest floor
# without a circle. A file at the top of the package is a folder of its own.
FLOORS: dict[str, int] = {
    "patterns": 0,
    "precision": 0,
    "options": 0,
    "engine_extension": 0,
    "extension_list": 0,
    "extras": 0,
    "terminal": 0,
    "strategies": 0,
    "accelerator": 0,
    "backend": 1,
    "layout": 1,
    "memory": 2,
    "comm": 3,
    "codecs": 4,
    "hardware": 4,
    "flat_dtensor": 4,
    "optim": 5,
    "buffers": 5,
    "units": 6,
    "runtime": 7,
    "engine": 8,
    "sharding": 9,
    "checkpoint": 9,
    "deprecated_arguments": 8,
    "extensions": 10,
    "kernel_interface": 11,
    "pipelining": 11,
    "fsdp2": 11,
    "megatron": 11,
    "pretrained": 11,
    "planner": 12,
    "integrations": 12,
    "config": 12,
    "__init__": 13,
    "__main__": 14,
}

# The core, and the folders of formats and frontends that it does not import.
CORE = {"layout", "comm", "memory", "buffers", "units", "runtime", "strategies", "codecs"}
CORE |= {"accelerator", "backend", "extension_list", "flat_dtensor", "optim"}
CORE |= {"engine", "sharding"}
ABOVE_THE_CORE = {"checkpoint", "extensions", "fsdp2", "integrations", "megatron"}
ABOVE_THE_CORE |= {"kernel_interface", "pipelining", "planner", "pretrained"}
# Packages of the formats and frontends that the core does not import either.
FORMAT_PACKAGES = {"accelerate", "lightning", "megatron", "peft", "ray", "safetensors", "torchft"}
FORMAT_PACKAGES |= {"transformers"}

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

# A set's order follows addresses or salted hashes, which differ between ranks.
SET_TYPES = {"set", "frozenset", "WeakSet", "AbstractSet", "MutableSet", "Set"}
SET_METHODS = {"difference", "intersection", "symmetric_difference", "union"}
SET_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
# Calls whose result does not depend on the order of their argument.
ORDERLESS = {"Counter", "all", "any", "bool", "difference_update", "frozenset", "isdisjoint"}
ORDERLESS |= {"intersection_update", "issubset", "issuperset", "len", "max", "min", "set"}
ORDERLESS |= {"sorted", "sum", "symmetric_difference_update", "update"} | SET_METHODS
# Functions that read a set in its order, and why no communication depends on that order.
ORDER_IS_LOCAL = {
    ("extensions.stall_monitor.stall_monitor", "_log_stalls"): "a thread that writes to the log",
    ("runtime.unit", "the module"): "tuples that are only asked whether they contain a state",
}

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
    """A file imports from lower floors, and from its own folder; values may name each other."""
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
        sideways = FLOORS[room] == floor and (room == source.room or floor == 0)
        if FLOORS[room] >= floor and not sideways:
            yield line, f"floor {floor} imports {name} from floor {FLOORS[room]}"


def the_core_imports_no_format(source: Source) -> Iterator[Finding]:
    """The core imports no checkpoint format, planner or frontend, of the package or of others."""
    if source.room not in CORE:
        return
    for line, name in source.imports():
        first, *rest = name.split(".")
        is_above = first == "fsdp_engine" and bool(rest) and rest[0] in ABOVE_THE_CORE
        if is_above or first in FORMAT_PACKAGES:
            yield line, f"the core imports {name}"


def the_planner_uses_one_file_of_the_kernel(source: Source) -> Iterator[Finding]:
    """The planner imports the rest of the package by ``kernel_interface.py``."""
    allowed = ("fsdp_engine.planner", "fsdp_engine.kernel_interface")
    for line, name in source.imports() if source.room == "planner" else ():
        if name.startswith("fsdp_engine") and not name.startswith(allowed):
            yield line, f"the planner imports {name}"


def the_core_leaves_private_attributes_to_their_objects(source: Source) -> Iterator[Finding]:
    """The core uses no private attribute of another object. (The class ``FlatDTensor`` is
    implemented in several files.)"""
    if source.room in CORE - {"flat_dtensor", "optim"}:
        yield from private_attributes(source.tree, _private_names())


@cache
def _private_names() -> set[str]:
    return own_private_names()


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; none: []."""
    done: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file not in done:
            for other in sorted(imports.get(file, ())):
                if cycle := visit(other, [*path, file]):
                    return cycle
            done.add(file)
        return []

    for file in sorted(imports):
        if cycle := visit(file, []):
            return cycle
    return []


def imports_between_files(sources: list[Source]) -> dict[str, set[str]]:
    """For each file of the package, those that it imports from."""
    files = {source.path for source in sources}
    found: dict[str, set[str]] = {}
    for source in sources:
        mine = found.setdefault(source.path, set())
        for _, name in source.imports():
            path = name.removeprefix("fsdp_engine.") if name.startswith("fsdp_engine.") else ""
            for each in (path, path.rpartition(".")[0]):
                if each in files:
                    mine.add(each)
                    break
                if f"{each}.__init__" in files:
                    # The folder's own face, not a name that it happens to import.
                    mine.add(f"{each}.__init__")
                    break
    return found


def imported_tests(source: Source) -> Iterator[Finding]:
    """Tests import helpers from modules without tests: what they share has a module of its own."""
    for node in ast.walk(source.tree):
        match node:
            case ast.ImportFrom(module=module, names=names) if module:
                found = [module, *(f"{module}.{each.name}" for each in names)]
            case ast.Import(names=names):
                found = [each.name for each in names]
            case _:
                continue
        for name in found:
            is_module = (TESTS.parent / f"{name.replace('.', '/')}.py").exists()
            if is_module and name.rpartition(".")[2].startswith("test_"):
                yield node.lineno, f"imports {name}, a module of tests"


def test_no_test_imports_from_another() -> None:
    findings = []
    for path in sorted(TESTS.rglob("*.py")):
        source = Source(path.stem, path.read_text(encoding="utf-8"))
        findings += [f"{path.name}:{line}: {what}" for line, what in imported_tests(source)]
    assert findings == []


@pytest.mark.parametrize(
    "code",
    [
        "from tests.test_docs import test_a_broken_link_is_seen",
        "from tests import test_docs as docs",
        "import tests.test_docs",
        "def f():\n    from tests.test_docs import x",
    ],
)
def test_an_import_from_another_test_is_caught(code: str) -> None:
    assert len(list(imported_tests(Source("tests", code)))) == 1


# Folders whose tests train without any extension, and how a program asks for one.
TESTS_WITHOUT_EXTENSIONS = (
    *("buffers", "checkpoint", "comm", "flat_dtensor", "layout", "memory", "optim", "promises"),
    *("random_programs", "runtime", "strategies"),
)
EXTENSION_USES = {
    "activations": r"\bcheckpointing=|fe\.(Checkpointing|Recompute)\(",
    "arenas": r"\b(fsdp_double_buffer|nccl_ub)=True",
    "different_modules": r"\.together\(\)",
    "fp8": r"fe\.Float8\b",
    "mean_loss": r"\bengine\.(mean_loss|even_batches)\(",
    "offload": r"fe\.Offload\(",
    "pipelines": r"fsdp_engine\.pipelining|\bPipelineStage\(",
    "reports": r"\.measure\(",
    "transformer_engine": r"\btransformer_engine\b",
    "low_bit_state": r"torchao\.optim|bitsandbytes",
    "whole_tensor_optimizers": r"\bshard_optimizer\(.*\bwhole=True",
    "tests of one": r"\btests\.extensions\b",
}


def used_extensions(text: str) -> list[str]:
    return [name for name, use in EXTENSION_USES.items() if re.search(use, text)]


def test_tests_of_the_kernel_use_no_extension() -> None:
    found = {}
    for folder in TESTS_WITHOUT_EXTENSIONS:
        for path in sorted((TESTS / folder).rglob("*.py")):
            used = used_extensions(path.read_text(encoding="utf-8"))
            if used:
                found[str(path.relative_to(TESTS))] = used
    assert not found


def test_a_use_of_an_extension_is_caught() -> None:
    for folder in EXTENSION_USES:
        if folder != "tests of one":
            paths = (TESTS / "extensions" / folder).rglob("*.py")
            assert any(
                folder in used_extensions(path.read_text(encoding="utf-8")) for path in paths
            )


def imported_extensions(path: str, text: str) -> set[str]:
    """Extensions that a file of the package names, but the one that it is part of."""
    own = path.split("/")[1] if path.startswith("extensions/") else ""
    return set(re.findall(r"fsdp_engine\.extensions\.(\w+)", text)) - {own}


def test_an_extension_is_imported_by_its_own_files_alone() -> None:
    files = {file for each in EXTENSIONS for file in each.files}
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        imported = imported_extensions(name, path.read_text(encoding="utf-8"))
        if imported and name not in files:
            found[name] = imported
    assert not found


def test_an_import_of_another_extension_is_found() -> None:
    text = "from fsdp_engine.extensions.checks import GradientChecks"
    assert imported_extensions("runtime/hooks.py", text) == {"checks"}
    assert imported_extensions("extensions/mean_loss/mean_loss.py", text) == {"checks"}
    assert not imported_extensions("extensions/checks/__init__.py", text)


def test_the_list_of_extensions_is_that_of_the_folders() -> None:
    folders = [path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")]
    assert sorted(folders) == sorted(each.folder for each in EXTENSIONS)


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert find_cycle(imports_between_files(package_sources())) == []


def test_a_planted_circle_is_caught() -> None:
    first = Source("runtime.unit", "from fsdp_engine.runtime.hooks import not_compiled")
    second = Source("runtime.hooks", "from fsdp_engine.runtime import unit")
    assert find_cycle(imports_between_files([first, second])) == [
        "runtime.hooks",
        "runtime.unit",
        "runtime.hooks",
    ]


def only_collectives_communicates(source: Source) -> Iterator[Finding]:
    """Collectives and sends of torch.distributed are called in comm/collectives.py only. (Sums over
    replicas are those of torchft's groups.)"""
    if source.path in (
        "comm.collectives",
        "integrations.torchft",
        "integrations.microbatch_sums",
    ):
        return
    for line, name in source.mentions():
        module, _, last = name.rpartition(".")
        of_dist = module.startswith("torch.distributed") and last in COLLECTIVES
        if of_dist or name.startswith(COLLECTIVE_MODULES):
            yield line, f"{name} belongs to comm/collectives.py"
    for call in source.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in GROUP_METHODS:
            base = source.dotted(call.func.value)
            if not base.startswith("fsdp_engine"):
                yield call.lineno, f".{call.func.attr}() belongs to comm/collectives.py"


def only_mesh_makes_groups(source: Source) -> Iterator[Finding]:
    """Process groups and device meshes are made in comm/mesh.py and groups.py only, but in
    annotations. (A simulation makes those of its ranks.)"""
    if source.path in ("comm.mesh", "comm.groups", "planner.simulation.ranks"):
        return
    for call in source.calls():
        name = source.dotted(call.func)
        if name.startswith("torch.distributed") and GROUP_MAKERS & set(name.split(".")):
            yield call.lineno, f"{name}() belongs to comm/mesh.py"


def only_what_cuda_alone_has_names_it(source: Source) -> Iterator[Finding]:
    """``torch.cuda`` is named in memory/cuda.py only."""
    if source.path == "memory.cuda":
        return
    for line, name in source.mentions():
        if f"{name}.".startswith("torch.cuda."):
            yield line, f"{name}: the accelerator's module is module_of(device)"


def only_memory_allocates(source: Source) -> Iterator[Finding]:
    """Memory is allocated and resized in memory/allocator.py only, but on the meta device."""
    if source.path == "memory.allocator":
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
            yield call.lineno, f"{name}() belongs to memory/allocator.py"
        elif isinstance(call.func, ast.Attribute) and call.func.attr in ALLOCATING_METHODS:
            yield call.lineno, f".{call.func.attr}() belongs to memory/allocator.py"


def only_lanes_knows_streams(source: Source) -> Iterator[Finding]:
    """Streams, events and profiler labels live in comm/lanes.py and comm/copy_lanes.py only."""
    if source.path in ("comm.lanes", "comm.copy_lanes"):
        return
    for line, name in source.mentions():
        if name.startswith("torch.") and name.rpartition(".")[2] in STREAM_NAMES:
            yield line, f"{name} belongs to comm/lanes.py"
    for call in source.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in STREAM_METHODS:
            yield call.lineno, f".{call.func.attr}() belongs to comm/lanes.py"


def only_its_codec_imports_transformer_engine(source: Source) -> Iterator[Finding]:
    """Transformer Engine is imported in ``quantized_codec.py`` of its extension only."""
    if source.path == "extensions.transformer_engine.quantized_codec":
        return
    for line, name in source.imports():
        if name.split(".")[0] in {"transformer_engine", "transformer_engine_torch"}:
            yield line, f"{name} belongs to the extension transformer_engine"
    for call in source.calls():
        for argument in call.args:
            if (
                source.dotted(call.func).rpartition(".")[2] in {"import_module", "__import__"}
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
                and argument.value.startswith("transformer_engine")
            ):
                yield call.lineno, f"{argument.value} belongs to the extension transformer_engine"


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


def public_things_have_docstrings(source: Source) -> Iterator[Finding]:
    """Modules, and their public functions and classes, say what they are."""
    if ast.get_docstring(source.tree) is None:
        yield 1, "the module has no docstring"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in [each for each in source.tree.body if isinstance(each, kinds)]:
        if not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.lineno, f"{node.name} has no docstring"


def nothing_follows_the_order_of_a_set(source: Source) -> Iterator[Finding]:
    """No order is taken from a set or from addresses: ranks would communicate in other orders.

    A set may be built, tested and sorted. Sets are known by their types in annotations, by
    assignments to a name in the same function, and by names of attributes and functions that are
    sets somewhere in the package.
    """
    known = package_sets() | declared_sets([source])
    scopes = list(_scopes(source.tree))
    of_module = _local_sets(scopes[0][1], known, set())
    for scope, nodes in scopes:
        if (source.path, scope) in ORDER_IS_LOCAL:
            continue
        sets = _local_sets(nodes, known, of_module)
        for node in nodes:
            for expression in _taken_in_order(node, nodes):
                if _is_set(expression, sets, known):
                    yield expression.lineno, f"{scope} reads {ast.unparse(expression)} in its order"
            if isinstance(node, ast.Call) and (key := _address_keys(node)):
                yield from ((node.lineno, f"{scope} sorts by {name}()") for name in key)


def _scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """(name, nodes) of the module and of each function, a function's without those inside it."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    pending: list[tuple[str, ast.AST]] = [("the module", tree)]
    while pending:
        name, root = pending.pop()
        nodes: list[ast.AST] = []
        inside = list(ast.iter_child_nodes(root))
        while inside:
            node = inside.pop()
            nodes.append(node)
            if isinstance(node, kinds):
                pending.append((node.name, node))
            else:
                inside.extend(ast.iter_child_nodes(node))
        yield name, nodes


def _local_sets(nodes: list[ast.AST], known: frozenset[str], around: set[str]) -> set[str]:
    """Names that stand for sets in a function of these nodes; ``around``: those of its module."""
    found = set(around)
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and _is_set_type(node.annotation):
            found.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    num_found = -1
    while num_found < len(found):  # one may be assigned from another
        num_found = len(found)
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_set(node.value, found, known):
                found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            elif isinstance(node, ast.NamedExpr) and _is_set(node.value, found, known):
                found.add(node.target.id)
    return found


@cache
def package_sets() -> frozenset[str]:
    """Names of attributes, functions and variables that are sets wherever the package has them."""
    return declared_sets(package_sources())


def declared_sets(sources: list[Source]) -> frozenset[str]:
    """Names of attributes, functions and variables that are sets wherever ``sources`` have them."""
    are, are_not = set(), set()
    for source in sources:
        everywhere = list(ast.walk(source.tree))
        kinds = (ast.Module, ast.ClassDef)
        outside = {id(each) for node in everywhere if isinstance(node, kinds) for each in node.body}
        for node in everywhere:
            names: list[str] = []
            is_set = False
            if isinstance(node, ast.FunctionDef):
                names, is_set = [node.name], _is_set_type(node.returns)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.attr for each in targets if isinstance(each, ast.Attribute)]
                if id(node) in outside:
                    names += [each.id for each in targets if isinstance(each, ast.Name)]
                if isinstance(node, ast.Assign):
                    is_set = _is_set(node.value, set(), frozenset())
                else:
                    is_set = _is_set_type(node.annotation)
            (are if is_set else are_not).update(names)
    return frozenset(are - are_not)


def _is_set_type(node: ast.expr | None) -> bool:
    """Whether an annotation is a set's, or a union's with a set."""
    if isinstance(node, ast.BinOp):
        return _is_set_type(node.left) or _is_set_type(node.right)
    if isinstance(node, ast.Subscript):
        return _is_set_type(node.value)
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
    return name in SET_TYPES


def _is_set(node: ast.expr, local: set[str], known: frozenset[str]) -> bool:
    """Whether an expression reads like a set; ``local``: variables that are, ``known``: attributes
    and functions."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Name):
        return node.id in local or (node.id.isupper() and node.id in known)
    if isinstance(node, ast.Attribute):
        return node.attr in known
    if isinstance(node, ast.IfExp):
        return _is_set(node.body, local, known) or _is_set(node.orelse, local, known)
    if isinstance(node, ast.BoolOp):
        return any(_is_set(each, local, known) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, SET_OPERATORS):
        sides = (node.left, node.right)
        return any(_is_set(each, local, known) or _is_view(each) for each in sides)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            name, of_set = node.func.attr, _is_set(node.func.value, local, known)
            if name in SET_METHODS or (name == "copy" and of_set):
                return True
        else:
            name = ast.unparse(node.func)
        return name in SET_TYPES or name in known
    return False


def _is_view(node: ast.expr) -> bool:
    """Whether it is ``x.keys()`` or ``x.items()``, which operators make sets of."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in {"items", "keys"}


# Calls that read their arguments one element after the other, and show it.
IN_ORDER = {"chain", "deque", "dict", "enumerate", "extend", "filter", "from_iterable", "fromkeys"}
IN_ORDER |= {"iter", "join", "list", "map", "reversed", "tuple", "zip"}


def _taken_in_order(node: ast.AST, nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Expressions of which ``node`` reads one element after the other, where that shows."""
    if isinstance(node, ast.For | ast.AsyncFor):
        yield node.iter
    elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
        if not _is_orderless(node, nodes):
            yield from (each.iter for each in node.generators)
    elif isinstance(node, ast.Starred):
        if not _is_orderless(node, nodes):
            yield node.value
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
            yield node.func.value
        if _called(node) in IN_ORDER and not _is_orderless(node, nodes):
            yield from node.args


def _is_orderless(node: ast.expr, nodes: list[ast.AST]) -> bool:
    """Whether ``node`` is an element of a set, or an argument of a function without order."""
    return any(
        (isinstance(each, ast.Set) and node in each.elts)
        or (isinstance(each, ast.Call) and node in each.args and _called(each) in ORDERLESS)
        for each in nodes
    )


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def _address_keys(node: ast.Call) -> list[str]:
    """``id`` or ``hash``, if that is the key by which the call sorts."""
    if _called(node) not in {"max", "min", "sort", "sorted"}:
        return []
    keys = [each.value for each in node.keywords if each.arg == "key"]
    keys += [each.args[0] for each in node.args if isinstance(each, ast.Call) and each.args]
    parts = [each.body if isinstance(each, ast.Lambda) else each for each in keys]
    parts = [each.func if isinstance(each, ast.Call) else each for each in parts]
    return [each.id for each in parts if isinstance(each, ast.Name) and each.id in {"hash", "id"}]


RULES: list[Callable[[Source], Iterator[Finding]]] = [
    imports_go_down,
    the_core_imports_no_format,
    the_planner_uses_one_file_of_the_kernel,
    the_core_leaves_private_attributes_to_their_objects,
    only_collectives_communicates,
    only_mesh_makes_groups,
    only_what_cuda_alone_has_names_it,
    only_memory_allocates,
    only_lanes_knows_streams,
    only_its_codec_imports_transformer_engine,
    nobody_asks_which_level_runs,
    nothing_follows_the_order_of_a_set,
    public_things_have_docstrings,
]


@cache
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
    (imports_go_down, "layout.layout", "from fsdp_engine.comm.mesh import DataMesh"),
    (imports_go_down, "comm.mesh", "import fsdp_engine.engine"),
    (imports_go_down, "comm.mesh", "import fsdp_engine as fe"),
    (imports_go_down, "comm.mesh", "from fsdp_engine import shard"),
    (imports_go_down, "memory.allocator", "from fsdp_engine.codecs import base"),
    (imports_go_down, "codecs.cast", "from ..runtime.unit import Unit"),
    (imports_go_down, "runtime.hooks", "def f():\n    from ..engine import Engine"),
    (imports_go_down, "attic", "x = 1"),
    (
        the_core_imports_no_format,
        "engine",
        "from fsdp_engine.checkpoint.model_state import MODEL",
    ),
    (the_core_imports_no_format, "units.build", "from fsdp_engine import extensions"),
    (the_core_imports_no_format, "runtime.hooks", "def f():\n    from ..pretrained import load"),
    (the_core_imports_no_format, "units.build", "import peft"),
    (
        the_planner_uses_one_file_of_the_kernel,
        "planner.estimates",
        "def f():\n    from fsdp_engine.units.plan import Plan",
    ),
    (
        the_core_leaves_private_attributes_to_their_objects,
        "runtime.hooks",
        "def f(engine):\n    return engine._scheduler",
    ),
    (
        only_collectives_communicates,
        "buffers.sharded_buffer",
        DIST + "dist.all_reduce(x)",
    ),
    (
        only_collectives_communicates,
        "buffers.sharded_buffer",
        "import torch\ntorch.distributed.barrier()",
    ),
    (
        only_collectives_communicates,
        "comm.mesh",
        "from torch.distributed import all_gather_object as g",
    ),
    (
        only_collectives_communicates,
        "engine",
        "from torch import distributed as d\nd.send",
    ),
    (only_collectives_communicates, "runtime.unit", "self.group.allreduce([x]).wait()"),
    (
        only_collectives_communicates,
        "runtime.unit",
        "import torch.distributed.nn as n\nn.functional.f(x)",
    ),
    (only_mesh_makes_groups, "engine", DIST + "dist.new_group([0])"),
    (
        only_mesh_makes_groups,
        "planner.estimates",
        MESH + "DeviceMesh('cpu', [0])",
    ),
    (
        only_mesh_makes_groups,
        "runtime.unit",
        MESH + "DeviceMesh.from_group(g)",
    ),
    (
        only_memory_allocates,
        "buffers.sharded_buffer",
        "import torch\nx = torch.empty(3, device='cpu')",
    ),
    (only_memory_allocates, "runtime.unit", "from torch import zeros_like as z\nz(x)"),
    (only_memory_allocates, "runtime.unit", "x.untyped_storage().resize_(0)"),
    (only_what_cuda_alone_has_names_it, "comm.lanes", "torch.cuda.current_stream()"),
    (only_what_cuda_alone_has_names_it, "engine", "from torch.cuda import empty_cache"),
    (only_what_cuda_alone_has_names_it, "memory.host_memory", "import torch\ntorch.cuda.cudart()"),
    (only_memory_allocates, "runtime.unit", "x.new_zeros(3)"),
    (only_lanes_knows_streams, "runtime.scheduler", "import torch\ns: torch.cuda.Stream = f()"),
    (only_lanes_knows_streams, "runtime.unit", "from torch.profiler import record_function as r"),
    (only_lanes_knows_streams, "memory.allocator", "x.record_stream(s)"),
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
        "planner.planner_cli",
        "import importlib\nimportlib.import_module('transformer_engine')",
    ),
    (nobody_asks_which_level_runs, "runtime.unit", "if strategy == 'no_shard':\n    pass"),
    (nobody_asks_which_level_runs, "runtime.unit", "x = name in ('optim', 'optim_grads')"),
    (nobody_asks_which_level_runs, "runtime.unit", "x = strategy.inner.value"),
    (nobody_asks_which_level_runs, "engine", "x = self.strategy.level(axis).value"),
    (nobody_asks_which_level_runs, "engine", "x = {'optim': 1}[name]"),
    (nobody_asks_which_level_runs, "engine", "match name:\n    case 'optim':\n        pass"),
    (nobody_asks_which_level_runs, "engine", "x = strategy.outer.name != other"),
    (
        nobody_asks_which_level_runs,
        "buffers.sharded_buffer",
        "from fsdp_engine.strategies import OPTIM\nx = level is OPTIM",
    ),
    # The defect that the rule is for: ranks gathered in different orders.
    (
        nothing_follows_the_order_of_a_set,
        "optim.step_listeners",
        "import weakref\nLISTENERS = weakref.WeakSet()\ndef tell(optimizer):\n"
        "    for each in list(LISTENERS):\n        each.optimizer_stepped(optimizer)",
    ),
    (
        nothing_follows_the_order_of_a_set,
        "runtime.scheduler",
        "class Scheduler:\n    def __init__(self):\n        self._ahead_units: set[int] = set()\n"
        "    def gather(self):\n        for each in self._ahead_units:\n            f(each)",
    ),
    (
        nothing_follows_the_order_of_a_set,
        "engine",
        "def f(units: frozenset[Unit]):\n    return [unit.gather() for unit in units]",
    ),
    (
        nothing_follows_the_order_of_a_set,
        "engine",
        "def f(a, b):\n    for name in a.keys() - b.keys():\n        send(name)",
    ),
    (nothing_follows_the_order_of_a_set, "engine", "x = [*{a, b}]"),
    (nothing_follows_the_order_of_a_set, "engine", "x = list(set(a).union(b))"),
    (nothing_follows_the_order_of_a_set, "engine", "x = {each for each in a}.pop()"),
    (nothing_follows_the_order_of_a_set, "engine", "def f(a) -> set[int]: ...\nx = tuple(f(a))"),
    (nothing_follows_the_order_of_a_set, "engine", "x = sorted(units, key=id)"),
    (nothing_follows_the_order_of_a_set, "engine", "units.sort(key=lambda unit: id(unit))"),
    (nothing_follows_the_order_of_a_set, "engine", "x = sorted(map(id, units))"),
    (
        public_things_have_docstrings,
        "buffers.sharded_buffer",
        '"""Here."""\nclass Buffer:\n    pass',
    ),
    (
        public_things_have_docstrings,
        "buffers.sharded_buffer",
        '"""Here."""\ndef f():\n    return 1',
    ),
    (public_things_have_docstrings, "buffers.sharded_buffer", "x = 1"),
]


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_caught(
    rule: Callable[[Source], Iterator[Finding]], path: str, text: str
) -> None:
    found = list(rule(Source(path, text)))
    assert found
    assert all(1 <= line <= len(text.splitlines()) for line, _ in found)


LAWFUL: list[tuple[str, str]] = [
    ("layout.placement", "from fsdp_engine.layout import Layout"),
    ("codecs.cast", "from fsdp_engine.codecs.base import ParamCodec"),
    ("engine", "from fsdp_engine.comm import mesh, collectives\ncollectives.all_reduce(x)"),
    ("engine", "def shard(strategy: str = 'optim_grads_params') -> None:\n    pass"),
    (
        "engine",
        MESH + "mesh: DeviceMesh",
    ),
    ("engine", "import torch\nx = torch.tensor(0.0)\ny = torch.empty(3, device='meta')"),
    ("optim.clip", "import torch\nx = torch.zeros((), dtype=dtype)"),
    ("comm.collectives", DIST + "dist.all_reduce(x)"),
    ("comm.mesh", DIST + "dist.new_group([0])"),
    ("memory.allocator", "import torch\nx = torch.empty(3)"),
    ("comm.lanes", "import torch\nx = torch.Stream()"),
    ("extensions.transformer_engine.quantized_codec", "import transformer_engine"),
    ("strategies.pair", "x = name == 'optim'"),
    ("buffers.sharded_buffer", "from fsdp_engine.strategies import Role\nx = role is Role.OPTIM"),
    ("engine", "for name in sorted({a, b}):\n    send(name)"),
    ("engine", "x = sum(sizes[each] for each in set(a)), {f(each) for each in {*a, *b}}"),
    ("engine", "seen: set[int] = set()\nx = [unit for unit in units if id(unit) not in seen]"),
    ("engine", "x = sorted(units, key=lambda unit: places[id(unit)])"),
    ("engine", "for unit in {id(unit): unit for unit in units}.values():\n    unit.gather()"),
]


@pytest.mark.parametrize(("path", "text"), LAWFUL)
def test_lawful_code_is_left_alone(path: str, text: str) -> None:
    source = Source(path, f'"""A file."""\n{text.replace("-> None:", "-> None:  # documented")}')
    rules = [rule for rule in RULES if rule is not public_things_have_docstrings]
    assert [finding for rule in rules for finding in rule(source)] == []


def test_docs_code_and_tests_have_the_terms_of_the_field() -> None:
    assert not {word: count for word, count in words_to_replace().items() if count}


def test_another_word_is_counted() -> None:
    counts = count_words("No" + "body. What " + "is there, no" + "body")
    assert sum(counts.values()) == 3


def test_every_folder_is_there() -> None:
    assert {source.room for source in package_sources()} == set(FLOORS)


def run_without(packages: list[str], program: str) -> str:
    """What ``program`` prints where imports of ``packages`` fail."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n"
    command = [sys.executable, "-W", "ignore", "-c", block + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Packages that neither training nor checkpoints import. Not peft: the engine takes its presence in
# `sys.modules`, which `run_without` makes, for an import.
NOT_IN_THE_CORE = [
    *(name for name in EXTRAS if name != "peft"),
    *("einops", "safetensors", "tqdm", "transformer_engine"),
]


def test_training_needs_torch_alone() -> None:
    program = """
import torch, fsdp_engine as fe
model = torch.nn.Linear(3, 2)
fe.shard(model)
model(torch.ones(1, 3)).sum().backward()
"""
    run_without([*NOT_IN_THE_CORE, "crc32c", "numpy"], program)


def test_the_package_is_imported_without_torchs_pipelines() -> None:
    """Which import its compiler."""
    program = """
import sys, fsdp_engine as fe
print("torch.distributed.pipelining" in sys.modules)
fe.simulate_pipeline, fe.PipelineSimulation
print("torch.distributed.pipelining" in sys.modules)
"""
    assert run_without([], program).split() == ["False", "True"]


def test_checkpoints_need_numpy_and_crc32c_beside() -> None:
    program = """
import tempfile
import torch, fsdp_engine as fe
model = torch.nn.Linear(3, 2)
engine = fe.shard(model)
before = model.weight.full_tensor().clone()
with tempfile.TemporaryDirectory() as folder:
    fe.save_checkpoint(folder, engine)
    with torch.no_grad():
        model.weight.zero_()
    fe.load_checkpoint(folder, engine)
print(torch.equal(model.weight.full_tensor(), before))
"""
    assert run_without(NOT_IN_THE_CORE, program) == "True\n"


# Statements that need a package that no earlier import of theirs needs.
NEEDS = {
    "rich": (
        "fe.load_pretrained(fe.shard(torch.nn.Linear(3, 2)), '.', progress=True)",
        "import fsdp_engine.checkpoint.cli",
    ),
    "typer": ("import fsdp_engine.planner.planner_cli", "import fsdp_engine.checkpoint.cli"),
    "matplotlib": ("from fsdp_engine.planner.figure import save_figure; save_figure(0, 'a')",),
    "accelerate": ("import fsdp_engine.integrations.accelerate",),
    "transformers": ("import fsdp_engine.integrations.transformers",),
    "lightning": ("import fsdp_engine.integrations.lightning",),
    "ray": ("import fsdp_engine.integrations.ray",),
}


@pytest.mark.parametrize("packages", [["typer"], [each for each in NEEDS if each != "typer"]])
def test_a_missing_package_is_an_error_that_names_its_extra(packages: list[str]) -> None:
    statements = [(package, each) for package in packages for each in NEEDS[package]]
    program = f"""
import torch, fsdp_engine as fe
for statement in {[statement for _, statement in statements]}:
    try:
        exec(statement)
        print("no error")
    except ModuleNotFoundError as error:
        print(error)
"""
    found = run_without(packages, program).splitlines()
    for (package, statement), line in zip(statements, found, strict=True):
        assert f"pip install 'fsdp_engine[{EXTRAS[package]}]'" in line, statement


def test_every_extra_that_an_error_names_is_in_pyproject_and_installs_the_package() -> None:
    with open(PACKAGE.parent / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(re.match(rf"{package}\b", each) for each in extras[extra]), package
    required = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert required == {"torch", "numpy", "crc32c"}
