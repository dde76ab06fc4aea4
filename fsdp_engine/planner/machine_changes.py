"""Machines with changed figures, for "what if" questions.

Names are those of the fields of ``fe.Machine``, with a dot within its parts
("between_nodes.bandwidth"); or of a part's field alone where only one part has it
("memory_bytes"); or "inner_..." and "outer_..." for the links within a node and between nodes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_engine.simulation.machine import Link, Machine, Processor, TwoWayLink
from fsdp_engine.simulation.simulation_error import listed

_PARTS: dict[str, type] = {
    "processor": Processor,
    "within_node": Link,
    "between_nodes": Link,
    "host_link": TwoWayLink,
    "disk": TwoWayLink,
}
_LINKS = {"inner": "within_node", "outer": "between_nodes"}
_WITHOUT_NUMBERS = {"name", "host_runs_ahead"}


def _fields() -> dict[str, tuple[str, ...]]:
    """The path of each name."""
    paths: list[tuple[str, ...]] = []
    for each in dataclasses.fields(Machine):
        if each.name in _PARTS:
            paths += [(each.name, leaf.name) for leaf in dataclasses.fields(_PARTS[each.name])]
        elif each.name not in _WITHOUT_NUMBERS:
            paths.append((each.name,))
    names = {".".join(path): path for path in paths}
    leaves = Counter(path[-1] for path in paths)
    names |= {path[-1]: path for path in paths if leaves[path[-1]] == 1}
    for prefix, part in _LINKS.items():
        names |= {f"{prefix}_{path[-1]}": path for path in paths if path[0] == part}
    return names


FIELDS = _fields()


def halved_and_doubled(machine: Machine, num_ranks: int) -> Iterator[dict[str, str]]:
    """Changes by factors of 0.5 and 2: of compute, and of the links between so many ranks."""
    names = {
        "matrix_flops": True,
        "inner_bandwidth": min(machine.ranks_per_node, num_ranks) > 1,
        "outer_bandwidth": num_ranks > machine.ranks_per_node,
    }
    for name, is_used in names.items():
        if is_used:
            yield from ({name: factor} for factor in ("0.5x", "2x"))


def parsed_changes(text: str) -> dict[str, str]:
    """The changes of a text such as "outer_bandwidth=0.5x,memory_bytes=141e9".

    Raises:
        ValueError: it is none.
    """
    changes = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not (name and equals and value):
            raise ValueError(
                "what-if: expected changes such as outer_bandwidth=0.5x, separated by commas; "
                f"found {text!r}"
            )
        changes[name] = value
    return changes


def changed_machine(machine: Machine, changes: Mapping[str, object]) -> Machine:
    """Returns the machine with other figures.

    Args:
        machine: the machine.
        changes: values by name; a text such as "0.5x" is a factor.

    Raises:
        ValueError: there is no such name, the machine has no such figure, or the value is invalid.
    """
    for name, value in changes.items():
        machine = _changed(machine, name, value)
    words = ", ".join(f"{name}={value}" for name, value in changes.items())
    return dataclasses.replace(machine, name=f"{machine.name}, {words}")


def _changed(machine: Machine, name: str, value: object) -> Machine:
    if name not in FIELDS:
        raise ValueError(f"what-if: expected one of {', '.join(sorted(FIELDS))}; found {name!r}")
    *outside, leaf = FIELDS[name]
    part: Any = getattr(machine, outside[0]) if outside else machine
    before = None if part is None else getattr(part, leaf)
    if before is None:
        raise ValueError(f"what-if: expected a machine with {name}; found {machine.name!r} without")
    number, is_factor = _number(name, value)
    after: Any
    if isinstance(before, Mapping):  # products by dtype
        after = {key: number * (each if is_factor else 1) for key, each in before.items()}
    else:
        after = number * before if is_factor else number
        if isinstance(before, int) and after == int(after):
            after = int(after)
    try:
        changed: Any = dataclasses.replace(part, **{leaf: after})
        if outside:
            changed = dataclasses.replace(machine, **{outside[0]: changed})
    except ValueError as error:
        raise ValueError(f"what-if: {name}={value}: {error}") from error
    assert isinstance(changed, Machine)
    return changed


def _number(name: str, value: object) -> tuple[float, bool]:
    """A change's number, and whether it is a factor."""
    text = str(value).strip()
    is_factor = text.endswith(("x", "X"))
    try:
        return float(text[:-1] if is_factor else text), is_factor
    except ValueError:
        raise ValueError(
            f"what-if: expected {name} as a value or as a factor such as 0.5x; found {value!r}"
        ) from None


def named_machines(machines: Any) -> Iterator[tuple[str, Machine]]:
    """Machines with short labels: the names of presets and files, or those of the machines.

    Raises:
        TypeError, ValueError: see :meth:`~.simulation.machine.Machine.named`.
    """
    for each in listed("machines", machines, "machines, or names of presets, in a tuple"):
        if isinstance(each, Machine):
            yield each.name, each
        else:
            yield str(each), Machine.named(each)
