"""Selects a strategy for a job: bytes and traffic by formulas, and simulated training steps."""
