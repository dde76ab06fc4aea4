"""The strategy of ``Fabric(strategy="fsdp_engine")``. Importing ``lightning.py`` registers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.checkpoint.sharded_model import Engines
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.extras import naming_extra
from fsdp_engine.integrations.checkpoint_folder import (
    Keeps,
    load_folder,
    load_whole,
    read_extra,
    save_folder,
)
from fsdp_engine.integrations.preparation import (
    EngineArguments,
    has_all_gradients,
    held_by_name,
    prepare_optimizers,
)
from fsdp_engine.precision import MixedPrecisionPolicy

with naming_extra():
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy


class _Forward(nn.Module):
    """Module that calls the sharded module. Fabric calls methods that are marked with
    ``model.mark_forward_method("generate")`` through the forward of this module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


class FSDPEngineFabricStrategy(DDPStrategy):
    """Strategy that shards the modules of ``fabric.setup``.

    Args:
        strategy: The level of the inner axis, as in ``fsdp_engine.shard``.
        outer_strategy: The level of the outer axis.
        policy: The policy of dtypes. None: the dtypes of Fabric's ``precision``.
        trust: Allow objects of any class in checkpoints, which may run arbitrary code.
        process_group_backend: The backend of the process group. None: nccl on GPUs, gloo on CPUs.
        timeout: The timeout of collectives, if the strategy creates the process group.
        accelerator, parallel_devices, cluster_environment, precision: As in Lightning's strategies;
            Fabric sets them.
        **sharding: Other arguments of ``fsdp_engine.shard``, as for ``FSDPEngineStrategy``.

    Raises:
        TypeError: An argument is unknown.
    """

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
        precision: Precision | None = None,
        **sharding: Any,
    ) -> None:
        levels = {"strategy": strategy, "outer_strategy": outer_strategy}
        self._arguments = EngineArguments(policy, {**levels, **sharding})
        self._trust = trust
        self._engines: list[Engine] = []
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._backward_sync_control = self  # type: ignore[assignment]

    @property
    def precision(self) -> Precision:
        """Fabric's precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            self._arguments.check_precision(precision.precision)
        self._precision = precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Not supported: reading or setting it raises TypeError."""
        raise TypeError(
            "checkpoint_io: expected none, since all ranks write checkpoints in the format of "
            "fsdp_engine; found a use of it"
        )

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise TypeError(
            "checkpoint_io: expected none, since all ranks write checkpoints in the format of "
            f"fsdp_engine; found {type(io).__name__}"
        )

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shard a module. Collective."""
        self._shard(module)
        return _Forward(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module. Its optimizers hold the sharded parameters afterwards. Collective.

        Raises:
            ValueError: An optimizer has stepped, or has parameters of other modules. All ranks
                raise, before anything is changed.
        """
        names = {id(param): name for name, param in module.named_parameters()}
        with self._arguments.reporting():
            for optimizer in optimizers:
                _check_fresh(optimizer, names)
        with held_by_name(module, optimizers):
            engine = self._shard(module)
        prepare_optimizers([engine], optimizers)
        return _Forward(module), optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer over parameters of modules that were set up. Collective."""
        prepare_optimizers(self._engines, [optimizer])
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine allocates shards on the device."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which a module is created.

        Args:
            empty_init: Create tensors on the meta device. ``setup`` then initializes shard by
                shard.
        """
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Context of ``fabric.no_backward_sync``."""
        return _engine_of(module).no_sync() if enabled else nullcontext()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients by their norm over all ranks. Collective."""
        engine = engine_of(_unwrapped(module))
        if engine is None or not has_all_gradients(engine, optimizer):
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        self.precision.unscale_gradients(optimizer)
        return engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Implement ``fabric.save``: all ranks write into one folder. Collective.

        Args:
            path: The path of the folder. The path of rank 0 is used.
            state: Modules and optimizers that were set up, and other values by name.
            storage_options: Must be None.
            filter: Functions by the names of modules and dicts in ``state``. Each is called with
                the name and the value of an entry, and returns whether to save it.

        Raises:
            TypeError: ``storage_options`` is not None.
            ValueError: ``state`` contains no module that was set up, or there is a filter for an
                optimizer.
            Exception: An error of ``fsdp_engine.save_checkpoint``, or of a ``state_dict()`` or a
                filter of the user. All ranks raise.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options: expected None; found {storage_options!r}")
        parts = _Parts(state)
        filters = dict(filter or {})
        if refused := sorted(filters.keys() & parts.optimizers.keys()):
            raise ValueError(
                f"filter: expected names of modules and dicts; found {refused}, of optimizers"
            )
        parts.await_ranks()
        with self._agreed("save()", parts):
            extra = {name: _state_of(value) for name, value in parts.others.items()}
            # Filters may communicate, so all ranks call them in the same order.
            for name in sorted(filters.keys() & extra.keys()):
                extra[name] = {k: v for k, v in extra[name].items() if filters[name](k, v)}
        folder = Path(self.broadcast(str(path)))
        optimizers = list(parts.optimizers.values())
        save_folder(folder, parts.together, optimizers, extra, keeps=parts.keeps(filters))

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Implement ``fabric.load`` and ``fabric.load_raw``. Collective.

        Args:
            path: The path of a folder, or of a file of another strategy, of which each rank keeps
                its slices. The path of rank 0 is used.
            state: A module that was set up, to load only weights, or a dict as for
                :meth:`save_checkpoint`. Values in the dict that have no state (numbers, strings)
                are replaced.
            strict: Require that the checkpoint contains all entries of ``state`` and that they fit.
                False: load the entries that fit.
            weights_only: False allows objects of any class, which may run arbitrary code.

        Returns:
            The other entries of the checkpoint.

        Raises:
            KeyError: ``state`` has a name that the checkpoint does not contain.
            ValueError: ``state`` contains no module that was set up.
            Exception: An error of ``fsdp_engine.load_checkpoint``. All ranks raise.
        """
        parts = _Parts({"": state} if isinstance(state, nn.Module | Optimizer) else state or {})
        trust = self._trust or weights_only is False
        parts.await_ranks()
        path = Path(self.broadcast(str(path)))
        if path.is_file():
            found = self._load_file(path, parts, strict, trust)
        else:
            with self._agreed("load()", parts):
                if strict and parts.others:
                    _check_names(parts.others, read_extra(path, trust))
            found = load_folder(
                path, parts.together, list(parts.optimizers.values()), strict=strict, trust=trust
            )
        for name, value in parts.others.items():
            if name not in found:
                continue
            if isinstance(value, Stateful):
                value.load_state_dict(found.pop(name))
            else:
                state[name] = found.pop(name)
        return found

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state dict of a module, with sharded weights."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load sharded or unsharded weights into a module."""
        super().load_module_state_dict(_unwrapped(module), state_dict, strict)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy under its name."""
        strategy_registry.register(
            "fsdp_engine", cls, description="Sharded by fsdp_engine", override=True
        )

    def _shard(self, module: nn.Module) -> Engine:
        engine = self._arguments.engine_for(module, self.precision.precision)
        if engine not in self._engines:
            self._engines.append(engine)
        return engine

    def _load_file(self, path: Path, parts: _Parts, strict: bool, trust: bool) -> dict[str, Any]:
        """Load weights and states of optimizers from a plain file. Returns the other entries."""
        with self._agreed("load()", parts):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
            if parts.is_bare:
                found = {"": found}
            if strict:
                names = {**parts.engines, **parts.optimizers, **parts.others}
                _check_names(names, found)
            if len(parts.engines) > 1:
                raise ValueError(
                    f"state: expected one module, to load a file; found {list(parts.engines)}"
                )
        states = [found.pop(name) for name in parts.optimizers if name in found]
        for name, engine in parts.engines.items():
            weights = found.pop(name, {})
            load_whole(weights, states, engine, list(parts.optimizers.values()), strict=strict)
        return dict(found)

    @contextmanager
    def _agreed(self, what: str, parts: _Parts) -> Iterator[None]:
        """Context that raises an error of one rank on all ranks."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        agree(what, error, next(iter(parts.engines.values())).ranks.control_group)


