"""Hooks of MkDocs (``mkdocs.yml``): pages from outside ``docs/``, the API reference, links.

The pages of ``docs/`` are written for the repository's page view, and link to files all over the
repository. The site holds a page for each of these files: README.md is its start page, other
Markdown files of the root become pages, and source files are shown under ``source/``. Links are
rewritten accordingly, so that ``mkdocs build --strict`` checks all of them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from fsdp_engine.extension_list import EXTENSIONS

ROOT = Path(__file__).parents[1]
# Pages of the site by file of the repository, for files outside docs/.
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
REPOSITORY_FILE = {page: file for file, page in ROOT_PAGES.items()}

# Page of the API reference: its title, and the names on it: those of `fsdp_engine.__all__`, and
# others that the package imports at their first use.
PUBLIC_NAMES = {
    "training": (
        "Training",
        "shard Engine Options MixedPrecisionPolicy EngineExtension CodecRules "
        "shard_optimizer apply_tp_plan register_forward_method whole_rows whole_tensors "
        "FlatDTensor DistributedDataParallel DistributedDataParallelConfig finalize_model_grads "
        "ModelParallelGroups",
    ),
    "checkpoints": (
        "Checkpoints and weights",
        "Checkpointer LocalCheckpointer save_checkpoint load_checkpoint "
        "export_safetensors load_safetensors load_pretrained save_pretrained "
        "weight_stream WeightStream WeightVersion",
    ),
    "planner": (
        "Planner and simulation",
        "plan StrategyPlan estimate Estimate simulate Simulation simulate_pipeline "
        "PipelineSimulation CausalLMStages SimulationError Machine TwoWayLink A100 H100 H200 B200",
    ),
}
_NAMES_OF_EXTENSIONS = {
    f"fsdp_engine.extensions.{each.folder}": list(each.names) for each in EXTENSIONS if each.names
}
# Page of the API reference, named fsdp_engine.PAGE there: the modules on it.
MODULES = {
    "fsdp2": "fsdp_engine.fsdp2",
    "megatron": "fsdp_engine.megatron",
    "pipelining": "fsdp_engine.pipelining",
    "extensions": " ".join(_NAMES_OF_EXTENSIONS),
    "integrations": "fsdp_engine.integrations.transformers fsdp_engine.integrations.accelerate "
    "fsdp_engine.integrations.lightning fsdp_engine.integrations.ray",
    "codecs": "fsdp_engine.codecs",
    "planner.plan_options": "fsdp_engine.planner.plan_options "
    "fsdp_engine.planner.simulation.step_options",
}

_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()#\s]*)(#[^()\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`~?\.?([^`]+)`(?:\\ )?")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}


# --- hooks ---


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages whose sources are outside ``docs/``."""
    pages = {page: _read(file) for file, page in ROOT_PAGES.items()}
    pages |= dict(reference_pages())
    markdown = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    markdown |= {file: pages[page] for file, page in ROOT_PAGES.items()}
    for file, text in markdown.items():
        for target in link_targets(file, text):
            if site_page(target).startswith("source/"):
                pages[site_page(target)] = source_page(target)
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page, and sets tables apart from the comments around them."""
    uri = page.file.src_uri
    file = REPOSITORY_FILE.get(uri, f"docs/{uri}")
    if uri.startswith(("reference/", "source/")):
        return markdown
    return with_site_links(file, uri, re.sub(r"^(<!-- .* -->)$", r"\n\1\n", markdown, flags=re.M))


class PlainRoles(Extension):  # type: ignore[misc]
    """Shows the Sphinx roles of docstrings (``:func:`shard```) as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)


# --- links ---


def link_targets(file: str, text: str) -> Iterator[str]:
    """The files and folders of the repository that the Markdown text of ``file`` links to."""
    for match in _LINK.finditer(_CODE.sub("", text)):
        if match[1] and "://" not in match[1]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))


