"""Megatron-Core's names for the engine, and what belongs to its parallelism."""
