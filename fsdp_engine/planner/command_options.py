"""Declares the options of a command as fields of dataclasses.

``option`` adds the command-line form of a field: a help text, and the name, type, default and
conversion if they differ from the field's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from typing import Annotated, Any


class Needs(StrEnum):
    """The kind of plan in which an option has an effect."""

    any = "any"
    batch = "batch"  # formulas or simulations for a batch
    simulation = "simulation"
    no_batch = "no batch"  # bytes only
    model = "model"
    elements = "elements"


@dataclass(frozen=True)
class _Option:
    """The command-line form of a field; see :func:`option`."""

    help: str
    name: str
    type: Any
    default: Any
    parse: Callable[[Any, str], Any] | None
    needs: Needs
    requires: str
    panel: str


_OPTION = "option"


def option(
    help: str,
    default: Any = MISSING,
    *,
    name: str = "",
    type: Any = None,
    shown: Any = MISSING,
    parse: Callable[[Any, str], Any] | None = None,
    needs: Needs = Needs.any,
    requires: str = "",
    panel: str = "",
) -> Any:
    """Returns a dataclass field that is also an option of the command line.

    Args:
        help: Text of ``--help``.
        default: The default of the field.
        name: The name of the option. Empty: the name of the field.
        type: The type of the option's value. None: the type of the field.
        shown: Default of the option, which ``parse`` converts. If missing: the default of the
            field.
        parse: Converts the option's value, which is not None, to the field's value. Its second
            argument is the name of the option.
        needs: The kind of plan in which the option has an effect.
        requires: Name of an option without which this one has no effect. Empty: there is none.
        panel: The heading of the option in ``--help``. Empty: the heading of the group.
    """
    first = default if shown is MISSING else shown
    form = _Option(help, name, type, first, parse, needs, requires, panel)
    return field(default=default, metadata={_OPTION: form})


def options_of(*groups: type) -> Iterator[tuple[str, str, _Option]]:
    """Yields the name of each field that is an option, the name of its option, and its form."""
    for group in groups:
        for each in dataclasses.fields(group):
            if (form := each.metadata.get(_OPTION)) is not None:
                yield each.name, form.name or each.name, form


def flag(name: str) -> str:
    """Returns the name of an option as written on the command line: "--global-batch"."""
    return f"--{name.replace('_', '-')}"


def parameters_of(make: Callable[..., object], *groups: Any) -> Iterator[inspect.Parameter]:
    """Yields the parameters of a command.

    Args:
        make: ``typer.Option``.
        groups: Dataclasses of options. The attribute ``panel`` of each is the heading of its
            options in ``--help``.
    """
    for group in groups:
        for field_name, name, form in options_of(group):
            kind = _type_of(group, field_name) if form.type is None else form.type
            names = [flag(name)] if kind is bool else []
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if form.default is MISSING else form.default,
                annotation=Annotated[
                    kind,
                    make(*names, help=form.help, rich_help_panel=form.panel or group.panel),
                ],
            )


def _type_of(group: type, field_name: str) -> Any:
    """Returns the type of a field, without evaluating the types of other fields, which may need
    torch."""
    for each in group.__mro__:
        annotations = inspect.get_annotations(each)
        if field_name in annotations:
            return eval(annotations[field_name], vars(sys.modules[each.__module__]))
    raise AttributeError(field_name)


def parsed(group: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field values of a dataclass of options, by field name.

    Args:
        group: The dataclass.
        values: The values of the command's options, by option name.

    Raises:
        ValueError: An option does not accept its value.
    """
    found = {}
    for field_name, name, form in options_of(group):
        value = values[name]
        if form.parse is not None and value is not None:
            value = form.parse(value, flag(name))
        found[field_name] = value
    return found
