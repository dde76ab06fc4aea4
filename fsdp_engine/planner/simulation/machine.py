"""The machine model of simulations, which consists of a few figures.

The presets and their sources are in ``machines.toml``. The fraction of a peak rate that programs
achieve is a separate figure, which is 1 for a machine that ``calibrate.py`` measured.

[Note: Rings over nodes]
NCCL runs a collective over several rings at once. Each ring enters and leaves a node once, through
a port of its own; there are as many rings as the group has ranks in the node. A ring collective of
n ranks in m nodes is therefore bounded by the sum of a node's ports, or by one rank's link within a
node if that is slower:

    seconds = bytes that a rank sends / min(within, ranks in a node x between)
              + (n - m) hops within a node + (m - 1) hops between nodes

NCCL's own model is the same: ``busBw = nChannels * bwInter``, ``latency = (nsteps - nInterSteps) *
intraLat + nInterSteps * interLat`` (NCCL, ``src/graph/tuning.cc``, ``ncclTopoTuneModel``); channels
are set up in ``search.cc``. Bytes that are sent from one rank to another without a ring (gloo's
shards, an all-to-all) leave the node through the port of the sending rank.

Worked example, 64 H100 in 8 nodes: eight ports of 50 GB/s achieve 0.9 of that, 360 GB/s; a link
within a node achieves 0.8 of 450, also 360 GB/s. Along an outer axis of one rank per node, each
group has one port, 45 GB/s.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_engine.kernel_interface import allocator
from fsdp_engine.planner.option_values import PRESET_NAMES
from fsdp_engine.planner.simulation import machine_fields as fields
from fsdp_engine.planner.simulation.json_lines import lines_of
from fsdp_engine.planner.simulation.machine_fields import FLOPS
from fsdp_engine.planner.simulation.simulation_error import read_json
from fsdp_engine.planner.state_places import DISK, offload_module

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

# Formats of torch's fp8 products. Gradients use e5m2.
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass(frozen=True)
class Link:
    """The link from one rank to the next of a ring.

    Attributes:
        bandwidth: Bytes per second that one rank sends while it receives at the same rate, and
            while the other ranks of its node do the same.
        latency: Seconds per hop, independent of the size.
        achievable: The fraction of ``bandwidth`` that collectives achieve.
        processor_share: The fraction of communication time that delays compute, if the same
            processor computes and communicates.

    Raises:
        ValueError: A figure is out of range.
    """

    bandwidth: float = fields.rate("bytes per second of one direction", "50e9")
    latency: float = fields.seconds("seconds of a hop", "6e-6", MISSING)
    achievable: float = fields.share("of the bandwidth", "0.9")
    processor_share: float = fields.seconds(
        "fraction of communication time that delays compute", "0.5", most=100.0
    )

    def __post_init__(self) -> None:
        fields.check_figures(self)

    @property
    def rate(self) -> float:
        """Bytes per second that collectives achieve."""
        return self.bandwidth * self.achievable

    def seconds(self, num_bytes: float, num_hops: int) -> float:
        """Returns the seconds to send ``num_bytes`` per rank in ``num_hops`` successive hops."""
        return num_bytes / self.rate + num_hops * self.latency


@dataclass(frozen=True)
class TwoWayLink:
    """The link of one rank to a place of offloaded tensors: host memory, or a disk.

    Attributes:
        into: Bytes per second towards the device (from the host; reads of a disk), while the other
            direction is idle.
        out: Bytes per second away from the device (to the host; writes of a disk), while the other
            direction is idle.
        both: Bytes per second of both directions together, while both are busy. This is the sum of
            ``into`` and ``out`` if the directions share nothing.
        latency: Seconds of a copy, independent of its size.

    Raises:
        ValueError: A figure is out of range.
    """

    into: float = fields.rate("bytes per second to the device; reads of a disk", "55e9")
    out: float = fields.rate("bytes per second from the device; writes of a disk", "55e9")
    both: float = fields.rate("bytes per second of both directions together", "92e9")
    latency: float = fields.seconds("seconds of a copy", "10e-6")

    def __post_init__(self) -> None:
        mistake = fields.both_mistake(TwoWayLink, self.into, self.out, self.both)
        fields.check_figures(self, [] if mistake is None else [f"both: {mistake}"])

    def within(self, bandwidth: float) -> TwoWayLink:
        """Returns this link to a memory that provides only ``bandwidth`` bytes per second."""
        into, out = min(self.into, bandwidth), min(self.out, bandwidth)
        return TwoWayLink(into, out, min(self.both, bandwidth, into + out), self.latency)

    def through(self, other: TwoWayLink) -> TwoWayLink:
        """Returns the link of copies that cross this link and ``other``, in overlapping pieces."""
        into, out = min(self.into, other.into), min(self.out, other.out)
        both = min(self.both, other.both, into + out)
        return TwoWayLink(into, out, both, self.latency)

    def least_seconds(self, into_bytes: float, out_bytes: float) -> float:
        """Returns the least time of copies of these bytes, reached if they overlap fully."""
        both = (into_bytes + out_bytes) / self.both
        return max(into_bytes / self.into, out_bytes / self.out, both)


# Head size from which attention kernels reach their full rate.
_LARGE_HEAD = 128


@dataclass(frozen=True)
class Attention:
    """The shape of an attention operation.

    Attributes:
        num_queries, num_keys: Lengths of the sequences.
        is_causal: Whether no query attends to later keys.
        is_backward: Whether the operation is the backward of attention.
        head_size: Number of elements of a head. None: at least 128.
        is_flex: Whether the operation is a kernel of ``flex_attention``.
    """

    num_queries: int
    num_keys: int
    is_causal: bool = False
    is_backward: bool = False
    head_size: int | None = None
    is_flex: bool = False

    def causal_share(self, block: float) -> float:
        """Returns the fraction of query-key products that causal attention computes, if it skips
        masked keys in blocks of ``block`` queries."""
        computed, start = 0.0, 0.0
        while start < self.num_queries:
            end = start + block
            rows = min(end, self.num_queries) - start
            computed += rows * min(end, self.num_keys)
            start = end
        return computed / max(self.num_queries * self.num_keys, 1)


@dataclass(frozen=True)
class Processor:
    """The processor of one rank, and its memory.

    Attributes:
        matrix_flops: Floating-point operations per second of matrix products, by dtype. The figure
            of ``torch.float8_e4m3fn`` applies to all fp8 formats.
        memory_bandwidth: Bytes per second, reads and writes together.
        memory_bytes: Size of the memory.
        call_seconds: Minimum duration of an operation.
        achievable_flops: The fraction of ``matrix_flops`` that large products achieve.
        achievable_bandwidth: The fraction of ``memory_bandwidth`` that large operations achieve.
        overlap: For an operation that computes and accesses memory, the fraction of the shorter of
            the two times that overlaps with the longer. 1 is a roofline, as for a GPU, where
            thousands of threads wait for memory while others compute. 0 is a core that computes
            only after memory access: operations take the sum of both times.
        attention_share: The rate of attention kernels on long sequences as a fraction of the rate
            of products.
        attention_backward_share: The same for attention's backward. None: ``attention_share``.
        attention_length: The number of keys with which attention reaches half of that rate; with n
            keys the fraction is n / (n + ``attention_length``).
        causal_block: Number of queries of a block in causal attention, which skips masked keys in
            blocks: a block computes all keys up to its end. None: all keys are computed.
        attention_head: The rate with heads of n elements, fewer than 128, is proportional to
            n / (n + ``attention_head``). ``attention_share`` and ``attention_backward_share`` are
            the rates with heads of 128 elements or more.
        function_seconds: Seconds per element of a function such as gelu, softmax or a norm, in
            addition to memory access. 0 if enough processors hide this time.
        irregular_seconds: Seconds per element of operations that do not stream through memory, in
            addition to memory access; see [Note: Irregular elements] in ``memory_access.py``.
        fused_share: The rate of memory access in kernels that a compiler fused, as a fraction of
            the rate of other operations.
        fused_function_seconds: ``function_seconds`` in fused kernels. None: the same.
        product_seconds: Seconds of each matrix product in addition to the time of its flops: the
            processor fills with the first tiles of the result, and drains after the last ones.
        product_element_seconds: Seconds per element of a product's result, in addition, since tiles
            are converted and stored.
        flex_share: The rate of ``flex_attention``'s compiled kernel in forward as a fraction of
            the rate of other attention kernels.
        flex_backward_share: The same for the kernel's backward.

    Raises:
        ValueError: A figure is out of range, or there is no figure for fp32.
    """

    matrix_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float = fields.rate("bytes per second, reads and writes", "3.35e12")
    memory_bytes: float = fields.size("bytes", "80e9")
    call_seconds: float = fields.seconds("seconds of the shortest operation", "3e-6")
    achievable_flops: float = fields.share("of matrix_flops", "0.7")
    achievable_bandwidth: float = fields.share("of memory_bandwidth", "0.9")
    overlap: float = fields.fraction("of the shorter of compute and memory access", "1.0")
    attention_share: float = fields.ratio("attention's rate over that of products", "0.8")
    function_seconds: float = fields.seconds("seconds of an element", "2e-10", most=1e-3)
    attention_backward_share: float | None = fields.ratio(
        "the rate of attention's backward over that of products", "0.6", None
    )
    attention_length: float = fields.number(
        "keys with which attention reaches half of its rate", "200"
    )
    causal_block: float | None = fields.block("queries of a block of causal attention", "384")
    attention_head: float = fields.number(
        "size of heads with which attention reaches half of the rate of very large ones", "70"
    )
    irregular_seconds: float = fields.seconds("seconds of an element", "1.6e-12", most=1e-3)
    fused_share: float = fields.ratio("fused kernels' rate over that of other operations", "0.9")
    fused_function_seconds: float | None = fields.seconds(
        "seconds of an element in a fused kernel", "2e-10", None, most=1e-3
    )
    product_seconds: float = fields.seconds("seconds of a product beside its flops", "6e-6")
    product_element_seconds: float = fields.seconds(
        "seconds of an element of a product's result", "3e-13", most=1e-3
    )
    flex_share: float = fields.ratio("the rate of flex_attention over that of attention", "1.25")
    flex_backward_share: float = fields.ratio(
        "the rate of flex_attention's backward over that of attention's", "1.03"
    )

    def __post_init__(self) -> None:
        fields.check_figures(self, _flops_mistakes(self.matrix_flops))

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the floating-point operations per second of products of ``dtype``. Dtypes without
        a figure use that of fp32, except fp8.

        Raises:
            ValueError: The dtype is fp8 and has no figure. A100 has no such products; torch raises
                there, too.
        """
        if dtype in _FLOAT8:
            dtype = torch.float8_e4m3fn
            if dtype not in self.matrix_flops:
                raise ValueError(
                    f"machine: expected matrix_flops of {dtype}, since the model multiplies "
                    f"matrices in fp8; found {sorted(map(str, self.matrix_flops))}. Use a machine "
                    "with fp8 (H100, H200, B200), add the figure, or do not convert the model's "
                    "linears"
                )
        return self.matrix_flops.get(dtype, self.matrix_flops[torch.float32])

    def seconds(
        self,
        flops: float,
        num_bytes: float,
        dtype: torch.dtype,
        *,
        attention: Attention | None = None,
        product_elements: int = 0,
        function_elements: int = 0,
        irregular_elements: float = 0,
    ) -> float:
        """Returns the seconds of one operation: the times of computation and of memory access, less
        their ``overlap``.

        Args:
            flops: Floating-point operations of matrix products. For causal attention: the
                operations of all keys, masked ones included.
            num_bytes: Bytes read and written.
            dtype: The dtype of the products.
            attention: The attention of the operation, if it is attention.
            product_elements: Elements of a product's result.
            function_elements: Elements of a function's result.
            irregular_elements: Elements that the operation does not access as a stream.
        """
        rate = self.achievable_flops * self.peak_flops(dtype) if flops else math.inf
        if attention is not None:
            rate *= self._attention_share(attention)
            if attention.is_causal and self.causal_block is not None:
                flops *= attention.causal_share(self.causal_block)
        computing = flops / rate + function_elements * self.function_seconds
        if product_elements:
            computing += self.product_seconds + product_elements * self.product_element_seconds
        moving = num_bytes / (self.memory_bandwidth * self.achievable_bandwidth)
        moving += irregular_elements * self.irregular_seconds
        both = computing + moving - self.overlap * min(computing, moving)
        return max(both, self.call_seconds)

    def fused_seconds(self, num_bytes: float, function_elements: int = 0) -> float:
        """Returns the seconds of a kernel that a compiler fused; see :meth:`seconds`."""
        own = self.fused_function_seconds
        fused = self if own is None else dataclasses.replace(self, function_seconds=own)
        return fused.seconds(
            0, num_bytes / self.fused_share, torch.float32, function_elements=function_elements
        )

    def _attention_share(self, attention: Attention) -> float:
        """Returns the rate of an attention kernel as a fraction of the rate of products."""
        share = self.attention_share
        if attention.is_backward and self.attention_backward_share is not None:
            share = self.attention_backward_share
        if attention.is_flex:
            share *= self.flex_backward_share if attention.is_backward else self.flex_share
        if attention.head_size is not None:
            size = min(max(attention.head_size, 1), _LARGE_HEAD)
            share *= (1.0 + self.attention_head / _LARGE_HEAD) / (1.0 + self.attention_head / size)
        return share / (1.0 + self.attention_length / max(attention.num_keys, 1))


