"""Allocates and initializes models on the meta device, one unit at a time.

A module is initialized by ``reset_parameters``, as torch's own modules are. If the model has a
method ``_init_weights(module)``, as those of ``transformers`` and many others, it is called after
that, also for modules without ``reset_parameters``. Modules are initialized after their children,
as in their constructors: a parent may overwrite values of its children. A parent whose parameters
are in several units is not initialized, because they are never allocated at the same time.

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

# Adapters draw other values than the unit that they are in.
_OF_ADAPTERS = 1 << 20


def find_lacking(model: nn.Module) -> str:
    """Find what cannot give itself values.

    Returns:
        The text of an error, or "": it names a module with meta tensors that has no
        ``reset_parameters``, in a model without an ``_init_weights``.
    """
    if callable(getattr(model, "_init_weights", None)):
        return ""
    covered: Collection[nn.Module] | None = None
    # Any module that has a buffer may give it its values.
    given = {
        id(buffer)
        for module in model.modules()
        if callable(getattr(module, "reset_parameters", None))
        for buffer in module._buffers.values()
    }
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # the module that has it gives it values
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
                    "the model is on the meta device on all ranks. With values on rank 0 alone, "
                    "the other ranks get those"
                )
    return ""


def _find_adapters(model: nn.Module) -> Any:
    """Returns the layers of ``model`` that give their adapters values; None: the extension for
    adapters was deleted."""
    adapters = find_module("adapters.peft_names")
    return None if adapters is None else adapters.AdapterLayers(model)


class ModuleTree:
    """Which modules can give values once some parameters are real. Made once for a model.

    Args:
        model: before any of its parameters is replaced.

    Attributes:
        adapters: layers that give their adapters values; None: there is no extension for them.
        buffers: those on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapters = _find_adapters(model)
        self.covered: Collection[nn.Module] = () if self.adapters is None else self.adapters.covered
        self.buffers = MetaBuffers(model)
        self._modules: dict[int, nn.Module] = {}  # children first, as they were built
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
        """``module`` and all that it is in, some of them more than once."""
        yield module
        for parent in self._parents[id(module)]:
            yield from self._upwards(parent)

    def ready(self, records: Sequence[ParamRecord]) -> list[nn.Module]:
        """Modules that own one of these parameters, or have no others; children first."""
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
    """Give the meta parameters of one unit real values.

    Args:
        tree: The tree of the whole model.
        records: the unit's parameters; ``record.param`` and the modules get the real ones.
        device: where.
        seed: the same on all ranks, so that all ranks draw the same values.
        base_seed: the same on all ranks, and for all units: experts draw by their names among all
            experts, so that they have the same values however many ranks they are cut over.
        is_empty: parameters are NaN (0 where they are no floats), to be loaded later. Modules
            with buffers give themselves values all the same, since not all buffers are saved.

    Raises:
        ValueError: a tensor was left without values, or a parametrisation cannot turn
            a value into what it keeps.
    """
    metas = [record for record in records if record.param.is_meta]
    # Containers among them get no tensors of their own, but may give their children values.
    modules = {module: _metas_of(module) for module in tree.ready(metas)}
    originals = [record.param for record in metas]
    for record in metas:
        # Of a DTensor the global tensor, so that values are those of the model without it.
        # Modules give plain tensors their values, whatever their class.
        param = record.param
        param_class = param_class_of(param)
        marks = vars(record.shard) if param_class is None else param_class.marks(param)
        shape = tuple(param.shape)
        if record.expert is not None and record.expert.is_cut:
            shape = record.expert.whole_shape(shape)
        if is_empty and not any(module._buffers for module, _ in record.holders):
            # One element stands for all: nothing as large as the model is ever there.
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
    """``param`` is the record's, and that of its modules, from now on."""
    record.param = param
    for module, attribute in record.holders:
        module._parameters[attribute] = param


