"""``model.to(dtype)``, ``.half()``, ``.bfloat16()``, ``.float()``, ``.double()`` of sharded models.

torch converts a module with a function that it applies recursively, and assigns the result to the
parameter, which stays the same object. The engine does the same: each rank rounds its main weights
in place, published gradients get the new dtype, and optimizer state is unchanged. torch converts
buffers of modules, and parameters that belong to no unit.

[Note: Conversion on some ranks]
Ranks meet before a conversion and compare the new dtypes. A rank that skipped the conversion would
later send messages of another size, with which gloo aborts, and NCCL hangs or returns wrong values.
A rank that does not convert will later wait in a collective for the ranks that do. On gloo this is
detected within seconds, and the wait fails with the same error. On NCCL the host does not wait. The
ranks that convert raise after the group's timeout, and NCCL's watchdog ends the others. In both
cases nothing has been changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.buffers.spec import BufferKind
from fsdp_engine.codecs import CastCodec, ParamCodec
from fsdp_engine.comm.groups import timeout_of_group
from fsdp_engine.comm.rendezvous import meet
from fsdp_engine.engine import Engine
from fsdp_engine.flat_dtensor import clear_gradients, gradients_of
from fsdp_engine.memory import allocator
from fsdp_engine.options import Options
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.parameter_guard import AppliedFunctions
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.units.build import EngineCommunicators
from fsdp_engine.units.installing import hidden
from fsdp_engine.units.plan import keeps_statistics

_WHAT = (
    "conversion of sharded parameters, which all ranks must run, or none (model.to(dtype), "
    ".half(), .double())"
)
_MOST_NAMED = 8


class Change(NamedTuple):
    """A buffer with its new kind and its new codec."""

    buffer: ParamAndGradBuffer
    kind: BufferKind
    codec: ParamCodec


class Conversions(AppliedFunctions):
    """Conversions of one sharded model to other dtypes.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._is_running = False

    def apply(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """See the class. Collective if a dtype changes.

        Raises:
            RuntimeError: A forward or backward is in progress or pending, or gradients are not
                reduced.
            ValueError: See :func:`changes_of` and :func:`agree_on_changes`.
        """
        plain = partial(type(module)._apply, module, fn, *args, **kwargs)
        if self._is_running:
            plain()
            return
        engine = self._engine
        recurse = (args[0] if args else kwargs.get("recurse")) is not False
        inside = list(module.modules()) if recurse else [module]
        by_unit = {
            unit: changes
            for unit in engine.units
            if (changes := list(changes_of(unit, fn, engine.options, inside)))
        }
        changes = [each for found in by_unit.values() for each in found]
        if changes:
            self._check_rest()
            engine.reductions.wait()
            agree_on_changes(engine.communicators, changes)
        self._is_running = True
        try:
            with hidden([each.buffer for each in changes]):
                plain()  # It also converts all tensors that are not in these buffers.
        finally:
            self._is_running = False
        for unit, found in by_unit.items():
            unit.release()
            for each in found:
                convert_buffer(each, are_reduced=bool(engine.reductions.are_reduced(unit)))
            for placement in dict.fromkeys(each.buffer.context.placement for each in found):
                placement.rebuilt(engine, unit)

    def _check_rest(self) -> None:
        engine, found = self._engine, ""
        if not engine.scheduler.is_at_rest or engine.guard.paused:
            found = "one in progress (after an exception, call engine.reset()), or unsharded()"
        for unit in engine.units:
            if unit.awaits_backward(None) or unit.num_late:
                found = f"a forward through {unit.label} whose backward is pending"
        if found:
            raise RuntimeError(
                "conversion of a sharded model: expected no forward or backward in progress, and "
                f"no graph that leads to its parameters; found {found}. Run the backward, or "
                "delete the output"
            )
        for unit in engine.units:
            if engine.reductions.are_reduced(unit) is None:
                raise RuntimeError(
                    "conversion of a sharded model: expected gradients to be reduced or cleared; "
                    f"found some of {unit.label} that are accumulated under no_sync(). Convert it "
                    "after the backward of the last microbatch"
                )


def changes_of(
    unit: Unit,
    fn: Callable[[Tensor], Tensor],
    options: Options,
    inside: Sequence[nn.Module],
) -> Iterator[Change]:
    """Yields the changes that ``fn`` makes to the buffers of a unit. ``fn`` is called on tensors
    without elements.

    Args:
        unit: The unit.
        fn: The function that was passed to ``nn.Module._apply``.
        options: The options of the engine.
        inside: The modules whose parameters are converted.

    Raises:
        ValueError: The device changes, only part of a buffer is converted, or see
            :func:`kind_after`.
    """
    known = set(map(id, inside))
    for buffer in unit.buffers:
        is_meant = [
            any(id(module) in known for module, _ in record.holders) for record in buffer.records
        ]
        if not any(is_meant):
            continue
        main = buffer.weights.main.tensor
        probe = fn(allocator.empty(0, main.dtype, main.device))
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
                f"conversion of {buffer.records[one].name} to {probe.dtype}: expected all "
                f"parameters of its buffer to be converted together; found "
                f"{buffer.records[other].name} not converted. Convert the whole unit or model, or "
                "single modules before it is sharded"
            )
        yield Change(buffer, *kind_after(buffer, probe.dtype, unit.policy, options))


