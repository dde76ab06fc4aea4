"""Tensors that a module keeps beside its output, through which gradients can enter its unit."""