@dataclass(frozen=True)
class Machine:
    """A machine of many ranks.

    Attributes:
        name: Name of the machine, for titles and errors.
        processor: The processor of one rank.
        within_node: The link between ranks of one node.
        between_nodes: The link between ranks of two nodes: the port of one rank, or its share of
            the node's port.
        ranks_per_node: Number of consecutive ranks that share a node.
        host_seconds: Host time per operation.
        host_runs_ahead: Whether the host issues work to a device asynchronously. False: the host
            computes itself, and its time is the compute lane's time.
        host_link: The link between one rank's device and its pinned host memory. None: unknown.
        disk: One rank's share of its node's local disks. None: unknown.
        host_memory_bandwidth: Bytes per second of a node's host memory, reads and writes together.
            The node's ranks share it for copies and for computation on offloaded state. None: host
            memory does not limit copies (for example because ``host_link`` was measured while all
            ranks copied), and computation on offloaded state cannot be simulated.

    Raises:
        ValueError: A figure is out of range.
    """

    name: str = fields.text("for titles", '"8 x H100 a node"')
    processor: Processor = fields.part(Processor)
    within_node: Link = fields.part(Link)
    between_nodes: Link = fields.part(Link)
    ranks_per_node: int = fields.ranks("ranks of a node", "8")
    host_seconds: float = fields.seconds("seconds of the host for an operation", "8e-6")
    host_runs_ahead: bool = fields.flag("whether the host issues work to a device", "true", True)
    host_link: TwoWayLink | None = fields.part(TwoWayLink, None)
    disk: TwoWayLink | None = fields.part(TwoWayLink, None)
    host_memory_bandwidth: float | None = fields.rate(
        "bytes per second of a node's host memory", "490e9", None
    )

    def __post_init__(self) -> None:
        mistakes = []
        for name, (kind, is_optional) in fields.parts_of(Machine).items():
            value = getattr(self, name)
            if not (isinstance(value, kind) or (is_optional and value is None)):
                expected = kind.__name__ + " or None" * is_optional
                mistakes.append(f"{name}: expected a {expected}; found {value!r}")
        fields.check_figures(self, mistakes)

    def link(self, num_ranks: int, stride: int) -> Link:
        """Returns the effective link of a ring collective over ``num_ranks`` ranks, where
        ``stride`` is the difference of successive ranks; see [Note: Rings over nodes]."""
        fewest, num_nodes = _in_nodes(num_ranks, stride, self.ranks_per_node)
        within, between = self.within_node, self.between_nodes
        if num_nodes == 1:
            return within
        if num_nodes == num_ranks:
            return between
        hops = (num_ranks - num_nodes) * within.latency + (num_nodes - 1) * between.latency
        # A node with only one of the group's ranks gives the ring only one port.
        ports = between.rate if fewest == 1 else min(within.rate, fewest * between.rate)
        return Link(
            ports,
            hops / (num_ranks - 1),
            processor_share=max(within.processor_share, between.processor_share),
        )

    def link_to(self, distance: int) -> Link:
        """Returns the link from the first rank of a node to the rank ``distance`` after it."""
        return self.within_node if distance < self.ranks_per_node else self.between_nodes

    def link_to_state(self, place: str, num_ranks: int) -> TwoWayLink:
        """Returns the link of one of ``num_ranks`` ranks to a place of offloaded state or
        activations ("host", "disk"). The link of a device to a disk leads through host memory.

        Raises:
            ValueError: The machine lacks the figures of the link.
        """
        if place == DISK and not self.host_runs_ahead:
            return self._known("disk", place)
        link = self._known("host_link", place)
        if self.host_memory_bandwidth is not None:
            link = link.within(self.host_rate(num_ranks))
        return link if place == allocator.HOST else self._known("disk", place).through(link)

    def staging_seconds(
        self, place: str, num_bytes: float, num_ranks: int, *, to_device: bool
    ) -> float:
        """Returns the seconds by which staging in host memory lengthens a copy between a device
        and a disk: one piece crosses the host's link while the disk is idle."""
        if place != DISK or not self.host_runs_ahead:
            return 0.0
        link = self.link_to_state(allocator.HOST, num_ranks)
        piece: float = min(num_bytes, offload_module("disk_memory").PIECE)
        return link.latency + piece / (link.into if to_device else link.out)

    def _known(self, name: str, place: str) -> TwoWayLink:
        link: TwoWayLink | None = getattr(self, name)
        if link is None:
            raise ValueError(
                f"machine: expected {name}, since state or activations are offloaded to the "
                f"{place}; found None for {self.name!r}. Use "
                f"dataclasses.replace(machine, {name}=fe.TwoWayLink(...)), or calibrate it"
            )
        return link

    def host_rate(self, num_ranks: int) -> float:
        """Returns the bytes per second that each of ``num_ranks`` ranks reads and writes in host
        memory, while all ranks do.

        Raises:
            ValueError: The figure is unknown.
        """
        if self.host_memory_bandwidth is None:
            raise ValueError(
                "machine: expected host_memory_bandwidth, since the host casts offloaded main "
                f"weights or runs the optimizer step; found None for {self.name!r}. Use "
                "dataclasses.replace(machine, host_memory_bandwidth=...)"
            )
        return self.host_memory_bandwidth / min(num_ranks, self.ranks_per_node)

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON, for ``Machine.load``."""
        content = dataclasses.asdict(self)
        flops = content["processor"]["matrix_flops"]
        names = {dtype: name for name, dtype in _DTYPES.items()}
        content["processor"]["matrix_flops"] = {names[key]: flops[key] for key in flops}
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def named(cls, name: str) -> Machine:
        """Returns a preset, such as "h100", or a machine from a file; see ``load``.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: There is no such preset or file, or the file does not describe a machine.
        """
        if not isinstance(name, str):
            raise TypeError(
                f"machine: expected a Machine, one of {', '.join(PRESETS)}, or the path of a file "
                f"of `calibrate`; found {name!r}"
            )
        if name.lower() in PRESETS:
            return PRESETS[name.lower()]
        if not Path(name).is_file():
            raise ValueError(
                f"machine: expected one of {', '.join(PRESETS)}, or the path of a file that "
                "`fsdp-engine calibrate FILE` has written on a machine with or without GPUs; found "
                f"{name!r}"
            )
        return cls.load(name)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a file that ``save`` or ``python -m fsdp_engine calibrate`` wrote.

        Raises:
            OSError: There is no such file.
            ValueError: The file does not describe a machine; the message lists all mistakes with
                their lines.
        """
        expected = "a machine as written by `calibrate`"
        content = read_json(path, expected)
        lines = lines_of(Path(path).read_text(encoding="utf-8"))
        mistakes = fields.file_mistakes(content, lines, _DTYPES, Machine)
        if mistakes:
            number = f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}"
            raise ValueError(
                "\n  ".join([f"{path}: expected {expected}; found {number}:", *mistakes])
            )
        return _made(content)


