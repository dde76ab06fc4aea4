"""Finds the kernels of a compiled graph, by the fusion rules of inductor's scheduler.

The graphs are the ones that inductor compiles: graphs of decomposed aten operations, with forward
and backward partitioned. Operations are of four kinds:

    views       no kernel: operations that read a view read the viewed memory
    constants   no kernel: ``full``, ``arange``
    fusible     pointwise operations and reductions, which share a kernel if possible
    others      products, attention, collectives: a kernel each, as without a compiler

A kernel of fused operations iterates over N elements, and reduces them to M along one set of
dimensions. It accepts pointwise operations of N or M elements and reductions of N to M, and reads
each memory once. An operation joins the kernel of an operand, or else a kernel that reads the same
memory, unless another kernel would have to run between them. A pointwise result that only fused
kernels read is not kept in memory if computing it reads few tensors, at most inductor's
``realize_reads_threshold``: later kernels compute it again.

Of several possible orders, the kernels run in the one that takes the least memory. A result is
written in place of memory of its size that no later kernel reads. The kernel may read this memory
only for this result, and for results from which it computes this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fsdp_engine.planner.simulation.memory_access import LOOKUPS

_MOST_READS = 4  # inductor's `realize_reads_threshold`

_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any"}
_REDUCTIONS |= {"all", "var", "var_mean", "std", "std_mean", "xor_sum"}
_CONSTANTS = {"full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "iota"}
_CONSTANTS |= {"scalar_tensor", "empty", "empty_like", "empty_strided", "new_full", "new_zeros"}
_CONSTANTS |= {"inductor_seed", "inductor_seeds", "inductor_lookup_seed"}
# Operations without the pointwise tag that inductor lowers to pointwise ones.
_POINTWISE = {"convert_element_type", "_to_copy", "where", "clone", "copy_", "copy", "cat", "fma"}
_POINTWISE |= {"constant_pad_nd", "slice_scatter", "select_scatter", "embedding", "gather"}
_POINTWISE |= {"index", "index_select", "inductor_random", "tril", "triu", "flip", "repeat", "roll"}
_POINTWISE |= {"native_dropout", "masked_fill", "pow", "bernoulli_p", "rand", "randn"}
_VIEWS = {"_unsafe_view", "reshape", "view", "permute", "getitem", "detach", "alias"}


@dataclass(eq=False)
class Kernel:
    """A kernel of a compiled graph.

    Attributes:
        nodes: Operations of the kernel, in the order of the graph; a single one if it is not fused.
        is_fused: Whether the kernel consists of fusible operations.
        reads: Bytes read, by the node whose memory is read.
        writes: Nodes whose results are written to memory.
        in_place: Nodes of graph inputs whose memory is overwritten.
        replaced: For each of ``writes``, the nodes in whose memory it can be written.
        num_bytes: Number of bytes read and written.
    """

    nodes: list[Node]
    is_fused: bool
    reads: dict[Node, int] = field(default_factory=dict)
    writes: list[Node] = field(default_factory=list)
    in_place: list[Node] = field(default_factory=list)
    replaced: dict[Node, list[Node]] = field(default_factory=dict)
    num_bytes: int = 0
    _size: int = 0
    _reduced: tuple[int, bool] | None = None

    def takes(self, node: Node) -> bool:
        """Returns whether the iterations of a fusible node fit those of this kernel."""
        if not self.is_fused:
            return False
        size, reduced = _iterations(node)
        if reduced is None:
            return size == self._size or (self._reduced is not None and size == self._reduced[0])
        return size == self._size and self._reduced in (None, reduced)

    def add(self, node: Node) -> None:
        """Add a node that this kernel takes."""
        size, reduced = _iterations(node)
        if not self.nodes:
            self._size = size
        self._reduced = self._reduced or reduced
        self.nodes.append(node)

    @property
    def label(self) -> str:
        """The label of the kernel in the timeline."""
        names = [name_of(node) for node in self.nodes]
        return f"fused {', '.join(dict.fromkeys(names))}" if self.is_fused else names[0]


def name_of(node: Node) -> str:
    """Returns the name of a node's operation; empty for inputs, which have names of their own."""
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "_overloadpacket", None)
    target: Any = node.target
    return str(packet.__name__ if packet is not None else getattr(target, "__name__", target))


