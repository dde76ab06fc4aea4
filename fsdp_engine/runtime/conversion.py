"""``model.to(dtype)``, ``.half()``, ``.bfloat16()``, ``.float()``, ``.double()`` of sharded models.

torch converts a module by a function that it hands down from module to module, and puts what the
function returns into the parameter, which stays the object that it was. So does this: main weights
are rounded where they lie, each rank's for itself, and nothing is sent; gradients that users see
follow; optimizer state stays as it is. Parameters of no unit, and buffers of modules, are torch's.
Ranks compare the new dtypes before their next communication (``same_dtypes.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.spec import BufferKind
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices import memory
from fsdp_engine.planning.build import Ladders
from fsdp_engine.planning.converting import kind_after
from fsdp_engine.planning.installing import holders
from fsdp_engine.runtime.same_dtypes import note_conversion
from fsdp_engine.runtime.unit import Unit

Change = tuple[ParamAndGradBuffer, BufferKind, ParamCodec]


class Conversions:
    """Of one sharded model.

    Args:
        units: all of them.
        ladders: where its buffers are.
        config: the options it was made with.
        is_at_rest: whether neither a forward nor a backward is under way.
        wait: on return nothing is under way.
        are_reduced: whether the gradients of a unit that users see are reduced; None: some are
            accumulated that are not.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        ladders: Ladders,
        config: DistributedDataParallelConfig,
        is_at_rest: Callable[[], bool],
        wait: Callable[[], None],
        are_reduced: Callable[[Unit], bool | None],
    ) -> None:
        self._units = units
        self._ladders = ladders
        self._config = config
        self._is_at_rest = is_at_rest
        self._wait = wait
        self._are_reduced = are_reduced
        self._is_under_way = False

    def watch(self, model: nn.Module) -> None:
        """Let all modules of ``model`` ask here what to do when they are converted."""
        for module in model.modules():
            vars(module)["_apply"] = _Apply(module, self)

    def convert(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """What ``nn.Module._apply`` does; a subclass may have other arguments (metrics do).

        Raises:
            RuntimeError: not at rest; ValueError: see :func:`changes_of`.
        """
        apply = partial(type(module)._apply, module, fn, *args, **kwargs)
        recurse = (args[0] if args else kwargs.get("recurse")) is not False
        if self._is_under_way:
            apply()
            return
        self._is_under_way = True
        try:
            self._convert(module, fn, apply, recurse)
        finally:
            self._is_under_way = False

    def _convert(
        self,
        module: nn.Module,
        fn: Callable[[Tensor], Tensor],
        apply: Callable[[], object],
        recurse: bool,
    ) -> None:
        inside = list(module.modules()) if recurse else [module]
        changes = [
            (unit, change)
            for unit in self._units
            for change in changes_of(unit, fn, self._config, inside)
        ]
        if changes:
            self._check_rest()
            self._wait()
        with hidden([buffer for _, (buffer, _, _) in changes]):
            apply()  # what keeps its dtype is torch's, too
        for unit in {id(unit): unit for unit, _ in changes}.values():
            unit.release()
        before = [(buffer, buffer.kind) for _, (buffer, _, _) in changes]
        for unit, (buffer, kind, codec) in changes:
            buffer.convert(kind, codec, are_reduced=bool(self._are_reduced(unit)))
        if before:
            note_conversion(self._ladders, before)

    def _check_rest(self) -> None:
        found = ""
        if not self._is_at_rest():
            found = "one under way (after an exception, call engine.reset())"
        for unit in self._units:
            if unit.awaits_backward(None) or unit.num_late:
                found = f"a forward through {unit.label} whose backward is to come"
        if found:
            raise RuntimeError(
                "conversion of a sharded model: expected no forward or backward under way, and no "
                f"graph that leads to its parameters; found {found}. Run the backward, or let go "
                "of the output"
            )
        for unit in self._units:
            if self._are_reduced(unit) is None:
                raise RuntimeError(
                    "conversion of a sharded model: expected gradients to be reduced or cleared; "
                    f"found some of {unit.label} that are accumulated under no_sync(). Convert it "
                    "after the backward of the last microbatch"
                )


class _Apply:
    """``_apply`` of one module of a sharded model. A copy of the module, or what is unpickled, has
    torch's."""

    def __init__(self, module: nn.Module, conversions: Conversions) -> None:
        self._module = weakref.ref(module)
        self._conversions = conversions

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module()
        assert module is not None
        self._conversions.convert(module, fn, *args, **kwargs)
        return module

    def __reduce__(self) -> Any:
        module = self._module()
        assert module is not None
        return partial, (type(module)._apply, module)


def changes_of(
    unit: Unit,
    fn: Callable[[Tensor], Tensor],
    config: DistributedDataParallelConfig,
    inside: Sequence[nn.Module],
) -> Iterator[Change]:
    """What ``fn`` changes of the buffers of a unit.

    What it makes of a tensor shows on one without elements.

    Args:
        fn: what ``nn.Module._apply`` was given.
        config: the options that the unit was made with.
        inside: modules whose parameters are meant.

    Raises:
        ValueError: other devices; a part of what lies in one buffer; or see :func:`kind_after`.
    """
    known = set(map(id, inside))
    for buffer in unit.buffers:
        is_meant = [
            any(id(module) in known for module, _ in record.owners) for record in buffer.records
        ]
        if not any(is_meant):
            continue
        main = buffer.weights.main.tensor
        probe = fn(memory.empty(0, main.dtype, main.device))
        if probe.device.type != main.device.type:
            raise ValueError(
                f"conversion of {unit.label}: expected parameters to stay on {main.device}, with "
                f"their values; found {probe.device}"
            )
        if probe.dtype == main.dtype:
            continue
        if not all(is_meant):
            one, other = is_meant.index(True), is_meant.index(False)
            raise ValueError(
                f"conversion of {buffer.records[one].name} to {probe.dtype}: expected all that is "
                f"gathered with it to be converted; found {buffer.records[other].name} left out. "
                "Convert the whole unit or model, or single modules before it is sharded"
            )
        yield buffer, *kind_after(buffer, probe.dtype, unit.built.policy, config)


@contextmanager
def hidden(buffers: Sequence[ParamAndGradBuffer]) -> Iterator[None]:
    """Within it, modules have no parameters of ``buffers``."""
    places = [owner for buffer in buffers for record in buffer.records for owner in record.owners]
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
