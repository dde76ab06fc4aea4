"""``.grad`` of one buffer's parameters: publishing it, and detecting the user's changes of it.

[Note: Gradients between backwards]
Between two backwards users may change ``.grad``. When the next backward begins, it looks at the
``.grad`` of each parameter:

    None                     cleared: the next gradient overwrites it
    zeroed                   cleared; if no gradient follows, it stays zeros, as in plain PyTorch
    as published, or edited  kept: the next gradient is added
    another tensor           kept instead of the published one: the next gradient is added

Edits are accepted if the gradient is reduced. Between microbatches of ``no_sync()`` the ``.grad``
of a rank is a summand, and an edit of the summand is not an edit of the sum, so it raises an error.
A plain tensor does not record that it was zeroed: it is kept, and the next gradient is added.

Some reduced gradients must not be reduced once more. They are stored outside of the accumulation
buffer, and added to the published gradients when the next reduction is done:

- *Earlier* gradients are tensors that users have assigned to ``.grad``; gradients that a narrower
  ``grad_comm_dtype`` would round once more ([Note: Reducing again] in ``gradient_scale.py``); and
  gradients of parameters with hooks, because hooks of autograd see only the new gradient. Earlier
  gradients are added after the hooks have run.
- *Penalties* are gradients that autograd accumulates into a sharded parameter itself, because the
  loss contains a penalty on sharded parameters. Such a gradient has the elements of this rank's
  slice, and is equal on all ranks that hold the slice. Penalties are part of the new gradient, and
  are added before the hooks run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_, is_not, ne

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradient_memory import like
from fsdp_engine.buffers.gradients import Gradients, StepGradients, scale_, zeros_in
from fsdp_engine.flat_dtensor import (
    FlatDTensor,
    clear_gradients,
    gradients_of,
    set_gradients,
)
from fsdp_engine.flat_dtensor.parameter_access import GradientAccess
from fsdp_engine.flat_dtensor.slices import check_gradient


@dataclass(slots=True)
class FoundGradients:
    """The ``.grad`` that a backward found when it began. Kept until gradients are published.

    Attributes:
        detached: Indices of parameters whose ``.grad`` is None during the backward.
        unchanged: Whether every ``.grad`` was the published tensor, and still is.
        by_autograd: Indices of sharded parameters into which autograd accumulates in this backward.
    """

    detached: Sequence[int] = ()
    unchanged: bool = False
    by_autograd: set[int] = field(default_factory=set)


class PublishedGradients:
    """Publishes ``.grad`` of one buffer's parameters. See the module docstring.

    A model may have many small parameters, so each backward inspects their gradients by functions
    in C (``map``, ``any``). Python code runs only for gradients that users have changed.

    Args:
        params: The parameters that users see.
        names: The names of the parameters.
        gradients: The gradients to publish.
        reads: The record of the user's accesses to ``.grad``. None: users see the full parameters,
            plain tensors, whose accesses are not recorded.

    Attributes:
        is_plain: Whether users see the full parameters, plain tensors.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        gradients: Gradients,
        reads: GradientAccess | None,
    ) -> None:
        self._params = params
        self._names = names
        self._gradients = gradients
        self._reads = reads
        self.is_plain = reads is None
        self._found: FoundGradients | None = None

    @property
    def used(self) -> bytes | bytearray:
        """One byte for each parameter. 1: this rank had a gradient since gradients were cleared."""
        step = self._gradients.step
        return bytes(len(self._params)) if step is None else step.used

    def begin_backward(self, *, reduced: bool, hooked: Collection[int] = ()) -> None:
        """Inspect ``.grad`` when a backward begins. See [Note: Gradients between backwards].

        Args:
            reduced: Gradients are reduced. False: they are only accumulated over microbatches, or
                cleared.
            hooked: Indices of parameters with hooks on their gradients.

        Raises:
            RuntimeError: A gradient was edited between microbatches. The message names the
                parameter.
        """
        self._found = None
        if self._gradients.step is None and not self.is_plain:
            return  # no .grad was set: setting one of a sharded parameter begins a step
        found = gradients_of(self._params)
        if not any(map(is_not, found, repeat(None))):
            self._drop_step()
            return
        step = self._gradients.make_step()
        step.is_published = False
        if step.full_values is not None:
            self.publish_full(None)
        tensors = self._gradients.accumulation()
        published = self._published()
        versions = tensors.versions()
        others = (
            [] if all(map(is_, found, published)) else _true_indices(map(is_not, found, published))
        )
        if reduced:
            step.used[:] = b"\1" * len(step.used)
        self._look_at_others(step, others, found)
        cleared = set(tensors.take_zeroed(found))
        for index in sorted(cleared):
            step.sums[index] = 0
            _drop_kept(step, index)
        if not reduced and step.versions and versions != step.versions:
            for index in _true_indices(map(ne, versions, step.versions)):
                if found[index] is published[index] and index not in cleared:
                    self._clear_or_raise(step, index, published[index])
        step.versions = versions
        if self.is_plain:  # autograd would add to .grad in place, unscaled
            detached = _true_indices(map(is_not, found, repeat(None)))
        else:
            detached = [index for index in others if found[index] is not None]
        self._found = FoundGradients(detached, unchanged=not others and not self.is_plain)
        if detached:
            clear_gradients([self._params[index] for index in detached])
        if reduced and len(others) + len(cleared) < len(found):
            self._keep_reduced(step, cleared.union(others), hooked)

    def check_gradient(self, index: int, grad: Tensor) -> None:
        """Check the gradient that autograd is about to accumulate into sharded parameter ``index``.

        Raises:
            RuntimeError: An ``autograd.Function`` computed ``grad`` from this rank's values, so it
                is not reduced. The message names the parameter.
        """
        param = self._params[index]
        assert isinstance(param, FlatDTensor)
        check_gradient(FlatDTensor, grad, param.flat_placement)

    def detach_for_autograd(self, index: int) -> None:
        """Set ``.grad`` to None before autograd accumulates into sharded parameter ``index``."""
        if self._found is None:
            self._found = FoundGradients()
        if index not in self._found.by_autograd:
            self._found.by_autograd.add(index)
            self._found.unchanged = False
            self._params[index].grad = None

    def end_backward(self) -> None:
        """Store the gradients that autograd has accumulated into sharded parameters as penalties,
        at the end of a backward."""
        if self._found is None or not self._found.by_autograd:
            return
        published, step = self._published(), self._gradients.make_step()
        for index in sorted(self._found.by_autograd):
            param = self._params[index]
            if (grad := gradients_of([param])[0]) is not None:
                _keep(step.penalties, index, grad)
                step.used[index] = 1
                param.grad = published[index]
        self._found.by_autograd.clear()
        step.versions = self._gradients.accumulation().versions()

    def publish(self, used: Sequence[int], *, reduced: bool) -> None:
        """Set ``.grad`` of the parameters that were used to the accumulated sums.

        Args:
            used: For each parameter, whether any rank had a gradient.
            reduced: All sums are reduced, so that penalties are added to them.
        """
        gradients, found = self._gradients, self._found
        tensors, step = gradients.accumulation(), gradients.make_step()
        self._found = None
        step.is_published = True
        wanted: Sequence[Tensor | None] = tensors.publish(self._params, gradients.optim_depth)
        step.num_published = len(wanted)
        is_complete = all(used)
        if not is_complete:
            wanted = [*wanted]
            grads = gradients_of(self._params)
            for index in zeros_in(bytes(used)):
                # A published gradient of an earlier microbatch is removed. A tensor that the user
                # has assigned is kept.
                wanted[index] = None if grads[index] is wanted[index] else grads[index]
                step.num_published -= wanted[index] is None
        if found is None or not found.unchanged or not is_complete:
            set_gradients(self._params, wanted)
        if reduced and step.penalties:
            self._add(step.penalties)
        # Between microbatches users may clear gradients, but not edit them: versions detect edits.
        step.versions = [] if reduced else tensors.versions()

    def add_earlier(self) -> None:
        """Add earlier gradients to published gradients, after users' hooks on gradients."""
        step = self._gradients.step
        if step is None:
            return
        self._add(step.earlier)
        if step.versions:
            step.versions = self._gradients.accumulation().versions()

    def put_back(self) -> None:
        """Restore the ``.grad`` from before a microbatch that computed no gradients."""
        found, self._found = self._found, None
        step = self._gradients.step
        if step is None:
            return
        step.is_published = True
        if found is not None and found.detached:
            published = self._published()
            params = [self._params[index] for index in found.detached]
            set_gradients(params, [published[index] for index in found.detached])

    def publish_one(self, index: int) -> Tensor:
        """Set ``.grad`` of parameter ``index`` to its published tensor and return it. The caller
        writes the values.

        This is for a gradient that was computed outside of backward. The next backward adds to it.
        """
        if self._reads is not None:
            self._reads.wait()
        grad, step = self._published()[index], self._gradients.make_step()
        self._params[index].grad = grad
        step.used[index] = step.sums[index] = 1
        return grad

    def put(self, index: int, grad: Tensor, *, is_reduced: bool) -> None:
        """Set ``.grad`` of a parameter to given values.

        Args:
            index: The index of the parameter.
            grad: This rank's slice of the values.
            is_reduced: The values are reduced, like the gradients of all other parameters.
        """
        if is_reduced:
            local_part(self.publish_one(index)).copy_(grad)
        else:
            self._params[index].grad = like(self._params[index], grad)
            self._gradients.make_step()

    def tensor(self, index: int) -> Tensor:
        """Returns the published tensor of parameter ``index``, even if another tensor is its
        ``.grad``."""
        return self._published()[index]

    def main_grad(self, index: int) -> Tensor:
        """Returns ``main_grad`` of a sharded parameter: its ``.grad``, if there is one, else this
        rank's shard of the accumulated sum, or zeros if nothing is accumulated."""
        param, step = self._params[index], self._gradients.step
        if param.grad is not None:
            return param.grad
        assert isinstance(param, FlatDTensor)
        is_hidden = step is not None and not step.is_published
        local = self._gradients.accumulated(index) if is_hidden else None
        if local is None:
            local = self._gradients.no_gradient(param.local)
        found = FlatDTensor.from_flat_local(local.detach(), param.flat_placement)
        if step is not None and step.full_values is not None:
            found.whole = step.full_values[index]
        return found

    def set_main_grad(self, index: int, value: Tensor) -> None:
        """Copy ``value`` into the tensor that :meth:`main_grad` returns."""
        step = self._gradients.step
        if self._params[index].grad is None and (step is None or step.is_published):
            self.publish_one(index)
        target = self.main_grad(index)
        if value is not target:
            target.copy_(value)

    def publish_full(self, values: Sequence[Tensor] | None) -> None:
        """Provide the full gradients ``values`` on every rank until gradients are cleared. None:
        drop them."""
        self._gradients.make_step().full_values = values
        for index, tensor in enumerate(self._published()):
            assert isinstance(tensor, FlatDTensor)
            tensor.whole = None if values is None else values[index]

    @property
    def has_full(self) -> bool:
        """Whether :meth:`publish_full` has provided full gradients."""
        step = self._gradients.step
        return step is not None and step.full_values is not None

    def was_set(self, is_there: bool) -> None:
        """Called when the user has set one ``.grad`` to None, or (``is_there``) to a tensor.

        When all published gradients are None, the step is dropped. (Cases that this method misses
        are detected when the next backward begins.)
        """
        step = self._gradients.step
        if is_there:
            self._gradients.make_step()
        if is_there or step is None:
            return
        step.num_published -= 1
        if step.num_published == 0 and step.is_published and not step.holds_any:
            found = gradients_of(self._params)
            if not any(map(is_not, found, repeat(None))):
                self._drop_step()

    def scale_kept(self, factor: float | Tensor) -> None:
        """Multiply earlier gradients and penalties by ``factor``."""
        step = self._gradients.step
        for kept in (step.earlier, step.penalties) if step is not None else ():
            for each in kept.values():
                scale_(local_part(each), factor)

    def discard(self, *, zero: bool = False) -> None:
        """Drop the gradients of the step and of a running backward, and set ``.grad`` to None.

        Args:
            zero: Begin the next step with the same memory, which is zeroed.
        """
        gradients, self._found = self._gradients, None
        gradients.writer = None
        clear_gradients(self._params)
        if self.has_full:
            self.publish_full(None)
        if not zero or not gradients.begin_zeroed():
            self._drop_step()
        elif self._reads is not None and self._reads.were_accessed:
            self._reads.were_accessed = gradients.accumulation().are_held

    @property
    def are_cleared(self) -> bool:
        """Whether no gradients are accumulated, or each ``.grad`` is None or was zeroed."""
        step = self._gradients.step
        if step is not None and (not step.is_published or step.holds_any):
            return False
        grads = [grad for grad in gradients_of(self._params) if grad is not None]
        return all(isinstance(grad, FlatDTensor) and grad.zeroed for grad in grads)

    @property
    def are_cleared_or_zeroed(self) -> bool:
        """As :attr:`are_cleared`, but also true if plain tensors were zeroed. If they were edited,
        this reads their values, which is a host sync."""
        cleared = self.are_cleared
        if cleared or not self.is_plain:
            return cleared
        step = self._gradients.step
        if step is None or not step.is_published or step.holds_any:
            return False
        if step.versions and step.versions == self._gradients.accumulation().versions():
            return False  # not edited since the last microbatch
        return not any(bool(grad.any()) for grad in gradients_of(self._params) if grad is not None)

    @property
    def name_of_penalty(self) -> str | None:
        """The name of a parameter with a penalty; None: there is none."""
        step = self._gradients.step
        index = next(iter(step.penalties), None) if step is not None else None
        return None if index is None else self._names[index]

    def _drop_step(self) -> None:
        """Drop the step, whose gradients are all cleared. See [Note: When gradients are held] in
        ``gradient_memory.py``."""
        step, reads = self._gradients.step, self._reads
        if step is None:
            return
        if step.full_values is not None:
            self.publish_full(None)
        if reads is None:
            self._gradients.drop_step()
            return
        reads.wait()
        reads.were_accessed = self._gradients.drop_step(check_resident=reads.were_accessed)

    def _look_at_others(
        self, step: StepGradients, others: Sequence[int], found: Sequence[Tensor | None]
    ) -> None:
        """Process parameters ``others``, whose ``.grad`` is not the published tensor: None clears
        the gradient, another tensor becomes an earlier gradient."""
        for index in others:
            grad = found[index]
            step.sums[index] = 0
            step.used[index] = grad is not None
            _drop_kept(step, index)
            if grad is not None:
                step.earlier[index] = grad

    def _keep_reduced(
        self, step: StepGradients, without: set[int], hooked: Collection[int]
    ) -> None:
        """Keep reduced gradients, so that the next gradients are added to them. They stay in the
        accumulation buffer or, where that is not possible, become earlier gradients.

        Args:
            step: The gradients of the step.
            without: Indices of parameters whose reduced gradients are cleared or replaced.
            hooked: Indices of parameters with hooks on their gradients.
        """
        is_inexact, published = self._gradients.is_inexact, self._published()
        kept = [
            index
            for index in (range(len(published)) if is_inexact else hooked)
            if index not in without
        ]
        for index in kept:
            _keep(step.earlier, index, local_part(published[index]).clone())
        if len(without) + len(kept) < len(published):
            self._gradients.resume()
        for index in kept:
            step.sums[index] = 0

    def _add(self, kept: dict[int, Tensor]) -> None:
        for index, grad in kept.items():
            local_part(self._published()[index]).add_(local_part(grad))
        kept.clear()

    def _clear_or_raise(self, step: StepGradients, index: int, grad: Tensor) -> None:
        """Handle ``grad``, which was changed between microbatches: clear the sum if a plain tensor
        was zeroed, else raise RuntimeError."""
        if isinstance(grad, FlatDTensor) or bool(grad.any()):
            raise RuntimeError(
                f"backward: expected .grad of {self._names[index]} to be left alone, or cleared by "
                "zero_grad(), between microbatches of no_sync(); found it changed. It is not "
                "reduced yet: change it after the backward of the last microbatch"
            )
        step.sums[index] = 0

    def _published(self) -> list[Tensor]:
        """Returns the published tensor of each parameter, whether it is ``.grad`` or not."""
        gradients = self._gradients
        return gradients.accumulation().publish(self._params, gradients.optim_depth)


def _true_indices(flags: Iterable[bool]) -> list[int]:
    """Returns the indices of flags that are True."""
    return [place for place, flag in enumerate(flags) if flag]


def _keep(kept: dict[int, Tensor], index: int, grad: Tensor) -> None:
    """Add ``grad`` to the gradient of parameter ``index`` in ``kept``."""
    known = kept.get(index)
    kept[index] = grad if known is None else local_part(known) + local_part(grad)


def _drop_kept(step: StepGradients, index: int) -> None:
    step.earlier.pop(index, None)
    step.penalties.pop(index, None)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of ``tensor`` as a plain tensor."""
    if isinstance(tensor, FlatDTensor):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
