"""The package as the planner uses it.

Simulations and formulas use these names and no others, so that they do not depend on how the kernel
is divided into files. ``tests/test_architecture.py`` checks it. The names are:

- what a simulation replaces: the backend, with its lanes and allocations; and what a measurement
  runs on, the hardware;
- arguments of :func:`~fsdp_engine.shard`, engines, and functions that make them;
- results without ranks: plans, whose units have sizes, and the formulas of strategies;
- extensions by name, and texts on a terminal.
"""

from __future__ import annotations

from fsdp_engine import terminal as terminal
from fsdp_engine.backend import Backend as Backend
from fsdp_engine.comm import lanes as lanes
from fsdp_engine.comm.mesh import on_all_ranks as on_all_ranks
from fsdp_engine.engine import Engine as Engine
from fsdp_engine.extension_list import find_module as find_module
from fsdp_engine.hardware import Hardware as Hardware
from fsdp_engine.memory import allocator as allocator
from fsdp_engine.offload import Offload as Offload
from fsdp_engine.optim import shard_optimizer as shard_optimizer
from fsdp_engine.options import Options as Options
from fsdp_engine.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_engine.runtime.hooks import not_compiled as not_compiled
from fsdp_engine.runtime.rehearsal import Rehearsal as Rehearsal
from fsdp_engine.sharding import checked_arguments as checked_arguments
from fsdp_engine.sharding import shard as shard
from fsdp_engine.strategies import Axis as Axis
from fsdp_engine.strategies import Role as Role
from fsdp_engine.strategies import Strategy as Strategy
from fsdp_engine.units.blocks import find_blocks as find_blocks
from fsdp_engine.units.plan import Plan as Plan
from fsdp_engine.units.plan import PlannedBuffer as PlannedBuffer
