"""``python -m fsdp_engine``: see ``planner/planner_cli.py``."""

from fsdp_engine.planner.planner_cli import app

if __name__ == "__main__":
    app(prog_name="python -m fsdp_engine")
