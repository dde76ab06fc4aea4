"""Copies weights that modules write in forward into the main weights."""
