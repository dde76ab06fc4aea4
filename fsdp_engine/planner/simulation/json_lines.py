"""Finds the lines of fields in a JSON text, for errors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

# The path of a field: the names of the objects that contain it, and its own name.
Place = tuple[str, ...]

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# Largest depth of fields whose lines are recorded.
_DEPTH = 20


@dataclass
class Lines:
    """The lines of the fields of an object. The first line is 1.

    Attributes:
        by_place: The line of each field's name.
        again: Fields whose name occurs more than once in its object, and their lines.
    """

    by_place: dict[Place, int] = field(default_factory=dict)
    again: list[tuple[Place, int]] = field(default_factory=list)

    def of(self, place: Place) -> int:
        """Returns the line of a field, or of the object that would contain it."""
        while place and place not in self.by_place:
            place = place[:-1]
        return self.by_place.get(place, 1)


def lines_of(text: str) -> Lines:
    """Returns the lines of the fields of the object in ``text``, including fields of nested objects
    but not of objects in lists. The text must be valid JSON."""
    lines = Lines()
    start = _after_space(text, 0)
    if text[start : start + 1] == "{":
        lines.by_place[()] = _line(text, start)
        _object(text, start, (), lines)
    return lines


def _object(text: str, position: int, place: Place, lines: Lines) -> int:
    """Record the fields of the object that begins at ``position``. Returns the position after
    it."""
    position = _after_space(text, position + 1)
    while text[position] != "}":
        name, after = _DECODER.raw_decode(text, position)
        inner, line = (*place, name), _line(text, position)
        if inner in lines.by_place:
            lines.again.append((inner, line))
        lines.by_place[inner] = line
        position = _after_space(text, _after_space(text, after) + 1)  # a colon
        if text[position] == "{" and len(inner) < _DEPTH:
            position = _object(text, position, inner, lines)
        else:
            _, position = _DECODER.raw_decode(text, position)
        position = _after_space(text, position)
        if text[position] == ",":
            position = _after_space(text, position + 1)
    return position + 1


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
