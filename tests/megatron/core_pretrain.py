"""Makes the calls of megatron-core that Megatron-LM's ``setup_model_and_optimizer``,
``train_step``, ``save_checkpoint`` and ``load_checkpoint`` make. Those functions need a GPU. Three
names are swapped: ``DistributedDataParallel``, ``finalize_model_grads`` and
``get_megatron_optimizer``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import math
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import fsdp_engine as fe
from fsdp_engine.megatron import get_megatron_optimizer
from tests.megatron.core_on_cpu import on_cpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB, LENGTH, HIDDEN, BATCH, STEPS = 32, 8, 16, 2, 3


@dataclass(frozen=True)
class Job:
    """Arguments of a job.

    Attributes:
        level: level of our wrapper; None: determined by ``distributed_optimizer``.
        ours: use this package's three names.
        their_finalize, their_optimizer: use Megatron-Core's function also with ``ours``.
        dtype: one of DTYPES; "fp16" has a dynamic loss scale.
        experts: expert-parallel ranks; layers have four experts and biased routers. 0: dense.
        sync_funcs: the schedule says when to reduce and to gather.
        layers: None: 2 for each chunk.
        recompute: None, "selective", or the method of full recomputation, "uniform" or "block".
        per_token: losses are sums over tokens, and ranks have different numbers of them.
        inf_on: (step, rank) at which the loss is infinite.
        tied: the output layer has the embedding's weight. Otherwise gradients have many zeros.
        own_norm: gradients of some layers are clipped by a norm of their own. Without effect in
            megatron-core 0.16.
    """

    level: str | None = None
    ours: bool = True
    their_finalize: bool = False
    their_optimizer: bool = False
    dtype: str = "fp32"
    optimizer: str = "adam"
    distributed_optimizer: bool = True
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    virtual: int | None = None
    experts: int = 0
    expert_tensor: int = 1
    overlap: bool = False
    bucket_size: int | None = None
    grads_in_fp32: bool = True
    sync_funcs: bool = False
    layers: int | None = None
    recompute: str | None = None
    gated: bool = False
    per_token: bool = False
    clip: float = 1.0
    lr_of_embeddings: float | None = None
    inf_on: tuple[int, int] | None = None
    tied: bool = False
    instances: int = 1
    microbatches: int = 2
    fully_parallel: bool = False
    own_norm: bool = False

    def but(self, **changes: Any) -> Job:
        """A copy with other arguments."""
        return dataclasses.replace(self, **changes)

    def as_theirs(self) -> Job:
        """This job under Megatron-Core's own names; its distributed optimizer supports Adam
        only."""
        return self.but(
            ours=False,
            level=None,
            their_finalize=False,
            distributed_optimizer=self.distributed_optimizer and self.optimizer == "adam",
            overlap=False,
            bucket_size=None,
            sync_funcs=False,
            instances=1,
        )

    @property
    def limit(self) -> float:
        """Largest relative error. The clipping coefficient may differ in its last bit, and then
        some 16-bit weights round differently. Adam may divide by values that are rounding errors,
        and gradients in bf16 are summed in another order."""
        if not self.grads_in_fp32:
            return 2e-2
        if self.optimizer == "sgd":
            return 2e-6 if self.dtype == "fp32" else 2e-5
        return 2e-5 if self.dtype == "fp32" or self.their_optimizer else 2e-4


class Report(NamedTuple):
    """Results of a job by step; ``updated``: whether the step changed weights."""

    losses: list[float]
    updated: list[bool]
    norms: list[float | None]
    zeros: list[float | None]
    scales: list[float]


def make_models(job: Job) -> tuple[Any, list[Any]]:
    """Megatron-Core's config and this rank's shard of a small GPT, in chunks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[job.dtype]
    fields: dict[str, Any] = {"hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN}
    fields |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    # Compilation of fused kernels would take a minute.
    fields |= {"bias_activation_fusion": False, "bias_dropout_fusion": False}
    fields |= {"masked_softmax_fusion": False, "params_dtype": dtype, "pipeline_dtype": dtype}
    activation = torch.nn.functional.silu if job.gated else torch.nn.functional.gelu
    fields |= {"gated_linear_unit": job.gated, "activation_func": activation}
    if job.experts:
        fields |= {
            "num_moe_experts": 4,
            "expert_model_parallel_size": job.experts,
            "expert_tensor_parallel_size": job.expert_tensor,
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "add_bias_linear": False,
        }
    if job.recompute is not None:
        fields |= {"recompute_granularity": "selective"}
    if job.recompute in ("uniform", "block"):
        fields |= {"recompute_granularity": "full", "recompute_num_layers": 1}
        fields |= {"recompute_method": job.recompute}
    config = TransformerConfig(
        num_layers=job.layers or 2 * (job.virtual or 1),
        num_attention_heads=max(2, job.tensor),
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=job.virtual,
        sequence_parallel=job.sequence,
        calculate_per_token_loss=job.per_token,
        bf16=job.dtype == "bf16",
        fp16=job.dtype == "fp16",
        **fields,
    )
    torch.manual_seed(3)
    models = []
    for chunk in range(job.virtual or 1):
        where = {"ignore_virtual": False, "vp_stage": chunk if job.virtual else None}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4 if job.experts else None),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=job.tied,
            vp_stage=where["vp_stage"],
        )
        models.append(model.to(dtype))
    return config, models


