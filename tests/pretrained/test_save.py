"""``fe.save_pretrained``: what it writes, transformers reads, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.checkpoint.scene import different, failing, shared_folder, update
from tests.pool import on_ranks
from tests.pretrained.families import build
from tests.pretrained.folders import in_files
from tests.processes import printed, start


@on_ranks(2)
def test_values_of_training_are_saved_in_another_dtype() -> None:
    folder = shared_folder()
    torch.manual_seed(0)
    model = build("mixtral")
    engine = fe.shard(model, mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    tokens = torch.arange(8).view(1, 8)
    update(model(input_ids=tokens, labels=tokens).loss, reference.sgd(model.parameters()))
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
    with failing(os, "pwrite"), pytest.raises(OSError, match="No space left"):
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
    build("llama").save_pretrained(theirs)

    calls = int(printed("-c", KILLED, str(tmp_path / "whole"), "10000").split()[-1])
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    for number, count in enumerate((0, 1, calls // 2, calls - 1)):
        folder = tmp_path / str(number)
        shutil.copytree(theirs, folder)
        killed = start("-c", KILLED, str(folder), str(count))
        killed.communicate(timeout=300)
        assert killed.returncode == -signal.SIGKILL
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
    no_library = "expected a model of transformers or diffusers; found Sequential.*export_safetens"
    with pytest.raises(TypeError, match=no_library):
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
    assert different(in_files(folder), whole) == []
    other = fe.shard(Denoiser(), strategy="optim")
    fe.load_pretrained(other, folder)
    assert different(other.full_state_dict(), whole) == []
