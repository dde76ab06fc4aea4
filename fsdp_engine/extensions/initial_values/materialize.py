"""Allocation and initialization of models on the meta device, one unit at a time.

A module is initialized by its ``reset_parameters``, which torch's own modules have. If the model
has a method ``_init_weights(module)``, like those of ``transformers`` and others, it is called
afterwards, also for modules without ``reset_parameters``. Modules are initialized after their
children, as in their constructors: a parent may overwrite values of its children. A parent whose
parameters are in several units is not initialized, because they are never allocated together.

Layers with PEFT's adapters initialize the adapters (``extensions/adapters``).

A module with parametrized tensors (``nn.utils.parametrize``) cannot be written to. It is
initialized as a module without parametrizations, and the values are converted to the tensors that
its parametrizations store.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from fsdp_engine.accelerator import forked_generators
from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.codecs.base import param_class_of
from fsdp_engine.extension_list import find_module
from fsdp_engine.memory.allocator import empty, empty_like

# Offset of the seed of adapters, whose random values must differ from those of their unit.
_OF_ADAPTERS = 1 << 20


def find_lacking(model: nn.Module) -> str:
    """Find a module that cannot initialize itself.

    Returns:
        The text of an error that names a module with meta tensors but without
        ``reset_parameters``, in a model without ``_init_weights``. "" if there is none.
    """
    if callable(getattr(model, "_init_weights", None)):
        return ""
    covered: Collection[nn.Module] | None = None
    # A shared buffer may be initialized by any module that has it.
    given = {
        id(buffer)
        for module in model.modules()
        if callable(getattr(module, "reset_parameters", None))
        for buffer in module._buffers.values()
    }
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # The parametrized module initializes its tensors.
        own = [*module._parameters.items(), *module._buffers.items(), *_originals(module)]
        metas = [
            attribute for attribute, t in own if t is not None and t.is_meta and id(t) not in given
        ]
        if metas and not callable(getattr(module, "reset_parameters", None)):
            if covered is None:
                adapters = _find_adapters(model)
                covered = () if adapters is None else adapters.covered
            if module not in covered:
                return (
                    f"{name or 'the root module'} ({type(module).__name__}): expected a method "
                    f"reset_parameters() that gives {', '.join(metas)} values; found none, and "
                    "the model is on the meta device on all ranks. If rank 0 builds the model with "
                    "values, the other ranks get these values"
                )
    return ""


def _find_adapters(model: nn.Module) -> Any:
    """Returns the layers of ``model`` that initialize their adapters. None: the extension
    ``adapters`` was deleted."""
    adapters = find_module("adapters.peft_names")
    return None if adapters is None else adapters.AdapterLayers(model)


class ModuleTree:
    """Finds the modules that can be initialized when some parameters are allocated.

    Args:
        model: The model, before any of its parameters is replaced.

    Attributes:
        model: The model.
        adapters: The layers that initialize their adapters. None: the extension was deleted.
        covered: Modules with tensors of adapters, which the adapters' layers initialize.
        buffers: The buffers on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapters = _find_adapters(model)
        self.covered: Collection[nn.Module] = () if self.adapters is None else self.adapters.covered
        self.buffers = MetaBuffers(model)
        self._modules: dict[int, nn.Module] = {}  # children first, in the order of construction
        nn.Module.apply(model, self._enter)
        self._parents: dict[int, list[nn.Module]] = {key: [] for key in self._modules}
        for module in self._modules.values():
            for child in module.children():
                self._parents[id(child)].append(module)
        self._place = {key: place for place, key in enumerate(self._modules)}
        beneath: dict[int, set[int]] = {key: set() for key in self._modules}
        for module in self._modules.values():
            for param in module._parameters.values():
                for each in self._upwards(module) if param is not None else ():
                    beneath[id(each)].add(id(param))
        self._num_beneath = {key: len(params) for key, params in beneath.items()}

    def _enter(self, module: nn.Module) -> None:
        self._modules.setdefault(id(module), module)

    def _upwards(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yields ``module`` and all modules that contain it, some of them more than once."""
        yield module
        for parent in self._parents[id(module)]:
            yield from self._upwards(parent)

    def ready(self, records: Sequence[ParamRecord]) -> list[nn.Module]:
        """Returns the modules that own any of these parameters, and those that contain no other
        parameters, children first."""
        hits: Counter[int] = Counter()
        found: set[int] = set()
        for record in records:
            holders = [module for module, _ in record.holders]
            found.update(map(id, holders))
            hits.update({id(each) for module in holders for each in self._upwards(module)})
        whole = {key for key, count in hits.items() if count == self._num_beneath[key]}
        return [self._modules[key] for key in sorted(found | whole, key=self._place.__getitem__)]


def materialize(
    tree: ModuleTree,
    records: Sequence[ParamRecord],
    device: torch.device,
    seed: int,
    base_seed: int = 0,
    *,
    is_empty: bool = False,
) -> None:
    """Allocate and initialize the meta parameters of one unit.

    Args:
        tree: The tree of the model.
        records: The parameters of the unit. ``record.param`` and the modules get the new ones.
        device: The device of the new parameters.
        seed: Equal on all ranks, so that all ranks draw the same values.
        base_seed: Equal on all ranks and for all units. Experts are seeded by their names among
            all experts, so their values do not depend on the number of ranks that share them.
        is_empty: Fill parameters with NaN (or 0 if they are not floats); they are loaded later.
            Modules with buffers are initialized anyway, since not all buffers are saved.

    Raises:
        ValueError: A tensor was left without values, or a parametrization cannot convert a value to
            the tensors that it stores.
    """
    metas = [record for record in records if record.param.is_meta]
    # Containers have no tensors of their own, but may initialize those of their children.
    modules = {module: _metas_of(module) for module in tree.ready(metas)}
    originals = [record.param for record in metas]
    for record in metas:
        # For a DTensor use the global shape, so that values are those of the model without tensor
        # parallelism. Modules initialize plain tensors, whatever the class of the parameter.
        param = record.param
        param_class = param_class_of(param)
        marks = vars(record.shard) if param_class is None else param_class.marks(param)
        shape = tuple(param.shape)
        if record.expert is not None and record.expert.is_sharded:
            shape = record.expert.whole_shape(shape)
        if is_empty and not any(module._buffers for module, _ in record.holders):
            # Expand one element, so that memory of the size of the model is never allocated.
            values = _valueless(empty((), param.dtype, device)).expand(shape)
        elif record.spread is None and not _is_cut(record) and param_class is None:
            values = empty_like(param, device)
        else:
            values = empty(shape, param.dtype, device)
        if is_empty and all(values.stride()):
            _valueless(values)
        real = nn.Parameter(values, requires_grad=param.requires_grad)
        real.__dict__.update(marks)
        _replace(record, real)
    if is_empty:
        modules = {module: names for module, names in modules.items() if module._buffers}
    for module in modules:
        tree.buffers.allocate(module, device)
    own_seeds = _seeds_of_experts(modules, metas, base_seed)
    others = {module: n for module, n in modules.items() if module not in tree.covered}
    _reset(tree, others, device, seed, own_seeds, is_empty=is_empty)
    if not is_empty and tree.adapters is not None:
        _begin_adapters(tree.adapters, metas, device, seed + _OF_ADAPTERS)
    for record, original in zip(metas, originals, strict=True):
        if _is_cut(record):
            _keep_own_experts(record)
        if (param_class := param_class_of(original)) is not None:
            made = param_class.made_of(original, record.param.detach())
            real = nn.Parameter(made, original.requires_grad)
            vars(real).update(param_class.marks(original))
            _replace(record, real)


def _replace(record: ParamRecord, param: nn.Parameter) -> None:
    """Set the parameter of a record and of its modules."""
    record.param = param
    for module, attribute in record.holders:
        module._parameters[attribute] = param


def _begin_adapters(
    adapters: Any, records: Sequence[ParamRecord], device: torch.device, seed: int
) -> None:
    """Initialize the parameters of adapters; all others of the unit are initialized already."""
    names = {alias: record for record in records for alias in record.aliases}
    places = adapters.places(names)
    if not places:
        return
    own = [record for name, record in names.items() if adapters.place_of(name)]
    with forked_generators(device), torch.no_grad():
        torch.manual_seed(seed)
        for record in own:
            _valueless(record.param)
        for place in places:
            adapters.draw(place)
        for place in places:
            if adapters.follows_base(place):
                _check_in_one_unit(place[0], adapters.layer(place))
                adapters.derive(place)
    for record in own:
        if record.param.isnan().any():
            raise ValueError(
                f"{record.name}: expected PEFT to give it values, since it is on the meta device; "
                "found that it does not"
            )


def _check_in_one_unit(name: str, layer: nn.Module) -> None:
    for key, param in layer.named_parameters():
        if param.is_meta or isinstance(param, DTensor):
            raise ValueError(
                f"{name}: expected all parameters of a layer with adapters on the meta device in "
                "one unit, since initial values of adapters are computed from its weights; found "
                f"{key} in another unit"
            )


def _valueless(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def materialize_buffers(
    tree: ModuleTree,
    device: torch.device,
    seed: int,
    *,
    values: bool = True,
    is_empty: bool = False,
) -> None:
    """Allocate and initialize the buffers of modules that own no meta parameter.

    Args:
        tree: The tree of the model.
        device: The device of the new buffers.
        seed: Equal on all ranks.
        values: False: only allocate memory, for values of another rank.
        is_empty: Do not initialize buffers that are saved.
    """
    lonely = {module: names for module in tree.model.modules() if (names := _metas_of(module))}
    for module in lonely:
        tree.buffers.allocate(module, device)
    if values:
        _reset(tree, lonely, device, seed, is_empty=is_empty)
    if values and not is_empty:
        tree.buffers.check_values()


def check_attributes(model: nn.Module) -> None:
    """Check that no module has a meta tensor that is neither a parameter nor a buffer. Such a
    tensor gets no values from other ranks, and the first forward would fail on this rank only.

    Raises:
        ValueError: A module has such a tensor; names the attribute.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OF_MODULES or not _contains_meta(value):
                continue
            raise ValueError(
                f"{f'{prefix}.{name}' if prefix else name}: expected tensors on the meta device to "
                "be parameters and buffers, which get values; found one in a plain attribute. "
                "Register it (register_buffer(..., persistent=False)), or set it in "
                "reset_parameters()"
            )


_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def _contains_meta(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(_contains_meta, value.values()))
    return isinstance(value, list | tuple) and any(map(_contains_meta, value))


class MetaBuffers:
    """Buffers of a model on the meta device, and the buffers that replace them.

    A buffer that several modules share stays shared: memory is allocated for the first module, and
    the others get the same tensor. Any of the modules may initialize it.

    Args:
        model: The model, before any of its buffers is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the meta tensor
        self._model = model
        self._shared: set[int] = set()
        self._num_modules = Counter(
            id(buffer)
            for module in model.modules()
            for buffer in module._buffers.values()
            if buffer is not None and buffer.is_meta
        )

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """Replace the meta buffers of a module by allocated ones."""
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in self._real:
                real = empty_like(buffer, device)
                self._real[id(buffer)] = buffer, real
                if self._num_modules[id(buffer)] > 1 and buffer.is_floating_point():
                    self._shared.add(id(_valueless(real)))
            module._buffers[name] = self._real[id(buffer)][1]

    def is_shared(self, buffer: torch.Tensor | None) -> bool:
        """Returns whether several modules share this allocated buffer."""
        return id(buffer) in self._shared

    def check_values(self) -> None:
        """Check shared buffers after all modules have been initialized.

        Raises:
            ValueError: None of the modules that share a buffer has initialized it; names the
                buffer.
        """
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and self.is_shared(buffer) and buffer.isnan().any():
                    raise ValueError(
                        f"{f'{prefix}.{name}' if prefix else name}: expected one of its modules to "
                        "give it values, since it is on the meta device; found that none does"
                    )


def _metas_of(module: nn.Module) -> list[str]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, tensor in own if tensor is not None and tensor.is_meta]


def _is_cut(record: ParamRecord) -> bool:
    return record.expert is not None and record.expert.is_sharded


def _keep_own_experts(record: ParamRecord) -> None:
    """Replace a parameter with the weights of all experts by the shard of this rank."""
    expert, whole = record.expert, record.param
    assert expert is not None
    values = whole.detach().chunk(expert.size)[expert.rank].clone()
    own = nn.Parameter(values, requires_grad=whole.requires_grad)
    own.__dict__.update(whole.__dict__)
    _replace(record, own)


def _seeds_of_experts(
    modules: Iterable[nn.Module], records: Sequence[ParamRecord], base_seed: int
) -> dict[nn.Module, int]:
    """Returns a seed for each module all of whose parameters belong to experts."""
    names = {
        id(record.param): record.expert.rename(record.name)
        for record in records
        if record.expert is not None
    }
    if not names:
        return {}
    seeds = {}
    for module in modules:
        found = [names.get(id(param)) for param in module.parameters()]
        if found and None not in found:
            text = "\n".join([str(base_seed), *map(str, found)])
            seeds[module] = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) >> 1
    return seeds


def _reset(
    tree: ModuleTree,
    modules: Mapping[nn.Module, list[str]],
    device: torch.device,
    seed: int,
    own_seeds: Mapping[nn.Module, int] | None = None,
    *,
    is_empty: bool = False,
) -> None:
    """Initialize modules.

    Args:
        tree: The tree of the model.
        modules: The modules, children first, with the names of their tensors without values.
        device: The device of the tensors.
        seed: The seed of all modules together.
        own_seeds: Seeds of modules that are seeded separately.
        is_empty: Initialize only modules with buffers that are not saved.
    """
    if not modules:
        return
    init_weights = getattr(tree.model, "_init_weights", None)
    with forked_generators(device), torch.no_grad():
        torch.manual_seed(seed)
        for module, names in modules.items():
            if isinstance(module, ParametrizationList):
                continue  # The parametrized module is initialized later.
            if any(tensor.is_meta for _, tensor in _originals(module)):
                continue  # The originals belong to another unit.
            if is_empty:
                names = [name for name in names if name in module._non_persistent_buffers_set]
                if not names:
                    continue
            # Another module may have initialized a shared buffer already.
            names = [n for n in names if not tree.buffers.is_shared(module._buffers.get(n))]
            reset = _reset_parametrized if is_parametrized(module) else _reset_module
            if own_seeds is None or module not in own_seeds:
                reset(module, names, init_weights)
                continue
            with forked_generators(device):
                torch.manual_seed(own_seeds[module])
                reset(module, names, init_weights)


InitWeights = Callable[[nn.Module], Any] | None


def _reset_module(module: nn.Module, names: list[str], init_weights: InitWeights) -> None:
    own = {**module._parameters, **module._buffers}
    # A parameter of another unit may still be on the meta device.
    real = {name: t for name in names if (t := own[name]) is not None and not t.is_meta}
    floats = {name: tensor for name, tensor in real.items() if tensor.is_floating_point()}
    for tensor in floats.values():
        tensor.fill_(torch.nan)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    if callable(init_weights):
        init_weights(module)
    for name in floats:
        # Look it up by name: the module may have replaced the tensor.
        tensor = getattr(module, name)
        if tensor.isnan().any():
            who = "its reset_parameters()" if callable(reset) else "the model's _init_weights()"
            raise ValueError(
                f"{type(module).__name__}.{name}: expected {who} to give it values, since it is on "
                "the meta device; found that it does not"
            )


def _originals(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors that the parametrizations of a module store, by name."""
    if not is_parametrized(module):
        return []
    lists: Any = module.parametrizations
    return [
        (f"parametrizations.{name}.{key}", tensor)
        for name, kept in lists.items()
        for key, tensor in kept._parameters.items()
    ]


def _reset_parametrized(module: nn.Module, names: list[str], init_weights: InitWeights) -> None:
    """Initialize a plain module of the original class, then assign its values to ``module``."""
    lists: Any = module.parametrizations
    plain: nn.Module = object.__new__(type(module).__bases__[0])
    plain.__dict__ = {
        **module.__dict__,
        "_parameters": dict(module._parameters),
        "_modules": {k: v for k, v in module._modules.items() if k != "parametrizations"},
    }
    for name in lists:
        computed = getattr(module, name)
        values = empty_like(computed, computed.device)
        plain._parameters[name] = nn.Parameter(values, requires_grad=False)
    resets = callable(getattr(plain, "reset_parameters", None))
    _reset_module(plain, [*names, *lists], None if resets else init_weights)
    for name in lists:
        value = plain._parameters[name]
        assert value is not None
        try:
            setattr(module, name, value.detach())
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise ValueError(
                f"{type(plain).__name__}.{name}: expected a parametrization with right_inverse, "
                f"which computes the stored tensors of an initial value, since the model is on the "
                f"meta device; found one without, or one that failed: {error}"
            ) from error
    if resets and callable(init_weights):
        init_weights(module)  # Called as at construction; its changes to computed tensors are lost.
