"""``fe.save_pretrained``: what it writes, transformers reads, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn

import fsdp_engine as fe
from tests.checkpoint.scene import shared_folder
from tests.pool import Ranks, on_ranks
from tests.pretrained.families import FAMILIES, build, builder
from tests.pretrained.folders import in_files, read_by_transformers


def saved(family: str, folder: str, level: str, other: str) -> None:
    """Loaded from ``folder``, and written to ``other``."""
    model = builder(family)()
    engine = fe.shard(model, strategy=level, initial_values="empty")
    fe.load_pretrained(engine, folder)
    fe.save_pretrained(model, other, max_shard_size="6KB")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_transformers_saves(
    ranks: Ranks, tmp_path: Path, family: str
) -> None:
    torch.manual_seed(0)
    build(family).save_pretrained(tmp_path / "theirs")
    expected = in_files(tmp_path / "theirs")
    for world_size, level in ((1, "no_shard"), (2, "optim_grads_params")):
        ours = tmp_path / f"ours-{world_size}"
        ranks.run(saved, family, str(tmp_path / "theirs"), level, str(ours), world_size=world_size)
        found = in_files(ours)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        whole = read_by_transformers(family, str(tmp_path / "theirs"))
        again = read_by_transformers(family, str(ours))
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_write_one_folder(ranks: Ranks, tmp_path: Path, family: str) -> None:
    build(family).save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    arguments = (family, str(tmp_path / "theirs"), "optim_grads", str(ours))
    ranks.run(saved, *arguments, world_size=4)
    expected, found = in_files(tmp_path / "theirs"), in_files(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(2)
def test_values_of_training_are_saved_in_another_dtype() -> None:
    folder = shared_folder()
    torch.manual_seed(0)
    model = build("mixtral")
    engine = fe.shard(model, mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    fe.save_pretrained(engine, folder, torch.bfloat16)
    again = transformers.MixtralForCausalLM.from_pretrained(folder)
    assert again.dtype is torch.bfloat16
    for name, value in again.named_parameters():
        assert torch.equal(value.detach(), engine.full_tensor(name).bfloat16()), name


@on_ranks(2)
def test_a_failure_leaves_the_older_model() -> None:
    folder = shared_folder()
    model = build("llama")
    engine = fe.shard(model, initial_values="rank0")
    fe.save_pretrained(engine, folder)
    before = in_files(Path(folder))

    def no_space(*arguments: Any) -> int:
        raise OSError("No space left on device")

    with patch.object(os, "pwrite", no_space), pytest.raises(OSError, match="No space left"):
        fe.save_pretrained(engine, folder)
    assert (Path(folder) / "config.json").is_file()
    assert not (Path(folder) / "config.json.before").exists()
    assert in_files(Path(folder)).keys() == before.keys()
    transformers.LlamaForCausalLM.from_pretrained(folder)


KILLED = """
import os, signal, sys
import torch
import fsdp_engine as fe
from tests.pretrained.families import build

folder, count = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = build("llama")
fe.shard(model)
pwrite, replace = os.pwrite, os.replace
left = [count]


def counted(function):
    def call(*arguments):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments)

    return call


os.pwrite, os.replace = counted(pwrite), counted(replace)
fe.save_pretrained(model, folder, max_shard_size="6KB")
print("done", count - left[0])
"""


@pytest.mark.thorough
def test_a_kill_leaves_nothing_that_is_taken_for_a_model(tmp_path: Path) -> None:
    theirs = tmp_path / "older"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["llama"][2])).save_pretrained(
        theirs
    )

    def run(folder: Path, count: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(folder), str(count)]
        root = Path(__file__).parents[2]
        return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)

    whole = run(tmp_path / "whole", 10_000)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout.split()[-1])
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    for number, count in enumerate((0, 1, calls // 2, calls - 1)):
        folder = tmp_path / str(number)
        shutil.copytree(theirs, folder)
        assert run(folder, count).returncode == -signal.SIGKILL
        if count:
            with pytest.raises((OSError, ValueError)):
                transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        else:  # nothing has changed yet
            transformers.LlamaForCausalLM.from_pretrained(folder)


@on_ranks(2)
def test_other_models_are_refused() -> None:
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model_or_engine: expected what fe\.shard"):
        fe.save_pretrained(model, folder)
    fe.shard(model, initial_values="rank0")
    with pytest.raises(
        TypeError, match="expected a model of transformers or diffusers; found Sequential"
    ):
        fe.save_pretrained(model, folder)
    assert not list(Path(folder).iterdir())


class Denoiser(nn.Module):
    """A model that writes its config itself, as those of diffusers do."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, noisy: Tensor) -> Tensor:
        return self.leave(self.enter(noisy))

    def save_config(self, folder: str) -> None:
        (Path(folder) / self.config_name).write_text('{"_class_name": "Denoiser"}')


@pytest.mark.parametrize("size", ["5GB", 200])
@on_ranks(2)
def test_a_model_of_diffusers_has_its_own_names_of_files(size: int | str) -> None:
    folder = Path(shared_folder())
    engine = fe.shard(Denoiser(), strategy="optim_grads_params")
    fe.save_pretrained(engine, folder, max_shard_size=size)
    index = (folder / "diffusion_pytorch_model.safetensors.index.json").is_file()
    assert index is (size == 200)
    assert all(path.name.startswith("diffusion_") for path in folder.glob("*.safetensors"))
    assert (folder / "config.json").read_text() == '{"_class_name": "Denoiser"}'
    whole = engine.full_state_dict()
    torch.testing.assert_close(in_files(folder), whole, rtol=0, atol=0)
    other = fe.shard(Denoiser(), strategy="optim")
    fe.load_pretrained(other, folder)
    torch.testing.assert_close(other.full_state_dict(), whole, rtol=0, atol=0)


@on_ranks(2)
def test_a_model_of_no_library_is_refused_with_what_to_use() -> None:
    engine = fe.shard(nn.Linear(4, 4), strategy="optim")
    with pytest.raises(TypeError, match=r"transformers or diffusers; found Linear.*export_safete"):
        fe.save_pretrained(engine, shared_folder())
