"""Sums of gradients that have the same bits on any number of ranks."""

from fsdp_engine.extensions.fixed_order_sums.fixed_order_sums import FixedOrderSums

__all__ = ["FixedOrderSums"]
