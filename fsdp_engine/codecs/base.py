"""The interface of codecs: encodings of parameters for all-gathers.

    main shard --encode--> wire shard --gather--> full wire --decode--> compute parameters

If the wire *is* the compute parameters (``decodes`` False), the codec encodes into this rank's
slice of the full buffer, which is gathered in place. One codec object serves one buffer of
parameters and may keep small replicated state, such as scales.

[Note: Encodings]
Most codecs have one *encoding*: one encoding serves forward and backward. A codec with two
encodings encodes the same main weights once for each phase. Each encoding has a wire of its own,
which is gathered for its phase only. A recomputation within backward needs both.

[Note: What a codec keeps]
`tests/codecs/test_contract.py` checks this contract for every codec:

- *Ranks agree.* Full parameters and state have the same bits on every rank, and equal those that
  one rank with the full main weights computes (for Transformer Engine only without NaN).
- *Padding.* Main elements outside of pieces may have any value, including NaN. They change no
  parameter and no scale. Wire elements outside of pieces need not be written.
- *Empty pieces.* A rank that holds no element of a parameter, or of all parameters, takes part in
  every collective, in the same order.
- *NaN* stays NaN, element by element. *Inf* stays Inf, becomes NaN, or becomes the largest value if
  the encoding saturates (Transformer Engine's). Elements that share a scale with either may become
  NaN. A scale that is NaN on one rank is NaN on all ranks: the maximum of a backend may lose it.
- *Zeros* stay zeros, also if all elements that share a scale are zero.
- *Gathers copy bytes* and compute nothing, so any bit pattern of a wire is preserved.
- *May be lost*: precision, the sign of zeros, the payload of NaN, and values too small or too large
  for the encoding or the compute dtype (they become zero, the largest value, or Inf).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.precision import ParamDtypes

# BOTH: a unit whose forward is recomputed within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD

# For codecs with two encodings: see [Note: Encodings] in ``base.py``.
ENCODINGS: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (1,), BOTH: (0, 1)}


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in a shard: elements ``start..stop`` of the row-major parameter,
    at ``offset`` elements into the shard. ``start == stop`` where this rank holds none of it."""

    index: int
    start: int
    stop: int
    offset: int


class ParamCodec(ABC):
    """Encoding of one buffer's main weights.

    Attributes:
        wire_dtype: dtype of the bytes that travel.
        num_encodings: see [Note: Encodings].
        decodes: whether full bytes are decoded into a separate buffer of compute parameters.
        is_identity: main bytes are wire bytes, so main weights may be a view of the wire.
        encodes_once: encoding costs more than keeping its bytes (it communicates, say): it is done
            once after each change of main weights, and this rank's part of the wire persists.
        values_dtype: where every rank may as well encode all weights by itself, from values of this
            dtype, without amaxes of others (:meth:`encode_whole`). None: it may not.
        needs_whole_line: encoding may write anywhere in the parameters of which it has a part, and
            goes through what :meth:`bind` was given: the full lines have memory meanwhile.
        wraps: modules compute with tensors of a class, whose gradients may be of that class.
        gathers_through_gradients: full weights are gathered into the memory of full gradients, and
            encoded there.
    """

    wire_dtype: torch.dtype
    num_encodings: int = 1
    decodes: bool = False
    is_identity: bool = False
    encodes_once: bool = False
    values_dtype: torch.dtype | None = None
    needs_whole_line: bool = False
    wraps: bool = False
    gathers_through_gradients: bool = False

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
            groups: process groups over which the main shard is cut, for encodings that need a
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
            full: where its full bytes come and go, a tensor of its shape for each encoding; where
            the
                codec decodes, the decoded ones. They may have no memory now.
        """
        return nn.Parameter(full[0], requires_grad=param.requires_grad)

    @abstractmethod
    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """Encode the main shard into the wire shard of each encoding; all 1-D. May communicate
        (yield works). With ``needs_whole_line`` wires are parts of the lines that parameters are
        bound to.
        """

    def encode_whole(self, values: Tensor, offsets: Sequence[int]) -> Steps:
        """Encode full weights into what parameters are bound to; parameter ``i`` lies at
        ``offsets[i]`` of ``values``. Where ``values_dtype`` is given only."""
        raise NotImplementedError

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """Decode the full wire; parameter ``i`` lies at ``offsets[i]``. For ``decodes`` only."""
        raise NotImplementedError

    def after_gather(self, *, for_backward: bool) -> None:  # noqa: B027
        """Full parameters are there, and compute has waited for them.

        Args:
            for_backward: no other gather comes before the backward.
        """

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


# Makes the rule of parameters of a package's own classes from the extensions, by package.
_CLASS_RULES: dict[str, Callable[[Sequence[EngineExtension]], CodecRule]] = {}


def add_class_rule(
    package: str, make_rule: Callable[[Sequence[EngineExtension]], CodecRule]
) -> None:
    """Gather parameters whose class is of ``package`` as the rule says that ``make_rule`` returns
    for the extensions of an engine. It precedes all other rules."""
    _CLASS_RULES[package] = make_rule


def _package_with_rule(param: Tensor) -> str | None:
    packages = (kind.__module__.partition(".")[0] for kind in type(param).__mro__)
    return next((each for each in packages if each in _CLASS_RULES), None)


def has_class_rule(param: Tensor) -> bool:
    """Whether the class of ``param`` is of a package with a rule."""
    return _package_with_rule(param) is not None


def class_rule(extensions: Sequence[EngineExtension]) -> CodecRule:
    """The rule of all parameters whose class is of a package with a rule."""
    made: dict[str, CodecRule] = {}

    def rule(
        name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        package = _package_with_rule(param)
        if package is None:
            return None
        if package not in made:
            made[package] = _CLASS_RULES[package](extensions)
        return made[package](name, param, dtypes)

    return rule
