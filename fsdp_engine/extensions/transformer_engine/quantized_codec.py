"""The codec for fp8 weights of Transformer Engine (TE), which gathers their quantized bytes.

A module built under TE's ``quantized_model_init`` holds tensors that compute in fp8. Their bytes
are moved to the flat uint8 buffers and bound to the same ``Parameter``, which is transparent to
TE's modules. Main weights are initialized from the values that TE preserved. After a step one call
of TE's ``quantize_master_weights`` encodes all weights of a buffer from their main shards. It
reduces the amaxes over the ranks, with one all-reduce for each axis over which the weights are
sharded, and writes all scales on every rank into the parameters' existing tensors. Only bytes are
gathered.

    recipe     type                    bytes               scales, fp32 except for MXFP8
    delayed    Float8Tensor            _data               1, from the amaxes of past steps
    current    Float8Tensor            _data               1
    block      Float8BlockwiseQTensor  _rowwise_data       1 for each 128 x 128
    mxfp8      MXFP8Tensor             _rowwise_data,      1 (e8m0) for each 1 x 32; and for each
                                       _columnwise_data    32 x 1 in a separate encoding

Backward uses columnwise data. For MXFP8 that is the second encoding ([Note: Encodings] in
``quantized_weights.py``), encoded from the main weights. For the other recipes it is a transpose
that TE computes from gathered bytes (``post_all_gather_processing``). The codec creates it for
backward only, and deletes it when the bytes are freed (unless ``keep_transposes``) or encoded
again.

The block recipe's kernel writes full 128 x 128 tiles, including elements of other ranks. Bytes are
therefore always encoded into the full weight, and copied from there to the persistent shard.

This is the only file that imports Transformer Engine, when the first quantized weight is found.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.codecs.base import ParamCodec, Piece
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.transformer_engine import is_quantized
from fsdp_engine.extensions.transformer_engine.max_group import MaxGroup
from fsdp_engine.extensions.transformer_engine.quantized_weights import QuantizedWeights
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Role
from fsdp_engine.units.build import EngineSetup

KNOWN_VERSIONS = "2.20"
CODEC_PREFIX = "transformer engine"

_QUANTIZE, _POST_PROCESS = "quantize_master_weights", "post_all_gather_processing"
_QUANTIZE_ARGUMENTS = (
    "model_weights",
    "master_weights",
    "start_offsets",
    "group",
    "fsdp_shard_model_weights",
    "manual_post_all_gather_processing",
)
_THROUGH_GRADIENTS = "through_gradients (Megatron's reuse_grad_buf_for_mxfp8_param_ag)"
_PRESERVED = "_high_precision_init_val"
# Attributes that TE and torch set on parameters. All others are marks of the user.
_NOT_MARKS = {
    _PRESERVED,
    "get_high_precision_init_val",
    "clear_high_precision_init_val",
    "_is_param",
}


@dataclass(frozen=True)
class Recipe:
    """The attributes and constraints of one of TE's quantized tensor classes.

    Attributes:
        name: Name of the recipe in the table above.
        quantizer: Name of TE's quantizer class.
        encodings: Attributes that hold raw bytes.
        scales: Attributes that hold scales.
        options: Attributes of the quantizer that must be equal for the weights of one call.
        num_dims: Number of dims that the kernels support. None: any.
        dtypes: Nominal dtypes that the kernels support. Empty: any.
    """

    name: str
    quantizer: str
    encodings: tuple[str, ...]
    scales: tuple[str, ...]
    options: tuple[str, ...]
    num_dims: int | None = None
    dtypes: tuple[torch.dtype, ...] = ()


RECIPES = (
    Recipe("delayed", "Float8Quantizer", ("_data",), ("_scale_inv",), ("dtype",)),
    Recipe(
        "current",
        "Float8CurrentScalingQuantizer",
        ("_data",),
        ("_scale_inv",),
        ("dtype", "force_pow_2_scales", "amax_epsilon"),
    ),
    Recipe(
        "block",
        "Float8BlockQuantizer",
        ("_rowwise_data",),
        ("_rowwise_scale_inv",),
        ("dtype", "force_pow_2_scales", "amax_epsilon", "block_len"),
        num_dims=2,
        dtypes=(torch.bfloat16, torch.float32),
    ),
    Recipe(
        "mxfp8",
        "MXFP8Quantizer",
        ("_rowwise_data", "_columnwise_data"),
        ("_rowwise_scale_inv", "_columnwise_scale_inv"),
        ("dtype",),
        num_dims=2,
        dtypes=(torch.bfloat16,),
    ),
)


@dataclass(frozen=True)
class TransformerEngine(EngineExtension):
    """The codec rule for weights that Transformer Engine has quantized. It is used by default; pass
    it in ``extensions`` only to change its arguments.

    Args:
        keep_transposes: Keep the transposes that backward needs, even while the bytes from which
            they were computed are freed.
        through_gradients: Gather MXFP8 weights through the memory of gradients.

    Raises (when called):
        ImportError: Transformer Engine, or a function of it that the engine uses, is missing.
        ValueError: The format or dtype of a weight is not supported.
    """

    keep_transposes: bool = False
    through_gradients: bool = False

    @classmethod
    def of(cls, extensions: Sequence[EngineExtension]) -> TransformerEngine:
        """Returns the rule in ``extensions``, or one with the defaults."""
        return next((each for each in extensions if isinstance(each, cls)), cls())

    def check(self, setup: EngineSetup) -> None:
        """See the base class.

        Raises:
            ValueError: An argument is set, but the model has no weights to which it applies; or
                ``through_gradients`` is set and gradients are sharded.
        """
        codecs = [buffer.make_codec() for unit in setup.plan.units for buffer in unit.buffers]
        quantized = [each for each in codecs if isinstance(each, TransformerEngineCodec)]
        if self.keep_transposes and not any(each.has_transposes for each in quantized):
            raise ValueError(
                "keep_transposes (Megatron's keep_fp8_transpose_cache): expected weights that "
                "Transformer Engine has quantised by the delayed, current or block recipe, which "
                "alone have transposes; found none"
            )
        if not self.through_gradients:
            return
        if not any(each.num_encodings > 1 for each in quantized):
            raise ValueError(
                f"{_THROUGH_GRADIENTS}: expected weights that Transformer Engine has quantised by "
                "the MXFP8 recipe; found none"
            )
        strategy = setup.axis_plans.data.strategy
        if strategy.depth(Role.GRAD) > 0:
            raise ValueError(
                f"{_THROUGH_GRADIENTS}: expected unsharded gradients, whose memory full weights "
                f"use, too; found levels that shard them: {strategy}"
            )

    def __call__(
        self, name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        """Returns the key and the factory of a parameter's codec; None if the parameter is not one
        of TE's quantized tensors."""
        if not is_quantized(param):
            return None
        api = _load(name)
        recipe = _recipe_of(name, param)
        if dtypes.compute != param.dtype:
            raise ValueError(
                f"{name}: expected mp_policy.param_dtype to be None or {param.dtype}, the nominal "
                f"dtype of its quantized weight; found {dtypes.compute}"
            )
        if getattr(param, _PRESERVED, None) is None:
            warnings.warn(
                f"{name}: expected quantized_model_init(preserve_high_precision_init_val=True); "
                "found no preserved value: its main weights are initialized from the quantized "
                "ones",
                stacklevel=2,
            )
        quantizer = _quantizer_of(param)
        options = [f"{option}={getattr(quantizer, option)}" for option in recipe.options]
        key = " ".join([CODEC_PREFIX, recipe.name, str(param.dtype), *options])
        return key, lambda: TransformerEngineCodec(
            api, recipe, param.dtype, self.keep_transposes, self.through_gradients
        )


