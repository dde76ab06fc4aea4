"""Steps of optimizers that need whole tensors: see [Note: Owners] in ``owned_step.py``."""
