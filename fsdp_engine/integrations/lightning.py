"""Lightning: ``Trainer(strategy="fsdp_engine")`` and ``Fabric(strategy="fsdp_engine")``.

Importing this module registers the name with both. An import is necessary, because Lightning has no
entry points for strategies, and reads its entry points for callbacks after a Trainer has created
its strategy.

``setup`` shards the LightningModule in place, before optimizers are configured. Its steps then run
like a forward of the model, so that the parameters that they read are unsharded ([Note: Steps]).

[Note: Steps]
``training_step`` is not ``forward``, so it fires no forward hooks. Therefore a step runs within the
forward hooks of the model, like a method of :func:`fsdp_engine.register_forward_method`. Its inputs
are not cast, because Lightning's precision plugin has already cast them, and targets keep their
dtype. Under manual optimization ``training_step`` contains many forwards, backwards and optimizer
steps. The hooks of modules then fire when modules are called, as in a custom loop.

[Note: Uneven loaders]
If ranks' loaders have different or unknown lengths, all ranks take as many steps as the rank with
the most batches. A rank without further batches trains a batch again, with weight 0, so that the
loss of a step is the mean over the batches that exist. In evaluation such a rank does not run the
user's step, because the user's metrics would then count a batch twice. It takes part in the gathers
of the other ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from fsdp_engine.engine import Engine
from fsdp_engine.extras import naming_extra
from fsdp_engine.integrations.checkpoint_folder import (
    load_folder,
    load_whole,
    read_file,
    read_whole,
    remove_folder,
    save_folder,
)
from fsdp_engine.integrations.lightning_fabric import FSDPEngineFabricStrategy
from fsdp_engine.integrations.lightning_loaders import EvenLoader, even_loader
from fsdp_engine.integrations.loader_steps import LoaderStep
from fsdp_engine.integrations.preparation import (
    EngineArguments,
    has_all_gradients,
    prepare_optimizers,
)
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.hooks import hooks_of

with naming_extra():
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn


__all__ = ["NAME", "FSDPEngineFabricStrategy", "FSDPEngineStrategy", "consolidate"]

NAME = "fsdp_engine"

# Lightning's names of the mean over ranks.
_MEANS = ("mean", "avg", "AVG")

_NO_CHECKPOINT_IO = (
    "checkpoint_io: expected none, since all ranks write checkpoints in the format of fsdp_engine; "
    "found {}"
)


class FSDPEngineStrategy(DDPStrategy):
    """Strategy that trains a LightningModule sharded by fsdp_engine.

    Args:
        strategy: The level of the inner axis, as in ``fsdp_engine.shard``.
        outer_strategy: The level of the outer axis.
        policy: The policy of dtypes. None: the dtypes of the Trainer's ``precision``.
        trust: Allow objects of any class in checkpoints, which may run arbitrary code.
        different_modules: Allow ranks to use different modules: ``training_step``, its backward,
            and steps of evaluation and prediction run within ``engine.together()``, except under
            manual optimization.
        process_group_backend: The backend of the process group. None: nccl on GPUs, gloo on CPUs.
        timeout: The timeout of collectives, if the strategy creates the process group.
        accelerator, parallel_devices, cluster_environment, precision_plugin: As in Lightning's
            strategies; the Trainer sets them.
        **sharding: Other arguments of ``fsdp_engine.shard``: ``mesh``, ``units``, ``options``,
            ``extensions`` and so on. ``initial_values`` is "rank0" by default: as in DDP, all ranks
            start from the values of the first rank.

    Raises:
        TypeError: An argument is unknown.
    """

    strategy_name = NAME

    def __init__(
        self,
        strategy: str | None = None,
        outer_strategy: str | None = None,
        *,
        policy: MixedPrecisionPolicy | None = None,
        trust: bool = False,
        different_modules: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        **sharding: Any,
    ) -> None:
        levels = {"strategy": strategy, "outer_strategy": outer_strategy}
        self._arguments = EngineArguments(policy, {**levels, **sharding})
        self._trust = trust
        self._different_modules = different_modules
        self._engine: Engine | None = None
        # The step of the batch that is trained or evaluated; None if all ranks' loaders are equally
        # long.
        self._step: LoaderStep | None = None
        self._num_mean_losses: Callable[[], int] = lambda: 0
        self._is_apart = False
        self._state_weights: dict[str, Any] = {}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @property
    def engine(self) -> Engine:
        """The engine of the LightningModule: ``self.trainer.strategy.engine`` in its methods.

        Raises:
            RuntimeError: The Trainer has not set up the model yet.
        """
        if self._engine is None:
            raise RuntimeError(
                "engine: expected a model that the Trainer has set up (within fit, validate, test, "
                "predict); found none yet"
            )
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin, with clipping of gradients by the engine."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            self._arguments.check_precision(precision_plugin.precision)
            precision_plugin = _clipping_by_engine(precision_plugin)
        self._precision_plugin = precision_plugin

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Not supported: reading or setting it raises TypeError."""
        raise TypeError(_NO_CHECKPOINT_IO.format("a use of it"))

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise TypeError(_NO_CHECKPOINT_IO.format(type(io).__name__))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because checkpoints are read into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False, because :meth:`load_checkpoint` restores optimizers."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, and configure optimizers over the sharded parameters. Collective.

        Raises:
            TypeError: ``torch.compile`` compiled the complete module, or a callback averages
                weights in a copy of it.
            Exception: An error of ``fsdp_engine.shard``. All ranks raise.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module, plugin = self.lightning_module, self.precision_plugin
        if getattr(module, "_compiler_ctx", None) is not None:  # Lightning 2.5 and 2.6 set it
            raise TypeError(
                "model: expected a LightningModule that is not compiled as a whole; found one that "
                "is. Compile its blocks instead: block.compile()"
            )
        for each in getattr(trainer, "callbacks", ()):
            # The class is found by its name, because it is new in Lightning 2.6.
            if any(kind.__name__ == "WeightAveraging" for kind in type(each).__mro__):
                raise TypeError(
                    f"callbacks: expected none that averages a copy of the module, since a sharded "
                    f"model is not copied; found {type(each).__name__}. Update fe.EMA(engine) in "
                    "on_train_batch_end, and evaluate within ema.swapped()"
                )
        if hooks_of(module) is None:
            if self._layer_sync is not None:
                module = self._layer_sync.apply(module)  # type: ignore[assignment]
            module = plugin.convert_module(module)  # type: ignore[assignment]
        self._engine = self._arguments.engine_for(module, plugin.precision)
        if isinstance(plugin, _ClipsByEngine):
            plugin.engine = self._engine
        _metrics_to(module, self.root_device)
        self.model = module
        self._reset_optimizers_and_schedulers()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call ``configure_optimizers``, and prepare the optimizers for sharded parameters."""
        super().setup_optimizers(trainer)
        prepare_optimizers([self.engine], [each for each in self.optimizers if _steps(each)])

    def model_to_device(self) -> None:
        """Do nothing: the engine allocates shards on the device."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which the module's tensors are created.

        Args:
            empty_init: Create tensors on the meta device. ``setup`` then initializes shard by
                shard.
        """
        place: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader with the same number of steps on all ranks; see [Note: Uneven loaders].
        Collective."""
        loader = super().process_dataloader(dataloader)
        return loader if self._engine is None else even_loader(self._engine, loader)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move the batch to the device, and record its step. The Trainer calls this once for each
        batch, in order."""
        loaders = self._loaders()
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        self._step = loader.take_step() if isinstance(loader, EvenLoader) else None
        return super().batch_to_device(batch, device, dataloader_idx)

    def _loaders(self) -> list[Any]:
        """Returns the loaders of the running stage."""
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer._active_loop
        combined = None if loop is None else loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def on_train_start(self) -> None:
        """Check that the stage can use its loaders if their lengths differ between ranks."""
        super().on_train_start()
        self._check_loaders("training_step")

    def on_validation_start(self) -> None:
        """Check that the stage can use its loaders if their lengths differ between ranks."""
        super().on_validation_start()
        self._check_loaders("validation_step")

    def on_test_start(self) -> None:
        """Check that the stage can use its loaders if their lengths differ between ranks."""
        super().on_test_start()
        self._check_loaders("test_step")

    def on_predict_start(self) -> None:
        """Check that the stage can use its loaders if their lengths differ between ranks."""
        super().on_predict_start()
        self._check_loaders("predict_step")

    def _check_loaders(self, name: str) -> None:
        """Raise an error on all ranks if uneven loaders are used in an unsupported way."""
        loaders = self._loaders()
        if not any(isinstance(each, EvenLoader) for each in loaders):
            return
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer._active_loop
        assert loop is not None
        assert loop._combined_loader is not None
        is_sequential = loop._combined_loader._mode == "sequential"
        if len(loaders) > 1 and not is_sequential:
            raise ValueError(
                f"dataloaders of {name}: expected one, or loaders of equal known lengths on all "
                f"ranks; found {len(loaders)}, whose lengths differ between ranks or are unknown. "
                "Combine them in one loader"
            )
        parameters = inspect.signature(getattr(self.lightning_module, name)).parameters
        if "dataloader_iter" in parameters:
            raise ValueError(
                f"{name}: expected a step that takes a batch, since the loaders' lengths differ "
                "between ranks or are unknown; found one that takes dataloader_iter"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step within the forward hooks of the model, except under manual optimization."""
        assert self.lightning_module is not None
        weight = 1.0 if self._step is None else float(not self._step.is_repeated)
        with (
            self.precision_plugin.train_step_context(),
            self.engine.weighting_losses(weight) as num_mean_losses,
        ):
            self._num_mean_losses = num_mean_losses
            if not self.lightning_module.automatic_optimization:
                return self.lightning_module.training_step(*args, **kwargs)
            with self._around_step():
                return self._apart("training_step", args, kwargs)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a training step."""
        if self._step is not None:
            closure_loss = self._weighted(closure_loss, self._step)
        with self._around_step():
            return super().backward(closure_loss, *args, **kwargs)

    def _weighted(self, loss: Any, step: LoaderStep) -> Any:
        """Scale a loss so that its gradients are those of the mean over the batches that exist."""
        assert self.lightning_module is not None
        if self._num_mean_losses() > 0:
            return loss  # engine.mean_loss, which the user has called, has already weighted it
        weight = float(not step.is_repeated)
        if not self.lightning_module.automatic_optimization:
            return loss * (weight * self.engine.ranks.size / step.num_ranks)
        num = self.lightning_module.trainer.accumulate_grad_batches  # Lightning has divided by it
        return self.engine.mean_loss(num * weight * loss, weight)

    def _around_step(self) -> AbstractContextManager[None]:
        return self.engine.together() if self._has_different_modules else nullcontext()

    @property
    def _has_different_modules(self) -> bool:
        assert self.lightning_module is not None
        return self._different_modules and self.lightning_module.automatic_optimization

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step within the forward hooks of the model."""
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step within the forward hooks of the model."""
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step within the forward hooks of the model."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a step of evaluation or prediction. See [Note: Uneven loaders]."""
        step = self._step
        if step is None:
            with self._around_step():
                return self._apart(name, args, kwargs)
        if name != "predict_step" and any(
            isinstance(each, EvenLoader) and each.lacks_batches for each in self._loaders()
        ):
            raise ValueError(
                f"dataloader of {name}: expected at least one batch on each rank, since metrics "
                "are reduced over all ranks; found a rank that has none"
            )
        with self.engine.together():
            return None if step.is_repeated else self._apart(name, args, kwargs)

    def _apart(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a step. Communication in the step raises an error if other ranks might skip the
        step."""
        may_differ = self._step is not None and name != "training_step"
        self._is_apart = may_differ or self._has_different_modules
        try:
            return self._as_forward(name, args, kwargs)
        finally:
            self._is_apart = False

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over ranks. A mean of integers is computed in fp64, because Lightning
        divides the sums that ``self.log`` has accumulated by the mean of the ranks' numbers of
        samples."""
        self._check_not_apart(
            "a reduction over ranks, such as self.log(on_step=True, sync_dist=True)"
        )
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in _MEANS:
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather a tensor from all ranks."""
        self._check_not_apart("all_gather()")
        return super().all_gather(*args, **kwargs)

    def _check_not_apart(self, found: str) -> None:
        if self._is_apart:
            raise RuntimeError(
                "step: expected no communication within it, since ranks use different modules, or "
                f"evaluate loaders of different or unknown lengths; found {found}. Log with "
                "on_step=False, on_epoch=True, and gather at the end of the epoch"
            )

    def _as_forward(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a step within the forward hooks of the model. See [Note: Steps]."""
        step = partial(getattr(self.lightning_module, name), *args, **kwargs)
        hooks = hooks_of(self.engine.model)
        assert hooks is not None
        return hooks.around(step)()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for backwards that are not the last one of an optimizer step."""
        with self.engine.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the module, with sharded weights."""
        self._state_weights = super().lightning_module_state_dict()
        return dict(self._state_weights)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint folder. All ranks write weights and optimizers, and rank 0 writes all
        other entries. Collective.

        Args:
            checkpoint: The checkpoint of the Trainer. Hooks may have removed weights and added
                other entries.
            filepath: The path of the folder. The path of rank 0 is used.
            storage_options: Must be None.

        Raises:
            TypeError: ``storage_options`` is not None.
            ValueError: A hook has replaced weights in ``state_dict``.
            Exception: An error of ``fsdp_engine.save_checkpoint``. All ranks raise.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options: expected None; found {storage_options!r}")
        if self.lightning_module is not None and self.lightning_module.trainer.interrupted:
            self.engine.reset()  # an exception may have interrupted a forward
        self.engine.await_ranks()
        path = Path(self.broadcast(str(filepath)))
        checkpoint = dict(checkpoint)
        weights = checkpoint.pop("state_dict")
        shown, self._state_weights = self._state_weights, {}
        has_optimizers = checkpoint.pop("optimizer_states", None) is not None
        optimizers = [each for each in self.optimizers if _steps(each)] if has_optimizers else []
        save_folder(path, self.engine, optimizers, checkpoint, keeps=_kept_of(weights, shown))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read weights, and in ``fit`` also optimizers, from a folder or from a file of Lightning.

        Collective.

        Args:
            checkpoint_path: The path of the folder, or of a file of another strategy, of which each
                rank keeps its slices. The path of rank 0 is used.
            weights_only: False allows objects of any class, which may run arbitrary code.

        Returns:
            The other state: loops, callbacks, schedulers.

        Raises:
            Exception: An error of ``fsdp_engine.load_checkpoint``. All ranks raise.
        """
        assert self.lightning_module is not None
        self.engine.await_ranks()
        path = Path(self.broadcast(str(checkpoint_path)))
        trust = self._trust or weights_only is False
        strict = self.lightning_module.strict_loading
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = [each for each in self.optimizers if _steps(each)] if is_fitting else []
        if not path.is_file():
            return load_folder(path, self.engine, optimizers, strict=strict, trust=trust)
        checkpoint = read_file(path, self.engine, trust)
        states = checkpoint.pop("optimizer_states", []) if is_fitting else []
        weights = checkpoint.pop("state_dict")
        load_whole(weights, states, self.engine, optimizers, strict=strict)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has loaded the state."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: :meth:`load_checkpoint` has loaded the state."""

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the folder or file of a checkpoint."""
        if self.is_global_zero:
            remove_folder(Path(filepath))

    def teardown(self) -> None:
        """Release resources. The model remains sharded, for another stage or Trainer."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy under its name."""
        strategy_registry.register(NAME, cls, description="Sharded by fsdp_engine", override=True)


class _ClipsByEngine:
    """Mixin for Lightning's precision plugins that lets the engine clip gradients, by the norm over
    all ranks."""

    engine: Engine | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip gradients by norm, with torch's function if there are several optimizers."""
        if self.engine is not None and has_all_gradients(self.engine, optimizer):
            self.engine.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]


