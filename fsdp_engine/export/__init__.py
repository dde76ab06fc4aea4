"""Streams weights to receivers, such as an inference engine, during training."""
