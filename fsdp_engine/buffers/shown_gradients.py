"""The ``.grad`` that users see of one buffer's parameters, and what they do to it.

[Note: What became of gradients]
Between two backwards ``.grad`` is the user's, and the next backward asks what became of it:

    None                     cleared: the next gradient overwrites
    zeroed                   the same, but in the end there are zeros at least, as one process has
    as it was, or edited     kept: the next gradient is added
    another tensor           taken in its place

Edits count where the gradient is reduced. Between microbatches of ``no_sync()`` a rank's ``.grad``
is a part of what is summed later, and an edit of it would not be one of the whole: it raises. A
plain tensor does not tell that it was zeroed; it is kept, and zeros are added to.

Reduced gradients that must not be reduced once more are held beside the buffer until its reduction
is done, and are added then:

- *earlier* gradients: those that users put into ``.grad``; those that a ``comm_dtype`` of low
  precision would round once more ([Note: Reducing again] in ``reducing_again.py``); those of
  parameters with hooks, which autograd runs on the new gradient alone. They are added after the
  hooks have run.
- *penalties*: gradients that autograd accumulates into a sharded parameter itself, since a penalty
  on the parameters was part of the loss. A penalty's gradient is that of the slice, alike on all
  ranks that hold it. They are part of the new gradient and are added before the hooks run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from operator import is_, is_not, ne, or_

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradient_views import GradientViews, like
from fsdp_engine.buffers.gradients import Gradients, zeros_in
from fsdp_engine.flat_dtensor import FlatDTensor, clear_gradients, gradients_of, set_gradients
from fsdp_engine.flat_dtensor.parameter_access import GradientAccess


class ShownGradients:
    """See the module docstring.

    What is looked at in every backward is looked at by passes in C, and by Python only where it is
    out of the ordinary: parameters may be many, and small.

    Args:
        params: what users see.
        names: of them.
        gradients: where they are.
        reads: what users look at; None: they see the full parameters, plain tensors.

    Attributes:
        used: per parameter, 1: a gradient came on this rank since gradients were last cleared.
        are_hidden: something is accumulated that nobody has seen yet.
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
        self.used = bytearray(len(params))
        self.are_hidden = False
        self._made_views: GradientViews | None = None
        # How many users have not made None yet; seen of sharded parameters only.
        self._num_shown = 0
        self._earlier: dict[int, Tensor] = {}
        self._penalties: dict[int, Tensor] = {}
        # Parameters that autograd accumulates into by itself in this backward.
        self._own: set[int] = set()
        # As a backward began: of which ``.grad`` went away; whether all of it was what is shown,
        # and stays.
        self._taken: Sequence[int] = ()
        self._stand = False
        # ``.grad`` of all is known to be None.
        self._is_clear = False
        # Of the views, between microbatches.
        self._versions: list[int] = []
        self._whole: Sequence[Tensor] | None = None

    def begin_backward(self, *, reduced: bool, hooked: Collection[int] = ()) -> None:
        """See [Note: What became of gradients].

        Args:
            reduced: gradients are reduced. False: microbatches are accumulated, or nothing is.
            hooked: parameters with hooks on their gradients.

        Raises:
            RuntimeError: one was edited between microbatches; names the parameter.
        """
        self.are_hidden = True
        self._taken = ()
        self._stand = False
        if self._whole is not None:
            self.show_whole(None)
        if self._is_clear:
            return
        found = gradients_of(self._params)
        if not any(map(is_not, found, repeat(None))):
            self._forget()
            return
        views = self._views()
        shown, versions = views.tensors, views.versions()
        others = [] if all(map(is_, found, shown)) else _places(map(is_not, found, shown))
        if reduced:
            self.used[:] = b"\1" * len(self.used)
        self._look_at_others(others, found)
        cleared = set(views.zeroed(found))
        for index in sorted(cleared):
            self._gradients.clear(index)
            self._drop_held(index)
        if not reduced and self._versions and versions != self._versions:
            for index in _places(map(ne, versions, self._versions)):
                if found[index] is shown[index] and index not in cleared:
                    self._clear_or_raise(index, shown[index])
        self._versions = versions
        self._stand = not others and not self._is_plain
        if self._is_plain:  # autograd would add to it in place, unscaled
            self._taken = _places(map(is_not, found, repeat(None))) if others else range(len(found))
        else:
            self._taken = [index for index in others if found[index] is not None]
        if self._taken:
            clear_gradients([self._params[index] for index in self._taken])
        if reduced and len(others) + len(cleared) < len(found):
            self._keep_reduced(views, cleared.union(others), hooked)

    def make_way(self, index: int) -> None:
        """Autograd is about to accumulate into a sharded parameter itself."""
        if not self._is_plain and index not in self._own:
            self._own.add(index)
            self._params[index].grad = None
            self._is_clear = self._stand = False

    def end_backward(self) -> None:
        """Backward is over: hold what autograd has accumulated into the parameters as penalties.

        Raises:
            RuntimeError: it is no gradient of this rank's slice; names the parameter.
        """
        if not self._own:
            return
        views = self._views()
        for index in sorted(self._own):
            param = self._params[index]
            if (grad := gradients_of([param])[0]) is not None:
                if local_part(grad).shape != local_part(views.tensors[index]).shape:
                    raise RuntimeError(
                        f"backward: expected a gradient of this rank's slice of "
                        f"{self._names[index]}; found one of shape {tuple(grad.shape)}: a function "
                        "of your own (autograd.Function) was given the sharded parameter. Give it "
                        "to the function in the first forward, too, or leave its module to the "
                        "root (units= names the blocks alone)"
                    )
                _hold(self._penalties, index, grad)
                self.used[index] = 1
                param.grad = views.tensors[index]
        self._own.clear()
        self._versions = views.versions()

    def note_used(self) -> None:
        """Before a reduction: which parameters got a gradient in this backward."""
        touched = self._gradients.touched
        if self._gradients.num_touched == len(touched):
            self.used[:] = touched
        elif self._gradients.num_touched:
            self.used[:] = bytes(map(or_, self.used, touched))

    def publish(self, used: Sequence[int], *, reduced: bool) -> None:
        """Make ``.grad`` of the parameters that were used what was accumulated.

        Args:
            used: of each parameter, whether any rank had a gradient.
            reduced: all is reduced: penalties are added to it.
        """
        self.are_hidden = False
        self._is_clear = False
        views = self._views()
        wanted: list[Tensor | None] = [*views.tensors]
        self._num_shown = len(wanted)
        if not all(used):
            found = gradients_of(self._params)
            for index in zeros_in(bytes(used)):
                # One from an earlier microbatch goes, what users have put there stays.
                wanted[index] = None if found[index] is wanted[index] else found[index]
                self._num_shown -= wanted[index] is None
        if not self._stand or not all(used):
            set_gradients(self._params, wanted)
        if reduced:
            self._add(self._penalties)
        # Between microbatches users may clear gradients, but not edit them.
        self._versions = [] if reduced else views.versions()

    def add_earlier(self) -> None:
        """Add earlier gradients to the published ones, on which hooks have run."""
        self._add(self._earlier)
        if self._versions:
            self._versions = self._views().versions()

    def put_back(self) -> None:
        """Nothing came in this microbatch: what was shown before it is shown again."""
        self.are_hidden = False
        if self._taken:
            shown = self._views().tensors
            params = [self._params[index] for index in self._taken]
            set_gradients(params, [shown[index] for index in self._taken])

    def publish_one(self, index: int) -> Tensor:
        """Make ``.grad`` of one parameter its place among the gradients, which the caller fills.

        For a gradient that came about outside backward; the next backward adds to it.
        """
        self._gradients.main_grads()
        if self._reads is not None:
            self._reads.wait()
        view = self._views().tensors[index]
        self._params[index].grad = view
        self.used[index] = 1
        self._gradients.keep(index)
        return view

    def put(self, index: int, grad: Tensor, *, is_reduced: bool) -> None:
        """Make ``.grad`` of one parameter ``grad``, this rank's part of it.

        Args:
            is_reduced: it is, as those of all others are.
        """
        if is_reduced:
            local_part(self.publish_one(index)).copy_(grad)
        else:
            self._params[index].grad = like(self._params[index], grad)
            self._is_clear = False

    def view(self, index: int) -> Tensor:
        """What ``.grad`` of parameter ``index`` is where there is one."""
        return self._views().tensors[index]

    def main_grad(self, index: int) -> Tensor:
        """What is accumulated of a sharded parameter, as far as this rank has it: its ``.grad``, if
        there is one; zeros, if nothing is accumulated."""
        param = self._params[index]
        if param.grad is not None:
            return param.grad
        assert isinstance(param, FlatDTensor)
        local = self._gradients.accumulated(index) if self.are_hidden else None
        if local is None:
            local = self._gradients.no_gradient(param.local)
        found = FlatDTensor.from_flat_local(local.detach(), param.flat_placement)
        if self._whole is not None:
            found.whole = self._whole[index]
        return found

    def set_main_grad(self, index: int, value: Tensor) -> None:
        """Copy ``value`` into what :meth:`main_grad` returns."""
        if self._params[index].grad is None and not self.are_hidden:
            self.publish_one(index)
        target = self.main_grad(index)
        if value is not target:
            target.copy_(value)

    def show_whole(self, values: Sequence[Tensor] | None) -> None:
        """Every rank has gradients whole: ``values``, until they are cleared. None: no longer."""
        self._whole = values
        for index, view in enumerate(self._views().tensors):
            assert isinstance(view, FlatDTensor)
            view.whole = None if values is None else values[index]

    @property
    def has_whole(self) -> bool:
        """Whether :meth:`show_whole` has shown any."""
        return self._whole is not None

    def was_set(self, is_there: bool) -> None:
        """Somebody has made one gradient None, or (``is_there``) another one.

        With the last one the memory goes. (If it is not seen to be the last one, the next backward
        sees it.)
        """
        if is_there:
            self._is_clear = False
            return
        self._num_shown -= 1
        if self._num_shown == 0 and not self.are_hidden and not self._holds_any:
            found = gradients_of(self._params)
            if not any(map(is_not, found, repeat(None))):
                self._forget()

    def scale_held(self, factor: float | Tensor) -> None:
        """Multiply earlier gradients and penalties."""
        for held in (*self._earlier.values(), *self._penalties.values()):
            local = local_part(held)
            local.mul_(factor.to(local.dtype) if isinstance(factor, Tensor) else factor)

    def discard(self, *, keeps_memory: bool = False) -> None:
        """Forget what was accumulated; ``.grad`` becomes None.

        Args:
            keeps_memory: also where it may go.
        """
        self.are_hidden = False
        self._own.clear()
        self._taken = ()
        self._gradients.discard()
        clear_gradients(self._params)
        self._forget(keeps_memory=keeps_memory)

    @property
    def _is_plain(self) -> bool:
        return self._reads is None

    @property
    def are_cleared(self) -> bool:
        """Nothing is accumulated, or ``.grad`` of all is None or was zeroed since."""
        if self.are_hidden or self._holds_any:
            return False
        shown = [grad for grad in gradients_of(self._params) if grad is not None]
        return all(isinstance(grad, FlatDTensor) and grad.zeroed for grad in shown)

    def _forget(self, *, keeps_memory: bool = False) -> None:
        """All is cleared. See [Note: When gradients are held] in ``gradient_memory.py``."""
        if self._whole is not None:
            self.show_whole(None)
        self._gradients.clear_all()
        self.used[:] = bytes(len(self.used))
        self._num_shown = 0
        # Of plain parameters nobody tells when there is one again.
        self._is_clear = not self._is_plain
        self._earlier.clear()
        self._penalties.clear()
        self._versions = []
        if self._made_views is not None:
            self._made_views.forget_zeroed()
        goes = self._gradients.may_go and not keeps_memory
        were_accessed = self._reads is not None and self._reads.were_accessed
        if not (goes or were_accessed):
            return
        are_held = self._made_views is not None and self._made_views.are_held()
        if goes:
            if self._reads is not None:
                self._reads.wait()
            self._gradients.let_go(are_held=are_held)
            if are_held:
                self._made_views = None
        if self._reads is not None:
            self._reads.were_accessed = are_held and not goes

    def _look_at_others(self, others: Sequence[int], found: Sequence[Tensor | None]) -> None:
        """Of ``others`` ``.grad`` is not what was shown."""
        for index in others:
            self._gradients.clear(index)
            grad = found[index]
            self.used[index] = grad is not None
            self._drop_held(index)
            if grad is not None:
                self._earlier[index] = grad

    def _keep_reduced(
        self, views: GradientViews, without: set[int], hooked: Collection[int]
    ) -> None:
        """What is reduced, but for what is cleared, is to be added to."""
        rounds_again = self._gradients.rounds_again
        held = [
            index
            for index in (range(len(views.tensors)) if rounds_again else hooked)
            if index not in without
        ]
        for index in held:
            _hold(self._earlier, index, views.local(index).clone())
        if len(without) + len(held) < len(views.tensors):
            self._gradients.resume()
        for index in held:
            self._gradients.clear(index)

    def _add(self, held: dict[int, Tensor]) -> None:
        for index, grad in held.items():
            self._views().local(index).add_(local_part(grad))
        held.clear()

    def _drop_held(self, index: int) -> None:
        self._earlier.pop(index, None)
        self._penalties.pop(index, None)

    @property
    def _holds_any(self) -> bool:
        return bool(self._earlier or self._penalties)

    def _clear_or_raise(self, index: int, grad: Tensor) -> None:
        """``grad`` was changed since microbatches were accumulated in it."""
        if isinstance(grad, FlatDTensor) or bool(grad.any()):
            raise RuntimeError(
                f"backward: expected .grad of {self._names[index]} to be left alone, or cleared by "
                "zero_grad(), between microbatches of no_sync(); found it changed. It is not "
                "reduced yet: change it after the backward of the last microbatch"
            )
        self._gradients.clear(index)

    def _views(self) -> GradientViews:
        """What ``.grad`` is: this rank's part of the reduced gradients, by parameter."""
        if self._made_views is None:
            self._made_views = GradientViews(self._gradients, self._params)
        return self._made_views


def _places(flags: Iterable[bool]) -> list[int]:
    """Of those that are set."""
    return [place for place, flag in enumerate(flags) if flag]


def _hold(held: dict[int, Tensor], index: int, grad: Tensor) -> None:
    """Add ``grad`` to what is held of parameter ``index``."""
    known = held.get(index)
    held[index] = grad if known is None else local_part(known) + local_part(grad)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    if isinstance(tensor, FlatDTensor):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
