"""Options with those of ``fe.shard`` beside them. The command line declares its options with this
class, and prints its help without importing torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from fsdp_engine.kernel_interface import Options


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options with those of :func:`~fsdp_engine.shard` beside them.

    Attributes:
        shard: Options of :func:`~fsdp_engine.shard`: ``strategy``, ``outer_strategy``, ``units``,
            ``mp_policy``, ``options``, ``extensions``, ...
    """

    shard: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Self | Options | None, given: Mapping[str, Any]) -> Self:
        """Returns the options of a function that takes the object or keyword arguments.

        Args:
            options: The object. None: there are keyword arguments. ``fe.Options``: one of them, the
                option of ``shard``.
            given: Keyword arguments. Names that are no fields are options of ``shard``.

        Raises:
            TypeError: Both are given, ``options`` has another type, or a required one is missing.
        """
        from fsdp_engine.kernel_interface import Options, checked_arguments

        if isinstance(options, Options):
            given = {**given, "options": options}
            options = None
        if options is not None:
            if not isinstance(options, cls):
                raise TypeError(f"options: expected a {cls.__name__}, or None; found {options!r}")
            if given:
                raise TypeError(
                    "options: expected no keyword arguments beside it; found "
                    f"{', '.join(map(str, given))}"
                )
            return options
        names = {each.name for each in dataclasses.fields(cls)} - {"shard"}
        own = {name: value for name, value in given.items() if name in names}
        shard = {name: given[name] for name in given if name not in names}
        return cls(**own, shard=checked_arguments(shard, f"the function of {cls.__name__}"))
