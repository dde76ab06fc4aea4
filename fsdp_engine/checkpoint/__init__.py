"""Saves and loads single checkpoints, or a crash-safe directory of the checkpoints of a run.

python -m fsdp_engine.checkpoint inspect | verify | export | diff PATH...
"""

from fsdp_engine.checkpoint.checkpointer import Checkpointer
from fsdp_engine.checkpoint.folder import LoadReport, load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.hugging_face import export_safetensors, load_safetensors
from fsdp_engine.checkpoint.local_checkpointer import LocalCheckpointer

__all__ = [
    "Checkpointer",
    "LoadReport",
    "LocalCheckpointer",
    "export_safetensors",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
]
