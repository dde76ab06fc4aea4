"""Sharded flat tensors: how weights are gathered and gradients reduced."""
