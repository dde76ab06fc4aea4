"""Builds the device's extension once for each version of torch and of its sources.

The compiler's output lies in ``build/`` beside this file, which git ignores. :func:`build` compiles
in a process of its own and loads nothing: loading brings the device into a process for good.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "csrc").glob("*.cpp"))
NAME = "deferred_device"
FLAGS = ["-O1"]


def _digest() -> str:
    parts = [torch.__version__, sys.version, *FLAGS]
    files = sorted((HERE / "csrc").iterdir())
    return hashlib.sha256("\n".join([*parts, *(f.read_text() for f in files)]).encode()).hexdigest()


def folder() -> Path:
    """The folder of the extension that these sources build."""
    return HERE / "build" / f"{torch.__version__}-{_digest()[:12]}"


def _path() -> str:
    """PATH with the folder of this interpreter, where pip installs ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing_tool() -> str | None:
    """Returns the name of a tool that the build needs and this machine lacks, or None."""
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if shutil.which(tool, path=_path()) is None:
            return tool
    return None


def build() -> None:
    """Compiles sources that are not compiled yet, in a process of its own.

    Raises:
        RuntimeError: The compiler failed. The message contains its output.
    """
    if (folder() / f"{NAME}.so").exists():
        return
    root = HERE.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name], cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"building the device failed:\n{done.stdout}{done.stderr}")


def load() -> ModuleType:
    """The extension; importing it registers the device with torch.

    Raises:
        ImportError: it is not built.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    path = str(folder() / f"{NAME}.so")
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def main() -> None:
    """Compile, or wait for another test process that is compiling."""
    folder().parent.mkdir(exist_ok=True)
    with (folder().parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder().exists():
            _compile(folder())


def _compile(final: Path) -> None:
    """Compiles in a folder beside the final one, then renames it: no test finds a broken build."""
    from torch.utils import cpp_extension

    partial = final.with_name(f"{final.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    os.environ["PATH"] = _path()
    os.environ.setdefault("MAX_JOBS", "2")
    cpp_extension.load(
        NAME,
        [str(source) for source in SOURCES],
        extra_cflags=FLAGS,
        build_directory=str(partial),
        is_python_module=False,
        is_standalone=False,
        verbose=True,
    )
    partial.rename(final)


if __name__ == "__main__":
    main()
