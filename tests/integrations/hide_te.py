"""Imports trainers, or runs a program that does, without the Transformer Engine of our tests.

The test extra installs its Python files alone (``tests/codecs/te_on_cpu.py``). peft, which
transformers' ``Trainer`` imports, takes that for the library, imports it, and fails. Nobody who
trains has this: pip installs the library or nothing.

    python -m tests.integrations.hide_te examples/train_transformers.py --steps 10
"""

from __future__ import annotations

import importlib
import runpy
import sys

_NAME = "transformer_engine"


def import_trainers() -> None:
    """Import transformers' trainer and accelerate, in this process."""
    before = sys.modules.pop(_NAME, None)
    sys.modules[_NAME] = None  # importlib.util.find_spec finds none then
    try:
        importlib.import_module("transformers.trainer_seq2seq")
    finally:
        del sys.modules[_NAME]
        if before is not None:
            sys.modules[_NAME] = before


if __name__ == "__main__":
    import_trainers()
    del sys.argv[0]
    sys.path.insert(0, "examples")
    runpy.run_path(sys.argv[0], run_name="__main__")
