"""Checkpoints to and from FSDP2 and unsharded models, and what a rank holds while it reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.checkpoint.reader import READ_BUFFER_BYTES, ReadBuffer, read_box
from tests.checkpoint.scene import run_on
from tests.models import Transformer, token_batch
from tests.pool import Ranks

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:You are using .torch.load."),
]


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer(num_blocks=2)
    for module in (*model.blocks, model):
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded(seed: int, strategy: str) -> tuple[nn.Module, fe.Engine, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, strategy=strategy)
    return model, engine, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        model(*token_batch(2, 10 * number + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state by name, whole."""
    found = {}
    for name, param in model.named_parameters():
        values = {"": param, **optimizer.state[param]}
        for key, value in values.items():
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name} {key}"] = tensor.detach().clone()
    return found


def save_here(folder: str) -> dict[str, Tensor]:
    model, engine, optimizer = sharded(0, "optim_grads_params")
    train(model, optimizer)
    fe.Checkpointer(folder, engine, optimizer).save(2)
    return whole(model, optimizer)


def load_into_fsdp2(folder: str) -> dict[str, Tensor]:
    model, optimizer = fsdp2(1)
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    return whole(model, optimizer)


def save_fsdp2(folder: str) -> dict[str, Tensor]:
    model, optimizer = fsdp2(0)
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return whole(model, optimizer)


def load_here(folder: str, strategy: str) -> dict[str, Tensor]:
    model, engine, optimizer = sharded(1, strategy)
    fe.load_checkpoint(folder, engine, optimizer)
    return whole(model, optimizer)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_an_fsdp2_model_loads_what_was_saved_here(ranks: Ranks, tmp_path: Path) -> None:
    for world_size in (0, 2):
        expected = run_on(ranks, world_size, save_here, str(tmp_path / f"{world_size}"))[0]
        folder = str(tmp_path / f"{world_size}" / "step-00000002")
        for others in (2, 4):
            for found in ranks.run(load_into_fsdp2, folder, world_size=others):
                assert equal(found, expected)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_what_an_fsdp2_model_saved_is_loaded_here(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    expected = ranks.run(save_fsdp2, str(tmp_path), world_size=4)[0]
    for world_size in (0, 1, 2):
        for found in run_on(ranks, world_size, load_here, str(tmp_path), strategy):
            assert equal(found, expected)


@pytest.mark.parametrize("world_size", [0, 1, 4])
def test_an_unsharded_model_loads_a_step_with_plain_dcp(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    expected = run_on(ranks, world_size, save_here, str(tmp_path))[0]
    torch.manual_seed(5)
    model = Transformer(num_blocks=2)
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "step-00000002")
    model.load_state_dict(weights)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[f"{name} "])


# --- what a rank holds while it reads ---


class Big(nn.Module):
    """Two tensors, each several times larger than the read buffer."""

    def __init__(self) -> None:
        super().__init__()
        rows = 6 * READ_BUFFER_BYTES // 4 // 1000
        self.first = nn.Parameter(torch.empty(rows, 1000))
        self.second = nn.Parameter(torch.empty(rows, 1000))


def save_big(folder: str, dtype: torch.dtype) -> None:
    model = Big()
    for number, param in enumerate(model.parameters()):
        numbers = torch.arange(param.numel()).add_(number).remainder_(200)
        param.data.copy_(numbers.view(param.shape))
    dcp.save({"model": model.to(dtype).state_dict()}, checkpoint_id=folder, no_dist=True)


def peak_of_load(folder: str) -> tuple[int, bool]:
    """Bytes that the load of a whole tensor adds to this process, at most; and if it was right."""
    model = Big()
    engine = fe.shard(model)
    fe.load_checkpoint(folder, engine)  # whatever is imported and allocated once
    for param in model.parameters():
        param.data.zero_()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    fe.load_checkpoint(folder, engine)
    peak = resident("VmHWM") - before
    right = True
    for number, param in enumerate(model.parameters()):
        numbers = torch.arange(param.flat_placement.start, param.flat_placement.stop)
        right &= torch.equal(param.local, numbers.add(number).remainder(200).float())
    return peak, right


def resident(field: str) -> int:
    """Bytes from ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_holds_no_more_than_its_shards_and_a_buffer(
    ranks: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    save_big(str(tmp_path), dtype)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert max(sizes) > 5 * READ_BUFFER_BYTES
    for peak, right in ranks.run(peak_of_load, str(tmp_path), world_size=4):
        assert right
        assert peak < READ_BUFFER_BYTES + (4 << 20)


def test_any_box_of_a_tensor_is_read_through_a_buffer_of_any_size(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 4), (1, 9), (6, 1)]
    for shape, num_bytes in itertools.product(shapes, (2, 16, 50, 4096)):
        tensor = torch.rand(shape, generator=draw)
        path = tmp_path / "tensor"
        path.write_bytes(b"before" + tensor.numpy().tobytes())
        for _ in range(10):
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=draw).tolist()) for n in shape]
            offsets, lengths = [a for a, _ in ends], [b - a for a, b in ends]
            expected = tensor[tuple(slice(a, b) for a, b in ends)]
            targets: list[Tensor] = [
                torch.zeros(lengths),
                torch.zeros(lengths, dtype=torch.float64),
                torch.zeros([2 * n for n in lengths])[tuple(slice(0, None, 2) for _ in lengths)],
            ]
            for target in targets:
                with open(path, "rb") as file:
                    arguments: Any = (offsets, lengths, target, ReadBuffer(num_bytes))
                    read_box(file, 6, shape, torch.float32, *arguments)
                assert torch.equal(target.to(torch.float32), expected)
    path.write_bytes(b"before")
    with open(path, "rb") as file, pytest.raises(EOFError, match="tensor: expected 16 bytes more"):
        read_box(file, 6, (4,), torch.float32, [0], [4], torch.zeros(4), ReadBuffer(64))
