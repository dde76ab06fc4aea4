"""Reductions of gradients in few bits. Errors are added to the next step's gradients.

    summands + errors --encode--> all-to-all --decode--> sums in fp32 --encode--> all-gather

The all-gather takes place along axes all of whose ranks need the sum. Each rank decodes all sums
from the gathered bytes, also its own, so that replicas stay equal bit by bit. Sources: ZeRO++
(arXiv 2306.10209) for the all-to-all in blocks, LoCo (arXiv 2407.04480) for errors in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.quantized_reduction.block_codes import LARGEST, BlockCodes
from fsdp_engine.extensions.quantized_reduction.communicator import (
    ErrorMemory,
    QuantizedCommunicator,
)
from fsdp_engine.extensions.quantized_reduction.kept_errors import KeptErrors
from fsdp_engine.strategies import Axis
from fsdp_engine.units.build import EngineSetup, Resources

AXES = {"inner": (Axis.INNER,), "outer": (Axis.OUTER,), "both": (Axis.INNER, Axis.OUTER)}


@dataclass(frozen=True)
class QuantizedReduction(EngineExtension):
    """Reduces gradients in 8 or 4 bits per element; pass it in ``extensions`` of ``fe.shard``.

    Along an axis of one rank nothing is sent, and nothing changes. Sums are computed in fp32 (fp64
    for fp64 gradients). An element that is NaN or Inf on any rank is NaN or Inf in the sum.

    Errors are lost with the engine unless a checkpointer saves them::

        reduction = fe.QuantizedReduction(bits=4)
        engine = fe.shard(model, mesh, extensions=[reduction])
        checkpointer = fe.Checkpointer(..., extra={"errors": reduction.errors(engine)})

    Args:
        bits: Bits per element, 8 or 4.
        axis: The axis along which summands are quantized: "outer" (between nodes), "inner" or
            "both". Sums along the other axis are those of an engine without this extension.
        block: Number of elements with a common scale of 4 bytes: a positive multiple of 8.
        error_feedback: Add the errors of quantization to the gradients of the next step. It takes
            1 + 4 / ``block`` bytes for each element that this rank sends, on the host if gradients
            are stored there or on a disk (``fe.Offload``). With a ``GradScaler``, errors of the
            step before a change of the scale are added with the wrong scale. Before a CUDA graph
            is captured, load any checkpoint, and then train a step.

    Raises:
        ValueError: An argument has a value that is not allowed. Raised by ``fe.shard`` on all
            ranks: the engine has ``fe.Arenas(registered=True)``.
    """

    bits: int = 8
    axis: str = "outer"
    block: int = 256
    error_feedback: bool = True
    replaces_reductions = True

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in LARGEST:
            raise ValueError(f"bits: expected 8 or 4; found {self.bits!r}")
        if not isinstance(self.axis, str) or self.axis not in AXES:
            raise ValueError(f"axis: expected one of {', '.join(AXES)}; found {self.axis!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise ValueError(f"block: expected a positive multiple of 8; found {self.block!r}")

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """Check that memory for messages can be allocated in each reduction.

        Raises:
            ValueError: All memory of collectives is allocated when the engine is made.
        """
        if resources.memory.is_fixed:
            raise ValueError(
                "extensions: expected QuantizedReduction without fe.Arenas(registered=True), whose "
                "registered memory its messages could not use; found both"
            )

    def start(self, engine: Engine) -> None:
        """Replace the communicators of reductions, which are not in use yet."""
        codes = BlockCodes(self.bits, self.block)
        # Tags of the messages of buffers whose gradients are not stored on the device.
        on_host = [
            tag
            for each in engine.buffers
            if each.grads is not None and not each.grads.rest_bytes
            for tag in (each.spec.tag, each.spec.tag + 1)
        ]
        memory = ErrorMemory(engine.memory, on_host) if self.error_feedback else None
        made = (engine.communicators.data, engine.communicators.expert)
        for mesh in [each for each in made if each is not None]:
            for axis in AXES[self.axis]:
                comms = mesh.comms[axis]
                if comms.reduce is not None:
                    device, group = mesh.mesh.device, comms.reduce.group
                    quantized = QuantizedCommunicator(group, device, codes, memory)
                    mesh.comms[axis] = replace(comms, reduce=quantized)

    def errors(self, engine: Engine) -> KeptErrors:
        """Returns the errors of the reductions of ``engine`` as an object with ``state_dict`` and
        ``load_state_dict``, for ``extra`` of a checkpointer. A checkpoint can be loaded with
        another number of ranks, another level, or other arguments of this class.

        Args:
            engine: An engine with this extension.

        Raises:
            ValueError: ``error_feedback`` is False. Or gradients are sent in fp16; names a
                parameter.
        """
        if not self.error_feedback:
            raise ValueError("error_feedback: expected True, to save errors; found False")
        return KeptErrors(engine)
