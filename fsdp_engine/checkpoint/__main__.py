"""``python -m fsdp_engine.checkpoint``: see ``cli.py``."""

from fsdp_engine.checkpoint.cli import main

if __name__ == "__main__":
    main()
