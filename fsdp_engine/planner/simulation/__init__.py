"""Simulation of training steps: the engine on fake tensors and a simulated clock."""
