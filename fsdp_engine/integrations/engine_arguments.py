"""What a trainer's strategy is told of the engine, and how it makes one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_engine.checkpoint.optimizer_state import name_params
from fsdp_engine.checkpoint.sharded_model import saved_params
from fsdp_engine.devices.agreement import agree
from fsdp_engine.devices.mesh import ranks_that_meet
from fsdp_engine.devices.rendezvous import reporting
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.optimizer.sharded_step import is_elementwise, shard_optimizer
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import WHAT, shard

# By Lightning's names of precisions. "mixed": autocast does the arithmetic, the optimizer changes
# fp32 weights. "true": there is nothing but that dtype.
POLICIES: dict[str, MixedPrecisionPolicy] = {
    "32-true": MixedPrecisionPolicy(),
    "64-true": MixedPrecisionPolicy(),
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "16-mixed": MixedPrecisionPolicy(param_dtype=torch.float16),
    "bf16-true": MixedPrecisionPolicy(main_params_dtype=torch.bfloat16),
    "16-true": MixedPrecisionPolicy(main_params_dtype=torch.float16),
}
_OWN_NAMES = ("model", "mp_policy")


class EngineArguments:
    """Arguments of :func:`~fsdp_engine.shard` that wait for their model.

    Args:
        policy: dtypes; None: what the trainer's precision says.
        arguments: others, by the names that ``shard`` has for them.

    Raises:
        TypeError: an argument is unknown.
    """

    def __init__(self, policy: MixedPrecisionPolicy | None, arguments: Mapping[str, Any]) -> None:
        known = [name for name in inspect.signature(shard).parameters if name not in _OWN_NAMES]
        if unknown := sorted(arguments.keys() - {*known}):
            raise TypeError(
                f"strategy: expected arguments of fsdp_engine.shard ({', '.join(known)}) or "
                f"policy; found {', '.join(unknown)}"
            )
        self._policy = policy
        # As in DDP: all ranks start from what the first one has built.
        self._arguments = {"initial_values": "rank0", **arguments}

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """An error within it, before a model is sharded, is raised on all ranks."""
        mesh = self._arguments.get("mesh")
        with reporting(WHAT, ranks_that_meet(mesh if isinstance(mesh, DeviceMesh) else None)):
            yield

    def check_precision(self, precision: str) -> None:
        """Whether dtypes are known.

        Raises:
            ValueError: they are not.
        """
        if self._policy is None and precision not in POLICIES:
            raise ValueError(
                f"precision: expected one of {', '.join(POLICIES)}; found {precision!r}. With "
                "others say which dtypes there shall be: "
                "FSDPEngineStrategy(policy=fsdp_engine.MixedPrecisionPolicy(...))"
            )

    def engine_for(self, model: nn.Module, precision: str) -> Engine:
        """The model's engine; made, if it has none. Collective.

        Args:
            model: any module.
            precision: Lightning's name of it.

        Raises:
            Exception: see :func:`~fsdp_engine.shard`; on all ranks.
            ValueError: see :meth:`check_precision`.
        """
        engine = engine_of(model)
        if engine is not None and engine.model is model:
            return engine
        self.check_precision(precision)
        policy = self._policy if self._policy is not None else POLICIES[precision]
        return shard(model, mp_policy=policy, **self._arguments)


def prepare_optimizers(engines: Sequence[Engine], optimizers: Sequence[Optimizer]) -> None:
    """Check that all parameters are sharded ones; elementwise optimizers step on slices.

    Collective.

    Raises:
        ValueError, TypeError: an optimizer has parameters that are none of the engines'.
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
        if is_elementwise(optimizer):
            shard_optimizer(optimizer)


def has_all_gradients(engine: Engine, optimizer: Optimizer) -> bool:
    """Whether the optimizer has all parameters of the engine that may have gradients; also those
    that are frozen for now, whose gradients of an earlier backward may still be there."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return all(
        id(param) in own
        for unit in engine.units
        for buffer in unit.trainable
        for param in buffer.sharded_params
    )
