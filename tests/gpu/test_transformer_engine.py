"""Transformer Engine's modules and kernels on a CUDA device. Skipped where there is none, or no
Transformer Engine with its CUDA parts.

Everything runs in ranks of a pool of its own, which load the real library: this process may have
loaded the stand-ins of tests/extensions/transformer_engine/te_kernels.py. Several ranks share the
device over gloo, whose collectives go through host memory. The same tests also run on a CPU, over
the stand-ins, in test_te_on_cpu.py (vectors) and test_te_unsharded.py (training).

    recipe             compute capability        why
    delayed, current   8.9 and above             fp8 tensor cores
    block              9.0                       above it Transformer Engine imitates it by MXFP8
    mxfp8              10.0 to 10.3              block-scaled tensor cores
    nvfp4              10.0 and above            weights in nvfp4, which the engine refuses

A control, two runs without an engine, detects a device whose results are not reproducible.
Attention runs unfused, and only deterministic algorithms are used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine import quantized_codec as transformer_engine
from tests.extensions.transformer_engine import te_unsharded
from tests.extensions.transformer_engine.te_vectors import FILLS, ORDINARY, quantise_split
from tests.gpu.scene import LEVELS, ON_GPU, process_group
from tests.pool import Ranks

RECIPES = {
    "delayed": ((8, 9), None),
    "current": ((8, 9), None),
    "block": ((9, 0), (10, 0)),
    "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), None),
}
ALL_RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
KINDS = pytest.mark.parametrize("kind", ["linear", "layer"])
# The first call of a kernel loads it.
TIMEOUT = 280.0

pytestmark = [*ON_GPU, pytest.mark.timeout(600)]

ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_BIAS_DROPOUT_FUSION": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@pytest.fixture(scope="module")
def te_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    try:
        with mock.patch.dict(os.environ, ENVIRONMENT):
            os.environ.pop("NVTE_PROJECT_BUILDING", None)  # if set, the library is not loaded
            missing = pool.run(find_library, timeout=TIMEOUT)[0]
        if missing:
            pytest.skip(
                "needs Transformer Engine with its CUDA parts: the extra "
                f"fsdp_engine[transformer-engine]; found {missing}"
            )
        yield pool
    finally:
        pool.close()


def find_library() -> str:
    """Load the library. Returns "", or the reason why it is missing; a broken installation
    raises."""
    torch.cuda.set_device(0)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("transformer_engine"):
            raise
        return str(error)
    except (FileNotFoundError, AssertionError, RuntimeError) as error:
        if not str(error).startswith(("Could not find", "Found empty")):
            raise
        return str(error)
    return ""


def need(recipe: str) -> None:
    """Skips where the device cannot compute in ``recipe``."""
    least, below = RECIPES[recipe]
    found = torch.cuda.get_device_capability()
    if found < least or (below is not None and found >= below):
        text = f"{least[0]}.{least[1]} or above"
        text += f" and below {below[0]}.{below[1]}" if below is not None else ""
        pytest.skip(f"{recipe} needs compute capability {text}; found {found[0]}.{found[1]}")


def test_the_library_has_the_interface_that_the_codec_knows(te_ranks: Ranks) -> None:
    version = te_ranks.run(_interface, world_size=1)[0]
    assert version.startswith(transformer_engine.KNOWN_VERSIONS)


def _interface() -> str:
    transformer_engine._load("weight")
    version: str = importlib.import_module("transformer_engine").__version__
    return version


# Vectors.


@ALL_RECIPES
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_uneven_split_quantises_to_what_no_split_does_and_the_reference_says(
    te_ranks: Ranks, recipe: str, world: int
) -> None:
    """Ordinary values, and denormal and huge ones."""
    need(recipe)
    cases = [(torch.bfloat16, 0, ORDINARY), (torch.bfloat16, 100, FILLS)]
    if recipe != "mxfp8":
        cases.append((torch.float32, 0, ORDINARY))
    for dtype, first, fills in cases:
        arguments = (recipe, dtype, list(range(first + world, first + 32, 4)), fills, "cuda")
        te_ranks.run(quantise_split, *arguments, world_size=world, timeout=TIMEOUT)


# Training.


@KINDS
@ALL_RECIPES
def test_the_control_two_runs_without_an_engine_are_the_same(
    te_ranks: Ranks, recipe: str, kind: str
) -> None:
    need(recipe)
    arguments = (kind, recipe)
    te_ranks.run(te_unsharded.train_alone_twice, *arguments, world_size=1, timeout=TIMEOUT)


@KINDS
@ALL_RECIPES
@pytest.mark.parametrize("level", LEVELS)
def test_one_rank_over_nccl_trains_as_transformer_engine_alone(
    te_ranks: Ranks, level: str, recipe: str, kind: str
) -> None:
    need(recipe)
    te_ranks.run(_train_over_nccl, kind, recipe, level, world_size=1, timeout=TIMEOUT)


def _train_over_nccl(kind: str, recipe: str, level: str) -> None:
    dist.destroy_process_group()  # the pool's, over gloo
    with process_group("nccl", 1):
        te_unsharded.train_both(kind, recipe, level)


@KINDS
@ALL_RECIPES
@pytest.mark.parametrize(("world", "level"), [*((2, level) for level in LEVELS), (4, LEVELS[3])])
def test_ranks_on_one_device_over_gloo_train_as_transformer_engine_alone(
    te_ranks: Ranks, world: int, level: str, recipe: str, kind: str
) -> None:
    need(recipe)
    arguments = (kind, recipe, level)
    te_ranks.run(te_unsharded.train_both, *arguments, world_size=world, timeout=TIMEOUT)


@ALL_RECIPES
@pytest.mark.parametrize("level", LEVELS)
def test_ranks_with_data_of_their_own_have_the_same_bytes_and_scales(
    te_ranks: Ranks, level: str, recipe: str
) -> None:
    need(recipe)
    arguments = ("layer", recipe, level)
    te_ranks.run(te_unsharded.train_apart, *arguments, world_size=2, timeout=TIMEOUT)


def test_nvfp4_weights_are_refused(te_ranks: Ranks) -> None:
    need("nvfp4")
    te_ranks.run(_refuse_nvfp4, world_size=1, timeout=TIMEOUT)


def _refuse_nvfp4() -> None:
    from transformer_engine.common.recipe import NVFP4BlockScaling
    from transformer_engine.pytorch import Linear, quantized_model_init

    with quantized_model_init(recipe=NVFP4BlockScaling()):
        model = Linear(256, 256, params_dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="NVFP4, which packs two elements into a byte"):
        fe.shard(model, mesh=init_device_mesh("cuda", (1,)))
