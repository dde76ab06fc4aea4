"""Small default units that are joined train as one process does, whatever happens in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from fsdp_engine.units import assignment
from tests import models, reference
from tests.megatron.configs import config_of, train_wrapped
from tests.models import DIM, Block, Mlp, Transformer, token_batch, vector_batch
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks
from tests.scenario import assert_trains_alike

BLOCK = sum(parameter.numel() for parameter in Block().parameters())
# Of a Transformer of four blocks: everything, its blocks by twos with the modules beside them, and
# ends alone.
SIZES = (10**6, 2 * BLOCK, BLOCK)
# By twos.
MLPS = 2 * sum(parameter.numel() for parameter in Mlp().parameters())


def unit_names(engine: fe.Engine) -> list[str]:
    return [unit.name for unit in engine.units if unit.buffers]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_every_pair_trains_as_one_process(strategy: str, outer: str, tied: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    # Numbers of microbatches take turns: each size sees both, tied or untied.
    for least, num_microbatches in zip(SIZES, (3, 1, 3) if tied else (1, 3, 1), strict=True):
        torch.manual_seed(1)
        engine = assert_trains_alike(
            Transformer(num_blocks=4, tied=tied),
            token_batch,
            strategy,
            outer,
            mesh=mesh,
            num_steps=3,
            num_microbatches=num_microbatches,
            min_unit_size=least,
        )
        assert len(unit_names(engine)) < 5


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_bf16_with_adamw_trains_as_one_process(strategy: str) -> None:
    for tied in (False, True):
        assert_trains_alike(
            Transformer(num_blocks=4, tied=tied),
            token_batch,
            strategy,
            num_steps=3,
            make_optimizer=reference.adamw,
            later=5e-2,
            compute_dtype=torch.bfloat16,
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            min_unit_size=2 * BLOCK,
        )


class ReadsInputs(models.Chain):
    """Its blocks get fp32."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp())
        self.norm = nn.LayerNorm(DIM)
        self.seen: list[torch.dtype] = []

    def predict(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x.float())
        self.seen.append(x.dtype)
        return self.norm(self.blocks[1](x.float()))


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_blocks_get_inputs_in_the_compute_dtype_also_beside_loose_modules(strategy: str) -> None:
    model = ReadsInputs()
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine = fe.shard(model, strategy=strategy, mp_policy=policy, min_unit_size=10**6)
    assert unit_names(engine) == ["blocks.0-1 + norm"]
    for step in range(2):
        model(*vector_batch(2, step)).backward()
    assert model.seen == [torch.bfloat16] * 2


class Checkpointed(Transformer):
    """Every block, or every other one, is computed again in backward."""

    def __init__(self, reentrant: bool, every: int) -> None:
        super().__init__(num_blocks=4)
        self.reentrant, self.every = reentrant, every

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index % self.every:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        assert targets is not None
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_blocks_that_are_computed_again_one_by_one(
    strategy: str, reentrant: bool, every: int
) -> None:
    for least in SIZES:
        torch.manual_seed(1)
        assert_trains_alike(
            Checkpointed(reentrant, every), token_batch, strategy, num_steps=3, min_unit_size=least
        )


def noted(calls: list[str], name: str, real: Callable[..., None], *args: Any) -> None:
    calls.append(name)
    real(*args)


@on_ranks(2)
def test_a_joined_unit_is_gathered_once_for_all_of_its_blocks() -> None:
    for reentrant in (False, True):
        model = Checkpointed(reentrant, 1)
        engine = fe.shard(model, min_unit_size=2 * BLOCK)
        assert unit_names(engine) == ["embedding + blocks.0-1", "blocks.2-3 + norm + head"]
        gathers: list[str] = []
        for unit in engine.units[1:]:
            unit.gather = partial(noted, gathers, unit.name, unit.gather)  # type: ignore[method-assign]
        for step in range(3):
            gathers.clear()
            model(*token_batch(2, step)).backward()
        # The last one stays full from forward to backward.
        first, last = unit_names(engine)
        assert gathers == [first, last, first]
        for unit in engine.units:
            assert not unit.uses
            assert unit.unsharded is None or not unit.reshards


def lora() -> nn.Module:
    return models.lora_model()


MODELS: list[Callable[[], nn.Module]] = [
    lora,
    models.frozen_first_model,
    models.CalledTwice,
    models.NestedModel,
    models.NestedUnits,
    models.shared_model,
    models.shared_module_model,
    models.unused_model,
    models.InPlace,
    models.UnusedOutput,
    models.EncoderDecoder,
]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", LEVELS)
@pytest.mark.parametrize("make", MODELS)
@on_ranks(2)
def test_models_with_habits_train(strategy: str, make: Callable[[], nn.Module]) -> None:
    for least in (MLPS, 10**6):
        torch.manual_seed(1)
        assert_trains_alike(make(), vector_batch, strategy, num_steps=3, min_unit_size=least)


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_a_block_that_is_called_in_some_steps_only(strategy: str) -> None:
    def before_step(model: nn.Module, step: int) -> None:
        model.skip = step % 2 == 1  # type: ignore[assignment]

    assert_trains_alike(
        models.Skipping(),
        vector_batch,
        strategy,
        num_steps=4,
        before_step=before_step,
        min_unit_size=MLPS,
    )


