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
from tests.integrations.trainer_scene import LEVELS
from tests.pool import Ranks
from tests.programs.packages import PROGRAM, TORCHTITAN
from tests.programs.words import encoder, sentences

pytestmark = PROGRAM


def _pairs(model: Any, rank: int, step: int, rows: int) -> list[dict[str, Tensor]]:
    columns = [sentences(rows, 5, 10 * step + rank + 100 * column) for column in (0, 1)]
    return [dict(model.preprocess(column)) for column in columns]


def _train_both(
    engine: Any,
    alone: nn.Module,
    losses: Callable[[int, int], Tensor],
    losses_alone: Callable[[int, int], Tensor],
    *,
    steps: int,
    micro: int,
    together: bool = False,
) -> None:
    """Gradients of every step are those of one process with the mean of all losses.

    Args:
        losses: the loss of this rank, by step and microbatch.
        losses_alone: the sum of the losses of all ranks.
    """
    optimizer, one = (reference.sgd(each.parameters()) for each in (engine.model, alone))
    for step in range(steps):
        for number in range(micro):
            with (
                engine.together() if together else nullcontext(),
                nullcontext() if number == micro - 1 else engine.no_sync(),
            ):
                (losses(step, number) / micro).backward()
            (losses_alone(step, number) / (micro * dist.get_world_size())).backward()
        found = reference.full_gradients(engine.model)
        for name, param in alone.named_parameters():
            if param.grad is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], param.grad, rtol=2e-4, atol=2e-5)
        for each in (optimizer, one):
            each.step()
            each.zero_grad()


def _train_cached(level: str, num_rows: Sequence[int], together: bool) -> None:
    """A cached loss over the engine, compared with the loss without a cache in one process."""
    from sentence_transformers.sentence_transformer import losses

    model, alone = encoder(), encoder()
    engine = fe.shard(model, strategy=level, units=["0.model.encoder.layer.*"])
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    right, labels = losses.MultipleNegativesRankingLoss(alone), torch.zeros(0)

    def loss_of(loss: Any, model: Any, rank: int, step: int, number: int) -> Tensor:
        return loss(_pairs(model, rank, 2 * step + number, num_rows[rank]), labels)

    _train_both(
        engine,
        alone,
        lambda *at: loss_of(cached, model, dist.get_rank(), *at),
        lambda *at: sum(loss_of(right, alone, rank, *at) for rank in range(2)),
        steps=2,
        micro=2,
        together=together,
    )


@pytest.mark.parametrize("num_rows", [(6, 6), (3, 8)])  # 3 mini-batches on each rank; 2 and 4
@pytest.mark.parametrize("level", LEVELS)
def test_the_cached_loss_of_sentence_transformers(ranks: Ranks, level: str, num_rows) -> None:
    together = num_rows == (3, 8) and level == "optim_grads_params"
    ranks.run(_train_cached, level, num_rows, together, world_size=2)


class _Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(16, 16), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.mlp(x)


class _Mlp(nn.Module):
    """The MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(16, 24, bias=False)
        self.up_proj = nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=False)
        self._compute_params: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def compute_params(self) -> list[Tensor]:
        """The trainable parameters, cached as in axolotl's ``patch_tiled_mlp``."""
        if not self._compute_params:
            self._compute_params = [param for param in self.parameters() if param.requires_grad]
        return self._compute_params


class _LigerMlp(_Mlp):
    """Calls apply_tiled_mlp as LigerTiledSwiGLUMLP does, but without liger's fused SiLU product,
    which needs a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

        params = [param for param in self.parameters() if param.requires_grad]
        given = {"mlp_module": self, "x": x, "num_shards": 3, "compute_params": params}
        return apply_tiled_mlp(fn=_Mlp.forward, **given)


class _AxolotlMlp(_Mlp):
    """An MLP after axolotl's ``patch_tiled_mlp``."""

    def forward(self, x: Tensor) -> Tensor:
        return _axolotl().TiledMLP.apply(_Mlp.forward, self, x, 3, self.compute_params())


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

    def loss_of(model: nn.Module, rank: int, step: int, number: int) -> Tensor:
        seed = 100 * step + 10 * number + rank
        # axolotl's function has wrong gradients of batches of more than one row.
        batch = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(seed))
        return model(batch).square().mean()

    _train_both(
        fe.shard(model, strategy=level, units=units),
        alone,
        lambda *at: loss_of(model, rank, *at),
        lambda *at: sum(loss_of(alone, each, *at) for each in range(size)),
        steps=3,
        micro=micro,
    )


@pytest.mark.parametrize("units", [["*.mlp"], [_Block]], ids=["MLPs", "blocks"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("library", MLPS)
def test_tiled_mlps(ranks: Ranks, library: str, level: str, micro: int, units: Any) -> None:
    ranks.run(_train_tiled, library, level, units, micro, world_size=2)
