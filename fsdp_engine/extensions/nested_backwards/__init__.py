"""Backwards within a backward, and gradients of a unit from several runs of autograd."""
