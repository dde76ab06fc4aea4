"""Optimizers at all levels on several meshes, beside one process of plain torch.

``python -m tests.programs.optimizer_matrix --write`` writes the table of
docs/internals/optimizers.md.

The model has parameters that shard unevenly: odd sizes, a parameter of one element and an empty
one, a tied weight, an embedding, a convolution. A second model has experts, which only some ranks
share.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fsdp_engine as fe
from tests.pool import Ranks
from tests.programs import optimizer_catalogue as catalogue
from tests.programs.optimizer_catalogue import LEVELS, distance
from tests.units import experts

BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
OPTIMIZERS = {
    "torch": ("AdamW", "Adafactor", "LBFGS", "Muon"),
    "schedulefree": ("AdamWScheduleFree",),
    "pytorch_optimizer": (
        *("APOLLO", "AdaMuon", "Adan", "Alice", "CAME", "Conda", "DAdaptAdam", "Fira", "GaLore"),
        *("Kron", "Lamb", "MARS", "Muon", "NorMuon", "Prodigy", "RACS", "SCION", "SM3"),
        *("SPlus", "SWATS", "ScalableShampoo", "Shampoo", "StableAdamW"),
    ),
}
MESHES: dict[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "4": (4,), "2 x 2": (2, 2)}
EXPERTS, RESUMED = "experts", "resumed"
COLUMNS = (*MESHES, EXPERTS, RESUMED)
# Ranks and level of the job that saves; of the jobs that resume.
SAVED = (2, LEVELS[3])
RESUMES = ((1, LEVELS[0]), (3, LEVELS[3]), (4, LEVELS[2]), (2, LEVELS[1]))
SAVED_AFTER, NUM_STEPS = 3, 5
# Norm of the difference of weights, relative to the norm of their change in one process. Muon and
# similar optimizers multiply matrices in 16 bits, which amplifies rounding of gradients.
MOST, MOST_OF_16_BITS = 1e-3, 2e-2
IN_16_BITS = {"torch.Muon"} | {
    f"pytorch_optimizer.{name}" for name in ("AdaMuon", "Muon", "NorMuon", "SCION")
}
# Optimizers that are refused for experts.
AT_ONCE = {"DAdaptAdam", "Prodigy", "Kron", "APOLLO"}
# Optimizers whose state or hyperparameters are not saved, or not read without trust.
WITH_OBJECTS = {"APOLLO", "Conda", "Fira", "GaLore", "SCION", "ScalableShampoo"}
# The columns in which an optimizer is refused.
REFUSED: dict[str, set[str]] = {"torch.LBFGS": {EXPERTS}}
for columns, names in ((EXPERTS, AT_ONCE), (RESUMED, WITH_OBJECTS)):
    for name in names:
        REFUSED.setdefault(f"pytorch_optimizer.{name}", set()).add(columns)

# For each column, the largest difference at any level, or an error.
Row = dict[str, float | str]


class Ragged(nn.Module):
    """A model whose parameters shard unevenly: see the module docstring."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        # No bias: after the norm its gradient would be rounding errors only.
        self.convolution = nn.Conv2d(1, 3, (2, 3), padding=(1, 1), bias=False)
        self.blocks = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 7, bias=False)])
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        image = self.convolution(x.unsqueeze(1)).mean(1)[:, : x.shape[1]]
        x = x + image + self.blocks[1](torch.tanh(self.blocks[0](x))) * self.scale
        logits = self.head(self.norm(x)) + self.nothing.sum()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Use:
    dtype: torch.dtype = torch.float64
    with_closure: bool = False
    has_empty: bool = True
    only_matrices: bool = False

    def params(self, model: nn.Module) -> list[nn.Parameter]:
        return [
            p
            for p in model.parameters()
            if (p.numel() or self.has_empty) and (p.ndim == 2 or not self.only_matrices)
        ]


def train(
    model: nn.Module,
    optimizer: Any,
    use: Use,
    *,
    steps: Iterable[int] = range(NUM_STEPS),
    rank: int = 0,
    size: int = 1,
) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in steps:
        tokens = torch.randint(11, (24, 6), generator=torch.Generator().manual_seed(step))
        step_once(model, optimizer, use, [tokens.chunk(size)[rank]], seed=step)


