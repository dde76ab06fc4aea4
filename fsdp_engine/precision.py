"""Which dtype each thing has: compute weights, main weights, gradients, bytes on the wire.

    main weights --cast--> compute weights -> forward, backward -> gradients (compute dtype)
         ^                                                              | cast and scaled
     optimizer  <--  main gradients  <--sum in reduce_dtype--  wire (grad_comm_dtype)

Worked example, ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` on an fp32 model: weights are
kept in fp32, travel and compute in bf16; gradients come out of autograd in bf16, are scaled and
cast to fp32, travel, are summed and kept in fp32. With ``reduce_dtype=torch.bfloat16`` they travel
and are summed in bf16 and kept in fp32. With ``grad_comm_dtype=torch.bfloat16`` alone they travel
in bf16 and are summed in fp32: every rank receives the others' parts and adds them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes of one parameter, all decided."""

    compute: torch.dtype
    main: torch.dtype
    main_grad: torch.dtype
    reduce: torch.dtype
    comm: torch.dtype
    optim_grad: torch.dtype  # as the optimizer gets it


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes by role. None means the default, which suits plain fp32 and bf16 training.

    Attributes:
        param_dtype: dtype of weights in forward and backward, and on the wire. None: each
            parameter's own, so a module may mix dtypes. Batch norms that keep running statistics
            compute with weights of their own dtype, that of the statistics.
        reduce_dtype: dtype in which gradients of ranks are summed. None: ``main_grads_dtype``.
        main_params_dtype: dtype of the weights that the optimizer changes. None: fp32 for
            bf16 and fp16 parameters, else the parameter's own. Frozen parameters keep their own.
        main_grads_dtype: dtype in which gradients are kept over microbatches and handed to the
            optimizer. None: that of the main weights.
        grad_comm_dtype: dtype of gradients on the wire. None: ``reduce_dtype``. When it differs,
            ranks exchange parts in this dtype and sum in ``reduce_dtype``.
        output_dtype: floating-point outputs of the root module are cast to it. None: left alone.
        cast_forward_inputs: cast floating-point inputs of every unit to ``param_dtype``.
        preserve_fp32_weights: False: where ``main_params_dtype`` is None, main weights are the
            compute weights, in their dtype.
        own_dtypes: True: main weights and gradients are kept in the parameter's own dtype where
            ``main_params_dtype`` and ``main_grads_dtype`` are None, and gradients are summed in
            the compute dtype where ``reduce_dtype`` is.
        narrow_grads: where ``main_grads_dtype`` is None, gradients are kept and summed in
            the compute dtype, and handed to the optimizer in that of the main weights.

    Raises:
        TypeError: a field is not a floating-point ``torch.dtype``.
        ValueError: the wire would be wider than the sum.
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
        """The dtypes for ``param``.

        Args:
            param: a parameter, as the user's module holds it.
            wire_override: send gradients in the compute dtype whatever ``grad_comm_dtype`` says
                and sum them in fp32 (``reduce_scatter_with_fp32_accumulation``).
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
