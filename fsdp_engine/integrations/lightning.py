"""Lightning: ``Trainer(strategy="fsdp_engine")`` and ``Fabric(strategy="fsdp_engine")``.

Importing this file registers the name with both. (Lightning has no entry points for strategies:
those for callbacks are read when a Trainer has its strategy already.)

The LightningModule itself is sharded, in place, in ``setup``, before optimizers are configured.
Its steps then run as a forward of the model, so that what they read of it is whole
([Note: Steps]).

[Note: Steps]
``training_step`` is no ``forward``: nothing that is hooked is called. A step is therefore entered
as :func:`fsdp_engine.register_forward_method` enters a method; but without its inputs, which must
not be cast: Lightning's precision has done so already, and targets keep their dtype. Under manual
optimization ``training_step`` is many forwards, backwards and steps of optimizers, so modules are
entered by their own calls, as in a loop by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
from fsdp_engine.integrations.engine_arguments import (
    EngineArguments,
    has_all_gradients,
    prepare_optimizers,
)
from fsdp_engine.integrations.lightning_fabric import FSDPEngineFabricStrategy
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

_NO_CHECKPOINT_IO = (
    "checkpoint_io: expected none, since all ranks write checkpoints in the format of fsdp_engine; "
    "found {}"
)


class FSDPEngineStrategy(DDPStrategy):
    """Trains a LightningModule that is sharded by fsdp_engine.

    Args:
        strategy: level of the inner axis, as :func:`fsdp_engine.shard` has it.
        outer_strategy: level of the outer axis.
        policy: dtypes; None: what the Trainer's ``precision`` says.
        trust: whoever wrote a checkpoint may run code here: objects in it may be of any class.
        process_group_backend: None: nccl on GPUs, gloo on CPUs.
        timeout: of collectives, if this makes the process group.
        accelerator, parallel_devices, cluster_environment, precision_plugin: as in Lightning's
            strategies; the Trainer gives them.
        **sharding: other arguments of :func:`fsdp_engine.shard`: ``mesh``, ``units``, ``config``,
            ``checkpointing``, ``granule``, ``codec_rules`` and so on. ``initial_values`` is
            "rank0" unless said otherwise: as in DDP, all ranks start from the first one's values.

    Raises:
        TypeError: an argument is unknown.
    """

    strategy_name = NAME

    def __init__(
        self,
        strategy: str | None = None,
        outer_strategy: str | None = None,
        *,
        policy: MixedPrecisionPolicy | None = None,
        trust: bool = False,
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
        self._engine: Engine | None = None
        self._shown_weights: dict[str, Any] = {}
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
            RuntimeError: the Trainer has not set up the model yet.
        """
        if self._engine is None:
            raise RuntimeError(
                "engine: expected a model that the Trainer has set up (within fit, validate, test, "
                "predict); found none yet"
            )
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision, which clips by the engine."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            self._arguments.check_precision(precision_plugin.precision)
            precision_plugin = _clipping_by_engine(precision_plugin)
        self._precision_plugin = precision_plugin

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """There is none."""
        raise TypeError(_NO_CHECKPOINT_IO.format("a use of it"))

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise TypeError(_NO_CHECKPOINT_IO.format(type(io).__name__))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """:meth:`load_checkpoint` does."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Shard the model; configure optimizers over the sharded parameters. Collective.

        Raises:
            TypeError: the module went through ``torch.compile`` as a whole.
            Exception: see :func:`fsdp_engine.shard`; on all ranks.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module, plugin = self.lightning_module, self.precision_plugin
        if getattr(module, "_compiler_ctx", None) is not None:  # Lightning's mark (2.5, 2.6)
            raise TypeError(
                "model: expected a LightningModule that is not compiled as a whole; found one. "
                "Compile its blocks instead: block.compile()"
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
        """Call ``configure_optimizers``."""
        super().setup_optimizers(trainer)
        prepare_optimizers([self.engine], [each for each in self.optimizers if _steps(each)])

    def model_to_device(self) -> None:
        """The engine has put shards where they belong."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where tensors are made.

        Args:
            empty_init: True: on the meta device; values are made shard by shard, in ``setup``.
        """
        place: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step, as a forward of the model; not under manual optimization."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:
                return self.lightning_module.training_step(*args, **kwargs)
            return self._as_forward("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", args, kwargs)

    def _as_forward(self, name: str, args: Any, kwargs: Any) -> Any:
        """See [Note: Steps]."""
        step = partial(getattr(self.lightning_module, name), *args, **kwargs)
        hooks = hooks_of(self.engine.model)
        assert hooks is not None
        return hooks.around(step)()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward is not the last microbatch of its step."""
        with self.engine.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The sharded weights, as the module shows them."""
        self._shown_weights = super().lightning_module_state_dict()
        return dict(self._shown_weights)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a folder: weights and optimizers by all ranks, what else there is by rank 0.

        Collective.

        Args:
            checkpoint: as the Trainer makes it. Hooks may leave out weights, and add to all else.
            filepath: the folder; rank 0's counts.
            storage_options: none.

        Raises:
            TypeError: there are ``storage_options``.
            ValueError: a hook has put other weights into ``state_dict``.
            Exception: see :func:`fsdp_engine.save_checkpoint`; on every rank if on one.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options: expected None; found {storage_options!r}")
        if self.lightning_module is not None and self.lightning_module.trainer.interrupted:
            self.engine.reset()  # an exception may have ended a forward half way
        path = Path(self.broadcast(str(filepath)))
        checkpoint = dict(checkpoint)
        weights = checkpoint.pop("state_dict")
        shown, self._shown_weights = self._shown_weights, {}
        has_optimizers = checkpoint.pop("optimizer_states", None) is not None
        optimizers = [each for each in self.optimizers if _steps(each)] if has_optimizers else []
        save_folder(path, self.engine, optimizers, checkpoint, keeps=_kept_of(weights, shown))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read weights, and in ``fit`` optimizers, from a folder, or from a file of Lightning's.

        Collective.

        Args:
            checkpoint_path: rank 0's counts. Another strategy's file is read by each rank, which
                keeps its slices.
            weights_only: False: whoever wrote it may run code here.

        Returns:
            What else is in it: loops, callbacks, schedulers.

        Raises:
            Exception: see :func:`fsdp_engine.load_checkpoint`; on every rank if on one.
        """
        assert self.lightning_module is not None
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
        """:meth:`load_checkpoint` has done so."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """:meth:`load_checkpoint` has done so."""

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a folder, or a file."""
        if self.is_global_zero:
            remove_folder(Path(filepath))

    def teardown(self) -> None:
        """The model stays where it is, sharded: another stage, or Trainer, may go on with it."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make it known by its name."""
        strategy_registry.register(NAME, cls, description="Sharded by fsdp_engine", override=True)


