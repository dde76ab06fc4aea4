"""Integrates the engine into trainers of other libraries, which are extras of the package."""
