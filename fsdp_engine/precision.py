"""Dtypes of compute weights, main weights, gradients, and communication.

    main weights --cast--> compute weights -> forward, backward -> gradients (compute dtype)
         ^                                                              | cast and scaled
     optimizer  <--  main gradients  <--sum in reduce_dtype--  wire (grad_comm_dtype)

Example: ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` on an fp32 model. Main weights are
stored in fp32, gathered and used in bf16. Autograd computes bf16 gradients, which are scaled and
cast to fp32, reduced in fp32 and stored in fp32. With ``reduce_dtype=torch.bfloat16`` they are sent
and summed in bf16, and stored in fp32. With ``grad_comm_dtype=torch.bfloat16`` alone they are sent
in bf16 and summed in fp32: each rank receives the shards of the other ranks and sums them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParamDtypes:
    """The resolved dtypes of one parameter.

    Attributes:
        compute: The dtype of the weights in forward and backward, and of autograd's gradients.
        main: The dtype of the weights that the optimizer updates.
        main_grad: The dtype of the accumulation buffer.
        reduce: The dtype in which gradients are summed over ranks.
        comm: The dtype in which gradients are sent.
        optim_grad: The dtype of the gradients that the optimizer reads.
    """

    compute: torch.dtype
    main: torch.dtype
    main_grad: torch.dtype
    reduce: torch.dtype
    comm: torch.dtype
    optim_grad: torch.dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes by role. None selects the default, which suits plain fp32 and bf16 training.

    Attributes:
        param_dtype: The dtype in which weights are gathered and used in forward and backward. None:
            the dtype of each parameter, so a module may mix dtypes. Batch norms with running
            statistics always keep their original dtype, which is that of the statistics.
        reduce_dtype: The dtype in which gradients are summed over ranks. None: the dtype in which
            they are accumulated.
        main_params_dtype: The dtype of the weights that the optimizer updates. None: fp32 for bf16
            and fp16 parameters, otherwise the parameter's dtype. Frozen parameters keep their
            dtype.
        main_grads_dtype: The dtype in which gradients are accumulated over microbatches and passed
            to the optimizer. None: the dtype of the main weights.
        grad_comm_dtype: The dtype in which gradients are sent. None: ``reduce_dtype``. If it
            differs, ranks exchange shards in this dtype and sum them in ``reduce_dtype``.
        output_dtype: Floating-point outputs of the root module are cast to this dtype. None: no
            cast.
        cast_forward_inputs: Cast floating-point inputs of every unit to ``param_dtype``.
        preserve_fp32_weights: Where ``main_params_dtype`` is None, store main weights of bf16 and
            fp16 parameters in fp32. False: store main weights in the compute dtype.
        own_dtypes: Where ``main_params_dtype`` is None, store main weights in the parameter's
            dtype. Where ``reduce_dtype`` is None, sum gradients in the compute dtype.
        narrow_grads: Where ``main_grads_dtype`` is None, accumulate and sum gradients in the
            compute dtype, and pass them to the optimizer in the dtype of the main weights.

    Raises:
        TypeError: A dtype field is neither None nor a floating-point ``torch.dtype``.
        ValueError: ``grad_comm_dtype`` is neither ``reduce_dtype`` nor narrower.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    preserve_fp32_weights: bool = True
    narrow_grads: bool = False
    own_dtypes: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith("dtype") or value is None:
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise TypeError(
                    f"{field.name}: expected a floating-point torch.dtype or None; found {value!r}"
                )
        if self.grad_comm_dtype is not None and self.reduce_dtype is not None:
            _check_wire(self.grad_comm_dtype, self.reduce_dtype)

    def resolve(self, param: torch.Tensor, wire_override: bool = False) -> ParamDtypes:
        """Resolve the dtypes of a parameter.

        Args:
            param: A parameter of the user's module.
            wire_override: Send bf16 and fp16 gradients in the compute dtype regardless of
                ``grad_comm_dtype``, and sum them in fp32. Megatron-Core's option for this is
                ``reduce_scatter_with_fp32_accumulation``.

        Raises:
            ValueError: The dtype in which gradients are sent is neither the dtype of the sums nor
                narrower.
        """
        own = param.dtype
        if not own.is_floating_point:
            return ParamDtypes(own, own, own, own, own, own)
        compute = self.param_dtype or own
        if not param.requires_grad or (self.own_dtypes and self.main_params_dtype is None):
            main = own
        elif self.preserve_fp32_weights:
            main = self.main_params_dtype or (torch.float32 if own in _LOW_PRECISION else own)
        else:
            main = self.main_params_dtype or compute
        narrow = self.narrow_grads and self.main_grads_dtype is None
        main_grad = compute if narrow else self.main_grads_dtype or main
        reduce = self.reduce_dtype or (compute if self.own_dtypes else main_grad)
        comm = self.grad_comm_dtype or reduce
        if wire_override and compute in _LOW_PRECISION:
            reduce, comm = torch.float32, compute
        _check_wire(comm, reduce)
        return ParamDtypes(compute, main, main_grad, reduce, comm, main if narrow else main_grad)


def _check_wire(comm: torch.dtype, reduce: torch.dtype) -> None:
    if comm != reduce and comm.itemsize >= reduce.itemsize:
        raise ValueError(
            f"grad_comm_dtype: expected reduce_dtype ({reduce}) or a narrower dtype; found {comm}"
        )
