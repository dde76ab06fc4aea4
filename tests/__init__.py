"""Tests of the engine, in folders as those of the package.

Models here are so small that by default their units would all be joined ([Note: Size of a unit] in
``units/assignment.py``), and most tests are about a unit for each block. So in every process that
runs tests the default joins nothing; tests of joined units name a size.
"""

from fsdp_engine.units import assignment

MIN_UNIT_SIZE = assignment.MIN_UNIT_SIZE  # what users have
assignment.MIN_UNIT_SIZE = 0
