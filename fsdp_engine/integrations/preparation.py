"""Checks arguments of ``shard`` for trainers, prepares their optimizers, and compiles units."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_engine import deprecated_arguments
from fsdp_engine.checkpoint.optimizer_state import name_params
from fsdp_engine.checkpoint.sharded_model import saved_params
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.mesh import ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.optim.sharded_step import shard_optimizer
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import WHAT, shard


def check_num_processes(found: int, advice: str) -> None:
    """Check that accelerate has found all ranks of the job.

    Args:
        found: The number of processes of accelerate.
        advice: The argument that makes accelerate count the ranks on CPUs, for the message.

    Raises:
        ValueError: The numbers differ. Under torchrun on CPUs accelerate counts a single process
            unless it is told to use CPUs, and all ranks would train on the same batches.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    expected = dist.get_world_size() if dist.is_initialized() else launched
    if found != expected:
        raise ValueError(
            f"num_processes: expected the {expected} ranks of this job; found {found}, with which "
            f"all ranks would train on the same batches. On CPUs pass {advice}"
        )


def _check_names(
    names: Iterable[str],
    of: str,
    kind: type[Exception],
    replaced: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check names of arguments of ``fsdp_engine.shard``, including deprecated ones.

    Args:
        names: The names to check.
        of: The name of the trainer's argument that contains ``names``, for the error.
        kind: The class of the error.
        replaced: Maps names of arguments of ``shard`` to the names that the trainer has for them.

    Raises:
        Exception: A name is not an argument.
    """
    own = {"model", "deprecated", *replaced}
    known = [name for name in inspect.signature(shard).parameters if name not in own]
    if unknown := sorted({*map(str, names)} - {*known} - deprecated_arguments.NAMES):
        others = "".join(f" or {name}" for name in replaced.values())
        raise kind(
            f"{of}: expected arguments of fsdp_engine.shard ({', '.join(known)}){others}; found "
            f"{', '.join(unknown)}"
        )


def checked_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of a trainer's ``shard`` as a dict.

    Raises:
        TypeError: ``arguments`` is not a mapping.
        ValueError: A name is not an argument of ``fsdp_engine.shard``.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise TypeError(
            "shard: expected arguments of fsdp_engine.shard by name, such as "
            f"dict(strategy='optim_grads_params'), or None; found {type(arguments).__name__}"
        )
    _check_names(arguments, "shard", ValueError)
    return dict(arguments)


def check_not_stepped(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that optimizers of the model's parameters have no state. Only then can sharded
    parameters replace their parameters.

    Raises:
        ValueError: An optimizer has state.
    """
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        held = (param for group in optimizer.param_groups for param in group["params"])
        if optimizer.state and any(id(param) in own for param in held):
            raise ValueError(
                "optimizer: expected one that has not stepped, or was built after its model "
                "was sharded; found one with state"
            )


@contextlib.contextmanager
def held_by_name(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Context in which optimizers hold no parameters of the model, because ``shard`` refuses a
    model with optimizers. Afterwards they hold the parameters of the same names."""
    names = {id(param): name for name, param in model.named_parameters()}
    held = [
        group
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(id(param) in names for param in group["params"])
    ]
    params = [[names.get(id(param), param) for param in group["params"]] for group in held]
    for group in held:
        group["params"] = []
    try:
        yield
    finally:
        named = dict(model.named_parameters())
        for group, each in zip(held, params, strict=True):
            group["params"] = [named[one] if isinstance(one, str) else one for one in each]


def compile_units(engine: Engine, options: dict[str, Any]) -> None:
    """Compile each module of all units except the root unit, with ``options`` of
    ``torch.compile``."""
    options = {**options, "fullgraph": False}  # the engine's hooks break graphs
    for unit in engine.units[1:]:
        for module in unit.modules:
            module.compile(**options)


# The policy for each of Lightning's precisions. "mixed" means autocast and fp32 main weights.
# "true" means that all tensors have the dtype.
POLICIES: dict[str, MixedPrecisionPolicy] = {
    "32-true": MixedPrecisionPolicy(),
    "64-true": MixedPrecisionPolicy(),
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "16-mixed": MixedPrecisionPolicy(param_dtype=torch.float16),
    "bf16-true": MixedPrecisionPolicy(main_params_dtype=torch.bfloat16),
    "16-true": MixedPrecisionPolicy(main_params_dtype=torch.float16),
}


class EngineArguments:
    """Arguments of ``fsdp_engine.shard``, which are stored until the model exists.

    Args:
        policy: The policy of dtypes. None: the dtypes of the trainer's precision.
        arguments: Other arguments of ``shard`` by name.

    Raises:
        TypeError: An argument is unknown.
    """

    def __init__(self, policy: MixedPrecisionPolicy | None, arguments: Mapping[str, Any]) -> None:
        _check_names(arguments, "strategy", TypeError, {"mp_policy": "policy"})
        self._policy = policy
        # As in DDP, all ranks start from the first rank's values.
        self._arguments = {"initial_values": "rank0", **arguments}

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context that raises an error of one rank on all ranks, before a model is sharded."""
        mesh = self._arguments.get("mesh")
        with reporting(WHAT, ranks_that_meet(mesh if isinstance(mesh, DeviceMesh) else None)):
            yield

    def check_precision(self, precision: str) -> None:
        """Check that the policy or the precision determines the dtypes.

        Raises:
            ValueError: There is no policy, and the precision is unknown.
        """
        if self._policy is None and precision not in POLICIES:
            raise ValueError(
                f"precision: expected one of {', '.join(POLICIES)}; found {precision!r}. For "
                "other dtypes pass a policy: "
                "FSDPEngineStrategy(policy=fsdp_engine.MixedPrecisionPolicy(...))"
            )

    def engine_for(self, model: nn.Module, precision: str) -> Engine:
        """Shard the model, unless it is already sharded, and return its engine. Collective.

        Args:
            model: Any module.
            precision: Lightning's name of the precision.

        Raises:
            Exception: An error of ``fsdp_engine.shard``. All ranks raise.
            ValueError: An error of :meth:`check_precision`.
        """
        engine = engine_of(model)
        if engine is not None and engine.model is model:
            return engine
        self.check_precision(precision)
        policy = self._policy if self._policy is not None else POLICIES[precision]
        return shard(model, mp_policy=policy, **self._arguments)


def prepare_optimizers(engines: Sequence[Engine], optimizers: Sequence[Optimizer]) -> None:
    """Check the optimizers' parameters, and pass the optimizers to ``shard_optimizer``. Collective.

    Raises:
        ValueError, TypeError: An optimizer has parameters that are not sharded by the engines.
    """
    error: Exception | None = None
    try:
        named = {key: param for engine in engines for key, param in saved_params(engine).items()}
        for optimizer in optimizers:
            name_params(named, optimizer)
    except Exception as caught:
        error = caught
    for engine in engines[:1]:
        agree("optimizers", error, engine.ranks.control_group)
    if error is not None:
        raise error
    for optimizer in optimizers:
        shard_if_possible(optimizer)


def shard_if_possible(optimizer: Any) -> None:
    """Call ``shard_optimizer``, except for optimizers with ``differentiable=True`` and objects that
    are not optimizers of torch. These step unchanged. Collective.

    Raises:
        ValueError: An error of ``fsdp_engine.shard_optimizer``.
    """
    if isinstance(optimizer, Optimizer) and not optimizer.defaults.get("differentiable"):
        shard_optimizer(optimizer)


def has_all_gradients(engine: Engine, optimizer: Optimizer) -> bool:
    """Returns whether the optimizer has all parameters of the engine that may have gradients. This
    includes currently frozen ones, which may have gradients of an earlier backward."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return all(
        id(param) in own
        for unit in engine.units
        for buffer in unit.trainable
        for param in buffer.sharded_params
    )