def wrap(job: Job, config: Any, model: Any) -> Any:
    from megatron.core import distributed

    theirs: Any = distributed
    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": job.grads_in_fp32,
        "overlap_grad_reduce": job.overlap,
        "overlap_param_gather": job.overlap,
        "bucket_size": job.bucket_size,
        "use_distributed_optimizer": job.distributed_optimizer and not job.their_optimizer,
        "num_distributed_optimizer_instances": job.instances,
    }
    if job.level is not None:
        fields |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": job.level}
    wrapper = fe.DistributedDataParallel if job.ours else theirs.DistributedDataParallel
    ddp_config = theirs.DistributedDataParallelConfig(**fields)
    return wrapper(config=config, ddp_config=ddp_config, module=model)


class Training:
    """A job's model, optimizer and scheduler: ``setup_model_and_optimizer``."""

    def __init__(self, job: Job) -> None:
        from megatron.core import distributed

        theirs: Any = distributed
        self.job, self.steps = job, 0
        self.config, models = make_models(job)
        for name, param in models[0].named_parameters() if job.own_norm else ():
            if "linear_fc1" in name:
                param.grad_norm_group = "mtp"
        self.model = [wrap(job, self.config, model) for model in models]
        self.ddp = self.model[0]
        self.optimizer, self.scheduler = self._make_optimizer()
        self.config.grad_scale_func = self.optimizer.scale_loss
        names = fe if job.ours and not job.their_finalize else theirs
        self.config.finalize_model_grads_func = names.finalize_model_grads
        if job.overlap:
            self.config.no_sync_func = self._each("no_sync")
        if job.sync_funcs:
            self.config.grad_sync_func = self._each("start_grad_sync")
            self.config.param_sync_func = self._each("start_param_sync")

    def _each(self, name: str) -> Any:
        """A method of the chunks in the form that schedules expect: a list if there are several."""
        methods = [getattr(chunk, name) for chunk in self.model]
        return methods if len(methods) > 1 else methods[0]

    def _make_optimizer(self) -> tuple[Any, Any]:
        from megatron.core import optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        job = self.job
        make = get_megatron_optimizer
        if job.their_optimizer or not job.ours:
            make = optimizer.get_megatron_optimizer
        fields: dict[str, Any] = {"lr": 0.05, "min_lr": 0.01, "weight_decay": 0.1}
        fields |= {"initial_loss_scale": 2.0**10, "loss_scale_window": 2, "hysteresis": 1}
        options = optimizer.OptimizerConfig(
            optimizer=job.optimizer,
            decoupled_lr=job.lr_of_embeddings,
            clip_grad=job.clip,
            bf16=job.dtype == "bf16",
            fp16=job.dtype == "fp16",
            params_dtype=DTYPES[job.dtype],
            log_num_zeros_in_grad=not job.their_optimizer,
            use_distributed_optimizer=job.distributed_optimizer and not job.their_optimizer,
            overlap_param_gather=job.overlap and not job.their_optimizer,
            **fields,
        )
        made: Any = make(options, self.model, use_gloo_process_groups=True)
        rates: dict[str, Any] = {"init_lr": 0.0, "max_lr": 0.05, "min_lr": 0.01}
        rates |= {"lr_warmup_steps": 1, "lr_decay_steps": 8, "lr_decay_style": "linear"}
        rates |= {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 8, "wd_incr_style": "constant"}
        return made, OptimizerParamScheduler(made, **rates)

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
        counts = torch.ones_like(labels, dtype=torch.float32)
        if self.job.per_token:
            counts[:, : dist.get_rank() % 2 + 1] = 0.0  # ranks have different numbers of tokens
        is_infinite = self.job.inf_on == (self.steps, dist.get_rank())

        def mean(losses: Tensor) -> Any:
            total, number = (losses.float() * counts).sum(), counts.sum()
            report = {"loss": (total / number).item()}
            if self.job.per_token:
                return total, number.int(), report
            return total / number * (torch.inf if is_infinite else 1.0), report

        return model(tokens, positions, mask, labels=labels), mean

    def train(self, steps: int) -> Report:
        rows = [self.train_step() for _ in range(steps)]
        return Report(*([row[column] for row in rows] for column in range(5)))

    def generate_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
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

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        chunks = self.model if self.job.overlap else []
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in chunks:
            chunk.enable_forward_pre_hook()

    def _strategy(self, what: str, *folder: str) -> Any:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        get: Any = getattr(serialization, f"get_default_{what.lower()}_sharded_strategy")
        if not self.job.fully_parallel:
            return get(*folder)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return getattr(fully_parallel, f"FullyParallel{what}StrategyWrapper")(get(*folder), group)

    def save(self, folder: str) -> None:
        from megatron.core import dist_checkpointing

        with self._without_hooks():
            state = self.generate_state_dict(is_loading=False)
            dist_checkpointing.save(state, folder, self._strategy("Save"))

    def load(self, folder: str) -> None:
        from megatron.core import dist_checkpointing

        with self._without_hooks():
            wanted = self.generate_state_dict(is_loading=True)
            state = dist_checkpointing.load(wanted, folder, self._strategy("Load", folder))
            self.steps = state["iteration"]
            for key, chunk in self._keys().items():
                chunk.load_state_dict(state[key])
            self.optimizer.load_state_dict(state["optimizer"])
            self._load_scheduler(state["opt_param_scheduler"])

    def _load_scheduler(self, state: Any) -> None:
        self.scheduler.num_steps = 0  # load_state_dict adds the loaded number to this one
        self.scheduler.load_state_dict(state)

    def save_by_checkpointer(self, folder: str) -> None:
        self._checkpointer(folder).save(self.steps)

    def load_by_checkpointer(self, folder: str) -> None:
        self.scheduler.num_steps = 0
        step = self._checkpointer(folder).load().step
        assert step is not None
        self.steps = step

    def save_per_rank(self, folder: str) -> None:
        state = {
            "model": [chunk.state_dict() for chunk in self.model],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }
        torch.save(state, f"{folder}/{dist.get_rank()}.pt")

    def load_per_rank(self, folder: str) -> None:
        state = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=False)
        for chunk, values in zip(self.model, state["model"], strict=True):
            chunk.load_state_dict(values)
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.reload_model_params()
        self._load_scheduler(state["scheduler"])
        self.steps = state["steps"]

    def _checkpointer(self, folder: str) -> fe.Checkpointer:
        """The engine's checkpointer; each model-parallel rank has an engine and a folder of its
        own."""
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        tensor = parallel_state.get_tensor_model_parallel_rank()
        return fe.Checkpointer(
            f"{folder}/{stage}-{tensor}",
            {f"chunk{number}": chunk.engine for number, chunk in enumerate(self.model)},
            self.optimizer,
            extra={"scheduler": self.scheduler},
        )


