"""Bytes, traffic and time without running: formulas and tables."""
