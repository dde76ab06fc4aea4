"""Transformer Engine's own Python tensor layer, on a CPU.

``transformer_engine.pytorch`` needs CUDA torch to import, but its quantised tensors are Python over
a dozen kernels. :func:`load` puts the package's files, without its ``__init__`` files, and
``te_kernels.py`` into ``sys.modules``; after it ordinary imports find the tensor layer. In a
process that has loaded the real library, recipes and weights are those of the library.

Modules (``te.Linear``) stay out of reach. :class:`QuantisedLinear` uses its weight as they
do, and :class:`QuantisedStack` is a small model of such layers.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pickle
import sys
import types
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.extensions.transformer_engine import te_kernels
from tests.extensions.transformer_engine.te_reference import MAX, Quantised, dequantise

# Outside of site-packages: otherwise peft would find the library, import it, and fail.
PYTHON_FILES = Path(sys.prefix) / "transformer_engine_python"
RECIPES = ("delayed", "current", "block", "mxfp8")
MAX_OF_E5M2 = 57344.0
# Where a module's weight stands among the tensors of its forward: input, weight, output.
WEIGHT = 1

_native_tn = False
_TN = "is_non_tn_fp8_gemm_supported"  # each module that calls it imports it by name


def load() -> None:
    """Makes Transformer Engine's tensor layer importable in this process, over the stand-ins if it
    has not loaded the real library."""
    if "transformer_engine_torch" in sys.modules:
        return
    places = [*sys.path, str(PYTHON_FILES)]
    spec = importlib.machinery.PathFinder.find_spec("transformer_engine", places)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "no transformer_engine; tests need its Python files, as `make setup` installs them: "
            f"pip install --no-deps --target {PYTHON_FILES} transformer_engine==2.20.2"
        )
    # Keeps this process and its children from looking for shared libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.modules["transformer_engine_torch"] = te_kernels.module()
    root = Path(spec.origin).parent
    top = _package("transformer_engine", root)
    framework = _package("transformer_engine.pytorch", root / "pytorch")
    _package("transformer_engine.pytorch.cpp_extensions", root / "pytorch" / "cpp_extensions")
    # The real module would import onnxscript.
    export = types.ModuleType("transformer_engine.pytorch.export")
    vars(export).update(is_in_onnx_export_mode=lambda: False)
    sys.modules[export.__name__] = export
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        # Otherwise functions that are not called here would be compiled.
        mock.patch.dict(os.environ, {"NVTE_TORCH_COMPILE": "0"}),
    ):
        (found, *_) = importlib.metadata.distributions(name="transformer_engine", path=places)
        vars(top).update(
            __version__=found.version,
            common=importlib.import_module("transformer_engine.common"),
            pytorch=framework,
        )
        # In this order: the other way round there is a circle of imports.
        for name in ("tensor.utils", "quantization"):
            importlib.import_module(f"transformer_engine.pytorch.{name}")
    for name, each in list(sys.modules.items()):
        if name.startswith("transformer_engine.pytorch") and _TN in vars(each):
            vars(each)[_TN] = has_native_tn
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    # Tensors copy their quantizer; NVFP4Quantizer's own copy asks for the current CUDA device.
    tensors.NVFP4Quantizer.copy = copy.copy
    storage = importlib.import_module(
        "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage"
    )
    dtypes = storage.torch_to_transformer_engine_dtype
    # The only method that would move a CPU tensor to CUDA first.
    storage._FromMXFP8Func.forward = staticmethod(
        lambda ctx, tensor, dtype: te_kernels.dequantize(tensor, dtypes[dtype])
    )


def _package(name: str, folder: Path) -> types.ModuleType:
    origin = str(folder / "__init__.py")
    spec = importlib.util.spec_from_file_location(
        name, origin, submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    return package


def native_tn() -> Any:
    """A context that imitates Blackwell: matrix products read the row encoding in backward, too,
    and there are no transposes. Outside of it, Hopper is imitated."""
    return mock.patch.object(sys.modules[__name__], "_native_tn", True)


def has_native_tn() -> bool:
    return _native_tn


# Weights.


def make_recipe(name: str) -> Any:
    load()
    from transformer_engine.common import recipe

    return {
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }[name]()


def make_state(recipe: Any, mode: str, device: str = "cpu") -> Any:
    """A recipe's state, of one linear layer, forward or backward."""
    load()
    from transformer_engine.pytorch.quantization import RecipeState

    count = 3 if mode == "forward" else 2
    return RecipeState.create(recipe, mode=mode, num_quantizers=count, device=torch.device(device))


