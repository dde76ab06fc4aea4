"""Installs full or sharded parameters in the modules that hold them.

Recurrent modules also keep a list of their weights, which is updated together with the parameters.
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
from fsdp_engine.flat_dtensor.parameter_access import forget_hooks


def list_flat_weights(module: nn.RNNBase) -> None:
    """Update a recurrent module's list of weights from its parameters."""
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    # The list is changed in place because the entries of an Installation refer to it.
    module._flat_weights[:] = weights
    # With these references the module's forward detects weights that are not in the list.
    module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in weights]


class ReplacedParameter(nn.Parameter):
    """A user's parameter that ``shard`` has replaced by a sharded one.

    A list that was made before ``shard`` still has it. An optimizer of this list would train
    nothing, ``clip_grad_norm_`` would clip nothing, and a forward would read old values.
    """

    @property
    def grad(self) -> Tensor | None:
        """Raises RuntimeError."""
        raise self._error("Collect parameters and groups from model.parameters() after shard()")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise self._error("Set the gradient of the parameter in model.parameters()")

    def refuse_gradient(self) -> None:
        """Called when autograd has computed a gradient of this parameter. Raises RuntimeError."""
        Tensor.grad.__set__(self, None)  # type: ignore[union-attr]
        raise self._error(
            "The forward has read it from a list or another object that is no module: read it "
            "from the module that owns it"
        )

    def _error(self, advice: str) -> RuntimeError:
        name = vars(self).get("name_in_model", "a parameter")
        return RuntimeError(
            f"gradient of {name}: expected a parameter of the sharded model; found the one that "
            f"shard() has replaced, which is not trained. {advice}"
        )


def mark_as_replaced(param: nn.Parameter, name: str) -> None:
    """Make uses of the gradient of ``param`` raise a RuntimeError that contains ``name``."""
    if type(param) is not nn.Parameter:
        return
    param.name_in_model = name  # type: ignore[attr-defined]
    param.__class__ = ReplacedParameter
    if param.requires_grad:
        forget_hooks(param)
        param.register_post_accumulate_grad_hook(ReplacedParameter.refuse_gradient)


def holders(buffers: Sequence[ParamAndGradBuffer]) -> list[nn.Module]:
    """Returns the modules that hold parameters of ``buffers``, each once."""
    holders = (holder for b in buffers for record in b.records for holder in record.holders)
    return list({id(module): module for module, _ in holders}.values())


def install_into(
    buffers: Sequence[ParamAndGradBuffer], tensors: Sequence[Sequence[Tensor]]
) -> None:
    """Install ``tensors``, a row for each buffer, in the modules as their parameters."""
    for buffer, row in zip(buffers, tensors, strict=True):
        for record, tensor in zip(buffer.records, row, strict=True):
            for module, attribute in record.holders:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
    for module in _modules_with_flat_weights(buffers):
        list_flat_weights(module)


@contextmanager
def hidden(buffers: Sequence[ParamAndGradBuffer]) -> Iterator[None]:
    """Remove the parameters of ``buffers`` from the modules within the context."""
    places = [each for buffer in buffers for record in buffer.records for each in record.holders]
    # dict.get bypasses WatchedParameters, which would return the full parameters.
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
    """Install the sharded parameters of a newly built unit in its modules.

    This frees the user's full parameters, so that both full and sharded parameters are in memory
    for only one unit at a time. A module that also has parameters on the meta device, which another
    unit owns, keeps its full parameters, because its ``reset_parameters`` will run once more.

    Args:
        buffers: The buffers of the unit.
        built: Sharded parameters of the units built so far, by ``id`` of the module and attribute.
            The parameters of this unit are added.
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
    """The parameters of a module that the model's forward may read without calling the module.

    Reading ``child.weight`` within the model's forward returns the full parameter. User code can
    pass it to any function, including functions that ignore tensor subclasses. A read costs about
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
    """Make reads of parameters of ``buffers`` within the model's forward return full parameters.

    Must be called before an :class:`Installation` of ``buffers`` is made.
    """
    for module in holders([buffer for buffer in buffers if not buffer.is_plain]):
        if type(module._parameters) is dict:
            vars(module)["_parameters"] = WatchedParameters(module._parameters)


class Installation:
    """Installs the full or the sharded parameters of a unit at every place that refers to them.

    Args:
        buffers: The buffers of the unit. Their sharded parameters are installed.
        label: The name of the unit in errors.

    Attributes:
        is_full: Whether the full parameters are installed.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], label: str) -> None:
        self.is_full = False
        self._label = label
        entries = _install_table(buffers)
        # The table is stored by column, so that one pass in C writes all places: a unit may have
        # thousands of them, and each is written four times a step.
        self._containers = [container for container, _, _, _ in entries]
        self._keys = [key for _, key, _, _ in entries]
        self._full = [full for _, _, full, _ in entries]
        self._sharded = [sharded for _, _, _, sharded in entries]

    def install(self) -> None:
        """Install the full parameters in the modules."""
        if not self.is_full:
            self.is_full = True
            self._put(self._full)

    def uninstall(self) -> None:
        """Install the sharded parameters in the modules."""
        if self.is_full:
            self.is_full = False
            self._put(self._sharded)

    def _put(self, tensors: Iterable[Tensor]) -> None:
        """Write ``tensors`` to all places, in one pass in C."""
        deque(map(setitem, self._containers, self._keys, tensors), maxlen=0)

    def check_not_swapped(self) -> None:
        """Check that the modules have the engine's parameters, before full ones are installed.

        Raises:
            RuntimeError: ``torch.func.functional_call`` has installed other tensors.
        """
        places = zip(self._containers, self._keys, self._full, self._sharded, strict=True)
        for parameters, name, full, sharded in places:
            # dict.__getitem__ bypasses WatchedParameters, which would return the full parameter.
            is_dict = isinstance(parameters, dict)
            found = dict.__getitem__(parameters, name) if is_dict else parameters[name]
            if found is not sharded and found is not full:
                raise RuntimeError(
                    f"functional_call: expected the model's own parameters in unit {self._label}; "
                    f"found another tensor for {name}, which the engine would replace by the "
                    "gathered weights. Change the weights themselves (load_state_dict, "
                    "engine.unsharded()), or shard at level no_shard without mixed precision"
                )


def _install_table(
    buffers: Sequence[ParamAndGradBuffer],
) -> list[tuple[Any, str | int, Any, Any]]:
    """Install the sharded parameters, and list every place that refers to one.

    Returns:
        (container, key, full parameter, sharded parameter) for every place.
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
        # The list is filtered because other weights of the module may be in another bucket.
        listed = module._flat_weights
        for place, weight in enumerate(listed):
            if id(weight) in full_of:
                entries.append((listed, place, full_of[id(weight)], weight))
    return entries


def _modules_with_flat_weights(buffers: Sequence[ParamAndGradBuffer]) -> list[nn.RNNBase]:
    """Returns the recurrent modules with parameters of ``buffers``: they keep a list of weights."""
    return [module for module in holders(buffers) if isinstance(module, nn.RNNBase)]
