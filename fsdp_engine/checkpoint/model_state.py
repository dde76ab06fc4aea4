"""Collects the entries of a model to save, and matches saved entries with a model.

No function here reads or writes tensors. A checkpoint is matched by its *metadata*, which has the
shape and dtype of each key, so that all mismatches are found before anything is changed.
``optimizer_state.py`` does the same for optimizers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_engine.checkpoint.sharded_model import ShardedModel, saved_params
from fsdp_engine.codecs.base import PARAM_CLASSES
from fsdp_engine.memory import allocator

MODEL, OPTIMIZER, EXTRA, RANKS = "model", "optimizer", "extra", "ranks"
# The section of sharded tensors within ``extra``; see ``extra_tensors.py``.
EXTRA_TENSORS = "extra_tensors"
# An entry that marks checkpoints without frozen parameters.
TRAINABLE_ONLY = "trainable_only"
# An entry with the pipeline stage of the model, in JSON; see ``stage_place.py``.
STAGE = "stage"

EXTRA_STATE = "_extra_state"  # torch's key of the result of nn.Module.get_extra_state

Path = tuple[str | int, ...]
# The entries to read, by flat key: the tensor to read into, or None for an object.
Targets = dict[str, Any]


class Saved:
    """The keys of a checkpoint.

    Attributes:
        entries: The metadata by flat key, such as ``model.head.weight``.
        paths: The path of each key in the nested state dict, such as ``("model", "head.weight")``.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.entries = metadata.state_dict_metadata
        found: Mapping[str, Path] = metadata.planner_data or {}
        # Keys of a flat state dict have no path. Their first component is the section.
        self.paths = {key: found.get(key, tuple(key.split(".", 1))) for key in self.entries}

    @property
    def is_trainable_only(self) -> bool:
        """Whether the checkpoint was saved without frozen parameters."""
        return TRAINABLE_ONLY in self.entries

    def below(self, *path: str) -> list[str]:
        """Returns the keys whose path begins with ``path``."""
        return [key for key, found in self.paths.items() if found[: len(path)] == path]

    def empty(self, key: str, device: str = "cpu") -> Tensor | None:
        """Returns new memory for the tensor at ``key``; None if an object is at ``key``."""
        entry = self.entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return allocator.zeros(tuple(entry.size), entry.properties.dtype, device)
        return None

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Returns the shape of the tensor at ``key``; None if there is no tensor at ``key``."""
        entry = self.entries.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def describe(self, key: str) -> str:
        """Returns a description of the entry at ``key`` for messages."""
        entry = self.entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return describe_tensor(tuple(entry.size), entry.properties.dtype)
        return "an object"


def nested(values: Mapping[Path, Any]) -> Any:
    """Convert values by path to nested dicts, and to lists for integer keys. This is the inverse of
    DCP's flattening."""
    if () in values:
        return values[()]
    children: dict[str | int, dict[Path, Any]] = {}
    for (first, *rest), value in values.items():
        children.setdefault(first, {})[tuple(rest)] = value
    result = {key: nested(child) for key, child in children.items()}
    if result and all(isinstance(key, int) for key in result):
        return [result[key] for key in sorted(result)]
    return result


