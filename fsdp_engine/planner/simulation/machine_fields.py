"""Checks of a machine's figures: unit, range and an example of each.

Classes of machines check the range when they are created. A file of a machine is also checked for
unknown and missing fields, and for figures that are far from those of any machine, which are in
another unit (GB/s for bytes per second). All mistakes are found at once, those of a file with their
lines (``json_lines.py``).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_engine.planner.simulation.json_lines import Lines, Place


@dataclass(frozen=True)
class Figure:
    """A field of a machine.

    Attributes:
        expected: its range as text.
        is_valid: whether a value of any type is in the range.
        unit: its unit, or its meaning.
        example: a valid value, as JSON has it.
        least, most: the range of figures of real machines, for files.
        has_default: the field may be missing.
    """

    expected: str
    is_valid: Callable[[Any], bool]
    unit: str
    example: str
    least: float = -math.inf
    most: float = math.inf
    has_default: bool = False

    @property
    def text(self) -> str:
        """The expected value as text: range, unit and example."""
        return f"{self.expected} ({self.unit}, such as {self.example})"

    def mistake(self, value: object) -> str | None:
        """Why ``value`` is not valid; None if it is."""
        return None if self.is_valid(value) else f"expected {self.text}; found {value!r}"

    def mistake_in_file(self, value: Any) -> str | None:
        """The same for a value from a file, whose unit is checked by its size."""
        found = as_json(value)
        if not self.is_valid(value):
            return f"expected {self.text}; found {found}"
        # An infinite rate, of a machine that a program made, is no unit's.
        if _is_number(value) and value != math.inf and not self.least <= value <= self.most:
            limits = f"from {self.least:g} to {self.most:g}"
            return f"expected {self.text}, {limits}; found {found}, which may be in another unit"
        return None


def as_json(value: object) -> str:
    """A value of a file as its text, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


