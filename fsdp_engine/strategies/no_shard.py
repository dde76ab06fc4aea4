"""Level 0, ``no_shard``: nothing is sharded. Plain data parallelism (DDP).

A rank holds every parameter, gradient and optimizer state: for ``P`` elements with compute weights
of ``p`` bytes, main weights of ``m``, gradients of ``g`` and optimizer state of ``s`` bytes per
element, ``P(p+m+g+s)``. If main weights are the compute weights, ``m`` is 0.

Once per step gradients are all-reduced, as a reduce-scatter and an all-gather: a rank of ``n``
sends ``2 P (n-1)/n`` elements. Parameters are not communicated.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class NoShard(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        return Traffic(0.0, 0.0, 2 * (size - 1) / size, 0.0)


NO_SHARD = NoShard("no_shard", 0)
