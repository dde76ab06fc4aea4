"""The memory that one buffer's gradients pass through.

    line      whole gradients, as autograd leaves them: staged, or what accumulates itself
    accum     what accumulates, at the depth of GRAD
    wire      a copy of it in the dtype that travels last, where that is another one
    handed    the optimizer's part in its own dtype, where that is another one

[Note: When gradients are held]
What accumulates gets its memory with the first reduction of the unit after gradients were cleared
(with the first gradient written, where gradients are whole), and loses it when all of them are
cleared by ``zero_grad()`` or ``.grad = None``. All tensors over it are made once, over storages
whose memory comes and goes ([Note: Transient storage] in ``devices/memory.py``). The memory is not
kept idle meanwhile: from one backward to the next the allocator has better use for it.

Whoever still holds a gradient, or anything over its memory, when it is cleared keeps it as it is:
then memory and tensors are left to him, and new ones are made (``gradient_views.py``).

It stays for good where nothing is cut, since ``main_grad`` is a buffer that lasts in Megatron-Core,
and users of ``no_shard`` have memory for it; where ``main_grad`` is given out; with
``fsdp_double_buffer``, since steady steps allocate nothing then; and in memory that is registered
with NCCL, which all ranks would have to do at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_engine.buffers.redistribute import Machinery
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.devices.memory import TransientStorage, alias

# Bytes that are zeroed in about the time that one more call takes.
_WORTH_A_CALL = 4096


class GradientMemory:
    """See the module docstring.

    Args:
        spec, machinery: of the buffer.
        has_wire: what is reduced last travels in a copy.

    Attributes:
        staging: the memory of the line, if it comes and goes.
        wire: that of the copy that travels.
        accum: None before gradients first appear.
        line, sent: the lines in ``staging`` (else in ``accum``) and in ``wire``.
        handed: see the module docstring.
        views: each tensor's place in the line.
    """

    def __init__(self, spec: BufferSpec, machinery: Machinery, *, has_wire: bool) -> None:
        self._spec = spec
        self._machinery = machinery
        dtypes, memory = spec.kind.dtypes, machinery.memory
        self.staging: TransientStorage | None = None
        if spec.grad_depth > 0:
            self.staging = memory.transient(spec.layout.numel, dtypes.comm, "staging")
        self.wire: TransientStorage | None = None
        if has_wire:
            self.wire = memory.transient(self._numel(spec.grad_depth), dtypes.comm, "staging")
        self.accum: ShardedBuffer | None = None
        self.line: ShardedBuffer | None = None
        self.sent: ShardedBuffer | None = None
        self.handed: ShardedBuffer | None = None
        self.views: list[Tensor] = []
        # There are so many gaps that all of the line is zeroed beforehand instead.
        self._zeroes_line = False
        self._scratch: Tensor | None = None
        # Those of the staged line, else of what accumulates.
        self._gaps: list[Tensor] = []
        # What comes and goes with steps: accum and handed; none where they stay for good.
        self._lasting: list[TransientStorage] = []

    @property
    def rest_bytes(self) -> int:
        """Bytes of what accumulates, and of what the optimizer gets in another dtype."""
        spec, dtypes = self._spec, self._spec.kind.dtypes
        kept = self._numel(spec.grad_depth) * dtypes.main_grad.itemsize
        if dtypes.optim_grad != dtypes.main_grad:
            kept += self._numel(spec.optim_depth) * dtypes.optim_grad.itemsize
        return kept

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staged line and of the copy in the wire's dtype, while they are there."""
        return sum(each.num_bytes for each in (self.staging, self.wire) if each is not None)

    @property
    def filled(self) -> bool:
        """Whether what accumulates has memory."""
        return self.accum is not None and all(each.filled for each in self._lasting)

    @property
    def num_uses(self) -> int:
        """Holds on what accumulates: grows with each tensor over it that somebody keeps."""
        return sum(each.num_uses for each in self._lasting)

    @contextmanager
    def made(self) -> Iterator[ShardedBuffer]:
        """What accumulates, with all tensors over this memory; all of it is there meanwhile."""
        spec, dtypes, layout = self._spec, self._spec.kind.dtypes, self._spec.layout
        sums_wide = dtypes.reduce != dtypes.comm
        sent = self.staging is not None or self.wire is None or sums_wide
        transient = [each for each in (self.staging, self.wire) if each is not None]
        for storage in transient:
            storage.fill()
        accum = self.accum = self._make_lasting(spec.grad_depth, dtypes.main_grad, sent=sent)
        self.line = accum
        if dtypes.optim_grad != dtypes.main_grad:
            self.handed = self._make_lasting(spec.optim_depth, dtypes.optim_grad, sent=False)
        if self.staging is not None:
            self.line = self._over(self.staging, 0)
            self.views = [self.staging.view(slot.offset, slot.shape) for slot in layout.slots]
        else:
            self.views = [accum.full(i) for i in range(len(layout.slots))]
        self._gaps = [alias(self.line.tensor[start:stop]) for start, stop in layout.gaps]
        num_bytes = self.line.tensor.nbytes
        self._zeroes_line = num_bytes < len(self._gaps) * _WORTH_A_CALL
        if self.wire is not None:
            self.sent = self._over(self.wire, spec.grad_depth)
        yield accum
        for storage in (*transient, *self._lasting):
            storage.drain()

    def fill(self, *, zero: bool = False) -> None:
        """What accumulates is about to be written; ``zero``: or looked at as it is."""
        if self.filled:
            return
        assert self.accum is not None
        compute, label = self._machinery.lanes.compute, self._spec.label
        for storage in self._lasting:
            compute.manage(f"allocate gradients of {label}", storage.fill, storage)
        if zero or (self._zeroes_line and self.staging is None):
            self.accum.tensor.zero_()
        elif self.staging is None:
            self.zero_gaps()

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """What accumulates whole, as a line of a narrower ``dtype``: the same tensor each time."""
        assert self.accum is not None
        if self._scratch is None:
            self._scratch = alias(self.accum.tensor.view(dtype)[: self._spec.layout.numel])
        return self._scratch

    def free(self) -> None:
        """What was accumulated is cleared, and compute is done with it."""
        compute, label = self._machinery.lanes.compute, self._spec.label
        for storage in self._lasting:
            if storage.filled:
                compute.manage(f"free gradients of {label}", storage.drain, storage)

    def leave(self) -> None:
        """What was accumulated is cleared, but somebody keeps it: to be made anew."""
        for storage in self._lasting:
            storage.leave()
        self._lasting = []
        self.accum = self.line = self.sent = self.handed = None
        self.views, self._gaps, self._scratch = [], [], None

    def fill_staging(self) -> None:
        """The line is about to be written."""
        if self.staging is None:
            return
        compute, label = self._machinery.lanes.compute, self._spec.label
        compute.manage(f"allocate staging of {label}", self.staging.fill, self.staging)
        if self._zeroes_line and self.line is not None:
            self.line.tensor.zero_()

    def fill_wire(self) -> bool:
        """What is reduced last is about to travel; whether memory had to come for it."""
        if self.wire is None:
            return False
        compute, label = self._machinery.lanes.compute, self._spec.label
        compute.manage(f"allocate wire of {label}", self.wire.fill, self.wire)
        return True

    def zero_gaps(self) -> None:
        """Padding of the line is reduced with the rest and must not bring in what lay there."""
        if self._gaps and not self._zeroes_line:
            torch._foreach_zero_(self._gaps)

    def drain(self) -> None:
        """Hand transient memory back; compute is done with it."""
        compute, label = self._machinery.lanes.compute, self._spec.label
        for storage in (self.staging, self.wire):
            if storage is not None and storage.filled:
                compute.manage(f"free staging of {label}", storage.drain, storage)

    def _over(self, storage: TransientStorage, depth: int) -> ShardedBuffer:
        return self._buffer(depth, storage.view(0, (storage.numel,)))

    def _make_lasting(self, depth: int, dtype: torch.dtype, *, sent: bool) -> ShardedBuffer:
        memory, numel = self._machinery.memory, self._numel(depth)
        if memory.has_pool:
            return self._buffer(depth, memory.persistent(numel, dtype, "grad", sent=sent))
        storage = memory.lasting(numel, dtype, "grad")
        self._lasting.append(storage)
        storage.fill()
        return self._over(storage, depth)

    def _buffer(self, depth: int, flat: Tensor) -> ShardedBuffer:
        return ShardedBuffer(self._spec.layout, self._machinery.ladder.mesh.coordinate, depth, flat)

    def _numel(self, depth: int) -> int:
        start, stop = self._spec.layout.range(depth, self._machinery.ladder.mesh.coordinate)
        return stop - start
