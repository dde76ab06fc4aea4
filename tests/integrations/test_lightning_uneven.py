"""Lightning over the engine, with loaders that end at different times on each rank, compared with
one process that has the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fsdp_engine as fe
from tests.integrations.lightning_scene import (
    Net,
    OneOfTheBlocks,
    by_engine,
    fit,
    make_fabric,
    make_trainer,
    weights,
)
from tests.integrations.trainer_scene import FULL, LEVELS, Stream, check_weights, shared_folder
from tests.pool import Ranks, on_ranks

Batch = tuple[Tensor, Tensor]
# Sizes of batches, by rank.
Sizes = tuple[tuple[int, ...], ...]
UNEVEN: Sizes = ((3, 1), (2, 2, 4, 1, 3))
NONE_ON_ONE: Sizes = ((2, 3, 1), ())


def batch(rank: int, number: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 2, generator=generator, dtype=torch.float64)


def batches_of(rank: int, sizes: Sizes) -> list[Batch]:
    return [batch(rank, number, size) for number, size in enumerate(sizes[rank])]


def loader(sizes: Sizes, streams: bool = False, fails: bool = False) -> DataLoader[Batch]:
    batches = batches_of(dist.get_rank(), sizes)
    return DataLoader(Stream(batches, fails) if streams else batches, batch_size=None)  # type: ignore[arg-type]


class Ours(Net):
    """With ``own_mean``, its loss is the mean over samples, by ``mean_loss``. Counts validated
    samples."""

    def __init__(self, own_mean: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.own_mean = own_mean
        self.automatic_optimization = not manual
        self.counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()
            return None
        loss = self.loss(batch)
        if self.own_mean:
            num = self.trainer.accumulate_grad_batches
            engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
            return num * engine.mean_loss(loss * len(batch[0]), len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.counted += len(batch[0])
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))


def made(cls: type[Ours] = Ours, **given: Any) -> Any:
    torch.manual_seed(0)
    return cls(**given).double()


def train_alone(
    sizes: Sizes, accumulate: int = 1, epochs: int = 1, by_samples: bool = False
) -> Ours:
    """One process. The loss of a step is the mean over its batches, or over its samples."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    by_rank = [batches_of(rank, sizes) for rank in range(len(sizes))]
    for begin in [*range(0, max(map(len, by_rank)), accumulate)] * epochs:
        step = [each for batches in by_rank for each in batches[begin : begin + accumulate]]
        counts = [float(len(x)) if by_samples else 1.0 for x, _ in step]
        losses = [count * model.loss(each) for count, each in zip(counts, step, strict=True)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(counts)).backward()
        optimizer.step()
    return model


def mean_loss(model: Ours, sizes: Sizes) -> float:
    batches = [each for rank in range(len(sizes)) for each in batches_of(rank, sizes)]
    with torch.no_grad():
        sums = [model.loss(each).item() * len(each[0]) for each in batches]
    return sum(sums) / sum(len(x) for x, _ in batches)


def train(model: nn.Module, train: Any, val: Any = None, level: str = FULL, **given: Any) -> Any:
    different = given.pop("different_modules", False)
    strategy = by_engine(level, different_modules=different)
    arguments = {"precision": "64-true", "use_distributed_sampler": False, **given}
    return fit(model, strategy, train=train, val=val, **arguments)


class Case(NamedTuple):
    sizes: Sizes = UNEVEN
    accumulate: int = 1
    streams: bool = False
    own_mean: bool = False
    manual: bool = False


def run(level: str, case: Case) -> None:
    sizes, streams = case.sizes, case.streams
    model = made(own_mean=case.own_mean, manual=case.manual)
    evaluated = UNEVEN if len(sizes) == 2 else sizes
    loaders = loader(sizes, streams), loader(evaluated, streams)
    trainer = train(model, *loaders, level, accumulate_grad_batches=case.accumulate)
    assert not case.own_mean or trainer.strategy.engine.last_mean_loss is not None
    alone = train_alone(sizes, case.accumulate, 2, case.own_mean)
    check_weights(weights(model), alone.state_dict())
    right = pytest.approx(mean_loss(alone, evaluated), rel=1e-9)
    assert trainer.callback_metrics["val_loss"].item() == right
    assert model.counted == 2 * sum(evaluated[dist.get_rank()])
    two = [loader(evaluated), loader(evaluated, True)]  # one after the other
    for found in trainer.validate(model, two, verbose=False):
        assert all(value == right for value in found.values())
    (tested,) = trainer.test(model, loader(evaluated, streams), verbose=False)
    assert tested["test_loss"] == right
    predicted = trainer.predict(model, loader(evaluated, streams))
    mine = batches_of(dist.get_rank(), evaluated)
    assert len(predicted) == max(map(len, evaluated))
    kept = [each for each in predicted if each is not None]
    with torch.no_grad():
        expected = torch.stack([alone.loss(each) for each in mine])
    torch.testing.assert_close(torch.stack(kept), expected)


