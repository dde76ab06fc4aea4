"""Words that CONTRIBUTING.md replaces by terms of the field, and uses of private attributes.

``python -m tools.style`` prints the words that code, tests and docs still have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdp_engine"
WORDS = (
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "wishes",
    "likewise",
    "beforehand",
    "aside",
    r"hand(?:s|ed|ing)? back",
    r"let(?:s|ting)? go",
    r"give(?:s|n)? back",
    r"goes on",
    r"go on",
    r"under way",
    r"on (?:its|their) way",
    r"what (?:is|was|are|has|have|comes|came|lies|stays|travels|accumulates)",
)


# Private names of torch and of named tuples. Classes of the package define the same names.
FOREIGN = (
    "torch.",
    "._modules",
    "._buffers",
    "._version",
    "._timeout",
    "._replace",
    "._flat_weight_refs",
    "._compiled_call_impl",
    "._torchdynamo_disable",
)


def private_attributes(tree: ast.AST, own: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use of ``other._name``, if ``own`` has the name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in own:
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call)
        use = ast.unparse(node)
        if not (is_own or is_super or use.startswith(FOREIGN) or use.endswith(FOREIGN)):
            yield node.lineno, use


def own_private_names() -> set[str]:
    """Names with a leading underscore that classes of the package define or set on ``self``."""
    names = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def words_to_replace() -> dict[str, int]:
    """Occurrences of each of :data:`WORDS`, in the package, its tests, tools, and docs."""
    folders = ("fsdp_engine", "tests", "benchmarks", "examples", "tools", "docs")
    files = [
        file
        for folder in folders
        for kind in ("*.py", "*.md")
        for file in (ROOT / folder).rglob(kind)
        if file != Path(__file__)
    ]
    return count_words(
        "\n".join(file.read_text(encoding="utf-8") for file in (*files, *ROOT.glob("*.md")))
    )


def count_words(text: str) -> dict[str, int]:
    """Occurrences of each of :data:`WORDS`, in upper or lower case."""
    text = text.lower()
    return {word: len(re.findall(rf"\b{word}\b", text)) for word in WORDS}


def main() -> None:
    """Print each word that occurs, and how often."""
    for word, count in words_to_replace().items():
        if count:
            print(f"{count:6} {word}")


if __name__ == "__main__":
    main()