@pytest.mark.parametrize("strategy", list(LEVELS)[:3])
@on_ranks(2)
def test_a_block_that_one_rank_skips(strategy: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = models.Skipping()
    alone = copy.deepcopy(model)
    engine = fe.shard(model, strategy=strategy, min_unit_size=10**6)
    assert unit_names(engine) == ["blocks.0-2"]
    ours, theirs = reference.sgd(model.parameters()), reference.sgd(alone.parameters())
    for step in range(4):
        for each in range(world_size):
            alone.skip = each == step % world_size
            (alone(*vector_batch(2, 10 * step + each)) / world_size).backward()
        model.skip = rank == step % world_size
        model(*vector_batch(2, 10 * step + rank)).backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        reference.assert_same_weights(model, alone, rtol=2e-5, atol=1e-6)


class Hidden:
    """What a block returns, in a class of the user's own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Hides(Mlp):
    """The begin of its backward is not detected."""

    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


class HidesFirst(models.Chain):
    """Its first block hides its output, the second does not."""

    def __init__(self) -> None:
        super().__init__(Hides(), Mlp())

    def predict(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).tensor)


@pytest.mark.filterwarnings("ignore:.*does not look for tensors")
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_a_block_that_hides_its_output(strategy: str) -> None:
    assert_trains_alike(HidesFirst(), vector_batch, strategy, num_steps=3, min_unit_size=10**6)


class Shuffled(models.Chain):
    """Blocks in another order in every step."""

    turn = 0

    def predict(self, x: Tensor) -> Tensor:
        for index in [(0, 1, 2, 3), (2, 0, 3, 1), (1, 1, 0, 3)][self.turn]:
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_blocks_that_run_in_another_order_in_every_step(strategy: str) -> None:
    def before_step(model: nn.Module, step: int) -> None:
        model.turn = step % 3  # type: ignore[assignment]

    assert_trains_alike(
        Shuffled(Mlp(), Mlp(), Mlp(), Mlp()),
        vector_batch,
        strategy,
        num_steps=5,
        before_step=before_step,
        min_unit_size=MLPS,
    )


class ReadsPositions(Transformer):
    """Adds weights that it never gives to a call, before the first block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.embedding = nn.ModuleDict(  # type: ignore[assignment]
            {"tokens": self.embedding, "positions": nn.Embedding(models.LENGTH, DIM)}
        )

    def logits(self, tokens: Tensor) -> Tensor:
        tables: Any = self.embedding
        x = tables["tokens"](tokens) + tables["positions"].weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ReadsEmbedding(Transformer):
    """Multiplies with the embedding, which is called, too; its blocks are of the same unit."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.t() + self.head.weight.tanh().sum(1)


@pytest.mark.parametrize("make", [ReadsEmbedding, ReadsPositions])
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_weights_that_are_read_without_a_call(
    strategy: str, make: Callable[[int], nn.Module]
) -> None:
    for least in SIZES:
        torch.manual_seed(1)
        assert_trains_alike(make(4), token_batch, strategy, num_steps=3, min_unit_size=least)


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_the_wrapper_joins_units_where_parameters_are_cut(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "MIN_UNIT_SIZE", 2 * BLOCK)  # it has no keyword for it
        train_and_compare_wrapped(strategy)


def train_and_compare_wrapped(strategy: str) -> None:
    torch.manual_seed(1)
    model = Transformer(num_blocks=4)
    data = reference.make_data(token_batch, 3, 2, dist.get_world_size())
    expected = reference.train(copy.deepcopy(model), data)
    ddp = fe.DistributedDataParallel(model, config_of(strategy, overlap=True))
    cut = strategy == "optim_grads_params"
    names = ["embedding + blocks.0-1", "blocks.2-3 + norm + head"] if cut else [""]
    assert unit_names(ddp.engine) == names
    assert not reference.differences(train_wrapped(ddp, data), expected, 2e-5)


@on_ranks(2)
def test_joined_units_are_described_by_runs_of_names() -> None:
    engine = fe.shard(Transformer(num_blocks=6), min_unit_size=2 * BLOCK)
    rows = {row.name: row for row in engine.describe().rows}
    names = ["", "embedding + blocks.0-1", "blocks.2-3", "blocks.4-5 + norm + head"]
    assert list(rows) == names
    assert [rows[name].num_gathers for name in names[1:]] == [2, 2, 1]
    assert rows["blocks.2-3"].num_elements == 2 * BLOCK
    assert "blocks.4-5 + norm + head" in str(engine.describe())
