"""Conversions of sharded models to other dtypes: ``model.to(dtype)``, ``model.half()``."""
