"""``get_megatron_optimizer`` by Megatron-Core's name: its optimizers over sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.optimizer import shard_optimizer

_OPTIMIZERS = ("adam", "sgd")
# Fields of an OptimizerConfig that ask for another optimizer, or for timing that the wrapper's
# config decides; with what to do instead.
_NOT_HERE = {
    "optimizer_cpu_offload": "",
    "use_precision_aware_optimizer": "",
    "overlap_param_gather_with_optimizer_step": "; set overlap_param_gather for the wrapper",
}


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[DistributedDataParallel],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: object | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Megatron-Core's optimizer for wrapped chunks, in the place of its function of that name.

    Groups, scaler and steps are Megatron-Core's own. ``use_distributed_optimizer`` is taken:
    the wrapper's level shards the state, at every level and with every optimizer. See
    ``sharded_optimizers.py`` for what differs.

    Args:
        config: Megatron-Core's ``OptimizerConfig``: optimizer "adam" or "sgd".
        model_chunks: what ``DistributedDataParallel`` of this package returned.
        config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map:
            as of Megatron-Core's function.

    Returns:
        A subclass of Megatron-Core's ``ChainedOptimizer``.

    Raises:
        TypeError: a chunk is wrapped by something else.
        ValueError: a field of ``config`` asks for an optimizer that is not here, or the wrapper has
            no fp32 main weights for parameters in bf16 or fp16.
    """
    from megatron.core.optimizer import get_megatron_optimizer as get_theirs

    from fsdp_engine.megatron.sharded_optimizers import sharded_optimizer

    chunks = list(model_chunks)
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise TypeError(
                "model_chunks: expected modules in fsdp_engine.DistributedDataParallel; found a "
                f"{type(chunk).__name__}"
            )
    if config.optimizer not in _OPTIMIZERS:
        raise ValueError(
            f"config.optimizer: expected one of {', '.join(_OPTIMIZERS)}; "
            f"found {config.optimizer!r}"
        )
    for name, instead in _NOT_HERE.items():
        if getattr(config, name, False):
            raise ValueError(f"config.{name}: expected False{instead}; found True")
    plain = copy.copy(config)
    plain.use_distributed_optimizer = False
    theirs = get_theirs(
        plain,
        chunks,
        config_overrides=config_overrides,
        use_gloo_process_groups=use_gloo_process_groups,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=dump_param_to_param_group_map,
    )
    optimizer = sharded_optimizer(theirs, chunks, config)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            shard_optimizer(each.optimizer, elementwise=True)
    return optimizer
