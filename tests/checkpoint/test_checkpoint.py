"""``save_checkpoint`` and ``load_checkpoint``: contents and refusals."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.model_state import holds_exactly
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.checkpoint.scene import (
    add_one,
    contents,
    different,
    failing,
    on_rank_0,
    raises_each,
    refused,
    shared_folder,
    two_groups,
    update,
    visible,
)
from tests.models import Transformer, token_batch
from tests.pool import on_ranks

# --- contents ---


@on_ranks(4)
def test_a_weight_is_written_once_and_the_ranks_share_the_work() -> None:
    folder = Path(shared_folder())
    on_rank_0(lambda: (folder / "notes.txt").write_text("mine"))
    weights = 8 * 64 * 64 * 4
    for strategy in LEVELS:  # each level overwrites the same folder
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        save_checkpoint(folder, fe.shard(model, strategy=strategy))
        dist.barrier()
        sizes = [file.stat().st_size for file in folder.iterdir()]
        assert len(sizes) == 4 + 2  # a file for each rank, the metadata, and notes.txt
        assert weights < sum(sizes) < 1.5 * weights
        dist.barrier()
    assert (folder / "notes.txt").read_text() == "mine"
    names = {*(f"model.{i}.weight" for i in range(8)), "extra"}
    assert dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == names


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within the block, writing a larger file fails, as on a full disk."""
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
        # The write of rank 1's data fails.
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
        add_one(model)
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


# --- mismatches ---


def made(change: Callable[[Transformer], None] = lambda model: None) -> Any:
    torch.manual_seed(4)
    model = Transformer(num_blocks=2)
    change(model)
    return model, fe.shard(model)


def rebuild(model: Transformer) -> None:
    """Remove a module, add another one, change two shapes, narrow a dtype."""
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


@on_ranks(2)
def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    folder = shared_folder()
    model, engine = made()
    optimizer: Any = two_groups(model)
    update(model(*token_batch(2, 1)), optimizer)
    save_checkpoint(folder, engine, optimizer)
    model, engine = made(rebuild)
    optimizer = two_groups(model)
    with refused(model, folder, *REBUILT, optimizer=optimizer) as caught:
        load_checkpoint(folder, engine, optimizer)
    lines = str(caught.value).splitlines()
    assert len(lines) == 20, lines
    model, engine = made()
    adamw = torch.optim.AdamW
    of_sgd = ["expected the state of SGD; found that of AdamW", "momentum"]
    for optimizer, parts in (
        (reference.sgd(model.parameters()), of_sgd),
        (adamw(model.parameters()), ["expected one", "of group 0", "embedding.weight"]),
        (adamw(model.head.parameters()), ["unexpected optimizer.state.blocks.0.norm1.bias"]),
    ):
        with refused(model, *parts, optimizer=optimizer):
            load_checkpoint(folder, engine, optimizer)
    stranger = r"parameters of the sharded model.*group 0.*\(5, 3\)"
    for call in (partial(load_checkpoint, folder), partial(save_checkpoint, f"{folder}-not")):
        raises_each(
            (ValueError, stranger, partial(call, engine, adamw(nn.Linear(3, 5).parameters()))),
            (TypeError, "a torch.optim.Optimizer or None; found 3", partial(call, engine, 3)),
        )
    assert not Path(f"{folder}-not").exists()