def is_extra_state(name: str) -> bool:
    """Returns whether a key of a ``state_dict`` belongs to a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def check_at_rest(engine: ShardedModel) -> None:
    """Check that the modules of an engine hold the sharded parameters.

    Raises:
        RuntimeError: The modules hold unsharded parameters, within a forward, a backward or
            ``engine.unsharded()``.
        ValueError: A module has another parameter than at ``shard()``, or a layer of experts has
            persistent buffers.
    """
    engine.check_modules()
    _check_expert_buffers(engine)
    for buffer in engine.buffers:
        for record, param in zip(buffer.records, buffer.sharded_params, strict=True):
            if any(module._parameters.get(name) is not param for module, name in record.holders):
                raise RuntimeError(
                    f"checkpoint: expected the sharded parameter as {record.name}; found another. "
                    "Call this outside forwards, backwards and engine.unsharded(); after an "
                    "exception, call engine.reset() first"
                )


def _check_expert_buffers(engine: ShardedModel) -> None:
    records = (record for buffer in engine.buffers for record in buffer.records)
    layers = tuple(sorted({each.expert.layer for each in records if each.expert} - {""}))
    for name, module in engine.model.named_modules() if layers else ():
        for attribute, value in module._buffers.items():
            is_saved = value is not None and attribute not in module._non_persistent_buffers_set
            if is_saved and f"{name}.".startswith(layers):
                raise ValueError(
                    f"checkpoint: expected experts without persistent buffers; found "
                    f"{name}.{attribute}, which is a different buffer on each rank. Register it "
                    "with persistent=False"
                )


def check_shared(what: str, engine: ShardedModel) -> None:
    """Check that all ranks share all parameters, that is, that no rank has different experts.

    Raises:
        ValueError: Ranks hold different experts; the message names one.
    """
    for param in saved_params(engine).values():
        if param.is_of_experts:
            raise ValueError(
                f"{what}: expected parameters that all ranks share; found the expert {param.name}, "
                "where other ranks hold other experts. Save a checkpoint, which contains all of "
                "them, and export that"
            )


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Returns the ``state_dict`` of a model. Extra states of modules with weights quantised by
    Transformer Engine are replaced by plain tensors, because Transformer Engine saves these states
    as pickles and refuses to load the pickles."""
    state = dict(model.state_dict(keep_vars=True))
    for name, module in model.named_modules():
        key = f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
        for param_class in PARAM_CLASSES:
            if tensors := param_class.extra_tensors(module):
                state.pop(key, None)
                state |= {f"{key}.{each}": tensor for each, tensor in tensors.items()}
    return state


def model_entries(engine: ShardedModel, *, trainable_only: bool = False) -> dict[str, Any]:
    """Returns the entries below ``model`` that this rank saves.

    Each rank saves its slices of parameters. Only rank 0 saves all other entries, because they may
    differ between ranks.

    Args:
        engine: The engine of the model.
        trainable_only: Omit frozen parameters.

    Raises:
        ValueError: A persistent buffer is a sharded DTensor.
    """
    params, is_first = saved_params(engine), engine.ranks.rank == 0
    entries: dict[str, Any] = {}
    for key, value in _model_state(engine.model).items():
        param = params.get(id(value))
        if trainable_only and param is not None and param.is_frozen:
            continue
        if param is not None and param.is_of_experts:
            entries.update(dict.fromkeys(param.aliases, param.saved.detach()))
        elif param is not None or is_first:
            if param is None:
                _check_is_full(key, value)
            entries[key] = value.detach() if isinstance(value, Tensor) else value
    return entries


def _check_is_full(key: str, value: Any) -> None:
    """Check that rank 0 holds all elements of a value that only it saves."""
    if isinstance(value, DTensor) and value.to_local().shape != value.shape:
        raise ValueError(
            f"checkpoint: expected persistent buffers that each rank holds in full; found {key}, a "
            f"DTensor with placements {value.placements}. Register it with persistent=False"
        )


def ties(engine: ShardedModel) -> dict[str, str]:
    """Map each further name of a tied weight to its first name. Experts, which checkpoints contain
    under other names, are left out."""
    names = [each.aliases for each in saved_params(engine).values() if not each.is_of_experts]
    return {name: first for first, *others in names for name in others}


@dataclasses.dataclass
class ModelMatch:
    """The match of a checkpoint's entries with a model.

    Attributes:
        targets: The entries to read. Entries that do not fit are left out.
        problems: A line for each entry that does not fit.
        extra_states: The keys of the extra states of modules that the checkpoint contains.
        copies: The further entries of tied weights, with the entry that is read in their place.
    """

    targets: Targets = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    extra_states: list[str] = dataclasses.field(default_factory=list)
    copies: dict[str, str] = dataclasses.field(default_factory=dict)


