"""Models, meshes and training that the tests of checkpoints share."""

from __future__ import annotations

import errno
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import fsdp_engine as fe
from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.reader import FileView, data_offset
from fsdp_engine.optim import shard_optimizer
from fsdp_engine.strategies import ALL_STRATEGIES, LEVELS
from tests import models, reference
from tests.models import Transformer, token_batch, vector_batch
from tests.pool import Ranks
from tests.training import mesh_of

NUM_STEPS = 2
TIED = {"blocks.6.up.weight": "blocks.2.up.weight"}  # names in Everything: {dropped: kept}


class Everything(models.Regression):
    """Parameters that are frozen, tied, scalar, empty, non-contiguous, unused or of mixed dtypes;
    buffers; extra state."""

    def __init__(self) -> None:
        super().__init__()
        first, last = models.Mlp(), models.Mlp()
        last.up.weight = first.up.weight
        others = [models.PartlyUnused(), models.Normalised(), Counting()]
        blocks = [models.LoraLinear(), models.MixedBlock(), first, *others, last]
        self.blocks = nn.ModuleList(blocks)
        self.odd = models.OddBlock()

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.cat([self.odd(x[:, :7]), x[:, 7:]], 1)


class Counting(nn.Module):
    """Has no weights. Its extra state, without tensors, records calls in a number and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0, "list": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls = {"forward": self.calls["forward"] + 1, "list": [*self.calls["list"], 1]}
        return x

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


Config = dict[str, Any]


def rows(name: str, parameter: Tensor) -> int:
    return parameter.shape[-1] if parameter.ndim == 2 and parameter.numel() else 1


def shard(model: nn.Module, config: Config) -> fe.Engine:
    return fe.shard(
        model,
        mesh_of(*config["shape"]) if config["shape"] else None,  # None: the engine makes one
        config["strategy"],
        config["outer"],
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=config.get("param_dtype")),
        options=fe.Options(granule=rows if config.get("granule") else None),
    )


def two_groups(model: nn.Module, *, swap: bool = False, lr: float = 1e-2) -> torch.optim.AdamW:
    """Matrices have weight decay; other parameters have none, and their own rate and betas. Frozen
    parameters are left out."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1, "lr": lr},
        {"params": [p for p in trainable if p.ndim < 2], "betas": (0.8, 0.95), "lr": lr / 3},
    ]
    if swap:
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    return torch.optim.AdamW(groups, weight_decay=0.0, eps=1e-6)


def contents(model: nn.Module, optimizer: Any = None, *, whole: bool = True) -> dict[str, Any]:
    """Everything that a checkpoint must bring back, by name; a collective if ``whole``."""
    take = reference.full if whole else Tensor.detach
    found: dict[str, Any] = {
        f"model.{name}": take(value) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups if optimizer else ():
        for param in group["params"]:
            name = names[id(param)]
            found[f"group.{name}"] = {k: v for k, v in group.items() if k != "params"}
            for key, value in optimizer.state.get(param, {}).items():
                found[f"state.{name}.{key}"] = take(value)
    return found


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Keys whose values differ in any bit. A slice in ``found`` is compared with the same
    elements."""
    keys = found.keys() ^ expected.keys()
    return [f"only in one: {key}" for key in sorted(keys)] + [
        f"{key}: {found[key]}, expected {expected[key]}"
        for key in found.keys() & expected.keys()
        if not same(found[key], expected[key])
    ]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        part = reference.slice_like(expected, found)
        return found.dtype == expected.dtype and torch.equal(reference.held(found), part)
    return bool(found == expected)


def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """One step of training on a loss; returns the value of the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, width: int = 12) -> float:
    """One step of training on this rank's own data."""
    return update(model(*vector_batch(3, 100 * number + rank(), width)), optimizer)


