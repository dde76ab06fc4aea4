"""Tests of the engine, in the same folders as the package.

By default small units are joined ([Note: Size of a unit] in ``units/assignment.py``). All models
here are small, and most tests need a unit for each block. So no process that runs tests joins units
by default; tests of joined units pass a size.
"""

from fsdp_engine.units import assignment

MIN_UNIT_SIZE = assignment.MIN_UNIT_SIZE  # the default for users
assignment.MIN_UNIT_SIZE = 0
