"""Offload of state to host memory or a disk between its uses. See ``docs/internals/offload.md``."""

from __future__ import annotations

from fsdp_engine.extensions.offload.arguments import Offload as Offload
from fsdp_engine.extensions.offload.arguments import from_argument as from_argument
from fsdp_engine.extensions.offload.arguments import offload as offload
