"""The expected results of training: one process with plain torch and the batches of all ranks.

``train`` is that process; ``train_sharded`` does the same with the engine on this rank's part.
Both record every step, and ``differences`` compares two records.

The loss of a step is the mean over microbatches, and each microbatch's loss is divided by their
number, as users do. For low precision there are fp32 main weights, a compute copy made from them
before every step, and gradients that are summed in fp32. The compute copy runs each rank's part
separately (``split``), because rounding to bf16 differs between one batch and its parts. Then
results differ only by the order of fp32 sums, and tolerances can be small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_engine as fe

Batch = tuple[Tensor, ...]
# data[step][microbatch][rank]
Data = list[list[list[Batch]]]
OptimizerMaker = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
# The loss of a batch.
LossOf = Callable[[nn.Module, Batch], Tensor]
# Called with the model and the number of the step, before the step.
BeforeStep = Callable[[nn.Module, int], object]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a model that returns it."""
    loss: Tensor = model(*batch)
    return loss


def nothing(*_: object) -> None:
    """Does nothing before a step."""


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def losses_of_sgd(
    model: nn.Module, width: int, num_steps: int, before_step: BeforeStep = nothing
) -> list[float]:
    """Train a model of vectors on two rows of ones. Returns the loss of each step, the mean of the
    squared outputs."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(num_steps):
        before_step(model, step)
        loss = model(torch.ones(2, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass
class Step:
    """One step: mean loss, gradients before clipping, their norm, weights after the update."""

    loss: float
    gradients: dict[str, Tensor | None]
    norm: float
    weights: dict[str, Tensor]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


def make_data(
    make_batch: Callable[[int, int], Batch],
    num_steps: int,
    num_microbatches: int | Sequence[int],
    num_ranks: int,
    rows: int = 2,
) -> Data:
    """Different data in every step, microbatch and rank; ``make_batch(rows, seed)``.

    Args:
        num_microbatches: In each step, or by step.
    """
    if isinstance(num_microbatches, int):
        num_microbatches = [num_microbatches] * num_steps
    return [
        [
            [make_batch(rows, 10_000 * step + 100 * micro + rank + 1) for rank in range(num_ranks)]
            for micro in range(num)
        ]
        for step, num in enumerate(num_microbatches)
    ]


def train(
    model: nn.Module,
    data: Data,
    make_optimizer: OptimizerMaker = sgd,
    *,
    compute_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
    max_norm: float = float("inf"),
    split: bool | None = None,
    loss_of: LossOf = loss_of,
    before_step: BeforeStep = nothing,
) -> list[Step]:
    """Trains ``model`` in place and alone.

    Args:
        model: fp32 (or the dtype that the main weights shall have).
        data: batches by step, microbatch and rank.
        make_optimizer: makes the optimizer from the main weights.
        compute_dtype: forward and backward run on a copy in this dtype, or with these dtypes by
            parameter name. None: on the model.
        max_norm: gradients are clipped to it.
        split: run ranks' batches one after another instead of concatenated. None: if there is a
            ``compute_dtype``.
        loss_of: The loss of a batch.
        before_step: Called before each step.
    """
    split = compute_dtype is not None if split is None else split
    optimizer = make_optimizer(model.parameters())
    steps = []
    for number, microbatches in enumerate(data):
        before_step(model, number)
        loss = 0.0
        computing = model if compute_dtype is None else _cast_copy(model, compute_dtype)
        for parts in microbatches:
            batches = (
                parts if split else [tuple(torch.cat(each) for each in zip(*parts, strict=True))]
            )
            scale = 1 / len(batches)
            for batch in batches:
                part_loss = loss_of(computing, _cast_first(batch, compute_dtype))
                part_loss = part_loss / len(microbatches)
                part_loss.backward()
                loss += part_loss.item() * scale
                _collect(model, computing, scale)
        for parameter in model.parameters():
            parameter.grad = getattr(parameter, "total", None)
            parameter.total = None  # type: ignore[attr-defined]
        gradients = {name: _copy(p.grad) for name, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(loss, gradients, norm.item(), _copies(model)))
    return steps


def _cast_copy(model: nn.Module, dtype: torch.dtype | dict[str, torch.dtype]) -> nn.Module:
    computing = copy.deepcopy(model)
    for name, parameter in computing.named_parameters():
        parameter.data = parameter.data.to(dtype[name] if isinstance(dtype, dict) else dtype)
    return computing


def _cast_first(batch: Batch, dtype: torch.dtype | dict[str, torch.dtype] | None) -> Batch:
    """The batch for a model in ``dtype``: floating-point inputs are cast, targets are not."""
    if not isinstance(dtype, torch.dtype) or not batch[0].is_floating_point():
        return batch
    return (batch[0].to(dtype), *batch[1:])


def _collect(model: nn.Module, computing: nn.Module, scale: float) -> None:
    """Adds the gradients of ``computing`` to those of ``model``, in the dtype of ``model``."""
    for main, computed in zip(model.parameters(), computing.parameters(), strict=True):
        if computed.grad is None:
            continue
        gradient = computed.grad.to(main.dtype) * scale
        computed.grad = None
        total = getattr(main, "total", None)
        main.total = gradient if total is None else total + gradient  # type: ignore[attr-defined]


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a plain tensor, a DTensor or a slice. A collective."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def held(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a slice is flat. No communication."""
    if isinstance(tensor, fe.FlatDTensor):
        return tensor.local.detach()
    if isinstance(tensor, DTensor):
        assert all(place.is_replicate() for place in tensor.placements), tensor.placements
        return tensor.to_local().detach()
    return tensor.detach()


