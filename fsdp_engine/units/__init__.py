"""From a model to units with buffers: which parameter is where, and its first values."""
