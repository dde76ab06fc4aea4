"""Runtime: hooks, the schedule of gathers, and the reductions of gradients."""
