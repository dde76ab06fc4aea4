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


def words(text: str) -> set[str]:
    return set(text.split())


# A folder imports only from lower floors. Within a folder, and between those of the lowest floor,
# imports form no circle. A file at the top of the package is a folder of its own.
FLOORS = {
    folder: floor
    for floor, folders in enumerate(
        (
            "patterns precision options engine_extension extension_list extras terminal strategies "
            "accelerator callers",
            "backend layout",
            "memory",
            "comm",
            "codecs hardware flat_dtensor",
            "optim buffers",
            "units",
            "runtime",
            "engine deprecated_arguments",
            "sharding checkpoint",
            "extensions",
            "kernel_interface pipelining fsdp2 megatron pretrained",
            "planner integrations config",
            "__init__",
            "__main__",
        )
    )
    for folder in folders.split()
}

# The core, and the folders of formats and frontends that it does not import.
CORE = words(
    "layout comm memory buffers units runtime strategies codecs accelerator backend callers "
    "extension_list flat_dtensor optim engine sharding"
)
ABOVE_THE_CORE = words(
    "checkpoint extensions fsdp2 integrations megatron kernel_interface pipelining planner "
    "pretrained"
)
# Packages of the formats and frontends that the core does not import either.
FORMAT_PACKAGES = words("accelerate lightning megatron peft ray safetensors torchft transformers")

LEVEL_NAMES = {"no_shard", "optim", "optim_grads", "optim_grads_params"}
LEVEL_OBJECTS = {name.upper() for name in LEVEL_NAMES}

COLLECTIVES = words(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single "
    "all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv "
    "broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier recv "
    "recv_object_list reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter "
    "scatter_object_list send send_object_list P2POp"
)
# Methods of a ProcessGroup; no tensor has a method of such a name.
GROUP_METHODS = words(
    "allgather allreduce alltoall alltoall_base _allgather_base _reduce_scatter_base"
)
COLLECTIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn")
GROUP_MAKERS = words(
    "DeviceMesh init_device_mesh init_process_group new_group new_subgroups "
    "new_subgroups_by_enumeration split_group"
)
# Allowed: torch.tensor and torch.scalar_tensor, a shape of (), and the meta device.
ALLOCATORS = words(
    "empty empty_like empty_strided full full_like ones ones_like rand randn zeros zeros_like "
    "UntypedStorage"
)
ALLOCATING_METHODS = words(
    "new_empty new_empty_strided new_full new_ones new_zeros resize_ resize_as_ set_"
)
STREAM_NAMES = words(
    "Event Stream StreamContext current_stream default_stream record_function set_stream stream "
    "synchronize"
)
STREAM_METHODS = {"record_stream", "wait_stream"}

