"""Finds the units of a model, plans and builds their buffers, and installs their parameters."""
