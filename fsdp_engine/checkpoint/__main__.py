"""``python -m fsdp_engine.checkpoint``: see ``command_line.py``."""

from fsdp_engine.checkpoint.command_line import main

if __name__ == "__main__":
    main()
