"""Optional features of the engine, one per folder; see ``fsdp_engine/extension_list.py``."""
