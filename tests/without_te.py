"""Imports of packages that look for Transformer Engine, in processes that have our stand-in for it.

``tests/extensions/transformer_engine/te_on_cpu.py`` puts the tensor layer of Transformer Engine
into ``sys.modules``. ``peft``, which transformers' ``Trainer`` imports, would take it for the whole
library.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "transformer_engine"


def import_without_te(name: str) -> ModuleType:
    """The module of that name, which finds no Transformer Engine when it is imported."""
    before = sys.modules.get(_NAME)
    hidden: Any = None
    sys.modules[_NAME] = hidden  # with None, importlib.util.find_spec finds no such package
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[_NAME]
        if before is not None:
            sys.modules[_NAME] = before
