"""Files of machines: every mistake is found, with its line, its unit and an example."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.planner.simulation.json_lines import lines_of
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor, TwoWayLink
from fsdp_engine.planner.simulation.machine_fields import Figure, figures_of

LINK_PARTS = ("within_node", "between_nodes")
TWO_WAY_PARTS = ("host_link", "disk")
# Every field of a file, by its path.
FIGURES: dict[tuple[str, ...], Figure] = {
    **{(name,): figure for name, figure in figures_of(Machine).items()},
    **{("processor", name): figure for name, figure in figures_of(Processor).items()},
    **{(part, name): figure for part in LINK_PARTS for name, figure in figures_of(Link).items()},
    **{
        (part, name): figure
        for part in TWO_WAY_PARTS
        for name, figure in figures_of(TwoWayLink).items()
    },
}


# (field, value) pairs among the tried values that are valid.
VALID = (
    ("name", "fast"),
    ("host_runs_ahead", True),
    ("host_memory_bandwidth", None),
    ("attention_backward_share", None),
    ("causal_block", None),
    ("fused_function_seconds", None),
)
FROM_ZERO = ("0 or", "a fraction from 0")
INFINITE = ("bandwidth", "memory_bandwidth", "host_memory_bandwidth", "into", "out")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a preset, which has every field."""
    fe.H100.save(str(tmp_path / "machine.json"))
    return tmp_path / "machine.json"


def changed(path: Path, place: tuple[str, ...], value: Any) -> int:
    """Set a field of the file, and return its line there."""
    content = json.loads(path.read_text())
    part = content
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path.write_text(json.dumps(content, indent=2))
    return lines_of(path.read_text()).by_place[place]


def mistakes(path: Path) -> list[str]:
    """The mistakes of the file, one a line of the error."""
    with pytest.raises(ValueError, match=r"machine\.json: expected a machine as written") as caught:
        Machine.load(path)
    first, *found = str(caught.value).splitlines()
    assert first.endswith(f"found {len(found)} mistake{'s' * (len(found) > 1)}:")
    return [each.strip() for each in found]


def test_files_of_earlier_versions_are_read(path: Path) -> None:
    """Earlier files lack fields with a default, and the links to host memory and disk."""
    content = json.loads(path.read_text())
    assert {place[0] for place in FIGURES} == content.keys()
    for (part, *names), figure in FIGURES.items():
        if figure.has_default:
            del (content[part] if names else content)[names[0] if names else part]
    del content["host_link"], content["disk"]
    path.write_text(json.dumps(content))
    preset, given = fe.H100, fe.H100.processor
    processor = Processor(given.matrix_flops, given.memory_bandwidth, given.memory_bytes)
    near, far = (
        Link(each.bandwidth, each.latency) for each in (preset.within_node, preset.between_nodes)
    )
    assert Machine.load(path) == Machine(preset.name, processor, near, far, preset.ranks_per_node)


@pytest.mark.parametrize("place", FIGURES, ids=".".join)
def test_a_value_that_cannot_be_is_found_with_line_unit_and_example(
    place: tuple[str, ...], path: Path
) -> None:
    """Both in files and in programs."""
    figure, name = FIGURES[place], place[-1]
    assert figure.mistake_in_file(json.loads(figure.example)) is None
    part: Any = fe.H100 if len(place) == 1 else getattr(fe.H100, place[0])
    values: list[Any] = [True, "fast", math.nan, -1, 0, math.inf, None, [], {}]
    for value in values:
        line = changed(path, place, value)
        is_zero = value == 0 and figure.expected.startswith(FROM_ZERO)
        if (name, value) in VALID or (value == math.inf and name in INFINITE) or is_zero:
            Machine.load(path)
            dataclasses.replace(part, **{name: value})
            continue
        unit = re.escape(f"{figure.unit}, such as {figure.example}")
        either = "|".join(map(re.escape, (repr(value), json.dumps(value))))
        with pytest.raises(ValueError, match=rf"{name}: expected .*{unit}\); found ({either})"):
            dataclasses.replace(part, **{name: value})
        found = mistakes(path)[0]  # a wrong `into` may also cause a mistake about `both`
        assert found.startswith(f"line {line}, {'.'.join(place)}: expected ")
        assert figure.unit in found
        assert f"such as {figure.example}" in found
        assert found.endswith(f"; found {json.dumps(value)}")


