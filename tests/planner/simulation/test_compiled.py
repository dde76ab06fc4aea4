"""Simulations of code that ``torch.compile`` compiles."""

from __future__ import annotations

import functools
import gc
import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.planner.simulation import compiled
from fsdp_engine.planner.simulation.fusion import Kernel, kernels_of
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.small_llama import llama
from tests.pool import on_ranks

WIDTH, WORDS, HEADS = 128, 512, 4
BATCH = (4, 128)
TOKENS = torch.zeros(BATCH, dtype=torch.long)
MARK = "between forward and backward"


class Block(nn.Module):
    """A block of a transformer with a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        heads = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Blocks, compiled as ``how`` says: "", "in place", "around" or "dynamic"."""

    def __init__(self, how: str = "", depth: int = 3, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.is_checkpointed = is_checkpointed
        for number, block in enumerate(self.blocks):
            if how in ("in place", "dynamic"):
                block.compile(dynamic=how == "dynamic" or None)
            elif how == "around":
                self.blocks[number] = torch.compile(block)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _simulate(how: str = "", world_size: int = 8, **options: Any) -> fe.Simulation:
    model = {name: options.pop(name) for name in ("depth", "is_checkpointed") if name in options}
    return fe.simulate(partial(Decoder, how, **model), world_size, batch=TOKENS, **options)


_simulate_once = functools.cache(_simulate)


# A real run.


def _tensors() -> dict[int, Tensor]:
    """The strided tensors in memory, one for each storage, by the storage's address."""
    gc.collect()
    return {
        each.untyped_storage()._cdata: each
        for each in gc.get_objects()
        if type(each) in (Tensor, nn.Parameter)
        and each.device.type == "cpu"
        and each.layout is torch.strided  # others, which earlier tests left, have no storage
    }


def _measured(checkpointing: Any, folder: Path) -> tuple[int, int]:
    """The most bytes in the third step, and those between forward and backward: all that torch's
    allocator hands out, compiled kernels' memory included."""
    torch._dynamo.reset()
    # Tensors of other tests are not counted. While they live, their addresses are not reused.
    earlier = _tensors()
    model = Decoder("in place")
    fe.shard(
        model, strategy="no_shard", options=fe.Options(min_unit_size=0), checkpointing=checkpointing
    )
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    tokens = torch.randint(0, WORDS, BATCH)
    for _ in range(3):
        held = {
            address: each.untyped_storage().nbytes()
            for address, each in _tensors().items()
            if address not in earlier
        }
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            loss = model(tokens)
            with record_function(MARK):
                pass
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    path = folder / "events.json"
    events.export_chrome_trace(str(path))
    shown = sorted(json.loads(path.read_text())["traceEvents"], key=lambda each: each.get("ts", 0))
    now = peak = sum(held.values())
    between = 0
    for each in shown:
        if each["name"] == "[memory]":
            now += each["args"]["Bytes"]
            peak = max(peak, now)
        elif each["name"] == MARK:
            between = now
    return peak, between


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@on_ranks(1)
def test_memory_of_compiled_blocks_is_that_of_a_run_with_inductor(
    checkpointing: Any, tmp_path: Path
) -> None:
    peak, between = _measured(checkpointing, tmp_path)
    torch.distributed.destroy_process_group()
    machine = replace(HOST, ranks_per_node=1)
    options = {"strategy": "no_shard", "min_unit_size": 0, "checkpointing": checkpointing}
    found = _simulate("in place", world_size=1, machine=machine, **options)
    sums = [sum(sizes) for _, sizes in found.memory_series]
    assert peak * 0.9995 < found.peak_bytes < peak * 1.03
    assert min(abs(each / between - 1) for each in sums) < 0.0005


# Compared with eager simulations.


@pytest.mark.parametrize("how", ["in place", "around"])
def test_compiled_blocks_take_less_time_and_memory(how: str) -> None:
    eager = _simulate_once()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using `torch.compile")
        found = _simulate_once(how)
    assert found.compute_seconds < 0.95 * eager.compute_seconds
    assert found.seconds < 0.95 * eager.seconds  # eager kernels are bound by the host
    assert found.peak_bytes < 0.98 * eager.peak_bytes
    assert found.model_flops == eager.model_flops
    labels = {span.label for span in found.spans if span.module.startswith("blocks.1")}
    assert {"fused pow, mean, add, rsqrt, mul", "mm"} <= labels
    assert "silu" not in labels


def test_fused_kernels_have_a_rate_of_their_own() -> None:
    def simulated(how: str, share: float) -> tuple[float, float]:
        """Seconds of fused kernels, and of the step."""
        machine = replace(HOST, processor=replace(HOST.processor, fused_share=share))
        found = _simulate(how, machine=machine)
        fused = [each for each in found.spans if each.label.startswith("fused")]
        return sum(each.end - each.start for each in fused), found.seconds

    assert simulated("in place", 0.5)[0] == pytest.approx(2 * simulated("in place", 1.0)[0])
    assert simulated("", 0.5) == simulated("", 1.0)


@pytest.mark.parametrize("how", ["in place", "around"])
@pytest.mark.parametrize(
    "options", [{"is_checkpointed": True}, {"checkpointing": True}], ids=["outside", "by shard"]
)
def test_checkpoints_of_compiled_blocks_recompute_them(how: str, options: dict[str, Any]) -> None:
    kept, eager = _simulate_once(how), _simulate_once("", **options)
    found = _simulate(how, **options)
    assert found.peak_bytes < kept.peak_bytes
    assert found.compute_seconds > kept.compute_seconds
    assert found.compute_seconds < eager.compute_seconds
    assert found.model_flops == kept.model_flops


def test_blocks_are_traced_once_for_all_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    make = compiled._make_graph

    def counted(*args: Any, **options: Any) -> Any:
        made.append(bool(options.get("is_backward")))
        return make(*args, **options)

    monkeypatch.setattr(compiled, "_make_graph", counted)
    with compiled.simulated_compiler():
        first = _simulate("in place")
        num_graphs = len(made)
        assert 2 <= num_graphs <= 4
        assert _simulate("in place") == first
        _simulate("in place", depth=6)
        _simulate("in place", microbatches=2)
    assert len(made) == num_graphs


def test_training_after_a_simulation_compiles_anew() -> None:
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    _simulate("in place", depth=1)
    assert not entries(Block.forward.__code__)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    block = Block()
    block.compile(backend=backend)
    assert block(torch.ones(2, 8, WIDTH)).isfinite().all()
    assert len(graphs) == 1


def test_dynamic_shapes_are_refused() -> None:
    with pytest.raises(
        fe.SimulationError, match=r"expected static shapes.*dynamic=None or dynamic=False"
    ):
        _simulate("dynamic", depth=1)


# Kernels.


def _kernels(function: Any, *shapes: tuple[int, ...]) -> list[Kernel]:
    inputs = [torch.empty(shape) for shape in shapes]
    return kernels_of(make_fx(function, tracing_mode="fake")(*inputs).graph)


X, SIZE = (64, 32), 64 * 32


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        # A fused chain reads each input once; a row that is broadcast is counted with its own
        # bytes.
        (lambda x, y: (x * 2).relu() + y.exp() * x, [X, X], [("exp", 3 * SIZE)]),
        (lambda x, row: x * row + 1, [X, (32,)], [("add", 2 * SIZE + 32)]),
        (
            lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w,
            [X, (32, 16)],
            [("rsqrt", 2 * SIZE), ("mm", SIZE + 32 * 16 + 64 * 16)],
        ),
        # Sums of rows and of columns are two kernels.
        (
            lambda x, y: ((x * y).sum(1), (x * y).sum(0)),
            [X, X],
            [("sum", 2 * SIZE + 64), ("sum", 2 * SIZE + 32)],
        ),
        # A kernel runs after the kernels whose results it reads.
        (
            lambda x, w: ((first := x + 1) @ w) * first,
            [(32, 32), (32, 32)],
            [("add", 2 * 32 * 32), ("mm", 3 * 32 * 32), ("mul", 3 * 32 * 32)],
        ),
    ],
)
def test_kernels_of_functions(
    function: Any, shapes: list[tuple[int, ...]], expected: list[tuple[str, int]]
) -> None:
    found = _kernels(function, *shapes)
    assert [each.num_bytes for each in found] == [4 * size for _, size in expected]
    for kernel, (name, _) in zip(found, expected, strict=True):
        assert kernel.is_fused == (name != "mm")
        assert name in kernel.label.replace(",", "").split()


def test_checkpoints_of_compiled_blocks_of_tensor_parallel_ranks() -> None:
    """Attention is an operation with a random state. Recomputing it in a backward that also needs
    a mesh of DTensors is an error of torch 2.13 on CPUs, not on devices."""
    tokens = torch.zeros(2, 32, dtype=torch.long)
    batch, again = {"input_ids": tokens, "labels": tokens}, [fe.Recompute()]
    eager, found = (
        fe.simulate(llama, 4, batch=batch, tensor_parallel=2, extensions=again, compile=each)
        for each in (False, True)
    )
    assert found.compute_seconds < eager.compute_seconds
    assert found.model_flops == eager.model_flops
    assert 0 < found.sent_bytes["tensor"] <= eager.sent_bytes["tensor"]


def test_a_compiled_function_is_simulated() -> None:
    @torch.compile
    def gated(x: Tensor) -> Tensor:
        return F.gelu(x) * torch.sigmoid(x)

    class Gated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gated(super().forward(x)).sum()

    x = torch.zeros(64, 32)
    found = fe.simulate(lambda: Gated(32, 32), 2, batch=x)
    forward = [span.label for span in found.spans if span.phase == "forward"]
    assert [label for label in forward if label.startswith("fused")] == [
        next(label for label in forward if "erf" in label)
    ]


def test_a_result_replaces_memory_that_it_alone_is_computed_from() -> None:
    square = (32, 32)
    for function, count in (
        (lambda x, w: (x @ w).relu(), 1),
        (lambda x, w: ((product := x @ w) + 1, product * 2), 0),
    ):
        kernel = _kernels(function, square, square)[-1]
        assert sum(map(len, kernel.replaced.values())) == count