def step_once(
    model: nn.Module, optimizer: Any, use: Use, batch: Sequence[Tensor], seed: int
) -> None:
    torch.manual_seed(seed)

    def loss_of() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    catalogue.step_once(optimizer, loss_of, with_closure=use.with_closure)


def in_one_process(kind: Any) -> tuple[Use, dict[str, Tensor], dict[str, Tensor]]:
    first: Exception | None = None
    for use in (
        Use(),
        Use(has_empty=False),
        Use(has_empty=False, only_matrices=True),
        Use(dtype=torch.float32),
        Use(dtype=torch.float32, has_empty=False),
        Use(with_closure=True),
    ):
        model = Ragged(use.dtype)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            train(model, catalogue.made(kind, use.params(model)), use)
        except Exception as error:  # whatever a library raises
            first = first or error
            continue
        after = model.state_dict()
        if all(bool(value.isfinite().all()) for value in after.values()):
            return use, before, after
    raise RuntimeError(f"{kind.__name__} trains in no way") from first


def sharded(level: Sequence[str], mesh: Any, use: Use, kind: Any) -> tuple[Any, fe.Engine, Any]:
    model = Ragged(use.dtype)
    engine = fe.shard(
        model, mesh, *level, units=[nn.Linear, nn.Conv2d], options=fe.Options(min_unit_size=0)
    )
    return model, engine, fe.shard_optimizer(catalogue.made(kind, use.params(model)))


def on_mesh(kind: Any, alone: Any, sizes: tuple[int, ...]) -> float:
    use, before, expected = alone
    mesh = init_device_mesh("cpu", sizes)
    levels: list[tuple[str, ...]] = [(level, "no_shard") for level in LEVELS]
    if len(sizes) == 2:
        levels.append((LEVELS[3], LEVELS[1]))
    most = 0.0
    for level in levels:
        model, engine, optimizer = sharded(level, mesh, use, kind)
        train(model, optimizer, use, rank=dist.get_rank(), size=dist.get_world_size())
        apart = distance(engine.full_state_dict(), expected)
        most = max(most, apart / distance(before, expected))
    return most