def test_figures_in_another_unit_are_found(path: Path) -> None:
    preset = path.read_text()
    for place, value in (
        (("processor", "memory_bytes"), 80),  # GB
        (("processor", "memory_bandwidth"), 3350),  # GB/s
        (("within_node", "latency"), 2),  # microseconds
        (("host_seconds",), 8),
        (("processor", "matrix_flops", "bfloat16"), 989.5),  # TFLOPS
    ):
        path.write_text(preset)
        line = changed(path, place, value)
        found = mistakes(path)[0]
        assert found.startswith(f"line {line}, {'.'.join(place)}: expected")
        assert found.endswith(f"; found {value}, which may be in another unit")


def test_unknown_missing_and_repeated_fields_are_found(path: Path) -> None:
    text = path.read_text().replace('"memory_bandwidth"', '"memory_bandwith"', 1)
    text = text.replace('"ranks_per_node": 8', '"ranks_per_node": 8, "name": "again"')
    path.write_text(text)
    line = {place[-1]: line for place, line in lines_of(text).by_place.items() if place}
    missing, unknown, again = mistakes(path)
    assert missing.startswith(f"line {line['processor']}, processor: expected memory_bandwidth: a ")
    assert missing.endswith("such as 3.35e12); found none")
    assert unknown.startswith(f"line {line['memory_bandwith']}, processor.memory_bandwith: expect")
    assert unknown.endswith("Is it memory_bandwidth?")
    assert again == f"line {line['ranks_per_node']}, name: expected once; found twice"


def test_rates_of_products_and_parts_are_checked(path: Path) -> None:
    preset = json.loads(path.read_text())
    rates = {"int4": 1e12, "bfloat16": False}
    changed(path, ("processor", "matrix_flops"), rates)
    expected = [
        r"line \d+, processor.matrix_flops.int4: expected one of .*float32",
        r"bfloat16: expected a number larger than 0 \(floating.*found false",
        r"processor.matrix_flops: expected float32 among its dtypes",
    ]
    content = {**preset, "disk": 3}
    del content["processor"]["matrix_flops"], content["within_node"]
    found = "\n".join(mistakes(path))
    path.write_text(json.dumps(content))
    found += "\n".join(mistakes(path))
    expected += [
        "line 1, the object: expected within_node",
        "line 1, processor: expected matrix_flops: an object with",
        "line 1, disk: expected an object with both, into, latency, out",
    ]
    for each in expected:
        assert re.search(each, found)
    changed(path, ("disk",), {"into": 1e9, "out": 1e9, "both": 3e9})
    assert "both: expected at most the sum of into and out, 2e+09 (bytes" in mistakes(path)[-1]


def test_a_machine_in_a_program_names_all_its_mistakes() -> None:
    wrong: Any = 3
    rates: Any = {"float32": 1e12, torch.bfloat16: math.nan}
    with pytest.raises(ValueError, match="ranks_per_node") as caught:
        Machine("x", wrong, wrong, fe.H100.between_nodes, True, -1, disk=wrong)
    assert [each.partition(":")[0] for each in str(caught.value).splitlines()] == [
        *("ranks_per_node", "host_seconds", "processor", "within_node", "disk")
    ]
    with pytest.raises(ValueError, match="matrix_flops: expected") as caught:
        Processor(rates, 0, 1e9, overlap=True)
    assert len(str(caught.value).splitlines()) == 5
    with pytest.raises(ValueError, match="both: expected at most the sum"):
        TwoWayLink(1.0, 1.0, 3.0)
