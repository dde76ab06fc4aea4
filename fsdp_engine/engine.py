"""The ``Engine`` of a sharded model, which ``fe.shard`` returns."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.lanes import Lane
from fsdp_engine.comm.pending_steps import finish_pending_steps
from fsdp_engine.extension_list import find, implementation, names_of, other_places, register
from fsdp_engine.memory.allocator import DEVICE, HOST, Memory
from fsdp_engine.optim.clip import clip_, total_norm
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.options import Timing
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.gradient_hooks import hook_gradients
from fsdp_engine.runtime.model_hooks import ModelHooks
from fsdp_engine.runtime.open_files import flush_at_exit
from fsdp_engine.runtime.parameter_guard import ModuleApply, ParameterGuard
from fsdp_engine.runtime.parameter_watch import ModelWatch
from fsdp_engine.runtime.reductions import Reductions
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.strategies import Role
from fsdp_engine.units.assignment import expect, has_parameters
from fsdp_engine.units.build import EngineCommunicators, Resources, same_on_replicas
from fsdp_engine.units.plan import label_of

if TYPE_CHECKING:
    from fsdp_engine.runtime.missing_values import MissingValues

T = TypeVar("T")

# Advice for programs that use the engine as a module, or as the engine of another library.
_USE_THE_MODEL = "fe.shard changes the model in place: use the model for this"
_REPLACEMENTS = {
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "save_checkpoint": "fe.Checkpointer",
    "load_checkpoint": "fe.Checkpointer",
}

# Keys and values are weak references: an engine refers to its model, and a value that refers to its
# key would never be collected. The model's hooks keep the engine alive.
_ENGINES: MutableMapping[nn.Module, weakref.ref[Engine]]
_ENGINES = WeakIdKeyDictionary()  # Compares by identity: modules may define ``==``.


class EnginePart(Protocol):
    """A part of an engine that copies between the device and other memory, on lanes of its own.

    This class is a seam (see ``docs/design.md``): extensions append such objects to
    :attr:`Engine.parts`.
    """

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes of the part."""

    def drain(self) -> Sequence[Exception]:
        """Finish all submitted work, and drop work that an exception has interrupted. Returns the
        errors of failed work instead of raising them."""


