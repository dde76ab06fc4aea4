"""The wheel is built, installed without the checkout, and run as README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import fsdp_engine as fe
from tests.processes import torchrun

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
# What the package reads beside its modules.
DATA = (".css", ".js", ".json", ".toml")
SOURCES = ("fsdp_engine", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Installed:
    """The wheel, and the environment that it was installed into."""

    wheel: Path
    bin: Path

    def run(self, folder: Path, program: str, *arguments: str) -> str:
        """What a program of the environment prints when it is run in ``folder``."""
        return run(folder, str(self.bin / program), *arguments)


def run(folder: Path, *command: str) -> str:
    """Run a command that must succeed; returns its output. No variable refers to the checkout."""
    misleading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in misleading}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, which uses the installed dependencies.

    A path file adds the folder of the dependencies. Python ignores path files in an added folder,
    so it finds no editable install.
    """
    folder = tmp_path_factory.mktemp("package")
    sources, home = folder / "sources", folder / "venv"
    sources.mkdir()  # a build leaves files among its sources
    for name in SOURCES:
        (sources / name).symlink_to(ROOT / name)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(folder, *pip, "wheel", "--no-deps", "--no-build-isolation", str(sources))
    (wheel,) = folder.glob("*.whl")

    venv.create(home, with_pip=False)
    python = str(home / "bin" / "python")
    run(folder, *pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    (site,) = home.glob("lib/python3*/site-packages")
    around = {sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(around)) + "\n")
    return Installed(wheel, home / "bin")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """README's script, with a line that prints where it found the package."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (code,) = (block for block in blocks if block.startswith("import torch\n"))
    path = tmp_path_factory.mktemp("user") / "train.py"
    # Newlines on both sides, in one write: ranks print into one pipe.
    said = r"\nimported from {fe.__file__}, version {fe.__version__}\n"
    line = f'print(f"{said}", end="", flush=True)\n'
    path.write_text(code + line, encoding="utf-8")
    return path


def check_printed(printed: str, installed: Installed, num_ranks: int) -> None:
    """The script has run the wheel's package on all ranks, and its loss has fallen."""
    found = re.findall(r"^imported from (.*), version (.*)$", printed, re.M)
    assert len(found) == num_ranks, printed
    for file, version in found:
        assert Path(file).is_relative_to(installed.bin.parent)
        assert version == fe.__version__
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", printed, re.M)]
    assert losses[-1] < 0.5 * losses[0], printed


def test_the_wheel_holds_the_package_its_types_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        lines = wheel.read(metadata).decode().splitlines()
    assert "Requires-Dist: numpy>=1.26" in lines  # torch does not require it
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fsdp_engine").rglob("*")
        if path.suffix in (".py", *DATA)
    }
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == {*files, "fsdp_engine/py.typed"}
    assert any(name.endswith("/LICENSE") for name in names)
    assert installed.wheel.name.startswith(f"fsdp_engine-{fe.__version__}-")


def test_readme_s_script_trains_also_under_torchrun_and_the_command_reads_its_checkpoint(
    installed: Installed, script: Path, tmp_path: Path
) -> None:
    for num_ranks, launcher in ((1, ()), (2, torchrun(2))):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        printed = installed.run(folder, "python", *launcher, str(script))
        check_printed(printed, installed, num_ranks)
    seen = installed.run(folder, "fsdp-engine", "checkpoint", "inspect", "runs/tiny")
    assert "0.0.weight" in seen
