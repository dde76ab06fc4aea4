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

What is reduced already and cannot lie among what travels is held *apart* until all is reduced, and
added then: what users put into ``.grad``; what autograd accumulates into a sharded parameter itself
(a penalty on the parameters, say: its gradient is that of the slice, alike on all that hold it);
and what a wire of low precision would round once more ([Note: Reducing again] in
``reducing_again.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsdp_engine.buffers.gradients import Gradients
from fsdp_engine.devices.memory import alias
from fsdp_engine.flat_dtensor import FlatDTensor, gradients_of, set_gradients


class ShownGradients:
    """See the module docstring.

    Args:
        params: what users see.
        names: of them.
        gradients: where they are.
        optim_depth: the part of them that users see.
        is_plain: users see the full parameters, plain tensors.

    Attributes:
        used: per parameter: a gradient came on this rank since gradients were last cleared.
        are_hidden: something is accumulated that nobody has seen yet.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        gradients: Gradients,
        optim_depth: int,
        *,
        is_plain: bool,
    ) -> None:
        self._params = params
        self._names = names
        self._gradients = gradients
        self._optim_depth = optim_depth
        self._is_plain = is_plain
        self.used = [False] * len(params)
        self.are_hidden = False
        self._made_views: list[Tensor] = []
        self._apart: dict[int, Tensor] = {}
        # Parameters that autograd accumulates into by itself in this backward.
        self._own: set[int] = set()
        self._taken: list[int] = []  # ``.grad`` went away as a backward began
        # Of the views, when they were last shown or looked at between microbatches.
        self._versions: list[int] = []

    def begin_backward(self, *, reduced: bool) -> None:
        """See [Note: What became of gradients].

        Args:
            reduced: gradients are reduced. False: microbatches are accumulated, or nothing is.

        Raises:
            RuntimeError: one was edited between microbatches; names the parameter.
        """
        self.are_hidden = True
        found = gradients_of(self._params)
        if not any(grad is not None for grad in found):  # most steps, most cheaply
            self._gradients.clear_all()
            self.used = [False] * len(found)
            self._apart.clear()
            self._taken, self._versions = [], []
            return
        clear, used, views = self._gradients.clear, self.used, self._views()
        kept, taken = [], []
        for index, grad in enumerate(found):
            if grad is None:
                clear(index)
                used[index] = False
                self._apart.pop(index, None)
                continue
            if grad is not views[index]:
                self._apart[index] = grad
                clear(index)
                used[index] = True
                taken.append(index)
            elif isinstance(grad, FlatDTensor) and grad.zeroed:
                grad.zeroed = False
                clear(index)
                # Between microbatches nobody knows yet who has a gradient.
                used[index] = used[index] or reduced
                self._apart.pop(index, None)
            elif reduced:
                used[index] = True
                kept.append(index)
            elif self._versions and _local(grad)._version != self._versions[index]:
                self._clear_or_raise(index, grad)
            if self._is_plain:
                taken.append(index)  # autograd would add to it in place, unscaled
        self._taken = taken
        if taken:
            set_gradients([(self._params[index], None) for index in taken])
        if kept and self._gradients.rounds_again:
            for index in kept:
                self._apart[index] = _local(views[index]).clone()
                clear(index)
        elif kept:
            self._gradients.resume()
        self._versions = [_local(view)._version for view in views]

    def make_way(self, index: int) -> None:
        """Autograd is about to accumulate into a sharded parameter itself."""
        if not self._is_plain and index not in self._own:
            self._own.add(index)
            self._params[index].grad = None

    def end_backward(self) -> None:
        """Backward is over: what autograd has accumulated by itself is apart."""
        if not self._own:
            return
        views = self._views()
        for index in self._own:
            param = self._params[index]
            if (grad := param.grad) is not None:
                known = self._apart.get(index)
                self._apart[index] = grad if known is None else _local(known) + _local(grad)
                self.used[index] = True
                param.grad = views[index]
        self._own.clear()
        self._note_versions()

    def note_used(self) -> None:
        """Before a reduction: which parameters got a gradient in this backward."""
        if self._gradients.num_touched == len(self.used):
            self.used = [True] * len(self.used)
        else:
            touched = self._gradients.touched
            self.used = [a or bool(b) for a, b in zip(self.used, touched, strict=True)]

    def publish(self, used: Sequence[bool], *, reduced: bool) -> None:
        """Make ``.grad`` of the parameters that were used what was accumulated.

        Args:
            used: of each parameter, whether any rank had a gradient.
            reduced: all is reduced: what is apart joins it.
        """
        self.are_hidden = False
        views, params = self._views(), self._params
        changes: list[tuple[Tensor, Tensor | None]] = []
        for param, grad, view, has_grad in zip(
            params, gradients_of(params), views, used, strict=True
        ):
            if not has_grad:
                if grad is view:  # from an earlier microbatch
                    changes.append((param, None))
            elif grad is not view:
                changes.append((param, view))
        set_gradients(changes)
        if not reduced:
            self._note_versions()
        elif self._apart:
            for index, apart in self._apart.items():
                _local(views[index]).add_(_local(apart))
            self._apart.clear()

    def put_back(self) -> None:
        """Nothing came in this microbatch: what was shown before it is shown again."""
        self.are_hidden = False
        if self._taken:
            views = self._views()
            set_gradients([(self._params[index], views[index]) for index in self._taken])

    def publish_one(self, index: int) -> Tensor:
        """Make ``.grad`` of one parameter its place among the gradients, which the caller fills.

        For a gradient that came about outside backward; the next backward adds to it.
        """
        view = self._views()[index]
        self._params[index].grad = view
        self.used[index] = True
        self._gradients.keep(index)
        return view

    def scale_apart(self, factor: float | Tensor) -> None:
        """Multiply what is apart."""
        for apart in self._apart.values():
            local = _local(apart)
            local.mul_(factor.to(local.dtype) if isinstance(factor, Tensor) else factor)

    def discard(self) -> None:
        """Forget what was accumulated; ``.grad`` becomes None."""
        self.are_hidden = False
        self._apart.clear()
        self._own.clear()
        self._versions = []
        self._taken = []
        self.used = [False] * len(self.used)
        self._gradients.discard()
        set_gradients([(param, None) for param in self._params])

    @property
    def are_cleared(self) -> bool:
        """Nothing is accumulated, or ``.grad`` of all is None or was zeroed since."""
        if self.are_hidden or self._apart:
            return False
        shown = (grad for grad in gradients_of(self._params) if grad is not None)
        return all(isinstance(grad, FlatDTensor) and grad.zeroed for grad in shown)

    def _clear_or_raise(self, index: int, grad: Tensor) -> None:
        """``grad`` was changed since microbatches were accumulated in it."""
        if isinstance(grad, FlatDTensor) or bool(grad.any()):
            raise RuntimeError(
                f"backward: expected .grad of {self._names[index]} to be left alone, or cleared by "
                "zero_grad(), between microbatches of no_sync(); found it changed. It is not "
                "reduced yet: change it after the backward of the last microbatch"
            )
        self._gradients.clear(index)

    def _note_versions(self) -> None:
        self._versions = [_local(view)._version for view in self._made_views]

    def _views(self) -> list[Tensor]:
        """What ``.grad`` is: this rank's part of the reduced gradients, by parameter."""
        if not self._made_views:
            main = self._gradients.for_optimizer()
            # Each with a version counter of its own, which counts users' changes only.
            if self._is_plain:
                self._made_views = [alias(main.full(i)) for i in range(len(self._params))]
            else:
                locals_ = (main.local(i, self._optim_depth) for i in range(len(self._params)))
                self._made_views = [
                    FlatDTensor.from_flat_local(alias(local), param.flat_placement)
                    for local, param in zip(locals_, self._params, strict=True)
                    if isinstance(param, FlatDTensor)
                ]
        return self._made_views


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, FlatDTensor) else tensor
