"""The :class:`Engine` of a sharded model, which :func:`~fsdp_engine.sharding.shard` returns."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.pending_steps import finish_pending_steps
from fsdp_engine.config import Timing
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.offload import DEVICE, DISK, HOST, PLACES, Offload
from fsdp_engine.optim.clip import clip_, total_norm
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.assigned_values import MissingValues
from fsdp_engine.runtime.conversion import Conversions
from fsdp_engine.runtime.hooks import hook_gradients, hook_recomputation
from fsdp_engine.runtime.mean_loss import MeanLosses
from fsdp_engine.runtime.microbatches import Microbatches, hook_delayed_gradients
from fsdp_engine.runtime.model_hooks import ModelHooks
from fsdp_engine.runtime.parameter_guard import ParameterGuard, refuse_copies, refuse_replicas
from fsdp_engine.runtime.record import Place
from fsdp_engine.runtime.reductions import Reductions, ReplicaReduction
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.runtime.written_weights import WrittenWeights
from fsdp_engine.strategies import Role
from fsdp_engine.units.assignment import expect, has_parameters
from fsdp_engine.units.build import EngineCommunicators, Resources, same_on_replicas
from fsdp_engine.units.installing import holders
from fsdp_engine.units.plan import label_of

if TYPE_CHECKING:
    from fsdp_engine.batches import EvenBatch
    from fsdp_engine.runtime.activations import ActivationOffload
    from fsdp_engine.runtime.full_main_weights import FullMainWeights
    from fsdp_engine.runtime.reports import Description, Measurement

T = TypeVar("T")

# Weak both ways: an engine knows its model, and a value that holds its key would never go. The
# model's hooks keep the engine.
_ENGINES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


class Engine:
    """The engine of a sharded model. Made by :func:`~fsdp_engine.sharding.shard`.

    Attributes:
        model: the user's module.
        mesh: the data-parallel ranks.
        ranks: all ranks of the model: ``mesh``, or more, where parameters are DTensors over other
            mesh dimensions.
        strategy: the levels of both axes.
        config: the options it was made with.
        policy: the dtypes it was made with.
        units: its units, the root first.
        budget: elements to prefetch.
        staging_budget: staging buffers of gradients that can be in flight.
        offload: where its state lies between uses.
        pipeline_stage: for checkpoints, such as "1 of 4"; "": none is known.
        missing_values: the parameters and buffers that have no valid values, because nothing was
            loaded into them yet or a load failed half way.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        communicators: EngineCommunicators,
        resources: Resources,
        policy: MixedPrecisionPolicy,
        timing: Timing,
        offload: Offload | None = None,
        activations: ActivationOffload | None = None,
    ) -> None:
        mesh, config = communicators.data.mesh, resources.config
        self.model = model
        self.mesh = mesh
        self.ranks = communicators.ranks
        self.strategy = communicators.axis_plans.data.strategy
        self.config = config
        self.policy = policy
        self._timing = timing
        self.missing_values = MissingValues(model)
        self.pipeline_stage = ""
        self._memory, self._lanes = resources.memory, resources.lanes
        self.units = list(units)
        for index, unit in enumerate(self.units):
            unit.index = index
        blocks = [unit.num_elements for unit in self.units[1:] if not unit.loose]
        others = [unit.num_elements for unit in self.units if unit.buffers]
        self.budget, self.staging_budget = config.budgets(blocks, others)
        expected = expect(model, [unit.modules for unit in self.units])
        if (pool := resources.pool) is not None:
            budgets = (self.budget, self.staging_budget)
            from fsdp_engine.runtime.rehearsal import predict_concurrent_units

            self._memory.expect(predict_concurrent_units(self.units, expected, *budgets))
            pool.register()
        trainable = [buffer for unit in self.units for buffer in unit.trainable]
        self._full_main_weights: list[FullMainWeights] = []
        self._mean_losses = MeanLosses(mesh, trainable)
        offloading = resources.offloading
        used = [offloading, *(each.offloading for unit in units for each in unit.buffers)]
        self._offloadings = list(dict.fromkeys(each for each in used if each is not None))
        checks = None
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            from fsdp_engine.runtime.gradient_checks import GradientChecks

            checks = GradientChecks(trainable, config, self.ranks.control_group, mesh.device)
        self._reductions = Reductions(
            self.units,
            self._lanes,
            self.ranks,
            self.staging_budget,
            timing,
            checks,
            self._mean_losses,
            [each for each in self._offloadings if each.moves("gradients")],
        )
        # Gathers read memory of the host, where users may change it.
        is_read = is_accelerator(mesh.device) and any(each.weights.home for each in self.buffers)
        self._end_gathers = self._lanes.drain_gathers if is_read else None
        self._scheduler = Scheduler(
            self.units,
            self._memory,
            self.budget,
            self._reductions,
            timing,
            expected,
            WrittenWeights(self.units, mesh.device, lambda: communicators.groups),
            self._end_gathers,
        )
        self._guard = ParameterGuard(model, self.units)
        self._hooks = ModelHooks(self.units, self._scheduler, self._guard.check, self)
        for module in self._hooks.modules:
            refuse_copies(module)
        if not all(buffer.is_plain for buffer in self.buffers):
            refuse_replicas(model)
        Conversions(
            self.units,
            communicators,
            config,
            lambda: self._scheduler.is_at_rest and not self._guard.paused,
            self._reductions.wait,
            self._reductions.are_reduced,
            self._offload_state,
        ).watch(model)
        for unit in self.units:
            hook_recomputation(self._scheduler, unit)
            hook_gradients(self._scheduler, unit)
            hook_delayed_gradients(self._scheduler, unit)
        self.offload = offload if offload is not None else Offload()
        self._offloading = offloading
        for unit in self.units:
            self._offload_state(unit)
        self._activations = activations
        self._measured: Measurement | None = None
        self._sharded_ids = {id(param) for each in self.buffers for param in each.sharded_params}
        for module in model.modules():
            _ENGINES[module] = weakref.ref(self)
        add_step_listener(self)

    def _offload_state(self, unit: Unit) -> None:
        """Optimizers step ``unit`` from where its state lies now."""
        offloading = self._offloading
        if offloading is not None and not offloading.steps_on_host:
            from fsdp_engine.optim.offloaded_step import offload_state

            buffers = [each.offloaded for each in unit.trainable]
            offload_state(offloading, unit.label, buffers, self._elements_of_a_chunk)

    @cached_property
    def _elements_of_a_chunk(self) -> int:
        """Of this rank's slices of trainable parameters, those of a unit in the mean. (With half of
        them a simulated step of 8B on 64 H100s copies 5 % longer: copies are short then.)"""
        units = [unit for unit in self.units if unit.trainable]
        slices = (each.weights.main.tensor.numel() for unit in units for each in unit.trainable)
        return sum(slices) // max(len(units), 1)

    @property
    def buffers(self) -> list[ParamAndGradBuffer]:
        """All buffers of all units."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    @cached_property
    def microbatches(self) -> Microbatches:
        """For schedules that interleave several microbatches, as pipelines do."""
        return Microbatches(self._scheduler)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context within which a backward is not the last one of its step.

        Gradients are accumulated; they are reduced only along axes that shard them.
        """
        before = self._reductions.sync
        self._reductions.sync = False
        try:
            yield
        finally:
            self._reductions.sync = before

    def even_batches(
        self, loader: Iterable[T], *, drop_last: bool = False
    ) -> Iterator[tuple[T, float]]:
        """Iterate over batches, on all ranks as often as on the rank that has most. Collective.

        A rank that has run out repeats its last batch with weight 0; one that has none at all gets
        a copy of another rank's first. Each rank reads one batch ahead, so that whether there is
        another one is known without waiting. Weight 0 takes a batch out of the loss alone: modules
        that update buffers in training (BatchNorm's running statistics) see it once more. Use
        ``drop_last=True`` with them, or ``eval()`` where the weight is 0.

        Example: a mean that is exact whatever the batches' sizes::

            for batch, weight in engine.even_batches(loader):
                loss, count = loss_sum_of(model, batch)
                engine.mean_loss(weight * loss, weight * count).backward()

        Args:
            loader: of this rank; it can have another number of batches on each rank, or none.
            drop_last: end with the rank that has fewest instead; no batch is repeated.

        Yields:
            (batch, weight): weight is 1.0, or 0.0 for a batch that is repeated.

        Raises:
            Exception: on all ranks, after the batches before it: a rank's loader raised.
            ValueError: on all ranks: a rank has no batch, and ``torch.save`` refuses another's.
        """
        for each in self.even_steps(loader, drop_last=drop_last):
            yield each.batch, float(not each.is_repeated)

    def even_steps(self, loader: Iterable[T], *, drop_last: bool = False) -> Iterator[EvenBatch[T]]:
        """As :meth:`even_batches`, for loops that need to know how many ranks have a batch.

        Args:
            loader, drop_last: see :meth:`even_batches`.

        Yields:
            The batch, whether it is repeated, and the number of ranks whose batch is not.

        Raises:
            Exception, ValueError: see :meth:`even_batches`.
        """
        from fsdp_engine.batches import even_batches

        await_ranks = self._scheduler.await_ranks
        return even_batches(self.ranks, loader, drop_last=drop_last, before_message=await_ranks)

    def mean_loss(self, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """Returns a 0-d tensor to call ``backward()`` on: reduced gradients will be those of the
        mean over the samples of all ranks and all microbatches of the step.

        The mean of the ranks' means, which backward of a mean gives, is another one where numbers
        of samples (or tokens) differ. Call it once a microbatch, on every rank, before the
        microbatch's backward; the first call is collective. The value of the tensor is no mean:
        :attr:`last_mean_loss` is. All of a microbatch's loss belongs into the sum: a term ``c``
        that is no mean over samples as ``count * c``. Microbatches whose backward does not run, or
        whose gradients are cleared, do not count. The result can be multiplied by numbers and added
        to other results. Parameters of the loss outside of this engine get gradients of sums, not
        of means.

        Args:
            loss_sum: one element that requires grad: the sum of the losses of this rank's samples
                in this microbatch.
            count: their number, a number or a tensor of one element, which is not waited for. 0: a
                batch that does not count.

        Raises:
            ValueError: other shapes, or a negative or infinite number.
            RuntimeError: within a pipeline, of which other ranks compute the loss. Of backward:
                gradients of an earlier step are not cleared, the step of the result is over,
                there is a penalty that was computed with sharded parameters, or another loss in
                the step, on this rank or on another one. Of an operation that adds another loss to
                the result.
        """
        if self._scheduler.microbatch is not None:
            raise RuntimeError(
                "mean_loss(): expected a model whose ranks all compute a loss; found a pipeline "
                "stage. Divide by the number of samples of all microbatches in the loss function"
            )
        if self._reductions.across_replicas is not None:
            raise RuntimeError(
                "mean_loss(): expected an engine with all ranks of the job; found replicas, whose "
                "numbers of samples it does not know. Return the mean of a microbatch"
            )
        if not self._mean_losses.has_divisor:
            self._scheduler.await_ranks()
        return self._mean_losses.add(loss_sum, count)

    @contextmanager
    def weighting_losses(self, weight: float) -> Iterator[Callable[[], int]]:
        """Context in which :meth:`mean_loss` multiplies sums and numbers by ``weight``; for
        trainers, whose users call it without knowing of batches that are repeated.

        Args:
            weight: of the microbatch.

        Yields:
            A function that returns how often :meth:`mean_loss` was called in the context.
        """
        losses = self._mean_losses
        before, losses.weight = losses.weight, weight
        num_calls = losses.num_calls
        try:
            yield lambda: losses.num_calls - num_calls
        finally:
            losses.weight = before

    @property
    def last_mean_loss(self) -> Tensor | None:
        """The mean loss of the last step whose microbatches called :meth:`mean_loss`, over the
        samples of all ranks and microbatches: 0-d, fp32, the same on all ranks; NaN without
        samples. None before the first."""
        return self._mean_losses.last

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context within which ranks can use different modules: for training, evaluation and
        generation. Collective: all ranks enter it, and leave it together.

        Ranks may leave out modules, use them in any order and as often as they like, and without
        gradients run different numbers of forwards. With gradients each rank runs as many
        backwards; gradients are those of the mean over ranks, as at other levels. A rank that has
        finished its backward, or leaves the context, takes part in the gathers of the others until
        all have. No other collective may run between a forward's begin and that. Each gather takes
        one small message more. At levels below ``optim_grads_params``, where ranks may differ
        anyway, it costs one message for each backward.

        Example: towers for images and sound, of which a rank's batch has one, or none::

            for batch in loader:
                with engine.together():
                    model(batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        Raises:
            RuntimeError: a forward or backward is running, or contexts are nested; or another rank
                raised an exception within the context. On all ranks: they ran different numbers of
                backwards; names the ranks and where they wait.
        """
        if not any(unit.reshards or unit.needs_refresh for unit in self.units):
            yield
            return
        self._scheduler.begin_rounds(self.ranks)
        try:
            try:
                yield
            except GeneratorExit:  # a generator of the user's was closed within the context
                self._scheduler.await_ranks(Place.EXIT)
                raise
            self._scheduler.await_ranks(Place.EXIT)
        except Exception:
            self._scheduler.abandon_rounds()
            raise
        finally:
            self._scheduler.end_rounds()

    def gather_ahead(self, unit: Unit) -> None:
        """Issue the gather of a unit before its use. Collective, but within :meth:`together`: there
        ranks that do not need the unit take part.

        Args:
            unit: one of :attr:`units`.
        """
        self._scheduler.gather_ahead(unit)

    @property
    def ranks_can_differ(self) -> bool:
        """Whether ranks may now run different numbers of forwards without gradients: within
        :meth:`together`, or where forwards do not communicate."""
        if self._scheduler.in_rounds or not self._sharded_units:
            return True
        return not any(unit.reshards or unit.needs_refresh for unit in self.units)

    def await_ranks(self) -> None:
        """Within :meth:`together`, take part in the gathers of other ranks until none needs any;
        elsewhere do nothing. Collective.

        To be called before a collective of the user's own within the context: ``dist.all_reduce``
        of a metric, ``full_tensor()`` or ``nn.utils.clip_grad_norm_`` of sharded parameters. The
        engine's own methods, ``even_batches``, optimizer steps and checkpoints call it.

        Raises:
            RuntimeError: another rank raised an exception within the context.
        """
        self._scheduler.await_ranks()

    def start_grad_sync(self, *, wait: bool = False) -> None:
        """Issue the last reductions of the step, unless backward has. Collective.

        Args:
            wait: return when they are done.
        """
        self._scheduler.await_ranks()
        self._reductions.start(wait=wait)

    def finish_grad_sync(self) -> None:
        """On return gradients are final: ``.grad`` of sharded parameters. Collective.

        Raises:
            RuntimeError: a backward is not over, or modules postponed weight gradients; names the
                parameters. Or, on all ranks, checks of gradients found a NaN, an infinite or a
                large value.
        """
        self._scheduler.await_ranks()
        self._reductions.finish()
        self._reductions.run_hooks()

    def start_param_sync(self, *, wait: bool = False) -> None:
        """Issue the gathers of changed weights before the next forward. Collective.

        Args:
            wait: return when they are done.
        """
        self._scheduler.await_ranks()
        self._scheduler.gather_before_forward(wait=wait, sharded=not self._scheduler.in_rounds)

    def wait_for_reductions(self) -> None:
        """Wait for the reductions in flight; issue none."""
        self._reductions.wait()

    def wait_for_gathers(self) -> None:
        """Wait for the gathers in flight, and free prefetched parameters."""
        self._scheduler.wait_for_gathers()

    def set_replica_reduction(self, reduction: ReplicaReduction | None) -> None:
        """Reduce the step's gradients over replicas of this engine, which other jobs train.

        Args:
            reduction: called with this rank's parts of the reduced gradients before they are
                published; None: there are no other replicas. Where it returns None, the gradients
                are cleared.
        """
        self._reductions.across_replicas = reduction

    def zero_grad_buffer(self, *, zero: bool = True) -> None:
        """Begin a step: gradients are cleared, ``.grad`` is None.

        Args:
            zero: write zeros, too. False: the next gradients overwrite the buffers.
        """
        self._reductions.clear(zero=zero)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by ``factor`` (a number, or a 0-d tensor), in place."""
        self._reductions.scale(factor)

    def broadcast_params(self) -> None:
        """Copy weights from the first rank of each set of replicas to the others. Collective."""
        self._scheduler.await_ranks()
        for buffer in self.buffers:
            same_on_replicas(buffer)
        self.weights_changed()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``. Collective.

        Args:
            max_norm: the largest norm that is not scaled; inf only measures.
            norm_type: p of the p-norm, or inf.
            error_if_nonfinite: raise if the norm is NaN or infinite; waits for the device.

        Returns:
            The norm before clipping: a plain 0-d tensor, the same on every rank.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
            ValueError: ``norm_type`` is not positive.
        """
        self._scheduler.await_ranks()
        self._reductions.wait()
        num_others = self.ranks.size // self.mesh.size
        present = [
            part
            for buffer in self.buffers
            for part in buffer.counted_gradients(self.ranks.size, num_others)
        ]
        shards = [shard for shard, _ in present]
        group, copies = self._optim_group(), None
        if num_others > 1 or any(buffer.kind.is_expert for buffer in self.buffers):
            # Ranks hold different experts, or shards of DTensors: the norm is over all of them,
            # each element counted once.
            group, copies = self.ranks.control_group, [count for _, count in present]
        norm = total_norm(shards, norm_type, group, self.mesh.device, copies)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"clip_grad_norm_: expected a finite gradient norm; found {norm}")
        clip_(shards, norm, max_norm)
        return norm

    @contextmanager
    def unsharded(self, *modules: nn.Module) -> Iterator[None]:
        """Context within which modules hold full main weights; edits are written back at its end.

        Collective, and every rank must make the same edits: of values in place, of ``param.data``,
        or by other tensors that are put into the modules. Parameters are thawed and frozen as they
        are at the end. Forwards run under ``no_grad`` only. If the block raises, nothing is written
        back. Modules that an outer context has unsharded are left to it.

        Args:
            *modules: whose parameters; none: the whole model.

        Raises:
            RuntimeError: a forward or backward is running.
            ValueError: a module is not part of the model. At the end, on all ranks, before anything
                is written: a parameter was added, removed, tied or untied, has another shape or a
                wider dtype, or other values on some ranks; names it.
        """
        if not self._scheduler.is_at_rest:
            raise RuntimeError(
                "unsharded(): expected no forward or backward in progress; found one (after an "
                "exception, call engine.reset())"
            )
        self._scheduler.await_ranks()
        wanted = self._units_of(modules)
        units = [unit for unit in self._sharded_units if unit in wanted]
        for unit in units:
            unit.release()
        from fsdp_engine.runtime.full_main_weights import FullMainWeights

        main = FullMainWeights(units, self._guard, self.ranks.control_group)
        for unit in units:
            self._hooks.pause(unit, paused=True)
        self._full_main_weights.append(main)
        self._guard.paused = True
        try:
            yield
            main.write_back()
        finally:
            self._full_main_weights.remove(main)
            self._guard.paused = bool(self._full_main_weights)
            main.uninstall()
            for unit in units:
                self._hooks.pause(unit, paused=False)

    @property
    def _sharded_units(self) -> list[Unit]:
        """Units whose full main weights modules do not hold."""
        full = {unit.index for main in self._full_main_weights for unit in main.units}
        return [unit for unit in self.units if unit.index not in full]

    def _full_main_weight(self, sharded: Tensor) -> Tensor | None:
        """The full main weight that modules hold in place of a sharded parameter, if they do."""
        held = (main.full_of(sharded) for main in self._full_main_weights)
        return next((each for each in held if each is not None), None)

    def full_tensor(self, name: str) -> Tensor:
        """The full main weights of one parameter, a copy, on every rank. Collective.

        Raises:
            KeyError: the model has no parameter of that name.
        """
        self._scheduler.await_ranks()
        for buffer in self.buffers:
            for record, param in zip(buffer.records, buffer.sharded_params, strict=True):
                if name in record.aliases:
                    value = param.detach()
                    if (full := self._full_main_weight(param)) is not None:
                        value = full
                    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
        raise KeyError(f"name: expected a parameter of the model; found {name!r}")

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The model's ``state_dict`` with full main weights in host memory. Collective.

        One unit at a time is full on the device.

        Args:
            rank0_only: only rank 0 of the mesh keeps the values; others return an empty dict.

        Raises:
            RuntimeError: a load of a checkpoint failed half way.
            ValueError: a module has another parameter than at ``shard()``; names it.
        """
        self.missing_values.check()
        self.check_modules()
        self._scheduler.await_ranks()
        keeps = not rank0_only or self.mesh.rank == 0
        # By the parameter, too: a module around the model may have state without its own prefix.
        gathered: dict[str | int, Tensor] = {}
        for buffer in (each for unit in self._sharded_units for each in unit.buffers):
            flat = buffer.gather_main()
            for index, record in enumerate(buffer.records):
                whole = buffer.whole_main(flat, index)
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
            elif isinstance(value, Tensor):  # an extra state may be anything
                full = value.full_tensor() if isinstance(value, DTensor) else value
                state[key] = full.detach().cpu().clone()
        return dict(state)

    def check_modules(self) -> None:
        """Check that the modules have the parameters that they had at ``shard()``, and no others.

        Values that were assigned to known parameters are copied into the shards. Nothing is checked
        while a forward or backward is running.

        Raises:
            ValueError: a parameter was added, removed or replaced; names it.
        """
        if self._scheduler.is_at_rest:
            self._guard.check_all()

    def reset(self) -> None:
        """Drop the running forward or backward after an exception; weights are not changed.

        Accumulated gradients are dropped. Every rank must call it, since all of them lost a
        microbatch.
        """
        finish_pending_steps()
        ended = [self._lanes.drain(), *(each.drain() for each in self._offloadings)]
        for error in chain.from_iterable(ended):
            warnings.warn(f"while resetting: {error}", stacklevel=2)
        self._hooks.reset()
        self._scheduler.reset()
        if self._activations is not None:
            self._activations.reset()

    def describe(self) -> Description:
        """Returns the bytes that each unit holds and sends, those of offloaded state and
        activations, and the last result of :meth:`measure`; ``print`` shows a table."""
        from fsdp_engine.runtime.reports import describe_units

        places = (HOST, DISK)
        elsewhere = {place: held for place in places if (held := self.memory_bytes(place))}
        return describe_units(
            self.units, self.strategy, self.mesh, self.budget, self._measured, elsewhere
        )

    @contextmanager
    def measure(self) -> Iterator[Measurement]:
        """Context that measures how long compute waits for gathers, reductions and copies of
        offloaded state and activations, and the bytes held: see
        :class:`~.runtime.reports.Measurement`. :meth:`describe` shows the last one."""
        from fsdp_engine.runtime.reports import Measurement

        self._measured = Measurement(self._memory, self._scheduler)
        lanes = [*self._lanes.all, *(lane for each in self._offloadings for lane in each.lanes)]
        if self._activations is not None:
            lanes += self._activations.lanes
        with self._measured.noting(lanes, self._is_stepped_by) as measured:
            yield measured

    def memory_bytes(self, place: str = DEVICE) -> dict[str, int]:
        """Bytes that the engine holds now on this rank, by role.

        Args:
            place: "device": where the engine computes. "host", "disk": those that ``offload`` keeps
                there, and on the host those of offloaded activations, also between steps.

        Raises:
            ValueError: there is no such place.
        """
        if place not in PLACES:
            raise ValueError(f"place: expected one of {PLACES}; found {place!r}")
        memory = self._memory
        held = memory.ledger.held if place == DEVICE else memory.elsewhere.get(place, Counter())
        return {role: count for role, count in held.items() if count}

    @property
    def memory(self) -> Memory:
        """The allocator of the engine, with its ledger."""
        return self._memory

    @property
    def idle_memory_bytes(self) -> int:
        """Bytes beside those of :meth:`memory_bytes` that are kept for the next transient storage;
        they are freed with a step's last backward. 0 on accelerators, whose allocator keeps
        them."""
        return self._memory.idle_bytes

    def peak_memory_bytes(self, *, reset: bool = False) -> dict[str, int]:
        """Most bytes held so far by role, and "total" (of a moment, not a sum of peaks).

        Args:
            reset: restart the peak from the bytes that are allocated now.
        """
        ledger = self._memory.ledger
        peak = {role: count for role, count in ledger.peak.items() if count}
        peak["total"] = ledger.peak_total
        if reset:
            ledger.reset_peak()
        return peak

    def weights_changed(self) -> None:
        """Mark main weights as changed, so that the next forward sends them, on all ranks.

        Functions of torch, and collectives on ``param.to_local()``, mark weights by themselves.
        Call this after other writes: collectives on ``param.local``, kernels of your own, NumPy
        arrays and DLPack tensors that were taken before the last forward.
        """
        for buffer in self.buffers:
            buffer.weights.mark_stale()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer.

        Raises:
            RuntimeError: it would step with gradients that are not reduced; names the parameter.
        """
        groups = optimizer.param_groups
        self._reductions.check_step(param for group in groups for param in group["params"])
        if self._scheduler.in_rounds and self._is_stepped_by(optimizer):
            self._scheduler.await_ranks()  # others may gather these weights
        if self._end_gathers is not None and self._is_stepped_by(optimizer):
            self._end_gathers()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer: main weights count as changed."""
        self._guard.check_optimizer(optimizer)
        for buffer in self.buffers:
            if buffer.grads is not None:  # no optimizer changes frozen weights
                buffer.weights.mark_stale()
        gathers_now = not self._timing.gathers_in_forward and self._is_stepped_by(optimizer)
        if gathers_now or self._scheduler.in_rounds:  # where not all ranks may have a forward
            self._scheduler.gather_before_forward(wait=True, sharded=False)

    def _is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        own = self._sharded_ids
        return any(
            id(param) in own for group in optimizer.param_groups for param in group["params"]
        )

    def _units_of(self, modules: tuple[nn.Module, ...]) -> list[Unit]:
        if not modules:
            return list(self.units)
        wanted = set()
        for module in modules:
            if engine_of(module) is not self and has_parameters(module):
                raise ValueError(
                    f"unsharded(): expected modules of the sharded model; found a "
                    f"{type(module).__name__} that is not part of it"
                )
            wanted |= {id(inner) for inner in module.modules()}
        return [
            unit
            for unit in self.units
            if any(id(module) in wanted for module in holders(unit.buffers))
        ]

    def _optim_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks over which reduced gradients are sharded."""
        depth = self.strategy.depth(Role.OPTIM)
        if depth == 0:
            return None
        return self.mesh.inner.reduce_group if depth == 1 else self.mesh.control_group


def engine_of(module: nn.Module) -> Engine | None:
    """Returns the engine of the model that ``module`` belongs to; None: it is not sharded."""
    reference = _ENGINES.get(module)
    return reference() if reference is not None else None


def engine_within(model: nn.Module) -> str | None:
    """Returns the name of a module of ``model`` that an engine has already, or None.

    A module without parameters does not count: models share activation functions, as default
    arguments.
    """
    for name, module in model.named_modules():
        if engine_of(module) is not None and has_parameters(module):
            return label_of(name)
    return None