def kernels_of(graph: Graph, reusable: Iterable[Node] = ()) -> list[Kernel]:
    """Returns the kernels of a graph in the order in which they run.

    Args:
        graph: A decomposed graph, with a fake tensor as ``meta["val"]`` of each node.
        reusable: Inputs whose memory the graph may overwrite after it has read them.
    """
    return _Fusion(graph, set(reusable)).kernels()


def is_view(node: Node) -> bool:
    """Returns whether a node is a view, or an element of a result."""
    if node.op != "call_function":
        return False
    return bool(getattr(node.target, "is_view", False)) or name_of(node) in _VIEWS


def memory_of(node: Node) -> Node:
    """Returns the node whose result a node is a view of; the node itself if it is not a view."""
    while is_view(node) and node.all_input_nodes:
        if name_of(node) == "getitem" and not is_view(node.all_input_nodes[0]):
            break  # one result of an operation with several results
        node = node.all_input_nodes[0]
    return node


def value_of(node: Node) -> Any:
    """Returns the fake result of a node."""
    return node.meta.get("val")


def num_bytes_of(node: Node) -> int:
    """Returns the bytes of the elements of a node's results."""
    value = value_of(node)
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))


def _iterations(node: Node) -> tuple[int, tuple[int, bool] | None]:
    """Returns the number of elements that a fusible node iterates over. For a reduction, also
    returns the elements of its result, and whether it reduces the last dimension."""
    value = value_of(node)
    result = value[0] if isinstance(value, tuple | list) else value
    if name_of(node) not in _REDUCTIONS or not node.all_input_nodes:
        return result.numel(), None
    operand = value_of(node.all_input_nodes[0])
    dims = node.args[1] if len(node.args) > 1 else None
    given = [dims] if isinstance(dims, int) else dims if isinstance(dims, list | tuple) else []
    last = operand.ndim - 1
    reduces_last = not given or last in given or -1 in given
    return operand.numel(), (result.numel(), reduces_last)


