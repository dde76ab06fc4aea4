"""A step as a list of events: when collectives are submitted, among calls of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.buffers.gradients import Gradients, GradientWriter
from fsdp_engine.comm.host_lane import HostLane

_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
PHASES = ("zero", "sync", "forward", "backward", "finish", "optimizer")


class Timeline:
    """Records what happens within ``recording``, in order.

    Attributes:
        events: (phase, text). The text is ``call NAME`` for a module's forward, ``gradient of
            LABEL`` or ``COLLECTIVE of LABEL``, with ``+outer`` at the end along the outer axis.
        phase: the current phase of the user's loop.
    """

    def __init__(self, model: nn.Module | None = None, *, gradients: bool = False) -> None:
        self.events: list[tuple[str, str]] = []
        self.phase = ""
        self._gradients = gradients
        for name, module in model.named_modules() if model is not None else ():
            if name and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(self._called, name))

    def _called(self, name: str, module: nn.Module, args: Any) -> None:
        self.events.append((self.phase, f"call {name}"))

    def in_phase(self, phase: str) -> list[str]:
        """What happened in one phase."""
        return [what for each, what in self.events if each == phase]

    def phases(self, what: str) -> set[str]:
        """Phases with collectives whose text begins with ``what``."""
        return {phase for phase, each in self.events if each.startswith(what)}

    @contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Clear the events, and record new ones within the block."""
        self.events.clear()
        submit, write = HostLane.submit, GradientWriter.write
        begin, labels = Gradients.begin, {}

        def submitted(lane: Any, label: str, *args: Any, **kwargs: Any) -> Any:
            if label.startswith(_COLLECTIVES):
                what, _, axis = label.removesuffix(" axis").partition(" over the ")
                self.events.append((self.phase, what + ("+outer" if axis == "outer" else "")))
            return submit(lane, label, *args, **kwargs)

        def begun(gradients: Any) -> None:
            begin(gradients)
            labels[id(gradients.writer)] = gradients._spec.label

        def written(writer: Any, index: int, grad: Any) -> bool:
            self.events.append((self.phase, f"gradient of {labels[id(writer)]}"))
            return write(writer, index, grad)

        HostLane.submit = submitted  # type: ignore[method-assign]
        if self._gradients:
            Gradients.begin = begun  # type: ignore[method-assign]
            GradientWriter.write = written  # type: ignore[method-assign]
        try:
            yield self
        finally:
            HostLane.submit = submit  # type: ignore[method-assign]
            Gradients.begin = begin  # type: ignore[method-assign]
            GradientWriter.write = write  # type: ignore[method-assign]


def timed_step(
    ddp: fe.DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    timeline: Timeline,
    *batches: Any,
    param_sync: bool = False,
    zero_buffer: bool = True,
) -> None:
    """Run a step of the wrapper's loop, phase by phase; ``batches`` are its microbatches.

    Args:
        param_sync: call ``start_param_sync`` before the first forward.
    """
    with timeline.recording():
        timeline.phase = "zero"
        ddp.zero_grad_buffer(zero_buffer)
        if param_sync:
            timeline.phase = "sync"
            ddp.start_param_sync()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else ddp.no_sync():
                timeline.phase = "forward"
                loss = ddp(*batch) / len(batches)
                timeline.phase = "backward"
                loss.backward()
        timeline.phase = "finish"
        ddp.finish_grad_sync()
        timeline.phase = "optimizer"
        optimizer.step()