# A set's order follows addresses or salted hashes, which differ between ranks.
SET_TYPES = {"set", "frozenset", "WeakSet", "AbstractSet", "MutableSet", "Set"}
SET_METHODS = {"difference", "intersection", "symmetric_difference", "union"}
SET_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
# Calls whose result does not depend on the order of their argument.
ORDERLESS = SET_METHODS | words(
    "Counter all any bool difference_update frozenset isdisjoint intersection_update issubset "
    "issuperset len max min set sorted sum symmetric_difference_update update"
)
# Calls whose result depends on the order in which they read their arguments.
IN_ORDER = words(
    "chain deque dict enumerate extend filter from_iterable fromkeys iter join list map reversed "
    "tuple zip"
)
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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        """The top-level file or folder of the package, which has a floor."""
        return self.path.split(".")[0]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for, dotted."""
        found = {}
        for node in self.nodes:
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
        # In an __init__ and in a file, level 1 of a relative import is the folder itself.
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

    @cached_property
    def imports(self) -> list[Finding]:
        """(line, dotted module or name) of every import."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        return found

    @cached_property
    def mentions(self) -> list[Finding]:
        """(line, dotted name) of every name used and every name imported from somewhere."""
        used = [each for each in self.nodes if isinstance(each, ast.Attribute | ast.Name)]
        return [*((each.lineno, self.dotted(each)) for each in used), *self.imports]

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    def method_calls(self, names: set[str]) -> Iterator[tuple[int, str, str]]:
        """(line, name, dotted object) of the calls of methods of these names."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call.lineno, call.func.attr, self.dotted(call.func.value)


def imports_go_down(source: Source) -> Iterator[Finding]:
    """A file imports from lower floors and from its own folder, and on the lowest floor also from
    others."""
    if source.folder not in FLOORS:
        yield 1, f"{source.folder} has no floor in FLOORS"
        return
    floor = FLOORS[source.folder]
    for line, name in source.imports:
        parts = name.split(".")
        if parts[0] != "fsdp_engine":
            continue
        folder = parts[1] if len(parts) > 1 else "__init__"
        if folder not in FLOORS:
            if (PACKAGE / f"{folder}.py").exists() or (PACKAGE / folder).is_dir():
                continue  # the rule reports it for that folder's files
            folder = "__init__"
        sideways = FLOORS[folder] == floor and (folder == source.folder or floor == 0)
        if FLOORS[folder] >= floor and not sideways:
            yield line, f"floor {floor} imports {name} from floor {FLOORS[folder]}"


def the_core_imports_no_format(source: Source) -> Iterator[Finding]:
    """The core imports no checkpoint format, planner or frontend, of the package or of others."""
    for line, name in source.imports if source.folder in CORE else ():
        first, *rest = name.split(".")
        is_above = first == "fsdp_engine" and bool(rest) and rest[0] in ABOVE_THE_CORE
        if is_above or first in FORMAT_PACKAGES:
            yield line, f"the core imports {name}"


def the_planner_uses_one_file_of_the_kernel(source: Source) -> Iterator[Finding]:
    """The planner imports the kernel by ``kernel_interface.py``. (``terminal.py`` and ``extras.py``
    are not part of the kernel.)"""
    allowed = tuple(f"fsdp_engine.{each}" for each in ("planner", "kernel_interface", "terminal"))
    allowed += ("fsdp_engine.extras",)
    for line, name in source.imports if source.folder == "planner" else ():
        if name.startswith("fsdp_engine") and not name.startswith(allowed):
            yield line, f"the planner imports {name}"


def the_core_leaves_private_attributes_to_their_objects(source: Source) -> Iterator[Finding]:
    """The core uses no private attribute of another object. (The class ``FlatDTensor`` is
    implemented in several files.)"""
    if source.folder in CORE - {"flat_dtensor", "optim"}:
        yield from private_attributes(source.tree, _private_names())


_private_names = cache(own_private_names)


def only_collectives_communicates(source: Source) -> Iterator[Finding]:
    """Collectives and sends of torch.distributed are called in comm/collectives.py only. (Sums
    over replicas call methods of torchft's groups.)"""
    of_torchft = ("integrations.managed_replica", "integrations.microbatch_sums")
    if source.path in ("comm.collectives", *of_torchft):
        return
    for line, name in source.mentions:
        module, _, last = name.rpartition(".")
        of_dist = module.startswith("torch.distributed") and last in COLLECTIVES
        if of_dist or name.startswith(COLLECTIVE_MODULES):
            yield line, f"{name} belongs to comm/collectives.py"
    for line, name, base in source.method_calls(GROUP_METHODS):
        if not base.startswith("fsdp_engine"):
            yield line, f".{name}() belongs to comm/collectives.py"


def only_mesh_makes_groups(source: Source) -> Iterator[Finding]:
    """Process groups and device meshes are made in comm/mesh.py and groups.py only. Annotations may
    name them. (A simulation makes those of its ranks.)"""
    if source.path in ("comm.mesh", "comm.groups", "planner.simulation.ranks"):
        return
    for call in source.calls:
        name = source.dotted(call.func)
        if name.startswith("torch.distributed") and GROUP_MAKERS & set(name.split(".")):
            yield call.lineno, f"{name}() belongs to comm/mesh.py"


def only_what_cuda_alone_has_names_it(source: Source) -> Iterator[Finding]:
    """``torch.cuda`` is named in memory/cuda.py only."""
    for line, name in source.mentions if source.path != "memory.cuda" else ():
        if f"{name}.".startswith("torch.cuda."):
            yield line, f"{name}: the accelerator's module is module_of(device)"


def only_memory_allocates(source: Source) -> Iterator[Finding]:
    """Memory is allocated and resized in memory/allocator.py only, but on the meta device."""
    for call in source.calls if source.path != "memory.allocator" else ():
        given = {each.arg: each.value for each in call.keywords}
        if getattr(given.get("device"), "value", None) == "meta":
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
    """Streams, events and profiler labels live in the lanes of ``comm/`` only."""
    if source.path in ("comm.lanes", "comm.host_lane", "comm.device_lane", "comm.copy_lanes"):
        return
    for line, name in source.mentions:
        if name.startswith("torch.") and name.rpartition(".")[2] in STREAM_NAMES:
            yield line, f"{name} belongs to comm/lanes.py"
    for line, name, _ in source.method_calls(STREAM_METHODS):
        yield line, f".{name}() belongs to comm/lanes.py"


def only_its_codec_imports_transformer_engine(source: Source) -> Iterator[Finding]:
    """Transformer Engine is imported in ``quantized_codec.py`` of its extension only."""
    if source.path == "extensions.transformer_engine.quantized_codec":
        return
    found = list(source.imports)
    for call in source.calls:
        if source.dotted(call.func).rpartition(".")[2] in {"import_module", "__import__"}:
            found += [(call.lineno, str(getattr(each, "value", ""))) for each in call.args]
    for line, name in found:
        if name.split(".")[0] in {"transformer_engine", "transformer_engine_torch"}:
            yield line, f"{name} belongs to the extension transformer_engine"


def nobody_asks_which_level_runs(source: Source) -> Iterator[Finding]:
    """Outside strategies/ no level's name, object or value is compared, matched or looked up."""
    for node in source.nodes if source.folder != "strategies" else ():
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
    if isinstance(node, ast.Constant):
        is_name = isinstance(node.value, str) and node.value in LEVEL_NAMES
        return repr(node.value) if is_name else None
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
            for key in _address_keys(node) if isinstance(node, ast.Call) else ():
                yield node.lineno, f"{scope} sorts by {key}()"


def _scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """(name, nodes) of the module and of each function, without bodies of functions inside it."""
    pending: list[tuple[str, ast.AST]] = [("the module", tree)]
    while pending:
        name, root = pending.pop()
        nodes: list[ast.AST] = []
        inside = list(ast.iter_child_nodes(root))
        while inside:
            node = inside.pop()
            nodes.append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
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
    while num_found < len(found):  # repeat, since a set may be assigned from another variable
        num_found = len(found)
        for node in nodes:
            if isinstance(node, ast.Assign | ast.NamedExpr) and _is_set(node.value, found, known):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


@cache
def package_sets() -> frozenset[str]:
    return declared_sets(package_sources())


def declared_sets(sources: list[Source]) -> frozenset[str]:
    """Names of attributes, functions and variables that are sets wherever ``sources`` have them."""
    are, are_not = set(), set()
    for source in sources:
        bodies = [n.body for n in source.nodes if isinstance(n, ast.Module | ast.ClassDef)]
        outside = {id(each) for body in bodies for each in body}
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef):
                (are if _is_set_type(node.returns) else are_not).add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                if isinstance(node, ast.Assign):
                    targets, is_set = node.targets, _is_set(node.value, set(), frozenset())
                else:
                    targets, is_set = [node.target], _is_set_type(node.annotation)
                names = [each.attr for each in targets if isinstance(each, ast.Attribute)]
                if id(node) in outside:
                    names += [each.id for each in targets if isinstance(each, ast.Name)]
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

    def is_set(part: ast.expr) -> bool:
        return _is_set(part, local, known)

    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Name():
            return node.id in local or (node.id.isupper() and node.id in known)
        case ast.Attribute():
            return node.attr in known
        case ast.IfExp():
            return is_set(node.body) or is_set(node.orelse)
        case ast.BoolOp():
            return any(map(is_set, node.values))
        case ast.BinOp() if isinstance(node.op, SET_OPERATORS):
            return any(is_set(each) or _is_view(each) for each in (node.left, node.right))
        case ast.Call():
            name = _called(node)
            if isinstance(node.func, ast.Attribute) and name == "copy":
                return is_set(node.func.value)
            return name in SET_TYPES | SET_METHODS or name in known
    return False


