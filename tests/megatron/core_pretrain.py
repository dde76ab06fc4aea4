"""The calls that Megatron-LM's ``pretrain`` makes, on the client of the registry.

``setup_model_and_optimizer``, ``train_step``, ``save_checkpoint`` and ``load_checkpoint`` of
Megatron-LM need a GPU. Their calls of megatron-core are here, in their order, with three
names to swap: ``DistributedDataParallel``, ``finalize_model_grads`` and ``get_megatron_optimizer``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.megatron import get_megatron_optimizer
from tests.megatron.core_on_cpu import on_cpu
from tests.megatron.core_training import BATCH, LENGTH, VOCAB, make_gpt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4


@dataclass(frozen=True)
class Job:
    """Arguments of a job.

    Attributes:
        level: of our wrapper; None: as ``--use-distributed-optimizer`` says.
        ours: our names; else Megatron-Core's.
        dtype: one of DTYPES; "fp16" has a dynamic loss scale.
        optimizer: "adam" or "sgd".
        distributed_optimizer: ``--use-distributed-optimizer``, for wrapper and optimizer.
        tensor, pipeline: model-parallel ranks.
        virtual: chunks of each pipeline rank, for the interleaved schedule.
        experts: four in each layer, over two expert-parallel ranks.
        overlap: ``--overlap-grad-reduce --overlap-param-gather``.
        gated: SwiGLU, whose first weight is saved in two parts.
        clip: largest norm.
        lr_of_embeddings: ``--decoupled-lr``.
        inf_on: (step, rank) at which the loss is infinite.
        tied: the output layer has the embedding's weight. Otherwise gradients have many zeros.
        instances: ``--num-distributed-optimizer-instances``.
        microbatches: of each data-parallel rank.
        fully_parallel: ``--ckpt-fully-parallel-save`` and ``-load``.
        own_norm: gradients of some layers are clipped by a norm of their own, as those of detached
            heads that predict several tokens. Without effect in megatron-core 0.16.
    """

    level: str | None = None
    ours: bool = True
    dtype: str = "fp32"
    optimizer: str = "adam"
    distributed_optimizer: bool = True
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    experts: bool = False
    overlap: bool = False
    gated: bool = False
    clip: float = 1.0
    lr_of_embeddings: float | None = None
    inf_on: tuple[int, int] | None = None
    tied: bool = False
    instances: int = 1
    microbatches: int = 2
    fully_parallel: bool = False
    own_norm: bool = False


@dataclass
class Report:
    """Results of a job by step: the loss, whether weights were updated, the gradients' norm and
    zeros, the loss scale."""

    losses: list[float]
    updated: list[bool]
    norms: list[float | None]
    zeros: list[float | None]
    scales: list[float]


class Training:
    """A job's model, optimizer and scheduler: ``setup_model_and_optimizer``."""

    def __init__(self, job: Job) -> None:
        from megatron.core import distributed, optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        theirs: Any = distributed
        self.job = job
        self.config, models = _make_models(job)
        for name, param in models[0].named_parameters() if job.own_norm else ():
            if "linear_fc1" in name:
                param.grad_norm_group = "mtp"  # type: ignore[attr-defined]
        fields: dict[str, Any] = {
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": job.overlap,
            "overlap_param_gather": job.overlap,
            "use_distributed_optimizer": job.distributed_optimizer,
            "num_distributed_optimizer_instances": job.instances,
        }
        if job.level is not None:
            fields |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": job.level}
        wrapper = fe.DistributedDataParallel if job.ours else theirs.DistributedDataParallel
        ddp_config = theirs.DistributedDataParallelConfig(**fields)
        self.model = [
            wrapper(config=self.config, ddp_config=ddp_config, module=model) for model in models
        ]
        self.ddp = self.model[0]
        make = get_megatron_optimizer if job.ours else optimizer.get_megatron_optimizer
        options = optimizer.OptimizerConfig(
            optimizer=job.optimizer,
            lr=0.05,
            min_lr=0.01,
            decoupled_lr=job.lr_of_embeddings,
            weight_decay=0.1,
            clip_grad=job.clip,
            bf16=job.dtype == "bf16",
            fp16=job.dtype == "fp16",
            params_dtype=DTYPES[job.dtype],
            initial_loss_scale=2.0**10,
            loss_scale_window=2,
            hysteresis=1,
            log_num_zeros_in_grad=True,
            use_distributed_optimizer=job.distributed_optimizer,
            overlap_param_gather=job.overlap,
        )
        self.optimizer = make(options, self.model, use_gloo_process_groups=True)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.05,
            min_lr=0.01,
            lr_warmup_steps=1,
            lr_decay_steps=8,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=8,
            wd_incr_style="constant",
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = (
            fe.finalize_model_grads if job.ours else theirs.finalize_model_grads
        )
        if job.overlap:
            syncs = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = syncs if job.virtual else syncs[0]
        self.steps = 0

    def train_step(self) -> tuple[float, bool, float | None, float | None, float]:
        """One step: loss, whether weights were updated, norm, zeros, loss scale before it."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        scale = float(self.optimizer.get_loss_scale())
        rank = parallel_state.get_data_parallel_rank()
        found = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[_batches(self.steps, rank, self.job.microbatches) for _ in self.model],
            model=self.model,
            num_microbatches=self.job.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        updated, norm, zeros = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=1)
        self.steps += 1
        group = parallel_state.get_data_parallel_group()
        loss = torch.tensor(sum(each["loss"] for each in found) / self.job.microbatches)
        dist.all_reduce(loss, group=group)
        return float(loss) / group.size(), updated, norm, zeros, scale

    def _forward_step(self, batches: Iterator[Tensor], model: Any) -> Any:
        batch = next(batches)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(LENGTH)[None].expand_as(tokens)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        is_infinite = self.job.inf_on == (self.steps, dist.get_rank())

        def mean(found: Tensor) -> Any:
            loss = found.float().mean()
            return loss * torch.inf if is_infinite else loss, {"loss": loss.item()}

        return model(tokens, positions, mask, labels=labels), mean

    def train(self, steps: int) -> Report:
        """Several steps."""
        rows = [self.train_step() for _ in range(steps)]
        return Report(*([row[column] for row in rows] for column in range(5)))

    def generate_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
        """The state dict to save or to load."""
        metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
        if self.job.distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": self.steps}
        for key, chunk in self._keys().items():
            state[key] = chunk.module.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        return state

    def _keys(self) -> dict[str, Any]:
        """Chunks by their keys in a state dict."""
        if len(self.model) == 1:
            return {"model": self.ddp}
        return {f"model{number}": chunk for number, chunk in enumerate(self.model)}

    def save(self, folder: str) -> None:
        """``save_checkpoint``."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        for chunk in self.model if self.job.overlap else ():
            chunk.disable_forward_pre_hook()
        strategy: Any = serialization.get_default_save_sharded_strategy()
        if self.job.fully_parallel:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group)
        dist_checkpointing.save(self.generate_state_dict(is_loading=False), folder, strategy)
        for chunk in self.model if self.job.overlap else ():
            chunk.enable_forward_pre_hook()

    def load(self, folder: str) -> None:
        """``load_checkpoint``."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        for chunk in self.model if self.job.overlap else ():
            chunk.disable_forward_pre_hook()
        strategy: Any = serialization.get_default_load_sharded_strategy(folder)
        if self.job.fully_parallel:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = fully_parallel.FullyParallelLoadStrategyWrapper(strategy, group)
        wanted = self.generate_state_dict(is_loading=True)
        state = dist_checkpointing.load(wanted, folder, strategy)
        self.steps = state["iteration"]
        for key, chunk in self._keys().items():
            chunk.load_state_dict(state[key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        for chunk in self.model if self.job.overlap else ():
            chunk.enable_forward_pre_hook()

    def save_by_checkpointer(self, folder: str) -> None:
        """By our own checkpoints: the optimizer as it is."""
        self._checkpointer(folder).save(self.steps)

    def load_by_checkpointer(self, folder: str) -> None:
        """Load a checkpoint of :meth:`save_by_checkpointer`."""
        self.scheduler.num_steps = 0  # it adds what it loads
        report = self._checkpointer(folder).load()
        assert report.step is not None
        self.steps = report.step

    def save_per_rank(self, folder: str) -> None:
        """Each rank saves its slices."""
        state = {
            "model": [chunk.state_dict() for chunk in self.model],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }
        torch.save(state, f"{folder}/{dist.get_rank()}.pt")

    def load_per_rank(self, folder: str) -> None:
        """And takes them."""
        state = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=False)
        for chunk, values in zip(self.model, state["model"], strict=True):
            chunk.load_state_dict(values)
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.reload_model_params()
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]

    def _checkpointer(self, folder: str) -> fe.Checkpointer:
        """Of the engine: model-parallel ranks have engines of their own."""
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        tensor = parallel_state.get_tensor_model_parallel_rank()
        return fe.Checkpointer(
            f"{folder}/{stage}-{tensor}",
            {f"chunk{number}": chunk.engine for number, chunk in enumerate(self.model)},
            self.optimizer,
            extra={"scheduler": self.scheduler},
        )


def _make_models(job: Job) -> tuple[Any, list[Any]]:
    """:func:`make_gpt` of a job."""
    experts: dict[str, Any] = {
        "num_moe_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
    }
    return make_gpt(
        dtype=DTYPES[job.dtype],
        virtual=job.virtual,
        tied=job.tied,
        experts=experts if job.experts else {},
        num_layers=2 * (job.virtual or 1),
        num_attention_heads=2,
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        fp16=job.dtype == "fp16",
        gated_linear_unit=job.gated,
        activation_func=torch.nn.functional.silu if job.gated else torch.nn.functional.gelu,
    )


def _batches(step: int, rank: int, count: int) -> Iterator[Tensor]:
    """Of the samples of a step, numbered through, those of a data-parallel rank."""
    dice = torch.Generator().manual_seed(step)
    all_of_step = torch.randint(0, VOCAB, (16, BATCH, LENGTH + 1), generator=dice)
    return iter(all_of_step[rank * count : (rank + 1) * count])


@contextlib.contextmanager
def groups_of(job: Job) -> Iterator[None]:
    """Within it Megatron-Core runs, on a CPU, with the job's groups."""
    with on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            job.tensor,
            job.pipeline,
            job.virtual,
            expert_model_parallel_size=2 if job.experts else 1,
            num_distributed_optimizer_instances=job.instances,
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()


