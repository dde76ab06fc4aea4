"""Steps of optimizers that need full tensors: see [Note: Owners] in ``owned_step.py``."""