def _is_view(node: ast.expr) -> bool:
    """Whether it is ``x.keys()`` or ``x.items()``, which operators make sets of."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in {"items", "keys"}


def _taken_in_order(node: ast.AST, nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Expressions whose elements ``node`` reads in order, if the result depends on that order."""
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


DIST = "import torch.distributed as dist\n"
MESH = "from torch.distributed import DeviceMesh\n"
BUFFER, UNIT = "buffers.sharded_buffer", "runtime.unit"
# Each rule, and violations of it: a file, and its text.
RULES: dict[Callable[[Source], Iterator[Finding]], list[tuple[str, str]]] = {
    imports_go_down: [
        ("layout.layout", "from fsdp_engine.comm.mesh import DataMesh"),
        ("comm.mesh", "import fsdp_engine.engine"),
        ("comm.mesh", "import fsdp_engine as fe"),
        ("comm.mesh", "from fsdp_engine import shard"),
        ("memory.allocator", "from fsdp_engine.codecs import base"),
        ("codecs.cast", "from ..runtime.unit import Unit"),
        ("runtime.hooks", "def f():\n    from ..engine import Engine"),
        ("attic", "x = 1"),
    ],
    the_core_imports_no_format: [
        ("engine", "from fsdp_engine.checkpoint.model_state import MODEL"),
        ("units.build", "from fsdp_engine import extensions"),
        ("runtime.hooks", "def f():\n    from ..pretrained import load"),
        ("units.build", "import peft"),
    ],
    the_planner_uses_one_file_of_the_kernel: [
        ("planner.estimates", "def f():\n    from fsdp_engine.units.plan import Plan"),
    ],
    the_core_leaves_private_attributes_to_their_objects: [
        ("runtime.hooks", "def f(engine):\n    return engine._scheduler"),
    ],
    only_collectives_communicates: [
        (BUFFER, DIST + "dist.all_reduce(x)"),
        (BUFFER, "import torch\ntorch.distributed.barrier()"),
        ("comm.mesh", "from torch.distributed import all_gather_object as g"),
        ("engine", "from torch import distributed as d\nd.send"),
        (UNIT, "self.group.allreduce([x]).wait()"),
        (UNIT, "import torch.distributed.nn as n\nn.functional.f(x)"),
    ],
    only_mesh_makes_groups: [
        ("engine", DIST + "dist.new_group([0])"),
        ("planner.estimates", MESH + "DeviceMesh('cpu', [0])"),
        (UNIT, MESH + "DeviceMesh.from_group(g)"),
    ],
    only_what_cuda_alone_has_names_it: [
        ("comm.lanes", "torch.cuda.current_stream()"),
        ("engine", "from torch.cuda import empty_cache"),
        ("memory.host_memory", "import torch\ntorch.cuda.cudart()"),
    ],
    only_memory_allocates: [
        (BUFFER, "import torch\nx = torch.empty(3, device='cpu')"),
        (UNIT, "from torch import zeros_like as z\nz(x)"),
        (UNIT, "x.untyped_storage().resize_(0)"),
        (UNIT, "x.new_zeros(3)"),
    ],
    only_lanes_knows_streams: [
        ("runtime.scheduler", "import torch\ns: torch.cuda.Stream = f()"),
        (UNIT, "from torch.profiler import record_function as r"),
        ("memory.allocator", "x.record_stream(s)"),
        ("engine", "from torch import cuda\ncuda.current_stream()"),
    ],
    only_its_codec_imports_transformer_engine: [
        ("engine", "import transformer_engine.torch"),
        ("codecs.fp8", "from transformer_engine import pytorch"),
        ("planner.cli", "import importlib\nimportlib.import_module('transformer_engine')"),
    ],
    nobody_asks_which_level_runs: [
        (UNIT, "if strategy == 'no_shard':\n    pass"),
        (UNIT, "x = name in ('optim', 'optim_grads')"),
        (UNIT, "x = strategy.inner.value"),
        ("engine", "x = self.strategy.level(axis).value"),
        ("engine", "x = {'optim': 1}[name]"),
        ("engine", "match name:\n    case 'optim':\n        pass"),
        ("engine", "x = strategy.outer.name != other"),
        (BUFFER, "from fsdp_engine.strategies import OPTIM\nx = level is OPTIM"),
    ],
    nothing_follows_the_order_of_a_set: [
        # The defect that the rule is for: ranks gathered in different orders.
        (
            "optim.step_listeners",
            "import weakref\nLISTENERS = weakref.WeakSet()\ndef tell(optimizer):\n"
            "    for each in list(LISTENERS):\n        each.optimizer_stepped(optimizer)",
        ),
        (
            "runtime.scheduler",
            "class Scheduler:\n    def __init__(self):\n        self._ahead: set[int] = set()\n"
            "    def gather(self):\n        for each in self._ahead:\n            f(each)",
        ),
        ("engine", "def f(units: frozenset[Unit]):\n    return [unit.gather() for unit in units]"),
        ("engine", "def f(a, b):\n    for name in a.keys() - b.keys():\n        send(name)"),
        ("engine", "x = [*{a, b}]"),
        ("engine", "x = list(set(a).union(b))"),
        ("engine", "x = {each for each in a}.pop()"),
        ("engine", "def f(a) -> set[int]: ...\nx = tuple(f(a))"),
        ("engine", "x = sorted(units, key=id)"),
        ("engine", "units.sort(key=lambda unit: id(unit))"),
        ("engine", "x = sorted(map(id, units))"),
    ],
    public_things_have_docstrings: [
        (BUFFER, '"""Here."""\nclass Buffer:\n    pass'),
        (BUFFER, '"""Here."""\ndef f():\n    return 1'),
        (BUFFER, "x = 1"),
    ],
}
LAWFUL = [
    ("layout.placement", "from fsdp_engine.layout import Layout"),
    ("codecs.cast", "from fsdp_engine.codecs.base import ParamCodec"),
    ("engine", "from fsdp_engine.comm import mesh, collectives\ncollectives.all_reduce(x)"),
    ("engine", "def shard(strategy: str = 'optim_grads_params'):\n    '''Shards.'''"),
    ("engine", MESH + "mesh: DeviceMesh"),
    ("engine", "import torch\nx = torch.tensor(0.0)\ny = torch.empty(3, device='meta')"),
    ("optim.clip", "import torch\nx = torch.zeros((), dtype=dtype)"),
    ("comm.collectives", DIST + "dist.all_reduce(x)"),
    ("comm.mesh", DIST + "dist.new_group([0])"),
    ("memory.allocator", "import torch\nx = torch.empty(3)"),
    ("comm.lanes", "import torch\nx = torch.Stream()"),
    ("extensions.transformer_engine.quantized_codec", "import transformer_engine"),
    ("strategies.pair", "x = name == 'optim'"),
    (BUFFER, "from fsdp_engine.strategies import Role\nx = role is Role.OPTIM"),
    ("engine", "for name in sorted({a, b}):\n    send(name)"),
    ("engine", "x = sum(sizes[each] for each in set(a)), {f(each) for each in {*a, *b}}"),
    ("engine", "seen: set[int] = set()\nx = [unit for unit in units if id(unit) not in seen]"),
    ("engine", "x = sorted(units, key=lambda unit: places[id(unit)])"),
    ("engine", "for unit in {id(unit): unit for unit in units}.values():\n    unit.gather()"),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@cache
def package_sources() -> list[Source]:
    files = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        Source(".".join(name.with_suffix("").parts), path.read_text())
        for name, path in files.items()
    ]


