"""Full main weights within ``engine.unsharded()``, and writing them back to the shards.

User code may edit a full parameter in place, change its memory (``param.data = ...``, ``set_``,
``swap_tensors``) or put another tensor into its module. So, at the end, the modules are compared
with the parameters that were installed, and values are written back from the tensors that the
modules hold then. Edits that cannot be written back (a deleted parameter, a tie, another shape),
and values that differ between ranks, raise on all ranks before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.full_values import gather_main, main_parameters, write_main
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.comm.fingerprints import fingerprints
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.memory.allocator import begin_together, storage_keys
from fsdp_engine.runtime.parameter_guard import ParameterGuard
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.units.assignment import has_parameters
from fsdp_engine.units.installing import holders, install_into

_WHAT = "engine.unsharded()"


class _Installed:
    """The full main weights of one buffer, and the parameters over them in the modules.

    Attributes:
        buffer: The buffer.
        main: The full main weights.
        params: The parameters that were installed, in the order of the layout.
        views: Tensors over the same memory. They keep the memory if the user replaces ``params``.
        prints: Fingerprints of the installed values. Empty if no other rank holds the parameters.
    """

    def __init__(self, buffer: ParamAndGradBuffer) -> None:
        self.buffer = buffer
        self.main: ShardedBuffer = gather_main(buffer)
        self.params = main_parameters(buffer, self.main)
        self.views = [_local(param.detach()) for param in self.params]
        self.prints = self.fingerprints(self.views)
        for record, param, sharded in zip(
            buffer.records, self.params, buffer.sharded_params, strict=True
        ):
            param.requires_grad_(sharded.requires_grad)
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_refuse_gradient, record.name))
        install_into([buffer], [self.params])

    def fingerprints(self, values: Sequence[Tensor]) -> list[int]:
        """Returns a fingerprint of each tensor; empty if no other rank holds the parameters."""
        group = self.buffer.control_group
        return [] if group is None or dist.get_backend(group) == "fake" else fingerprints(values)


class FullMainWeights:
    """Full main weights of some units; see the module docstring. The constructor is collective and
    installs full parameters in the modules.

    Args:
        units: The units to unshard.
        guard: The guard of the model's parameters, which checks values.
        group: The group of all ranks of the model. None: there is one rank.

    Attributes:
        units: The units that are unsharded.
    """

    def __init__(
        self, units: Sequence[Unit], guard: ParameterGuard, group: ProcessGroup | None
    ) -> None:
        self._guard = guard
        self._group = group
        self.units = units
        buffers = [buffer for unit in units for buffer in unit.buffers]
        self._orders = [(module, list(module._parameters)) for module in holders(buffers)]
        self._installed = [_Installed(buffer) for buffer in buffers]

    def write_back(self) -> None:
        """Write the values of the modules' parameters to the main weights. Collective.

        Raises:
            ValueError: A parameter cannot be written back on some rank; names the parameter. Raised
                on all ranks, before anything is written.
        """
        error: Exception | None = None
        found: list[list[Tensor]] = []
        try:
            self._guard.check_places()
            found = self._find_values()
        except ValueError as raised:
            error = raised
        self._check_ranks_agree(error, found)
        for installed, values in zip(self._installed, found, strict=True):
            buffer = installed.buffer
            for index, (value, view) in enumerate(zip(values, installed.views, strict=True)):
                held = self._held(buffer, index)
                if value is not view:
                    view.copy_(value)
                    self._guard.remember(buffer.sharded_params[index], held)
                sharded = buffer.sharded_params[index]
                if sharded.requires_grad is not held.requires_grad:
                    sharded.requires_grad_(held.requires_grad)
            write_main(buffer, installed.main)
            buffer.weights.mark_stale()

    def uninstall(self) -> None:
        """Install the sharded parameters in the modules again."""
        for unit in self.units:
            install_into(unit.buffers, [buffer.sharded_params for buffer in unit.buffers])
        for module, names in self._orders:
            # Restore the order after a deletion: all ranks must iterate in the same order.
            if list(module._parameters) != names:
                present = dict(module._parameters)
                module._parameters.clear()
                module._parameters.update(
                    {name: present.pop(name) for name in names if name in present}
                )
                module._parameters.update(present)

    @staticmethod
    def _held(buffer: ParamAndGradBuffer, index: int) -> Tensor:
        """Returns the tensor at the first place of parameter ``index`` in the modules."""
        module, attribute = buffer.records[index].holders[0]
        held = dict.__getitem__(module._parameters, attribute)
        assert held is not None
        return held

    def _find_values(self) -> list[list[Tensor]]:
        """Returns the values to write back for each buffer and parameter: the view of the installed
        memory if the values are in it, otherwise a copy.

        Raises:
            ValueError: A parameter cannot be written back; names the parameter.
        """
        memory = {key for each in self._installed for key in storage_keys(each.main.tensor)}
        taken: dict[int, str] = {}
        return [
            [
                self._find_value(installed, index, memory, taken)
                for index in range(len(installed.params))
            ]
            for installed in self._installed
        ]

    def _find_value(
        self, installed: _Installed, index: int, memory: set[int], taken: dict[int, str]
    ) -> Tensor:
        buffer, view = installed.buffer, installed.views[index]
        record, sharded = buffer.records[index], buffer.sharded_params[index]
        held = [dict.get(module._parameters, name) for module, name in record.holders]
        value: Tensor | None = held[0]
        problem = ""
        if any(each is None for each in held):
            problem = "none. Remove parameters before shard()"
        elif any(each is not value for each in held):
            problem = (
                f"other tensors at its names ({', '.join(record.aliases)}), which were tied. Untie "
                "parameters before shard()"
            )
        elif isinstance(value, FlatDTensor):
            problem = "a sharded tensor. Assign value.full_tensor()"
        elif value is not None and value.grad is not None:
            problem = (
                "a gradient (.grad), which main weights do not have. Compute it outside of the "
                "context"
            )
        if problem:
            raise _unwritable(record.name, problem)
        assert value is not None
        local = _local(value.detach())
        if _is_same_view(local, view) and type(value) is type(installed.params[index]):
            return view
        self._guard.check_value(sharded, value)
        if isinstance(value, DTensor) or isinstance(installed.params[index], DTensor):
            spread = buffer.placement(index).spread
            if spread is None or not spread.has(value):
                raise _unwritable(
                    record.name,
                    f"a {type(value).__name__} of other placements. Assign a DTensor of the "
                    "parameter's own mesh and placements",
                )
        if not set(storage_keys(local)).isdisjoint(memory) and not begin_together(local, view):
            problem = "memory of another parameter. Tie parameters before shard()"
        first = local.data_ptr() if local.numel() else 0
        if first and (other := taken.setdefault(first, record.name)) != record.name:
            problem = f"the memory of {other}, which ties them. Tie parameters before shard()"
        if problem:
            raise _unwritable(record.name, problem)
        return local.clone()

    def _check_ranks_agree(
        self, error: Exception | None, found: Sequence[Sequence[Tensor]]
    ) -> None:
        """Check that no rank has an error and that ranks changed values identically. Collective.

        Args:
            error: The error of this rank.
            found: The values to write back.

        Raises:
            Exception: The error of a rank, or a ValueError if values differ. Raised on all ranks.
        """
        pairs = list(zip(self._installed, found, strict=False))
        prints = [each.fingerprints(values) for each, values in pairs]
        is_changed = prints != [each.prints for each, _ in pairs]
        if not any(agree(_WHAT, error, self._group, is_changed)):
            return
        # Ranks of the same mesh share parameters. The first rank of a mesh identifies it.
        meshes = [each.buffer.mesh.ranks[0] for each, _ in pairs]
        answers: list[Any] = gather_objects((meshes, prints), self._group, _WHAT)
        for place, (installed, _) in enumerate(pairs):
            for index, record in enumerate(installed.buffer.records[: len(prints[place])]):
                values: dict[int, set[int]] = {}
                for its_meshes, its_prints in answers:
                    values.setdefault(its_meshes[place], set()).add(its_prints[place][index])
                if any(len(each) > 1 for each in values.values()):
                    raise ValueError(
                        f"{record.name}: expected the same edits within {_WHAT} on all ranks; "
                        "found different values. Make the same edits on all ranks (the same seed "
                        "before random values), or broadcast the values"
                    )


def _unwritable(name: str, problem: str) -> ValueError:
    return ValueError(
        f"{name}: expected, at the end of {_WHAT}, the values of a parameter that the model had "
        f"when it was sharded; found {problem}"
    )


def _refuse_gradient(name: str, param: Tensor) -> None:
    param.grad = None
    raise RuntimeError(
        f"{name}: expected a backward to parameters of the sharded model; found one to the full "
        f"weights of {_WHAT}, which have no gradients. Compute the loss outside of the context"
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.shape == other.shape
        and one.stride() == other.stride()
        and type(one) is type(other)
        and begin_together(one, other)
    )


class _Contexts:
    """The ``unsharded`` contexts of one engine that are currently entered.

    Args:
        engine: Unused.

    Attributes:
        entered: The full main weights of each context, outermost first.
    """

    def __init__(self, engine: Engine) -> None:
        del engine
        self.entered: list[FullMainWeights] = []


def _sharded_units(engine: Engine) -> list[Unit]:
    """Returns the units whose parameters are currently sharded in the modules."""
    entered = engine.extension(_Contexts).entered
    full = {unit.index for main in entered for unit in main.units}
    return [unit for unit in engine.units if unit.index not in full]


@contextmanager
def unsharded(engine: Engine, *modules: nn.Module) -> Iterator[None]:
    """Context within which modules hold full main weights; edits are written back at its end.

    Collective, and every rank must make the same edits: in place, by ``param.data``, or by putting
    other tensors into the modules. Parameters keep the ``requires_grad`` that they have at the end.
    Forwards need ``no_grad``. If the block raises, nothing is written back. Modules that an outer
    context has unsharded are written back by the outer context.

    Args:
        engine: The engine of the model.
        *modules: The modules to unshard. None given: the whole model.

    Raises:
        RuntimeError: A forward or backward is running.
        ValueError: A module is not part of the model. At the end, on all ranks and before anything
            is written: a parameter was added, removed, tied or untied, or has another shape, a
            wider dtype or different values on some ranks; names the parameter.
    """
    if not engine.scheduler.is_at_rest:
        raise RuntimeError(
            "unsharded(): expected no forward or backward in progress; found one (after an "
            "exception, call engine.reset())"
        )
    engine.scheduler.await_ranks()
    wanted = _units_of(engine, modules)
    units = [unit for unit in _sharded_units(engine) if unit in wanted]
    for unit in units:
        unit.release()
    main = FullMainWeights(units, engine.guard, engine.ranks.control_group)
    for unit in units:
        engine.hooks.pause(unit, paused=True)
    entered = engine.extension(_Contexts).entered
    entered.append(main)
    engine.guard.paused = True
    try:
        yield
        main.write_back()
    finally:
        entered.remove(main)
        engine.guard.paused = bool(entered)
        main.uninstall()
        for unit in units:
            engine.hooks.pause(unit, paused=False)


def _is_unsharded(engine: Engine) -> bool:
    """Whether the modules hold full main weights of all units, within ``unsharded``."""
    return not _sharded_units(engine)


is_unsharded = property(_is_unsharded)


def _units_of(engine: Engine, modules: tuple[nn.Module, ...]) -> list[Unit]:
    if not modules:
        return list(engine.units)
    wanted = set()
    for module in modules:
        if engine_of(module) is not engine and has_parameters(module):
            raise ValueError(
                f"unsharded(): expected modules of the sharded model; found a "
                f"{type(module).__name__} that is not part of it"
            )
        wanted |= {id(inner) for inner in module.modules()}
    return [
        unit
        for unit in engine.units
        if any(id(module) in wanted for module in holders(unit.buffers))
    ]
