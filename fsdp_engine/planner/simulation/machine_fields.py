"""Checks the figures of a machine. Each figure has a unit, a range and an example.

Functions such as :func:`rate` make fields for the dataclasses of machines, which check the ranges
when they are created. A machine's file is also checked for unknown and missing fields, and for
figures far from those of any real machine, which are probably in another unit (GB/s instead of
bytes per second). All mistakes are reported at once, with their lines in the file
(``json_lines.py``).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from fsdp_engine.planner.simulation.json_lines import Lines, Place


@dataclass(frozen=True)
class Figure:
    """The description of a field of a machine.

    Attributes:
        expected: The range as text.
        is_valid: Returns whether a value of any type is in the range.
        unit: The unit or the meaning of the figure.
        example: A valid value, in JSON.
        least, most: The range of real machines, which is checked for files.
        has_default: Whether the field may be missing.
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
        """Returns why ``value`` is not valid; None if it is valid."""
        return None if self.is_valid(value) else f"expected {self.text}; found {value!r}"

    def mistake_in_file(self, value: Any) -> str | None:
        """Returns why a file's value is not valid, or is probably in another unit; else None."""
        found = as_json(value)
        if not self.is_valid(value):
            return f"expected {self.text}; found {found}"
        # A program may have made a machine with an infinite rate, which is not a mistake of units.
        if _is_number(value) and value != math.inf and not self.least <= value <= self.most:
            limits = f"from {self.least:g} to {self.most:g}"
            return f"expected {self.text}, {limits}; found {found}, which may be in another unit"
        return None


