"""``python -m fsdp_engine``: see ``cli.py``."""

from fsdp_engine.cli import app

if __name__ == "__main__":
    app(prog_name="python -m fsdp_engine")
