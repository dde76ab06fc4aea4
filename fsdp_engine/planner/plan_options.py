"""The options of :func:`fsdp_engine.plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_engine.kernel_interface import allocator, find_module
from fsdp_engine.planner.candidates import activations_of, check_checkpointing
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
    """Options of ``fe.plan``. The command line has the same options.

    Attributes:
        world_size: Number of ranks of the job.
        machine: The machine, the name of a preset, or the path of a file written by ``calibrate``.
        memory: Memory limit of a rank in bytes. None: 0.9 of the machine's memory.
        meshes: Sizes of the data-parallel axes to try, (inner,) or (outer, inner). None: one axis,
            and nodes x ranks per node.
        context_parallel: Number of consecutive ranks that share each sequence, or several numbers
            to try. Forward and backward run within torch's ``context_parallel``, as in
            ``fe.simulate``. "auto": 1, and for sequences of 32,768 tokens or more the powers of two
            that fit a node and divide the inner axis and half of the sequence. With more than
            1, only the levels of a quick plan are tried at first. A full plan then tries all levels
            with the degrees of the fastest candidate.
        tensor_parallel: Number of consecutive ranks that share the model's matrices, or several
            numbers to try. "auto": 1, and the powers of two that fit a node and divide the ranks,
            if a model of transformers has a ``tp_plan`` for them. The remaining factor of
            ``world_size`` is data-parallel. Levels are tried as for ``context_parallel``.
            Candidates are left out if their weights and optimizer state cannot fit, or if they have
            more data-parallel ranks than the global batch has rows.
        parallelize: Applies tensor parallelism to the model, as in ``fe.simulate``.
        pipeline: Number of ranks in a pipeline of stages, or several numbers to try. "auto": 1, and
            the powers of two up to the number of nodes (at most 16) for which the model has stages.
            Levels are tried as for ``context_parallel``. A step needs at least as many microbatches
            as the pipeline has ranks. Pipelines are simulated from the costs of their stages
            (``quick`` of ``fe.simulate_pipeline``).
        schedules: Schedules of pipelines, including schedules that split the backward; see
            ``fe.simulate_pipeline``.
        stages: Builds a stage, ``stages(index, num_stages)``. None: ``fe.CausalLMStages`` of the
            model. With a pipeline, the batch must be a dict with ``input_ids`` and ``labels``, or a
            tuple of the first stage's input and the targets.
        stage_loss: Computes the loss from the last stage's output and the targets. None: the
            cross-entropy of logits.
        checkpointing: Ways to handle the blocks' activations, each of which is tried: keep them
            (False), recompute them in backward (True), keep some ("selective" or an
            ``fe.Recompute``), or store them on the host until backward ("offload"). None:
            False, "selective" and True. A full plan then also tries "offload", unless ``offload``
            is None, for candidates whose activations do not fit and that would be the fastest if
            copies took no time. If a model does not work with "selective", the planner warns and
            leaves it out. If ``extensions`` has an ``fe.Recompute`` or ``fe.OffloadActivations``,
            all candidates use it, and this must be None.
        microbatch_sizes: Microbatch sizes to try. None: only the size of the batch.
        microbatches: Number of forwards and backwards per step.
        global_batch: Tokens or samples of a step on all ranks. For each candidate the planner
            finds the largest microbatch that fits (among ``microbatch_sizes``, if given) and the
            number of microbatches that gives this batch. None: use the batch and ``microbatches``.
        sequences: Sequence lengths to try. None: only the length of the batch.
        quick: Try the candidates that are most often the best, level 3 and HSDP first, until four
            fit. If one without recomputation fits, also try the others without recomputation.
            ``StrategyPlan.full`` tries all candidates.
        compile: Whether to simulate blocks as compiled by ``block.compile()``. ``shard`` does not
            compile them.
        cache: Read results of candidates from the user's cache folder, and store new ones there;
            see [Note: What a cached row depends on] in ``plan_cache.py``.
        progress: Show a progress bar on stderr.
        optimizer, loss: See ``fe.simulate``.
        formulas: Do not run the model; use formulas, without activations and times. Whether
            candidates fit is then unknown.
        offload: Offload of all candidates. Candidates whose levels do not allow it are left out.
            None: all state is on the device. "auto": if no candidate of a full plan fits, try
            those that might fit with optimizer state on the host again, with this offload. If none
            of these fits, main weights and gradients are moved to the host, too.

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
        given = activations_of(self.shard.get("extensions"))
        if given is not None and self.checkpointing is not None:
            raise ValueError(
                "checkpointing: expected None with extensions that recompute or offload "
                f"activations; found {self.checkpointing!r} with {given!r}"
            )
        for name, what, values in (
            ("microbatch_sizes", "sizes", self.sizes),
            ("sequences", "lengths", self.lengths),
        ):
            for each in values:
                if each is not None:
                    check_count(name, each, f"{what} of 1 or more")
        self._check_global_batch()
        if self.formulas and not self.has_state_of_adamw:
            raise ValueError(
                "optimizer: expected None with formulas, which count the state of AdamW; found "
                f"{self.optimizer!r}. fe.estimate(optimizer_bytes_per_element=...) counts others"
            )
        if self.pipeline == 1 and self.schedule_names != ["1F1B"]:
            raise ValueError(
                "schedules: expected a pipeline of more than 1 rank, whose schedules they are; "
                f"found {self.schedules!r} with pipeline=1"
            )
        if self.tensor_parallel == AUTO and self.parallelize is not None:
            raise ValueError(
                "tensor_parallel: expected numbers of ranks with parallelize, since 'auto' reads "
                "the model's tp_plan; found 'auto'"
            )
        for name in ("formulas", "progress", "quick", "cache", "compile"):
            check_type(name, getattr(self, name), bool, "True or False")

    def _check_global_batch(self) -> None:
        if self.global_batch is None:
            return
        check_positive("global_batch", self.global_batch, "tokens or samples of a step")
        if self.formulas:
            raise ValueError(
                "global_batch: expected formulas=False, since formulas do not count the memory of "
                "a microbatch; found formulas=True"
            )
        if self.microbatches != 1:
            raise ValueError(
                "microbatches: expected 1, the default, with global_batch, which determines their "
                f"number; found {self.microbatches}"
            )

    @property
    def has_state_of_adamw(self) -> bool:
        """Whether the optimizer's state is that of AdamW, which formulas count."""
        return self.optimizer is None or self.optimizer in (torch.optim.AdamW, torch.optim.Adam)

    @property
    def where(self) -> Machine:
        """The machine."""
        assert isinstance(self.machine, Machine)
        return self.machine

    @property
    def limit(self) -> float:
        """Memory limit of a rank, in bytes."""
        return USABLE * self.where.processor.memory_bytes if self.memory is None else self.memory

    @property
    def activations(self) -> list[Any]:
        """Values of ``checkpointing`` to try."""
        kinds = "True, False, 'selective' ..., in a tuple"
        if (given := activations_of(self.shard.get("extensions"))) is not None:
            return [given]
        default = [False] if find_module("activations") is None else [False, SELECTIVE, True]
        return self._several("checkpointing", kinds, default)

    @property
    def sizes(self) -> list[Any]:
        """Microbatch sizes to try; None: the size of the batch."""
        return self._several("microbatch_sizes", "sizes, such as (1, 2)", [None])

    @property
    def lengths(self) -> list[Any]:
        """Sequence lengths to try; None: the length of the batch."""
        return self._several("sequences", "lengths, such as (4096, 8192)", [None])

    @property
    def schedule_names(self) -> list[Any]:
        """Schedules of pipelines to try."""
        if isinstance(self.schedules, str):
            return [self.schedules]
        return listed("schedules", self.schedules, "names, such as '1F1B' and 'Interleaved1F1B'")

    def _several(self, name: str, expected: str, default: list[Any]) -> list[Any]:
        """Returns the values of a field, or ``default`` if it is None."""
        given = getattr(self, name)
        return default if given is None else listed(name, given, expected)

    @property
    def tries_offloads(self) -> bool:
        """Whether the planner may try candidates with more tensors on the host than the user asked
        for. A quick plan does not."""
        has_host = self.where.host_runs_ahead and self.where.host_link is not None
        return has_host and not self.quick and find_module("offload") is not None

    @property
    def tries_offloaded_activations(self) -> bool:
        """Whether candidates may be tried with activations on the host."""
        return self.tries_offloads and self.checkpointing is None and self.offload is not None

    @property
    def more_offloads(self) -> tuple[StatePlaces, ...]:
        """Offloads that are tried if no candidate fits."""
        if self.offload != AUTO or not self.tries_offloads:
            return ()
        if self.where.host_memory_bandwidth is None:  # casts by the host cannot be simulated
            offloads = offloads_to_host()
            return tuple(each for each in offloads if each.main_weights != allocator.HOST)
        return offloads_to_host()
