"""The interface of codecs, which encode parameters for all-gathers.

    main shard --encode--> wire shard --gather--> compute parameters

The codec encodes into this rank's shard of the full buffer, which is gathered in place. One codec
object serves one buffer of parameters and may have small replicated state, such as scales. A codec
that needs other buffers defines its own class of weights (``weights_class``).

[Note: What a codec keeps]
`tests/extensions/meetings/test_codec_contract.py` checks this contract for every codec:

- *Ranks agree.* Full parameters and state have the same bits on every rank. One rank with the full
  main weights computes the same bits. (With Transformer Engine, this holds for weights without
  NaN.)
- *Padding.* Main elements outside of pieces may have any value, including NaN. They change no
  parameter and no scale. Wire elements outside of pieces need not be written.
- *Empty pieces.* A rank that holds no element of a parameter, or of all parameters, takes part in
  every collective, in the same order.
- *NaN* stays NaN for each element. *Inf* stays Inf, becomes NaN, or becomes the largest value if
  the codec saturates (Transformer Engine's). Elements that share a scale with NaN or Inf may become
  NaN. A scale that is NaN on one rank must be NaN on all ranks. The codec has to ensure this,
  because a backend's maximum may ignore NaN.
- *Zeros* stay zeros, also if all elements that share a scale are zero.
- *Gathers copy bytes* and compute nothing, so any bit pattern of a wire is preserved.
- *May be lost*: precision, the sign of zeros, the payload of NaN, and values too small or too large
  for the wire or the compute dtype (they become zero, the largest value, or Inf).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.precision import ParamDtypes


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter in a shard.

    Attributes:
        index: Index of the parameter in the buffer.
        start, stop: The range ``[start, stop)`` of elements of the row-major parameter. Both are
            equal if this rank holds no element.
        offset: Index of the first of these elements in the shard.
    """

    index: int
    start: int
    stop: int
    offset: int


