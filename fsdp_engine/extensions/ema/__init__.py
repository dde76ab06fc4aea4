"""Exponential moving averages of sharded weights."""

from fsdp_engine.extensions.ema.ema import EMA

__all__ = ["EMA"]
