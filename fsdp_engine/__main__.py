"""``python -m fsdp_engine``: see ``planner/command_line.py``."""

from fsdp_engine.planner.command_line import app

if __name__ == "__main__":
    app(prog_name="python -m fsdp_engine")
