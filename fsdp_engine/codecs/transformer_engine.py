"""Weights of Transformer Engine (TE) that are fp8 already: their bytes travel as they are.

A module built under TE's ``quantized_model_init`` holds tensors that compute in fp8. Their bytes
come to lie in the flat uint8 buffers, bound to the same ``Parameter``, so that TE's modules notice
nothing; main weights start from the values that TE preserved. After a step one call to TE's
``quantize_master_weights`` encodes all weights of a buffer from their main shards: it reduces the
amaxes over the ranks, one message for each axis that cuts the weights, and writes whole scales on
every rank, into the tensors that the parameters have already. Only bytes are gathered.

    recipe     type                    bytes               scales, fp32 but for MXFP8
    delayed    Float8Tensor            _data               1, from the amaxes of past steps
    current    Float8Tensor            _data               1
    block      Float8BlockwiseQTensor  _rowwise_data       1 for each 128 x 128
    mxfp8      MXFP8Tensor             _rowwise_data,      1 (e8m0) for each 1 x 32; and for each
                                       _columnwise_data    32 x 1 in a plane of its own

Backward multiplies with columns. For MXFP8 that is the second plane ([Note: Planes] in
``base.py``), encoded from the main weights. For the others it is a transpose, which TE derives from
gathered bytes (``post_all_gather_processing``), here only for backward; it is dropped when the
bytes go, unless it is to be kept, and whenever they are encoded anew.

The block recipe's kernel writes whole 128 x 128 tiles, also where other ranks' elements lie. So
bytes are always encoded into their place in the full weight, and copied from there to where they
persist (``needs_whole_line``).

This is the only file that imports Transformer Engine, and it does so when it meets such a weight.
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
from fsdp_engine.devices.collectives import MaxGroup, Steps
from fsdp_engine.precision import ParamDtypes

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
_PRESERVED = "_high_precision_init_val"
# What TE and torch put on a parameter beside the tensor's own attributes.
_NOT_MARKS = {
    _PRESERVED,
    "get_high_precision_init_val",
    "clear_high_precision_init_val",
    "_is_param",
}


@dataclass(frozen=True)
class Recipe:
    """How one kind of TE's tensors is quantised.

    Attributes:
        name: as in the table above.
        quantizer: TE's class that does it.
        planes: attributes that hold raw bytes.
        scales: attributes that hold scales.
        options: attributes of the quantizer in which weights of one call must agree.
        num_dims: what its kernels take; None: any number.
        dtypes: nominal dtypes that its kernels take; none: any.
    """

    name: str
    quantizer: str
    planes: tuple[str, ...]
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


def is_quantized(param: Tensor) -> bool:
    """Whether ``param`` is one of TE's quantised tensors. Imports nothing."""
    return any(
        kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(param).__mro__
    )


