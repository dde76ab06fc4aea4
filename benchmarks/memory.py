"""Bytes of parameters and gradients, at rest and at the peak of a step, on two gloo ranks.

    python benchmarks/memory.py [--layers 6] [--width 384]

*At rest*: the bytes of storages, ``engine.memory_bytes()`` and the formulas of
``fsdp_engine/strategies`` for the padded number of elements have to be equal.

*Peak*: every storage that is allocated while a model is built and runs two steps is tracked:
allocations by a dispatch mode, deletions by weak references, and changes of size by wrappers around
``resize_`` and ``_swap_data_ptr_``. Each storage has a kind:

- *engine*: allocated by code of fsdp_engine or of FSDP2 (by the innermost such frame), or the
  memory of a parameter's full gradient from autograd;
- *scratch*: receive buffers of this engine's pairwise collectives. gloo's collectives allocate
  similar memory that is not in tensors, so these are reported separately;
- others: activations, inputs, casts of inputs, optimizer state. Not counted.

The history of the second step is then replayed. *Rest* is the engine's memory after backward:
sharded parameters and sharded gradients. *Transient* is the peak of its additional memory. The
method is validated on this engine: without autograd's gradients, which no engine allocates, the
peak has to be ``engine.peak_memory_bytes()``.

The total peak is shown as well. Sharded gradients are allocated when they are reduced, in both
engines, so few of them exist when transient memory is largest.

FSDP2 prefetches one unit. In this engine ``prefetch_window`` and ``staging_limit`` set the elements
in flight: the targets refer to one unit; no prefetch and the default (one mean unit of parameters,
two of gradients in flight) are shown as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fully_shard_module
from step_time import SIZES
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_engine as fe
from fsdp_engine.comm import collectives, mesh
from fsdp_engine.memory import allocator
from fsdp_engine.runtime import hooks, inputs, reductions
from fsdp_engine.strategies import LEVELS, Role
from gpt import GPT, GPTConfig

NUM_RANKS = 2
FP32, BF16 = torch.float32, torch.bfloat16
# name: compute dtype, dtype in which gradients are reduced
PRECISIONS = {
    "fp32": (None, None),
    "bf16, bf16 reduction": (BF16, BF16),
    "bf16, fp32 reduction": (BF16, FP32),
}
TARGETS = {"bf16, bf16 reduction": 0.75, "bf16, fp32 reduction": 0.80}
LEVEL_3 = "optim_grads_params"
ONE_UNIT = "level 3, one unit ahead"

ENGINE, SCRATCH, IDLE, OTHER = "engine", "scratch", "idle", "other"
FSDP2 = Path(fully_shard_module.__file__).parent
# The owner of a storage is the innermost of these frames ("file:function"). Allocations in the
# engine's allocator belong to its caller.
ORIGINS = {
    f"{allocator.__file__}:": None,
    f"{collectives.__file__}:": SCRATCH,
    f"{hooks.__file__}:": OTHER,  # casts of inputs and outputs
    f"{inputs.__file__}:": OTHER,
    f"{reductions.__file__}:": OTHER,  # the buffer with a byte for each parameter
    f"{mesh.__file__}:": OTHER,
    f"{Path(fe.__file__).parent}{os.sep}": ENGINE,
    f"{FSDP2 / '_fsdp_common.py'}:_cast_fp_tensor": OTHER,
    f"{FSDP2}{os.sep}": ENGINE,
    f"{Path(torch.distributed.device_mesh.__file__)}:": OTHER,
}


class StorageTracker(TorchDispatchMode):
    """Records the size and the allocating code of every storage while it is enabled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind: list[str] = []
        self.is_gradient: set[int] = set()
        self.history: list[tuple[int, int]] = []  # (number of a storage, its bytes from now on)
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _plain_tensors((args, kwargs)):
            self.note(tensor.untyped_storage(), OTHER)  # allocated before tracking
        result = func(*args, **kwargs)
        origin = None
        for tensor in _plain_tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                origin = origin or _origin()
            self.note(storage, origin or OTHER)
        return result

    def note(self, storage: torch.UntypedStorage, kind: str) -> int:
        """Record the storage's size if it changed. Returns its number; a new one is of ``kind``."""
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self.kind)
            self.kind.append(kind)
            self._numbers[storage._cdata] = number
            gone = partial(self._gone, storage._cdata, number)
            self._watched.append(weakref.ref(storage, gone))
            self._sizes[number] = 0
        if self._sizes[number] != storage.nbytes():
            self._sizes[number] = storage.nbytes()
            self.history.append((number, storage.nbytes()))
        return number

    def _gone(self, address: int, number: int, reference: object) -> None:
        del reference
        if self._numbers.get(address) == number:
            del self._numbers[address]
        if self._sizes[number]:
            self._sizes[number] = 0
            self.history.append((number, 0))

    def note_gradient(self, gradient: Tensor) -> None:
        """Record a gradient that autograd allocated, or a reduced one that a hook received."""
        number = self.note(gradient.untyped_storage(), OTHER)
        if self.kind[number] != ENGINE:
            self.is_gradient.add(number)

    def note_kept(self, tensor: Tensor) -> None:
        """Record that the memory of ``tensor`` is the engine's, whatever was recorded before."""
        number = self.note(tensor.untyped_storage(), ENGINE)
        self.kind[number] = ENGINE
        self.is_gradient.discard(number)

    def watch_gradients(self, model: nn.Module) -> None:
        """Before a module's forward, register hooks on the parameters installed in it."""
        seen: set[int] = set()

        def watch(module: nn.Module, args: Any) -> None:
            for param in module._parameters.values():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    param.register_hook(self.note_gradient)
                    param.register_post_accumulate_grad_hook(kept)

        def kept(param: Tensor) -> None:
            if param.grad is not None:
                self.note_gradient(param.grad)

        for module in model.modules():
            if module._parameters:
                module.register_forward_pre_hook(watch)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Enable tracking of dispatched operations and of changes of storages' sizes."""
        storage_class: Any = torch.UntypedStorage
        names = [n for n in ("resize_", "_swap_data_ptr_") if hasattr(storage_class, n)]
        originals = {name: getattr(storage_class, name) for name in names}

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(storage: Any, *args: Any) -> Any:
                result = original(storage, *args)
                self.note(storage, _origin())
                for other in args:
                    if isinstance(other, storage_class):
                        # Independent of the allocating code: this is unused memory.
                        self.kind[self.note(other, IDLE)] = IDLE
                return result

            return wrapper

        for name, original in originals.items():
            setattr(storage_class, name, make(original))
        swap = allocator._swap  # bound when the package was imported
        allocator._swap = getattr(storage_class, "_swap_data_ptr_", swap)
        try:
            with self:
                yield
        finally:
            allocator._swap = swap
            for name in originals:
                delattr(storage_class, name)  # the wrapper hid the base class's method

    def replay(self, start: int) -> dict[str, int]:
        """Bytes at rest and at peaks from entry ``start`` of the history on."""
        final = dict(self.history)
        rest = {n for n, size in final.items() if size and self.kind[n] == ENGINE}
        held = dict.fromkeys(("rest", "transient", "gradient", SCRATCH, IDLE, OTHER), 0)
        names = ("peak", "transient", "own peak", "own transient", SCRATCH, "peak with idle")
        peak = dict.fromkeys((*names, "autograd's"), 0)
        sizes: dict[int, int] = {}
        for step, (number, size) in enumerate(self.history):
            group = self.kind[number]
            if number in self.is_gradient:
                group = "gradient"
            elif group == ENGINE:
                group = "rest" if number in rest else "transient"
            held[group] += size - sizes.get(number, 0)
            sizes[number] = size
            if step < start - 1:
                continue
            own = held["rest"] + held["transient"]
            transient = held["transient"] + held["gradient"]
            if transient > peak["transient"]:
                peak["transient"], peak["autograd's"] = transient, held["gradient"]
            for name, value in (
                ("own peak", own),
                ("own transient", held["transient"]),
                ("peak", own + held["gradient"]),
                ("peak with idle", own + held["gradient"] + held[IDLE]),
                (SCRATCH, held[SCRATCH]),
            ):
                peak[name] = max(peak[name], value)
        return {"rest": held["rest"], **peak}


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if type(leaf) in (Tensor, nn.Parameter):
            yield leaf


