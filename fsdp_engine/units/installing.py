"""Installs full or sharded parameters in the modules that hold them.

Recurrent modules also keep a list of their weights, which is updated with the parameters.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import setitem
from typing import Any

from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.flat_dtensor import FlatDTensor


def list_flat_weights(module: nn.RNNBase) -> None:
    """Let the module's own list hold the weights that the module holds."""
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    # In place: entries of units refer to the list.
    module._flat_weights[:] = weights
    # By these its forward sees that weights are others than in its list.
    module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in weights]


def holders(buffers: Sequence[ParamAndGradBuffer]) -> list[nn.Module]:
    """Modules that hold parameters of ``buffers``, each once."""
    holders = (holder for b in buffers for record in b.records for holder in record.holders)
    return list({id(module): module for module, _ in holders}.values())


def install_into(
    buffers: Sequence[ParamAndGradBuffer], tensors: Sequence[Sequence[Tensor]]
) -> None:
    """Put ``tensors``, a row for each buffer, into the modules in place of the parameters."""
    for buffer, row in zip(buffers, tensors, strict=True):
        for record, tensor in zip(buffer.records, row, strict=True):
            for module, attribute in record.holders:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
    for module in _modules_with_flat_weights(buffers):
        list_flat_weights(module)


@contextmanager
def hidden(buffers: Sequence[ParamAndGradBuffer]) -> Iterator[None]:
    """Context within which modules have no parameters of ``buffers``."""
    places = [each for buffer in buffers for record in buffer.records for each in record.holders]
    # Not as the user reads them, who would get the full ones.
    kept = [dict.get(module._parameters, attribute) for module, attribute in places]
    lists = [
        (module, module._flat_weights, module._flat_weight_refs)
        for module in holders(buffers)
        if isinstance(module, nn.RNNBase)
    ]
    for module, attribute in places:
        module._parameters[attribute] = None
    try:
        yield
    finally:
        for (module, attribute), param in zip(places, kept, strict=True):
            module._parameters[attribute] = param
        for module, weights, references in lists:
            vars(module).update(_flat_weights=weights, _flat_weight_refs=references)


def install_where_complete(
    buffers: Sequence[ParamAndGradBuffer], built: dict[tuple[int, str], Tensor]
) -> None:
    """Put the sharded parameters of a unit that was built into the modules, in place of full ones,
    so that one unit at a time is held twice. A module of which another unit has parameters that
    have no values yet keeps full ones: it will give itself values once more.

    Args:
        buffers: The buffers of the unit.
        built: sharded parameters of units before, by module and attribute; those of this one are
            added.
    """
    for buffer in buffers:
        for record, sharded in zip(buffer.records, buffer.sharded_params, strict=True):
            built.update({(id(holder), name): sharded for holder, name in record.holders})
    for module in holders(buffers):
        tensors: dict[str, Any] = module._parameters
        if not any(tensor is not None and tensor.is_meta for tensor in tensors.values()):
            for name in tensors:
                tensors[name] = built.get((id(module), name), tensors[name])


class WatchedParameters(dict[str, Any]):
    """A module's parameters, of which some may be read without a call of the module.

    Reading ``child.weight`` within the model's forward returns the full parameter, which the user's
    code can pass to any function, also where no tensor's class is dispatched. Reading costs some
    60 ns more than from a dict.
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        found = dict.__getitem__(self, name)
        if type(found) is FlatDTensor and found.backref is not None:
            full = found.backref.gathered_param()
            return found if full is None else full
        return found


def watch_reads(buffers: Sequence[ParamAndGradBuffer]) -> None:
    """Let modules that hold parameters of ``buffers`` tell of reads; before they are installed."""
    for module in holders([buffer for buffer in buffers if not buffer.is_plain]):
        if type(module._parameters) is dict:
            vars(module)["_parameters"] = WatchedParameters(module._parameters)


class Installation:
    """Every place that refers to a parameter of a unit, and which of its two tensors lies there.

    Args:
        buffers: the unit's, whose sharded parameters are put into the modules.
        label: the unit's, in errors.

    Attributes:
        is_full: the full parameters are in the modules.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], label: str) -> None:
        self.is_full = False
        self._label = label
        entries = _install_table(buffers)
        # In columns: units may have thousands of places, and each is written four times a step.
        self._containers = [container for container, _, _, _ in entries]
        self._keys = [key for _, key, _, _ in entries]
        self._full = [full for _, _, full, _ in entries]
        self._sharded = [sharded for _, _, _, sharded in entries]

    def install(self) -> None:
        """Put the full parameters into the modules."""
        if not self.is_full:
            self.is_full = True
            self._put(self._full)

    def uninstall(self) -> None:
        """Put the sharded parameters back."""
        if self.is_full:
            self.is_full = False
            self._put(self._sharded)

    def _put(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` into all places, in one pass in C."""
        deque(map(setitem, self._containers, self._keys, tensors), maxlen=0)

    def check_not_swapped(self) -> None:
        """A forward within ``torch.func.functional_call`` is about to put full parameters where the
        sharded ones are.

        Raises:
            RuntimeError: it has put others there.
        """
        places = zip(self._containers, self._keys, self._full, self._sharded, strict=True)
        for parameters, name, full, sharded in places:
            # Not as the user reads it, who would get the full one.
            is_dict = isinstance(parameters, dict)
            found = dict.__getitem__(parameters, name) if is_dict else parameters[name]
            if found is not sharded and found is not full:
                raise RuntimeError(
                    f"functional_call: expected the model's own parameters in unit {self._label}; "
                    f"found another tensor for {name}, in whose place the engine would use the "
                    "sharded weights. Change the weights themselves (load_state_dict, "
                    "engine.unsharded()), or shard at level no_shard without mixed precision"
                )


def _install_table(
    buffers: Sequence[ParamAndGradBuffer],
) -> list[tuple[Any, str | int, Any, Any]]:
    """Put the sharded parameters into the modules.

    Returns (container, key, full, sharded) for every place that refers to one.
    """
    install_into(buffers, [buffer.sharded_params for buffer in buffers])
    entries: list[tuple[Any, str | int, Any, Any]] = []
    full_of: dict[int, Tensor] = {}
    for buffer in buffers:
        if buffer.is_plain:
            continue
        for record, full, sharded in zip(
            buffer.records, buffer.full_params, buffer.sharded_params, strict=True
        ):
            full_of[id(sharded)] = full
            for module, attribute in record.holders:
                entries.append((module._parameters, attribute, full, sharded))
    for module in _modules_with_flat_weights(buffers):
        # Weight by weight, since others of the module's may be in another bucket.
        listed = module._flat_weights
        for place, weight in enumerate(listed):
            if id(weight) in full_of:
                entries.append((listed, place, full_of[id(weight)], weight))
    return entries


def _modules_with_flat_weights(buffers: Sequence[ParamAndGradBuffer]) -> list[nn.RNNBase]:
    """Recurrent modules, which compute with a list of weights of their own."""
    return [module for module in holders(buffers) if isinstance(module, nn.RNNBase)]
