"""Every optimizer of five libraries, at every level, beside one process of plain torch.

``python -m tests.programs.optimizer_catalogue --write`` writes the tables of
docs/internals/optimizers.md.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fsdp_engine as fe
from fsdp_engine.extensions.whole_tensor_optimizers.behaviour import Needs
from fsdp_engine.extensions.whole_tensor_optimizers.owned_step import OwnedStep
from fsdp_engine.optim.shadow import step_hook_of
from tests.pool import Ranks
from tests.programs.packages import TORCHTITAN

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "optimizers.md"
BEGIN, END = "<!-- optimizers -->", "<!-- end -->"
# Title of a table, and the module whose classes are tried.
LIBRARIES = {
    "torch": "torch.optim",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
}
# The ways to use an optimizer, in the order of the columns.
WAYS = ("as it is", "shard_optimizer")
STEPPED = "stepped"
CLAIMED = "elementwise=True"
NUM_STEPS = 8  # the first steps of RAdam and similar optimizers are different
# Norm of the difference of weights, relative to the norm of their change in one process.
EXACT = {torch.float64: 1e-6, torch.float32: 1e-3}

# Optimizers that give different weights without an error. SOAP does so at no_shard, on plain
# tensors: its eigenvectors of singular matrices depend on the rounding of gradients.
KNOWN_TO_DIFFER = {"pytorch_optimizer.SOAP"}
# Options for the groups of matrices and of other parameters. Without them these optimizers act as
# plain ones.
_LOW_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "APOLLO": ({**_LOW_RANK, "scale_type": "channel"}, {}),
    "Fira": (_LOW_RANK, {}),
    "GaLore": (_LOW_RANK, {}),
    **{
        name: ({"use_muon": True}, {"use_muon": False})
        for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
    },
}

# A word for the outcome of one use, and the error or the difference.
Outcome = tuple[str, str]
# The reason why one process cannot use an optimizer, or the outcomes by way and level.
Found = str | dict[str, dict[str, Outcome]]


@dataclass(frozen=True)
class Use:
    dtype: torch.dtype
    with_closure: bool
    only_matrices: bool  # Muon and its relatives take no vectors


def classes(library: str) -> dict[str, type[Optimizer]]:
    sys.path.append(str(TORCHTITAN))
    try:
        module = importlib.import_module(LIBRARIES[library])
    finally:
        sys.path.remove(str(TORCHTITAN))
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if inspect.isclass(value)
        and issubclass(value, Optimizer)
        and value.__module__.split(".")[0] == library
        and value is not Optimizer
        and not name.startswith("_")
    }


def model_of(use: Use) -> nn.Sequential:
    torch.manual_seed(0)
    vectors = not use.only_matrices
    # Weights of 4096 elements: the smallest whose state torchao and bitsandbytes quantise.
    blocks = [nn.Linear(64, 64, vectors), nn.Tanh(), nn.LayerNorm(64, elementwise_affine=vectors)]
    return nn.Sequential(*blocks, nn.Linear(64, 64, False), nn.Linear(64, 6, vectors)).to(use.dtype)


def train(
    model: nn.Module,
    optimizer: Any,
    use: Use,
    rank: int,
    size: int,
    steps: Iterable[int] = range(NUM_STEPS),
) -> None:
    if hasattr(optimizer, "train"):  # schedulefree's
        optimizer.train()
    torch.manual_seed(1)
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(use.dtype)
        part = batch.chunk(size)[rank]

        def loss_of(part: Tensor = part) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(part).square().mean()
            loss.backward()
            return loss

        step_once(optimizer, loss_of, with_closure=use.with_closure)


def step_once(optimizer: Any, loss_of: Callable[[], Tensor], *, with_closure: bool) -> None:
    """Step with the gradients of a loss, which are computed within the step or before it."""
    if with_closure:
        optimizer.step(loss_of)
    else:
        loss_of()
        optimizer.step()


def in_one_process(kind: type[Optimizer]) -> tuple[Use, dict[str, Tensor]] | str:
    """The first use that works, with the weights it ends with; else the error of the first."""
    errors = []
    for matrices, dtype, closure in itertools.product(
        (False, True), (torch.float64, torch.float32), (False, True)
    ):
        use = Use(dtype, closure, matrices)
        model = model_of(use)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            train(model, made(kind, model), use, 0, 1)
        except Exception as error:  # whatever a library raises
            errors.append(_text(error))
            continue
        after = model.state_dict()
        if not all(value.isfinite().all() for value in after.values()):
            errors.append("diverges in one process")
        elif all(torch.equal(before[name], after[name]) for name in before):
            errors.append("changes no weight in one process")
        else:
            return use, after
    return errors[0]


def made(kind: type[Optimizer], params: Any) -> Any:
    """An optimizer with its default hyperparameters, and a learning rate where it takes one."""
    params = list(params.parameters()) if isinstance(params, nn.Module) else params
    library, takes = kind.__module__.split(".")[0], inspect.signature(kind).parameters
    options = {"lr": 1e-2} if "lr" in takes else {}
    if library == "bitsandbytes" and "momentum" in takes:
        options["momentum"] = 0.9  # bitsandbytes' SGD and LARS refuse their own default, 0
    if library == "pytorch_optimizer" and kind.__name__ in GROUPS:
        of_matrices, of_others = GROUPS[kind.__name__]
        matrices = {"params": [p for p in params if p.ndim == 2], **of_matrices}
        others = {"params": [p for p in params if p.ndim != 2], **of_others}
        params = [group for group in (matrices, others) if group["params"]]
    if kind is torch.optim.LBFGS:
        options["max_iter"] = 4  # for the time of tests
    return kind(params, **options)


def tried(
    kind: type[Optimizer], use: Use, expected: dict[str, Tensor], level: str, way: str
) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of(use)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = fe.shard(model, mesh, strategy=level, options=fe.Options(min_unit_size=0))
    try:
        optimizer = made(kind, model)
        if way != WAYS[0]:
            fe.shard_optimizer(optimizer, elementwise=way == CLAIMED)
        train(model, optimizer, use, mesh.get_local_rank(), mesh.size())
    except Exception as error:  # a library may raise any error
        return "refused", _text(error)
    found = engine.full_state_dict()
    apart = distance(found, expected) / distance(start, expected)
    word = "exact" if apart <= EXACT[use.dtype] else "differs"
    return word, "" if word == "exact" else f"{apart:.0e} of the change"


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    norms = [(found[name] - expected[name]).norm() for name in expected]
    return torch.stack(norms).norm().item()


def run(library: str, name: str) -> Found:
    kind = classes(library)[name]
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = in_one_process(kind)
        if isinstance(alone, str):
            return alone
        found: dict[str, dict[str, Outcome]] = {
            way: {level: agreed(tried(kind, *alone, level, way)) for level in LEVELS}
            for way in WAYS
        }
        found[STEPPED] = {LEVELS[-1]: (stepped(kind, alone[0]), "")}
        return found


def stepped(kind: type[Optimizer], use: Use) -> str:
    model = model_of(use)
    fe.shard(model, None, strategy=LEVELS[-1], options=fe.Options(min_unit_size=0))
    try:
        return how_stepped(model, fe.shard_optimizer(made(kind, model)))
    except Exception:  # the outcomes contain this error
        return ""


def how_stepped(model: nn.Module, optimizer: Optimizer) -> str:
    """Which part of the model one step of the optimizer takes at once."""
    step = step_hook_of(optimizer, OwnedStep)
    if step is None:
        return "slices"
    most = max(step.needs.values())
    if most > Needs.TENSOR:
        return "all on one rank" if most == Needs.ALL else "each group on one rank"
    vectors = [
        name
        for name, param in model.named_parameters()
        if param.ndim == 1 and param.numel() > 1 and name in step.needs
    ]
    if vectors and all(step.needs[name] == Needs.ELEMENT for name in vectors):
        return "whole matrices, slices of vectors"
    return "whole tensors"


def agreed(outcome: Outcome) -> Outcome:
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    if len({word for word, _ in outcomes}) > 1:
        return "differs", f"between ranks: {outcomes}"
    return outcome


def _text(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


# --- the page ---


def by_level(outcomes: dict[str, Outcome]) -> str:
    """One word where all levels agree, else each word with its levels."""
    words: dict[str, list[str]] = {}
    for level, (word, _) in outcomes.items():
        words.setdefault(word, []).append(f"`{level}`")
    if len(words) == 1:
        return next(iter(words))
    sharded = ", ".join(f"`{level}`" for level in LEVELS[1:])
    parts = (f"{word} at {', '.join(levels)}" for word, levels in words.items())
    return "; ".join(parts).replace(sharded, "the other levels")


def table(library: str, found: dict[str, Found]) -> list[str]:
    """The rows of a library: optimizers of the same outcomes share a row."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    untried: dict[str, list[str]] = {}
    for name, outcomes in found.items():
        if isinstance(outcomes, str):
            untried.setdefault(outcomes, []).append(f"`{name}`")
            continue
        as_it_is, sharded = (outcomes[way] for way in WAYS)
        errors = (text for word, text in sharded.values() if word == "refused")
        text = next(errors, "").replace(f"{name}: ", "")
        if (
            raised := re.search(r"found that \w+ (raises .*)\. elementwise=True", text)
        ) is not None:
            text = f"a trial step {raised[1]}"
        note = shortened(text)
        row = (by_level(sharded), by_level(outcomes[STEPPED]), by_level(as_it_is), note)
        rows.setdefault(row, []).append(f"`{name}`")
    lines = [
        "| optimizer | with `fe.shard_optimizer` | steps | without it | error when sharded |",
        "|---|---|---|---|---|",
    ]
    order = sorted(rows, key=lambda row: (row[0] != "exact", row[1], -len(rows[row]), row))
    lines += [f"| {' '.join(rows[row])} | {' | '.join(row)} |" for row in order]
    if untried:
        lines += ["", "One process of plain torch cannot train the model with these:", ""]
        lines += [f"- {' '.join(names)}: {shortened(why)}" for why, names in untried.items()]
    return lines


