"""The catalogue of trials, and the page that is written from it.

    python -m tests.promises.catalogue --write     # tries everything, writes promises.md anew

All names of :func:`names_to_cover` must be in it. A name with neither a trial nor a reason why
there is none fails ``test_catalogue.py``, so new names of torch are noticed.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations, prune
from torch.optim import swa_utils

from tests.pool import Ranks
from tests.promises import (
    catalogue_functions,
    catalogue_module,
    catalogue_programs,
    catalogue_tensor,
)
from tests.promises.everywhere import LEVELS
from tests.promises.scene import Entry, names, perform
from tests.promises.trial import Outcome, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "promises.md"
BEGIN, END = "<!-- written by tests/promises/catalogue.py -->", "<!-- to here -->"

SECTIONS: dict[str, list[Entry]] = {
    "Modules and optimizers": catalogue_module.catalogue.entries,
    "Functions that take modules, parameters or optimizers": catalogue_functions.catalogue.entries,
    "Programs": catalogue_programs.catalogue.entries,
}
ENTRIES = [entry for entries in SECTIONS.values() for entry in entries]


def _public(space: Any) -> list[str]:
    names = getattr(space, "__all__", None) or [name for name in dir(space) if name[0] != "_"]
    return list(names)


def _functions(space: Any) -> list[str]:
    """Functions that are defined in a module itself."""
    return [
        name
        for name in _public(space)
        if getattr(getattr(space, name), "__module__", None) == space.__name__
        and not isinstance(getattr(space, name), type)
    ]


def names_to_cover() -> list[str]:
    """All public names that must be in the catalogue, as entries write them."""
    optimizers = [
        f"{name}.step"
        for name in _public(torch.optim)
        if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
    ]
    spaces = {
        "Module": [name for name in _public(nn.Module) if _is_torchs(nn.Module, name)],
        "Optimizer": _public(torch.optim.Optimizer),
        "optim": optimizers,
        "utils": _public(nn.utils),
        "parametrizations": _public(parametrizations),
        "prune": _functions(prune),
        "init": [name for name in _functions(nn.init) if name[-1] == "_" and name[0] != "_"],
        "func": _public(torch.func),
        "swa_utils": _public(swa_utils),
        "state_dict": dcp_state_dict.__all__,
        "Parameter": [name for name in _public(nn.Parameter) if name not in dir(torch.Tensor)],
    }
    return [each for space, found in spaces.items() for each in names(space, *found)]


def _is_torchs(owner: type, name: str) -> bool:
    """Whether no other package has added it, as transformers does nn.Module.smart_apply."""
    module = getattr(getattr(owner, name), "__module__", None)
    return not isinstance(module, str) or module.split(".")[0] in ("torch", "builtins")


def uncovered() -> list[str]:
    """Public names that no entry has."""
    known = {re.split(r"[ ,(]", entry.name)[0] for entry in ENTRIES}
    return [name for name in names_to_cover() if name not in known]


ByLevel = dict[str, dict[str, Outcome]]


def run_entries() -> ByLevel:
    """On a rank: all trials on whole models, at all levels."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: ByLevel = {level: {} for level in LEVELS}
    performed: dict[Any, dict[str, Outcome]] = {}  # a trial may have several names
    for entry in ENTRIES:
        if entry.trial is None:
            continue
        key = entry.trial, entry.make
        if key not in performed:
            performed[key] = perform(entry, mesh, LEVELS)
        for level, outcome in performed[key].items():
            before = found[level].get(entry.name, outcome)
            found[level][entry.name] = max(before, outcome, key=lambda each: each.verdict)
    return found


def run_tensor() -> dict[str, list[tuple[str, Outcome]]]:
    """On a rank: all trials of tensors."""
    return catalogue_tensor.try_all(init_device_mesh("cpu", (dist.get_world_size(),)))


# --- the page ---


def _short(note: str, limit: int = 150) -> str:
    note = re.sub(r"\[\d+, \d+\)", "[...)", note).replace("|", "\\|")
    return note if len(note) <= limit else note[: limit - 4].rsplit(" ", 1)[0] + " ..."


def row_of(name: str, by_level: dict[str, Outcome]) -> str:
    """One row: the verdict where levels agree, else by level."""
    verdicts = {level: outcome.verdict for level, outcome in by_level.items()}
    if len(set(verdicts.values())) == 1:
        words = _word(verdicts[LEVELS[0]])
    else:
        groups: dict[Verdict, list[str]] = {}
        for level, verdict in verdicts.items():
            groups.setdefault(verdict, []).append(f"`{level}`")
        words = "; ".join(f"{_word(v)} at {', '.join(each)}" for v, each in groups.items())
    worst = max(by_level.values(), key=lambda each: each.verdict)
    return f"| {name} | {words} | {_short(worst.note)} |"


def _word(verdict: Verdict) -> str:
    return verdict.name if verdict is Verdict.WRONG else verdict.name.lower().replace("_", " ")


def _listed(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names))


def tensor_lines(found: dict[str, list[tuple[str, Outcome]]]) -> list[str]:
    """Names of tensor functions, by verdict."""
    groups: dict[str, list[str]] = {}
    for name, outcomes in found.items():
        verdicts = {outcome.verdict for _, outcome in outcomes}
        title = "right with some arguments, raises with others"
        if Verdict.WRONG in verdicts:
            title = "WRONG"
        elif name.split(".")[-1] in catalogue_tensor.OF_THE_SLICE:
            title = "of this rank's slice, by their nature"
        elif len(verdicts) < 2:
            title = _word(*verdicts) if verdicts else "does not apply: no arguments fit"
        groups.setdefault(title, []).append(name.removeprefix("Tensor."))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in catalogue_tensor.public_names():
            if (reason := catalogue_tensor.reason_not_here(name)) is not None:
                title = f"does not apply: {reason}"
                groups.setdefault(title, []).append(name.removeprefix("Tensor."))
    return [
        f"- **{title}** ({len(names)}): {_listed(names)}" for title, names in sorted(groups.items())
    ]


def page(by_level: ByLevel, tensors: dict[str, list[tuple[str, Outcome]]]) -> str:
    """Returns the table between ``BEGIN`` and ``END`` in docs/internals/promises.md."""
    lines = [BEGIN, "", "### Methods of tensors", ""]
    lines += tensor_lines(tensors)
    for title, entries in SECTIONS.items():
        lines += ["", f"### {title}", "", "| tried | here | |", "|---|---|---|"]
        seen = set()
        excluded: dict[str, list[str]] = {}
        for entry in entries:
            if entry.trial is None:
                excluded.setdefault(entry.why, []).append(entry.name)
            elif entry.name not in seen:
                seen.add(entry.name)
                outcomes = {level: found[entry.name] for level, found in by_level.items()}
                lines.append(
                    row_of(f"`{entry.name}`" if "." in entry.name else entry.name, outcomes)
                )
        for why, without in excluded.items():
            outcome = why if "|" in why else f"does not apply | {why}"
            lines.append(f"| {_listed(without)} | {outcome} |")
    return "\n".join([*lines, "", END])


def everything(ranks: Ranks) -> str:
    """Runs all trials; returns the page's part."""
    by_level = ranks.run(run_entries, world_size=2, timeout=1200)[0]
    tensors = ranks.run(run_tensor, world_size=2, timeout=1200)[0]
    return page(by_level, tensors)


def main() -> None:
    """Writes the page."""
    if "--write" not in sys.argv:
        raise SystemExit(__doc__)
    ranks = Ranks(2)
    try:
        made = everything(ranks)
    finally:
        ranks.close()
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(head + made + tail)


if __name__ == "__main__":
    main()
