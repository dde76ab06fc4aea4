"""This rank's shard of the main weights, and how gathers read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fsdp_engine.buffers.redistribute import BufferContext, Gather, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.memory.allocator import TransientStorage


class MainShard:
    """A seam. Here the shard is in the memory of the device.

    Args:
        spec, context: those of the buffer.
        codec: the codec of the buffer.
        tensor: memory of the shard, 1-D; None: it is allocated.

    Attributes:
        buffer: the shard, at the depth of OPTIM. Its tensor has a version counter of its own, so
            that edits in place are distinguished from gathers into the same memory.
        memory: storages that need memory while the operations of :meth:`source` run.
        is_resident: the shard is in memory of the device, so that gathers send it at once.
        before_change: called before users change the shard; None: nothing has to be done.
    """

    memory: Sequence[TransientStorage] = ()
    is_resident = True
    before_change: Callable[[], object] | None = None

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        tensor: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._codec = codec
        self._memory = context.memory
        self._own: Tensor | None = None
        at = context.mesh_communicators.mesh.coordinate
        if tensor is None:
            start, stop = spec.layout.range(spec.optim_depth, at)
            dtype, sent = spec.kind.dtypes.main, codec.is_identity
            tensor = context.memory.persistent(stop - start, dtype, self._role, sent=sent)
            self._own = tensor
        self.buffer = ShardedBuffer(spec.layout, at, spec.optim_depth, tensor)

    @property
    def _role(self) -> str:
        """The role in the ledger: main weights in the compute dtype are compute weights, too."""
        return "model" if self._codec.is_identity else "main"

    @property
    def persistent(self) -> list[Tensor]:
        """Memory of the device that this object holds."""
        return [] if self._own is None else [self._own]

    def prepare(self) -> Chain:
        """Returns the operations that follow each change of the main weights, before gathers."""
        return Chain()

    def source(self) -> Gather:
        """Returns a gather of the main weights, encoded by the codec."""
        spec, codec, main = self._spec, self._codec, self.buffer.tensor
        if codec.is_identity:
            return Gather(spec.label, spec.tag, main)

        def encode(wire: Tensor) -> Steps:
            return codec.encode(main, (wire,))

        return Gather(spec.label, spec.tag, encode, reads=[main], writes=[*codec.state])

    def changed_on_host(self) -> None:
        """The host has written the shard."""

    def give_back(self) -> None:
        """Remove the memory from the ledger; it is freed with this object."""
        if self._own is not None:
            self._memory.give_back(self._own, self._role)
