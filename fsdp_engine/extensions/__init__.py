"""Features beside plain training, a folder each; see ``fsdp_engine/extension_list.py``."""