def _made(content: dict[str, Any]) -> Machine:
    """Returns the machine with the figures of a file."""
    parts: dict[str, Any] = dict(content)
    processor = dict(parts["processor"])
    flops = {_DTYPES[name]: each for name, each in processor.pop("matrix_flops").items()}
    parts["processor"] = {"matrix_flops": flops, **processor}
    for name, (kind, _) in fields.parts_of(Machine).items():
        if parts.get(name) is not None:  # files of earlier versions have no links to state
            parts[name] = kind(**parts[name])
    return Machine(**parts)


@functools.cache
def _in_nodes(num_ranks: int, stride: int, ranks_per_node: int) -> tuple[int, int]:
    """Returns the smallest number of the group's ranks in one of its nodes, and the number of
    nodes."""
    ranks_by_node = Counter(rank * stride // ranks_per_node for rank in range(num_ranks))
    return min(ranks_by_node.values()), len(ranks_by_node)


def _flops_mistakes(flops: object) -> list[str]:
    """Returns the mistakes in the rates of products."""
    if not isinstance(flops, Mapping):
        return [f"matrix_flops: expected {FLOPS.unit} by torch.dtype; found {flops!r}"]
    found = []
    for dtype, rate in flops.items():
        if not isinstance(dtype, torch.dtype):
            found.append(f"matrix_flops: expected torch.dtypes; found {dtype!r}")
        elif mistake := FLOPS.mistake(rate):
            found.append(f"matrix_flops of {dtype}: {mistake}")
    if torch.float32 not in flops:
        found.append(
            "matrix_flops: expected torch.float32 among its dtypes, the default for missing "
            f"ones; found {sorted(map(str, flops))}"
        )
    return found


def _presets() -> dict[str, Machine]:
    """Returns the machines of ``machines.toml`` by name."""
    text = Path(__file__).with_name("machines.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)

    def figures(name: str) -> dict[str, Any]:
        own = dict(content[name])
        base = figures(own.pop("base")) if "base" in own else {}
        parts = {
            key: {**base.get(key, {}), **value}
            for key, value in own.items()
            if isinstance(value, dict)
        }
        return {**base, **own, **parts}

    return {name: _made(figures(name)) for name in PRESET_NAMES}


PRESETS = _presets()
A100 = PRESETS["a100"]
H100 = PRESETS["h100"]
H200 = PRESETS["h200"]
B200 = PRESETS["b200"]
