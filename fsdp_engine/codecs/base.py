"""The interface of codecs, which encode parameters for all-gathers.

    main shard --encode--> wire shard --gather--> compute parameters

The codec encodes into this rank's slice of the full buffer, which is gathered in place. One codec
object serves one buffer of parameters and may keep small replicated state, such as scales. A codec
that needs other buffers has a class of weights of its own (``weights_class``).

[Note: What a codec keeps]
`tests/extensions/meetings/test_codec_contract.py` checks this contract for every codec:

- *Ranks agree.* Full parameters and state have the same bits on every rank, and equal those that
  one rank with the full main weights computes (for Transformer Engine only without NaN).
- *Padding.* Main elements outside of pieces may have any value, including NaN. They change no
  parameter and no scale. Wire elements outside of pieces need not be written.
- *Empty pieces.* A rank that holds no element of a parameter, or of all parameters, takes part in
  every collective, in the same order.
- *NaN* stays NaN, element by element. *Inf* stays Inf, becomes NaN, or becomes the largest value if
  the codec saturates (Transformer Engine's). Elements that share a scale with either may become
  NaN. A scale that is NaN on one rank is NaN on all ranks: the maximum of a backend may lose it.
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
    """The part of one parameter in a shard: elements ``start..stop`` of the row-major parameter,
    at ``offset`` elements into the shard. ``start == stop`` where this rank holds none of it."""

    index: int
    start: int
    stop: int
    offset: int


class ParamCodec(ABC):
    """Encodes one buffer's main weights.

    Attributes:
        wire_dtype: dtype of the bytes that travel.
        is_identity: main bytes are wire bytes, so main weights may be a view of the wire.
        encodes_shards: :meth:`encode` needs no memory but that of its arguments, so main weights
            may lie elsewhere and be brought for it.
        keeps_wire: this rank's part of the wire is held at rest at every level.
        num_gathers: gathers that bring all that forward and backward read.
        follows_gathers: a subclass has :meth:`after_gather` or :meth:`before_release`.
        weights_class: subclass of :class:`~.buffers.weights.Weights` for weights with this codec.
            None: one of the classes there.
    """

    wire_dtype: torch.dtype
    is_identity: bool = False
    encodes_shards: bool = True
    keeps_wire: bool = False
    num_gathers: int = 1
    follows_gathers: bool = False
    weights_class: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Find out whether the subclass follows gathers."""
        super().__init_subclass__(**kwargs)
        cls.follows_gathers = (
            cls.after_gather is not ParamCodec.after_gather
            or cls.before_release is not ParamCodec.before_release
        )

    def full_itemsize(self, dtypes: ParamDtypes) -> int:
        """Bytes of an element of full parameters from gather to free, with what they are made
        of."""
        return self.wire_dtype.itemsize * self.num_gathers

    def kept_itemsize(self, dtypes: ParamDtypes) -> int:
        """Bytes of an element of full parameters that are not sharded."""
        return self.wire_dtype.itemsize * self.num_gathers

    @property
    def state(self) -> Sequence[Tensor]:
        """Tensors that outlive a call: ``encode`` writes them, ``decode`` reads them."""
        return ()

    def converted(self, dtypes: ParamDtypes) -> ParamCodec:
        """A codec like this one for parameters of other dtypes.

        Raises:
            NotImplementedError: its weights have no other dtypes.
        """
        raise NotImplementedError(
            "expected weights that are cast, or encoded as fp8 by Float8; found a "
            f"{type(self).__name__}"
        )

    def granule(self, shape: tuple[int, ...]) -> int:
        """Elements of a parameter that must stay on one rank."""
        return 1

    def belongs_to(self, modules: Sequence[nn.Module], mesh: DataMesh) -> None:  # noqa: B027
        """Called before :meth:`prepare`.

        Args:
            modules: one that holds the parameter, for each.
            mesh: the ranks that share them.
        """

    def prepare(  # noqa: B027  nothing to do is the common case
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """Called once, when the buffer is built.

        Args:
            params: the user's parameters, as they are before they are bound.
            pieces: what this rank's main shard holds, a piece for each parameter.
            groups: process groups over which the main shard is sharded, for codecs that need a
                global value (an amax).
            device: where state lives.
        """

    def initial_value(self, param: Tensor) -> Tensor:
        """What main weights start from: the user's ``param``, in its shape and any dtype."""
        return param.detach()

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """Attributes that users put on their parameter, which the engine's get, too."""
        return param.__dict__

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        """The parameter that modules compute with. Called once for each, in order.

        Args:
            param: the user's. With a :meth:`converted` codec the one that modules compute with
                already, which then becomes what this returns.
            full: its full parameters, a tensor of its shape for each wire. They may have no
                memory now.
        """
        return nn.Parameter(full[0], requires_grad=param.requires_grad)

    @abstractmethod
    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """Encode the main shard into the shard of each wire; all 1-D. May communicate (yield
        works).
        """

    def gradient(self) -> Callable[[Tensor], Tensor] | None:
        """Returns a function that makes gradients plain tensors; None: they are plain."""
        return None

    def after_gather(self) -> None:  # noqa: B027
        """Full parameters are there, and compute has waited for them."""

    def before_release(self) -> None:  # noqa: B027
        """Full parameters are about to go; compute is done with them."""


# Looks at a parameter and its dtypes and returns a key and a factory, or None for "not mine".
# Parameters with equal keys may share a buffer and so a codec.
CodecRule = Callable[
    [str, torch.Tensor, ParamDtypes], "tuple[str, Callable[[], ParamCodec]] | None"
]


@dataclass(frozen=True)
class CodecRules(EngineExtension):
    """Rules of the user's own for ``fe.shard(extensions=[...])``.

    Attributes:
        rules: The first result other than None selects the codec of a parameter.
    """

    rules: Sequence[CodecRule]

    @property
    def codec_rules(self) -> Sequence[CodecRule]:
        """See the base class."""
        return self.rules

    def signature(self) -> str:
        """Returns an empty text: functions have other addresses on each rank, and ranks compare the
        codec of each parameter."""
        return ""


class ParamClass:
    """How parameters of some tensor classes are sharded. A seam: extensions add theirs by
    :func:`add_param_class` when the package is imported; parameters of other classes are plain."""

    def takes(self, param: Tensor) -> bool:
        """Returns whether the class of ``param`` is one of these."""
        raise NotImplementedError

    def rule(self, extensions: Sequence[EngineExtension]) -> CodecRule:
        """Returns the codec rule of such parameters, which precedes the user's rules.

        Args:
            extensions: The extensions of the engine.
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


PARAM_CLASSES: list[ParamClass] = []


def add_param_class(param_class: ParamClass) -> None:
    """Shard parameters that ``param_class`` takes, and no earlier one, as it says."""
    PARAM_CLASSES.append(param_class)


def param_class_of(param: Tensor) -> ParamClass | None:
    """Returns the object that takes ``param``; None: it is plain."""
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
