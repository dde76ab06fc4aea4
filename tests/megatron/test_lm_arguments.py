"""Megatron-LM's arguments choose wrapper and level, by the calls of its loop: the example of
``docs/megatron.md``, and Megatron-Core's configs as they are."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_lm_arguments import (
    OURS,
    ROWS,
    Trained,
    Wrappers,
    get_model,
    megatron_core,
    parse_args,
    train,
)
from tests.pool import Ranks, on_ranks

ROOT = Path(__file__).parents[2]
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
SHORT = "--train-iters 3 --seq-length 8 --hidden-size 16"
SGD = "--optimizer sgd --lr 0.1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
FOUR_RANKS = [
    (f"{FSDP} optim_grads_params --tensor-model-parallel-size 2", SGD),
    (f"{FSDP} optim_grads --pipeline-model-parallel-size 2 {OVERLAP}", SGD),
    ("--use-torch-fsdp2 --tensor-model-parallel-size 2", "--calculate-per-token-loss"),
]


def key_of(arguments: str) -> str:
    """The arguments of a reference: those that say nothing of data parallelism."""
    words = [word for word in arguments.split() if "fsdp" not in word and "overlap" not in word]
    for name in ("--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy"):
        while name in words:
            del words[words.index(name) : words.index(name) + 2]
    return " ".join(word for word in words if word != "--use-distributed-optimizer")


@functools.cache
def reference(arguments: str, world_size: int) -> Trained:
    """Megatron-Core's own DistributedDataParallel; computed once in a rank's process."""
    args = parse_args(arguments.split())
    with megatron_core(args):
        from megatron.core import distributed, optimizer

        core: Any = distributed
        theirs = Wrappers(
            core.DistributedDataParallel,
            core.FullyShardedDataParallel,
            core.TorchFullyShardedDataParallel,
            core.finalize_model_grads,
            optimizer.get_megatron_optimizer,
        )
        return train(args, theirs)._replace(chunks=[], optimizer=None)


def differences(rows: list[tuple[str, str]], limit: float) -> list[str]:
    """On one rank: where a run by these arguments differs from its reference, or its level."""
    found = []
    for arguments, level in rows:
        args = parse_args(arguments.split())
        with megatron_core(args):
            mine = train(args)
        theirs = reference(key_of(arguments), dist.get_world_size())
        for what in ("losses", "norms"):
            pairs = zip(getattr(mine, what), getattr(theirs, what), strict=True)
            found += [
                f"{arguments}: {what} of step {step}: {x} for {y}"
                for step, (x, y) in enumerate(pairs)
                if not abs(x - y) <= limit * abs(y)
            ]
        (chunk,) = mine.chunks
        if level and chunk.engine.strategy.inner.name != level:
            found.append(f"{arguments}: level {chunk.engine.strategy.inner.name} for {level}")
    return found


def assert_same(
    ranks: Ranks, rows: list[tuple[str, str]], world_size: int, limit: float = 2e-6
) -> None:
    results = ranks.run(differences, rows, limit, world_size=world_size)
    assert not any(results), "\n".join(itertools.chain(*results))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_each_row_of_the_table_has_its_level_and_trains_like_its_own_wrapper(
    ranks: Ranks, world_size: int
) -> None:
    rows = [(f"{arguments} {SHORT} {SGD}", level) for arguments, level in ROWS]
    assert_same(ranks, rows, world_size)


@pytest.mark.parametrize(
    "more",
    [f"{OVERLAP} --ddp-num-buckets 3", pytest.param("--bf16", marks=pytest.mark.thorough)],
)
def test_rows_with_other_arguments(ranks: Ranks, more: str) -> None:
    rows = [(f"{each} {more} {SHORT}", level) for each, level in ROWS]
    # Adam divides by rounding where a gradient is next to nothing. FSDP2 reduces in bf16.
    assert_same(ranks, rows, 2, limit=2e-2 if more == "--bf16" else 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("arguments", "more"), FOUR_RANKS)
def test_model_parallel_rows(ranks: Ranks, arguments: str, more: str) -> None:
    assert_same(ranks, [(f"{arguments} {SHORT} {more}", "")], 4, limit=1e-4)


@on_ranks(4)
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_instances_of_the_optimizer_are_rows_of_ranks(outer: str) -> None:
    given = f"{FSDP} optim_grads_params --outer-dp-sharding-strategy {outer} {SHORT}"
    args = parse_args(f"{given} --num-distributed-optimizer-instances 2".split())
    with megatron_core(args):
        from megatron.core import parallel_state

        (chunk,) = get_model(args, OURS)
        mesh, levels = chunk.engine.mesh, chunk.engine.strategy
        assert (mesh.outer.size, mesh.inner.size) == (2, 2)
        assert (levels.inner.name, levels.outer.name) == ("optim_grads_params", outer)
        theirs = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        assert mesh.inner.gather_group is not None
        mine = dist.get_process_group_ranks(mesh.inner.gather_group)
        assert mine == dist.get_process_group_ranks(theirs)


@on_ranks(2)
@pytest.mark.parametrize("wrapping", ["", f"{FSDP} optim", "--use-torch-fsdp2"])
def test_align_param_gather_without_overlap_is_refused(wrapping: str) -> None:
    args = parse_args(f"{wrapping} --align-param-gather {SHORT}".split())
    with megatron_core(args):
        if args.use_torch_fsdp2:  # whose config Megatron-LM makes of one argument alone
            assert not get_model(args, OURS)[0].ddp_config.align_param_gather
            return
        with pytest.raises(ValueError, match="align_param_gather: expected overlap_param_gather"):
            get_model(args, OURS)


@pytest.mark.thorough
def test_the_example_is_a_program() -> None:
    """As docs/megatron.md calls it, on one rank and with one row."""
    command = [sys.executable, "examples/megatron_lm_arguments.py", *SHORT.split()]
    run = subprocess.run(
        [*command, "--use-torch-fsdp2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"TorchFullyShardedDataParallel +optim_grads_params", run.stdout), run.stdout


def test_the_page_shows_the_output_for_each_row() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^(\(none\)|--.*?) +\w+DataParallel +(\w+) [\d. ]+$", page, re.M))
    assert shown == {arguments or "(none)": level for arguments, level in ROWS}
