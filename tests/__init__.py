"""Tests of the engine, in folders as those of the package.

Models here are so small that by default their units would all be joined ([Note: Size of a unit] in
``planning/unit_size.py``), and most tests are about a unit for each block. So in every process that
runs tests the default joins nothing; tests of joined units name a size.
"""

from fsdp_engine.planning import unit_size

MIN_UNIT_SIZE = unit_size.MIN_UNIT_SIZE  # what users have
unit_size.MIN_UNIT_SIZE = 0
