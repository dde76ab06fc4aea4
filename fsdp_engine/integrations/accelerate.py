"""accelerate's ``Accelerator`` over this engine.

The accelerator shards models instead of wrapping them in DDP. It uses private attributes of
accelerate (the lists of prepared objects), and is tested with accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_engine.checkpoint.folder import load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.offline import TRAINER_SUBFOLDER
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.mesh import ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.extras import naming_extra
from fsdp_engine.integrations.checkpoint_folder import atomic_folder
from fsdp_engine.integrations.preparation import (
    check_not_stepped,
    check_num_processes,
    checked_arguments,
    compile_units,
    held_by_name,
    shard_if_possible,
)
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.pretrained.load import load_pretrained
from fsdp_engine.sharding import is_plan
from fsdp_engine.sharding import shard as shard_model

with naming_extra():
    from accelerate import Accelerator
    from accelerate.checkpointing import (
        load_accelerator_state,
        load_custom_state,
        save_accelerator_state,
        save_custom_state,
    )
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin


WHAT = "FSDPEngineAccelerator()"
# Name of the folder with weights and optimizer state in a checkpoint, in the format of
# torch.distributed.checkpoint.
SHARDED = TRAINER_SUBFOLDER
_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class _SyncsRanks:
    """An object that is true if all ranks must run the same number of forwards in ``generate``.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine = self._engine()
        return engine is not None and not engine.ranks_can_differ


def generate_together(engine: Engine) -> None:
    """Make ``generate`` of the engine's model run within ``engine.together()``. Calls within
    ``together()`` are not changed.

    Raises:
        ValueError: The model has no ``generate``.
    """
    generate = getattr(engine.model, "generate", None)
    if generate is None:
        raise ValueError(
            "generate_together: expected a model that has generate(); found a "
            f"{type(engine.model).__name__}"
        )
    if isinstance(generate, _GeneratesTogether):
        return
    engine.model.generate = _GeneratesTogether(engine, generate)  # type: ignore[assignment]


class _GeneratesTogether:
    """Callable that runs ``generate`` within ``engine.together()``."""

    def __init__(self, engine: Engine, generate: Callable[..., Any]) -> None:
        functools.update_wrapper(self, generate)
        self._engine = engine
        self._generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        with contextlib.nullcontext() if engine.ranks_can_differ else engine.together():
            return self._generate(*args, **kwargs)


class FSDPEngineAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` shards models with ``fsdp_engine.shard``.

    Training loops need no changes. They can use ``prepare``, ``backward``, ``accumulate``,
    ``no_sync``, ``clip_grad_norm_``, ``gather_for_metrics``, ``save_state``, ``load_state``,
    ``get_state_dict`` and ``unwrap_model``. An optimizer that was built before its model was
    sharded updates the sharded parameters after ``prepare``.

    With ``mixed_precision="bf16"`` weights are gathered and used in bf16 (unless ``shard`` contains
    an ``mp_policy`` or a ``plan``), and autocast runs operations that require fp32 in fp32.

    Args:
        *args: The arguments of ``Accelerator``.
        shard: Arguments of ``fsdp_engine.shard`` by name, for each prepared model that is not
            sharded yet. None: the defaults of ``shard``.
        pretrained: A Hugging Face folder, from which ``fsdp_engine.load_pretrained`` reads the
            weights of models that are on the meta device.
        **kwargs: The keyword arguments of ``Accelerator``.

    Raises:
        ValueError, TypeError: An argument is not supported: fp16, fp8, DeepSpeed, FSDP,
            Megatron-LM, a ``parallelism_config``, or an unknown argument of ``shard``. All ranks
            raise.
    """

    def __init__(
        self,
        *args: Any,
        shard: Mapping[str, Any] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        with reporting(WHAT, ranks_that_meet(None)):
            self.shard_arguments = checked_arguments(shard)
            self.pretrained = pretrained
            self._loss_scale = 1.0
            self._gather_samples: Callable[[Any, bool], Any] | None = None
            self._check_state()

    def shard_model(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> Engine:
        """Shard a model, unless it is already sharded, and return its engine. Collective.

        Args:
            model: Any module.
            optimizers: The optimizers of its parameters. They hold the sharded parameters
                afterwards.

        Raises:
            ValueError, TypeError: An error of ``fsdp_engine.shard``, or the model is a submodule of
                a sharded model, or an optimizer has stepped.
        """
        engine = engine_of(model)
        if engine is None:
            plain = [plain_optimizer(each) for each in optimizers]
            with reporting("prepare()", ranks_that_meet(None)):
                check_not_stepped(model, plain)
            with held_by_name(model, plain):
                engine = self._shard(model)
        elif engine.model is not model:
            raise ValueError(
                "model: expected the model that was given to fe.shard, or one that is not sharded; "
                f"found a submodule {type(model).__name__} of a sharded model"
            )
        if engine.ranks.size > 1:
            # A rank whose text is complete must call the model as long as other ranks do. If
            # `generate` is called without `synced_gpus`, `transformers` checks this attribute
            # (is_fsdp_managed_module, in 5.23).
            for module in model.modules():
                if hasattr(module, "generate"):
                    module._is_fsdp_managed_module = _SyncsRanks(engine)  # type: ignore[assignment]
            if not hasattr(model, "no_sync"):
                model.no_sync = refuse_no_sync  # type: ignore[assignment]
        return engine

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard all models among the arguments, then call ``Accelerator.prepare``."""
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        for each in args:
            if isinstance(each, nn.Module):
                self.shard_model(each, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model if it is not sharded, for training or evaluation. Returns the model."""
        engine = self.shard_model(model)
        plugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO and not getattr(
            model, "_is_accelerate_prepared", False
        ):
            compile_units(engine, plugin.to_kwargs())
        # The base class would compile the full model, including the engine's hooks.
        self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        try:
            prepared: nn.Module = super().prepare_model(
                model, device_placement=False, evaluation_mode=True
            )
        finally:
            self.state.dynamo_plugin = plugin
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Pass the optimizer to ``shard_optimizer``, then to ``Accelerator.prepare_optimizer``."""
        shard_if_possible(plain_optimizer(optimizer))
        return super().prepare_optimizer(optimizer, device_placement=False)

    @contextlib.contextmanager
    def scaling_losses(self, scale: float) -> Iterator[None]:
        """Context in which :meth:`backward` scales losses. Trainers of other libraries use it."""
        self._loss_scale = scale
        try:
            yield
        finally:
            self._loss_scale = 1.0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``Accelerator.backward``, with the scaled loss within :meth:`scaling_losses`."""
        super().backward(loss if self._loss_scale == 1 else loss * self._loss_scale, **kwargs)

    @contextlib.contextmanager
    def gathering_by(self, gather: Callable[[Any, bool], Any]) -> Iterator[None]:
        """Context in which ``gather`` replaces :meth:`gather_for_metrics`. Trainers of other
        libraries use it."""
        self._gather_samples = gather
        try:
            yield
        finally:
            self._gather_samples = None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Call ``Accelerator.gather_for_metrics``, or the function of :meth:`gathering_by`."""
        if self._gather_samples is not None:
            return self._gather_samples(input_data, use_gather_object)
        return super().gather_for_metrics(input_data, use_gather_object)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise an error, because torch's Join is not supported.

        Raises:
            ValueError: The method was called.
        """
        raise ValueError(
            "join_uneven_inputs(): expected no call, since torch's Join does not gather sharded "
            "parameters; found one. Iterate over engine.even_batches(loader), which yields the "
            "same number of batches on all ranks, with weight 0 on a rank whose loader has ended"
        )

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context of ``engine.no_sync()`` if the model is sharded."""
        engine = engine_of(model)
        with contextlib.nullcontext() if engine is None else engine.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip gradients to a norm over all ranks. Returns the norm before clipping, as a plain 0-d
        tensor.

        Args:
            parameters: The parameters. If they are all trainable parameters of one sharded model,
                the engine clips them; otherwise torch does.
            max_norm: Maximum norm. inf: only compute the norm.
            norm_type: The p of the p-norm.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(param) for param in given}
        for model in self._models:
            engine = engine_of(model)
            if engine is not None and all(
                id(param) in ids for param in model.parameters() if param.requires_grad
            ):
                trainable = sum(param.requires_grad for param in model.parameters())
                if trainable == sum(param.requires_grad for param in given):
                    return engine.clip_grad_norm_(max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
        whole: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
        return norm if whole is None else whole()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns full weights in host memory on the first rank, and an empty dict on other ranks.
        Collective."""
        engine = engine_of(model)
        if engine is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        return engine.full_state_dict(rank0_only=True)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Save models, optimizers, schedulers, samplers, random states and registered objects.

        The save is atomic: if the job is killed during the save, an older folder remains. If the
        job is killed between the two renames that replace it, the next save restores it. Any number
        of ranks can load the folder. Collective.

        Args:
            output_dir: The path of the folder, whose content is replaced. None: accelerate's
                automatic name.
            safe_serialization, kwargs: Ignored.

        Returns:
            The path of the folder.
        """
        folder = Path(os.path.expanduser(self._folder_of_save(output_dir)))
        with atomic_folder(folder, self._first_engine()) as staging:
            error: Exception | None = None
            try:
                for hook in self._save_model_state_pre_hook.values():
                    hook(self._models, [], str(staging))
                schedulers, loaders = self._schedulers, self._dataloaders
                index = self.state.process_index
                save_accelerator_state(staging, [], [], schedulers, loaders, index, self.step)
                for number, each in enumerate(self._custom_objects):
                    save_custom_state(each, str(staging), number)
            except Exception as caught:  # registered objects raise errors of any type
                error = caught
            agree("save_state()", error, self._first_engine().ranks.control_group)
            for name, engine, optimizer in self._saved():
                save_checkpoint(staging / name, engine, optimizer)
        self._retire(folder)
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(
        self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a folder of :meth:`save_state`, on any number of ranks. Collective.

        A rank restores the random states that the rank of the same index has saved, if any.

        Args:
            input_dir: The path of the folder. None: the latest folder with an automatic name.
            load_kwargs: Arguments of ``torch.load`` for schedulers and samplers.
            kwargs: Ignored.

        Raises:
            ValueError, OSError: :meth:`save_state` has not written the folder, or it does not fit.
                All ranks raise.
        """
        error: Exception | None = None
        folder = Path()
        try:
            folder = Path(os.path.expanduser(input_dir or self._latest()))
            if not (folder / SHARDED).is_dir():
                raise ValueError(
                    f"input_dir: expected a folder that FSDPEngineAccelerator.save_state wrote; "
                    f"found {folder} without {SHARDED}/"
                )
            self._check_custom_objects(folder)
        except Exception as caught:
            error = caught
        group = self._first_engine().ranks.control_group
        agree("load_state()", error, group)
        for name, engine, optimizer in self._saved():
            load_checkpoint(folder / name, engine, optimizer)
        try:
            for hook in self._load_model_state_pre_hook.values():
                hook(self._models, str(folder))
            schedulers, loaders = self._schedulers, self._dataloaders
            index = self.state.process_index
            changes = load_accelerator_state(
                str(folder), [], [], schedulers, loaders, index, None, "cpu", load_kwargs
            )
            if "step" in changes:
                self.step: int = changes["step"]
            for number, each in enumerate(self._custom_objects):
                load_custom_state(each, str(folder), number)
        except Exception as caught:  # registered objects raise errors of any type
            error = caught
        agree("load_state()", error, group)

    def _shard(self, model: nn.Module) -> Engine:
        arguments = dict(self.shard_arguments)
        is_meta = any(param.is_meta for param in model.parameters())
        has_policy = bool({"mp_policy", "plan"} & arguments.keys())
        has_policy |= is_plan(arguments.get("strategy"))
        if self.mixed_precision == "bf16" and not has_policy:
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if not is_meta:  # as in DDP, all ranks start from the values of the first rank
            arguments.setdefault("initial_values", "rank0")
        elif self.pretrained is not None:
            arguments.setdefault("initial_values", "empty")
        engine = shard_model(model, **arguments)
        if engine.mesh.device.type != self.device.type:
            raise ValueError(
                f"shard: expected a mesh of {self.device.type}, the accelerator's device type; "
                f"found {engine.mesh.device.type}"
            )
        if is_meta and self.pretrained is not None:
            load_pretrained(engine, self.pretrained)
        return engine

    def _check_state(self) -> None:
        """Raise ValueError for unsupported settings."""
        check_num_processes(self.num_processes, "cpu=True")
        if self.distributed_type not in _TYPES:
            raise ValueError(
                f"distributed_type: expected one of {', '.join(each.value for each in _TYPES)}, "
                f"since this engine shards the model; found {self.distributed_type.value}"
            )
        if self.state.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                "mixed_precision: expected 'no' or 'bf16', which need no scaling of the loss; "
                f"found {self.state.mixed_precision!r}"
            )
        if self.parallelism_config is not None:
            raise ValueError(
                "parallelism_config: expected None; found one. Apply tensor parallelism with "
                "torch, and pass the data-parallel mesh in shard"
            )

    def _saved(self) -> Iterator[tuple[str, Engine, torch.optim.Optimizer | None]]:
        """Yield the name of the folder, the engine and the optimizer of each model.

        Raises:
            ValueError: A model has more than one optimizer.
        """
        engines = [engine for model in self._models if (engine := engine_of(model)) is not None]
        for number, engine in enumerate(engines):
            own = {id(param) for param in engine.model.parameters()}
            optimizers = [
                plain_optimizer(each)
                for each in self._optimizers
                if any(id(param) in own for group in each.param_groups for param in group["params"])
            ]
            if len(optimizers) > 1:
                raise ValueError(
                    f"optimizers: expected at most one for a model; found {len(optimizers)} for "
                    f"{type(engine.model).__name__}"
                )
            name = SHARDED if number == 0 else f"{SHARDED}_{number}"
            yield name, engine, optimizers[0] if optimizers else None

    def _first_engine(self) -> Engine:
        for model in self._models:
            if (engine := engine_of(model)) is not None:
                return engine
        raise ValueError(
            "models: expected a prepared model; found none. Call accelerator.prepare(model) first"
        )

    def _folder_of_save(self, output_dir: Any) -> str:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "output_dir: expected a folder, since automatic_checkpoint_naming is False; "
                    "found None"
                )
            return str(output_dir)
        folder = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if os.path.exists(folder):
            raise ValueError(
                f"save_iteration: expected a number that was not saved yet; found {folder}. Set "
                "project_configuration.iteration to continue after it"
            )
        return folder

    def _automatic(self, parent: Path) -> list[Path]:
        """Returns the folders with automatic names, in ascending order."""
        named = [(re.fullmatch(r"checkpoint_(\d+)", each.name), each) for each in parent.iterdir()]
        return [path for _, path in sorted((int(name[1]), path) for name, path in named if name)]

    def _latest(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError(
                "input_dir: expected a folder, since automatic_checkpoint_naming is False; found "
                "None"
            )
        folders = self._automatic(Path(self.project_dir) / "checkpoints")
        if not folders:
            raise ValueError(f"input_dir: expected a checkpoint in {self.project_dir}; found none")
        return folders[-1]

    def _retire(self, folder: Path) -> None:
        """Remove the oldest folders with automatic names, beyond ``total_limit``."""
        project = self.project_configuration
        limit = project.total_limit
        if project.automatic_checkpoint_naming and limit is not None and self.is_main_process:
            for each in self._automatic(folder.parent)[:-limit]:
                shutil.rmtree(each, ignore_errors=True)

    def _check_custom_objects(self, folder: Path) -> None:
        found = len(list(folder.glob("custom_checkpoint_*.pkl")))
        if found != len(self._custom_objects):
            raise ValueError(
                f"registered objects: expected {found}, as {folder} has; found "
                f"{len(self._custom_objects)}"
            )


def refuse_no_sync() -> NoReturn:
    """Raise an error if DDP's method ``no_sync`` is called, as accelerate's ``LocalSGD`` does.

    Raises:
        NotImplementedError: The function was called.
    """
    raise NotImplementedError(
        "model.no_sync: expected accelerator.no_sync(model), which accumulates gradients; found a "
        "call of DDP's method, as accelerate's LocalSGD makes. LocalSGD trains a separate model on "
        "each rank, but this engine shards one model over all ranks: use LocalSGD with "
        "accelerate.Accelerator, or train without it"
    )


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer of torch that accelerate's optimizer wraps. Any other optimizer is
    returned unchanged."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
