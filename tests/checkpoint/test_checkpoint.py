"""``save_checkpoint`` and ``load_checkpoint``: continuing, contents, and refusals."""

from __future__ import annotations

import itertools
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.optim import shard_optimizer
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.checkpoint.scene import (
    Config,
    contents,
    different,
    failing,
    label,
    refused,
    shard,
    shared_folder,
    step,
    two_groups,
    visible,
)
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_ranks

# --- continuing ---

TOTAL, HALF = 3, 1
SAME: Config = {"strategy": "optim_grads_params", "outer": "optim", "shape": (2, 2)}
OTHERS: dict[int, list[Config]] = {
    4: [
        {"strategy": "no_shard", "outer": "no_shard", "shape": (4,)},
        {"strategy": "optim_grads", "outer": "no_shard", "shape": (2, 2), "wrap": True},
    ],
    2: [{"strategy": "optim_grads_params", "outer": "no_shard", "shape": (2,)}],
}
DTYPES = [None, torch.bfloat16]


def regrouped(num_ranks: int) -> reference.Data:
    """The data of four ranks, dealt to fewer."""
    per_rank = 4 // num_ranks
    return [
        [
            [
                tuple(torch.cat(each) for each in zip(*parts[i : i + per_rank], strict=True))
                for i in range(0, 4, per_rank)
            ]
            for parts in microbatches
        ]
        for microbatches in reference.make_data(token_batch, TOTAL, 2, 4)
    ]


def run_and_save(folder: str) -> list[list[reference.Step]]:
    """Trains to the end, saving half way; the steps after it, for each dtype."""
    found = []
    data = regrouped(4)
    for dtype in DTYPES:
        torch.manual_seed(1)
        model = Transformer(num_blocks=2, tied=True)
        engine = shard(model, {**SAME, "param_dtype": dtype})
        make = reference.once(reference.adamw)
        reference.train_sharded(model, engine, data[:HALF], make, max_norm=1.0)
        save_checkpoint(f"{folder}/{dtype}", engine, make(()), {"step": HALF})
        found.append(reference.train_sharded(model, engine, data[HALF:], make, max_norm=1.0))
    return found


def resume(folder: str, configs: list[Config], expected: list[list[reference.Step]]) -> list[str]:
    """Continues from half way; what differs from the run that was not interrupted."""
    lines = []
    data = regrouped(dist.get_world_size())
    for config, (dtype, steps) in itertools.product(configs, zip(DTYPES, expected, strict=True)):
        torch.manual_seed(3)
        model = Transformer(num_blocks=2, tied=True)
        engine = shard(model, {**config, "param_dtype": dtype})
        # Full parameters that were gathered before the loading must not be used after it.
        model(*data[0][0][dist.get_rank()])
        optimizer = reference.adamw(model.parameters())
        if config.get("wrap"):
            shard_optimizer(optimizer)
        extra = load_checkpoint(f"{folder}/{dtype}", engine, optimizer)
        found = reference.train_sharded(
            model, engine, data[extra["step"] :], lambda _, o=optimizer: o, max_norm=1.0
        )
        # In bf16 a weight may lie on the other side of a rounding boundary.
        tolerance = 0.0 if config == SAME else 2e-5 if dtype is None else 5e-2
        lines += [
            f"{label(config)} {dtype}: {line}"
            for line in reference.differences(found, steps, tolerance)
        ]
    return lines


def test_a_resumed_run_continues_as_if_nothing_had_happened(ranks: Ranks, tmp_path: Path) -> None:
    """Bit for bit with the same ranks and strategy, up to rounding with others."""
    expected = ranks.run(run_and_save, str(tmp_path))[0]
    for world_size, configs in {4: [SAME, *OTHERS[4]], 2: OTHERS[2]}.items():
        lines = ranks.run(resume, str(tmp_path), configs, expected, world_size=world_size)
        assert not any(lines), "\n".join(lines[0][:10])


# --- contents ---


def save_over(folder: str) -> list[tuple[int, int]]:
    """Saves again and again into one folder; the number of files and bytes after each."""
    found = []
    for strategy in LEVELS:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        save_checkpoint(folder, fe.shard(model, strategy=strategy))
        dist.barrier()
        sizes = [file.stat().st_size for file in Path(folder).iterdir()]
        found.append((len(sizes), sum(sizes)))
        dist.barrier()
    return found


