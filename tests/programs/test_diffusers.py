"""Models of diffusers: a plain loop trains them, and diffusers reads the saved folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.integrations.trainer_scene import LEVELS, as_launched, num_ranks
from tests.pool import Ranks
from tests.programs.packages import PROGRAM

pytestmark = PROGRAM
STEPS = 3
SIZE = 8  # height and width of an image
BATCH = 4  # rows over all ranks


SIZES: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": SIZE,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 8,
        "norm_num_groups": 4,
    },
    "DiTTransformer2DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 3,
        "num_layers": 2,
        "sample_size": SIZE,
        "patch_size": 2,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 4,
        "dropout": 0.0,
    },
}


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether a module is a unit: all transformer blocks but the first, of which the model calls a
    submodule directly."""
    return name.startswith("transformer_blocks.") and name.count(".") == 1 and name[-1] != "0"


UNITS = {"UNet2DModel": None, "DiTTransformer2DModel": _is_block}


def build(name: str, seed: int = 0) -> nn.Module:
    as_launched()
    import diffusers

    torch.manual_seed(seed)
    model = getattr(diffusers, name)(**SIZES[name])
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


def predict(model: nn.Module, noisy: Tensor, times: Tensor) -> Tensor:
    if "DiT" in type(model).__name__:
        return model(noisy, timestep=times, class_labels=times % 10).sample[:, :3]
    return model(noisy, times).sample


def train(model: nn.Module) -> list[float]:
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=100)
    # Not Adam: biases of keys have only rounding errors as gradients, which Adam would turn into
    # steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank = dist.get_rank() if num_ranks() > 1 else 0
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images, noise = torch.randn(2, BATCH, 3, SIZE, SIZE, generator=generator)
        times = torch.randint(0, 100, (BATCH,), generator=generator)
        mine = slice(rank * BATCH // num_ranks(), (rank + 1) * BATCH // num_ranks())
        noisy = scheduler.add_noise(images, noise, times)[mine]
        loss = nn.functional.mse_loss(predict(model, noisy, times[mine]), noise[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def read(folder: str) -> dict[str, Tensor]:
    import diffusers

    name = json.loads((Path(folder) / "config.json").read_text())["_class_name"]
    model = getattr(diffusers, name).from_pretrained(folder, low_cpu_mem_usage=False)
    return dict(model.state_dict())


def expected_of(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(name)
    return train(model), dict(model.state_dict())


def trained_and_saved(name: str, level: str, folder: str, size: str) -> dict[str, Any]:
    model = build(name)
    given: dict[str, Any] = {"strategy": level, "units": UNITS[name], "min_unit_size": 0}
    engine = fe.shard(model, **given)
    losses = train(model)
    fe.save_pretrained(model, folder, max_shard_size=size)
    other = fe.shard(build(name, seed=1), **given)
    report = fe.load_pretrained(other, folder)
    assert not report.missing
    assert not report.unexpected
    return {"losses": losses, "saved": engine.full_state_dict(), "loaded": other.full_state_dict()}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {name: ranks.run(expected_of, name, world_size=1, group=False)[0] for name in SIZES}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "size"), [("UNet2DModel", "5GB"), ("DiTTransformer2DModel", "20KB")]
)
def test_a_model_is_trained_and_saved_and_diffusers_reads_it(
    ranks: Ranks, plain, tmp_path: Path, name: str, size: str, level: str
) -> None:
    losses, weights = plain[name]
    found = ranks.run(trained_and_saved, name, level, str(tmp_path), size, world_size=2)
    means = [sum(each) / 2 for each in zip(*(one["losses"] for one in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    file = "diffusion_pytorch_model.safetensors"
    in_parts = size == "20KB"
    assert (tmp_path / f"{file}.index.json").exists() is in_parts
    assert (tmp_path / file).exists() is not in_parts
    read_by_diffusers = ranks.run(read, str(tmp_path), world_size=1, group=False)[0]
    assert read_by_diffusers.keys() == weights.keys()
    for one in found:
        torch.testing.assert_close(one["saved"], weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(read_by_diffusers, one["saved"], rtol=0, atol=0)
        torch.testing.assert_close(one["loaded"], one["saved"], rtol=0, atol=0)


def averaged(level: str | None) -> list[Tensor]:
    """Outputs with the averages of diffusers' ``EMAModel``, and with the trained weights again."""
    as_launched()
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    if level is not None:
        fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMAModel(model.parameters(), decay=0.9)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    with_averages = model(batch).detach()
    ema.restore(model.parameters())
    return [with_averages, model(batch).detach()]


@pytest.mark.parametrize("level", LEVELS)
def test_averages_of_diffusers_are_those_of_one_process(ranks: Ranks, level: str) -> None:
    expected = ranks.run(averaged, None, world_size=1, group=False)[0]
    for found in ranks.run(averaged, level, world_size=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