def as_json(value: object) -> str:
    """Returns the JSON text of a file's value, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


_RATE, _WHOLE = "a number larger than 0", "1 rank or more, a whole number"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_finite_rate(value: Any) -> bool:
    return _is_rate(value) and value < math.inf


def _is_not_negative(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _field(
    expected: str,
    is_valid: Callable[[Any], bool],
    unit: str,
    example: str,
    limits: tuple[float, float] = (-math.inf, math.inf),
    default: Any = MISSING,
) -> Any:
    """Returns a field of a machine's class, with its :class:`Figure`. A field whose default is None
    may be None."""

    def check(value: Any) -> bool:
        return (value is None and default is None) or is_valid(value)

    expected += ", or none" * (default is None)
    figure = Figure(expected, check, unit, example, *limits, default is not MISSING)
    return dataclasses.field(default=default, metadata={_FIGURE: figure})


_FIGURE, _PART = "figure", "part"


def rate(unit: str, example: str, default: Any = MISSING) -> Any:
    """Returns a field for bytes per second."""
    return _field(_RATE, _is_rate, unit, example, (1e6, 1e16), default)


def seconds(unit: str, example: str, default: Any = 0.0, *, most: float = 1.0) -> Any:
    """Returns a field for seconds."""
    return number(unit, example, default, most=most)


def number(unit: str, example: str, default: Any = 0.0, *, most: float = 1e6) -> Any:
    """Returns a field for a number, 0 or larger."""
    return _field("0 or a larger number", _is_not_negative, unit, example, (0, most), default)


def share(unit: str, example: str) -> Any:
    """Returns a field for a fraction, 1 by default."""

    def is_share(value: Any) -> bool:
        return _is_rate(value) and bool(value <= 1)

    return _field("a fraction, at most 1, larger than 0", is_share, unit, example, (0, 1), 1.0)


def ratio(unit: str, example: str, default: Any = 1.0) -> Any:
    """Returns a field for a ratio of rates."""
    return _field(_RATE, _is_finite_rate, unit, example, (1e-3, 1e3), default)


def fraction(unit: str, example: str) -> Any:
    """Returns a field for a fraction that may be 0, 1 by default."""

    def is_fraction(value: Any) -> bool:
        return _is_not_negative(value) and bool(value <= 1)

    return _field("a fraction from 0 to 1", is_fraction, unit, example, default=1.0)


def size(unit: str, example: str) -> Any:
    """Returns a field for bytes."""
    return _field(_RATE, _is_finite_rate, unit, example, (1e6, 1e15))


def block(unit: str, example: str) -> Any:
    """Returns a field for a number, 1 or larger, None by default."""

    def is_block(value: Any) -> bool:
        return _is_finite_rate(value) and bool(value >= 1)

    return _field("1 or a larger number", is_block, unit, example, (1, 1e6), None)


def ranks(unit: str, example: str) -> Any:
    """Returns a field for a number of ranks."""

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    return _field(_WHOLE, is_count, unit, example, (1, 1e6))


def text(unit: str, example: str) -> Any:
    """Returns a field for text."""
    return _field("a string", lambda value: isinstance(value, str), unit, example)


def flag(unit: str, example: str, default: bool) -> Any:
    """Returns a field for a bool."""
    return _field("a bool", lambda value: isinstance(value, bool), unit, example, default=default)


def part(kind: type, default: Any = MISSING) -> Any:
    """Returns a field for a part of a machine: an object of class ``kind``, which has figures."""
    return dataclasses.field(default=default, metadata={_PART: kind})


def parts_of(machine: type) -> dict[str, tuple[type, bool]]:
    """Returns the parts of a machine's class by name: the class of the part, and whether the part
    may be None."""
    return {
        each.name: (each.metadata[_PART], each.default is None)
        for each in dataclasses.fields(machine)
        if _PART in each.metadata
    }


def figures_of(kind: type) -> dict[str, Figure]:
    """Returns the figures of a class by name."""
    return {
        each.name: each.metadata[_FIGURE]
        for each in dataclasses.fields(kind)
        if _FIGURE in each.metadata
    }


# Describes the rate of products for each dtype.
FLOPS = Figure(_RATE, _is_rate, "floating-point operations per second", "989.5e12", 1e6, 1e19)


def check_figures(owner: Any, more: Sequence[str] = ()) -> None:
    """Check the figures of a machine, or of a part of a machine.

    Args:
        owner: The object with the figures.
        more: Mistakes that the caller has already found.

    Raises:
        ValueError: A figure is invalid; the message lists all mistakes, one per line.
    """
    mistakes = {
        name: figure.mistake(getattr(owner, name))
        for name, figure in figures_of(type(owner)).items()
    }
    found = [f"{name}: {mistake}" for name, mistake in mistakes.items() if mistake is not None]
    if found or more:
        raise ValueError("\n".join([*found, *more]))


def both_mistake(link: type, into: Any, out: Any, both: Any) -> str | None:
    """Returns why the rate of both directions of a link is impossible. None if it is possible, or
    if one of the numbers is invalid by itself."""
    if not all(map(_is_rate, (into, out, both))) or both <= into + out:
        return None
    figure = figures_of(link)["both"]
    return (
        f"expected at most the sum of into and out, {into + out:g} ({figure.unit}, such as "
        f"{figure.example}); found {as_json(both)}"
    )


def file_mistakes(
    content: Mapping[str, Any],
    lines: Lines,
    dtypes: Iterable[str],
    machine: type,
) -> list[str]:
    """Returns all mistakes in a machine's file, in the order of their lines, which they name.

    Args:
        content: The content of the file.
        lines: The lines of the file's fields.
        dtypes: The known names of dtypes.
        machine: The class of machines.
    """
    check, parts = _FileCheck(lines), parts_of(machine)
    check.fields((), content, figures_of(machine), others=parts)
    for name, (kind, is_optional) in parts.items():
        fields, part = figures_of(kind), content.get(name)
        if part is None and (is_optional or name not in content):
            if not is_optional:
                check.add((), f"expected {name}, an object with {_listed(fields)}; found none")
        elif not isinstance(part, dict):
            check.add((name,), f"expected an object with {_listed(fields)}; found {as_json(part)}")
        else:
            check.fields((name,), part, fields, ("matrix_flops",) * (name == "processor"))
            if "both" in fields:
                both = both_mistake(kind, *map(part.get, ("into", "out", "both")))
                check.add((name, "both"), both)
    processor = content.get("processor")
    if isinstance(processor, dict):
        check.flops(processor, list(dtypes))
    return check.found()


class _FileCheck:
    """Collects the mistakes of a file."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._mistakes: list[tuple[int, str]] = [
            (line, f"line {line}, {_name(place)}: expected once; found twice")
            for place, line in lines.again
        ]

    def found(self) -> list[str]:
        """Returns the mistakes, in the order of lines."""
        return [text for _, text in sorted(self._mistakes, key=lambda each: each[0])]

    def add(self, place: Place, mistake: str | None) -> None:
        """Add a mistake of the field at ``place``, unless it is None."""
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
        """Check the figures of an object. Fields in ``others`` are checked elsewhere."""
        known = [*fields, *others]
        for name, value in part.items():
            if name in fields:
                self.add((*place, name), fields[name].mistake_in_file(value))
            elif name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f". Is it {near[0]}?" if near else ""
                self.add((*place, name), f"expected one of {_listed(known)}; found {name}{hint}")
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
                self.add((*place, name), f"expected one of {_listed(dtypes)}; found {name}")
            else:
                self.add((*place, name), FLOPS.mistake_in_file(value))
        if "float32" not in flops:
            self.add(place, f"expected float32 among its dtypes ({example}); found none")


def _name(place: Place) -> str:
    return ".".join(place) or "the object"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