class ExtensionMethod:
    """A method of :class:`Engine` that an extension provides. The extension is imported at the
    first use.

    Args:
        name: The name of the method. ``extension_list.py`` lists all names.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, engine: Engine | None, kind: type[Engine]) -> Any:
        return find("methods", self._name).__get__(engine, kind)


class Engine:
    """The engine of a sharded model, which ``fe.shard`` returns.

    Extensions provide further methods, which :class:`ExtensionMethod` imports at their first use.

    Attributes:
        model: The user's module.
        mesh: The data-parallel ranks.
        ranks: All ranks of the model. These are the ranks of ``mesh``, and more if parameters are
            DTensors over other mesh dimensions.
        strategy: The sharding levels of the inner and the outer axis of ``mesh``.
        options: The options of the engine.
        policy: The dtypes of the engine.
        units: The units of the model, the root first.
        budget: The prefetch window in elements.
        staging_budget: The limit on staging buffers of gradients in flight.
        model_part: "1 of 4", for example, if ``model`` is a stage of a larger model. A checkpoint
            folder belongs to one stage. "": no stage is known.
        communicators, scheduler, reductions, lanes, guard, hooks: Internal objects, for extensions.
        parts: Objects with lanes of their own (``EnginePart``), which extensions add.
        total_norm: The function that computes the norm of gradients. An extension may replace it.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        communicators: EngineCommunicators,
        resources: Resources,
        policy: MixedPrecisionPolicy,
        timing: Timing,
    ) -> None:
        mesh, options = communicators.data.mesh, resources.options
        self.model = model
        self.mesh = mesh
        self.communicators = communicators
        self.ranks = communicators.ranks
        self.strategy = communicators.axis_plans.data.strategy
        self.options = options
        self.policy = policy
        self._timing = timing
        self.model_part = ""
        self._other_weights = ""
        self._memory, self.lanes = resources.memory, resources.lanes
        self.units = list(units)
        for index, unit in enumerate(self.units):
            unit.index = index
        blocks = [unit.num_elements for unit in self.units[1:] if not unit.loose]
        others = [unit.num_elements for unit in self.units if unit.buffers]
        self.budget, self.staging_budget = options.budgets(blocks, others)
        expected = expect(model, [unit.modules for unit in self.units])
        self.reductions = implementation(Reductions)(
            self.units,
            self.lanes,
            self.ranks,
            self.staging_budget,
            timing,
        )
        self.scheduler = implementation(Scheduler)(
            self.units,
            self._memory,
            self.budget,
            self.reductions,
            timing,
            expected,
            implementation(ModelWatch)(self),
        )
        self.guard = implementation(ParameterGuard)(self)
        self.hooks = ModelHooks(self.units, self.scheduler, self.guard.check, self)
        self.guard.start(self.hooks.modules)
        for module in model.modules():
            vars(module)["_apply"] = ModuleApply(module, self)
        for unit in self.units:
            unit.start(self.scheduler)
            hook_gradients(self.scheduler, unit)
        self.parts: list[EnginePart] = []
        self.total_norm = total_norm
        self._extensions: dict[Callable[[Engine], Any], Any] = {}
        self._sharded_ids = {id(param) for each in self.buffers for param in each.sharded_params}
        for module in model.modules():
            _ENGINES[module] = weakref.ref(self)
        for placement in dict.fromkeys(each.context.placement for each in self.buffers):
            placement.start(self)
        add_step_listener(self)
        flush_at_exit()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError. (For type checkers, this declares the methods of extensions.)"""
        advice = ""
        if hasattr(nn.Module, name) or name == "module":
            advice = f". {_USE_THE_MODEL}"
        if name == "state_dict":
            advice += ", or engine.full_state_dict() for full weights"
        if name in _REPLACEMENTS:
            advice = f". Use {_REPLACEMENTS[name]}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError, because the model is called, not the engine."""
        raise TypeError(
            f"Engine: expected a call of the model; found a call of the engine. {_USE_THE_MODEL}"
        )

    def __repr__(self) -> str:
        ranks = f"{self.mesh.outer.size} x {self.mesh.inner.size} ranks"
        return f"<Engine: {self.strategy} on {ranks}, {len(self.units)} units>"

    def extension(self, kind: Callable[[Engine], T]) -> T:
        """Returns the object that an extension stores in this engine. The first call creates it by
        ``kind(engine)``; later calls with the same ``kind`` return the same object."""
        if kind not in self._extensions:
            self._extensions[kind] = kind(self)
        found: T = self._extensions[kind]
        return found

    @property
    def buffers(self) -> list[ParamAndGradBuffer]:
        """The buffers of all units."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    @cached_property
    def missing_values(self) -> MissingValues:
        """The parameters and buffers of the model that have no valid values, because nothing was
        loaded into them yet or because a load failed half way."""
        from fsdp_engine.runtime.missing_values import MissingValues

        return MissingValues(self.model, self._check_load)

    def _check_load(self, *args: object) -> None:
        """Check, before a load of weights, that the model holds the trained weights."""
        self.check_trained_weights("load of weights")

    @contextmanager
    def hold_other_weights(self, weights: str) -> Iterator[None]:
        """Returns a context within which :meth:`check_trained_weights` and loads raise, because the
        model holds other weights than the trained ones. For extensions that swap the weights.

        Args:
            weights: A description of these weights, for messages.
        """
        before, self._other_weights = self._other_weights, weights
        hook = self.model.register_load_state_dict_pre_hook(self._check_load)
        try:
            yield
        finally:
            hook.remove()
            self._other_weights = before

    def check_sharded(self, what: str) -> None:
        """Check that modules do not hold full main weights, because operations on the sharded main
        weights do not change these.

        Args:
            what: Name of the operation in the message.

        Raises:
            RuntimeError: The call is within ``unsharded()``.
        """
        if not self.guard.paused:
            return
        for buffer in self.buffers:
            for index in range(len(buffer.records)):
                if self.guard.full_main(buffer, index) is not None:
                    raise RuntimeError(
                        f"{what}: expected {buffer.records[index].name} to be sharded; found its "
                        "full main weight, within engine.unsharded(). Call this outside of "
                        "unsharded(). If it is a context manager, enter it before unsharded()"
                    )

    def check_trained_weights(self, what: str) -> None:
        """Check that the model holds the trained weights.

        Args:
            what: Name of the operation in the message.

        Raises:
            RuntimeError: The call is within :meth:`hold_other_weights`.
        """
        if self._other_weights:
            raise RuntimeError(
                f"{what}: expected the trained weights in the model; found {self._other_weights}. "
                "Leave the context first"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which a backward is not the last one of its step.

        Within the context, gradients are accumulated. They are reduced only along axes over which
        gradients are sharded.
        """
        before = self.reductions.sync
        self.reductions.sync = False
        try:
            yield
        finally:
            self.reductions.sync = before

    def gather_ahead(self, unit: Unit) -> None:
        """Prefetch the parameters of a unit. Collective, except within ``together``, where ranks
        that do not need the unit take part without calling this method.

        Args:
            unit: One of ``units``.
        """
        self.scheduler.gather_ahead(unit)

    def await_ranks(self) -> None:
        """Take part in the gathers of other ranks until no rank needs one. Collective. Does nothing
        outside of ``together``.

        Within ``together``, call this before a collective of your own: ``dist.all_reduce`` of a
        metric, or ``full_tensor()`` or ``nn.utils.clip_grad_norm_`` of sharded parameters. Methods
        of the engine, ``even_batches``, optimizer steps and checkpoints call it themselves.

        Raises:
            RuntimeError: Another rank raised an exception within ``together``.
        """
        self.scheduler.await_ranks()

    def start_grad_sync(self, *, wait: bool = False) -> None:
        """Issue the last reductions of the step, unless backward has issued them. Collective.

        Args:
            wait: Wait for the reductions before returning.
        """
        self.scheduler.await_ranks()
        self.reductions.start(wait=wait)

    def finish_grad_sync(self) -> None:
        """Finish the reductions of the step and publish them as ``.grad`` of sharded parameters.
        Collective.

        Raises:
            RuntimeError: A backward has not ended, or modules postponed weight gradients. The
                message names the parameters. Also raised, on all ranks, if checks of gradients
                found a NaN, an infinite value or a value that is too large.
        """
        self.scheduler.await_ranks()
        self.reductions.finish()
        self.reductions.run_hooks()

    def start_param_sync(self, *, wait: bool = False) -> None:
        """Issue the gathers of changed weights before the next forward. Collective.

        Args:
            wait: Wait for the gathers before returning.
        """
        self.scheduler.await_ranks()
        self.scheduler.gather_before_forward(wait=wait, sharded=not self.scheduler.ranks_differ)

    def wait_for_reductions(self) -> None:
        """Wait for the reductions in flight, without issuing others."""
        self.reductions.wait()

    def wait_for_gathers(self) -> None:
        """Wait for the gathers in flight, and free prefetched parameters."""
        self.scheduler.wait_for_gathers()

    def zero_grad_buffer(self, *, zero: bool = True) -> None:
        """Begin a new step: clear all gradients, and set ``.grad`` to None.

        Args:
            zero: Also write zeros into the buffers. False: the next gradients overwrite them.
        """
        self.reductions.clear(zero=zero)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by ``factor``, a number or a 0-d tensor, in place."""
        self.reductions.scale(factor)

    def broadcast_params(self) -> None:
        """Copy the weights of the first rank of each set of replicas to the others. Collective."""
        from fsdp_engine.buffers.full_values import present_main, write_main

        self.scheduler.await_ranks()
        for buffer in self.buffers:
            main = present_main(buffer)
            same_on_replicas(buffer, main.tensor)
            write_main(buffer, main)
        self.weights_changed()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``. Collective.

        Args:
            max_norm: The largest norm that is not scaled. inf: the norm is only computed.
            norm_type: The p of the p-norm; inf or "inf" for the largest magnitude.
            error_if_nonfinite: Raise an error if the norm is NaN or infinite. This needs a host
                sync.

        Returns:
            The norm before clipping, a plain 0-d tensor that is equal on all ranks.

        Raises:
            RuntimeError: A gradient is accumulated and not reduced, or the norm is not finite and
                ``error_if_nonfinite`` is True.
            ValueError: ``norm_type`` is not positive.
        """
        params = (param for buffer in self.buffers for param in buffer.sharded_params)
        self.reductions.check_reduced(params, "clip_grad_norm_")
        self.scheduler.await_ranks()
        self.reductions.wait()
        num_others = self.ranks.size // self.mesh.size
        present = [
            part
            for buffer in self.buffers
            for part in buffer.counted_gradients(self.ranks.size, num_others)
        ]
        shards = [shard for shard, _ in present]
        group, copies = self._optim_group(), None
        if num_others > 1 or any(buffer.kind.is_expert for buffer in self.buffers):
            # Ranks hold different experts, or shards of DTensors over other mesh dimensions. The
            # norm is over all of their elements, and counts each element once.
            group, copies = self.ranks.control_group, [count for _, count in present]
        norm = self.total_norm(shards, float(norm_type), group, self.mesh.device, copies)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"clip_grad_norm_: expected a finite gradient norm; found {norm}")
        clip_(shards, norm, max_norm)
        return norm

    def full_tensor(self, name: str) -> Tensor:
        """Returns a copy of the full main weights of one parameter, on every rank. Collective.

        Raises:
            KeyError: The model has no parameter named ``name``.
        """
        self.scheduler.await_ranks()
        for buffer in self.buffers:
            for index, record in enumerate(buffer.records):
                if name in record.aliases:
                    full = self.guard.full_main(buffer, index)
                    value = buffer.sharded_params[index].detach() if full is None else full
                    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
        raise KeyError(f"name: expected a parameter of the model; found {name!r}")

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the model's ``state_dict`` with full main weights in host memory. Collective.

        The weights of one buffer at a time are gathered on the device. Buffers of modules (such as
        running statistics) are this rank's.

        Args:
            rank0_only: Only rank 0 of the mesh keeps the values; the others return an empty dict.

        Raises:
            RuntimeError: Parameters have no values, because none were loaded or a load failed half
                way.
            ValueError: A module has another parameter than at ``shard()``. The message names it.
        """
        from fsdp_engine.buffers.full_values import full_main, gather_main

        self.missing_values.check()
        self.check_modules()
        self.scheduler.await_ranks()
        keeps = not rank0_only or self.mesh.rank == 0
        # Keys are names and ids of parameters: the state dict of a wrapper module may have names
        # without the prefix of the wrapper.
        gathered: dict[str | int, Tensor] = {}
        for buffer in self.buffers:
            if self.guard.full_main(buffer, 0) is not None:
                continue
            flat = gather_main(buffer)
            for index, record in enumerate(buffer.records):
                whole = full_main(buffer, flat, index)
                if keeps:
                    value = whole.detach().cpu().clone()
                    sharded = id(buffer.sharded_params[index])
                    gathered.update(dict.fromkeys([sharded, *record.aliases], value))
        if not keeps:
            return {}
        state = self.model.state_dict(keep_vars=True)
        for key, value in state.items():
            if (found := gathered.get(id(value), gathered.get(key))) is not None:
                state[key] = found
            elif isinstance(value, Tensor):  # an extra state may be an object of any type
                full = value.full_tensor() if isinstance(value, DTensor) else value
                state[key] = full.detach().cpu().clone()
        return dict(state)

    def check_modules(self) -> None:
        """Check that the modules have the parameters that they had at ``shard()``, and no others.

        Values that were assigned to known parameters are copied into the shards. While a forward or
        backward is running, nothing is checked.

        Raises:
            ValueError: A parameter was added, removed or replaced. The message names it.
        """
        if self.scheduler.is_at_rest:
            self.guard.check_all()

    def reset(self) -> None:
        """Drop the running forward or backward after an exception. Weights are not changed.

        Accumulated gradients are dropped. Every rank must call this method, even if it raised no
        exception itself, because all ranks lose the microbatch.
        """
        finish_pending_steps()
        ended = [self.lanes.drain(), *(part.drain() for part in self.parts)]
        for error in chain.from_iterable(ended):
            warnings.warn(f"while resetting: {error}", stacklevel=2)
        self.hooks.reset()
        self.scheduler.reset()

    def memory_bytes(self, place: str = DEVICE) -> dict[str, int]:
        """Returns the bytes that the engine holds now on this rank, by role.

        Args:
            place: "device": memory of the device on which the model computes. "host", or another
                place that an extension adds: bytes that extensions hold there, also between steps.

        Raises:
            ValueError: There is no such place.
        """
        if place not in (places := (DEVICE, HOST, *other_places())):
            raise ValueError(f"place: expected one of {places}; found {place!r}")
        memory = self._memory
        held = memory.ledger.held if place == DEVICE else memory.elsewhere.get(place, Counter())
        return {role: count for role, count in held.items() if count}

    @property
    def memory(self) -> Memory:
        """The allocator of the engine, with its ledger."""
        return self._memory

    @property
    def idle_memory_bytes(self) -> int:
        """Bytes of freed transient storages that are kept for reuse, in addition to the bytes of
        ``memory_bytes``. They are freed at the end of a step's last backward. 0 on accelerators,
        whose caching allocator keeps freed memory."""
        return self._memory.idle_bytes

    def peak_memory_bytes(self, *, reset: bool = False) -> dict[str, int]:
        """Returns the largest number of bytes held so far by each role, and by all roles at one
        time ("total"). Peaks of roles can be at different times.

        Args:
            reset: Restart the peaks from the bytes that are held now.
        """
        ledger = self._memory.ledger
        peak = {role: count for role, count in ledger.peak.items() if count}
        peak["total"] = ledger.peak_total
        if reset:
            ledger.reset_peak()
        return peak

    def weights_changed(self) -> None:
        """Mark main weights as changed, so that the next forward gathers them. Call it on all
        ranks.

        The engine detects changes by functions of torch, and by collectives on
        ``param.to_local()``. Call this method after other writes: by collectives on
        ``param.local``, by your own kernels, or through NumPy arrays and DLPack tensors that were
        made before the last forward.
        """
        for buffer in self.buffers:
            buffer.weights.mark_stale()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` steps with reduced gradients. Called before each step of any
        optimizer.

        Raises:
            RuntimeError: A gradient is not reduced. The message names the parameter.
        """
        groups = optimizer.param_groups
        params = (param for group in groups for param in group["params"])
        self.reductions.check_reduced(params, "optimizer step")
        if not self.scheduler.is_at_rest and self.is_stepped_by(optimizer):
            self.scheduler.warn_if_computing("optimizer step")
        self.scheduler.note_gradients(optimizer)
        if self.scheduler.ranks_differ and self.is_stepped_by(optimizer):
            self.scheduler.await_ranks()  # other ranks may still gather these weights
        if self.scheduler.before_changes and self.is_stepped_by(optimizer):
            for each in self.scheduler.before_changes:
                each()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark main weights as changed. Called after each step of any optimizer."""
        self.guard.check_optimizer(optimizer)
        # Any optimizer may change main weights: it may hold copies, which it writes back.
        for buffer in self.buffers:
            if buffer.grads is not None:  # optimizers do not change frozen weights
                buffer.weights.mark_stale()
        kept = [unit for unit in self.units if unit.kept]
        if kept and self.is_stepped_by(optimizer):
            for unit in kept:
                unit.drop_recorded()
        self.scheduler.invalidate_graphs(optimizer)
        gathers_now = not self._timing.gathers_in_forward and self.is_stepped_by(optimizer)
        if gathers_now or self.scheduler.ranks_differ:  # some ranks may not run another forward
            self.scheduler.gather_before_forward(wait=True, sharded=False)

    @property
    def number(self) -> int:
        """The index of this engine among the engines of the same ranks, in order of creation. It
        is the same on all of these ranks."""
        return self.communicators.data.number

    @property
    def has_trained(self) -> bool:
        """Whether gradients of a step were reduced since ``shard()``."""
        return self.reductions.num_steps > 0

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether ``optimizer`` has parameters of this engine."""
        own = self._sharded_ids
        return any(
            id(param) in own for group in optimizer.param_groups for param in group["params"]
        )

    def _optim_group(self) -> torch.distributed.ProcessGroup | None:
        """Returns the group over which reduced gradients are sharded; None: they are not
        sharded."""
        depth = self.strategy.depth(Role.OPTIM)
        if depth == 0:
            return None
        return self.mesh.inner.reduce_group if depth == 1 else self.mesh.control_group


for _name in names_of("methods"):
    setattr(Engine, _name, ExtensionMethod(_name))


def engine_of(module: nn.Module) -> Engine | None:
    """Returns the engine of the model that contains ``module``; None: it is not sharded."""
    reference = _ENGINES.get(module)
    return reference() if reference is not None else None


def engine_within(model: nn.Module) -> str | None:
    """Returns the name of a module of ``model`` that already belongs to an engine, or None.

    Modules without parameters are ignored, because several models may share one (a default
    argument of a constructor, for example).
    """
    for name, module in model.named_modules():
        if engine_of(module) is not None and has_parameters(module):
            return label_of(name)
    return None


register()
