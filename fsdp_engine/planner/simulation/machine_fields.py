"""Checks of a machine's figures: unit, range and an example of each.

Functions such as :func:`rate` make fields of classes of machines, which check the range when they
are created. A file of a machine is also checked for
unknown and missing fields, and for figures that are far from those of any machine, which are in
another unit (GB/s for bytes per second). All mistakes are found at once, those of a file with their
lines (``json_lines.py``).
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
    """A field of a machine.

    Attributes:
        expected: Its range as text.
        is_valid: Whether a value of any type is in the range.
        unit: Its unit, or its meaning.
        example: A valid value, as JSON has it.
        least, most: The range of figures of real machines, for files.
        has_default: The field may be missing.
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
    """A field of a class of machines, with its :class:`Figure`. A field that is None by default may
    be None."""

    def check(value: Any) -> bool:
        return (value is None and default is None) or is_valid(value)

    expected += ", or none" * (default is None)
    figure = Figure(expected, check, unit, example, *limits, default is not MISSING)
    return dataclasses.field(default=default, metadata={_FIGURE: figure})


_FIGURE, _PART = "figure", "part"


def rate(unit: str, example: str, default: Any = MISSING) -> Any:
    """A field of bytes per second."""
    return _field(_RATE, _is_rate, unit, example, (1e6, 1e16), default)


def seconds(unit: str, example: str, default: Any = 0.0, *, most: float = 1.0) -> Any:
    """A field of seconds."""
    return number(unit, example, default, most=most)


def number(unit: str, example: str, default: Any = 0.0, *, most: float = 1e6) -> Any:
    """A field of a number, 0 or larger."""
    return _field("0 or a larger number", _is_not_negative, unit, example, (0, most), default)


def share(unit: str, example: str) -> Any:
    """A field of a fraction, 1 by default."""

    def is_share(value: Any) -> bool:
        return _is_rate(value) and bool(value <= 1)

    return _field("a fraction, at most 1, larger than 0", is_share, unit, example, (0, 1), 1.0)


def ratio(unit: str, example: str, default: Any = 1.0) -> Any:
    """A field of a ratio of rates."""
    return _field(_RATE, _is_finite_rate, unit, example, (1e-3, 1e3), default)


def fraction(unit: str, example: str) -> Any:
    """A field of a fraction that may be 0, 1 by default."""

    def is_fraction(value: Any) -> bool:
        return _is_not_negative(value) and bool(value <= 1)

    return _field("a fraction from 0 to 1", is_fraction, unit, example, default=1.0)


def size(unit: str, example: str) -> Any:
    """A field of bytes."""
    return _field(_RATE, _is_finite_rate, unit, example, (1e6, 1e15))


def block(unit: str, example: str) -> Any:
    """A field of a number of 1 or more, None by default."""

    def is_block(value: Any) -> bool:
        return _is_finite_rate(value) and bool(value >= 1)

    return _field("1 or a larger number", is_block, unit, example, (1, 1e6), None)


def ranks(unit: str, example: str) -> Any:
    """A field of a number of ranks."""

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    return _field(_WHOLE, is_count, unit, example, (1, 1e6))


def text(unit: str, example: str) -> Any:
    """A field of a text."""
    return _field("a string", lambda value: isinstance(value, str), unit, example)


def flag(unit: str, example: str, default: bool) -> Any:
    """A field of a bool."""
    return _field("a bool", lambda value: isinstance(value, bool), unit, example, default=default)


def part(kind: type, default: Any = MISSING) -> Any:
    """A field of a part of a machine, of a class with figures."""
    return dataclasses.field(default=default, metadata={_PART: kind})


def parts_of(machine: type) -> dict[str, tuple[type, bool]]:
    """Returns the parts of a class of machines by name: their class, and whether they may be
    None."""
    return {
        each.name: (each.metadata[_PART], each.default is None)
        for each in dataclasses.fields(machine)
        if _PART in each.metadata
    }


def figures_of(kind: type) -> dict[str, Figure]:
    """Returns the figures of a class of machines by name."""
    return {
        each.name: each.metadata[_FIGURE]
        for each in dataclasses.fields(kind)
        if _FIGURE in each.metadata
    }


# Of a product's flops, by dtype.
FLOPS = Figure(_RATE, _is_rate, "floating-point operations per second", "989.5e12", 1e6, 1e19)


def check_figures(owner: Any, more: Sequence[str] = ()) -> None:
    """Check the figures of a machine, or of a part of it.

    Args:
        owner: Has the figures.
        more: Mistakes that the caller has found.

    Raises:
        ValueError: Has all mistakes, one a line.
    """
    mistakes = {
        name: figure.mistake(getattr(owner, name))
        for name, figure in figures_of(type(owner)).items()
    }
    found = [f"{name}: {mistake}" for name, mistake in mistakes.items() if mistake is not None]
    if found or more:
        raise ValueError("\n".join([*found, *more]))


def both_mistake(link: type, into: Any, out: Any, both: Any) -> str | None:
    """Why the rate of both directions of a link cannot be; None if it can, or if one of the
    numbers is invalid by itself."""
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
    """All mistakes of a machine's file, with their lines, in the order of lines.

    Args:
        content: The content of the file.
        lines: The lines of its fields.
        dtypes: Names of dtypes.
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
