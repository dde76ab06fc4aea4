"""Reductions of gradients that send few bits per element."""

from fsdp_engine.extensions.quantized_reduction.quantized_reduction import QuantizedReduction

__all__ = ["QuantizedReduction"]