def slice_like(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``like``, in the form of :func:`held`."""
    if not isinstance(like, fe.FlatDTensor):
        return whole.detach()
    flat = like.flat_placement
    assert flat.shape == whole.shape, f"expected shape {tuple(whole.shape)}; found {flat.shape}"
    return whole.detach().reshape(-1)[flat.start : flat.stop]


def assert_same_weights(model: nn.Module, alone: nn.Module, **tolerance: float) -> None:
    """Assert that this rank's part of each weight equals that of ``alone``."""
    expected = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        wanted = slice_like(expected[name], param)
        torch.testing.assert_close(
            held(param), wanted, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name; None where there is none. A collective."""
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name. A collective."""
    return {name: full(p) for name, p in model.named_parameters()}


def mean_over_ranks(value: Tensor | float) -> float:
    """The mean of one number per rank. A collective."""
    total = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    _, size = rank_and_size()
    if size > 1:
        dist.all_reduce(total)
    return total.item() / size


def train_sharded(
    model: nn.Module,
    engine: Any,
    data: Data,
    make_optimizer: OptimizerMaker = sgd,
    *,
    max_norm: float = float("inf"),
    wrap_optimizer: Callable[[torch.optim.Optimizer], Any] = nothing,
    loss_of: LossOf = loss_of,
    before_step: BeforeStep = nothing,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Step]:
    """Trains ``model``, already sharded by ``engine``, on this rank's part of ``data``.

    Args:
        max_norm: gradients are clipped to it.
        wrap_optimizer: Called with the optimizer when it is made.
        loss_of: The loss of a batch.
        before_step: Called before each step.
        around: Makes a context for each microbatch, such as a context of the engine.
    """
    optimizer = make_optimizer(model.parameters())
    wrap_optimizer(optimizer)
    rank, _ = rank_and_size()
    steps = []
    for number, microbatches in enumerate(data):
        before_step(model, number)
        loss = torch.zeros(())
        for index, parts in enumerate(microbatches):
            delays = index < len(microbatches) - 1
            with around(), engine.no_sync() if delays else nullcontext():
                part_loss = loss_of(model, parts[rank]) / len(microbatches)
                part_loss.backward()
            loss = loss + part_loss.detach()
        gradients = full_gradients(model)
        norm = engine.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        state = engine.full_state_dict()
        weights = {name: state[name] for name in gradients}
        steps.append(Step(mean_over_ranks(loss), gradients, norm.item(), weights))
    return steps


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest element expected."""
    if found.numel() == 0:
        return 0.0
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    scale = expected.abs().max().item()
    error = (found.double() - expected.double()).abs().max().item()
    return error / scale if scale else error


def differences(
    found: list[Step], expected: list[Step], tolerance: float, first: float | None = None
) -> list[str]:
    """Every figure that is off by more than ``tolerance`` (``first`` in the first step).

    Errors are relative to the largest element of the tensor expected.
    """
    if len(found) != len(expected):
        return [f"{len(found)} steps, expected {len(expected)}"]
    lines = []
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        limit = tolerance if number or first is None else first
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
            ("loss", torch.tensor(ours.loss), torch.tensor(theirs.loss)),
            ("norm", torch.tensor(ours.norm), torch.tensor(theirs.norm)),
        ]
        for what in ("gradients", "weights"):
            mine, others = getattr(ours, what), getattr(theirs, what)
            if mine.keys() != others.keys():
                lines.append(f"step {number}: {what} of {sorted(mine.keys() ^ others.keys())}")
                continue
            pairs += [(f"{what} {name}", mine[name], others[name]) for name in others]
        for label, mine, other in pairs:
            if mine is None or other is None:
                if mine is not other:
                    lines.append(f"step {number}: {label}: {mine}, expected {other}")
            elif mine.shape != other.shape or mine.dtype != other.dtype:
                lines.append(
                    f"step {number}: {label}: {mine.dtype} {tuple(mine.shape)}, "
                    f"expected {other.dtype} {tuple(other.shape)}"
                )
            elif not (error := relative_error(mine, other)) <= limit:
                lines.append(f"step {number}: {label}: off by {error:.2e}, limit {limit:.0e}")
    return lines


def once(make_optimizer: OptimizerMaker) -> OptimizerMaker:
    """Makes an optimizer at the first call, and returns the same one at every later call."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        if not made:
            made.append(make_optimizer(parameters))
        return made[0]

    return make