CASES = {
    "lengths": Case(),
    "accumulation": Case(accumulate=2),
    "streams": Case(accumulate=2, streams=True),
    "mean over samples": Case(accumulate=3, own_mean=True),
    "manual": Case(manual=True),
    "three ranks": Case(((1,), (2, 3, 1, 1, 2), (3, 2, 1)), 3, streams=True),
    "none on one rank": Case(NONE_ON_ONE, 2, streams=True),
}


FEW = [(name, FULL) for name in ("accumulation", "streams", "manual", "none on one rank")]
FEW.append(("mean over samples", "no_shard"))


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if (name, level) in FEW else pytest.mark.thorough)
        for name in CASES
        for level in LEVELS
    ],
)
def test_a_run_is_that_of_one_process(ranks: Ranks, name: str, level: str) -> None:
    ranks.run(run, level, CASES[name], world_size=len(CASES[name].sizes))


class LogsEachStep(Ours):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, on_step=True)


class LogsTraining(Ours):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch), sync_dist=True)
        return self.loss(batch)


class TakesTheIterator(Ours):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def validate(model: nn.Module, sizes: Sizes) -> None:
    trainer = make_trainer(by_engine(FULL), precision="64-true", use_distributed_sampler=False)
    trainer.validate(model, loader(sizes), verbose=False)


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "validation_step: expected at least one batch on each rank": (
        ValueError,
        lambda: validate(made(), NONE_ON_ONE),
    ),
    "expected no communication|on another rank": (
        RuntimeError,
        lambda: validate(made(LogsEachStep), UNEVEN),
    ),
    "expected no communication within it.*on_step=True": (
        RuntimeError,
        lambda: train(made(LogsTraining), loader(UNEVEN), different_modules=True),
    ),
    "dataloaders of training_step: expected one, or loaders": (
        ValueError,
        lambda: train(made(), [loader(UNEVEN), loader(UNEVEN)]),
    ),
    "training_step: expected a step that takes a batch": (
        ValueError,
        lambda: train(made(TakesTheIterator), loader(UNEVEN)),
    ),
    "disk on fire": (
        OSError,
        lambda: train(made(), loader(UNEVEN, True, fails=True)),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(2)
def test_errors_with_uneven_loaders_are_raised_on_all_ranks(words: str) -> None:
    error, call = REFUSED[words]
    with pytest.raises(error, match=words):
        call()


@on_ranks(2)
def test_loaders_of_equal_lengths_are_taken_as_they_are() -> None:
    equal = loader(((1, 2), (3, 4)))
    assert train(made(), equal).train_dataloader is equal


class Places:
    def __init__(self, sizes: Sizes) -> None:
        self._batches = batches_of(dist.get_rank(), sizes)
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]
        self._next = 0

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@pytest.mark.parametrize("after", [1, 3])
@on_ranks(2)
def test_a_loader_that_saves_its_place_continues_there(after: int) -> None:
    folder = shared_folder()
    writes = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    train(made(), Places(UNEVEN), max_epochs=1, callbacks=[writes])
    resumed, path = made(), folder / f"step={after}.ckpt"
    train(resumed, Places(UNEVEN), max_epochs=1, ckpt_path=path)
    check_weights(weights(resumed), train_alone(UNEVEN).state_dict())


class Towers(OneOfTheBlocks, Ours):
    pass


@on_ranks(2)
def test_ranks_use_different_modules_in_uneven_runs() -> None:
    found = []
    for level in (FULL, "no_shard"):
        model = made(Towers)
        options = {"different_modules": True, "accumulate_grad_batches": 2}
        options["gradient_clip_val"] = 0.3
        trainer = train(model, loader(UNEVEN), loader(UNEVEN, True), level, **options)
        found.append((weights(model), trainer.callback_metrics["val_loss"].item()))
    (ours, loss), (theirs, right) = found
    assert loss == pytest.approx(right, rel=1e-9)
    check_weights(ours, theirs)


@on_ranks(2)
def test_a_loop_of_fabrics_iterates_over_even_batches() -> None:
    fabric, module = make_fabric(FULL), made()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=1e-2))
    model.mark_forward_method("loss")
    engine = fe.engine.engine_of(model.module)
    batches = fabric.setup_dataloaders(loader(UNEVEN), use_distributed_sampler=False)
    for each, weight in engine.even_batches(batches):
        optimizer.zero_grad()
        count = weight * len(each[0])
        fabric.backward(engine.mean_loss(count * model.loss(each), count))
        optimizer.step()
    check_weights(weights(module), train_alone(UNEVEN, by_samples=True).state_dict())