def make_weight(values: Tensor, recipe: str, quantizer: Any = None) -> nn.Parameter:
    """A quantised weight that remembers ``values``, as modules make it under
    ``quantized_model_init``.

    Args:
        values: bf16 or fp32, the nominal dtype; on the weight's device.
        quantizer: The quantizer of the module. None: a new one with a state of its own.
    """
    load()
    if quantizer is None:
        state = make_state(make_recipe(recipe), "forward", values.device.type)
        quantizer = state.make_quantizers()[WEIGHT]
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    weight: Any = nn.Parameter(quantizer(values.detach()))
    weight._high_precision_init_val = values.detach().clone()
    weight.get_high_precision_init_val = MethodType(_get_high_precision_init_val, weight)
    weight.clear_high_precision_init_val = MethodType(_clear_high_precision_init_val, weight)
    return weight


def _get_high_precision_init_val(weight: nn.Parameter) -> Tensor | None:
    return getattr(weight, "_high_precision_init_val", None)


def _clear_high_precision_init_val(weight: Any) -> None:
    if hasattr(weight, "_high_precision_init_val"):
        del weight._high_precision_init_val


def encodings(weight: Any) -> Quantised:
    """A weight's bytes and scales as they are, without padding; the column encoding in the weight's
    own orientation, its scales too. None for encodings that are not there or not valid."""
    from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor

    rows, columns = weight.shape
    if isinstance(weight, Float8Tensor):
        transposed = None if weight._transpose_invalid else weight._transpose
        return Quantised(
            weight._data,
            weight._scale_inv.view(1, 1),
            None if transposed is None else transposed.t(),
            None if transposed is None else weight._scale_inv.view(1, 1),
        )
    data, scales = weight._columnwise_data, weight._columnwise_scale_inv
    row_blocks, column_blocks = (rows, columns // 32), (rows // 32, columns)
    if isinstance(weight, Float8BlockwiseQTensor):
        row_blocks = column_blocks = (-(-rows // 128), -(-columns // 128))
        if data is not None:
            data, scales = data.t(), scales.t()
    return Quantised(
        weight._rowwise_data,
        weight._rowwise_scale_inv[: row_blocks[0], : row_blocks[1]],
        data,
        None if data is None else scales[: column_blocks[0], : column_blocks[1]],
    )


# Modules.


class _Product(torch.autograd.Function):
    """x W^T with the row encoding; its gradient with the column encoding, as the tensor cores read
    them. The weight itself is saved, so backward reads the bytes that it has by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        quantizer = weight._quantizer
        weight.update_usage(
            rowwise_usage=True if quantizer.rowwise_usage else None,
            columnwise_usage=True if quantizer.columnwise_usage else None,
        )
        weight.update_usage(rowwise_usage=True)
        ctx.save_for_backward(x, weight)
        return x @ row_values(weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            weight.update_usage(columnwise_usage=True)
            dx = dy @ column_values(weight)
        return dx, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def row_values(weight: Any) -> Tensor:
    """The values of a weight in forward, in the nominal dtype."""
    found = encodings(weight)
    return dequantise(found.row_bytes, found.row_scale_inv).to(weight.dtype)


def column_values(weight: Any) -> Tensor:
    """The values of a weight in backward, in the nominal dtype."""
    from transformer_engine.pytorch.tensor import Float8Tensor

    if _native_tn and isinstance(weight, Float8Tensor):
        return row_values(weight)
    found = encodings(weight)
    assert found.column_bytes is not None, "no column encoding in backward"
    assert found.column_scale_inv is not None
    return dequantise(found.column_bytes, found.column_scale_inv).to(weight.dtype)


class QuantisedLinear(nn.Module):
    """A linear layer with a quantised weight and the attributes of Transformer Engine's modules.
    Every fourth row of the weight is small, so that all encodings differ.

    Attributes:
        fp8_meta: "recipe", and the states "scaling_fwd" and "scaling_bwd". With delayed scaling
            they have ``scale`` and ``amax_history``, and the weight's quantizer has views of them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: str,
        *,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.primary_weights_in_fp8 = True  # as modules built under quantized_model_init say
        made = make_recipe(recipe)
        self.fp8_meta: dict[str, Any] = {
            "recipe": made,
            "scaling_fwd": make_state(made, "forward"),
            "scaling_bwd": make_state(made, "backward"),
        }
        self.quantizers = {
            key: self.fp8_meta[key].make_quantizers() for key in ("scaling_fwd", "scaling_bwd")
        }
        values = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
        # Otherwise rows and columns of MXFP8 decode to the same values: only elements far below a
        # block's largest depend on the block.
        values[3::4] *= 2.0**-14
        self.weight = make_weight(values, recipe, self.quantizers["scaling_fwd"][WEIGHT])
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def update_scales(self) -> None:
        from transformer_engine.pytorch.quantization import _amax_and_scale_update

        recipe = self.fp8_meta["recipe"]
        if not recipe.delayed():
            return
        for key, maximum in (("scaling_fwd", MAX), ("scaling_bwd", MAX_OF_E5M2)):
            state = self.fp8_meta[key]
            _amax_and_scale_update(state.amax_history, state.scale, maximum, recipe)

    def get_extra_state(self) -> Tensor:
        """Nothing, or with delayed scaling the bytes of a pickle."""
        is_delayed = self.fp8_meta["recipe"].delayed()
        state = pickle.dumps({"recipe": self.fp8_meta["recipe"]}) if is_delayed else b""
        return torch.tensor(list(state), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert not state.numel(), "a pickle, which Transformer Engine does not load by default"


class QuantisedBlock(nn.Module):
    def __init__(self, dim: int, hidden: int, recipe: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, dtype=dtype)
        self.up = QuantisedLinear(dim, hidden, recipe, dtype=dtype)
        self.down = QuantisedLinear(hidden, dim, recipe, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class QuantisedStack(nn.Module):
    """Blocks of quantised layers between a plain embedding of the input and a plain head; a scalar
    loss. Weights of 160 x 96 divide into MXFP8's blocks, and not into larger ones."""

    def __init__(
        self,
        recipe: str,
        *,
        num_blocks: int = 3,
        dim: int = 96,
        hidden: int = 160,
        features: int = 7,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Linear(features, dim, dtype=dtype)
        self.blocks = nn.ModuleList(
            [QuantisedBlock(dim, hidden, recipe, dtype) for _ in range(num_blocks)]
        )
        self.norm = nn.LayerNorm(dim, dtype=dtype)
        self.head = nn.Linear(dim, features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the difference between x, (batch, features), and the output."""
        y = self.run_blocks(self.embed(x.to(self.dtype)))
        return (self.head(self.norm(y)).float() - x.float()).square().mean()

    def run_blocks(self, y: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(y)
        return y

    def quantised_layers(self) -> list[QuantisedLinear]:
        return [module for module in self.modules() if isinstance(module, QuantisedLinear)]

    def update_scales(self) -> None:
        for layer in self.quantised_layers():
            layer.update_scales()
