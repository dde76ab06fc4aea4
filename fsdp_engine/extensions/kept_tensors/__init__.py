"""Tensors that a module keeps in addition to its output, where a backward of its unit can start."""
