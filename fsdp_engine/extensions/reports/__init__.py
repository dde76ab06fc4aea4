"""Tables and measurements of an engine: ``engine.describe()`` and ``engine.measure()``."""

from fsdp_engine.extensions.reports.reports import describe, measure

__all__ = ["describe", "measure"]
