"""Gives all ranks of a transformers Trainer the same number of batches if loaders differ.

In training, all ranks take as many microbatches as the longest loader has, and losses are scaled so
that the loss of a step is the mean over the batches that exist. In evaluation, gathered results
contain each sample once: they omit repeated batches, and samples that accelerate would add.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.extras import naming_extra
from fsdp_engine.integrations.loader_steps import LoaderStep, length_of

with naming_extra():
    from accelerate.data_loader import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        DataLoaderShard,
        IterableDatasetShard,
    )
    from accelerate.state import GradientState
    from accelerate.utils import gather, gather_object, recursively_apply
    from transformers.trainer_pt_utils import find_batch_size


class TrainingBatches:
    """Iterator over the batches of an epoch that yields the same number on all ranks. Collective.

    Args:
        engine: The engine of the model.
        batches: The batches of this rank.

    Attributes:
        batches: The iterator that was given.
    """

    def __init__(self, engine: Engine, batches: Iterator[Any]) -> None:
        self.batches = batches
        self._engine = engine
        self._steps = engine.even_steps(batches)
        self._taken: list[LoaderStep] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step = next(self._steps)
        if step.is_repeated:  # copied, because ``is_repeated`` compares by identity
            step = step._replace(batch=copy.copy(step.batch))
        self._taken.append(step)
        return step.batch

    def begin_step(self) -> None:
        """Begin an optimizer step: the following batches belong to it."""
        self._taken.clear()

    def is_repeated(self, batch: Any) -> bool:
        """Returns whether a batch of this step has weight 0."""
        return any(step.is_repeated and step.batch is batch for step in self._taken)

    def scale(self, batch: Any, *, counts: str) -> float:
        """Returns the factor of the loss of a batch of this step.

        Args:
            batch: A batch of this step.
            counts: The batches whose samples or labels are counted in the divisor of the loss.
                "all": those of the step on all ranks; "rank": those of the step on this rank;
                "batch": this batch.
        """
        if self.is_repeated(batch):
            return 0.0
        size = self._engine.ranks.size
        if counts == "all" or not self._taken:
            return 1.0
        if counts == "rank":
            # The maximum is the number of ranks that have a batch in this optimizer step.
            return size / max(step.num_ranks for step in self._taken)
        return size * len(self._taken) / sum(step.num_ranks for step in self._taken)


def without_labels(batch: Any) -> Any:
    """Returns a batch in which the loss ignores all labels."""
    names = ("labels", "shift_labels")
    if not isinstance(batch, Mapping) or not any(name in batch for name in names):
        return batch
    ignored = {name: 0 * batch[name] - 100 for name in names if isinstance(batch.get(name), Tensor)}
    return {**batch, **ignored}


def without_samples(batch: Any) -> Any:
    """Returns a batch whose tensors have no rows."""
    return recursively_apply(lambda tensor: tensor[:0], dict(batch))


def are_even(engine: Engine, loader: Any) -> bool:
    """Returns whether accelerate gives all ranks the same number of batches, of equal sizes.
    Collective."""
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    if isinstance(loader, DataLoaderShard) and isinstance(sampler, BatchSamplerShard):
        is_even = bool(sampler.even_batches)
    elif isinstance(loader, DataLoaderShard):
        is_even = isinstance(dataset, IterableDatasetShard)
    else:
        is_even = isinstance(loader, DataLoaderDispatcher)
    lengths = tuple(length_of(each) for each in (loader, dataset))
    if isinstance(loader, DataLoaderDispatcher):  # only the first rank reads
        lengths = (None, None)
    found = agree("evaluation", None, engine.ranks.control_group, (is_even, lengths))
    return is_even and all(each == found[0] for each in found)


class EvaluationBatches:
    """Loader of an evaluation that yields the same number of batches on all ranks, and gathers
    results.

    Collective. It reads two batches ahead, since accelerate needs to know which batch is the last
    one.

    Args:
        engine: The engine of the model.
        loader: The loader of this rank.

    Attributes:
        end_of_dataloader: Whether the current batch is the last one on all ranks; accelerate reads
            it.
        remainder: The attribute of accelerate's loaders. -1: the number of samples is unknown.
    """

    def __init__(self, engine: Engine, loader: Any) -> None:
        self.end_of_dataloader = False
        self.remainder = -1
        self._engine = engine
        self._loader = loader
        self._num = 0  # number of samples of the batch; 0 if it is repeated
        self._losses: list[tuple[Tensor, int]] = []
        self._total = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        state = GradientState()
        steps = self._engine.even_steps(self._loader)
        step = next(steps, None)
        try:
            while step is not None:
                following = next(steps, None)
                self.end_of_dataloader = following is None
                # Accelerate's loader, which is ahead, may have registered itself as the active one.
                state._remove_dataloader(self)
                state._add_dataloader(self)
                self._num = 0 if step.is_repeated else find_batch_size(step.batch) or 0
                self._total += self._num
                yield copy.copy(step.batch)
                step = following
        finally:
            state._remove_dataloader(self)

    def add_loss(self, loss: Tensor) -> None:
        """Record the mean loss of the current batch."""
        self._losses.append((loss.detach(), self._num))

    def totals(self, *, only_finite: bool) -> tuple[int, float | None]:
        """Returns the number of samples on all ranks, and the mean of their losses, or None if
        there are no losses. Collective.

        Args:
            only_finite: Ignore batches whose loss is not finite.
        """
        losses = [(loss.item(), num) for loss, num in self._losses if num]
        group = self._engine.ranks.control_group
        found = agree("evaluation", None, group, (self._total, losses))
        kept = [each for _, of_rank in found for each in of_rank]
        if only_finite:
            kept = [each for each in kept if math.isfinite(each[0])] or kept
        num = sum(num for _, num in kept)
        mean = sum(loss * num for loss, num in kept) / num if num else None
        return sum(total for total, _ in found), mean

    def gather(self, data: Any, use_gather_object: bool) -> Any:
        """Gather the samples of the current batch, without repeated ones, as accelerate's
        ``gather_for_metrics`` does."""
        if use_gather_object or not _has_only_tensors(data):
            if isinstance(data, Tensor | list):
                return gather_object(data[: self._num])
            return recursively_apply(lambda each: gather_object(each[: self._num]), data)
        return recursively_apply(self._gather_rows, data)

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        tensor = tensor[: self._num].contiguous()
        lengths = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        if not max(lengths):
            return tensor
        padding = [0, 0] * (tensor.dim() - 1) + [0, max(lengths) - len(tensor)]
        padded = nn.functional.pad(tensor, padding)
        parts = gather(padded).split(len(padded))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