def _begin_adapters(
    adapters: Any, records: Sequence[ParamRecord], device: torch.device, seed: int
) -> None:
    """Values for those of the records that are an adapter's; all others of a unit have theirs."""
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
                f"{name}: expected a layer with adapters within one unit, since some of them begin "
                f"with what follows from its weights, and it is on the meta device; found {key} in "
                "another"
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
    """Real values for modules that own meta buffers but no meta parameter.

    Args:
        tree: The tree of the whole model.
        device: where.
        seed: the same on all ranks.
        values: False: memory alone, for another rank's values.
        is_empty: buffers that are saved need none.
    """
    lonely = {module: names for module in tree.model.modules() if (names := _metas_of(module))}
    for module in lonely:
        tree.buffers.allocate(module, device)
    if values:
        _reset(tree, lonely, device, seed, is_empty=is_empty)
    if values and not is_empty:
        tree.buffers.check_values()


def check_attributes(model: nn.Module) -> None:
    """Check that no module has a tensor on the meta device that is no parameter and no buffer. Such
    a tensor gets no values from other ranks, and the first forward would fail on this rank only.

    Raises:
        ValueError: one has; names the attribute.
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
    """Buffers of a model on the meta device, and the real ones in their place.

    A buffer that several modules have stays one: the first module gets memory for it, and the
    others get the same tensor. Any of them may give it its values.

    Args:
        model: before any of its buffers is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the key's tensor
        self._model = model
        self._shared: set[int] = set()
        self._num_modules = Counter(
            id(buffer)
            for module in model.modules()
            for buffer in module._buffers.values()
            if buffer is not None and buffer.is_meta
        )

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """Replace the meta buffers of a module."""
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
        """Whether several modules have this real buffer."""
        return id(buffer) in self._shared

    def check_values(self) -> None:
        """Check the buffers that several modules have, when all modules have been initialized.

        Raises:
            ValueError: none of its modules gave a buffer its values.
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
    return record.expert is not None and record.expert.is_cut


def _keep_own_experts(record: ParamRecord) -> None:
    """Of a tensor of all experts this rank's part takes its place."""
    expert, whole = record.expert, record.param
    assert expert is not None
    values = whole.detach().chunk(expert.size)[expert.rank].clone()
    own = nn.Parameter(values, requires_grad=whole.requires_grad)
    own.__dict__.update(whole.__dict__)
    _replace(record, own)


def _seeds_of_experts(
    modules: Iterable[nn.Module], records: Sequence[ParamRecord], base_seed: int
) -> dict[nn.Module, int]:
    """Seeds of those modules that hold experts and nothing else."""
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
    """``modules``: children first, with the names of tensors that have no values yet.

    ``own_seeds``: of those that do not draw after the others. ``is_empty``: saved tensors are
    loaded later.
    """
    if not modules:
        return
    init_weights = getattr(tree.model, "_init_weights", None)
    with forked_generators(device), torch.no_grad():
        torch.manual_seed(seed)
        for module, names in modules.items():
            if isinstance(module, ParametrizationList):
                continue  # the module that has it comes later
            if any(tensor.is_meta for _, tensor in _originals(module)):
                continue  # another unit has them
            if is_empty:
                names = [name for name in names if name in module._non_persistent_buffers_set]
                if not names:
                    continue
            # Another module may have given a shared buffer its values.
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
    # A parameter that another unit has may still be on the meta device.
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
        # By name: a module may have put another tensor there.
        tensor = getattr(module, name)
        if tensor.isnan().any():
            who = "its reset_parameters()" if callable(reset) else "the model's _init_weights()"
            raise ValueError(
                f"{type(module).__name__}.{name}: expected {who} to give it values, since it is on "
                "the meta device; found that it does not"
            )


def _originals(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What the parametrisations of a module keep, by name."""
    if not is_parametrized(module):
        return []
    lists: Any = module.parametrizations
    return [
        (f"parametrizations.{name}.{key}", tensor)
        for name, kept in lists.items()
        for key, tensor in kept._parameters.items()
    ]


def _reset_parametrized(module: nn.Module, names: list[str], init_weights: InitWeights) -> None:
    """Values for a module of the class that it had before, with parameters; then those are set."""
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
                f"{type(plain).__name__}.{name}: expected a parametrisation that turns a value "
                f"into what it keeps (right_inverse); found that it does not, and the model is on "
                f"the meta device: {error}"
            ) from error
    if resets and callable(init_weights):
        init_weights(module)  # as when it was built: what it does to computed tensors is lost
