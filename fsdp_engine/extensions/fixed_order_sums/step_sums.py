"""The reductions of a step whose sums have a fixed order, and the loop over its leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.engine import Engine
from fsdp_engine.extensions.fixed_order_sums.communicator import StepTrees
from fsdp_engine.extensions.fixed_order_sums.exact_norm import exact_norm
from fsdp_engine.extensions.fixed_order_sums.leaf_statistics import LeafStatistics
from fsdp_engine.extensions.fixed_order_sums.tree_sum import TreeSum
from fsdp_engine.memory import allocator
from fsdp_engine.optim.step_listeners import add_step_listener
from fsdp_engine.runtime.gradient_observer import GradientObserver
from fsdp_engine.runtime.unit import Unit

_AFTER = "(after an exception, call engine.reset())"


class LeafLoop:
    """One loop over this rank's microbatches of a step.

    Args:
        engine: The engine.
        leaves: Number of leaves of the step.
        seed: Seed of the random numbers of all leaves.
        step: The number of the step.

    Attributes:
        step: See the argument.
        num_reduced: Number of microbatches whose gradients are reduced.
        is_complete: Whether the gradients of all microbatches are reduced.
    """

    def __init__(self, engine: Engine, leaves: int, seed: int, step: int) -> None:
        self.step = step
        self.num_reduced = 0
        self.is_complete = False
        self._seed = seed
        self._statistics = LeafStatistics(engine.model, leaves)
        device = engine.mesh.device
        self._device = module_of(device) if is_accelerator(device) else None
        self._states = [torch.get_rng_state()]
        if self._device is not None:
            self._states.append(self._device.get_rng_state())

    def begin_leaf(self, leaf: int) -> None:
        """Set the random numbers and the statistics with which a leaf begins."""
        self._statistics.begin_leaf()
        seed = random.Random(f"{self._seed}/{self.step}/{leaf}").getrandbits(63)
        # torch.manual_seed would also seed other devices, whose states the loop does not restore.
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def end_leaf(self, leaf: int) -> None:
        """Keep the statistics of a leaf, whose gradients are reduced."""
        self._statistics.keep(leaf)
        self.num_reduced += 1

    def complete(self, group: Any) -> None:
        """Set the statistics of the step. Collective."""
        self._statistics.set_mean(group)
        self.is_complete = True

    def end(self) -> None:
        """Restore the states that the random generators had before the loop. If the step is not
        complete, restore the statistics as well."""
        if not self.is_complete:
            self._statistics.restore()
        torch.set_rng_state(self._states[0])
        if self._device is not None:
            self._device.set_rng_state(self._states[1])


class StepSums(GradientObserver):
    """The reductions of one engine's current step.

    Args:
        engine: The engine.
        leaves: Number of microbatches of a step over all ranks.
        seed: Seed of the random numbers of all leaves.
        trees: The trees of the last axis that is reduced.

    Attributes:
        num_microbatches: Number of microbatches of this rank in a step.
        loop: The current loop; None: there is none.
        last_mean_loss: See :meth:`.FixedOrderSums.last_mean_loss`.
    """

    sees_all_ranks = False

    def __init__(self, engine: Engine, leaves: int, seed: int, trees: StepTrees) -> None:
        mesh = engine.mesh
        self.num_microbatches = leaves // mesh.size
        self.loop: LeafLoop | None = None
        self.last_mean_loss: Tensor | None = None
        self._engine = engine
        self._seed = seed
        self._trees = trees
        self._first = mesh.outer.rank * mesh.inner.size + mesh.inner.rank
        self._buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        self._params = {id(param) for each in self._buffers for param in each.sharded_params}
        # For each leaf: its step, number of mean losses, loss sum and number of samples.
        self._rows = allocator.zeros(4 * leaves, torch.float64, mesh.device).view(leaves, 4)
        self._num_reduced = 0
        self._used: list[list[bool]] = []
        self._is_open = False  # A backward has begun and is not reduced.
        self._drops = False  # The next `discard` clears the gradients of a microbatch only.
        for buffer in self._buffers:
            assert buffer.grads is not None
            buffer.grads.divide_by(1.0)
        engine.total_norm = self.total_norm
        engine.reductions.observers.append(self)
        add_step_listener(self)

    def leaf(self, number: int) -> int:
        """Returns the leaf of this rank's microbatch ``number``."""
        return number * self._engine.mesh.size + self._first

    def begin_loop(self, step: int) -> LeafLoop:
        """Begin the loop of a step, and end an abandoned one.

        Raises:
            RuntimeError: An earlier step is not complete.
            ValueError: Gradients have another dtype than at ``shard()``.
        """
        if self._is_open or self._num_reduced:
            raise RuntimeError(
                f"microbatches(): expected a new step; found {self._num_reduced} of "
                f"{self.num_microbatches} microbatches of the last one {_AFTER}"
            )
        for buffer in self._buffers:
            check_dtypes(buffer.records[0].name, buffer.kind.dtypes)
        self.end_loop()
        self.loop = LeafLoop(self._engine, len(self._rows), self._seed, step)
        return self.loop

    def end_loop(self) -> None:
        """End the current loop, if there is one."""
        if self.loop is not None:
            self.loop.end()
            self.loop = None

    def begin_backward(self) -> None:
        """See the base class.

        Raises:
            RuntimeError: The backward is not the only one of a leaf, records a graph, or follows
                gradients that are not cleared.
        """
        if self.loop is None:
            raise RuntimeError(
                "backward: expected one within the loop of FixedOrderSums.microbatches(); found "
                "one outside of it"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward: expected no create_graph=True with FixedOrderSums, since each leaf has "
                "one backward; found it"
            )
        if self._is_open:
            raise RuntimeError(
                "backward: expected the reduction of each microbatch with FixedOrderSums; found "
                f"one that has not ended. Do not use no_sync() {_AFTER}"
            )
        if not all(each.published.are_cleared_or_zeroed for each in self._buffers):
            raise RuntimeError(
                f"backward: expected {self.num_microbatches} microbatches a step with "
                "FixedOrderSums, and then zero_grad(); found gradients of the last step"
            )
        self._drops, self._is_open = False, True

    def check_last(self, units: Sequence[Unit]) -> None:
        """See the base class.

        Raises:
            RuntimeError: Gradients of some units would stay unreduced; names a unit.
        """
        if units:
            raise RuntimeError(
                "backward: expected reductions of all units in each microbatch with "
                f"FixedOrderSums; found {len(units)} units without one, such as {units[0].label}"
            )

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]] | None:
        """Keep the gradients of a microbatch, or set those of the step.

        Raises:
            RuntimeError: No backward has run; or the microbatch has changed a buffer, or has a
                penalty on sharded parameters, which the message names. Also raised, on all ranks,
                if the ranks' steps differ, and as :meth:`.FixedOrderSums.mean_loss` describes.
        """
        loop = self.loop
        if loop is None or not self._is_open:
            raise RuntimeError(
                "finish_grad_sync(): expected the backward of a leaf first, with FixedOrderSums; "
                "found none"
            )
        self._is_open = False
        for buffer in self._buffers:
            if (name := buffer.published.name_of_penalty) is not None:
                raise RuntimeError(
                    f"{name}: expected gradients that modules compute, with FixedOrderSums; found "
                    "one of a penalty that was computed with model.parameters() outside of the "
                    "modules' forwards. Use the optimizer's weight_decay, or add the penalty's "
                    f"gradient to .grad after the last backward {_AFTER}"
                )
        leaf = self.leaf(self._num_reduced)
        self._rows[leaf, 0] = loop.step
        loop.end_leaf(leaf)
        self._num_reduced += 1
        flags = [list(map(bool, each)) for each in used]
        before = self._used or flags
        self._used = [
            [one or other for one, other in zip(*pair, strict=True)]
            for pair in zip(before, flags, strict=True)
        ]
        if self._engine.mesh.size == 1:
            for buffer in self._buffers:
                self._add_alone(buffer)
        if self._num_reduced < self.num_microbatches:
            self._drops = True
            return None
        found, self._used, self._num_reduced = self._used, [], 0
        self._trees.check_empty()
        self._divide_by_samples()
        loop.complete(self._engine.mesh.control_group)
        return found

    def discard(self) -> None:
        """Drop the step, unless :meth:`reduced` has just added the gradients to the trees."""
        if self._drops:
            self._drops = False
            return
        self._trees.drop()
        self._rows.zero_()
        self._used, self._num_reduced, self._is_open = [], 0, False
        if self.loop is not None and not self.loop.is_complete:
            self.end_loop()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the step of an optimizer of this model has all leaves.

        Raises:
            RuntimeError: Microbatches are missing.
        """
        if not (self._num_reduced or self._is_open):
            return
        params = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in self._params for each in params):
            self._raise_missing(f"{type(optimizer).__name__}.step")

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def total_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the norm of the gradients of a step: see :func:`.exact_norm`. Collective.

        Raises:
            RuntimeError: Microbatches are missing.
            ValueError: The norm is neither the 2-norm nor the maximum.
        """
        if self._num_reduced or self._is_open:
            self._raise_missing("clip_grad_norm_")
        return exact_norm(*args, **kwargs)

    def add_loss(self, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """See :meth:`.FixedOrderSums.mean_loss`."""
        if self.loop is None or self._is_open:
            where = "outside of microbatches()" if self.loop is None else "after a backward began"
            raise RuntimeError(
                f"mean_loss(): expected a call before the backward of a leaf; found one {where}"
            )
        row = self._rows[self.leaf(self._num_reduced)]
        with torch.no_grad():
            row[1] += 1
            row[2] += loss_sum.detach()
            row[3] += count
        return loss_sum

    def _raise_missing(self, what: str) -> None:
        raise RuntimeError(
            f"{what}: expected {self.num_microbatches} reduced microbatches with FixedOrderSums; "
            f"found {self._num_reduced} {_AFTER}"
        )

    def _divide_by_samples(self) -> None:
        """Compare the ranks' steps, and make the mean over leaves a mean over samples if losses
        were mean losses. Collective.

        Raises:
            RuntimeError: The ranks' steps differ, or mean losses or samples are missing, as
                :meth:`.FixedOrderSums.mean_loss` describes.
        """
        # Each row is zero on all ranks but one, so the sums over ranks are exact.
        group = self._engine.mesh.control_group
        rows = all_reduce_(self._rows.clone(), group, what="the losses of the step")
        self._rows.zero_()
        tree = TreeSum(len(rows))
        for row in rows:
            tree.add(row)
        total = tree.take()
        lowest, highest = rows.aminmax(dim=0)
        ends = torch.stack((lowest, highest, total)).tolist()
        (step, fewest, *_), (last_step, most, *_), (*_, num_samples) = ends
        if step != last_step:
            raise RuntimeError(
                f"microbatches(): expected the same step on all ranks; found {step:g} and "
                f"{last_step:g} {_AFTER}"
            )
        if not most:
            return
        if (fewest, most) != (1.0, 1.0) or not num_samples > 0:
            raise RuntimeError(
                "backward of FixedOrderSums.mean_loss(): expected one call for each of "
                f"{len(rows)} leaves, and samples; found {fewest:g} to {most:g} calls and "
                f"{num_samples:g} samples {_AFTER}"
            )
        self.last_mean_loss = total[2] / total[3]
        for buffer in self._buffers:
            assert buffer.grads is not None
            buffer.grads.scale(len(rows) / num_samples, True)

    def _add_alone(self, buffer: ParamAndGradBuffer) -> None:
        """Add the gradients of a buffer that no communicator reduces."""
        assert buffer.grads is not None
        grads = buffer.grads.optim_grads
        assert grads is not None
        self._trees.add(buffer.spec.tag, grads)
        mean = self._trees.take_mean(buffer.spec.tag)
        if mean is not None:
            grads.copy_(mean)


def check_dtypes(name: str, dtypes: Any) -> None:
    """Check that gradients are in fp32 wherever they are sent, summed or accumulated.

    Args:
        name: The name of a parameter with these dtypes.
        dtypes: The :class:`~fsdp_engine.precision.ParamDtypes` of a buffer.

    Raises:
        ValueError: One of these dtypes is not fp32.
    """
    sums = (dtypes.comm, dtypes.reduce, dtypes.main_grad, dtypes.optim_grad)
    if set(sums) != {torch.float32}:
        raise ValueError(
            f"{name}: expected gradients that are sent, summed, accumulated and passed to the "
            f"optimizer in torch.float32, with FixedOrderSums; found {', '.join(map(str, sums))}. "
            "Set these dtypes in mp_policy; build a float64 model in float32"
        )
