"""Makes the table of reductions in docs/internals/levels.md from traced steps of each strategy:
``python -m tests.buffers.reduction_table --write``.

Four ranks, two on each axis, run two microbatches of a model whose gradients are 1 on every rank.
Each collective of gradients is recorded with the tensors that it reads and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.comm.collectives import Communicator
from fsdp_engine.strategies import ALL_STRATEGIES, Strategy

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "levels.md"
BEGIN, END = "<!-- reductions -->\n", "<!-- end of reductions -->"
BF16 = torch.bfloat16
POLICIES = {
    "fp32": fe.MixedPrecisionPolicy(),
    "bf16 sums": fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "bf16 sent, fp32 sums": fe.MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16),
}
DTYPES = {torch.float32: "fp32", BF16: "bf16"}
NUMEL = 32 * 32
WORLD = 4


class Model(nn.Module):
    """One weight without padding, whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))

    def forward(self) -> Tensor:
        return self.weight.sum()


@dataclass(frozen=True)
class Buffer:
    """A tensor of a collective: its memory, dtype, elements and value."""

    pointer: int
    dtype: str
    numel: int
    value: float


@dataclass(frozen=True)
class Collective:
    """One call."""

    axis: str
    name: str
    source: Buffer
    out: Buffer


def _seen(tensor: Tensor) -> Buffer:
    flat = tensor.reshape(-1)
    pointer = tensor.untyped_storage().data_ptr()
    return Buffer(pointer, DTYPES[tensor.dtype], flat.numel(), float(flat[-1]))


@contextmanager
def recorded(calls: list[Collective]) -> Iterator[None]:
    """Within the block, engines append their collectives of gradients to ``calls``."""
    originals = {name: getattr(Communicator, name) for name in ("reduce_scatter", "all_reduce")}
    gather = Communicator.all_gather
    reducing: list[Any] = []

    def note(comm: Any, name: str, source: Tensor, out: Tensor, steps: Any) -> Any:
        ranks = dist.get_process_group_ranks(comm.group)
        axis = "inner" if ranks[1] - ranks[0] == 1 else "outer"
        before = _seen(source)
        yield from steps
        calls.append(Collective(axis, name, before, _seen(out)))

    def reduce_scatter(comm: Any, full: Tensor, out: Tensor, **options: Any) -> Any:
        reducing.append(comm)
        steps = originals["reduce_scatter"](comm, full, out, **options)
        return note(comm, "reduce-scatter", full, out, steps)

    def all_reduce(comm: Any, tensor: Tensor, **options: Any) -> Any:
        reducing.append(comm)
        return note(
            comm, "all-reduce", tensor, tensor, originals["all_reduce"](comm, tensor, **options)
        )

    def all_gather(comm: Any, full: Tensor, source: Tensor | None = None, tag: int = 0) -> Any:
        steps = gather(comm, full, source, tag)
        if not any(comm is each for each in reducing):
            return steps
        return note(comm, "all-gather", comm.part(full), full, steps)

    wrappers = {"reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    for name, wrapper in (*wrappers.items(), ("all_gather", all_gather)):
        setattr(Communicator, name, wrapper)
    try:
        yield
    finally:
        for name, original in (*originals.items(), ("all_gather", gather)):
            setattr(Communicator, name, original)


@dataclass(frozen=True)
class Step:
    """The reduction along one axis: whether each microbatch or the last one runs it, the scale
    before and after it, and its collectives."""

    axis: str
    when: str
    scale: str
    collectives: str


def reductions(strategy: Strategy, policy: fe.MixedPrecisionPolicy) -> list[Step]:
    """The reductions of the last microbatch, by axis."""
    calls: list[Collective] = []
    with recorded(calls):
        model = Model()
        names = strategy.inner.name, strategy.outer.name
        engine = fe.shard(model, (2, 2), *names, mp_policy=policy)
        with engine.no_sync():
            model().backward()
        num_first = len(calls)
        model.zero_grad()
        model().backward()
    (param,) = model.parameters()
    assert param.grad is not None
    grad = param.grad.local if isinstance(param.grad, fe.FlatDTensor) else param.grad
    assert bool((grad == 1.0).all())
    kept = grad.untyped_storage().data_ptr()
    first, last = calls[:num_first], calls[num_first:]
    steps = []
    for axis in ("inner", "outer"):
        each = any(call.axis == axis for call in first)

        def shown(buffer: Buffer, transient: str = "staging" if each else "copy") -> str:
            place = "accumulation" if buffer.pointer == kept else transient
            return f"{place} {buffer.dtype} {Fraction(buffer.numel, NUMEL)}"

        found = [call for call in last if call.axis == axis]
        before, after = (Fraction(b.value) for b in (found[0].source, found[-1].out))
        when = "each microbatch" if each else "last microbatch"
        lines = [f"{call.name}: {shown(call.source)} -> {shown(call.out)}" for call in found]
        steps.append(Step(axis, when, f"{before} -> {after}", "; ".join(lines)))
    return steps


def all_reductions() -> dict[str, list[list[Step]]]:
    """The steps of each policy, by strategy; on :data:`WORLD` ranks."""
    return {
        f"`{each.inner.name}`, `{each.outer.name}`": [
            reductions(each, policy) for policy in POLICIES.values()
        ]
        for each in ALL_STRATEGIES
    }


def table(found: dict[str, list[list[Step]]]) -> str:
    """The table in Markdown; strategies with the same reductions share their rows."""
    columns = ("inner, outer level", "axis", "when", "scale", *POLICIES)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    same: dict[str, list[str]] = {}
    for strategy, policies in found.items():
        rows = []
        for steps in zip(*policies, strict=True):
            (head,) = {(step.axis, step.when, step.scale) for step in steps}
            rows.append(" | ".join((*head, *(step.collectives for step in steps))))
        same.setdefault("\n".join(rows), []).append(strategy)
    for rows_text, strategies in same.items():
        for number, row in enumerate(rows_text.split("\n")):
            lines.append(f"| {'; '.join(strategies) if number == 0 else ''} | {row} |")
    return "\n".join(lines) + "\n"


def page_table() -> str:
    """The table of the page."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    from tests.buffers import reduction_table  # ranks import it by this name
    from tests.pool import Ranks

    pool = Ranks()
    new = table(pool.run(reduction_table.all_reductions, world_size=WORLD)[0])
    pool.close()
    print(new)
    if "--write" in sys.argv:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{new}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
