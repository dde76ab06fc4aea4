"""Megatron-LM's arguments select wrapper and level as in its own training loop, in the example of
``docs/internals/megatron.md`` with Megatron-Core's unchanged configs."""

from __future__ import annotations

import functools
import re
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
from tests.processes import ROOT, printed

FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
SHORT = "--train-iters 2 --seq-length 8 --hidden-size 16 --num-layers 1"
SGD = "--optimizer sgd --lr 0.1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


def key_of(arguments: str) -> str:
    """The arguments without those of data parallelism."""
    words = [word for word in arguments.split() if "fsdp" not in word and "overlap" not in word]
    for name in ("--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy"):
        while name in words:
            del words[words.index(name) : words.index(name) + 2]
    return " ".join(word for word in words if word != "--use-distributed-optimizer")


@functools.cache
def reference(arguments: str, world_size: int) -> Trained:
    """A run with Megatron-Core's own DistributedDataParallel, cached in each process."""
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


def compare(rows: list[tuple[str, str]], limit: float) -> None:
    """Runs with these arguments have the results of their references, and these levels."""
    for arguments, level in rows:
        args = parse_args(arguments.split())
        with megatron_core(args):
            mine = train(args)
        theirs = reference(key_of(arguments), dist.get_world_size())
        assert mine.losses == pytest.approx(theirs.losses, rel=limit, abs=0), arguments
        assert mine.norms == pytest.approx(theirs.norms, rel=limit, abs=0), arguments
        (chunk,) = mine.chunks
        assert not level or chunk.engine.strategy.inner.name == level, arguments


thorough = pytest.mark.thorough
MORE = f"{OVERLAP} --ddp-num-buckets 3 --num-layers 2"


@pytest.mark.parametrize(
    ("rows", "more", "world_size", "limit"),
    [
        pytest.param(ROWS, SGD, 1, 2e-6, marks=thorough, id="one rank"),
        pytest.param(ROWS, SGD, 2, 2e-6, id="each row of the table"),
        # Where gradients are almost 0, Adam divides by rounding errors. FSDP2 reduces in bf16.
        pytest.param(ROWS, MORE, 2, 1e-4, marks=thorough, id="overlap"),
        pytest.param(ROWS, "--bf16", 2, 2e-2, marks=thorough, id="bf16"),
        *(
            pytest.param([(arguments, "")], more, 4, 1e-4, marks=thorough, id=arguments.split()[-2])
            for arguments, more in (
                (f"{FSDP} optim_grads_params --tensor-model-parallel-size 2", SGD),
                (
                    f"{FSDP} optim_grads {OVERLAP} --pipeline-model-parallel-size 2",
                    f"--num-layers 2 {SGD}",
                ),
                ("--use-torch-fsdp2 --tensor-model-parallel-size 2", "--calculate-per-token-loss"),
            )
        ),
    ],
)
def test_rows_have_their_level_and_train_like_its_own_wrapper(
    ranks: Ranks, rows: list[tuple[str, str]], more: str, world_size: int, limit: float
) -> None:
    rows = [(f"{arguments} {SHORT} {more}", level) for arguments, level in rows]
    ranks.run(compare, rows, limit, world_size=world_size)


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


@pytest.mark.thorough
def test_the_example_is_a_program() -> None:
    text = printed(
        str(ROOT / "examples/megatron_lm_arguments.py"), *SHORT.split(), "--use-torch-fsdp2"
    )
    assert re.search(r"TorchFullyShardedDataParallel +optim_grads_params", text), text


def test_the_page_shows_the_output_for_each_row() -> None:
    page = (ROOT / "docs" / "internals" / "megatron.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^(\(none\)|--.*?) +\w+DataParallel +(\w+) [\d. ]+$", page, re.M))
    assert shown == {arguments or "(none)": level for arguments, level in ROWS}