class _Plain(_ClipsByEngine, Precision):
    pass


class _Double(_ClipsByEngine, DoublePrecision):
    pass


class _Half(_ClipsByEngine, HalfPrecision):
    pass


class _Mixed(_ClipsByEngine, MixedPrecision):
    pass


_CLIPPING: dict[type, type[Any]] = {
    Precision: _Plain,
    DoublePrecision: _Double,
    HalfPrecision: _Half,
    MixedPrecision: _Mixed,
}


def _clipping_by_engine(plugin: Precision) -> Precision:
    """Returns a copy of a precision plugin that clips with the engine. Plugins of other classes are
    returned unchanged; they clip with torch's function, which has the same result."""
    kind = _CLIPPING.get(type(plugin))
    if kind is None:
        return plugin
    made: Precision = object.__new__(kind)
    vars(made).update(vars(plugin))
    return made


def _kept_of(weights: Mapping[str, Any], shown: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    """Returns a predicate of the entries that hooks have not removed from a ``state_dict``."""
    if others := [name for name, value in weights.items() if shown.get(name) is not value]:
        raise ValueError(
            "state_dict: expected hooks to change no values, since all ranks save their own "
            f"slices; found others in {', '.join(others[:4])}. Hooks may only remove entries"
        )
    left_out = shown.keys() - weights.keys()
    return lambda name, value: name not in left_out


def _steps(optimizer: Optimizer) -> bool:
    """Returns whether an object is an optimizer, not the placeholder that Lightning uses if there
    is none."""
    return bool(optimizer.param_groups)


def _metrics_to(module: nn.Module, device: torch.device) -> None:
    """Move the states of torchmetrics, which are neither parameters nor buffers."""
    from torchmetrics import Metric

    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)


def consolidate(folder: str | Path, file: str | Path, *, trust: bool = False) -> None:
    """Convert a checkpoint's folder to one file in Lightning's format, without a process group.

    ``MyModule.load_from_checkpoint(file)`` and any Trainer can read it. Requires host memory for
    all weights and optimizer state.

    Args:
        folder: The path of the checkpoint.
        file: The path of the file to write.
        trust: Allow objects of any class, which may run arbitrary code.

    Raises:
        Exception: The checkpoint cannot be read, or the file cannot be written.
    """
    torch.save(read_whole(Path(folder), trust), file)


FSDPEngineStrategy.register_strategies(StrategyRegistry)