def test_a_weight_is_written_once_and_the_ranks_share_the_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for num_files, num_bytes in ranks.run(save_over, str(tmp_path))[0]:
        assert num_files == 4 + 2  # a file for each rank, the metadata, and the user's
        weights = 8 * 64 * 64 * 4
        assert weights < num_bytes < 1.5 * weights
    assert (tmp_path / "notes.txt").read_text() == "mine"
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    names = {*(f"model.{i}.weight" for i in range(8)), "extra"}
    assert metadata.state_dict_metadata.keys() == names


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within it, writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@on_ranks(2)
def test_a_save_that_fails_leaves_nothing_or_the_older_checkpoint_whole() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    engine = fe.shard(model)
    faults: dict[str, Callable[[], Any]] = {
        r"File too large.*checkpoint/__shards_": lambda: files_of_at_most(1 << 14),
        # What rank 1 has to write is missing.
        r"writing failed .*No space left": lambda: failing(Writer, "write_data", on_rank=1),
        r"writing failed .*No space left on": lambda: failing(Writer, "finish"),
    }
    for message, fault in faults.items():
        folder = Path(shared_folder()) / "checkpoint"
        with fault(), pytest.raises(OSError, match=message):
            save_checkpoint(folder, engine)
        dist.barrier()
        assert not folder.exists() or visible(folder) == []
        dist.barrier()
        save_checkpoint(folder, engine, extra={"which": "older"})
        saved = contents(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        files = visible(folder)
        with fault(), pytest.raises(OSError, match=message):
            save_checkpoint(folder, engine, extra={"which": "newer"})
        dist.barrier()
        assert visible(folder) == files
        assert load_checkpoint(folder, engine) == {"which": "older"}
        assert different(contents(model), saved) == []
        save_checkpoint(folder, engine, extra={"which": "third"})
        dist.barrier()
        assert len(list(folder.glob("*.distcp"))) == 2
        assert load_checkpoint(folder, engine) == {"which": "third"}


@on_ranks(4)
def test_ranks_outside_the_mesh_take_no_part() -> None:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another; each pair saves its own."""
    half = dist.get_rank() // 2
    folder = f"{shared_folder()}/{half}"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    torch.manual_seed(half)
    model = Transformer(num_blocks=1)
    engine = fe.shard(model, mesh["data"])
    expected = contents(model)
    save_checkpoint(folder, engine, extra={"half": half})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert load_checkpoint(folder, engine) == {"half": half}
    assert different(contents(model), expected) == []


@on_ranks(2)
def test_every_rank_loads_the_buffers_of_the_first() -> None:
    folder = shared_folder()
    model = models.Chain(models.Normalised())
    engine = fe.shard(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    norm: Any = model.blocks[0].norm
    own = norm.running_mean.clone()
    save_checkpoint(folder, engine)
    load_checkpoint(folder, engine)
    assert torch.equal(norm.running_mean, own) == (dist.get_rank() == 0)
    assert norm.num_batches_tracked.item() == 1
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, norm.running_mean)
    assert torch.equal(*gathered)


# --- what does not fit ---


def prepare(change: Callable[[Transformer], None] = lambda model: None) -> Any:
    torch.manual_seed(4)
    model = Transformer(num_blocks=2)
    change(model)
    return model, fe.shard(model)


def save_default(folder: str) -> None:
    model, engine = prepare()
    optimizer = two_groups(model)
    model(*token_batch(2, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(folder, engine, optimizer)


@pytest.fixture(scope="module")
def default(ranks: Ranks, tmp_path_factory: Any) -> str:
    """A checkpoint of a Transformer of two blocks and its AdamW."""
    folder = str(tmp_path_factory.mktemp("default") / "checkpoint")
    ranks.run(save_default, folder, world_size=2)
    return folder


def rebuild(model: Transformer) -> None:
    """Something missing, something else, two shapes changed, a dtype narrowed."""
    del model.blocks[1].out
    model.blocks[0].extra = nn.Linear(2, 3)
    model.head = nn.Linear(models.DIM, models.VOCABULARY + 1, bias=False)
    model.norm.weight = nn.Parameter(torch.ones(models.DIM, 1))
    model.norm.bias = nn.Parameter(torch.zeros(models.DIM, dtype=torch.bfloat16))
    model.norm.bias.requires_grad_(False)


REBUILT = [
    "found 19 that differ",
    "missing model.blocks.0.extra.weight: expected shape (3, 2), float32; found nothing",
    "missing model.blocks.0.extra.bias: expected shape (3,), float32; found nothing",
    "unexpected model.blocks.1.out.weight: expected nothing; found shape (12, 12), float32",
    "unexpected model.blocks.1.out.bias",
    "model.head.weight: expected shape (24, 12), float32; found shape (23, 12), float32",
    "model.norm.weight: expected shape (12, 1), float32; found shape (12,), float32",
    "model.norm.bias: expected torch.bfloat16, or a dtype that it holds exactly; found "
    "torch.float32",
    "optimizer.state.head.weight.exp_avg: expected shape (24, 12), float32; found shape "
    "(23, 12), float32",
    "optimizer.state.head.weight.exp_avg_sq",
    "optimizer.state.norm.weight.exp_avg: expected shape (12, 1), float32; found shape (12,)",
    "missing optimizer.state.blocks.0.extra.bias",
    "unexpected optimizer.state.blocks.1.out.bias",
    "unexpected optimizer.state.norm.bias",
    "one betas for all of group 0; found (0.9, 0.999) of embedding.weight and (0.8, 0.95) of "
    "norm.weight",
]


def refuse_each(folder: str) -> list[str]:
    """A model, and optimizers, that do not fit; the message about the model."""
    model, engine = prepare(rebuild)
    optimizer: Any = two_groups(model)
    with refused(model, folder, *REBUILT, optimizer=optimizer) as caught:
        load_checkpoint(folder, engine, optimizer)
    model, engine = prepare()
    adamw = torch.optim.AdamW
    others: list[tuple[Any, list[str]]] = [
        (
            reference.sgd(model.parameters()),
            ["expected the state of SGD; found that of AdamW", "momentum"],
        ),
        (adamw(model.parameters()), ["expected one", "of group 0", "embedding.weight"]),
        (adamw(model.head.parameters()), ["unexpected optimizer.state.blocks.0.norm1.bias"]),
    ]
    for optimizer, parts in others:
        with refused(model, *parts, optimizer=optimizer):
            load_checkpoint(folder, engine, optimizer)
    strangers: list[tuple[Any, type[Exception], str]] = [
        (
            adamw(nn.Linear(3, 5).parameters()),
            ValueError,
            r"parameters of the sharded model.*group 0.*\(5, 3\)",
        ),
        (3, TypeError, "expected a torch.optim.Optimizer or None; found 3"),
    ]
    for optimizer, kind, message in strangers:
        with pytest.raises(kind, match=message):
            load_checkpoint(folder, engine, optimizer)
        with pytest.raises(kind, match=message):
            save_checkpoint(f"{folder}-not", engine, optimizer)
    assert not Path(f"{folder}-not").exists()
    return str(caught.value).splitlines()


def test_everything_that_does_not_fit_is_listed_at_once(ranks: Ranks, default: str) -> None:
    lines, others = ranks.run(refuse_each, default, world_size=2)
    assert lines == others
    assert len(lines) == 20, lines


@on_ranks(2)
def test_bad_paths_and_bad_moments_are_refused() -> None:
    folder = shared_folder()
    model, engine = prepare()
    missing, empty, file = (f"{folder}/{name}" for name in ("missing", "empty", "file"))
    Path(empty).mkdir(exist_ok=True)
    Path(file).write_text("no checkpoint")
    dist.barrier()
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (FileNotFoundError, f"{missing}; found nothing", lambda: load_checkpoint(missing, engine)),
        (
            FileNotFoundError,
            f"{empty}; found a folder without .metadata",
            lambda: load_checkpoint(Path(empty), engine),
        ),
        (NotADirectoryError, file, lambda: load_checkpoint(file, engine)),
        (NotADirectoryError, file, lambda: save_checkpoint(file, engine)),
        (
            TypeError,
            "extra: expected a dict or None; found list",
            lambda: save_checkpoint(missing, engine, extra=[1]),  # type: ignore[arg-type]
        ),
    ]
    for kind, message, call in cases:
        with refused(model, message, kind=kind):
            call()
    with engine.unsharded(), pytest.raises(RuntimeError, match=r"engine\.unsharded\(\)"):
        save_checkpoint(missing, engine)
    assert not Path(missing).exists()
    assert Path(file).read_text() == "no checkpoint"


def differ(folder: str, default: str) -> str:
    """Rank 1 makes a mistake; the error is raised on all."""
    _, engine = prepare()
    is_wrong = dist.get_rank() == 1
    own = (pickle.PicklingError, AttributeError) if is_wrong else (RuntimeError,)
    with pytest.raises(own) as caught:
        save_checkpoint(folder, engine, extra={"hook": lambda: 1} if is_wrong else {})
    assert not Path(folder).exists()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(f"{folder}-1" if is_wrong else default, engine)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_raised_on_all(ranks: Ranks, default: str, tmp_path: Path) -> None:
    messages = ranks.run(differ, str(tmp_path / "new"), default, world_size=2)
    assert "save_checkpoint() failed on data-parallel rank 1" in messages[0]
