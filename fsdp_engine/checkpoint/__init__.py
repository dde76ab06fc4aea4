"""Saving and loading: one folder by hand, or a directory of checkpoints that outlives crashes.

python -m fsdp_engine.checkpoint inspect | verify | export | diff PATH...
"""

from fsdp_engine.checkpoint.checkpointer import Checkpointer
from fsdp_engine.checkpoint.folder import LoadReport, load_checkpoint, save_checkpoint

__all__ = ["Checkpointer", "LoadReport", "load_checkpoint", "save_checkpoint"]
