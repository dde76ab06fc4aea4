"""Trainers that people already have, over this engine; each in an extra, imported in one file."""
