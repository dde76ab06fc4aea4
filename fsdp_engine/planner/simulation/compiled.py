"""Simulates code that ``torch.compile`` compiles with inductor.

Dynamo traces the code. Inductor's compiler decomposes the traced operations, and partitions them
into forward and backward. Both work on fake tensors. Instead of lowering a graph to kernels, a
simulation makes a :class:`_CompiledGraph` of it. This class runs the kernels that ``fusion.py``
finds: it allocates the results that are kept in memory, and advances the clock. The tensors saved
for backward are those that the partitioner selects.

Dynamo stores compiled code with the code objects that it has traced. When the last simulation ends,
the code that simulations compiled is removed, so that compiling for training starts afresh.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fsdp_engine.kernel_interface import allocator, find_blocks
from fsdp_engine.planner.simulation.chunked_products import (
    chunk_products,
    is_of_backward,
    simulated_symmetric_memory,
)
from fsdp_engine.planner.simulation.device_kernels import torch_s_kernels
from fsdp_engine.planner.simulation.flex_attention import BACKWARD, FORWARD, flex_kernel
from fsdp_engine.planner.simulation.fusion import (
    Kernel,
    is_view,
    kernels_of,
    last_reads,
    memory_of,
    name_of,
    reused_by,
    source_of,
    value_of,
)
from fsdp_engine.planner.simulation.memory_access import num_bytes_of, tensors_of
from fsdp_engine.planner.simulation.module_names import ModuleNames
from fsdp_engine.planner.simulation.operations import Operations

# Settings of Dynamo: shapes are not generalized, and code is compiled for every simulated shape.
_DYNAMO = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 10_000,
    "accumulated_recompile_limit": 100_000,
}
# Settings of AOTAutograd: caches of real compilations are neither read nor written, and results of
# custom operations are not checked for aliasing.
_AOT = {
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "check_custom_op_aliasing": False,
}

# Operations that run a random operation and save or restore the generator's state, so that a
# recomputation draws the same random numbers.
_SAVES_STATE, _RESTORES_STATE = "run_and_save_rng_state", "run_with_rng_state"
_STATE_BYTES = 5056  # size of the state of a CPU's generator
# torch's function that inserts these operations for random operations that are recomputed.
_KEEPS_STATES = "functionalize_rng_ops"

_HOOKS_WARNING = r"Using `torch.compile\(module\)` when there are global hooks"

_has_rules = False  # whether a simulation has made Dynamo's rules for torch's functions
_running = 0  # number of running simulations and of running plans
_codes_before: list[Any] = []
_graphs_before = 0  # number of graphs that Dynamo had traced at the last call of free_traces


@contextmanager
def simulated_compiler() -> Iterator[None]:
    """Let ``torch.compile`` compile for simulations in this context."""
    global _running, _codes_before
    if not _running:
        _codes_before = _compiled_codes()
    _running += 1
    try:
        with (
            patch.object(torch._TorchCompileInductorWrapper, "__call__", _compile),
            simulated_symmetric_memory(),
        ):
            yield
    finally:
        _running -= 1
        if not _running:
            for code in _compiled_codes():
                if code not in _codes_before:
                    torch._C._dynamo.eval_frame.reset_code(code)
            _codes_before = []


def free_traces() -> None:
    """Free the graphs that Dynamo has traced since the last call. Their objects are in reference
    cycles, and refer to arguments of the traced calls. Otherwise the garbage collector would free
    the memory of these arguments at an arbitrary time."""
    global _graphs_before
    utilities = sys.modules.get("torch._dynamo.utils")
    graphs = 0 if utilities is None else utilities.counters["stats"]["unique_graphs"]
    if graphs != _graphs_before:
        gc.collect()
    _graphs_before = graphs


@contextmanager
def kept_rules() -> Iterator[None]:
    """Keep Dynamo's rules for torch's functions when ``init_process_group`` is called in this
    context, if an earlier simulation has made them. Making them takes a tenth of the time of a
    small simulation. torch clears them because they may have been made while torch was imported."""
    if not _has_rules:
        yield
        return
    from torch._dynamo import trace_rules

    with patch.object(trace_rules, "clear_lru_cache", lambda: None):
        yield


@contextmanager
def compiled_modules(model: nn.Module, names: ModuleNames, *, on_device: bool) -> Iterator[None]:
    """Trace calls of the model's compiled modules in this context without the hooks of ``names``.

    Args:
        model, names: The model and the module names of the simulation.
        on_device: Whether a device computes. States of random numbers are then not results of
            graphs.
    """
    global _has_rules
    for module in model.modules():
        if module._compiled_call_impl is not None:
            called = torch_s_kernels()(module._compiled_call_impl)
            module._compiled_call_impl = names.as_one(module, called)
        elif _is_optimized(module):
            module.forward = names.as_one(module, torch_s_kernels()(module.forward))
    with warnings.catch_warnings(), ExitStack() as stack:
        # The hooks of ``names`` on a compiled module itself are intended.
        warnings.filterwarnings("ignore", _HOOKS_WARNING)
        if "torch._dynamo" in sys.modules:
            from torch._dynamo import config as dynamo
            from torch._dynamo import trace_rules
            from torch._functorch import config as aot
            from torch._functorch import partitioners

            # This call makes the rules, from the functions that torch has at this time.
            trace_rules.get_torch_obj_rule_map()
            _has_rules = True

            for config, settings in ((dynamo, _DYNAMO), (aot, _AOT)):
                known = {name: each for name, each in settings.items() if hasattr(config, name)}
                stack.enter_context(config.patch(known))
            if on_device and hasattr(partitioners, _KEEPS_STATES):
                stack.enter_context(patch.object(partitioners, _KEEPS_STATES, _without_states))
        yield


def _without_states(
    joint: GraphModule, forward: GraphModule, backward: GraphModule, num_sym_nodes: int
) -> tuple[GraphModule, GraphModule]:
    """Returns the forward and backward graphs unchanged, without states of random numbers among the
    results of forward. A device's generator keeps these states. torch would add the states of the
    CPU's generator, since fake tensors are on the CPU; torch 2.13 adds them after the meshes of
    DTensors, which must be the last results."""
    del joint, num_sym_nodes
    return forward, backward


def compile_blocks(model: nn.Module, units: Any = None) -> None:
    """Call ``compile()`` of each block that is not compiled yet.

    Args:
        model, units: See :func:`~fsdp_engine.checkpoint_units`.

    Raises:
        ValueError: The model has no blocks.
    """
    blocks = find_blocks(model, units)
    if not blocks:
        raise ValueError(
            "compile: expected a model with blocks (nn.ModuleList, nn.Sequential), or `units=`; "
            f"found none in {type(model).__name__}"
        )
    for block in blocks.values():
        if block._compiled_call_impl is None and not _is_optimized(block):
            block.compile()


def _is_optimized(module: nn.Module) -> bool:
    """Returns whether a module is the result of ``torch.compile(module)``."""
    return type(module).__name__ == "OptimizedModule"


def _compiled_codes() -> list[Any]:
    """Returns the code objects for which Dynamo has stored compiled code."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return []
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    seen = (each() for each in frames.input_codes.seen)
    return [code for code in seen if code is not None and entries(code)]


