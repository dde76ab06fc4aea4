"""Stages of ``torch.distributed.pipelining`` with sharded modules.

torch's own stage supports ``DistributedDataParallel`` and FSDP2 and has no interface for other
modules. The stage in this file passes information of the schedule to the engine: the microbatch
that runs, whether a backward is the last one, and which part of a backward runs
([Note: Several microbatches] in ``microbatches.py``).

[Note: Received tensors]
A message is received into a tensor. From its first step on, torch's stage holds one such tensor for
every message of a step: with 64 microbatches of 8,192 tokens with 16,384 features in bf16, both
directions between two neighbours take 32 GiB. This stage allocates the tensor when the message is
received and frees it after the backward that uses it, so there is one for each microbatch in
flight. Before and after, torch's record of the message holds a meta tensor of the same shape,
strides and dtype, which all microbatches share. Schedules keep losses (and outputs, if the user
wants them) until the end of the step. The graphs of these would keep the tensors that the last
stage has received, so they are detached after the backward, as torch does in backwards of inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import stage
from torch.distributed.pipelining._backward import stage_backward_input

from fsdp_engine.engine import Engine, engine_of, engine_within
from fsdp_engine.extensions.pipelines.microbatches import Microbatches, WeightGradients
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.memory.allocator import empty_strided_like

# The microbatch of the forwards and backwards that torch runs to infer shapes.
_SHAPES = "shapes"

_META = torch.device("meta")

_Grads = tuple[Tensor | None, ...]


class PipelineStage(stage.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` for a module sharded with ``shard()``.

    Takes the same arguments as torch's stage, and works with the same schedules. The module is
    sharded over the data-parallel ranks of its stage, before or after the stage is constructed. A
    module that is not sharded behaves as in torch's stage.

    Along axes over which gradients are not sharded, they are reduced once per step, in the last
    backward. Along axes over which they are sharded, they are reduced in every backward.

    Received tensors have memory only while a microbatch is in flight ([Note: Received tensors]).

    Raises:
        ValueError: ``dw_builder`` is given for a sharded module; the engine does not reduce the
            gradients that it computes later. Or only part of the module is sharded; names the part.
    """

    # Meta tensors in place of the received tensors of one microbatch.
    _args_on_meta: tuple[Tensor | None, ...] = ()
    _grads_on_meta: tuple[Tensor | None, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = engine_of(self.submod)
        if engine is not None and engine.model is self.submod:
            engine.model_part = f"{self.stage_index} of {self.num_stages}"

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Returns the receives of the inputs of a microbatch's forward, like torch's stage."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Returns the receives of a microbatch's output gradients, like torch's stage."""
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Set the gradients of a microbatch's outputs from a stage on the same rank, like torch's
        stage."""
        # For a gradient that is None, torch zeroes the received tensor, so it needs memory.
        if any(each is None for each in next_stage_bwd_outputs):
            self._allocate(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one microbatch, like torch's stage."""
        found = self._microbatches
        with found.forward(fwd_chunk_id) if found else nullcontext():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            _free(self.args_recv_info[fwd_chunk_id], self._args_on_meta)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward of one microbatch, or its input-gradient part, like torch's stage."""
        self._chunk = bwd_chunk_id
        if not self.has_backward:
            return
        outputs, _ = self.fwd_cache[bwd_chunk_id]
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if self.is_last and not self.is_first:
            _detach((loss, *outputs))
        _free(self.args_recv_info[bwd_chunk_id], self._args_on_meta)
        _free(self.grad_recv_info[bwd_chunk_id], self._grads_on_meta)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the weight-gradient part of one microbatch's backward, like torch's stage."""
        self._chunk = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run a backward or a part of it, like torch's stage.

        Args:
            backward_type: "full", "input" or "weight".
            bwd_kwargs: torch's arguments of the backward.
            last_backward: Whether this backward is the last one of the step.
        """
        found = self._microbatches
        if found is None:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            with found.backward_of_inputs(self._chunk):
                return stage_backward_input(
                    bwd_kwargs["stage_output"],
                    bwd_kwargs["output_grads"],
                    bwd_kwargs["input_values"],
                    iter(found.full_params),
                )
        if backward_type == "weight":
            gradients = _weight_gradients(found, bwd_kwargs["param_groups"])
            found.backward_of_weights(self._chunk, gradients, last=last_backward)
            return (), None
        with found.backward(self._chunk, last=last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    @property
    def received_bytes(self) -> int:
        """Bytes of received tensors that are currently allocated."""
        every = (*self.args_recv_info.values(), *self.grad_recv_info.values())
        tensors = (_tensor_of(info) for infos in every for info in infos)
        return sum(each.nbytes for each in tensors if each is not None and not each.is_meta)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Scale gradients after the last backward, which has already reduced them."""
        if self._engine is None:
            super().perform_reduce_grad(grad_scale_factor)
        elif grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide gradients by ``grad_scale_factor``."""
        engine = self._engine
        if engine is None:
            super().scale_grads(grad_scale_factor)
        elif grad_scale_factor != 1:
            engine.scale_gradients(1 / grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Drop the state of a step, like torch's stage, also after an exception."""
        super().clear_runtime_states()
        for infos in self.args_recv_info.values():
            _free(infos, self._args_on_meta)
        for infos in self.grad_recv_info.values():
            _free(infos, self._grads_on_meta)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        # Prepare one microbatch only, since torch allocates the tensors that it prepares.
        found = super()._prepare_forward_infra(1, *args, **kwargs)
        infos = self.args_recv_info[0]
        self._args_on_meta = _on_meta(infos)
        _free(infos, self._args_on_meta)
        for chunk in range(1, num_microbatches):
            self.args_recv_info[chunk] = tuple(map(copy.copy, infos))
        return found

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        infos = super()._create_grad_recv_info(*args, **kwargs)
        self._grads_on_meta = _on_meta(infos)
        _free(infos, self._grads_on_meta)
        return infos

    def _allocate(self, infos: Iterable[Any]) -> None:
        """Allocate received tensors that are on the meta device."""
        for info in infos:
            tensor = _tensor_of(info)
            if tensor is not None and tensor.is_meta:
                info.buffer = _empty_like(tensor, self.device)

    def _compute_input_grads(self, *args: Any, **kwargs: Any) -> Any:
        found = self._microbatches
        within: AbstractContextManager[None] = nullcontext()
        if found is not None:
            within = found.backward_of_inputs(_SHAPES)
        with within:
            return super()._compute_input_grads(*args, **kwargs)

    @property
    def _microbatches(self) -> Microbatches | None:
        return None if self._engine is None else self._engine.microbatches

    @property
    def _engine(self) -> Engine | None:
        """The module's engine; None if the module is not sharded."""
        engine = engine_of(self.submod)
        if engine is None or engine.model is not self.submod:
            _check_nothing_is_sharded(self.submod)
            return None
        if self.dw_builder is not None:
            raise ValueError(
                f"dw_builder of stage {self.stage_index}: expected None, since its module is "
                f"sharded and the engine would not reduce the gradients that dw_builder computes; "
                f"found {self.dw_builder}"
            )
        return engine


def _tensor_of(info: Any) -> Tensor | None:
    """Returns the tensor to receive into; None if the input is an argument of the step."""
    found: Tensor | None = getattr(info, "buffer", None)
    return found


def _on_meta(infos: Iterable[Any]) -> tuple[Tensor | None, ...]:
    tensors = map(_tensor_of, infos)
    return tuple(None if each is None else _empty_like(each, _META) for each in tensors)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return empty_strided_like(tensor, device).requires_grad_(tensor.requires_grad)


def _free(infos: Iterable[Any], on_meta: Iterable[Tensor | None]) -> None:
    """Replace received tensors by their meta tensors."""
    for info, tensor in zip(infos, on_meta, strict=True):
        if tensor is not None:
            info.buffer = tensor


def _detach(values: Iterable[Any]) -> None:
    """Detach tensors from their graphs in place, except views, which torch cannot detach."""
    for each in values:
        if isinstance(each, Tensor) and not each._is_view():
            each.detach_()


def _check_nothing_is_sharded(module: nn.Module) -> None:
    name = engine_within(module)
    if name is not None:
        raise ValueError(
            "submodule: expected the module that was passed to shard(), or one without sharded "
            f"parameters; found a {type(module).__name__}, of which {name} was sharded "
            "separately, or as a part of another module"
        )


def _weight_gradients(
    found: Microbatches, param_groups: list[dict[str, Any]]
) -> list[WeightGradients]:
    """Returns the weight gradients to compute, from torch's ``param_groups``. Each group has nodes
    of parameters, *intermediates* (nodes between these and the part of the graph that leads to the
    inputs), and the gradients of the intermediates."""
    of_node = {accumulator_of(param): param for param in found.full_params}
    joined = _joined(param_groups)
    # The paths to a weight with several uses share nodes of the graph, which must be retained.
    retain = any(len(grads) > 1 for _, grads in joined)
    return [
        WeightGradients(
            params := [of_node[node] for node in nodes],
            partial(_compute, params, grads, retain_graph=retain),
        )
        for nodes, grads in joined
        if grads
    ]


def _joined(param_groups: list[dict[str, Any]]) -> list[tuple[list[Node], dict[Node, _Grads]]]:
    """Returns groups of parameter nodes and intermediates' gradients, with each node in one group.
    torch lists a parameter in two groups if two of its intermediates are in different groups."""
    joined: list[tuple[dict[Node, None], dict[Node, _Grads]]] = []
    place_of: dict[Node, int] = {}
    for group in param_groups:
        intermediates = list(group["intermediates"])
        nodes, grads = dict.fromkeys(group["params"]), {}
        found = group.get("grads") or [None] * len(intermediates)
        for intermediate, each in zip(intermediates, found, strict=True):
            if each is not None:
                grads[intermediate] = each
        for place in sorted({place_of[each] for each in intermediates if each in place_of}):
            nodes = joined[place][0] | nodes
            grads = joined[place][1] | grads
            moved = [each for each, at in place_of.items() if at == place]
            place_of.update(dict.fromkeys(moved, len(joined)))
            joined[place] = ({}, {})
        place_of.update(dict.fromkeys(intermediates, len(joined)))
        joined.append((nodes, grads))
    return [(list(nodes), grads) for nodes, grads in joined]


def _compute(
    params: Sequence[nn.Parameter], grads: Mapping[Node, _Grads], *, retain_graph: bool
) -> None:
    """Set ``.grad`` of full parameters from the gradients of intermediates.

    This replaces torch's ``stage_backward_weight``, older versions of which count a gradient twice
    if it reaches an intermediate through another one.
    """
    edges, outputs = [], []
    for node, each in grads.items():
        for index, grad in enumerate(each):
            if grad is not None:
                edges.append(GradientEdge(node, index))
                outputs.append(grad)
    if not edges:
        return
    # The gradient of an intermediate already contains everything that reaches the intermediate
    # through others. So hooks replace the gradients that autograd computes for intermediates.
    several = grads.items() if len(grads) > 1 else ()
    handles = [node.register_prehook(lambda _, all=each: all) for node, each in several]
    try:
        wanted = [GradientEdge(accumulator_of(param), 0) for param in params]
        found = torch.autograd.grad(edges, wanted, outputs, retain_graph=retain_graph)
    finally:
        for handle in handles:
            handle.remove()
    for param, grad in zip(params, found, strict=True):
        param.grad = grad