@each_rule
def test_the_package_keeps_the_rule(rule) -> None:
    broken = [
        f"fsdp_engine/{source.path.replace('.', '/')}.py:{line}: {message}"
        for source in package_sources()
        for line, message in rule(source)
    ]
    assert not broken, "\n".join([f"{rule.__name__}: {rule.__doc__}", *broken])


@each_rule
def test_a_planted_violation_is_caught(rule) -> None:
    for path, text in RULES[rule]:
        lines = [line for line, _ in rule(Source(path, text))]
        assert lines, text
        assert all(1 <= line <= len(text.splitlines()) for line in lines), text


@pytest.mark.parametrize(("path", "text"), LAWFUL)
def test_lawful_code_is_left_alone(path: str, text: str) -> None:
    source = Source(path, f'"""A file."""\n{text}')
    assert [finding for rule in RULES for finding in rule(source)] == []


def test_every_folder_and_every_extension_is_listed() -> None:
    assert {source.folder for source in package_sources()} == set(FLOORS)
    folders = [path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")]
    assert sorted(folders) == sorted(each.folder for each in EXTENSIONS)


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; [] if there is no circle."""
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

    return next(filter(None, (visit(file, []) for file in sorted(imports))), [])


def imports_between_files(sources: list[Source]) -> dict[str, set[str]]:
    """For each file of the package, those that it imports from."""
    files = {source.path for source in sources}
    found: dict[str, set[str]] = {source.path: set() for source in sources}
    for source in sources:
        for _, name in source.imports:
            path = name.removeprefix("fsdp_engine.") if name.startswith("fsdp_engine.") else ""
            folder = path.rpartition(".")[0]
            # The folder's __init__ itself, not a name that it imports.
            places = (path, f"{path}.__init__", folder, f"{folder}.__init__")
            found[source.path].update([each for each in places if each in files][:1])
    return found


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert find_cycle(imports_between_files(package_sources())) == []
    first = Source("runtime.unit", "from fsdp_engine.runtime.hooks import not_compiled")
    second = Source("runtime.hooks", "from fsdp_engine.runtime import unit")
    planted = ["runtime.hooks", "runtime.unit", "runtime.hooks"]
    assert find_cycle(imports_between_files([first, second])) == planted


def imported_tests(code: str) -> list[str]:
    """Test modules that are imported. Tests must put shared code into modules of their own."""
    found = {name for _, name in Source("tests", code).imports}
    return [
        name
        for name in found | {name.rpartition(".")[0] for name in found}
        if name.rpartition(".")[2].startswith("test_")
        and (TESTS.parent / f"{name.replace('.', '/')}.py").exists()
    ]


def test_no_test_imports_from_another() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        assert not imported_tests(path.read_text(encoding="utf-8")), path
    for code in (
        "from tests.test_docs import test_a_broken_link_is_seen",
        "from tests import test_docs as docs",
        "import tests.test_docs",
        "def f():\n    from tests.test_docs import x",
    ):
        assert imported_tests(code) == ["tests.test_docs"], code


# Folders whose tests train without any extension, and how a program asks for one.
TESTS_WITHOUT_EXTENSIONS = words(
    "buffers checkpoint comm flat_dtensor layout memory optim promises random_programs runtime "
    "strategies"
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
}


def used_extensions(folder: str) -> dict[str, list[str]]:
    """Extensions that tests of a folder use, with the files that do."""
    files = {path.name: path.read_text("utf-8") for path in (TESTS / folder).rglob("*.py")}
    uses = {**EXTENSION_USES, "tests of one": r"\btests\.extensions\b"}
    found = {
        name: [file for file, text in files.items() if re.search(use, text)]
        for name, use in uses.items()
    }
    return {name: using for name, using in found.items() if using}


def test_tests_of_the_kernel_use_no_extension() -> None:
    for folder in TESTS_WITHOUT_EXTENSIONS:
        assert not used_extensions(folder), folder
    for extension in EXTENSION_USES:  # the check finds uses
        assert extension in used_extensions(f"extensions/{extension}")


def imported_extensions(path: str, text: str) -> set[str]:
    """Extensions that occur in a file of the package, except the one that it is part of."""
    own = path.split("/")[1] if path.startswith("extensions/") else ""
    return set(re.findall(r"fsdp_engine\.extensions\.(\w+)", text)) - {own}


def test_an_extension_is_imported_by_its_own_files_alone() -> None:
    files = {file for each in EXTENSIONS for file in each.files}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        assert name in files or not imported_extensions(name, path.read_text("utf-8")), name
    text = "from fsdp_engine.extensions.checks import GradientChecks"
    assert imported_extensions("runtime/hooks.py", text) == {"checks"}
    assert imported_extensions("extensions/mean_loss/mean_loss.py", text) == {"checks"}
    assert not imported_extensions("extensions/checks/__init__.py", text)


def test_docs_code_and_tests_have_the_terms_of_the_field() -> None:
    assert not {word: count for word, count in words_to_replace().items() if count}
    counts = count_words("No" + "body. What " + "is there, no" + "body")
    assert sum(counts.values()) == 3


def run_without(packages: list[str], program: str) -> str:
    """Run ``program`` where imports of ``packages`` fail; returns its output."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n"
    command = [sys.executable, "-W", "ignore", "-c", block + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Packages that neither training nor checkpoints import. Not peft: `run_without` puts its names into
# `sys.modules`, and the engine would take peft as imported.
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


def test_checkpoints_need_numpy_and_crc32c_beside_but_not_torchs_pipelines() -> None:
    """torch's pipelines would import torch's compiler."""
    program = """
import tempfile
import torch, fsdp_engine as fe
print("torch.distributed.pipelining" in sys.modules)
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
    assert run_without(NOT_IN_THE_CORE, program).split() == ["False", "True"]


# Each statement runs while its package, and those of the lines above it, are missing.
NEEDS = {
    "matplotlib": "from fsdp_engine.planner.figure import save_figure; save_figure(0, 'a')",
    "accelerate": "import fsdp_engine.integrations.accelerate",
    "transformers": "import fsdp_engine.integrations.transformers",
    "lightning": "import fsdp_engine.integrations.lightning",
    "ray": "import fsdp_engine.integrations.ray",
}


def test_a_missing_package_is_an_error_that_names_its_extra() -> None:
    program = f"""
import torch, fsdp_engine as fe
for package, statement in {list(NEEDS.items())}:
    sys.modules[package] = None
    try:
        exec(statement)
        print("no error")
    except ModuleNotFoundError as error:
        print(error)
fe.simulate_pipeline, fe.PipelineSimulation
print("torch.distributed.pipelining" in sys.modules)
"""
    *found, imports_pipelines = run_without([], program).splitlines()
    assert imports_pipelines == "True"
    for (package, statement), line in zip(NEEDS.items(), found, strict=True):
        assert f"pip install 'fsdp_engine[{EXTRAS[package]}]'" in line, statement


def test_every_extra_that_an_error_names_is_in_pyproject_and_installs_the_package() -> None:
    with open(PACKAGE.parent / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(re.match(rf"{package}\b", each) for each in extras[extra]), package
    required = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert required == {"torch", "numpy", "crc32c", "rich", "typer"}
