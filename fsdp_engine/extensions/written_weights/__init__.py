"""Weights that modules write in forward, which are taken into the main weights."""