def _origin() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        kind = next((kind for start, kind in ORIGINS.items() if name.startswith(start)), None)
        if kind is not None:
            return kind
        frame = frame.f_back  # type: ignore[assignment]
    return OTHER


def track(
    config: GPTConfig, build: Callable[[nn.Module], Any], *, autocasts: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The result of ``build`` for a GPT, and the bytes of its last step.

    Args:
        config: Config of the GPT.
        build: Shards the model, or wraps it in DDP.
        autocasts: Whether forward runs in bf16 by autocast. Its casts of weights are not counted.
    """
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (1, config.sequence_length))
    tracker = StorageTracker()
    with tracker.on():
        engine = build(model)
    is_ddp = isinstance(engine, DistributedDataParallel)
    if is_ddp:  # DDP keeps the model's parameters
        for param in model.parameters():
            tracker.note_kept(param)
    tracker.watch_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = engine if is_ddp else model
    start = 0
    # DDP makes its buckets anew once, before the second step.
    for _ in range(3 if is_ddp else 2):
        with tracker.on():
            optimizer.zero_grad()
        start = len(tracker.history)
        if isinstance(engine, fe.Engine):
            engine.peak_memory_bytes(reset=True)
        with tracker.on():
            with torch.autocast("cpu", BF16, enabled=autocasts):
                loss = forward(tokens, tokens).loss
            loss.backward()
            del loss
        if is_ddp:  # its buckets, which C++ allocates
            for param in model.parameters():
                assert param.grad is not None
                tracker.note_kept(param.grad)
        optimizer.step()
    found = tracker.replay(start)
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    total = torch.tensor(sum(getattr(v, "_local_tensor", v).nbytes for v in states))
    dist.all_reduce(total)
    return engine, {**found, "optimizer, all ranks": int(total)}


def measure_engine(
    config: GPTConfig, level: str, precision: str, budget: int | None, accumulate_in_fp32: bool
) -> dict[str, Any]:
    """One run of this engine."""
    param_dtype, reduce_dtype = PRECISIONS[precision]
    options = fe.Options(
        prefetch_window=budget,
        staging_limit=budget,
        sum_in_fp32=accumulate_in_fp32,
        min_unit_size=0,
    )
    policy = fe.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    engine, found = track(
        config,
        # A unit for each block, as in the other engine.
        lambda model: fe.shard(
            model,
            strategy=level,
            mp_policy=policy,
            options=options,
        ),
    )
    rows = engine.describe().rows
    elements, padding = (sum(getattr(r, f) for r in rows) for f in ("num_elements", "padding"))
    found["booked at rest"] = sum(engine.memory_bytes().values())
    found["booked peak"] = engine.peak_memory_bytes()["total"]
    found["formula"] = formula(level, elements + padding, param_dtype is not None)
    copies = 1 if LEVELS[level].shards(Role.OPTIM) else NUM_RANKS
    found["optimizer formula"] = 8 * elements * copies
    return found | {"elements": elements, "padding": padding}


def formula(level_name: str, num_elements: int, is_mixed: bool) -> int:
    """Bytes of weights and gradients that a rank holds at rest, by the formulas of ``strategies``.

    Args:
        level_name: the inner level.
        num_elements: with padding.
        is_mixed: Whether compute weights are bf16 and main weights fp32. Otherwise both are fp32.
    """
    level = LEVELS[level_name]
    held = {role: num_elements * level.fraction(role, NUM_RANKS) for role in Role}
    if not is_mixed:
        weights = 4 * held[Role.PARAM]  # main weights are a view of them
    else:
        weights = 4 * held[Role.OPTIM]
        if not level.shards(Role.PARAM):
            weights += 2 * held[Role.PARAM]
    return int(weights + 4 * held[Role.GRAD])


def measure_fsdp2(config: GPTConfig, precision: str, reshard: bool) -> dict[str, Any]:
    """One run of FSDP2."""
    param_dtype, reduce_dtype = PRECISIONS[precision]
    policy = FSDP2Policy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    def build(model: Any) -> None:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mp_policy=policy)  # the root is not resharded, as in this engine

    return track(config, build)[1]


def measure_ddp(config: GPTConfig, autocasts: bool) -> dict[str, Any]:
    """One run of DDP, in bf16 by autocast. Gradients are views of its buckets."""

    def build(model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    return track(config, build, autocasts=autocasts)[1]


def measure(layers: int, width: int) -> dict[str, dict[str, Any]]:
    """All runs on this rank, by precision and name."""
    config = replace(SIZES["10M"][0], num_layers=layers, width=width)
    unit = sum(p.numel() for p in GPT(config).blocks[0].parameters())
    results: dict[str, dict[str, Any]] = {}
    for precision, (param_dtype, reduce_dtype) in PRECISIONS.items():
        runs = results[precision] = {"unit elements": unit}
        if reduce_dtype is not FP32 or param_dtype is None:
            runs["DDP"] = measure_ddp(config, param_dtype is not None)
        runs["FSDP2"] = measure_fsdp2(config, precision, True)
        runs["FSDP2 no reshard"] = measure_fsdp2(config, precision, False)
        for level in LEVELS:
            runs[level] = measure_engine(config, level, precision, None, False)
        variants = [(ONE_UNIT, unit, False), ("level 3, nothing ahead", 0, False)]
        if param_dtype is not None and reduce_dtype is FP32:
            name = f"{ONE_UNIT}, bf16 wire"
            variants.append((name, unit, True))
        for name, budget, accumulate in variants:
            runs[name] = measure_engine(config, LEVEL_3, precision, budget, accumulate)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    args = parser.parse_args()
    results = harness.run_ranks(measure, NUM_RANKS, args.layers, args.width)
    for precision, runs in results.items():
        report(precision, runs)
    harness.write_results("memory", {"layers": args.layers, "width": args.width, **results})


def report(precision: str, runs: dict[str, Any]) -> None:
    """Print the tables of one precision."""
    unit = runs["unit elements"]
    engines = {name: run for name, run in runs.items() if isinstance(run, dict)}
    ours = {name: run for name, run in engines.items() if "formula" in run}
    rows = []
    for name in LEVELS:
        run = ours[name]
        same = run["rest"] == run["booked at rest"] == run["formula"]
        same = same and run["optimizer, all ranks"] == run["optimizer formula"]
        cells = ("elements", "padding", "formula", "booked at rest", "rest", "optimizer, all ranks")
        rows.append([name, *(f"{run[cell]:,}" for cell in cells), _verdict(same)])
    columns = ["formula", "memory_bytes()", "storages", "AdamW, all ranks", "equal"]
    title = f"{precision}: bytes of weights and gradients at rest, rank 0 of {NUM_RANKS}"
    harness.print_table(title, ["level", "elements", "padding", *columns], rows)

    rows = []
    base = engines["FSDP2"]
    for name, run in engines.items():
        checked = _verdict(run["booked peak"] == run["own peak"]) if name in ours else ""
        ratios = {cell: run[cell] / base[cell] for cell in ("peak", "transient", "own transient")}
        run["over FSDP2"] = ratios
        mib = {cell: f"{run[cell] / 2**20:.2f}" for cell in ("rest", "peak", "transient")}
        parts = (f"{run[cell] / unit:.2f}" for cell in ("transient", "autograd's", SCRATCH))
        peak, transient = f"{ratios['peak']:.3f}", f"{ratios['transient']:.3f}"
        rows.append(
            [name, mib["rest"], mib["peak"], peak, mib["transient"], transient, *parts, checked]
        )
    columns = ["rest MiB", "peak MiB", "x FSDP2", "transient MiB", "x FSDP2", "B/element*"]
    columns += ["autograd's*", "scratch*", "= peak_memory_bytes()"]
    harness.print_table(f"{precision}: peak of a step", ["engine", *columns], rows)
    print("* Bytes per element of a unit. Transient memory includes autograd's gradients.\n")
    if precision in TARGETS:
        limit, found = TARGETS[precision], ours[ONE_UNIT]["over FSDP2"]["transient"]
        own = ours[ONE_UNIT]["own transient"] / base["transient"]
        print(
            f"{ONE_UNIT}: transient {found:.3f} x FSDP2's, at most {limit}: "
            f"{_verdict(found <= limit)}. Without the one full gradient at a time that autograd "
            f"allocates in any engine: {own:.3f}\n"
        )


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    main()
