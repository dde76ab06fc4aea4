"""Selects a strategy for a job by simulated training steps, or by formulas for its bytes."""
