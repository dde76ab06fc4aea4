"""FSDP2's policies in this engine's words."""

from __future__ import annotations

from torch.distributed import fsdp

from fsdp_engine.precision import MixedPrecisionPolicy


def engine_policy(policy: object) -> MixedPrecisionPolicy:
    """What an ``mp_policy`` of FSDP2's means here: main weights and gradients in the parameter's
    dtype, sums in ``reduce_dtype``, else in ``param_dtype``.

    Raises:
        TypeError: it is another kind of policy.
    """
    if not isinstance(policy, fsdp.MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy: expected a torch.distributed.fsdp.MixedPrecisionPolicy (fsdp_engine.fsdp2 "
            f"has it, too); found {policy!r}"
        )
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        own_dtypes=True,
    )


def check_offload(policy: object) -> None:
    """Whether nothing is to be offloaded.

    Raises:
        NotImplementedError: something is.
        TypeError: it is another kind of policy.
    """
    if not isinstance(policy, fsdp.OffloadPolicy):
        raise TypeError(
            "offload_policy: expected a torch.distributed.fsdp.OffloadPolicy (fsdp_engine.fsdp2 "
            f"has it, too); found {policy!r}"
        )
    if type(policy) is not fsdp.OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy: expected OffloadPolicy(), since no state is offloaded; found "
            f"{policy!r}. Main weights and optimizer state are cut over all ranks of the mesh: use "
            "more ranks, or outer_strategy='optim' on a 2-D mesh to cut them over both axes"
        )
