"""Converts FSDP2's policies to this engine's."""

from __future__ import annotations

from torch.distributed import fsdp

from fsdp_engine.precision import MixedPrecisionPolicy


def engine_policy(policy: object) -> MixedPrecisionPolicy:
    """Convert an ``mp_policy`` of FSDP2: main weights and gradients in the parameter's dtype,
    reductions in ``reduce_dtype``, or in ``param_dtype`` if that is None.

    Raises:
        TypeError: ``policy`` is not FSDP2's.
    """
    if not isinstance(policy, fsdp.MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy: expected a torch.distributed.fsdp.MixedPrecisionPolicy (fsdp_engine.fsdp2 "
            f"also exports it); found {policy!r}"
        )
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        own_dtypes=True,
    )


def check_offload(policy: object) -> None:
    """Check that the policy offloads nothing.

    Raises:
        NotImplementedError: the policy offloads state.
        TypeError: ``policy`` is not FSDP2's.
    """
    if not isinstance(policy, fsdp.OffloadPolicy):
        raise TypeError(
            "offload_policy: expected a torch.distributed.fsdp.OffloadPolicy (fsdp_engine.fsdp2 "
            f"also exports it); found {policy!r}"
        )
    if type(policy) is not fsdp.OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy: expected OffloadPolicy(), since offloading is not supported; found "
            f"{policy!r}. Main weights and optimizer state are sharded over the ranks of the mesh: "
            "use more ranks, or outer_strategy='optim' on a 2-D mesh to shard them over both axes"
        )