def site_page(target: str) -> str:
    """The site's page, or file, for a file or folder of the repository."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}.md"


def with_site_links(file: str, page: str, text: str) -> str:
    """The text of ``file`` with its links rewritten for ``page`` of the site."""

    def replaced(match: re.Match[str]) -> str:
        for target in link_targets(file, match[0]):
            relative = posixpath.relpath(site_page(target), posixpath.dirname(page))
            return f"]({relative}{match[2] or ''})"
        return match[0]

    parts = _CODE.split(text)  # every second part is code
    parts[::2] = [_LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


# --- pages ---


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def source_page(target: str) -> str:
    """A page that shows a source file, or all Python files of a folder."""
    path = ROOT / target
    if not path.exists():
        raise PluginError(f"a page links to {target}: expected a file or folder; found none")
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    lines = ["---", "search:", "  exclude: true", "---", f"# {target}"]
    for each in files:
        if path.is_dir():
            lines.append(f"\n## {each.name}")
        language = _LANGUAGES.get(each.suffix, "text")
        lines += ["", f"~~~~~~{language}", each.read_text(encoding="utf-8").rstrip(), "~~~~~~"]
    return "\n".join(lines) + "\n"


def exported_names(module: str) -> list[str]:
    """``__all__`` of a module, read without an import; empty if the module has none."""
    for node in _statements(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _binds(module: str, name: str) -> bool:
    """Whether a module defines or imports a name when it is loaded."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and name in {e.asname or e.name for e in node.names}:
            return True
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and name in {ast.unparse(each) for each in node.targets}:
            return True
    return False


def _statements(module: str) -> list[ast.stmt]:
    return ast.parse(_file_of(module).read_text(encoding="utf-8")).body


def _foreign_origin(module: str, name: str) -> str | None:
    """The module of another library that ``module`` imports a name from."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
            return None if (node.module or "").startswith("fsdp_engine") else node.module
    return None


def _file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Page and text of the API reference, as instructions for mkdocstrings.

    Raises:
        PluginError: a public name is on no page, or a page has a name that is not public.
    """
    listed = {name for _, names in PUBLIC_NAMES.values() for name in names.split()}
    exported = set(exported_names("fsdp_engine"))
    others = set(re.findall(r"\b(\w+) as \1\b", _file_of("fsdp_engine").read_text()))
    others |= {name for each in EXTENSIONS for name in each.names}
    if different := sorted((exported - listed) | (listed - exported - others)):
        raise PluginError(
            "PUBLIC_NAMES of tools/docs_site.py: expected the names of fsdp_engine.__all__; "
            f"found a difference in {', '.join(different)}"
        )
    lines = ["# API reference", ""]
    for page, (title, names) in PUBLIC_NAMES.items():
        links = (f"[`{name}`]({page}.md#fsdp_engine.{name})" for name in names.split())
        lines.append(f"- [{title}]({page}.md), `import fsdp_engine as fe`: {', '.join(links)}")
        entries = [_entry("fsdp_engine", name) for name in names.split()]
        yield f"reference/{page}.md", "\n".join([f"# {title}", *entries])
    for page, modules in MODULES.items():
        title = f"fsdp_engine.{page}"
        lines.append(f"- [`{title}`]({page}.md)")
        entries = [entry for module in modules.split() for entry in _entries(module)]
        yield f"reference/{page}.md", "\n".join([f"# {title}", *entries])
    yield "reference/index.md", "\n".join(lines) + "\n"


def _entries(module: str) -> list[str]:
    """The docstring of a module, then its exported names."""
    names = exported_names(module) or _NAMES_OF_EXTENSIONS.get(module, [])
    if not names:
        return [f"\n::: {module}\n"]
    docstring = f"\n::: {module}\n    options:\n      members: false\n"
    return [docstring, *(_entry(module, name) for name in names)]


def _entry(module: str, name: str) -> str:
    """One exported name, and not the submodule of the same name that mkdocstrings would prefer."""
    if module in _NAMES_OF_EXTENSIONS and not _binds(module, name):
        # It is imported at its first use, from the file that defines it.
        for path in sorted(_file_of(module).parent.glob("*.py")):
            if re.search(rf"^(class|def) {name}\b", path.read_text(encoding="utf-8"), re.M):
                return f"\n::: {module}.{path.stem}.{name}\n"
    if (origin := _foreign_origin(module, name)) is not None:
        return f"\n## {module}.{name}\n\nThe same object as `{origin}.{name}`.\n"
    if not _file_of(f"{module}.{name}").exists():
        return f"\n::: {module}.{name}\n"
    options = f"    options:\n      heading: {module}.{name}\n      toc_label: {name}\n"
    return f"\n::: {module}.{name}.{name}\n{options}"
