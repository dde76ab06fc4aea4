"""Ranks, memory, queues of work and messages: what the machine is to the engine."""
