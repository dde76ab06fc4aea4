"""Hooks on modules and on autograd, the schedule of gathers, and the reductions of gradients."""
