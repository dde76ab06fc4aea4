"""Rows in the user's cache folder: equal to those that are computed, and never of another job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy

import fsdp_engine as fe
from fsdp_engine.planner import job, plan_cache, plan_request, strategy_search
from fsdp_engine.planner.plan_cache import cache_folder, digest
from tests.models import Transformer, token_batch


def build() -> nn.Module:
    return Transformer(num_blocks=2, dim=32)


def batch() -> tuple[Tensor, Tensor]:
    return token_batch(4, 1)


def planned(machine: fe.Machine = fe.H100, **options: Any) -> fe.StrategyPlan:
    arguments: dict[str, Any] = {"build": build, "batch": batch, "world_size": 16, **options}
    return fe.plan(machine=machine, meshes=[(2, 8)], checkpointing=(True,), cache=True, **arguments)


@pytest.fixture(autouse=True)
def sources_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were changed while the tests ran, by pytest or an editor, are of before it."""
    monkeypatch.setattr(plan_cache, "_STARTED_NS", 2**63)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Strategies of the simulations that run."""
    tried: list[str] = []
    simulate = job.simulate

    def counted(*args: object, **options: Any) -> fe.Simulation:
        tried.append(options["strategy"])
        return simulate(*args, **options)

    monkeypatch.setattr(job, "simulate", counted)
    return tried


def test_cached_rows_are_exactly_those_computed(simulated: list[str], cache_home: Path) -> None:
    first = planned()
    count = len(simulated)
    assert count == 12  # ten pairs, and two variations of the choice
    assert cache_folder() == cache_home / "fsdp_engine" / "plans"
    assert len(list(cache_folder().glob("*.json"))) == 1
    again = planned()
    assert len(simulated) == count
    assert again.outcomes == first.outcomes
    assert again.trials == first.trials
    uncached = fe.plan(build, batch, world_size=16, meshes=[(2, 8)], checkpointing=(True,))
    assert uncached.outcomes == first.outcomes
    assert len(simulated) == 2 * count


@pytest.mark.thorough
def test_a_smaller_limit_takes_the_same_rows(simulated: list[str]) -> None:
    first = planned()
    count = len(simulated)
    limit = min(each.peak_bytes for each in first.outcomes)
    tight = planned(memory=limit)
    assert tight.outcomes == first.within(limit).outcomes
    assert len(simulated) <= count + 2  # variations of another choice


def wider() -> nn.Module:
    return Transformer(num_blocks=2, dim=64)


def with_an_attribute() -> nn.Module:
    model = build()
    model.blocks[0].scale = 3
    return model


def with_a_function() -> nn.Module:
    model = build()
    model.blocks[0].attend = lambda x: x
    return model


def with_a_compiled_block() -> nn.Module:
    model = build()
    model.blocks[0].compile()
    return model


def longer() -> tuple[Tensor, Tensor]:
    return token_batch(5, 1)


def scaled(factor: float) -> Callable[[Any], Tensor]:
    return lambda output: factor * output


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


@pytest.mark.parametrize(
    "changes",
    [
        {"build": wider},
        {"build": with_an_attribute},
        {"build": with_a_function},
        {"build": with_a_compiled_block},
        {"compile": True},
        {"batch": longer},
        {"machine": replace(fe.H100, host_seconds=9e-6)},
        {"machine": replace(fe.H100, processor=replace(fe.H100.processor, memory_bytes=81e9))},
        {"world_size": 32, "meshes": [(4, 8)]},
        {"microbatches": 2},
        {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"optimizer": sgd},
        {"loss": scaled(2.0)},
        {"units": ["blocks.*"]},
        {"min_unit_size": 0},
        {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_another_job_is_not_answered_from_the_cache(
    changes: dict[str, Any], simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_pairs(monkeypatch)
    planned()
    simulated.clear()
    meshes = changes.pop("meshes", [(2, 8)])
    arguments: dict[str, Any] = {"build": build, "batch": batch, "world_size": 16, **changes}
    fe.plan(meshes=meshes, checkpointing=(True,), cache=True, **arguments)
    assert simulated.count("optim_grads_params") >= 1


def test_a_setting_of_the_compiler_makes_another_job(
    simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_pairs(monkeypatch)
    counts = []
    for is_async in (False, False, True):
        with patch.object(inductor_config, "_micro_pipeline_tp", is_async):
            planned(compile=True)
        counts.append(len(simulated))
    assert 0 < counts[0] == counts[1] < counts[2]


def planned_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 3 alone, without variations, for the test's time."""
    every = plan_request.candidates

    def some(*args: Any) -> Any:
        return (
            each
            for each in every(*args)
            if (each.strategy, each.outer_strategy) == ("optim_grads_params", "no_shard")
        )

    monkeypatch.setattr(plan_request, "candidates", some)
    monkeypatch.setattr(job.Job, "trials", lambda *_: ())


def test_closures_of_equal_code_differ_by_their_values() -> None:
    assert digest(scaled(2.0)) == digest(scaled(2.0)) is not None
    assert digest(scaled(2.0)) != digest(scaled(3.0))


