"""The command line ``fsdp-engine``, also as ``python -m fsdp_engine``: plans and checkpoints."""

from fsdp_engine.checkpoint.cli import app as checkpoint_app
from fsdp_engine.planner.planner_cli import app

app.add_typer(checkpoint_app, name="checkpoint")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="fsdp-engine")


if __name__ == "__main__":
    app(prog_name="python -m fsdp_engine")
