"""Weights that modules write in forward, which are copied into the main weights."""
