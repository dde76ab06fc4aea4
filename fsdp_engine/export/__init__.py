"""Weights to whoever uses them elsewhere while training goes on: an inference engine, say."""
