"""Base class of options that also carry options of ``fe.shard``. The command line declares its
options with this class, and prints help without importing torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from fsdp_engine.kernel_interface import Options


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options that also carry options of ``fe.shard``.

    Attributes:
        functions: Names of the functions that take the options, for messages.
        shard: Arguments of ``fe.shard``: ``strategy``, ``outer_strategy``, ``units``,
            ``mp_policy``, ``options``, ``extensions``, ...
    """

    functions: ClassVar[str]

    shard: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Self | Options | None, given: Mapping[str, Any]) -> Self:
        """Returns the options from an object, or from keyword arguments.

        Args:
            options: An object of this class. None: use the keyword arguments. An ``fe.Options`` is
                added to the keyword arguments, as ``options`` of ``fe.shard``.
            given: Keyword arguments. Names that are not fields are arguments of ``fe.shard``.

        Raises:
            TypeError: An object and keyword arguments are given, ``options`` has a wrong type, or a
                required field is missing.
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
                    f"options: expected no keyword arguments beside a {cls.__name__}; found "
                    f"{', '.join(map(str, given))}"
                )
            return options
        names = {each.name for each in dataclasses.fields(cls)} - {"shard"}
        own = {name: value for name, value in given.items() if name in names}
        shard = {name: given[name] for name in given if name not in names}
        # The user has called the function that calls this one.
        return cls(**own, shard=checked_arguments(shard, cls.functions, stacklevel=4))
