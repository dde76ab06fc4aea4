"""Where autograd accumulates gradients of one buffer's parameters, and who is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from fsdp_engine.buffers.published_gradients import PublishedGradients
from fsdp_engine.flat_dtensor import accumulator_of


class GradientHooks:
    """Autograd's hooks on one buffer's parameters.

    Autograd's hold on a hook is invisible to the garbage collector: a hook that held the buffer,
    and so the parameter, would keep all of them for ever. So hooks hold this object weakly.

    Args:
        published: ``.grad`` of what users hold.
        sharded_params: what users hold.
        on_grad: called as ``on_grad(index, parameter)`` whenever autograd has accumulated a
            gradient into a full parameter.
        begin: called before it accumulates into what users hold.
    """

    def __init__(
        self,
        published: PublishedGradients,
        sharded_params: Sequence[Tensor],
        on_grad: Callable[[int, Tensor], None],
        begin: Callable[[], object],
    ) -> None:
        self._on_grad = on_grad
        self._begin = begin
        self.follow(published, sharded_params)

    def follow(self, published: PublishedGradients, sharded_params: Sequence[Tensor]) -> None:
        """What users hold has another dtype, and so other accumulators; or is looked at first."""
        self._published = published
        # Autograd would add to `.grad` in place, unscaled.
        self._accumulators = [accumulator_of(param) for param in sharded_params]
        for index, node in enumerate(self._accumulators):
            node.register_prehook(self._precede(index))

    def renew(self, sharded_params: Sequence[Tensor]) -> None:
        """Another stream is current: the accumulators become new ones, which belong to it."""
        self._accumulators = []
        self.follow(self._published, sharded_params)

    def listen(self, full_params: Sequence[Tensor], own: dict[int, int] | None) -> None:
        """Put hooks on the full parameters; their ids go into ``own``, by index, if given."""
        listener = weakref.ref(self._on_grad)

        def listen(index: int) -> Callable[[Tensor], None]:
            def hook(param: Tensor) -> None:
                listening = listener()
                if listening is not None:
                    listening(index, param)

            return hook

        for index, param in enumerate(full_params):
            handle = param.register_post_accumulate_grad_hook(listen(index))
            if own is not None:
                own[index] = handle.id

    def came(self, index: int, full_param: Tensor) -> None:
        """``.grad`` of a full parameter is there, which autograd has not accumulated itself."""
        self._on_grad(index, full_param)

    def _precede(self, index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        hooks = weakref.ref(self)

        def hook(grads: tuple[Tensor | None, ...]) -> None:
            preceding = hooks()
            if preceding is not None and grads[0] is not None:
                preceding._begin()
                preceding._published.detach_for_autograd(index)

        return hook
