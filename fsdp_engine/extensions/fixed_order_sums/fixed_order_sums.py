"""Gradients with the same bits on any number of ranks, at every level.

A step consists of ``leaves`` microbatches over all ranks, in one global order: microbatch ``m`` of
rank ``r`` of ``R`` is leaf ``m * R + r``. One binary tree adds the gradients of all leaves
(``tree_sum.py``). Every backward reduces: each rank receives all summands of its shard, in the
order of ranks, and adds them to its trees. On two axes the inner ranks add the leaves of one
microbatch first, which is a node of the tree if their number is a power of two.

The engine treats each microbatch as a separate step. After the reduction of a microbatch that is
not the last, its gradients are cleared instead of published, since the trees have added them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.fixed_order_sums.communicator import FixedOrderCommunicator, StepTrees
from fsdp_engine.extensions.fixed_order_sums.step_sums import StepSums, check_dtypes
from fsdp_engine.strategies import Axis
from fsdp_engine.units.build import EngineSetup, Resources


@dataclass(frozen=True)
class FixedOrderSums(EngineExtension):
    """Makes gradients and their norm independent of the number of ranks, the level and the mesh.

    A step is ``leaves`` microbatches, divided over the ranks. The gradient is the mean over them,
    so the caller does not divide losses by the number of microbatches::

        sums = fe.FixedOrderSums(leaves=24)
        engine = fe.shard(model, extensions=[sums])
        for step in range(num_steps):
            for leaf in sums.microbatches(engine, step):
                loss_of(model, batch_of(step, leaf)).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    The rest of a step must be deterministic: the same model, kernels and batch for a leaf.
    :meth:`microbatches` seeds torch's random numbers, and updates statistics of batch
    normalization, for each leaf. :meth:`mean_loss` is the mean over samples of all leaves, for
    leaves of different sizes. ``engine.clip_grad_norm_`` is independent of the order for the 2-norm
    and the maximum; ``torch.nn.utils.clip_grad_norm_`` is not. ``engine.reset()`` drops a step that
    is not complete; ``zero_grad()`` does not. Checkpoints do not contain such a step.

    A backward raises an error outside of :meth:`microbatches`, under ``engine.no_sync()``, with
    ``create_graph=True``, if another backward runs within it, for a penalty that was computed with
    ``model.parameters()``, and if forward has changed a buffer other than statistics of batch
    normalization.

    Args:
        leaves: Number of microbatches of a step over all ranks: a multiple of the number of ranks.
        seed: Seed of the random numbers of all leaves.

    Raises:
        ValueError: An argument has a value that is not allowed. Raised by ``fe.shard`` on all
            ranks: ``leaves`` is not a multiple of the number of ranks; there are two axes, and the
            size of the inner one is not a power of two; gradients are not sent, summed and
            accumulated in fp32; the model has experts on other ranks, tensor-parallel parameters or
            a SyncBatchNorm, whose statistics depend on the ranks; the engine has
            ``fe.Arenas(registered=True)``; or another extension replaces reductions.
    """

    leaves: int
    seed: int = 0
    replaces_reductions = True

    def __post_init__(self) -> None:
        if not isinstance(self.leaves, int) or self.leaves < 1:
            raise ValueError(f"leaves: expected a positive number; found {self.leaves!r}")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed: expected an integer; found {self.seed!r}")

    def check(self, setup: EngineSetup) -> None:
        """See the class.

        Raises:
            ValueError: See the class.
        """
        data = setup.data
        if self.leaves % data.size:
            below = self.leaves // data.size * data.size
            nearest = f"{below} or {below + data.size}" if below else f"{data.size}"
            raise ValueError(
                f"leaves: expected a multiple of {data.size}, the number of data-parallel ranks; "
                f"found {self.leaves}. The nearest are {nearest}"
            )
        inner = data.inner.size
        if data.outer.size > 1 and inner & (inner - 1):
            raise ValueError(
                "mesh: expected an inner axis whose size is a power of two, with FixedOrderSums on "
                f"two axes; found {inner}. Use a mesh of one axis"
            )
        others = [each for each in setup.settings.extensions if each.replaces_reductions]
        if len(others) > 1:
            raise ValueError(
                "extensions: expected one that replaces reductions; found "
                f"{', '.join(type(each).__name__ for each in others)}"
            )
        self.refuse_other_ranks(setup)
        for buffer in (each for unit in setup.plan.units for each in unit.buffers):
            if buffer.kind.requires_grad:
                check_dtypes(buffer.records[0].name, buffer.kind.dtypes)
        for name, module in setup.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{name}: expected no SyncBatchNorm with FixedOrderSums, since its statistics "
                    "are of all ranks' samples; found one. Use BatchNorm, whose statistics are of "
                    "a leaf"
                )

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """Check the memory of the engine.

        Raises:
            ValueError: All memory of collectives is allocated when the engine is made.
        """
        if resources.memory.is_fixed:
            raise ValueError(
                "extensions: expected FixedOrderSums without fe.Arenas(registered=True), whose "
                "registered memory its messages could not use; found both"
            )

    def start(self, engine: Engine) -> None:
        """Replace the communicators of reductions, which are not in use yet, and the norm."""
        mesh = engine.communicators.data
        inner, outer = mesh.comms[Axis.INNER], mesh.comms[Axis.OUTER]
        last = Axis.INNER if outer.reduce is None else Axis.OUTER
        trees = StepTrees(self.leaves, mesh.mesh.inner.size if last is Axis.OUTER else 1)
        for axis, comms in ((Axis.INNER, inner), (Axis.OUTER, outer)):
            if comms.reduce is not None:
                made = FixedOrderCommunicator(
                    comms.reduce.group, mesh.mesh.device, trees if axis is last else None
                )
                mesh.comms[axis] = replace(comms, reduce=made)
        StepSums(engine, self.leaves, self.seed, trees)

    def microbatches(self, engine: Engine, step: int) -> Iterator[int]:
        """Yield the number of the leaf for each microbatch that this rank runs in a step.

        The caller runs one backward for each leaf before it takes the next. The last backward is
        collective over all ranks.

        torch's random numbers in a microbatch depend on the seed, the step and the leaf only. At
        the end the state of the generators is restored. Running statistics of batch normalization
        become the mean over those of all leaves.

        Args:
            engine: An engine with this extension.
            step: The number of the step, the same on all ranks.

        Raises:
            ValueError: The engine does not have this extension, or gradients have another dtype
                than at ``shard()``. Raised on this rank.
            RuntimeError: An earlier step is not complete, the caller has not run one backward, or
                the step was dropped. Raised on this rank.
        """
        sums = _sums_of(engine)
        loop = sums.begin_loop(operator.index(step))
        try:
            for number in range(sums.num_microbatches):
                leaf = sums.leaf(number)
                loop.begin_leaf(leaf)
                yield leaf
                if sums.loop is not loop:
                    raise RuntimeError(
                        "microbatches(): expected the step to continue; found that "
                        "engine.reset(), or another loop, has ended it. Begin a new loop"
                    )
                if loop.num_reduced != number + 1:
                    raise RuntimeError(
                        f"microbatches(): expected one backward of leaf {leaf}; found "
                        f"{loop.num_reduced - number}"
                    )
        finally:
            if sums.loop is loop:
                sums.end_loop()

    def mean_loss(self, engine: Engine, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """Returns a 0-d tensor to call ``backward()`` on. The gradient of the step will be that of
        the mean over the samples of all leaves, instead of the mean over leaves.

        Call it once in each microbatch of a step. :meth:`last_mean_loss` has the mean.

        Args:
            engine: An engine with this extension.
            loss_sum: One element that requires grad: the sum of the losses of the leaf's samples.
            count: Number of samples of the leaf, as a number or a tensor of one element; 0 for a
                leaf that does not count.

        Raises:
            ValueError: The engine does not have this extension, or an argument has several
                elements.
            RuntimeError: The call is not in a microbatch. Raised by the last backward, on all
                ranks: some leaves of the step had no such loss or two, or there were no samples.
        """
        for name, value in (("loss_sum", loss_sum), ("count", count)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"{name}: expected one element; found a shape of {tuple(value.shape)}"
                )
        if isinstance(count, Tensor):
            count = count.reshape(())
        return _sums_of(engine).add_loss(loss_sum.reshape(()), count)

    def last_mean_loss(self, engine: Engine) -> Tensor | None:
        """Returns the mean loss of the last step whose losses were those of :meth:`mean_loss`, 0-d,
        fp64, equal on all ranks; None: there was none."""
        return _sums_of(engine).last_mean_loss


def _sums_of(engine: Engine) -> StepSums:
    for each in engine.reductions.observers:
        if isinstance(each, StepSums):
            return each
    raise ValueError("engine: expected one with FixedOrderSums in its extensions; found none there")