def test_an_object_that_cannot_be_pickled_is_not_cached(cache_home: Path) -> None:
    assert digest([open]) is not None
    assert digest(iter([]).__class__) is not None
    assert digest(each for each in ()) is None
    planned(loss=_Unpicklable())
    assert not cache_home.exists()


class _Unpicklable:
    def __call__(self, output: Any) -> Tensor:
        return output

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_sets_have_a_digest_without_order() -> None:
    words = [f"word {number}" for number in range(100)]
    other = set[str]()
    for word in words[::-1]:
        other.add(word)
    assert digest({"of": set(words)}) == digest({"of": other})


@pytest.mark.parametrize("name", ["__version__", "torch"])
def test_another_version_is_another_job(
    name: str, monkeypatch: pytest.MonkeyPatch, simulated: list[str]
) -> None:
    planned_pairs(monkeypatch)
    planned()
    assert len(simulated) == 1
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    else:
        monkeypatch.setattr(fe, "__version__", "9.9.9")
    planned()
    assert len(simulated) == 2


def test_a_changed_source_file_is_not_answered(
    monkeypatch: pytest.MonkeyPatch, simulated: list[str]
) -> None:
    """Of the engine, of the model, or of a library that it imports."""
    planned_pairs(monkeypatch)
    planned()
    (path,) = cache_folder().glob("*.json")
    content = json.loads(path.read_text())
    for file in (strategy_search.__file__, __file__, sys.modules["numpy"].__file__):
        changed = json.loads(path.read_text())
        changed["files"][file][1] -= 1
        path.write_text(json.dumps(changed))
        simulated.clear()
        planned()
        assert len(simulated) == 1, file
    assert json.loads(path.read_text()) == content  # written anew each time
    planned()
    assert len(simulated) == 1


def test_a_process_whose_sources_are_newer_than_it_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    planned_pairs(monkeypatch)
    monkeypatch.setattr(plan_cache, "_STARTED_NS", Path(__file__).stat().st_mtime_ns - 1)
    planned()
    assert not cache_home.exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"files": {}}', '{"files": 3, "rows": {}}'])
def test_a_damaged_file_is_written_anew(
    text: str, monkeypatch: pytest.MonkeyPatch, simulated: list[str]
) -> None:
    planned_pairs(monkeypatch)
    expected = planned().outcomes
    (path,) = cache_folder().glob("*.json")
    path.write_text(text)
    assert planned().outcomes == expected
    assert planned().outcomes == expected
    assert len(simulated) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    planned_pairs(monkeypatch)
    cache_home.write_text("a file")
    with pytest.warns(UserWarning, match="cache: rows are not kept"):
        planned()


def test_the_oldest_jobs_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_pairs(monkeypatch)
    monkeypatch.setattr(plan_cache, "_MOST_JOBS", 2)
    cache_folder().mkdir(parents=True)
    for age in (3, 2, 1):
        file = cache_folder() / f"{age}.json"
        file.write_text("{}")
        os.utime(file, ns=(0, (10 - age) * 10**9))
    planned()
    assert sorted(each.name for each in cache_folder().glob("?.json")) == ["1.json"]


SCRIPT = """
    import sys, torch
    from torch import nn
    import fsdp_engine as fe
    from fsdp_engine.planner import job, strategy_search
    from helper import width

    def build():
        return nn.Sequential(nn.Linear(8, width()), nn.Linear(width(), 8))

    number, simulate = 0, job.simulate

    def counted(*args, **options):
        global number
        number += 1
        return simulate(*args, **options)

    job.simulate = counted
    found = fe.plan(
        build, torch.zeros(2, 8), world_size=2, quick=True, cache=True, compile=len(sys.argv) > 1
    )
    print(number, *(each.peak_bytes for each in found.outcomes))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("is_compiled", [False, True])
def test_processes_share_rows_until_a_helper_changes(tmp_path: Path, is_compiled: bool) -> None:
    """A file that the model imports, with the same size as before."""
    helper = tmp_path / "helper.py"
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))

    def run(width: int) -> list[str]:
        helper.write_text(f"def width():\\n    return {width}\\n".encode().decode("unicode_escape"))
        os.utime(helper, ns=(0, width * 10**9))  # before the process starts
        os.utime(tmp_path / "script.py", ns=(0, 0))
        done = subprocess.run(
            [sys.executable, "-B", "script.py", *["compile"] * is_compiled],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(fe.__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = run(64)
    assert int(first[0]) > 0
    assert run(64) == ["0", *first[1:]]
    other = run(65)
    assert int(other[0]) > 0
    assert other[1:] != first[1:]


def test_rows_with_a_policy_of_the_user_are_not_cached(
    simulated: list[str], cache_home: Path
) -> None:
    def keeps_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    for _ in range(2):
        fe.plan(
            build,
            batch,
            world_size=2,
            meshes=[(2,)],
            checkpointing=(fe.Checkpointing(policy=keeps_all),),
            cache=True,
        )
    assert simulated[: len(simulated) // 2] == simulated[len(simulated) // 2 :]
    assert not list(cache_folder().glob("*.json"))
