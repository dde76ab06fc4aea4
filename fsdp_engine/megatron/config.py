"""``DistributedDataParallelConfig``: options under Megatron-Core's names, and their translation.

``docs/internals/megatron.md`` describes the effect of each field and names the test of it.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass

import torch

from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_name
from fsdp_engine.options import Options, Timing, check_count
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.strategies import LEVELS, Role, Strategy, level_from_name

_COUNTS = {  # optional integer fields: the smallest legal value
    "bucket_size": 1,
    "num_buckets": 1,
    "suggested_communication_unit_size": 0,
}


@dataclass
class DistributedDataParallelConfig:
    """Options of the engine, under Megatron-Core's names. Sizes are in elements.

    Fields may be assigned until the config is passed to an engine, which copies it
    (:meth:`checked`).

    :meth:`to_options`, :meth:`to_extensions`, :attr:`timing` and :meth:`applied_to` translate the
    fields to arguments of the engine.

    Attributes:
        grad_reduce_in_fp32: Accumulate and reduce gradients in fp32. False: in the dtype of the
            policy, which for ``DistributedDataParallel`` is the parameter's dtype by default.
        overlap_grad_reduce: Start reductions during backward, as buckets fill. False:
            ``finish_grad_sync`` issues all of them. Gradients that are sharded along an axis are
            always reduced along it in backward.
        overlap_param_gather: After a step, gather parameters during the next forward. False: gather
            them directly after the step. Sharded parameters are always gathered in forward.
        align_param_gather: Only ``start_param_sync`` prefetches updated parameters. If it is not
            called, they are gathered one by one on first use. Sharded parameters are still gathered
            in forward.
        use_distributed_optimizer: Use level "optim" instead of "no_shard" if no strategy is given.
        num_distributed_optimizer_instances: The outer size of the mesh. Optimizer state is sharded
            over the ranks of one instance and replicated over instances.
        check_for_nan_in_grad: Check for NaN and Inf before gradients are sent, and raise on every
            rank; the error names parameters and ranks.
        check_for_large_grads: Warn if the norm of a buffer's gradients exceeds ten times the
            largest of the last 100.
        bucket_size: Parameters outside of units are grouped into buckets, in reverse registration
            order; the parameter that reaches the size is the last of a bucket. None: 40,000,000, or
            1,000,000 for each data-parallel rank if that is more.
        num_buckets: Alternative to ``bucket_size``: the number of buckets, as even as parameters
            allow.
        pad_buckets_for_high_nccl_busbw: Pad each rank's shard of a flat buffer to a multiple of
            2^16.
        reduce_scatter_with_fp32_accumulation: Send low-precision gradients unchanged; the
            receiving rank sums them in fp32.
        average_in_collective: Average in the collective. False: gradients are scaled while they are
            copied into the buffer, then summed. The result is the same.
        fp8_param_gather: Gather parameters of two or more dims in fp8 (``Float8``).
        reuse_grad_buf_for_mxfp8_param_ag: Gather MXFP8 parameters through the gradients' memory.
        use_megatron_fsdp: Whether ``data_parallel_sharding_strategy`` determines the level. False:
            ``use_distributed_optimizer`` does.
        use_custom_fsdp: Deprecated name of ``use_megatron_fsdp``.
        data_parallel_sharding_strategy: Level of the inner axis.
        outer_dp_sharding_strategy: Level of the outer axis, at most that of the inner axis.
        gradient_reduce_div_fusion: Scale gradients while they are copied. False: scale them in a
            separate pass before they are sent.
        suggested_communication_unit_size: Prefetch window in elements; at least one unit is
            prefetched, unless it is 0. The gradient buffers in use (the one being filled and those
            being reduced) have the same limit: beyond it, the engine waits for the oldest
            reduction. None: the prefetch window is the mean size of a unit. The limit on gradient
            buffers is twice that, and one reduction may be in flight whatever its size.
        preserve_fp32_weights: Keep fp32 main weights beside low-precision compute weights. False:
            the compute weights are the main weights.
        keep_fp8_transpose_cache: Keep fp8 transposes between forward and backward.
        nccl_ub: Allocate communication buffers in memory registered with NCCL; implies
            ``fsdp_double_buffer``.
        fsdp_double_buffer: Give transient buffers fixed addresses, which are planned from an
            observed step. Later steps allocate nothing. No effect before torch 2.13.
        disable_symmetric_registration: Use plain instead of window registration with ``nccl_ub``.
        delay_wgrad_compute: Allow modules to compute weight gradients after backward
            (``backward_dw``). The reductions of these parameters wait for the gradients.

    Raises:
        ValueError: A value or a combination is not legal; the message names fields and legal
            values.
        TypeError: A field has another type.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    outer_dp_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    disable_symmetric_registration: bool = False
    delay_wgrad_compute: bool = False

    def __post_init__(self) -> None:
        if self.use_custom_fsdp is True:
            warnings.warn(
                "use_custom_fsdp is deprecated: set use_megatron_fsdp=True instead",
                DeprecationWarning,
                stacklevel=3,
            )
        self.check()

    def checked(self) -> DistributedDataParallelConfig:
        """Validate the fields and return a copy, which later assignments do not change.

        Raises:
            ValueError, TypeError: A field assigned since construction is not legal.
        """
        config = copy.copy(self)
        config.check()
        return config

    def check(self) -> None:
        """Set the fields that others imply, and validate all of them.

        Raises:
            ValueError, TypeError: A field is not legal; see the class.
        """
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool):
                self._check_bool(field.name)
        for name, least in _COUNTS.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        check_count(
            "num_distributed_optimizer_instances", self.num_distributed_optimizer_instances, 1
        )
        self.use_megatron_fsdp |= self.use_custom_fsdp
        self.fsdp_double_buffer |= self.nccl_ub
        self._check_strategy()
        self._needs("overlap_param_gather", "overlap_grad_reduce")
        self._needs("align_param_gather", "overlap_param_gather")
        self._needs("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather")
        self._needs("keep_fp8_transpose_cache", "fp8_param_gather")
        self._needs("disable_symmetric_registration", "nccl_ub")
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                "bucket_size, num_buckets: expected at most one of them; found "
                f"{self.bucket_size} and {self.num_buckets}"
            )
        if self.reduce_scatter_with_fp32_accumulation and self.grad_reduce_in_fp32:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation: expected grad_reduce_in_fp32=False, since "
                "gradients are sent in low precision; found grad_reduce_in_fp32=True"
            )

    @property
    def names_strategy(self) -> bool:
        """Whether the fields determine a level."""
        return self.use_megatron_fsdp or self.use_distributed_optimizer

    @property
    def level_names(self) -> tuple[str, str]:
        """The names of the (inner, outer) levels that the fields determine."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy, self.outer_dp_sharding_strategy
        return ("optim" if self.use_distributed_optimizer else "no_shard"), "no_shard"

    def applied_to(self, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """Returns ``policy`` with the dtypes that the fields determine.

        Raises:
            ValueError: The policy contradicts a field.
        """
        changes: dict[str, object] = {}
        if self.grad_reduce_in_fp32:
            for name in ("main_grads_dtype", "reduce_dtype", "grad_comm_dtype"):
                if getattr(policy, name) not in (None, torch.float32):
                    raise ValueError(
                        f"grad_reduce_in_fp32, {name}: expected torch.float32 or None in the "
                        f"policy; found {getattr(policy, name)}"
                    )
                changes[name] = torch.float32
        if not self.preserve_fp32_weights:
            if policy.main_params_dtype not in (None, policy.param_dtype):
                raise ValueError(
                    "preserve_fp32_weights, main_params_dtype: expected None in the policy, since "
                    f"compute weights are the main weights; found {policy.main_params_dtype}"
                )
            changes["preserve_fp32_weights"] = False
        return dataclasses.replace(policy, **changes) if changes else policy  # type: ignore[arg-type]

    @property
    def timing(self) -> Timing:
        """The timing that the fields determine."""
        return Timing(
            reduces_in_backward=self.overlap_grad_reduce,
            finishes_backward=False,
            gathers_in_forward=self.overlap_param_gather,
            gathers_ahead=not self.align_param_gather,
        )

    def to_options(self) -> Options:
        """Returns the options of the engine that the fields determine."""
        return Options(
            prefetch_window=self.suggested_communication_unit_size,
            staging_limit=self.suggested_communication_unit_size,
            bucket_size=self.bucket_size,
            num_buckets=self.num_buckets,
            pad_shards=self.pad_buckets_for_high_nccl_busbw,
            sum_in_fp32=self.reduce_scatter_with_fp32_accumulation,
            average_in_collective=self.average_in_collective,
            scale_while_copying=self.gradient_reduce_div_fusion,
        )

    def to_extensions(self) -> list[EngineExtension]:
        """Returns the extensions that the fields select."""
        found: list[EngineExtension] = []
        if self.fp8_param_gather:
            found.append(find_name("Float8")())
        if self.keep_fp8_transpose_cache or self.reuse_grad_buf_for_mxfp8_param_ag:
            keeps, reuses = self.keep_fp8_transpose_cache, self.reuse_grad_buf_for_mxfp8_param_ag
            found.append(find_name("TransformerEngine")(keeps, reuses))
        if self.check_for_nan_in_grad or self.check_for_large_grads:
            checks = find_name("GradientChecks")
            found.append(checks(nan=self.check_for_nan_in_grad, large=self.check_for_large_grads))
        if self.fsdp_double_buffer:
            is_symmetric = not self.disable_symmetric_registration
            found.append(find_name("Arenas")(registered=self.nccl_ub, symmetric=is_symmetric))
        if self.delay_wgrad_compute:
            found.append(find_name("LateGradients")())
        return found

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False; found {value!r}")

    def _needs(self, name: str, other: str) -> None:
        if getattr(self, name) and not getattr(self, other):
            raise ValueError(f"{name}: expected {other}=True as well; found {other}=False")

    def _check_strategy(self) -> None:
        inner = level_from_name(
            self.data_parallel_sharding_strategy, "data_parallel_sharding_strategy"
        )
        outer = level_from_name(self.outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
        if outer.value > inner.value:
            raise ValueError(
                "outer_dp_sharding_strategy: expected a level at most that of "
                f"data_parallel_sharding_strategy={inner.name!r}; found {outer.name!r}"
            )
        if not self.use_megatron_fsdp and inner.value:
            raise ValueError(
                "data_parallel_sharding_strategy: expected use_megatron_fsdp=True with "
                f"{inner.name!r}, since otherwise use_distributed_optimizer selects the level; "
                "found False"
            )
        instances = self.num_distributed_optimizer_instances
        if instances > 1 and not Strategy.from_names(*self.level_names).depth(Role.OPTIM):
            raise ValueError(
                "num_distributed_optimizer_instances: expected sharded optimizer state with "
                f"{instances} instances (use_distributed_optimizer=True, or use_megatron_fsdp=True "
                f"with a data_parallel_sharding_strategy of {', '.join(list(LEVELS)[1:])}); found "
                f"level {self.level_names[0]!r}"
            )
