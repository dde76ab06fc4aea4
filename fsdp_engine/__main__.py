"""The command line ``fsdp-engine`` (or ``python -m fsdp_engine``), for plans and checkpoints."""

import sys

import typer

from fsdp_engine.planner.planner_cli import app


def _with_checkpoints() -> None:
    """Add the commands for checkpoints. They need torch, so other commands do not import them."""
    about = "Inspect, verify, export and compare checkpoints."
    commands = typer.Typer(help=about, no_args_is_help=True)
    if sys.argv[1:2] == ["checkpoint"]:
        from fsdp_engine.checkpoint.cli import app as commands
    app.add_typer(commands, name="checkpoint", help=about)


_with_checkpoints()


def main() -> None:
    """Run the console script ``fsdp-engine``."""
    app(prog_name="fsdp-engine")


if __name__ == "__main__":
    app(prog_name="python -m fsdp_engine")