def add_one(model: nn.Module, engine: fe.Engine | None = None) -> None:
    """Change all weights, to values that no checkpoint has."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    if engine is not None:
        engine.weights_changed()


def trained(config: Config, seed: int = 1) -> tuple[nn.Module, fe.Engine, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Everything()
    engine = shard(model, config)
    optimizer = two_groups(model)
    if config.get("wrap"):
        shard_optimizer(optimizer)
    for number in range(NUM_STEPS):
        step(model, optimizer, number)
    return model, engine, optimizer


def label(config: Config) -> str:
    shape = "x".join(map(str, config["shape"]))
    options = "".join(f"-{key}" for key in ("granule", "param_dtype", "wrap") if config.get(key))
    return f"{config['strategy']}-{config['outer']}-{shape}{options}"


def all_configs() -> dict[int, list[Config]]:
    """Configs by world size; 0 is one process without a process group. Some have further
    options."""
    four = [
        {"strategy": s.inner.name, "outer": s.outer.name, "shape": (2, 2), "wrap": number % 2}
        for number, s in enumerate(ALL_STRATEGIES)
    ]
    four.append({"strategy": "optim_grads_params", "outer": "optim", "shape": (4, 1)})
    four.append({"strategy": "optim", "outer": "optim", "shape": (1, 4), "granule": True})
    two: list[Config] = [
        {"strategy": level, "outer": "no_shard", "shape": (2,), "granule": level == "optim_grads"}
        for level in LEVELS
    ]
    one: list[Config] = [
        {"strategy": level, "outer": level, "shape": (1, 1)} for level in list(LEVELS)[::3]
    ]
    none: list[Config] = [
        {"strategy": level, "outer": "no_shard", "shape": ()} for level in list(LEVELS)[::3]
    ]
    return {4: four, 2: two, 1: one, 0: none}


def run_on(ranks: Ranks, world_size: int, *call: Any, timeout: float = 240) -> list[Any]:
    """``ranks.run``, where a world of size 0 is one process without a process group."""
    group = world_size > 0
    return ranks.run(*call, world_size=max(world_size, 1), group=group, timeout=timeout)


def shared_folder() -> str:
    """A fresh folder that all ranks know. A collective."""
    if not dist.is_initialized():
        return tempfile.mkdtemp()
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    return found[0]


class Values:
    """Something to be saved beside the model."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Ema:
    """An average of weights, written as in the documentation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                self.shadow[name].lerp_(param, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def small(
    strategy: str = "optim_grads_params", seed: int = 0, steps: int = 1, **options: Any
) -> tuple[Any, fe.Engine, Any]:
    """A small Transformer, its engine, and an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = Transformer(**{"num_blocks": 2, **options})
    engine = fe.shard(model, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, steps)
    return model, engine, optimizer


def train(model: nn.Module, optimizer: Any, num_steps: int = 1) -> None:
    for number in range(num_steps):
        update(model(*token_batch(2, 10 * number + rank())), optimizer)


def rank() -> int:
    return reference.rank_and_size()[0]


def visible(folder: str | Path) -> list[str]:
    """Everything in a folder but the lock."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name != ".lock")


def exported(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of an export, as the safetensors library reads them."""
    files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    found = {name: value for file in files for name, value in file.items()}
    assert len(found) == sum(map(len, files))
    return found


def on_rank_0(write: Callable[[], Any]) -> None:
    """Run a function on rank 0, between barriers."""
    if dist.is_initialized():
        dist.barrier()
    if rank() == 0:
        write()
    if dist.is_initialized():
        dist.barrier()


def raises_each(*rows: tuple[type[Exception], str, Callable[[], Any]]) -> None:
    """Check that each row's call raises its error, with a text that matches."""
    for kind, message, call in rows:
        with pytest.raises(kind, match=message):
            call()


def most_allocated(function: Callable[[], Any]) -> int:
    """Peak bytes of tensors that a function allocates, beyond those at its start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def refused(
    model: nn.Module, *parts: str, kind: type[Exception] = ValueError, optimizer: Any = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error whose message has all ``parts``, and unchanged values. A collective."""
    before = contents(model, optimizer)
    with pytest.raises(kind) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    assert different(contents(model, optimizer, whole=False), before) == []


@contextmanager
def failing(
    owner: Any,
    name: str,
    on_rank: int | None = None,
    after: int = 0,
    counter: Iterator[int] | None = None,
) -> Iterator[None]:
    """Make a function raise after ``after`` calls, as on a full disk. ``counter`` counts calls of
    several functions together."""
    original, counter = getattr(owner, name), counter or itertools.count()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if on_rank in (None, rank()) and next(counter) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    with patch.object(owner, name, fails):
        yield


def flip(path: Path, place: int | None = None, bits: int = 64) -> None:
    """Change a byte of a file; None: the one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= bits
    path.write_bytes(content)


def byte_of(folder: str | Path, key: str) -> tuple[Path, int]:
    """File and place of the first byte of a tensor's values."""
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == key)
    path = Path(folder) / place.relative_path
    with open(path, "rb") as file:
        start = data_offset(FileView(file, place.offset, place.length), 0)
    assert start is not None
    return path, place.offset + start


def without_sums(folder: Path) -> None:
    """Remove the checksums, which plain DCP and older versions of the engine do not write."""
    metadata = read_metadata(folder)
    vars(metadata).pop("fsdp_engine_sums")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def warned_first(match: str) -> AbstractContextManager[Any]:
    """Context of a warning that only the first rank gives."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return pytest.warns(UserWarning, match=match) if is_first else nullcontext()
