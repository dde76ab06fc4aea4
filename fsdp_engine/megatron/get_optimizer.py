"""``get_megatron_optimizer``: Megatron-Core's optimizers over sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.optim import shard_optimizer

_OPTIMIZERS = ("adam", "sgd")
# Fields of an OptimizerConfig that are not supported because they select another optimizer, or a
# schedule that the wrapper's config sets. The value is the end of the error, which names the
# alternative, if there is one.
_UNSUPPORTED = {
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
    """Returns Megatron-Core's optimizer for wrapped chunks; replaces its function of this name.

    Parameter groups, gradient scaler and step are Megatron-Core's own. With or without
    ``use_distributed_optimizer``, the wrapper's level determines how the state is sharded, for
    every optimizer. ``sharded_optimizers.py`` lists the differences.

    Args:
        config: Megatron-Core's ``OptimizerConfig`` with optimizer "adam" or "sgd".
        model_chunks: Modules wrapped in ``DistributedDataParallel`` of this package.
        config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map: As
            in Megatron-Core's function.

    Returns:
        A subclass of Megatron-Core's ``ChainedOptimizer``.

    Raises:
        TypeError: A chunk is not wrapped in ``DistributedDataParallel`` of this package.
        ValueError: A field of ``config`` selects an unsupported optimizer, or the wrapper has no
            fp32 main weights for parameters in bf16 or fp16.
    """
    from megatron.core.optimizer import get_megatron_optimizer as get_from_megatron

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
    for name, instead in _UNSUPPORTED.items():
        if getattr(config, name, False):
            raise ValueError(f"config.{name}: expected False{instead}; found True")
    plain_config = copy.copy(config)
    plain_config.use_distributed_optimizer = False
    megatron_optimizer = get_from_megatron(
        plain_config,
        chunks,
        config_overrides=config_overrides,
        use_gloo_process_groups=use_gloo_process_groups,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=dump_param_to_param_group_map,
    )
    optimizer = sharded_optimizer(megatron_optimizer, chunks, config)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            shard_optimizer(each.optimizer, elementwise=True)
    return optimizer