def _compile(backend: Any, model: Any, inputs: Any, **options: Any) -> Any:
    """Compile a graph of Dynamo like ``_TorchCompileInductorWrapper``, except for its kernels."""
    from torch._inductor.compile_fx import compile_fx

    patches = {**backend.config, **(options.get("config_patches") or {})}
    return compile_fx(model, inputs, inner_compile=_make_graph, config_patches=patches)


def _make_graph(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Returns a function that simulates a graph, instead of inductor's compilation of the graph."""
    from torch._inductor import config
    from torch._inductor.utils import get_donated_idxs

    del inputs
    chunk_products(graph)
    is_backward = bool(options.get("is_backward"))
    donated = (get_donated_idxs() or []) if is_backward else []
    compiled = _CompiledGraph(graph, donated, is_backward=is_backward)

    def run(args: list[Any]) -> Any:
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return _visible(run, graph) if config.wrap_inductor_compiled_regions else run


def _visible(run: Callable[[list[Any]], Any], graph: GraphModule) -> Any:
    """Returns ``run`` as an operation that the dispatch modes of selective checkpointing see.
    Inductor does the same if ``wrap_inductor_compiled_regions`` is set."""
    from torch._higher_order_ops import wrap

    kind = getattr(wrap, "InductorCompiledCallable", None)
    # torch 2.11 takes the function itself.
    known = run if kind is None else kind(run, graph)

    def visible(args: list[Any]) -> Any:
        return wrap.inductor_compiled_code(known, args)

    visible._boxed_call = True  # type: ignore[attr-defined]
    return visible


class _CompiledGraph:
    """A graph of inductor that runs on the simulated clock.

    Args:
        graph: The graph of aten operations.
        donated: Indices of inputs whose memory the graph may overwrite.
        is_backward: Whether this is a backward graph.

    Raises:
        NotImplementedError: The graph has symbolic shapes.
    """

    def __init__(self, graph: GraphModule, donated: Sequence[int], *, is_backward: bool) -> None:
        self._module = graph
        self._is_backward = is_backward
        nodes = list(graph.graph.nodes)
        for node in nodes:
            if name_of(node) == _SAVES_STATE:
                _set_state_size(node)
            elif name_of(node) == _RESTORES_STATE and isinstance(node.args[0], Node):
                node.args[0].meta["val"] = _new_state()
        _check_shapes(nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        reusable = {self._inputs[number] for number in donated}
        (self._output,) = (node for node in nodes if node.op == "output")
        returned = {memory_of(node) for node in self._output.all_input_nodes}
        kernels = kernels_of(graph.graph, reusable)
        views: dict[Node, list[Node]] = {}
        for node in nodes:
            if is_view(node):
                views.setdefault(source_of(memory_of(node)), []).append(node)
        self._steps: list[tuple[Kernel, list[Node], list[Node]]] = []
        read = {source_of(each) for kernel in kernels for each in kernel.reads}
        kept = {source_of(each) for each in returned}
        self._unread = [node for node in self._inputs if node not in read | kept]
        for kernel, freed in zip(kernels, last_reads(kernels, returned), strict=True):
            early = reused_by(kernel, freed, reusable)
            late = [each for each in freed if each not in early]
            before, after = (
                [n for each in part for n in (each, *views.get(each, ()))] for part in (early, late)
            )
            self._steps.append((kernel, before, after))
        # Each result of an operation with several results is freed after its own last use.
        last: dict[Node, int] = {}
        for number, kernel in enumerate(kernels):
            unfused = [] if kernel.is_fused else kernel.nodes[0].all_input_nodes
            for node in (*kernel.reads, *kernel.in_place, *map(memory_of, unfused)):
                last[node] = number
        for node, number in last.items():
            if node is not source_of(node) and node not in returned:
                of_node = [each for each in views[source_of(node)] if memory_of(each) is node]
                self._steps[number][2].extend(of_node)

    def __call__(self, args: list[Any]) -> Any:
        """Run all kernels. ``args`` is emptied, as in inductor."""
        values: dict[Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        mode = _operations()
        with mode.compiled(is_backward=self._is_backward):
            for node in self._unread:
                del values[node]
            for kernel, early, late in self._steps:
                for node in early:
                    values.pop(node, None)
                if kernel.is_fused:
                    for node in kernel.writes:
                        values[node] = _allocate(value_of(node))
                    mode.fused(kernel)
                else:
                    self._run(kernel.nodes[0], values, mode)
                for node in late:
                    values.pop(node, None)
            args, _ = self._arguments(values, self._output)
            return args[0]

    def _run(self, node: Node, values: dict[Node, Any], mode: Operations) -> None:
        """Run an operation that is a kernel of its own."""
        if self._is_backward:
            mode.is_recomputation = not is_of_backward(node)
        args, kwargs = self._arguments(values, node)
        assert callable(node.target)
        if name_of(node) in (FORWARD, BACKWARD):
            # Inductor generates this kernel. Modes do not see it as an operation.
            values[node] = _allocate(value_of(node))
            num_bytes = sum(map(num_bytes_of, tensors_of((args, values[node]))))
            mode.flex_attention(flex_kernel(name_of(node), args), num_bytes)
        elif name_of(node) == _SAVES_STATE:
            values[node] = (_allocate(value_of(node)[0]), args[0](*args[1:], **kwargs))
        elif name_of(node) == _RESTORES_STATE:
            values[node] = args[1](*args[2:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)
        if isinstance(values[node], tuple | list):
            results = values[node]
            values[node] = None
            for user in node.users:
                if name_of(user) == "getitem":
                    values[user] = results[user.args[1]]

    def _arguments(self, values: dict[Node, Any], node: Node) -> tuple[Any, Any]:
        get: Callable[[Node], Any] = partial(self._value, values)
        return map_arg(node.args, get), map_arg(node.kwargs, get)

    def _value(self, values: dict[Node, Any], node: Node) -> Any:
        """Returns the value of a node, which is computed by a kernel, a view, or a constant."""
        if node in values:
            return values[node]
        if node.op == "get_attr":
            found = getattr(self._module, str(node.target))
            return _allocate(found) if isinstance(found, Tensor) else found
        if is_view(node):
            assert callable(node.target)
            args, kwargs = self._arguments(values, node)
            values[node] = node.target(*args, **kwargs)
            return values[node]
        return _allocate(value_of(node))


def _set_state_size(node: Node) -> None:
    """Set the results of an operation that saves a random state, since their size is symbolic."""
    elements = {each.args[1]: each for each in node.users}
    first = elements.get(0)
    state = _new_state()
    if first is not None:
        first.meta["val"] = state
    others = elements[1].meta["val"] if 1 in elements else None
    node.meta["val"] = (state, others)


def _new_state() -> Tensor:
    return allocator.empty((_STATE_BYTES,), torch.uint8, torch.device("cpu"))


def _check_shapes(nodes: Sequence[Node]) -> None:
    for node in nodes:
        value = value_of(node)
        tensors = value if isinstance(value, tuple | list) else [value]
        for each in tensors:
            sizes = each.shape if isinstance(each, Tensor) else (each,)
            if any(isinstance(size, torch.SymInt) for size in sizes):
                raise NotImplementedError(
                    "torch.compile: expected static shapes in a simulation; found dynamic ones. "
                    "Compile with dynamic=None or dynamic=False"
                )


def _allocate(value: Any) -> Any:
    """Allocate memory for a result, and return it."""
    if isinstance(value, tuple | list):
        return [_allocate(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    shape, steps = tuple(value.shape), value.stride()
    if value.is_contiguous():
        return allocator.empty(shape, value.dtype, value.device)
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    memory = allocator.empty((last + 1,), value.dtype, value.device)
    return memory.as_strided(shape, steps)


def _operations() -> Operations:
    """Returns the mode of the running simulation."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, Operations):
            return mode
    raise RuntimeError(
        "torch.compile: expected calls only within simulations, since this graph was compiled in "
        "one; found a call outside of simulations"
    )
