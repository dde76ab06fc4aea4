"""Flat buffers of sharded parameters and gradients, with their gathers and reductions."""