class WithBuffer(nn.Linear):
    """A layer with a persistent buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("buffer", buffer)


EXACT = [
    *((torch.uint8, torch.bfloat16), (torch.int8, torch.float16), (torch.int16, torch.float32)),
    *((torch.int32, torch.float64), (torch.bool, torch.float32), (torch.uint8, torch.int16)),
    *((torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float16)),
    *((torch.bfloat16, torch.float32), (torch.float32, torch.complex64)),
]
ROUNDED = [
    *((torch.int64, torch.float32), (torch.int32, torch.float32), (torch.int64, torch.float64)),
    *((torch.int16, torch.float16), (torch.int16, torch.bfloat16), (torch.int64, torch.int32)),
    *((torch.int8, torch.uint8), (torch.float32, torch.int64), (torch.float16, torch.bfloat16)),
    *((torch.bfloat16, torch.float16), (torch.float64, torch.complex64)),
    *((torch.complex64, torch.float32), (torch.float32, torch.bool)),
    *((torch.float8_e4m3fn, torch.float8_e5m2), (torch.bfloat16, torch.float8_e5m2)),
]


def test_dtypes_that_hold_all_values_of_another() -> None:
    assert all(holds_exactly(dtype, found) for found, dtype in EXACT)
    assert not any(holds_exactly(dtype, found) for found, dtype in ROUNDED)


@on_ranks(2)
def test_buffers_are_not_rounded() -> None:
    folder = shared_folder()
    save_checkpoint(folder, fe.shard(WithBuffer(torch.tensor([2**24 + 1]))))
    engine = fe.shard(model := WithBuffer(torch.zeros(1)))
    with refused(model, "buffer: expected torch.float32, or a dtype that it holds exactly"):
        load_checkpoint(folder, engine)
    save_checkpoint(folder, fe.shard(WithBuffer(torch.ones(1).to(torch.float8_e4m3fn))))
    engine = fe.shard(model := WithBuffer(torch.zeros(1)))
    load_checkpoint(folder, engine)
    assert model.buffer == 1


@on_ranks(2)
def test_a_buffer_that_no_rank_holds_in_full_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    buffer = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    engine = fe.shard(WithBuffer(buffer), mesh["dp"])
    with pytest.raises(ValueError, match=r"each rank holds in full; found buffer, a DTensor"):
        save_checkpoint(f"{shared_folder()}/{dist.get_rank()}", engine)


class WithScaler:
    """Has the attributes by which checkpoints recognize Megatron-Core's optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.grad_scaler, self.scale = optimizer, self, torch.ones(1)

    def get_loss_scale(self) -> torch.Tensor:
        return self.scale

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.scale = state_dict["scale"]


@on_ranks(2)
def test_optimizers_of_torch_and_of_megatron_are_saved_together() -> None:
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = fe.shard(model)

    def optimizers() -> list[Any]:
        adamw, sgd = torch.optim.AdamW(model[0].parameters()), reference.sgd(model[1].parameters())
        return [WithScaler(adamw), fe.shard_optimizer(sgd)]

    scaled, sgd = optimizers()
    model(torch.ones(2, 4)).sum().backward()
    scaled.optimizer.step()
    sgd.step()
    scaled.scale = torch.full((1,), 8.0)
    save_checkpoint(folder, engine, [scaled, sgd])
    again = optimizers()
    load_checkpoint(folder, engine, again)
    assert again[0].scale == 8
    for found, expected in zip(
        (again[0].optimizer, again[1]), (scaled.optimizer, sgd), strict=True
    ):
        for param, state in expected.state.items():
            assert found.state[param].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(reference.full(found.state[param][key]), reference.full(value))
    with pytest.raises(ValueError, match="None for weights alone; found an empty list"):
        save_checkpoint(folder, engine, [])


@on_ranks(2)
def test_bad_paths_and_bad_moments_are_refused_and_mistakes_of_one_rank_on_all() -> None:
    folder = shared_folder()
    model, engine = made()
    missing, empty, file = (f"{folder}/{name}" for name in ("missing", "empty", "file"))
    on_rank_0(Path(empty).mkdir)
    on_rank_0(partial(Path(file).write_text, "no checkpoint"))
    no_dict = "extra: expected a dict or None; found list"
    with_list: Any = partial(save_checkpoint, missing, engine, extra=[1])  # type: ignore[arg-type]
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (FileNotFoundError, f"{missing}; found nothing", lambda: load_checkpoint(missing, engine)),
        (FileNotFoundError, "a folder without .metadata", lambda: load_checkpoint(empty, engine)),
        (NotADirectoryError, file, lambda: load_checkpoint(file, engine)),
        (NotADirectoryError, file, lambda: save_checkpoint(file, engine)),
        (TypeError, no_dict, with_list),
    ]
    for kind, message, call in cases:
        with refused(model, message, kind=kind):
            call()
    with engine.unsharded(), pytest.raises(RuntimeError, match=r"engine\.unsharded\(\)"):
        save_checkpoint(missing, engine)
    is_wrong = dist.get_rank() == 1
    own = (pickle.PicklingError, AttributeError) if is_wrong else RuntimeError
    with pytest.raises(own, match="" if is_wrong else r"failed on data-parallel rank 1"):
        save_checkpoint(missing, engine, extra={"hook": lambda: 1} if is_wrong else {})
    assert not Path(missing).exists()
    assert Path(file).read_text() == "no checkpoint"
    save_checkpoint(f"{folder}/whole", engine)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(missing if is_wrong else f"{folder}/whole", engine)
