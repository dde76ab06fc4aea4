"""Losses and layers of other libraries that run backwards within a backward."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.integrations.trainer_scene import LEVELS, shared_folder
from tests.pool import Ranks
from tests.programs.packages import PROGRAM, TORCHTITAN
from tests.programs.words import bert_config, sentences, tokenizer

pytestmark = PROGRAM
STEPS = 2


def _encoder(folder: Path) -> Any:
    """A small BERT of sentence-transformers, and the mean of its outputs."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    if not dist.is_initialized() or dist.get_rank() == 0:
        BertModel(bert_config()).save_pretrained(str(folder))
        tokenizer().save_pretrained(str(folder))
    if dist.is_initialized():
        dist.barrier()
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device="cpu")


def _pairs(model: Any, rank: int, step: int, rows: int) -> list[dict[str, Tensor]]:
    """Tokens of two columns of sentences."""
    columns = [sentences(rows, 5, 10 * step + rank + 100 * column) for column in (0, 1)]
    return [dict(model.preprocess(column)) for column in columns]


def _train_cached(level: str, num_rows: Sequence[int], mini: int, together: bool) -> None:
    """Two steps of two microbatches of a cached loss over the engine, and of the loss that is not
    cached in one process."""
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    rank, folder = dist.get_rank(), shared_folder()
    model, alone = _encoder(folder), _encoder(folder)
    engine = fe.shard(model, strategy=level, units=["0.model.encoder.layer.*"])
    loss, right = (
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini),
        MultipleNegativesRankingLoss(alone),
    )
    optimizer, one = reference.sgd(model.parameters()), reference.sgd(alone.parameters())
    labels = torch.zeros(0)
    for step in range(STEPS):
        for number in range(2):
            with (
                engine.together() if together else nullcontext(),
                nullcontext() if number else engine.no_sync(),
            ):
                batch = _pairs(model, rank, 2 * step + number, num_rows[rank])
                (loss(batch, labels) / 2).backward()
            for each, rows in enumerate(num_rows):
                batch = _pairs(alone, each, 2 * step + number, rows)
                (right(batch, labels) / (2 * len(num_rows))).backward()
        _assert_same_gradients(model, alone)
        for each_optimizer in (optimizer, one):
            each_optimizer.step()
            each_optimizer.zero_grad()


def _assert_same_gradients(model: nn.Module, alone: nn.Module) -> None:
    found = reference.full_gradients(model)
    for name, param in alone.named_parameters():
        if param.grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], param.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_the_cached_loss_of_sentence_transformers(ranks: Ranks, level: str) -> None:
    ranks.run(_train_cached, level, (6, 6), 2, False, world_size=2)


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_have_different_numbers_of_mini_batches(ranks: Ranks, level: str) -> None:
    ranks.run(_train_cached, level, (3, 8), 2, level == "optim_grads_params", world_size=2)


class _Block(nn.Module):
    """A layer and an MLP."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(16, 16), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        result: Tensor = x + self.mlp(x)
        return result


class _Mlp(nn.Module):
    """Of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(16, 24, bias=False)
        self.up_proj = nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(x))
        result: Tensor = self.down_proj(gate * self.up_proj(x))
        return result


class _LigerMlp(_Mlp):
    """As LigerTiledSwiGLUMLP calls it; its product with SiLU is a kernel of GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

        params = [param for param in self.parameters() if param.requires_grad]
        result: Tensor = apply_tiled_mlp(
            fn=_Mlp.forward, mlp_module=self, x=x, num_shards=3, compute_params=params
        )
        return result


class _AxolotlMlp(_Mlp):
    """As axolotl's ``patch_tiled_mlp`` makes the MLP of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._compute_params: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self._compute_params:
            self._compute_params = [param for param in self.parameters() if param.requires_grad]
        tiled: Any = _axolotl().TiledMLP
        result: Tensor = tiled.apply(_Mlp.forward, self, x, 3, self._compute_params)
        return result


def _axolotl() -> Any:
    """The module of axolotl's function, without the packages that axolotl itself imports."""
    name = "axolotl_tiled_mlp"
    if name not in sys.modules:
        path = [*sys.path, str(TORCHTITAN)]
        package = PathFinder.find_spec("axolotl", path)
        if package is None or package.submodule_search_locations is None:
            pytest.skip("needs axolotl")
        file = Path(next(iter(package.submodule_search_locations)), "monkeypatch/tiled_mlp/base.py")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _model(mlp: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), *(_Block(mlp()) for _ in range(2)))


MLPS = {"liger": _LigerMlp, "axolotl": _AxolotlMlp}


def _train_tiled(library: str, level: str, units: Sequence[str], micro: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if str(TORCHTITAN) not in sys.path:
        sys.path.append(str(TORCHTITAN))
    model, alone = _model(MLPS[library]), _model(_Mlp)
    engine = fe.shard(model, strategy=level, units=units)
    optimizer, one = reference.sgd(model.parameters()), reference.sgd(alone.parameters())
    for step in range(3):
        for number in range(micro):
            batches = [
                # axolotl's function has wrong gradients of batches of more than one row.
                torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(seed))
                for seed in range(100 * step + 10 * number, 100 * step + 10 * number + size)
            ]
            with nullcontext() if number == micro - 1 else engine.no_sync():
                (model(batches[rank]).square().mean() / micro).backward()
            for batch in batches:
                (alone(batch).square().mean() / (micro * size)).backward()
        _assert_same_gradients(model, alone)
        for each_optimizer in (optimizer, one):
            each_optimizer.step()
            each_optimizer.zero_grad()


@pytest.mark.parametrize("units", [["*.mlp"], [_Block]], ids=["MLPs", "blocks"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("library", MLPS)
def test_tiled_mlps(ranks: Ranks, library: str, level: str, micro: int, units: Any) -> None:
    ranks.run(_train_tiled, library, level, units, micro, world_size=2)
