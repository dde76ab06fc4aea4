"""Trainers of other libraries with this engine. Each library is an extra of the package."""