def _batches(step: int, rank: int, count: int) -> Iterator[Tensor]:
    """A data-parallel rank's samples of a step: ``count`` consecutive ones from all samples."""
    dice = torch.Generator().manual_seed(step)
    all_of_step = torch.randint(0, VOCAB, (16, BATCH, LENGTH + 1), generator=dice)
    return iter(all_of_step[rank * count : (rank + 1) * count])


@contextlib.contextmanager
def groups_of(job: Job) -> Iterator[None]:
    with on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        others = set(distributed_c10d._world.pg_map)
        parallel_state.initialize_model_parallel(
            job.tensor,
            job.pipeline,
            job.virtual,
            expert_model_parallel_size=job.experts or 1,
            expert_tensor_parallel_size=job.expert_tensor,
            num_distributed_optimizer_instances=job.instances,
        )
        created = [group for group in distributed_c10d._world.pg_map if group not in others]
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
        # Each of some 20 groups has a thread that wakes 200 times a second: groups of several jobs
        # would use most of the processors.
        dist.barrier()
        while created:
            if (group := created.pop()) in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
            del group
        gc.collect()


def differences(mine: Report, theirs: Report, limit: float) -> list[str]:
    """Differences of two reports: numbers that differ by more than ``limit``, relatively."""
    found = []
    for name in ("losses", "updated", "norms", "zeros", "scales"):
        pairs = zip(getattr(mine, name), getattr(theirs, name), strict=True)
        for step, (x, y) in enumerate(pairs):
            both_there = x is not None and y is not None
            # The gradient of a key's bias is 0 in exact arithmetic. In fp32 the order of the sums
            # decides which of these elements are 0.
            slack = 3 if name == "zeros" else 0
            near = math.isclose(x, y, rel_tol=limit, abs_tol=slack) if both_there else x is y
            if not near:
                found.append(f"step {step}: {name} {x} for {y}")
    return found


def compare(jobs: list[Job]) -> None:
    """Compare each job with the same job under Megatron-Core's own names."""
    known: dict[Job, Report] = {}
    for job in jobs:
        theirs = job.as_theirs()
        for each in (job,) if theirs in known else (theirs, job):
            with groups_of(each):
                known[each] = Training(each).train(STEPS)
        lines = differences(known[job], known[theirs], job.limit)
        assert not lines, (job, *lines)


@contextlib.contextmanager
def may_have_children() -> Iterator[None]:
    """Let this daemon process start others, as Megatron-Core's writer does. The writer's
    results pass through a plain queue, since a manager's queue needs a process that imports
    everything again."""
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
    with groups_of(job), may_have_children():
        training = Training(job)
        training.train(before)
        WAYS[way][0](training, folder)
        return training.train(after)


def resume(job: Job, way: str, folder: str, steps: int, before: int = 0) -> Report:
    with groups_of(job), may_have_children():
        training = Training(job)
        training.train(before)
        WAYS[way][1](training, folder)
        return training.train(steps)