def match_model(engine: ShardedModel, saved: Saved, *, trainable_only: bool = False) -> ModelMatch:
    """Match the entries of a checkpoint with a model.

    Args:
        engine: The engine of the model.
        saved: The keys of the checkpoint.
        trainable_only: Do not read frozen parameters, whether the checkpoint contains them or not.
    """
    match = ModelMatch()
    targets, problems, extra_states = match.targets, match.problems, match.extra_states
    known: set[str] = set()
    params = saved_params(engine)
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for key, value in _model_state(engine.model).items():
        if (param := params.get(id(value))) is not None and param.is_of_experts:
            known.update(f"{MODEL}.{each}" for each in param.of_others)
            keys = [f"{MODEL}.{each}" for each in param.aliases]
            tensors[id(value)] = (param.saved, keys)
        elif is_extra_state(key):
            found = saved.below(MODEL, key)
            known.update(found)
            targets.update({each: saved.empty(each) for each in found})
            if found:
                extra_states.append(key)
            else:
                problems.append(f"missing {MODEL}.{key}: expected an object; found nothing")
        elif isinstance(value, Tensor):
            tensors.setdefault(id(value), (value, []))[1].append(f"{MODEL}.{key}")
        else:  # a state_dict hook of the user added this value, and no module loads it
            known.update(saved.below(MODEL, key))
    for number, (tensor, keys) in tensors.items():
        known.update(keys)
        if trainable_only and number in params and params[number].is_frozen:
            continue
        present = [key for key in keys if key in saved.entries]
        if not present:
            expected = describe_tensor(tuple(tensor.shape), tensor.dtype)
            problems.append(f"missing {keys[0]}: expected {expected}; found nothing")
            continue
        misfits = [_misfit(tensor, key, saved) for key in present]
        problems += [line for line in misfits if line]
        if not any(misfits):
            # A tied weight is saved under each of its names. Only one of the entries is loaded.
            targets[present[0]] = tensor.detach()
            match.copies.update(dict.fromkeys(present[1:], present[0]))
    for key in saved.below(MODEL):
        if key not in known:
            problems.append(f"unexpected {key}: expected nothing; found {saved.describe(key)}")
    return match


def set_extra_states(
    engine: ShardedModel, saved: Saved, keys: Sequence[str], read: Targets
) -> None:
    """Set the extra states of modules from the values that were read."""
    for key in keys:
        values = {saved.paths[each][2:]: read[each] for each in saved.below(MODEL, key)}
        module = engine.model.get_submodule(key.removesuffix(EXTRA_STATE).rstrip("."))
        module.set_extra_state(nested(values))


def _misfit(tensor: Tensor, key: str, saved: Saved) -> str:
    entry = saved.entries[key]
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == shape:
        found = entry.properties.dtype
        if holds_exactly(dtype, found):
            return ""
        return (
            f"{key}: expected {dtype}, or a dtype that it holds exactly; found {found} (to round "
            "weights on purpose, read them with torch.distributed.checkpoint.load)"
        )
    return f"{key}: expected {describe_tensor(shape, dtype)}; found {saved.describe(key)}"


def holds_exactly(dtype: torch.dtype, found: torch.dtype) -> bool:
    """Returns whether ``dtype`` can represent every value of the dtype ``found``."""
    if dtype == found:
        return True
    if dtype.is_complex:
        return holds_exactly(dtype.to_real(), found.to_real() if found.is_complex else found)
    if found.is_complex or dtype == torch.bool:
        return False
    if found == torch.bool:
        return True
    try:
        if found.is_floating_point:
            own, other = torch.finfo(dtype), torch.finfo(found)
            smallest, others = (each.smallest_normal * each.eps for each in (own, other))
            return own.eps <= other.eps and own.max >= other.max and smallest <= others
        bounds = torch.iinfo(found)
        if dtype.is_floating_point:
            return max(bounds.max, -bounds.min) <= 2 / torch.finfo(dtype).eps
        return torch.iinfo(dtype).min <= bounds.min and bounds.max <= torch.iinfo(dtype).max
    except (TypeError, NotImplementedError):  # only `found` is a float, or a dtype is packed
        return False


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Returns a description of a tensor for messages."""
    return f"shape {shape}, {str(dtype).removeprefix('torch.')}"