def _is_fusible(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = name_of(node)
    if name in _REDUCTIONS or name in _POINTWISE:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


class _Fusion:
    """Fuses the operations of a graph."""

    def __init__(self, graph: Graph, reusable: set[Node]) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._reusable = reusable
        self._kernel_of: dict[Node, Kernel] = {}
        self._kernels: list[Kernel] = []
        self._operands: dict[int, dict[int, Kernel]] = {}  # kernels before each kernel
        (output,) = (node for node in self._nodes if node.op == "output")
        self._returned = {memory_of(node) for node in output.all_input_nodes}
        self._sources_of: dict[Node, list[Node]] = {}

    def kernels(self) -> list[Kernel]:
        """Returns all kernels, in the order that takes the least memory."""
        for node in self._nodes:
            if node.op == "call_function" and not is_view(node) and not _is_constant(node):
                self._put(node)
        self._find_memory()
        used = [each for each in self._kernels if not each.is_fused or each.writes or each.in_place]
        for kernel in used:
            kernel.num_bytes = sum(kernel.reads.values()) + sum(map(num_bytes_of, kernel.writes))
            kernel.num_bytes += sum(map(num_bytes_of, kernel.in_place))
        return self._ordered(used)

    def _put(self, node: Node) -> None:
        """Add a node to a kernel, which may be a new one."""
        before = [self._kernel_of[each] for each in self._sources(node) if each in self._kernel_of]
        kernel = self._kernel_for(node, before) if _is_fusible(node) else None
        if kernel is None:
            kernel = Kernel([], _is_fusible(node))
            self._kernels.append(kernel)
            self._operands[id(kernel)] = {}
            if not kernel.is_fused:
                kernel.nodes.append(node)
        if kernel.is_fused:
            kernel.add(node)
        self._kernel_of[node] = kernel
        for each in before:
            if each is not kernel:
                self._operands[id(kernel)][id(each)] = each

    def _kernel_for(self, node: Node, before: Sequence[Kernel]) -> Kernel | None:
        memory = {each for each in self._sources(node) if _is_large(each, node)}
        readers = [
            kernel
            for kernel in reversed(self._kernels)
            if kernel.is_fused and any(memory & set(self._sources(other)) for other in kernel.nodes)
        ]
        for kernel in (*reversed(before), *readers):
            if kernel.takes(node) and not self._is_between(kernel, before):
                return kernel
        return None

    def _is_between(self, kernel: Kernel, before: Iterable[Kernel]) -> bool:
        """Returns whether one of ``before``, other than ``kernel``, must run after ``kernel``."""
        seen: set[int] = set()
        left = [each for each in before if each is not kernel]
        while left:
            each = left.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if each is kernel:
                return True
            left += self._operands[id(each)].values()
        return False

    def _sources(self, node: Node) -> list[Node]:
        """Returns the operations whose results a node reads."""
        found = self._sources_of.get(node)
        if found is None:
            every = [source_of(memory_of(each)) for each in node.all_input_nodes]
            found = self._sources_of[node] = list(dict.fromkeys(every))
        return found

    def _find_memory(self) -> None:
        """Find the memory that kernels read and write."""
        for node in self._nodes:
            kernel = self._kernel_of.get(node)
            if kernel is None:
                continue
            if not kernel.is_fused:
                kernel.writes.append(node)
                kernel.reads = {each: num_bytes_of(each) for each in self._sources(node)}
                continue
            if name_of(node) == "copy_":
                target = memory_of(node.all_input_nodes[0])
                kernel.in_place.append(target)
            elif self._is_kept(node, kernel):
                kernel.writes.append(node)
        kept = {node for kernel in self._kernels for node in kernel.writes}
        for kernel in self._kernels:
            if kernel.is_fused:
                for node in (*kernel.writes, *(n for n in kernel.nodes if name_of(n) == "copy_")):
                    self._trace(node, kernel, kept, kernel.reads, set())
                self._find_replaced(kernel, kept)

    def _find_replaced(self, kernel: Kernel, kept: set[Node]) -> None:
        """Find the memory in which results can be written in place."""
        parts = [n for n in kernel.nodes if n in kernel.writes or name_of(n) in _REDUCTIONS]
        reads: dict[Node, set[Node]] = {}
        before: dict[Node, set[Node]] = {}
        for part in parts:
            reads[part], before[part] = set(), set()
            left, seen = [part], {part}
            while left:
                node = left.pop()
                for operand in node.all_input_nodes:
                    source = source_of(memory_of(operand))
                    if source in before and source is not part:
                        before[part] |= {source} | before[source]
                        continue
                    owner = self._kernel_of.get(source)
                    is_inner = owner is not None and owner.is_fused and source not in kept
                    if (owner is kernel or is_inner) and source not in seen:
                        seen.add(source)
                        left.append(source)
                    elif memory_of(operand) in kernel.reads:
                        reads[part].add(memory_of(operand))
        for node in kernel.writes:
            others = [each for each in parts if each is not node and each not in before[node]]
            kernel.replaced[node] = [
                memory
                for memory in kernel.reads
                if memory in reads[node]
                and num_bytes_of(memory) == num_bytes_of(node)
                and not any(memory in reads[other] for other in others)
            ]

    def _is_kept(self, node: Node, kernel: Kernel) -> bool:
        """Returns whether the result of a node is written to memory."""
        if node in self._returned or any(
            memory_of(each) in self._returned for each in node.users if name_of(each) == "getitem"
        ):
            return True
        readers = [user for user in _readers(node) if user.op == "call_function"]
        others = [user for user in readers if self._kernel_of.get(user) is not kernel]
        if any(not self._kernel_of[user].is_fused for user in others if user in self._kernel_of):
            return True
        if not others:
            return False
        if name_of(node) in _REDUCTIONS:
            return True
        reads: dict[Node, int] = {}
        kept = {each for k in self._kernels for each in k.writes}
        self._trace(node, None, kept, reads, set())
        return len(reads) > _MOST_READS

    def _trace(
        self,
        node: Node,
        kernel: Kernel | None,
        kept: set[Node],
        reads: dict[Node, int],
        seen: set[Node],
    ) -> None:
        """Add the memory that ``kernel`` reads to compute a node to ``reads``. Pointwise results of
        other kernels that are not kept are computed again, from the memory that they read."""
        seen.add(node)
        for operand in node.all_input_nodes:
            if name_of(node) == "copy_" and operand is node.all_input_nodes[0]:
                continue  # only written
            memory = memory_of(operand)
            source = source_of(memory)
            owner = self._kernel_of.get(source)
            is_computed = owner is kernel and kernel is not None and kernel.is_fused
            is_again = owner is not None and owner.is_fused and source not in kept
            if is_computed or is_again:
                if source not in seen:
                    self._trace(source, kernel, kept, reads, seen)
                continue
            if _is_constant(source):
                continue
            size = num_bytes_of(operand)
            if name_of(node) in LOOKUPS and operand is node.all_input_nodes[0]:
                size = num_bytes_of(node)
            size += reads.get(memory, 0) if operand is not memory else 0
            reads[memory] = max(min(size, num_bytes_of(memory)), reads.get(memory, 0))

    def _ordered(self, kernels: list[Kernel]) -> list[Kernel]:
        first = [min(self._place[n] for n in k.nodes) for k in kernels]
        last = [max(self._place[n] for n in k.nodes) for k in kernels]
        keys: list[Callable[[int], Any]] = [first.__getitem__, last.__getitem__]
        orders = [self._sorted(kernels, key) for key in keys]
        return min(orders, key=lambda order: peak_bytes(order, self._returned, self._reusable))

    def _sorted(self, kernels: list[Kernel], key: Callable[[int], Any]) -> list[Kernel]:
        """Returns a topological order that prefers the smallest ``key``."""
        makers = {node: number for number, k in enumerate(kernels) for node in k.writes}
        needed = [
            {makers[source_of(node)] for node in kernel.reads if source_of(node) in makers}
            - {number}
            for number, kernel in enumerate(kernels)
        ]
        # Kernels that read memory run before a kernel that changes it in place.
        for number, kernel in enumerate(kernels):
            for target in kernel.in_place:
                needed[number] |= {
                    other
                    for other, k in enumerate(kernels)
                    if other != number and target in k.reads and target not in k.in_place
                }
        left, done, found = set(range(len(kernels))), set[int](), []
        while left:
            ready = [number for number in left if needed[number] <= done]
            chosen = min(ready or left, key=lambda number: (key(number), number))
            left.remove(chosen)
            done.add(chosen)
            found.append(kernels[chosen])
        return found


def source_of(memory: Node) -> Node:
    """Returns the operation that allocated the memory of a node. This is another node if ``memory``
    is one of several results of the operation."""
    return memory.all_input_nodes[0] if name_of(memory) == "getitem" else memory


def last_reads(kernels: Sequence[Kernel], returned: set[Node]) -> list[list[Node]]:
    """Returns for each kernel the memory to free after it, which no later kernel reads."""
    last: dict[Node, int] = {}
    for number, kernel in enumerate(kernels):
        for node in (*kernel.writes, *kernel.in_place):
            last[node] = number
        for node in kernel.reads:
            last[source_of(node)] = number
    found: list[list[Node]] = [[] for _ in kernels]
    kept = {source_of(node) for node in returned}
    for node, number in last.items():
        if node not in kept:
            found[number].append(node)
    return found


def reused_by(kernel: Kernel, freed: Iterable[Node], reusable: set[Node]) -> list[Node]:
    """Returns the nodes of ``freed`` whose memory the results of a fused kernel overwrite."""
    left = [node for node in freed if node.op != "placeholder" or node in reusable]
    found = []
    for replaced in kernel.replaced.values():
        chosen = next((node for node in replaced if node in left), None)
        if chosen is not None:
            left.remove(chosen)
            found.append(chosen)
    return found


def peak_bytes(kernels: Sequence[Kernel], returned: set[Node], reusable: set[Node]) -> int:
    """Returns the peak memory of kernels' results, relative to the memory before the first kernel.
    Inputs in ``reusable`` are subtracted once they are freed."""
    held = peak = 0
    for kernel, freed in zip(kernels, last_reads(kernels, returned), strict=True):
        early = set(reused_by(kernel, freed, reusable))
        held -= sum(map(num_bytes_of, early))
        held += sum(map(num_bytes_of, kernel.writes))
        peak = max(peak, held)
        held -= sum(num_bytes_of(n) for n in freed if n not in early and _may_free(n, reusable))
    return peak


def _may_free(node: Node, reusable: set[Node]) -> bool:
    return node.op != "placeholder" or node in reusable


def _is_constant(node: Node) -> bool:
    return node.op == "call_function" and name_of(node) in _CONSTANTS


def _is_large(memory: Node, node: Node) -> bool:
    """Returns whether the result ``memory`` has at least as many elements as ``node`` iterates
    over."""
    value = value_of(memory)
    return isinstance(value, Tensor) and value.numel() >= _iterations(node)[0]


def _readers(node: Node) -> list[Node]:
    """Returns the nodes that read the result of a node, directly or through views."""
    found: list[Node] = []
    left = list(node.users)
    while left:
        each = left.pop()
        if is_view(each):
            left += each.users
        else:
            found.append(each)
    return found
