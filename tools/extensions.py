"""Delete extensions, and show that the rest does without them.

    python -m tools.extensions                       list the extensions
    python -m tools.extensions --without offload     delete one from a copy of the tree; check it
    python -m tools.extensions --all                 each of them in turn, then all at once
    python -m tools.extensions --at-once             all at once
    python -m tools.extensions --today               the two whose turn it is (CI)

The copy loses the extension's folder, its tests, its line in ``fsdp_engine/extension_list.py`` and
the tests of other folders that name it: a file that imports it, or uses its names or methods. Then
the package is imported, mypy runs over the package, and tests of the kernel run: a short selection,
or with ``--whole`` all ordinary tests that are left. Results are printed and written to
``benchmarks/results/extensions.json``, or where ``--results`` says.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_engine.extension_list import EXTENSIONS, Extension

ROOT = Path(__file__).parents[1]
LIST = Path("fsdp_engine/extension_list.py")
RESULTS = ROOT / "benchmarks" / "results" / "extensions.json"
# Tests of the kernel that run in a few minutes.
SHORT = (
    "tests/runtime/test_equivalence.py",
    "tests/runtime/test_counts.py",
    "tests/runtime/test_lifetime.py",
    "tests/units/test_buckets.py",
)
# Most of the time of mypy is that of torch's files.
MYPY_CACHE = ".mypy_cache"
SKIPPED = ("build", "dist", "runs", "shared")


def delete(tree: Path, extensions: Sequence[Extension]) -> list[Path]:
    """Delete extensions from ``tree``; returns the files of tests that are deleted because they
    name one."""
    for each in extensions:
        shutil.rmtree(tree / "fsdp_engine" / "extensions" / each.folder)
        shutil.rmtree(tree / "tests" / "extensions" / each.folder, ignore_errors=True)
        for file in each.files:
            (tree / "fsdp_engine" / file).unlink()
    delete_lines(tree / LIST, [each.folder for each in extensions])
    named = re.compile("|".join(words(extensions)))
    naming = [path for path in tree.glob("tests/**/*.py") if named.search(path.read_text())]
    for path in naming:
        path.unlink()
    return naming


def words(extensions: Sequence[Extension]) -> list[str]:
    """Returns patterns by which a file names one of ``extensions``."""
    patterns = []
    for each in extensions:
        patterns.append(rf"extensions\.{each.folder}\b|extensions/{each.folder}\b")
        patterns += [rf"\bfe\.{name}\b|\bfsdp_engine\.{name}\b" for name in each.names]
        # A test class may have an attribute of that name.
        patterns += [rf"(?<!\bself)\.{name}\b" for name in each.methods]
        patterns += [rf"fsdp_engine\.{Path(file).stem}\b" for file in each.files]
        patterns += [re.escape(word) for word in each.words]
    return patterns


def delete_lines(path: Path, folders: Sequence[str]) -> None:
    """Delete the entries of ``folders`` from the list of extensions in the file ``path``."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(source)))):
        match node:
            case ast.Call(func=ast.Name(id="Extension"), args=[ast.Constant(value=folder), *_]):
                if folder in folders:
                    assert node.end_lineno is not None
                    lines[node.lineno - 1 : node.end_lineno] = [""] * (
                        node.end_lineno - node.lineno + 1
                    )
    path.write_text("".join(lines))


def check(extensions: Sequence[Extension], *, whole: bool) -> dict[str, object]:
    """Delete ``extensions`` from a copy of the tree, and check the rest; returns the results."""
    name = ", ".join(each.folder for each in extensions)
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", *SKIPPED)
        shutil.copytree(ROOT, tree, ignore=ignored)
        if (ROOT / MYPY_CACHE).exists():
            shutil.copytree(ROOT / MYPY_CACHE, tree / MYPY_CACHE)
        naming = delete(tree, extensions)
        tests = ["tests"] if whole else [each for each in SHORT if (tree / each).exists()]
        steps = {
            "import": [
                "-c",
                "import fsdp_engine; [getattr(fsdp_engine, n) for n in fsdp_engine.__all__]",
            ],
            "mypy": ["-m", "mypy", "fsdp_engine"],
            "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *tests],
        }
        result: dict[str, object] = {"files of tests that name it": len(naming)}
        for step, command in steps.items():
            began = time.monotonic()
            ran = subprocess.run(
                [sys.executable, *command],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                check=False,
            )
            last = (ran.stdout.strip() or ran.stderr.strip()).rpartition("\n")[2]
            result[step] = {
                "passed": ran.returncode == 0,
                "seconds": round(time.monotonic() - began),
                "last line": last,
            }
            print(f"without {name}: {step}: {'passed' if not ran.returncode else 'FAILED'}: {last}")
            if ran.returncode:
                print(ran.stdout[-4000:], ran.stderr[-2000:])
                break
    return result


def of_today() -> list[Extension]:
    """Returns the two extensions whose turn it is."""
    day = int(time.time()) // 86_400
    return [EXTENSIONS[(2 * day + each) % len(EXTENSIONS)] for each in range(2)]


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--today", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    by_name = {each.folder: each for each in EXTENSIONS}
    chosen = [[by_name[each]] for each in given.without]
    if given.today:
        chosen = [[each] for each in of_today()]
    if given.all:
        chosen = [[each] for each in EXTENSIONS]
    if given.all or given.at_once:
        chosen.append(list(EXTENSIONS))
    if not chosen:
        print("\n".join(by_name))
        return
    file = given.results
    results = json.loads(file.read_text()) if file.exists() else {}
    failed = False
    for extensions in chosen:
        name = extensions[0].folder if len(extensions) == 1 else "all"
        results[name] = check(extensions, whole=given.whole)
        failed |= "tests" not in results[name] or not results[name]["tests"]["passed"]
        file.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
