"""Arenas for transient memory, and memory that is registered with NCCL."""

from fsdp_engine.extensions.arenas.arena_memory import Arenas

__all__ = ["Arenas"]