class _ClipsByEngine:
    """Mixed into Lightning's precisions: the norm over all ranks in one pass."""

    engine: Engine | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by norm; torch's own function for one of several optimizers."""
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
    """The same precision, which clips by the engine; any other class as it is, which clips by
    torch's function: right, too."""
    kind = _CLIPPING.get(type(plugin))
    if kind is None:
        return plugin
    made: Precision = object.__new__(kind)
    vars(made).update(vars(plugin))
    return made


def _kept_of(weights: Mapping[str, Any], shown: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    """Which entries hooks have left in a ``state_dict``."""
    if others := [name for name, value in weights.items() if shown.get(name) is not value]:
        raise ValueError(
            "state_dict: expected hooks to leave out entries at most, since all ranks save their "
            f"own slices; found others in {', '.join(others[:4])}"
        )
    left_out = shown.keys() - weights.keys()
    return lambda name, value: name not in left_out


def _steps(optimizer: Optimizer) -> bool:
    """Whether it is an optimizer, and not Lightning's stand-in for none."""
    return bool(optimizer.param_groups)


def _metrics_to(module: nn.Module, device: torch.device) -> None:
    """States of torchmetrics are neither parameters nor buffers."""
    from torchmetrics import Metric

    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)


def consolidate(folder: str | Path, file: str | Path, *, trust: bool = False) -> None:
    """Write a checkpoint's folder as one file, as Lightning's other strategies do; without ranks.

    ``MyModule.load_from_checkpoint(file)`` and any Trainer take it. It takes host memory for all
    of the weights and optimizer state.

    Args:
        folder: the checkpoint.
        file: to write.
        trust: whoever wrote the checkpoint may run code here.

    Raises:
        Exception: see :func:`fsdp_engine.load_checkpoint`.
    """
    torch.save(read_whole(Path(folder), trust), file)


FSDPEngineStrategy.register_strategies(StrategyRegistry)
