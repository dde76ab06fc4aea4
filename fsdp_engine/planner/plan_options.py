"""The options of :func:`fsdp_engine.plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_engine.kernel_interface import allocator, find_module
from fsdp_engine.planner.candidates import check_checkpointing
from fsdp_engine.planner.command_fields import PlanFields
from fsdp_engine.planner.option_values import AUTO, SELECTIVE
from fsdp_engine.planner.outcome import USABLE
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.simulation_error import (
    check_callable,
    check_count,
    check_positive,
    check_type,
    listed,
)
from fsdp_engine.planner.state_places import StatePlaces, is_offload, offloads_to_host


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanFields):
    """Options of :func:`~.strategy_search.plan`, which the command line has, too.

    Attributes:
        world_size: All ranks.
        machine: A machine, the name of a preset, or a file of ``calibrate``.
        memory: Memory limit of a rank in bytes. None: 0.9 of the machine's memory.
        meshes: Sizes of the data-parallel axes to try, (inner,) or (outer, inner). None: one axis,
            and nodes x ranks per node.
        context_parallel: Consecutive ranks that share each sequence, by ``context_parallel`` of
            torch around forward and backward (:func:`~.simulation.simulate`); several numbers to
            try all of them. "auto": 1, and for sequences of 32,768 tokens or more the powers of two
            that fit a node and divide the inner axis, and half of a sequence. With more than 1,
            candidates have the levels of a quick plan; all levels are tried with the degrees of the
            fastest.
        tensor_parallel: Consecutive ranks that share the model's matrices; several numbers to try
            all of them. "auto": 1 and the powers of two that fit a node, divide the ranks, and for
            which a model of transformers has a plan (``tp_plan``). The others of the
            ``world_size`` ranks are data-parallel. Levels are those of ``context_parallel``, and
            candidates whose weights and optimizer state cannot fit are left out.
            Numbers that leave more data-parallel ranks than the global batch has rows are left out.
        parallelize: Applies tensor parallelism to the model, see :func:`~.simulation.simulate`.
        pipeline: Ranks of a pipeline of stages; several numbers to try all of them. "auto": 1, and
            the powers of two up to the number of nodes, or 16, for which the model has stages. With
            more than 1, levels are those of ``context_parallel``; a step needs at least so many
            microbatches. They are simulated from the
            costs of their stages (``quick`` of :func:`~.simulation.pipeline.simulate_pipeline`).
        schedules: The schedules of pipelines, those that split backwards included; see
            :func:`~.simulation.pipeline.simulate_pipeline`.
        stages: Builds a stage, ``stages(index, num_stages)``. None:
            :class:`~fsdp_engine.CausalLMStages` of the model. The batch is then a dict with
            ``input_ids`` and ``labels``, or a tuple of the first stage's input and the targets.
        stage_loss: The loss of the last stage's output and the targets. None: the cross-entropy of
            logits.
        checkpointing: Values to try for what becomes of blocks' activations: they are kept
            (False), recomputed in backward (True), partly kept ("selective", or a
            :class:`~fsdp_engine.Recompute`), or on the host until then ("offload"). None:
            False, "selective" and True; and "offload", unless ``offload`` is None, for candidates
            whose activations do not fit and that would be the fastest if copies took no time.
            "selective" is left out, with a warning, for a model that it does not work with.
        microbatch_sizes: Sizes to try. None: only that of the batch.
        microbatches: Forwards and backwards per step.
        global_batch: Tokens or samples of a step on all ranks. The largest microbatch that fits is
            searched for each candidate, with the number of microbatches that gives this batch;
            among ``microbatch_sizes``, if they are given. None: the batch and ``microbatches``.
        sequences: Lengths of sequences to try. None: only that of the batch.
        quick: Try the candidates that are the best most often, level 3 and HSDP first, until
            four fit. :meth:`~.strategy_plan.StrategyPlan.full` tries the
            others.
        compile: Blocks of all candidates are compiled by ``block.compile()``, which ``shard`` does
            not do.
        cache: Keep the results of candidates on disk, in the user's cache folder, and take those
            that are there; see [Note: What a cached row depends on] in ``plan_cache.py``.
        progress: Show a progress bar on stderr.
        optimizer, loss: See :func:`~.simulation.simulate`.
        formulas: Do not run the model; use formulas, without activations and times. Whether
            candidates fit is then unknown.
        offload: The offload of all candidates, without those whose levels do not allow it; None:
            all state is on the device. "auto": if no candidate fits, those that might are tried
            again with optimizer state on the host; and if none fits then, with main weights and
            gradients there, too.

    Raises:
        TypeError, ValueError: An option is invalid.
    """

    def __post_init__(self) -> None:
        for name in (
            *("meshes", "checkpointing", "microbatch_sizes", "sequences"),
            *("context_parallel", "tensor_parallel", "pipeline", "schedules"),
        ):
            value = getattr(self, name)
            if isinstance(value, Iterator):  # the options are used again for other plans
                object.__setattr__(self, name, list(value))
        if not isinstance(self.machine, Machine):
            object.__setattr__(self, "machine", Machine.named(self.machine))
        check_count("world_size", self.world_size, "1 rank or more")
        check_count("microbatches", self.microbatches, "at least 1")
        if self.memory is not None:
            check_positive("memory", self.memory, "a number of bytes, such as 80e9")
        if self.offload not in (None, AUTO) and not is_offload(self.offload):
            raise TypeError(
                f"offload: expected an fe.Offload, 'auto' or None; found {self.offload!r}"
            )
        for name in ("loss", "optimizer", "parallelize", "stages", "stage_loss"):
            if (function := getattr(self, name)) is not None:
                check_callable(name, function, "a function, or None")
        for each in self.activations:
            check_checkpointing(each)
        for name, what, values in (
            ("microbatch_sizes", "sizes", self.sizes),
            ("sequences", "lengths", self.lengths),
        ):
            for each in values:
                if each is not None:
                    check_count(name, each, f"{what} of 1 or more")
        self._check_global_batch()
        if self.tensor_parallel == AUTO and self.parallelize is not None:
            raise ValueError(
                "tensor_parallel: expected numbers of ranks with parallelize, since 'auto' asks "
                "the plan that a model of transformers has; found 'auto'"
            )
        for name in ("formulas", "progress", "quick", "cache", "compile"):
            check_type(name, getattr(self, name), bool, "True or False")

    def _check_global_batch(self) -> None:
        if self.global_batch is None:
            return
        check_positive("global_batch", self.global_batch, "tokens or samples of a step")
        if self.formulas:
            raise ValueError(
                "global_batch: expected a plan that runs the model, since formulas do not know the "
                "memory of a microbatch; found formulas"
            )
        if self.microbatches != 1:
            raise ValueError(
                "microbatches: expected none with global_batch, from which their number follows; "
                f"found {self.microbatches}"
            )

    @property
    def where(self) -> Machine:
        """The machine."""
        assert isinstance(self.machine, Machine)
        return self.machine

    @property
    def limit(self) -> float:
        """Memory of a rank, in bytes."""
        return USABLE * self.where.processor.memory_bytes if self.memory is None else self.memory

    @property
    def activations(self) -> list[Any]:
        """Values of ``checkpointing`` to try."""
        kinds = "True, False, 'selective' ..., in a tuple"
        default = [False] if find_module("activations") is None else [False, SELECTIVE, True]
        return self._several("checkpointing", kinds, default)

    @property
    def sizes(self) -> list[Any]:
        """Microbatch sizes to try; None: that of the batch."""
        return self._several("microbatch_sizes", "sizes, such as (1, 2)", [None])

    @property
    def lengths(self) -> list[Any]:
        """Lengths of sequences to try; None: that of the batch."""
        return self._several("sequences", "lengths, such as (4096, 8192)", [None])

    @property
    def schedule_names(self) -> list[Any]:
        """Schedules of pipelines to try."""
        if isinstance(self.schedules, str):
            return [self.schedules]
        return listed("schedules", self.schedules, "names, such as '1F1B' and 'Interleaved1F1B'")

    def _several(self, name: str, expected: str, default: list[Any]) -> list[Any]:
        """The values of a field, or ``default`` if it is None."""
        given = getattr(self, name)
        return default if given is None else listed(name, given, expected)

    @property
    def tries_offloads(self) -> bool:
        """Whether candidates may be tried with more on the host than ``offload`` says."""
        has_host = self.where.host_runs_ahead and self.where.host_link is not None
        return has_host and not self.quick and find_module("offload") is not None

    @property
    def tries_offloaded_activations(self) -> bool:
        """Whether candidates may be tried with activations on the host."""
        return self.tries_offloads and self.checkpointing is None and self.offload is not None

    @property
    def more_offloads(self) -> tuple[StatePlaces, ...]:
        """Offloads that are tried where nothing fits."""
        if self.offload != AUTO or not self.tries_offloads:
            return ()
        if self.where.host_memory_bandwidth is None:  # which the host needs to cast main weights
            offloads = offloads_to_host()
            return tuple(each for each in offloads if each.main_weights != allocator.HOST)
        return offloads_to_host()