def kind_after(
    buffer: ParamAndGradBuffer,
    dtype: torch.dtype,
    policy: MixedPrecisionPolicy,
    options: Options,
) -> tuple[BufferKind, ParamCodec]:
    """Returns the kind and the codec of ``buffer`` for main weights of ``dtype``.

    They follow from the policy, except for its ``main_params_dtype``. Compute weights and gradients
    for which the policy names no dtype get ``dtype``, too. Example: fp32 weights are converted to
    bf16. With ``MixedPrecisionPolicy()`` everything is bf16; with ``reduce_dtype=fp32`` gradients
    are summed in fp32 and kept in bf16.

    Raises:
        ValueError: The buffer cannot have such main weights; names its first parameter.
    """
    name = buffer.records[0].name
    modules = [module for record in buffer.records for module, _ in record.holders]
    compute = None if any(map(keeps_statistics, modules)) else policy.param_dtype
    policy = dataclasses.replace(policy, main_params_dtype=dtype, param_dtype=compute)
    probe = allocator.empty(0, dtype, "cpu").requires_grad_(buffer.kind.requires_grad)
    dtypes = policy.resolve(probe, options.sum_in_fp32)
    kind = dataclasses.replace(buffer.kind, dtypes=dtypes)
    if buffer.context.memory.is_fixed:
        raise ValueError(
            f"{name}: expected {buffer.kind.dtypes.main} to stay, since nccl_ub registers memory "
            f"once; found a conversion to {dtype}. Convert the model before shard()"
        )
    try:
        codec = buffer.weights.codec.converted(dtypes)
    except NotImplementedError as error:
        raise ValueError(
            f"{name}: {error}, and a conversion to {dtype}. Convert the model before shard()"
        ) from None
    if buffer.is_plain and not codec.is_identity:
        raise ValueError(
            f"{name}: expected main weights in {dtypes.compute}, the compute dtype of the policy, "
            f"since they are also the compute weights; found a conversion to {dtype}. Convert the "
            "model before it is sharded, or shard it at level optim"
        )
    if codec.is_identity and not buffer.is_plain and buffer.spec.optim_depth == 0:
        codec = CastCodec(dtypes.main, dtypes.compute, copies=True)
    return kind, codec


def convert_buffer(change: Change, *, are_reduced: bool) -> None:
    """Convert weights and gradients of a buffer; values are rounded. Full and sharded parameters
    stay the same objects. No collective may be in flight. Not collective.

    Args:
        change: The buffer with its new kind and codec.
        are_reduced: Whether the published gradients are reduced.
    """
    buffer, kind, codec = change
    before = gradients_of(buffer.sharded_params)
    dtype = kind.dtypes.optim_grad
    grads = [None if each is None else local_part(each).to(dtype) for each in before]
    clear_gradients(buffer.sharded_params)
    del before
    buffer.rebuild(kind, codec)
    for index, grad in enumerate(grads):
        if grad is not None:
            buffer.published.put(index, grad, is_reduced=are_reduced)


def agree_on_changes(communicators: EngineCommunicators, changes: Iterable[Change]) -> None:
    """Compare the new dtypes of all ranks of the model, before anything is changed. Collective.

    Raises:
        ValueError: The dtypes differ, or a rank does not convert.
        RuntimeError: A rank did not arrive.
    """
    group = communicators.ranks.control_group
    if group is not None:
        timeout, note = (
            timeout_of_group(group, communicators.ranks.device),
            _described(communicators, changes),
        )
        meet(_WHAT, communicators.ranks.ranks, timeout, note=note, groups=communicators.groups)


def _described(communicators: EngineCommunicators, changes: Iterable[Change]) -> str:
    """Returns a text that is equal on ranks with equal changes, such as "torch.float64, before
    torch.float32: units of first.weight (3f2ad45c)". The digest covers all differences."""
    names_of: dict[str, list[str]] = {}
    lines = [str(communicators.data.number)]
    for buffer, kind, _ in changes:
        name, now, before = buffer.records[0].name, kind.dtypes, buffer.kind.dtypes
        names_of.setdefault(f"{now.main}, before {before.main}", []).append(name)
        lines.append(f"{name} {now} {before}")
    parts = []
    for dtypes, names in sorted(names_of.items()):
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        parts.append(f"{dtypes}: units of {', '.join(names[:_MOST_NAMED])}{more}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{'; '.join(parts)} ({digest[:8]})"
