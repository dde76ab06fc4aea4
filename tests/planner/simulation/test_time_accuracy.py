"""Texts that state the accuracy of times agree with the results files."""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from pathlib import Path

import pytest

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.time_accuracy import (
    ACCURACIES,
    TimeAccuracy,
    accuracy_of,
    family_of,
)
from tests.planner.made_plans import Words, times_of, words
from tools.time_factors import TARGET, file_text, measured

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
planned = partial(fe.plan, Words, words, world_size=1)


def test_the_factors_are_those_of_the_results_files() -> None:
    """Nine of ten compared steps are within the stated range."""
    # After a run of a benchmark: python tools/time_factors.py --write
    assert TARGET.read_text(encoding="utf-8") == file_text()
    assert {"H100", *measured()} | {"H200"} == ACCURACIES.keys()
    for family, accuracy in ACCURACIES.items():
        factors = measured()["H100" if family == "H200" else family]
        assert list(accuracy.factors) == pytest.approx(factors, abs=6e-5), family
        assert accuracy.steps.startswith(f"{len(factors)} "), family
        is_within = [abs(each / accuracy.factor - 1) <= accuracy.spread + 1e-3 for each in factors]
        assert sum(is_within) >= 0.9 * len(factors)
        assert accuracy.is_too_fast == (statistics.median(factors) >= 1.1)


def test_texts_state_the_spread_and_the_bias() -> None:
    exact = TimeAccuracy("3 jobs", "X", (0.9, 1.0, 1.05))
    slow = TimeAccuracy("3 jobs", "Y", (1.25, 1.42, 1.47))
    assert exact.mark == "+-10 %"
    assert "on X are accurate to +-10 % for 3 of 3 compared steps" in exact.sentence(0.402)
    assert slow.mark == "(x 1.42, +-12 %)"
    text = slow.sentence(0.402)
    assert "too short on Y: 3 jobs took 1.25 to 1.47 times the planned time, 1.42 in the" in text
    assert "expect 570.8 ms +-12 % instead of 402.0 ms" in text
    assert accuracy_of("B200").mark == "(accuracy unknown)"
    assert "on B200 is unknown" in accuracy_of("B200").sentence(1.0)
    assert "on this machine is unknown" in accuracy_of("").sentence(1.0)


def test_machines_have_families() -> None:
    presets = {"A100": fe.A100, "H100": fe.H100, "H200": fe.H200, "B200": fe.B200}
    assert {name: family_of(each) for name, each in presets.items()} == {n: n for n in presets}
    assert family_of(Machine.load(RESULTS / "h200_machine.json")) == "calibrated GPU"
    exact = dataclasses.replace(fe.A100.processor, achievable_flops=1.0, achievable_bandwidth=1.0)
    on_host = dataclasses.replace(
        fe.A100, processor=exact, host_runs_ahead=False, name="this machine, 2 gloo ranks"
    )
    assert family_of(on_host) == "calibrated CPU"
    text = str(planned(machine=on_host, formulas=True))
    assert "are kept free for the system, buffers of messages" in text
    assert family_of(dataclasses.replace(on_host, name="a host")) == ""
    assert family_of(dataclasses.replace(fe.A100, name="other")) == ""


def test_a_plan_says_how_accurate_it_is_and_what_is_kept_free() -> None:
    """Sizes of data sheets: A100 80GB, H100 SXM 80GB, H200 141GB, DGX B200 1,440GB for eight."""
    machines = (fe.A100, fe.H100, fe.H200, fe.B200)
    assert [each.processor.memory_bytes / 1e9 for each in machines] == [80, 80, 141, 180]
    planning = planned(machine=fe.H200)
    text = str(planning)
    accuracy = accuracy_of(family_of(fe.H200))
    assert f" ms {accuracy.mark} per step, " in text
    assert accuracy.sentence(times_of(planning.outcomes[0]).step) in text
    assert "Memory limit: 118.2 GiB, 0.9 of the machine's 131.3 GiB (141 GB); " in text
    assert "are kept free for the driver's context" in text
    given = str(planning.within(2.0**30))
    assert "Memory limit: 1.0 GiB, as given, of the machine's 131.3 GiB" in given