def with_experts(kind: Any, use: Use) -> float:
    """The largest relative difference for a model whose experts are on two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    held, rank = mesh["experts"].get_local_rank(), dist.get_rank()
    data = [
        [(x.to(use.dtype), y.to(use.dtype)) for x, y in micro]
        for micro in experts.batches(NUM_STEPS)
    ]

    def trained(model: nn.Module, optimizer: Any, batches: Sequence[Sequence[Tensor]]) -> None:
        if hasattr(optimizer, "train"):
            optimizer.train()
        for step, batch in enumerate(batches):
            step_once(model, optimizer, use, batch, seed=step)

    alone = experts.build([0, 1]).to(use.dtype)
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    together = [[torch.cat(parts) for parts in zip(*micro, strict=True)] for micro in data]
    trained(alone, catalogue.made(kind, use.params(alone)), together)
    expected = alone.state_dict()
    most = 0.0
    for level in LEVELS:
        model = experts.build([held], mesh["experts"].get_group()).to(use.dtype)
        options = {"expert_mesh": mesh["copies"], "options": fe.Options(min_unit_size=0)}
        fe.shard(model, strategy=level, **options)
        optimizer = fe.shard_optimizer(catalogue.made(kind, use.params(model)))
        trained(model, optimizer, [micro[rank] for micro in data])
        found = {
            name: p.full_tensor() if isinstance(p, fe.FlatDTensor) else p.detach()
            for name, p in model.named_parameters()
        }
        mine = {name: expected[name] for name in found}
        before = {name: start[name] for name in found}
        most = max(most, distance(found, mine) / distance(before, mine))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, most)
    return max(everywhere)


def saved(kind: Any, alone: Any, level: str, folder: str) -> float:
    use = alone[0]
    rank, size = dist.get_rank(), dist.get_world_size()
    model, engine, optimizer = sharded((level,), init_device_mesh("cpu", (size,)), use, kind)
    train(model, optimizer, use, steps=range(SAVED_AFTER), rank=rank, size=size)
    fe.save_checkpoint(folder, engine, optimizer)
    return 0.0


def resumed(kind: Any, alone: Any, level: str, folder: str) -> float:
    use, before, expected = alone
    rank, size = dist.get_rank(), dist.get_world_size()
    model, engine, optimizer = sharded((level,), init_device_mesh("cpu", (size,)), use, kind)
    fe.load_checkpoint(folder, engine, optimizer)
    train(model, optimizer, use, steps=range(SAVED_AFTER, NUM_STEPS), rank=rank, size=size)
    return distance(engine.full_state_dict(), expected) / distance(before, expected)


def run(library: str, name: str, what: str, *args: Any) -> float | str:
    kind = catalogue.classes(library)[name]
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = in_one_process(kind)
        try:
            if what == "stepped":
                model, _, optimizer = sharded((LEVELS[3],), None, alone[0], kind)
                return catalogue.how_stepped(model, optimizer)
            if what in MESHES:
                return on_mesh(kind, alone, MESHES[what])
            if what == EXPERTS:
                return with_experts(kind, replace(alone[0], has_empty=True))
            return (saved if what == "save" else resumed)(kind, alone, *args)
        except (ValueError, TypeError) as error:
            return catalogue._text(error)


def row(ranks: Ranks, library: str, name: str) -> Row:
    def cell(what: str, num_ranks: int, *args: Any) -> float | str:
        found = ranks.run(run, library, name, what, *args, world_size=num_ranks, timeout=300)
        errors = [each for each in found if isinstance(each, str)]
        return errors[0] if errors else max(found)

    def save_and_resume() -> float | str:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/checkpoint"
            if isinstance(error := cell("save", SAVED[0], SAVED[1], path), str):
                return error
            found = [cell("resume", size, level, path) for size, level in RESUMES]
        errors = [each.replace(f"{path}: ", "") for each in found if isinstance(each, str)]
        return errors[0] if errors else max(map(float, found))

    cells: Row = {"stepped": cell("stepped", 2)}
    for what, sizes in MESHES.items():
        cells[what] = cell(what, torch.Size(sizes).numel())
    cells[EXPERTS] = cell(EXPERTS, 4)
    cells[RESUMED] = save_and_resume()
    return cells


def everything(ranks: Ranks) -> dict[str, Row]:
    return {
        f"{library}.{name}": row(ranks, library, name)
        for library, names in OPTIMIZERS.items()
        for name in names
    }


def page(rows: dict[str, Row]) -> str:
    """The part of docs/internals/optimizers.md between ``BEGIN`` and ``END``, markers included."""
    titles = [*(f"{mesh} ranks" if mesh != "1" else "1 rank" for mesh in MESHES), *COLUMNS[-2:]]
    lines = [f"| optimizer | steps | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    notes: dict[str, list[str]] = {}
    for name, cells in rows.items():
        shown = []
        for column in COLUMNS:
            value = cells[column]
            if isinstance(value, str):
                notes.setdefault(catalogue.shortened(value, 240), []).append(f"`{name}`")
            shown.append("refused" if isinstance(value, str) else power(value))
        lines.append(f"| `{name}` | {cells['stepped']} | {' | '.join(shown)} |")
    lines += [""] + [f"- {' '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join([BEGIN, "", *lines, "", END])


def power(value: float) -> str:
    """A bound that does not change with rounding: a power of ten, in words for 1e-9 and less."""
    bounds = (1e-9, 1e-6, 1e-3, 2e-2)
    return next((f"{bound:.0e}" for bound in bounds if value <= bound), f"**{value:.0e}**")


def most_of(name: str) -> float:
    return MOST_OF_16_BITS if name in IN_16_BITS else MOST


if __name__ == "__main__":
    catalogue.write(lambda ranks: page(everything(ranks)), BEGIN, END)