_RATE, _WHOLE = "a number larger than 0", "1 rank or more, a whole number"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_not_negative(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _rate(unit: str, example: str, *, has_default: bool = False) -> Figure:
    return Figure(_RATE, _is_rate, unit, example, 1e6, 1e16, has_default)


def _seconds(unit: str, example: str, *, has_default: bool = True, most: float = 1.0) -> Figure:
    return Figure("0 or a larger number", _is_not_negative, unit, example, 0, most, has_default)


def _share(unit: str, example: str) -> Figure:
    expected = "a fraction, at most 1, larger than 0"
    return Figure(expected, _is_share, unit, example, 0, 1, has_default=True)


def _is_finite_rate(value: Any) -> bool:
    return _is_rate(value) and value < math.inf


def _ratio(unit: str, example: str) -> Figure:
    return Figure(_RATE, _is_finite_rate, unit, example, 1e-3, 1e3, has_default=True)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_not_negative_or_none(value: Any) -> bool:
    return value is None or _is_not_negative(value)


def _is_block_or_none(value: Any) -> bool:
    return value is None or (_is_finite_rate(value) and value >= 1)


def _is_finite_rate_or_none(value: Any) -> bool:
    return value is None or _is_finite_rate(value)


def _is_rate_or_none(value: Any) -> bool:
    return value is None or _is_rate(value)


# Of a product's flops, by dtype.
FLOPS = Figure(_RATE, _is_rate, "floating-point operations per second", "989.5e12", 1e6, 1e19)

LINK_FIELDS = {
    "bandwidth": _rate("bytes per second of one direction", "50e9"),
    "latency": _seconds("seconds of a hop", "6e-6", has_default=False),
    "achievable": _share("of the bandwidth", "0.9"),
    "processor_share": _seconds(
        "of the time of communication, which delays compute", "0.5", most=100.0
    ),
}

TWO_WAY_FIELDS = {
    "into": _rate("bytes per second to the device; reads of a disk", "55e9"),
    "out": _rate("bytes per second from the device; writes of a disk", "55e9"),
    "both": _rate("bytes per second of both directions together", "92e9"),
    "latency": _seconds("seconds of a copy", "10e-6"),
}

PROCESSOR_FIELDS = {
    "memory_bandwidth": _rate("bytes per second, reads and writes", "3.35e12"),
    "memory_bytes": Figure(_RATE, _is_finite_rate, "bytes", "80e9", 1e6, 1e15),
    "call_seconds": _seconds("seconds of the shortest operation", "3e-6"),
    "achievable_flops": _share("of matrix_flops", "0.7"),
    "achievable_bandwidth": _share("of memory_bandwidth", "0.9"),
    "overlap": Figure(
        "a fraction from 0 to 1",
        _is_fraction,
        "of the shorter of compute and memory access",
        "1.0",
        has_default=True,
    ),
    "attention_share": _ratio("attention's rate over that of products", "0.8"),
    "function_seconds": _seconds("seconds of an element", "2e-10", most=1e-3),
    "product_seconds": _seconds("seconds of a product beside its flops", "6e-6"),
    "product_element_seconds": _seconds(
        "seconds of an element of a product's result", "3e-13", most=1e-3
    ),
    "attention_backward_share": Figure(
        f"{_RATE}, or none",
        _is_finite_rate_or_none,
        "the rate of attention's backward over that of products",
        "0.6",
        least=1e-3,
        most=1e3,
        has_default=True,
    ),
    "attention_length": Figure(
        "0 or a larger number",
        _is_not_negative,
        "keys with which attention reaches half of its rate",
        "200",
        least=0,
        most=1e6,
        has_default=True,
    ),
    "attention_head": Figure(
        "0 or a larger number",
        _is_not_negative,
        "size of heads with which attention reaches half of the rate of very large ones",
        "70",
        least=0,
        most=1e6,
        has_default=True,
    ),
    "irregular_seconds": _seconds("seconds of an element", "1.6e-12", most=1e-3),
    "fused_share": _ratio("fused kernels' rate over that of other operations", "0.9"),
    "fused_function_seconds": Figure(
        "0 or a larger number, or none",
        _is_not_negative_or_none,
        "seconds of an element in a fused kernel",
        "2e-10",
        least=0,
        most=1e-3,
        has_default=True,
    ),
    "flex_share": _ratio("the rate of flex_attention over that of attention", "1.25"),
    "flex_backward_share": _ratio(
        "the rate of flex_attention's backward over that of attention's", "1.03"
    ),
    "causal_block": Figure(
        "1 or a larger number, or none",
        _is_block_or_none,
        "queries of a block of causal attention",
        "384",
        least=1,
        most=1e6,
        has_default=True,
    ),
}

MACHINE_FIELDS = {
    "name": Figure("a string", _is_text, "for titles", '"8 x H100 a node"'),
    "ranks_per_node": Figure(_WHOLE, _is_count, "ranks of a node", "8", 1, 1e6),
    "host_seconds": _seconds("seconds of the host for an operation", "8e-6"),
    "host_runs_ahead": Figure(
        "a bool", _is_bool, "whether the host issues work to a device", "true", has_default=True
    ),
    "host_memory_bandwidth": Figure(
        f"{_RATE}, or none",
        _is_rate_or_none,
        "bytes per second of a node's host memory",
        "490e9",
        least=1e6,
        most=1e16,
        has_default=True,
    ),
}


def check_figures(owner: object, fields: Mapping[str, Figure], more: Sequence[str] = ()) -> None:
    """Check the attributes of a machine, or of a part of it.

    Args:
        owner: has the attributes.
        fields: to check.
        more: mistakes that the caller has found.

    Raises:
        ValueError: has all mistakes, one a line.
    """
    mistakes = {name: figure.mistake(getattr(owner, name)) for name, figure in fields.items()}
    found = [f"{name}: {mistake}" for name, mistake in mistakes.items() if mistake is not None]
    if found or more:
        raise ValueError("\n".join([*found, *more]))


def both_mistake(into: Any, out: Any, both: Any) -> str | None:
    """Why the rate of both directions of a link cannot be; None if it can, or if one of the
    numbers is invalid by itself."""
    if not all(map(_is_rate, (into, out, both))) or both <= into + out:
        return None
    figure = TWO_WAY_FIELDS["both"]
    return (
        f"expected at most the sum of into and out, {into + out:g} ({figure.unit}, such as "
        f"{figure.example}); found {as_json(both)}"
    )


def file_mistakes(content: Mapping[str, Any], lines: Lines, dtypes: Iterable[str]) -> list[str]:
    """All mistakes of a machine's file, with their lines, in the order of lines.

    Args:
        content: of the file.
        lines: of its fields.
        dtypes: names of dtypes.
    """
    check = _FileCheck(lines)
    parts: dict[str, Mapping[str, Figure]] = {
        "processor": PROCESSOR_FIELDS,
        "within_node": LINK_FIELDS,
        "between_nodes": LINK_FIELDS,
        "host_link": TWO_WAY_FIELDS,
        "disk": TWO_WAY_FIELDS,
    }
    check.fields((), content, MACHINE_FIELDS, others=parts)
    for name, fields in parts.items():
        part, is_optional = content.get(name), fields is TWO_WAY_FIELDS
        if part is None and (is_optional or name not in content):
            if not is_optional:
                check.add((), f"expected {name}, an object with {_listed(fields)}; found none")
        elif not isinstance(part, dict):
            check.add((name,), f"expected an object with {_listed(fields)}; found {as_json(part)}")
        else:
            check.fields((name,), part, fields, ("matrix_flops",) * (name == "processor"))
            if is_optional:
                check.add((name, "both"), both_mistake(*map(part.get, ("into", "out", "both"))))
    processor = content.get("processor")
    if isinstance(processor, dict):
        check.flops(processor, list(dtypes))
    return check.found()


class _FileCheck:
    """Collects mistakes of a file."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._mistakes: list[tuple[int, str]] = [
            (line, f"line {line}, {_name(place)}: expected once; found it again")
            for place, line in lines.again
        ]

    def found(self) -> list[str]:
        """The mistakes, in the order of lines."""
        return [text for _, text in sorted(self._mistakes, key=lambda each: each[0])]

    def add(self, place: Place, mistake: str | None) -> None:
        """Add the mistake of the field at ``place``, if there is one."""
        if mistake is not None:
            line = self._lines.of(place)
            self._mistakes.append((line, f"line {line}, {_name(place)}: {mistake}"))

    def fields(
        self,
        place: Place,
        part: Mapping[str, Any],
        fields: Mapping[str, Figure],
        others: Iterable[str] = (),
    ) -> None:
        """Check the figures of an object; ``others`` are fields that are checked elsewhere."""
        known = [*fields, *others]
        for name, value in part.items():
            if name in fields:
                self.add((*place, name), fields[name].mistake_in_file(value))
            elif name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f". Is it {near[0]}?" if near else ""
                self.add(
                    (*place, name), f"expected one of {_listed(known)}; found this field{hint}"
                )
        for name, figure in fields.items():
            if name not in part and not figure.has_default:
                self.add(place, f"expected {name}: {figure.text}; found none")

    def flops(self, processor: Mapping[str, Any], dtypes: Sequence[str]) -> None:
        """Check the rates of products."""
        place = ("processor", "matrix_flops")
        flops = processor.get("matrix_flops")
        example = f'such as {{"float32": 67e12, "bfloat16": {FLOPS.example}}}'
        if not isinstance(flops, dict):
            text = f"an object with {FLOPS.unit} by dtype ({example})"
            if "matrix_flops" in processor:
                self.add(place, f"expected {text}; found {as_json(flops)}")
            else:
                self.add(place[:1], f"expected matrix_flops: {text}; found none")
            return
        for name, value in flops.items():
            if name not in dtypes:
                self.add((*place, name), f"expected one of {_listed(dtypes)}; found this dtype")
            else:
                self.add((*place, name), FLOPS.mistake_in_file(value))
        if "float32" not in flops:
            self.add(place, f"expected float32 among its dtypes ({example}); found none")


def _name(place: Place) -> str:
    return ".".join(place) or "the object"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