def run(job: Job, steps: int = STEPS) -> Report:
    """On all ranks of the default group."""
    with groups_of(job):
        return Training(job).train(steps)


def differences(mine: Report, theirs: Report, limit: float) -> list[str]:
    """What differs, numbers by more than ``limit``, relatively."""
    found = []
    for name in ("losses", "updated", "norms", "zeros", "scales"):
        pairs = zip(getattr(mine, name), getattr(theirs, name), strict=True)
        for step, (x, y) in enumerate(pairs):
            both_there = x is not None and y is not None
            # The gradient of a key's bias is 0 in exact arithmetic: softmax does not change if all
            # scores of a query do by the same number. In fp32 the order of the sums decides which
            # of these elements are 0.
            slack = 3 if name == "zeros" else 0
            near = math.isclose(x, y, rel_tol=limit, abs_tol=slack) if both_there else x is y
            if not near:
                found.append(f"step {step}: {name} {x} for {y}")
    return found


def compare(jobs: list[tuple[Job, Job]], limit: float) -> list[str]:
    """On one rank: where jobs differ from their references."""
    known: dict[Job, Report] = {}
    found = []
    for job, reference in jobs:
        if reference not in known:
            known[reference] = run(reference)
        found += [f"{job}: {line}" for line in differences(run(job), known[reference], limit)]
    return found