def shortened(text: str, limit: int = 160) -> str:
    plain = text.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "")
    return plain if len(plain) <= limit else plain[: limit - 4].rsplit(" ", 1)[0] + " ..."


def page(found: dict[str, dict[str, Found]]) -> str:
    """The part of docs/internals/optimizers.md between ``BEGIN`` and ``END``, markers included."""
    lines = [BEGIN]
    for library, outcomes in found.items():
        (installed, *_) = distributions(name=library, path=[*sys.path, str(TORCHTITAN)])
        version = installed.version.split("+")[0]
        lines += ["", f"### {library} {version}", "", *table(library, outcomes)]
    return "\n".join([*lines, "", END])


def everything(ranks: Ranks) -> dict[str, dict[str, Found]]:
    return {
        library: {
            name: ranks.run(run, library, name, world_size=2, timeout=400)[0]
            for name in classes(library)
        }
        for library in LIBRARIES
    }


def write(page: Callable[[Ranks], str], begin: str, end: str) -> None:
    """Write a part of the page, markers included, if the command line asks for it."""
    if "--write" not in sys.argv:
        raise SystemExit("expected --write")
    ranks = Ranks()
    try:
        made_page = page(ranks)
    finally:
        ranks.close()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    PAGE.write_text(before + made_page + rest.split(end, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    write(lambda ranks: page(everything(ranks)), BEGIN, END)
