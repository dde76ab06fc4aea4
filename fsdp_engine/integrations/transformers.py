"""The ``Trainer`` of transformers with this engine.

The trainer's loop is unchanged. Its accelerator is a :class:`~.accelerate.FSDPEngineAccelerator`,
which shards the model. The engine saves and loads checkpoints. The mixin overrides private methods
where there are no public ones, and is tested with transformers 5.23.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_engine.checkpoint.folder import load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.hugging_face import export_safetensors
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.mesh import ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine import Engine
from fsdp_engine.extras import naming_extra
from fsdp_engine.integrations.accelerate import (
    SHARDED,
    FSDPEngineAccelerator,
    generate_together,
    plain_optimizer,
)
from fsdp_engine.integrations.checkpoint_folder import atomic_folder, load_whole_state
from fsdp_engine.integrations.even_loaders import (
    EvaluationBatches,
    TrainingBatches,
    are_even,
    without_labels,
    without_samples,
)
from fsdp_engine.integrations.loader_steps import length_of
from fsdp_engine.integrations.preparation import check_num_processes, checked_arguments
from fsdp_engine.pretrained.load import load_pretrained
from fsdp_engine.pretrained.save import save_pretrained

with naming_extra():
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
    from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints


WHAT = "FSDPEngineTrainer()"
# The file with the optimizer's state, in full tensors, in a checkpoint of the plain Trainer.
WHOLE_OPTIMIZER = "optimizer.pt"
# Index of the number of steps in the result of the trainer's set_initial_training_values.
_STEPS_IN_EPOCH = 5

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class FSDPEngineMixin(_Trainer):
    """Mixin for a ``Trainer`` that makes it train with this engine:
    ``class MyTrainer(FSDPEngineMixin, SFTTrainer)``.

    In training, evaluation and prediction, the number and sizes of batches may differ between
    ranks.

    Checkpoints are atomic: ``checkpoint-<step>`` is created by one rename when all ranks have
    finished writing. Any number of ranks can resume from them.

    Args:
        *args: The arguments of the trainer. ``model`` may be unsharded, on the meta device, or
            sharded.
        shard: Arguments of ``fsdp_engine.shard`` by name. None: the defaults of ``shard``. They are
            ignored if the model is already sharded.
        pretrained: A Hugging Face folder, from which ``fsdp_engine.load_pretrained`` reads the
            weights of a model that is on the meta device.
        trainable_only: Leave parameters that were frozen at ``shard`` out of the state for
            resuming. None: only if the model has adapters of PEFT; its base model is loaded before
            the trainer is made.
        model_in_checkpoints: Also save the model in the format of ``from_pretrained`` in each
            checkpoint. False: checkpoints contain only the state for resuming.
        different_modules: Allow ranks to use different modules in steps of training, evaluation and
            prediction, which then run within ``engine.together()``.
        generate_together: Run ``model.generate`` within ``engine.together()``: a rank whose texts
            are complete takes part in the gathers of the other ranks, but computes nothing. False:
            transformers runs forwards on such a rank until the texts of all ranks are complete.
        optimizers: As for the trainer. An optimizer that was built before the model was sharded
            holds the sharded parameters afterwards.
        **kwargs: The keyword arguments of the trainer.

    Attributes:
        engine: The engine of the model.

    Raises:
        ValueError, TypeError: An argument or a training argument is not supported. All ranks raise.
    """

    # Attributes of the trainer.
    model: Any
    accelerator: Any
    gather_function: Any
    optimizer: Any
    lr_scheduler: Any
    compute_loss_func: Any
    loss_is_scaled_for_ga: Any
    model_accepts_loss_kwargs: Any

    def __init__(
        self,
        *args: Any,
        shard: Mapping[str, Any] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        trainable_only: bool | None = None,
        model_in_checkpoints: bool = True,
        different_modules: bool = False,
        generate_together: bool = False,
        optimizers: tuple[Any, Any] = (None, None),
        **kwargs: Any,
    ) -> None:
        self._shard, self._pretrained = shard, pretrained
        self._trainable_only = trainable_only
        self._model_in_checkpoints = model_in_checkpoints
        self._different_modules = different_modules
        self._generate_together = generate_together
        self._batches: TrainingBatches | None = None
        self._evaluated: EvaluationBatches | None = None
        # The temporary folder of the checkpoint that is being written.
        self._staging: Path | None = None
        # The user's optimizers, which were built before or after the model was sharded.
        self._own_optimizers = [each for each in optimizers[:1] if each is not None]
        kwargs["optimizers"] = optimizers
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> Engine:
        """The model's engine."""
        return self._accelerator.shard_model(self.model)

    @property
    def _saves_trainable_only(self) -> bool:
        if self._trainable_only is None:
            return hasattr(self.model, "peft_config")
        return self._trainable_only

    @property
    def _accelerator(self) -> FSDPEngineAccelerator:
        assert isinstance(self.accelerator, FSDPEngineAccelerator)
        return self.accelerator

    def create_accelerator_and_postprocess(self) -> None:
        """Create the trainer's accelerator, and replace it with one that shards."""
        self.args.device  # noqa: B018 - initializes the process group
        with reporting(WHAT, ranks_that_meet(None)):
            arguments = checked_arguments(self._shard)
            _check(self.args)
            if self.args.save_only_model and not self._model_in_checkpoints:
                raise ValueError(
                    "model_in_checkpoints: expected True with save_only_model=True; found False"
                )
        super().create_accelerator_and_postprocess()
        made = self.accelerator
        accumulation = GradientAccumulationPlugin(**made.gradient_state.plugin_kwargs)
        loading: DataLoaderConfiguration = made.dataloader_config
        self.accelerator = FSDPEngineAccelerator(
            shard=arguments,
            pretrained=self._pretrained,
            mixed_precision=self.args.mixed_precision,
            dataloader_config=loading,
            gradient_accumulation_plugin=accumulation,
            dynamo_plugin=made.state.dynamo_plugin,
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # Sharding moves only this rank's slices. The trainer's method would move the full model.
        engine = self._accelerator.shard_model(model, self._own_optimizers)
        if self._generate_together:
            generate_together(engine)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer as the trainer does, and check its parameters.

        Raises:
            ValueError: There are several ranks, and the optimizer holds trainable parameters that
                are not in the model, such as weights of a loss. Their gradients would not be
                reduced.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.engine.ranks.size > 1:
            _check_parameters(optimizer, self.model)
        return optimizer

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Returns the numbers of steps and epochs of the rank with the most batches. Collective."""
        error: Exception | None = None
        values: Any = None
        try:
            if length_of(dataloader) != 0:
                values = super().set_initial_training_values(args, dataloader)
        except Exception as caught:  # the user's loader can raise errors of any type
            error = caught
        found = agree("train()", error, self.engine.ranks.control_group, values)
        known = [each for each in found if each is not None]
        if not known:
            raise ValueError("train_dataset: expected a batch on at least one rank; found none")
        return max(known, key=lambda each: int(each[_STEPS_IN_EPOCH]))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the microbatches of an optimizer step, the same number on all ranks."""
        if self.engine.ranks.size == 1:
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)
        if self._batches is None or self._batches.batches is not epoch_iterator:
            self._batches = TrainingBatches(self.engine, epoch_iterator)
        self._batches.begin_step()
        return super().get_batch_samples(self._batches, *args, **kwargs)

    def _is_repeated(self, batch: Any) -> bool:
        return self._batches is not None and self._batches.is_repeated(batch)

    def _get_num_items_in_batch(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        counted = [
            without_labels(each) if self._is_repeated(each) else each for each in batch_samples
        ]
        return super()._get_num_items_in_batch(counted, *args, **kwargs)

    def training_step(
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the forward and backward of a microbatch, with a loss that is scaled for uneven
        loaders."""
        scale = 1.0
        if self._batches is not None:
            scale = self._batches.scale(inputs, counts=self._counts_of_losses(num_items_in_batch))
        if scale == 0 and num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch or 1  # avoids 0 / 0
        with (
            self.engine.together() if self._different_modules else nullcontext(),
            self._accelerator.scaling_losses(scale),
        ):
            loss: torch.Tensor = super().training_step(
                model, inputs, num_items_in_batch, *args, **kwargs
            )
        return loss if scale == 1 else loss * scale

    def _counts_of_losses(self, num_items: Any) -> str:
        """Returns the ``counts`` of the trainer's losses for :meth:`TrainingBatches.scale`."""
        is_divided = self.loss_is_scaled_for_ga
        if is_divided is None:
            counts_labels = self.model_accepts_loss_kwargs and num_items is not None
            is_divided = counts_labels or self.compute_loss_func is not None
        if not is_divided:
            return "batch"
        return "all" if self.args.average_tokens_across_devices else "rank"

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns the number of floating-point operations of a batch; 0 if it is repeated."""
        return 0 if self._is_repeated(inputs) else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        counted = without_samples(inputs) if self._is_repeated(inputs) else inputs
        super()._track_num_input_tokens(counted)  # type: ignore[no-untyped-call]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation or prediction. If the number of batches may differ between ranks,
        metrics cover only the samples that exist, and the loss is the mean of the batches' losses,
        weighted by their numbers of samples."""
        engine = self.engine
        if engine.ranks.size == 1 or are_even(engine, dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        batches: Any = EvaluationBatches(engine, dataloader)
        self._evaluated = batches
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # the loss is the mean of each batch
        # Seq2SeqTrainer gathers with another function, which would also gather repeated samples.
        self.gather_function = functools.partial(
            self._accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        try:
            with self._accelerator.gathering_by(batches.gather):
                output = super().evaluation_loop(batches, *args, **kwargs)
        finally:
            self._evaluated = None
            self.args.average_tokens_across_devices = averages
        num_samples, loss = batches.totals(only_finite=self.args.logging_nan_inf_filter)
        if loss is not None and output.metrics is not None:
            output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_loss"] = loss
        return output._replace(num_samples=num_samples)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a batch of evaluation or prediction, and record its loss."""
        with self.engine.together() if self._different_modules else nullcontext():
            found = super().prediction_step(*args, **kwargs)
        if self._evaluated is not None and found[0] is not None:
            self._evaluated.add_loss(found[0])
        return found

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # The engine computes the norm over all meshes. Also, the trainer's method would keep
        # references to gradients, and so their memory.
        return False

    @property
    def _has_own_format(self) -> bool:
        """Whether the trainer overrides the format in which transformers saves models."""
        return type(self)._save is not Trainer._save

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in the format of ``from_pretrained``, with its tokenizer. Collective.

        A trainer with its own format (sentence-transformers: a folder of modules) writes on the
        first rank; the full model is then in memory on every rank.

        Args:
            output_dir: The path of the folder. None: the folder in the training arguments.
        """
        folder = Path(output_dir if output_dir is not None else str(self.args.output_dir))
        if not _internal_call or self._model_in_checkpoints:
            self._save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            revision = self.args.hub_revision
            self.push_to_hub(commit_message="Model save", revision=revision)

    def _save_pretrained(self, folder: Path) -> None:
        if self._has_own_format:
            with self.engine.unsharded():
                self._on_first("save_model()", lambda: self._save_whole(folder))
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if isinstance(self.model, PreTrainedModel) or hasattr(self.model, "peft_config"):
            save_pretrained(self.engine, folder, tokenizer=tokenizer)
        else:
            export_safetensors(self.engine, folder)
        path = folder / TRAINING_ARGS_NAME
        self._on_first("save_model()", lambda: torch.save(self.args, path))

    def _save_whole(self, folder: Path) -> None:
        """Save an unsharded model with the trainer's own method."""
        for parameter in self.model.parameters():
            # Parameters get separate storages, because safetensors does not write views.
            parameter.data = parameter.data.clone()
        self._save(str(folder))

    def _on_first(self, what: str, write: Callable[[], object]) -> None:
        """Call ``write`` on the rank that saves. If it fails, all ranks raise the error."""
        error: Exception | None = None
        try:
            if self.args.should_save:
                write()
        except Exception as caught:
            error = caught
        agree(what, error, self.engine.ranks.control_group)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = self._get_output_dir(trial)
        folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with atomic_folder(folder, self.engine) as staging:
            self._staging = staging.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            if self.state.best_model_checkpoint == str(staging):
                self.state.best_model_checkpoint = str(folder)
                if self.args.should_save:
                    self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(
                output_dir=run, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # during a save the push follows the rename
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        optimizer = plain_optimizer(self.optimizer)
        save_checkpoint(
            folder / SHARDED, self.engine, optimizer, trainable_only=self._saves_trainable_only
        )
        path, state = folder / SCHEDULER_NAME, self.lr_scheduler.state_dict()
        self._on_first("saving the scheduler", lambda: torch.save(state, path))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load weights, unless they will be loaded together with the optimizer's state."""
        if not (Path(resume_from_checkpoint) / SHARDED).is_dir():
            self._load_model(resume_from_checkpoint)

    def _load_model(self, folder: str) -> None:
        """Load weights that :meth:`save_model` or a trainer without the engine has written."""
        if not self._has_own_format:
            load_pretrained(self.engine, folder)
            return
        error: Exception | None = None
        try:
            super()._load_from_checkpoint(folder)
        except Exception as caught:
            error = caught
        what, group = f"reading {folder}", self.engine.ranks.control_group
        agree(what, error, group, call="reading a folder")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine, folder = self.engine, Path(checkpoint)
        optimizer = plain_optimizer(self.optimizer)
        if (folder / SHARDED).is_dir():
            load_checkpoint(
                folder / SHARDED,
                engine,
                optimizer,
                trainable_only=self._trainable_only,
            )
        elif not (folder / WHOLE_OPTIMIZER).is_file():
            return  # save_only_model=True: there is no state of optimizer and scheduler
        error: Exception | None = None
        try:
            if not (folder / SHARDED).is_dir():
                whole = folder / WHOLE_OPTIMIZER
                packed = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
                load_whole_state(optimizer, packed)
            state = torch.load(folder / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        except Exception as caught:
            error = caught
        what, group = f"resume from {folder}", engine.ranks.control_group
        agree(what, error, group, call="a resume")

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        if (folder / SHARDED).is_dir():
            load_checkpoint(
                folder / SHARDED,
                self.engine,
                trainable_only=self._trainable_only,
            )
        else:
            self._load_model(str(folder))


class FSDPEngineTrainer(FSDPEngineMixin, Trainer):
    """``transformers.Trainer`` with this engine; see :class:`FSDPEngineMixin`."""


class FSDPEngineSeq2SeqTrainer(FSDPEngineMixin, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with this engine; see :class:`FSDPEngineMixin`."""


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError if the optimizer has trainable parameters that are not in the model."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in own and parameter.requires_grad
    ]
    if others:
        raise ValueError(
            "optimizer: expected parameters of the model, whose gradients the engine reduces; "
            f"found {len(others)} others, of shapes {others[:5]}. Register them in the model "
            "before the trainer is made, or train on one rank"
        )


def _check(args: TrainingArguments) -> None:
    """Raise ValueError if a training argument is not supported."""
    ours = {
        "fsdp": "the engine shards the model, by the arguments in shard",
        "deepspeed": "the engine shards the model, by the arguments in shard",
        "fp16": "its losses need scaling (those of bf16=True do not)",
        "auto_find_batch_size": "a rank that runs out of memory would restart without the others",
        "save_on_each_node": "all ranks write one folder together",
        "parallelism_config": "torch applies tensor parallelism, and the mesh in shard is the "
        "data-parallel one",
    }
    for name, reason in ours.items():
        if value := getattr(args, name, None):
            raise ValueError(f"{name}: expected it unset, since {reason}; found {value!r}")
    check_num_processes(args.world_size, "TrainingArguments(use_cpu=True)")
    if args.n_gpu > 1:
        raise ValueError(
            "devices: expected one process for each device, started by torchrun or accelerate "
            f"launch; found one process with {args.n_gpu} devices"
        )