@contextlib.contextmanager
def may_have_children() -> Iterator[None]:
    """Context in which this process of the pool may start others, as Megatron-Core's writer does.
    Results are passed by a queue, since a manager would need a process that imports everything."""
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    name = "get_write_results_queue"
    name = name if hasattr(writer, name) else f"_{name}"  # megatron-core 0.16
    results: queue.Queue[Any] = queue.Queue()
    with (
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),
        mock.patch.object(writer, name, return_value=results),
    ):
        yield


# Ways to save and to load a training, by name.
Way = Callable[[Training, str], None]
WAYS: dict[str, tuple[Way, Way]] = {
    "megatron": (Training.save, Training.load),
    "checkpointer": (Training.save_by_checkpointer, Training.load_by_checkpointer),
    "per_rank": (Training.save_per_rank, Training.load_per_rank),
}


def save_half_way(job: Job, way: str, folder: str, before: int, after: int) -> Report:
    """Trains, saves, and trains on; returns the steps after."""
    with groups_of(job), may_have_children():
        training = Training(job)
        training.train(before)
        WAYS[way][0](training, folder)
        return training.train(after)


def resume(job: Job, way: str, folder: str, steps: int, before: int = 0) -> Report:
    """Loads into a new job, that has made ``before`` steps, and trains on."""
    with groups_of(job), may_have_children():
        training = Training(job)
        training.train(before)
        WAYS[way][1](training, folder)
        return training.train(steps)
