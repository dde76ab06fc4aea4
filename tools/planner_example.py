"""The first two examples of docs/internals/planner.md: their models, commands, and output.

    python tools/planner_example.py            # fails if the page has another output
    python tools/planner_example.py --write    # writes the output into the page

The commands run in this process, in a folder with the models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from fsdp_engine import terminal
from fsdp_engine.planner import planner_cli

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "planner.md"
WIDTH = 100
# The config.json of Llama 3.1 8B, without entries that do not change the plan.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Example:
    """An example of the page.

    Attributes:
        command: A text on the page before the block of the command.
        output: A text on the page between the command and its output.
        files: The contents of the files that the command reads, by path.
    """

    command: str
    output: str
    files: dict[str, str]


def examples() -> list[Example]:
    """Returns the examples."""
    printed = f"prints in a terminal of {WIDTH} columns"
    model = _block("python", "With this file, `my_model.py`:")
    return [
        Example("plans a job on eight H100s", printed, {"my_model.py": model}),
        Example(
            "With the `config.json` of Llama 3.1 8B",
            printed,
            {"llama-8b/config.json": json.dumps(_LLAMA)},
        ),
    ]


def printed_in_page(example: Example) -> str:
    """Returns the output of an example on the page."""
    return _block("text", example.command, example.output)


def printed_by_command(example: Example) -> str:
    """Returns the output of an example's command."""
    program, *arguments = shlex.split(_block("bash", example.command).replace("\\\n", ""))
    assert program == "fsdp-engine"
    with tempfile.TemporaryDirectory() as folder, _working_in(Path(folder)):
        for name, text in example.files.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        environment = {"COLUMNS": str(WIDTH), "TERM": "dumb"}
        result = CliRunner().invoke(planner_cli.app, arguments, env=environment)
    if result.exit_code:
        raise RuntimeError(f"{PAGE.name}: expected a command that plans; found {result.output}")
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())


def _block(language: str, *before: str) -> str:
    """Returns the first code block of a language after some texts, which follow each other."""
    text = PAGE.read_text(encoding="utf-8")
    for each in before:
        _, found, text = text.partition(each)
        if not found:
            raise RuntimeError(f"{PAGE.name}: expected the text {each!r}; found none")
    block = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return block[1]


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Context with another working directory and a terminal of ``WIDTH`` columns. At its end the
    page's model is removed from the imported modules."""
    before = Path.cwd()
    with (
        mock.patch.object(terminal, "terminal_width", return_value=WIDTH),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.modules.pop("my_model", None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the output into the page")
    settings = parser.parse_args()
    for example in examples():
        page, printed = printed_in_page(example), printed_by_command(example)
        if settings.write:
            text = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(text.replace(page, printed), encoding="utf-8")
        elif page != printed:
            sys.exit(
                f"{PAGE.name}: expected the output of the example {example.command!r}; "
                "found another one. Run --write"
            )


if __name__ == "__main__":
    main()