class TransformerEngineCodec(ParamCodec):
    """The codec of one buffer. See the module docstring.

    Args:
        api: TE's module of functions on quantized weights.
        recipe: The recipe of the weights.
        nominal: The nominal dtype of the weights.
        keep_transposes, through_gradients: See :class:`TransformerEngine`.

    Attributes:
        num_encodings: Number of encodings; see [Note: Encodings] in ``quantized_weights.py``.
        nominal: The nominal dtype of the weights. The kernels round main weights to it first, so
            each rank may instead encode all weights from values of this dtype, without amaxes of
            other ranks (:meth:`encode_whole`).
        gathers_through_scratch: See [Note: Gathers through scratch memory] in ``scratch.py``.
    """

    wire_dtype = torch.uint8
    encodes_shards = False
    keeps_wire = True
    weights_class = QuantizedWeights

    def __init__(
        self,
        api: Any,
        recipe: Recipe,
        nominal: torch.dtype,
        keep_transposes: bool,
        through_gradients: bool = False,
    ) -> None:
        self.num_encodings = self.num_gathers = len(recipe.encodings)
        self.nominal = nominal
        self.gathers_through_scratch = through_gradients and self.num_encodings > 1
        self._api = api
        self._recipe = recipe
        self._keeps = keep_transposes
        self._weights: list[Any] = []
        # For each weight, its scales and the views of its bytes, by attribute.
        self._parts: list[dict[str, Tensor]] = []
        self._num_bound = 0
        self._pieces: Sequence[Piece] = ()
        self._group: MaxGroup | None = None
        self._masters: list[Tensor | None] = []
        self._starts: list[int] = []
        self._main: Tensor | None = None
        # Whether transposes exist and match the current bytes.
        self._has_columns = False

    @property
    def has_transposes(self) -> bool:
        """Whether backward uses transposes of forward's data."""
        return self.num_encodings == 1

    @property
    def state(self) -> Sequence[Tensor]:
        """See :class:`ParamCodec`. Returns the scales."""
        return [parts[name] for parts in self._parts for name in self._recipe.scales]

    def prepare(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """See :class:`ParamCodec`."""
        self._weights = list(params)
        self._parts = [
            {name: getattr(weight, name) for name in self._recipe.scales}
            for weight in self._weights
        ]
        self._pieces = pieces
        self._group = MaxGroup(groups)
        if self._recipe.name == "delayed":
            for weight in self._weights:
                # Encoding recomputes the amax; that of the initial value may differ between ranks.
                weight._quantizer.amax.zero_()

    def initial_value(self, param: Tensor) -> Tensor:
        """See :class:`ParamCodec`. Returns the values that TE preserved, or the quantized ones."""
        preserved: Tensor | None = getattr(param, _PRESERVED, None)
        if preserved is not None:
            return preserved
        with torch.no_grad():
            return param.dequantize()

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """See :class:`ParamCodec`. Omits the attributes that TE sets."""
        own = _NOT_MARKS.union(vars(param.detach()))
        return {name: value for name, value in vars(param).items() if name not in own}

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        """See :class:`ParamCodec`. Returns the same parameter, with its bytes in ``full``."""
        weight: Any = param
        if self.has_transposes:
            # Otherwise TE would create a transpose in every forward, and one of each shard that it
            # encodes. TE's backward creates missing transposes.
            weight._quantizer.set_usage(columnwise=False)
        if getattr(weight, _PRESERVED, None) is not None:
            weight.clear_high_precision_init_val()
        parts = self._parts[self._num_bound]
        self._num_bound += 1
        parts.update(zip(self._recipe.encodings, full, strict=True))
        _put(weight, parts)
        self._drop_columns(weight)
        return param

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`. ``wires`` are parts of the full weights. TE waits for the
        all-reduce of amaxes; on CUDA the stream waits for it."""
        if self._main is not main:
            self._main = main
            self._masters, self._starts = _shards(self._pieces, main)
        self._quantize(self._masters, self._starts, self._group)
        yield from ()

    def encode_whole(self, values: Tensor, offsets: Sequence[int]) -> Steps:
        """Encode full weights into the parameters. Parameter ``i`` starts at ``offsets[i]`` of
        ``values``."""
        masters = [
            values[offset : offset + weight.numel()]
            for offset, weight in zip(offsets, self._weights, strict=True)
        ]
        self._quantize(masters, [0] * len(masters), MaxGroup(()))
        yield from ()

    def _quantize(
        self, masters: Sequence[Tensor | None], starts: Sequence[int], group: MaxGroup | None
    ) -> None:
        for weight, parts in zip(self._weights, self._parts, strict=True):
            _put(weight, parts)
            self._drop_columns(weight)
        self._has_columns = False
        with torch.no_grad():
            self._api.quantize_master_weights(
                self._weights,
                masters,
                starts,
                group,
                manual_post_all_gather_processing=True,
            )

    def after_gather(self, *, for_backward: bool = False) -> None:
        """See :class:`ParamCodec`. Sets the parameters' bytes, and creates transposes for
        backward.

        Args:
            for_backward: Whether no other gather precedes the backward.
        """
        for weight, parts in zip(self._weights, self._parts, strict=True):
            _put(weight, parts)
        if self.has_transposes and not self._has_columns and (for_backward or self._keeps):
            with torch.no_grad():
                self._api.post_all_gather_processing(self._weights)
            self._has_columns = True

    def before_release(self) -> None:
        """See :class:`ParamCodec`. Deletes transposes unless they are kept."""
        if not self._keeps:
            for weight in self._weights:
                self._drop_columns(weight)
            self._has_columns = False

    def _drop_columns(self, weight: Any) -> None:
        if self.has_transposes:
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def _put(weight: Any, parts: Mapping[str, Tensor]) -> None:
    """Set the bytes and scales of a weight. Modules may have deleted some of them after use."""
    for name, tensor in parts.items():
        setattr(weight, name, tensor)


def _shards(pieces: Sequence[Piece], main: Tensor) -> tuple[list[Tensor | None], list[int]]:
    """Returns this rank's shard of each main weight (None if empty), and its start."""
    masters: list[Tensor | None] = []
    offsets = []
    for piece in pieces:
        count = piece.stop - piece.start
        masters.append(main[piece.offset : piece.offset + count] if count else None)
        offsets.append(piece.start)
    return masters, offsets


def _load(name: str) -> Any:
    """Returns TE's module of functions on quantized weights.

    Args:
        name: The name of a weight, for errors.

    Raises:
        ImportError: Transformer Engine, or a function of it, is missing.
    """
    wanted = f"{name}: expected Transformer Engine {KNOWN_VERSIONS}, whose type its weight has"
    try:
        api = importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ImportError(
            f"{wanted}; found that transformer_engine.pytorch cannot be imported ({error}). "
            "Install fsdp_engine[transformer-engine]"
        ) from error
    missing = [each for each in (_QUANTIZE, _POST_PROCESS) if not hasattr(api, each)]
    if _QUANTIZE not in missing:
        known = inspect.signature(getattr(api, _QUANTIZE)).parameters
        missing += [f"{_QUANTIZE}({each})" for each in _QUANTIZE_ARGUMENTS if each not in known]
    if missing:
        found = getattr(importlib.import_module("transformer_engine"), "__version__", "unknown")
        raise ImportError(
            f"{wanted}; found version {found}, which lacks {', '.join(missing)}. Supported "
            f"versions: {KNOWN_VERSIONS}"
        )
    return api


def _quantizer_of(param: Any) -> Any:
    return getattr(param, "_quantizer", None)


def _recipe_of(name: str, param: Tensor) -> Recipe:
    found = type(_quantizer_of(param)).__name__
    recipe = next((recipe for recipe in RECIPES if recipe.quantizer == found), None)
    known = ", ".join(recipe.name for recipe in RECIPES)
    if "NVFP4" in type(param).__name__:
        raise ValueError(
            f"{name}: expected one of the recipes {known}; found NVFP4, which packs two elements "
            "into a byte, while buffers need at least one byte per element, since a boundary "
            "between ranks may be at any element; its two-level scales of 16 elements are not "
            "supported either"
        )
    if recipe is None:
        raise ValueError(
            f"{name}: expected a weight of one of the recipes {known}; found a "
            f"{type(param).__name__} made by {found}"
        )
    if recipe.num_dims is not None and param.ndim != recipe.num_dims:
        raise ValueError(
            f"{name}: expected {recipe.num_dims} dimensions, since the kernels of the "
            f"{recipe.name} recipe support no others; found shape {tuple(param.shape)}"
        )
    if recipe.dtypes and param.dtype not in recipe.dtypes:
        raise ValueError(
            f"{name}: expected a nominal dtype of {' or '.join(map(str, recipe.dtypes))}, since "
            f"the kernels of the {recipe.name} recipe support no others; found {param.dtype}"
        )
    missing = [
        attribute
        for attribute in (*recipe.encodings, *recipe.scales)
        if getattr(param, attribute, None) is None
    ]
    if missing:
        raise ValueError(
            f"{name}: expected a weight of the {recipe.name} recipe with its bytes and scales; "
            f"found none in {', '.join(missing)} (build the model with gradients enabled)"
        )
    if recipe.name == "block" and not getattr(param, "_is_2D_scaled", False):
        raise ValueError(
            f"{name}: expected scales of 128 x 128 blocks; found scales of 1 x 128, which differ "
            "between rowwise and columnwise data"
        )
    return recipe