class _Parts:
    """The values in a ``state`` of Fabric, by type and name.

    Raises:
        ValueError: ``state`` contains no module that was set up.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.engines: dict[str, Engine] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.is_bare = "" in state
        for name, value in state.items():
            engine = engine_of(_unwrapped(value)) if isinstance(value, nn.Module) else None
            if engine is not None:
                self.engines[name] = engine
            elif isinstance(value, Optimizer):
                self.optimizers[name] = value
            else:
                self.others[name] = value
        if not self.engines:
            raise ValueError(
                "state: expected a module that fabric.setup has sharded; found "
                f"{list(state) or 'nothing'}"
            )

    def await_ranks(self) -> None:
        """Take part in the gathers of other ranks; see ``Engine.await_ranks``."""
        for engine in self.engines.values():
            engine.await_ranks()

    @property
    def together(self) -> Engines:
        """The only engine, or all of them by name."""
        return self.engines if len(self.engines) > 1 else next(iter(self.engines.values()))

    def keeps(self, filters: Mapping[str, Callable[[str, Any], bool]]) -> Keeps | None:
        """Returns a function that returns whether to save an entry of the modules, from its name
        and value; None if all entries are saved."""
        if not filters.keys() & self.engines.keys():
            return None
        if len(self.engines) == 1:
            return filters[next(iter(self.engines))]

        def keeps(name: str, value: Any) -> bool:
            module, _, rest = name.partition(".")
            return module not in filters or filters[module](rest, value)

        return keeps


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Forward) else module


def _engine_of(module: nn.Module) -> Engine:
    engine = engine_of(_unwrapped(module))
    if engine is None:
        raise TypeError(
            "module: expected one that fabric.setup has sharded; found "
            f"{type(_unwrapped(module)).__name__}"
        )
    return engine


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _check_names(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise KeyError(
            f"state: expected names of the checkpoint (strict=True); found {missing}, which are "
            "not in it"
        )


def _check_fresh(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Check that an optimizer has no state and only parameters of the module."""
    if optimizer.state:
        raise ValueError(
            f"optimizer: expected a {type(optimizer).__name__} that has no state yet; found one "
            "with state of the parameters as they were before sharding"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if unknown := [tuple(param.shape) for param in params if id(param) not in names]:
        raise ValueError(
            "optimizer: expected parameters of the module that is set up with it; found others, "
            f"of shapes {unknown[:4]}"
        )


FSDPEngineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