@dataclass(frozen=True)
class TransformerEngine:
    """The codec rule for weights that Transformer Engine has quantised.

    Args:
        keep_transposes: transposes that backward needs are kept while the bytes are away.

    Raises (when called):
        ImportError: Transformer Engine, or what the engine needs of it, is not there.
        ValueError: a weight whose format or dtype cannot be taken; says why.
    """

    keep_transposes: bool = False

    def __call__(
        self, name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        """The codec of a parameter, if this rule is for it."""
        if not is_quantized(param):
            return None
        api = _load(name)
        recipe = _recipe_of(name, param)
        if dtypes.compute != param.dtype:
            raise ValueError(
                f"{name}: expected mp_policy.param_dtype to be None or {param.dtype}, the nominal "
                f"dtype of its quantised weight; found {dtypes.compute}"
            )
        if getattr(param, _PRESERVED, None) is None:
            warnings.warn(
                f"{name}: expected quantized_model_init(preserve_high_precision_init_val=True); "
                "found no preserved value: its main weights start from the quantised ones",
                stacklevel=2,
            )
        quantizer = _quantizer_of(param)
        options = [f"{option}={getattr(quantizer, option)}" for option in recipe.options]
        key = " ".join([CODEC_PREFIX, recipe.name, str(param.dtype), *options])
        return key, lambda: TransformerEngineCodec(api, recipe, param.dtype, self.keep_transposes)


class TransformerEngineCodec(ParamCodec):
    """See the module docstring. One object serves one buffer.

    Args:
        api: TE's functions on quantised weights.
        recipe: that of the buffer's weights.
        nominal: the dtype that its weights say they have.
        keep_transposes: see :class:`TransformerEngine`.
    """

    wire_dtype = torch.uint8
    encodes_once = True
    needs_whole_line = True

    def __init__(
        self, api: Any, recipe: Recipe, nominal: torch.dtype, keep_transposes: bool
    ) -> None:
        self.num_planes = len(recipe.planes)
        # The kernels round main weights to the nominal dtype first.
        self.values_dtype = nominal
        self._api = api
        self._recipe = recipe
        self._keeps = keep_transposes
        self._weights: list[Any] = []
        # Attributes of each weight: its scales, and the views where its bytes come and go.
        self._parts: list[dict[str, Tensor]] = []
        self._num_bound = 0
        self._pieces: Sequence[Piece] = ()
        self._group: MaxGroup | None = None
        self._masters: list[Tensor | None] = []
        self._starts: list[int] = []
        self._main: Tensor | None = None
        # Transposes are those of the bytes as they are.
        self._has_columns = False

    @property
    def has_transposes(self) -> bool:
        """Whether backward multiplies with transposes of what forward does."""
        return self.num_planes == 1

    @property
    def state(self) -> Sequence[Tensor]:
        """See :class:`ParamCodec`: the scales."""
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
                # Of its initial value, which may be this rank's alone; encoding finds it again.
                weight._quantizer.amax.zero_()

    def initial_value(self, param: Tensor) -> Tensor:
        """See :class:`ParamCodec`: what TE preserved, else the quantised values."""
        preserved: Tensor | None = getattr(param, _PRESERVED, None)
        if preserved is not None:
            return preserved
        with torch.no_grad():
            return param.dequantize()

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """See :class:`ParamCodec`: nothing of TE's own."""
        own = _NOT_MARKS.union(vars(param.detach()))
        return {name: value for name, value in vars(param).items() if name not in own}

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        """See :class:`ParamCodec`: the same parameter, with its bytes in ``full``."""
        weight: Any = param
        if self.has_transposes:
            # Or TE makes one in every forward, and one of each shard that it encodes. Its backward
            # asks for what is not there.
            weight._quantizer.set_usage(columnwise=False)
        if getattr(weight, _PRESERVED, None) is not None:
            weight.clear_high_precision_init_val()
        parts = self._parts[self._num_bound]
        self._num_bound += 1
        parts.update(zip(self._recipe.planes, full, strict=True))
        _put(weight, parts)
        self._drop_columns(weight)
        return param

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`. TE waits for its message of amaxes; on CUDA the stream does."""
        if self._main is not main:
            self._main = main
            self._masters, self._starts = _shards(self._pieces, main)
        self._quantize(self._masters, self._starts, self._group)
        yield from ()

    def encode_whole(self, values: Tensor, offsets: Sequence[int]) -> Steps:
        """See :class:`ParamCodec`."""
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

    def after_gather(self, *, for_backward: bool) -> None:
        """See :class:`ParamCodec`: bytes belong to their parameters; transposes for backward."""
        for weight, parts in zip(self._weights, self._parts, strict=True):
            _put(weight, parts)
        if self.has_transposes and not self._has_columns and (for_backward or self._keeps):
            with torch.no_grad():
                self._api.post_all_gather_processing(self._weights)
            self._has_columns = True

    def before_release(self) -> None:
        """See :class:`ParamCodec`: transposes go, too."""
        if not self._keeps:
            for weight in self._weights:
                self._drop_columns(weight)
            self._has_columns = False

    def _drop_columns(self, weight: Any) -> None:
        if self.has_transposes:
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def extra_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What the extra state of a module with quantised weights holds, as plain tensors by name: the
    live ones.

    Delayed scaling goes by the amaxes of past steps. TE saves them as a pickle, which it does not
    load unless told to. Empty for other modules, and for recipes without such a state.
    """
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict) or not getattr(module, "primary_weights_in_fp8", False):
        return {}
    return {
        f"{direction}.{name}": tensor
        for direction in ("scaling_fwd", "scaling_bwd")
        for name in ("scale", "amax_history")
        if isinstance(tensor := getattr(meta.get(direction), name, None), Tensor)
    }


def _put(weight: Any, parts: Mapping[str, Tensor]) -> None:
    """Give a weight its bytes and scales: modules may have dropped what they needed no more."""
    for name, tensor in parts.items():
        setattr(weight, name, tensor)


def _shards(pieces: Sequence[Piece], main: Tensor) -> tuple[list[Tensor | None], list[int]]:
    """This rank's part of each master weight and where it starts; None where there is none."""
    masters: list[Tensor | None] = []
    offsets = []
    for piece in pieces:
        count = piece.stop - piece.start
        masters.append(main[piece.offset : piece.offset + count] if count else None)
        offsets.append(piece.start)
    return masters, offsets


def _load(name: str) -> Any:
    """TE's functions on quantised weights, for the one of that name."""
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
            f"{wanted}; found version {found}, which lacks {', '.join(missing)}. Versions that "
            f"work: {KNOWN_VERSIONS}"
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
            "into a byte: buffers hold whole bytes for elements, a boundary between ranks may fall "
            "within one, and its scales of 16 elements come in two stages"
        )
    if recipe is None:
        raise ValueError(
            f"{name}: expected a weight of one of the recipes {known}; found a "
            f"{type(param).__name__} made by {found}"
        )
    if recipe.num_dims is not None and param.ndim != recipe.num_dims:
        raise ValueError(
            f"{name}: expected {recipe.num_dims} dimensions, which is what the kernels of the "
            f"{recipe.name} recipe take; found shape {tuple(param.shape)}"
        )
    if recipe.dtypes and param.dtype not in recipe.dtypes:
        raise ValueError(
            f"{name}: expected a nominal dtype of {' or '.join(map(str, recipe.dtypes))}, which is "
            f"what the kernels of the {recipe.name} recipe take; found {param.dtype}"
        )
    missing = [
        attribute
        for attribute in (*recipe.planes, *recipe.scales)
        if getattr(param, attribute, None) is None
    ]
    if missing:
        raise ValueError(
            f"{name}: expected a weight of the {recipe.name} recipe with its bytes and scales; "
            f"found none in {', '.join(missing)} (build the model with gradients enabled)"
        )
    if recipe.name == "block" and not getattr(param, "_is_2D_scaled", False):
        raise ValueError(
            f"{name}: expected scales of 128 x 128 blocks; found those of 1 x 128, of which the "
            "columns' are not the rows'"
        )
    return recipe
