"""Parameters of tensor classes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fsdp_engine.codecs.base import CodecRule, ParamCodec
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Strategy


class ParamClass:
    """How parameters of some tensor classes are sharded. A seam: extensions add theirs by
    :func:`add_param_class` when the package is imported; parameters of other classes are plain."""

    def takes(self, param: Tensor) -> bool:
        """Returns whether the class of ``param`` is one of these."""
        raise NotImplementedError

    def rule(self, config: Any) -> CodecRule:
        """Returns the codec rule of such parameters, which precedes the user's rules.

        Args:
            config: the options of the engine.
        """
        raise NotImplementedError

    def check(self, name: str, param: Tensor, *, is_in_dtensor: bool) -> None:
        """Check that ``param``, which this object takes, can be sharded.

        Raises:
            ValueError: it cannot; names it.
        """

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """Returns the attributes that the user has set on ``param``."""
        return vars(param)

    def made_of(self, param: Tensor, values: Tensor) -> Tensor:
        """Returns a tensor of the class of ``param``, which may be on the meta device, with plain
        ``values`` of its shape."""
        return values

    def extra_tensors(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Returns the tensors in the extra state of ``module``, by name, without copies; none if
        its extra state is saved as it is."""
        return {}

    def any_marked(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether :meth:`refuse_marked` would raise for some of ``tensors``."""
        return False

    def refuse_marked(self, name: str, param: Tensor) -> None:
        """Refuse what makes a tensor of a plain class look like one of these.

        Raises:
            ValueError: ``param`` has it; names ``param``.
        """

    def check_config(self, config: Any, strategy: Strategy, codecs: Iterable[ParamCodec]) -> None:
        """Check the options of an engine that are about such parameters.

        Args:
            config: the options.
            strategy: the levels of both axes.
            codecs: those of all buffers.

        Raises:
            ValueError: an option is set, and no parameter can follow it.
        """


PARAM_CLASSES: list[ParamClass] = []


def add_param_class(param_class: ParamClass) -> None:
    """Shard parameters that ``param_class`` takes, and no earlier one, as it says."""
    PARAM_CLASSES.append(param_class)


def param_class_of(param: Tensor) -> ParamClass | None:
    """Returns the object that takes ``param``; None: it is plain."""
    return next((each for each in PARAM_CLASSES if each.takes(param)), None)


def class_rule(config: Any) -> CodecRule:
    """Returns the codec rule of all parameters that are not plain."""
    made: dict[int, CodecRule] = {}

    def rule(
        name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        found = param_class_of(param)
        if found is None:
            return None
        if id(found) not in made:
            made[id(found)] = found.rule(config)
        return made[id(found)](name, param, dtypes)

    return rule
