"""Tensor parallelism of models of transformers, by the model's own ``tp_plan``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_HEADS = ("num_attention_heads", "num_key_value_heads")


def apply_tp_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the tensor-parallel plan of a model of transformers (its ``tp_plan``), in place.

    Sharded parameters become DTensors; call ``fe.shard`` afterwards. A head that is tied to an
    embedding is not sharded.

    Args:
        model: A model of transformers, on any device.
        mesh: The mesh of the tensor-parallel ranks, with one axis.

    Raises:
        ValueError: The model has no plan, or the number of ranks does not divide its heads.
    """
    check_tp_plan(model, mesh.size())
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    found: Any = model
    plan = found._expand_parallel_plan(_plan_of(model))
    apply_tensor_parallelism(model, mesh, plan)


def check_tp_plan(model: nn.Module, size: int) -> None:
    """Check that a model has a tensor-parallel plan for ``size`` ranks.

    Raises:
        ValueError: The model has no plan, or ``size`` does not divide its heads.
    """
    if not _plan_of(model):
        raise ValueError(
            "tensor_parallel: expected a model of transformers 5.20 or later with a `tp_plan`, or "
            f"`parallelize`; found {type(model).__name__}"
        )
    config: Any = model.config
    config = config.get_text_config()
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"tensor_parallel: expected a divisor of the {heads} {name} of "
                f"{type(model).__name__}; found {size}"
            )


def fitting_degrees(model: nn.Module, world_size: int, ranks_per_node: int) -> list[int]:
    """Returns the powers of two, from 2 up to a node's ranks, that divide ``world_size`` and for
    which the model has a tensor-parallel plan."""
    found: list[int] = []
    degree = 2
    while degree <= ranks_per_node:
        try:
            check_tp_plan(model, degree)
        except ValueError:
            return found  # e.g. heads not divisible by 4 are not divisible by 8
        if world_size % degree == 0:
            found.append(degree)
        degree *= 2
    return found


def _plan_of(model: nn.Module) -> dict[str, str]:
    """Returns parallel styles by module or parameter name, with wildcards. Empty: the model has no
    plan, or transformers is too old."""
    if not hasattr(model, "_expand_parallel_plan"):
        return {}
    plan = dict(getattr(model, "tp_plan", None) or {})
    names = {id(module): name for name, module in model.named_modules()}
    find: Any = model
    head = find.get_output_embeddings()
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        plan.pop(names.get(id(head), ""), None)
    return plan