class ParamCodec(ABC):
    """Encodes one buffer's main weights.

    Attributes:
        wire_dtype: Dtype of the gathered elements.
        is_identity: Whether main weights and wire have the same bytes, so that main weights may be
            a view of the wire.
        encodes_shards: Whether ``encode`` accesses only the memory of its arguments. Main weights
            may then be in other memory, from which they are copied to the device for ``encode``.
        keeps_wire: Whether this rank's shard of the wire is kept between uses at every level.
        num_gathers: Number of gathers for all tensors that forward and backward read.
        follows_gathers: Whether the class overrides ``after_gather`` or ``before_release``.
        weights_class: Subclass of ``Weights`` (``buffers/weights.py``) for weights with this codec.
            None: a class of that module.
    """

    wire_dtype: torch.dtype
    is_identity: bool = False
    encodes_shards: bool = True
    keeps_wire: bool = False
    num_gathers: int = 1
    follows_gathers: bool = False
    weights_class: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set ``follows_gathers`` of the subclass."""
        super().__init_subclass__(**kwargs)
        cls.follows_gathers = (
            cls.after_gather is not ParamCodec.after_gather
            or cls.before_release is not ParamCodec.before_release
        )

    def full_itemsize(self, dtypes: ParamDtypes) -> int:
        """Returns the bytes per element of gathered parameters, including the gathered wires."""
        return self.wire_dtype.itemsize * self.num_gathers

    def kept_itemsize(self, dtypes: ParamDtypes) -> int:
        """Returns the bytes per element of full parameters that are not sharded."""
        return self.wire_dtype.itemsize * self.num_gathers

    @property
    def state(self) -> Sequence[Tensor]:
        """Tensors that ``encode`` writes and ``decode`` reads, such as scales."""
        return ()

    def converted(self, dtypes: ParamDtypes) -> ParamCodec:
        """Returns a codec like this one for other dtypes of the parameters.

        Raises:
            NotImplementedError: Weights with this codec cannot be converted.
        """
        raise NotImplementedError(
            "expected a codec that supports a change of dtype (a cast, or Float8); found a "
            f"{type(self).__name__}"
        )

    def granule(self, shape: tuple[int, ...]) -> int:
        """Returns the number of elements of a parameter that no shard boundary may separate."""
        return 1

    def belongs_to(self, modules: Sequence[nn.Module], mesh: DataMesh) -> None:  # noqa: B027
        """Receive the modules of the parameters. Called before ``prepare``.

        Args:
            modules: For each parameter, a module that holds it.
            mesh: The ranks that share the parameters.
        """

    def prepare(  # noqa: B027  nothing to do is the common case
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """Allocate the state of the codec. Called once, when the buffer is built.

        Args:
            params: The user's parameters before ``bind``.
            pieces: The pieces of this rank's main shard, one for each parameter.
            groups: Process groups over which the main shard is sharded, for codecs that need a
                global value (an amax).
            device: The device of state.
        """

    def initial_value(self, param: Tensor) -> Tensor:
        """Returns the values with which main weights start, in the shape of the user's ``param``.

        They may have any dtype.
        """
        return param.detach()

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """Returns attributes of the user's parameter, which are copied to the engine's tensors."""
        return param.__dict__

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        """Returns the parameter that modules compute with. Called once per parameter, in order.

        Args:
            param: The user's parameter. For a result of :meth:`converted`: the present parameter of
                the modules. The caller replaces its contents by those of the returned parameter.
            full: The full parameter: for each wire, a tensor of the parameter's shape. These
                tensors may have no memory during this call.
        """
        return nn.Parameter(full[0], requires_grad=param.requires_grad)

    @abstractmethod
    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """Encode the main shard into the shard of each wire. Yields works if it communicates.

        All tensors are 1-D.
        """

    def gradient(self) -> Callable[[Tensor], Tensor] | None:
        """Returns a function that converts gradients to plain tensors. None: they are plain."""
        return None

    def after_gather(self) -> None:  # noqa: B027
        """Update full parameters after a gather, once compute has waited for it."""

    def before_release(self) -> None:  # noqa: B027
        """Prepare full parameters for being freed, when compute no longer uses them."""


# A function of a parameter's name, the parameter and its dtypes. It returns a key and a factory of
# codecs, or None if the rule does not apply to the parameter. Parameters with equal keys may share
# a buffer, and therefore a codec.
CodecRule = Callable[
    [str, torch.Tensor, ParamDtypes], "tuple[str, Callable[[], ParamCodec]] | None"
]


@dataclass(frozen=True)
class CodecRules(EngineExtension):
    """The user's codec rules, for ``fe.shard(extensions=[...])``.

    Attributes:
        rules: The rules. The first result other than None selects the codec of a parameter.
    """

    rules: Sequence[CodecRule]

    @property
    def codec_rules(self) -> Sequence[CodecRule]:
        """See the base class."""
        return self.rules

    def signature(self) -> str:
        """Returns "", because functions have different addresses on each rank.

        Ranks compare the codec of each parameter instead.
        """
        return ""


class ParamClass:
    """The rules for sharding parameters of some tensor subclasses.

    This class is a seam (see ``docs/design.md``): extensions add instances of subclasses by
    :func:`add_param_class` when the module ``engine`` is imported. Parameters that no instance
    takes are *plain*.
    """

    def takes(self, param: Tensor) -> bool:
        """Returns whether this object handles the class of ``param``."""
        raise NotImplementedError

    def rule(self, extensions: Sequence[EngineExtension]) -> CodecRule:
        """Returns the codec rule of these parameters. It precedes the user's rules.

        Args:
            extensions: The extensions of the engine.
        """
        raise NotImplementedError

    def check(self, name: str, param: Tensor, *, is_in_dtensor: bool) -> None:
        """Check that ``param``, which this object takes, can be sharded.

        Raises:
            ValueError: ``param`` cannot be sharded. The message names it.
        """

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """Returns the attributes that the user has set on ``param``."""
        return vars(param)

    def made_of(self, param: Tensor, values: Tensor) -> Tensor:
        """Returns a tensor of the class of ``param`` with ``values``, a plain tensor of its shape.

        ``param`` may be on the meta device.
        """
        return values

    def extra_tensors(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Returns the tensors in the extra state of ``module`` by name, without copies.

        The result is empty if the extra state is saved as one object.
        """
        return {}

    def any_marked(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether :meth:`refuse_marked` raises for one of ``tensors``."""
        return False

    def refuse_marked(self, name: str, param: Tensor) -> None:
        """Check that a plain parameter has no attributes that only parameters of other classes may
        have.

        Raises:
            ValueError: ``param`` has such an attribute. The message names it.
        """


PARAM_CLASSES: list[ParamClass] = []


def add_param_class(param_class: ParamClass) -> None:
    """Register an object for parameters that it takes, and that no earlier object takes."""
    PARAM_CLASSES.append(param_class)


def param_class_of(param: Tensor) -> ParamClass | None:
    """Returns the registered object that takes ``param``, or None if ``param`` is plain."""
    return next((each for each in PARAM_CLASSES if each.takes(param)), None)


def class_rule(extensions: Sequence[EngineExtension]) -> CodecRule:
    """Returns the codec rule of all parameters that are not plain."""
    made: dict[int, CodecRule] = {}

    def rule(
        name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        found = param_class_of(param)
        if found is None:
            return None
        if id(found) not in made:
            made[id(found)] = found.rule(extensions)
        return made[id(found)](name, param, dtypes)

    return rule
