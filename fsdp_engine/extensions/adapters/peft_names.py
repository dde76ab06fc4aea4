"""PEFT's adapters in a model: names of their tensors in files, and their initialization.

This is the only file that imports ``peft``, and it does so only if the program has imported it
already, since otherwise no model can have PEFT's adapters. PEFT's own functions map the names: they
select and rename entries of a ``state_dict``, and are called with a dict of names as the values.

    in the model, after base_model.model.   base model's file      adapter's file
    -------------------------------------   --------------------   ----------------------------
    q.base_layer.weight                     q.weight
    q.lora_A.default.weight                                        base_model.model.q.lora_A.weight
    head.original_module.weight             head.weight
    head.modules_to_save.default.weight     head.weight            base_model.model.head.weight

Layers with adapters initialize their adapters (LoRA: A random, B zero). The modules that hold the
tensors, such as plain ``nn.Linear``, would draw other values. Therefore, if a model was built on
the meta device, the layer initializes the tensors: first those that are drawn
(:meth:`AdapterLayers.draw`), then those that are computed from base weights
(:meth:`AdapterLayers.derive`: DoRA's magnitudes, rows of embeddings, copies of modules).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

# Name of a layer in the model, and name of one of its adapters.
Place = tuple[str, str]


def peft_model(model: nn.Module) -> tuple[Any, str]:
    """Find the outermost PEFT model in ``model``.

    Returns:
        The PEFT model, or None if there is none, and the prefix of its names in ``model``.
    """
    if "peft" not in sys.modules:
        return None, ""
    from peft import PeftModel

    for name, module in model.named_modules():
        if isinstance(module, PeftModel):
            return module, f"{name}." if name else ""
    return None, ""


def base_names(model: nn.Module) -> tuple[nn.Module, dict[str, tuple[str, ...]]]:
    """Find the base model, and the names of its tensors in ``model``.

    If adapters train copies of a module, its tensors have several names: one in the original module
    and one in each copy. All are initialized from the base model's tensors.

    Returns:
        The base model, and for each name in it the names in ``model``.
    """
    found, _ = peft_model(model)
    if found is None:
        return model, {name: (name,) for name in model.state_dict(keep_vars=True)}
    from peft import get_base_model_state_dict
    from peft.utils import ModulesToSaveWrapper

    # The module whose state dict PEFT filters.
    inner = (
        found.base_model if found.active_peft_config.is_prompt_learning else found.base_model.model
    )
    paths = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    start = f"{paths[id(inner)]}."

    def replace_tensors(module: nn.Module, state: dict[str, Any], prefix: str, data: Any) -> None:
        state.update({name: start + name for name in state})

    handle = inner.register_state_dict_post_hook(replace_tensors)
    try:
        names: Any = get_base_model_state_dict(found)
    finally:
        handle.remove()
    copies: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for adapter in module.modules_to_save:
                for name in module.original_module.state_dict(keep_vars=True):
                    copied = f"{path}.modules_to_save.{adapter}.{name}"
                    copies.setdefault(f"{path}.original_module.{name}", []).append(copied)
    base: nn.Module = found.get_base_model()
    return base, {base_name: (name, *copies.get(name, ())) for base_name, name in names.items()}


def adapter_names(
    model: nn.Module, adapter: str, *, embeddings: bool | Literal["auto"] = False
) -> dict[str, str]:
    """Map the names of an adapter's tensors in its file to their names in ``model``.

    Args:
        model: A module that contains a PEFT model.
        adapter: Name of the adapter.
        embeddings: Include the base model's embeddings. "auto": include them if PEFT would save
            them (PEFT may read the base model's folder to decide).
    """
    from peft import get_peft_model_state_dict

    found, prefix = peft_model(model)
    own = {
        name.removeprefix(prefix): name
        for name in model.state_dict(keep_vars=True)
        if name.startswith(prefix)
    }
    if found.peft_config[adapter].is_prompt_learning:
        return _prompt_names(found, own, adapter)
    names: dict[str, str] = get_peft_model_state_dict(
        found, state_dict=own, adapter_name=adapter, save_embedding_layers=embeddings
    )
    return names


def _prompt_names(found: Any, own: Mapping[str, str], adapter: str) -> dict[str, str]:
    """Returns :func:`adapter_names` of prompt learning methods, whose state PEFT computes from the
    model."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    names = {"prompt_embeddings": own[f"prompt_encoder.{adapter}.embedding.weight"]}
    for path, module in found.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            start, wrapper = f"{path}.", cast(Any, module)
            state = {k.removeprefix(start): v for k, v in own.items() if k.startswith(start)}
            kept = wrapper.adapter_state_dict(adapter, state)
            names |= {start + name: place for name, place in kept.items()}
    return names


def check_is_stored(model: nn.Module, adapter: str) -> None:
    """Check that an adapter can be restored from the tensors that PEFT stores.

    Raises:
        ValueError: The stored tensors are computed from the trained ones (prompts that are outputs
            of a network).
    """
    found, _ = peft_model(model)
    if found.peft_config[adapter].is_prompt_learning:
        encoder = found.prompt_encoder[adapter]
        own = [name for name, _ in encoder.named_parameters()]
        if own != ["embedding.weight"]:
            raise ValueError(
                f"adapter: expected one whose trained tensors PEFT stores; found {adapter!r}, a "
                f"{type(encoder).__name__} with {', '.join(own)}, of which PEFT stores only the "
                "output"
            )


class AdapterLayers:
    """PEFT's layers in a model, which initialize their adapters.

    Args:
        model: A module with or without PEFT's layers.

    Attributes:
        covered: Modules that hold tensors of adapters, which the adapters' layers initialize.
    """

    def __init__(self, model: nn.Module) -> None:
        self._peft, prefix = peft_model(model)
        self._layers: dict[str, Any] = {}
        self.covered: set[nn.Module] = set()
        if self._peft is None:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        for name, module in self._peft.named_modules():
            parts: Iterable[nn.Module] = ()
            if isinstance(module, BaseTunerLayer):
                children = cast(nn.Module, module).named_children()
                inner = [each for key, each in children if key != "base_layer"]
                parts = (each for child in inner for each in child.modules())
            elif isinstance(module, ModulesToSaveWrapper):
                parts = module.modules_to_save.modules()
            elif name == "prompt_encoder":
                parts = module.modules()
            else:
                continue
            self._layers[prefix + name] = module
            self.covered.update(parts)

    def places(self, names: Iterable[str]) -> list[Place]:
        """Returns the adapters that own any of these tensors, in the order of the layers."""
        found = {place for name in names if (place := self.place_of(name)) is not None}
        return [place for place in self._all_places() if place in found] if found else []

    def place_of(self, name: str) -> Place | None:
        """Returns the adapter that owns a tensor; None if no adapter owns it."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if path in self._layers:
                adapter = self._adapter_at(self._layers[path], parts[end:])
                return (path, adapter) if adapter else None
        return None

    def draw(self, place: Place) -> None:
        """Initialize the tensors of an adapter as PEFT does, except those that :meth:`derive` sets.

        Raises:
            ValueError: PEFT initializes the adapter from base weights, or its initialization is not
                supported here.
        """
        from peft.tuners.ia3 import IA3Layer
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        path, adapter = place
        layer, config = self._layers[path], self._peft.peft_config[adapter]
        if isinstance(layer, ModulesToSaveWrapper):
            return
        if isinstance(layer, LoraLayer) and type(layer).reset_lora_parameters is (
            LoraLayer.reset_lora_parameters
        ):
            method = config.init_lora_weights
            if method is not True and method is not False and method != "gaussian":
                raise ValueError(_unsupported(path, adapter, f"init_lora_weights={method!r}"))
            with _drawn_as_by_peft(layer, adapter):
                # PEFT draws these twice: when it creates them, and when it initializes them.
                # Drawing once would change all random numbers that follow.
                for attribute in ("lora_A", "lora_B"):
                    _reset_parameters(getattr(layer, attribute), adapter)
                for attribute in ("lora_embedding_A", "lora_embedding_B"):
                    if adapter in (rows := getattr(layer, attribute)):
                        rows[adapter].normal_()
                layer.reset_lora_parameters(adapter, method)
        elif isinstance(layer, IA3Layer):
            with _drawn_as_by_peft(layer, adapter):
                layer.ia3_l[adapter].normal_()
                if config.init_ia3_weights:
                    layer.reset_ia3_parameters(adapter)
        elif path.rpartition(".")[2] == "prompt_encoder":
            _draw_prompt(path, adapter, layer, config)
        else:
            raise ValueError(_unsupported(path, adapter, type(layer).__name__))

    def follows_base(self, place: Place) -> bool:
        """Returns whether any tensor of an adapter is computed from base weights."""
        from peft.utils import ModulesToSaveWrapper

        path, adapter = place
        layer = self._layers[path]
        return isinstance(layer, ModulesToSaveWrapper) or _has_formula(layer, adapter)

    def derive(self, place: Place) -> None:
        """Compute the tensors of an adapter that depend on base weights.

        The tensors of the layer must be unsharded, and the adapter's other tensors initialized.
        """
        from peft.utils import ModulesToSaveWrapper

        path, adapter = place
        layer = self._layers[path]
        if isinstance(layer, ModulesToSaveWrapper):
            layer.modules_to_save[adapter].load_state_dict(layer.original_module.state_dict())
            return
        magnitudes = _magnitudes(layer)
        if adapter in _token_rows(layer):
            rows = layer.get_base_layer().weight[layer.token_indices[adapter]]
            layer.trainable_tokens_delta[adapter].copy_(rows)
            layer.trainable_tokens_original[adapter].copy_(rows)
        if adapter not in magnitudes:
            return
        proxy, config = _DoraProxy(layer), self._peft.peft_config[adapter]
        layer.lora_variant[adapter].init(proxy, adapter_name=adapter, config=config)
        found = proxy.lora_magnitude_vector[adapter].weight
        magnitudes[adapter].weight.copy_(found.to(_dtype_of_base(layer)))

    def layer(self, place: Place) -> nn.Module:
        """Returns the layer of an adapter."""
        found: nn.Module = self._layers[place[0]]
        return found

    def all_following(self) -> list[Place]:
        """Returns the adapters with tensors that are computed from base weights, other than copies
        of modules."""
        return [each for each in self._all_places() if _has_formula(self.layer(each), each[1])]

    def _all_places(self) -> list[Place]:
        if self._peft is None:
            return []
        return [(path, each) for path in self._layers for each in self._peft.peft_config]

    def _adapter_at(self, layer: Any, below: list[str]) -> str:
        """Returns the adapter that owns the tensor at path ``below`` of a layer; "": none does."""
        known = self._peft.peft_config
        at = 0 if layer is getattr(self._peft, "prompt_encoder", None) else 1
        is_own = below[0] not in ("base_layer", "original_module")
        return below[at] if is_own and len(below) > at and below[at] in known else ""


class _DoraProxy:
    """Proxy of a DoRA layer, to which PEFT's initialization adds the module of magnitudes. The
    layer itself may be sharded, so it must not be changed."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.lora_magnitude_vector = dict(_magnitudes(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _has_formula(layer: Any, adapter: str) -> bool:
    return adapter in _magnitudes(layer) or adapter in _token_rows(layer)


def _token_rows(layer: Any) -> Any:
    """Returns the rows of an embedding that are trained separately, by adapter."""
    return getattr(layer, "trainable_tokens_delta", ())


def _magnitudes(layer: Any) -> Any:
    found = getattr(layer, "lora_magnitude_vector", None)
    return {} if found is None else found


def _reset_parameters(by_adapter: Mapping[str, nn.Module], adapter: str) -> None:
    for module in by_adapter[adapter].modules() if adapter in by_adapter else ():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


@contextmanager
def _drawn_as_by_peft(layer: Any, adapter: str) -> Iterator[None]:
    """Context in which an adapter has the default dtype, in which PEFT draws its values.

    At exit the values are rounded to the dtype of the base layer. PEFT, too, casts adapters to that
    dtype, and later casts those in fp16 and bf16 back to fp32.
    """
    default, of_base = torch.get_default_dtype(), _dtype_of_base(layer)
    own = [(params, name, params[name]) for params, name in _tensors_of(layer, adapter)]
    for params, name, tensor in own:
        if tensor.dtype != default:
            params[name] = tensor.detach().to(default)
    try:
        yield
    finally:
        for params, name, tensor in own:
            tensor.copy_(params[name].to(of_base))
            params[name] = tensor


def _tensors_of(layer: Any, adapter: str) -> list[tuple[dict[str, Any], str]]:
    """Returns the floating-point parameters of an adapter of a layer: for each the dict of the
    module that owns it, and its name in the dict."""
    found: list[tuple[dict[str, Any], str]] = []
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        parts = getattr(layer, attribute, None)
        if isinstance(parts, nn.ParameterDict) and adapter in parts:
            found.append((parts._parameters, adapter))
        elif isinstance(parts, nn.ModuleDict) and adapter in parts:
            for module in parts[adapter].modules():
                found += [(module._parameters, name) for name in module._parameters]
    return [
        (params, name)
        for params, name in found
        if params[name] is not None and params[name].is_floating_point()
    ]


def _dtype_of_base(layer: Any) -> torch.dtype:
    base = layer.get_base_layer()
    base = base.out_proj if isinstance(base, nn.MultiheadAttention) else base
    weight = getattr(base, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return weight.dtype
    return torch.float32


def _draw_prompt(path: str, adapter: str, encoders: Any, config: Any) -> None:
    _reset_parameters(encoders, adapter)
    method = getattr(config, "prompt_tuning_init", None)
    if method is not None and method != "RANDOM":
        raise ValueError(_unsupported(path, adapter, f"prompt_tuning_init={method}"))
    if getattr(config, "init_weights", None) == "zero":  # prefix tuning
        last: Tensor | nn.Module = list(encoders[adapter].modules())[-1]
        for tensor in last.parameters() if isinstance(last, nn.Module) else ():
            torch.nn.init.zeros_(tensor)


def _unsupported(path: str, adapter: str, found: str) -> str:
    return (
        f"{path}: expected an adapter on the meta device to be one of LoRA (init_lora_weights "
        f"True, False or 'gaussian'), IA3 or prompts, whose initial values are random; found "
        f"{found} of {adapter!r}. Build the model with values"
    )
