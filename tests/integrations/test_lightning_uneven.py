"""Lightning over the engine, whose ranks' loaders end at different times, beside one process that
has the batches of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import fsdp_engine as fe
from tests import reference
from tests.integrations.lightning_scene import (
    Net,
    ThereAlready,
    by_engine,
    make_trainer,
    shared_folder,
)
from tests.integrations.trainer_scene import FULL, LEVELS
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


class Stream(IterableDataset[Batch]):
    """Batches without a known number."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches


def loader(sizes: Sizes, streams: bool = False) -> DataLoader[Batch]:
    batches = batches_of(dist.get_rank(), sizes)
    return DataLoader(Stream(batches) if streams else batches, batch_size=None)  # type: ignore[arg-type]


class Ours(Net):
    """Its own mean is that of a batch; it counts its validated samples."""

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


def made(**given: Any) -> Ours:
    torch.manual_seed(0)
    return Ours(**given).double()


def train_alone(sizes: Sizes, accumulate: int, epochs: int, by_samples: bool) -> Ours:
    """One process. The loss of a step is the mean over its batches, or over its samples."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    by_rank = [batches_of(rank, sizes) for rank in range(len(sizes))]
    for begin in [*range(0, max(map(len, by_rank)), accumulate)] * epochs:
        step = [each for batches in by_rank for each in batches[begin : begin + accumulate]]
        weights = [float(len(x)) if by_samples else 1.0 for x, _ in step]
        losses = [weight * model.loss(each) for weight, each in zip(weights, step, strict=True)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(weights)).backward()
        optimizer.step()
    return model


def check_weights(model: nn.Module, alone: nn.Module) -> None:
    engine = fe.engine.engine_of(model)
    assert engine is not None
    found = engine.full_state_dict()
    for name, right in alone.state_dict().items():
        assert reference.relative_error(found[name], right) < 1e-11, name


def mean_loss(model: Ours, sizes: Sizes) -> float:
    """The mean over all samples."""
    batches = [each for rank in range(len(sizes)) for each in batches_of(rank, sizes)]
    with torch.no_grad():
        sums = [model.loss(each).item() * len(each[0]) for each in batches]
    return sum(sums) / sum(len(x) for x, _ in batches)


def run(
    sizes: Sizes, level: str, accumulate: int, streams: bool, own_mean: bool, manual: bool
) -> None:
    model = made(own_mean=own_mean, manual=manual)
    trainer = make_trainer(
        by_engine(level),
        accumulate_grad_batches=accumulate,
        precision="64-true",
        use_distributed_sampler=False,
    )
    evaluated = UNEVEN if len(sizes) == 2 else sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader(sizes, streams), loader(evaluated, streams))
        alone = train_alone(sizes, accumulate, 2, own_mean)
        check_weights(model, alone)
        right = mean_loss(alone, evaluated)
        assert trainer.callback_metrics["val_loss"].item() == pytest.approx(right, rel=1e-9)
        assert model.counted == 2 * sum(evaluated[dist.get_rank()])
        # Two loaders, one after the other.
        (first, second) = trainer.validate(
            model, [loader(evaluated), loader(evaluated, True)], verbose=False
        )
        for found in (*first.values(), *second.values()):
            assert found == pytest.approx(right, rel=1e-9)
        (tested,) = trainer.test(model, loader(evaluated, streams), verbose=False)
        assert tested["test_loss"] == pytest.approx(right, rel=1e-9)
        predicted = trainer.predict(model, loader(evaluated, streams))
    assert predicted is not None
    mine = batches_of(dist.get_rank(), evaluated)
    kept = [each for each in predicted if each is not None]
    assert len(predicted) == max(map(len, evaluated))
    with torch.no_grad():
        torch.testing.assert_close(
            torch.stack(kept), torch.stack([alone.loss(each) for each in mine])
        )


CASES: dict[str, tuple[Sizes, int, bool, bool, bool]] = {
    "lengths": (UNEVEN, 1, False, False, False),
    "accumulation": (UNEVEN, 2, False, False, False),
    "streams": (UNEVEN, 2, True, False, False),
    "mean over samples": (UNEVEN, 3, False, True, False),
    "manual": (UNEVEN, 1, False, False, True),
    "three ranks": (((1,), (2, 3, 1, 1, 2), (3, 2, 1)), 3, True, False, False),
    "none on one rank": (NONE_ON_ONE, 2, True, False, False),
}


@pytest.mark.parametrize(
    ("name", "level"),
    [(name, FULL) for name in CASES]
    + [("mean over samples", "no_shard")]
    + [
        pytest.param(name, level, marks=pytest.mark.thorough)
        for name in CASES
        for level in LEVELS[:-1]
        if (name, level) != ("mean over samples", "no_shard")
    ],
)
def test_a_run_is_that_of_one_process(ranks: Ranks, name: str, level: str) -> None:
    sizes, *rest = CASES[name]
    ranks.run(run, sizes, level, *rest, world_size=len(sizes))


def quiet_fit(trainer: Any, *given: Any, **more: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(*given, **more)


def quiet_trainer(level: str = FULL, **given: Any) -> Any:
    arguments = {"precision": "64-true", "use_distributed_sampler": False, **given}
    return make_trainer(by_engine(level), **arguments)


@on_ranks(2)
def test_a_rank_without_a_batch_to_validate_is_an_error_on_all() -> None:
    trainer, sizes = quiet_trainer(), NONE_ON_ONE
    expected = "dataloader of validation_step: expected at least one batch on each rank"
    with pytest.raises(ValueError, match=expected):
        trainer.validate(made(), loader(sizes), verbose=False)


class LogsEachStep(Ours):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, on_step=True)


@on_ranks(2)
def test_a_reduction_in_an_uneven_evaluation_is_an_error_on_all() -> None:
    trainer = quiet_trainer()
    with pytest.raises(RuntimeError) as error:
        trainer.validate(LogsEachStep().double(), loader(UNEVEN), verbose=False)
    assert "expected no communication" in str(error.value) or "on another rank" in str(error.value)


class LogsTraining(Ours):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


@on_ranks(2)
def test_a_reduction_in_steps_of_different_modules_is_an_error_on_all() -> None:
    trainer = make_trainer(by_engine(FULL, different_modules=True), precision="64-true")
    with pytest.raises(RuntimeError, match=r"expected no communication within it.*on_step=True"):
        quiet_fit(trainer, LogsTraining().double(), loader(UNEVEN))


@on_ranks(2)
def test_several_uneven_loaders_at_once_are_refused_on_all_ranks() -> None:
    trainer = quiet_trainer()
    with pytest.raises(ValueError, match="dataloaders of training_step: expected one, or loaders"):
        quiet_fit(trainer, made(), [loader(UNEVEN), loader(UNEVEN)])


class TakesTheIterator(Ours):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@on_ranks(2)
def test_a_step_that_takes_the_iterator_is_refused_with_uneven_loaders() -> None:
    with pytest.raises(ValueError, match="training_step: expected one that is given batches"):
        quiet_fit(quiet_trainer(), TakesTheIterator().double(), loader(UNEVEN))


@on_ranks(2)
def test_an_error_of_one_loader_is_raised_on_all_ranks() -> None:
    class Failing(Stream):
        def __iter__(self) -> Iterator[Batch]:
            yield from super().__iter__()
            if dist.get_rank() == 1:
                raise OSError("disk on fire")

    batches = DataLoader(Failing(batches_of(0, UNEVEN)), batch_size=None)
    with pytest.raises(OSError, match="disk on fire"):
        quiet_fit(quiet_trainer(), made(), batches)


@on_ranks(2)
def test_loaders_of_equal_lengths_are_taken_as_they_are() -> None:
    trainer, equal = quiet_trainer(), loader(((1, 2), (3, 4)))
    quiet_fit(trainer, made(), equal)
    assert trainer.train_dataloader is equal


class Places:
    """A loader that saves its place."""

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
    from lightning.pytorch.callbacks import ModelCheckpoint

    with shared_folder() as folder:
        writes = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        quiet_fit(quiet_trainer(max_epochs=1, callbacks=[writes]), made(), Places(UNEVEN))
        resumed = made()
        path = folder / f"step={after}.ckpt"
        quiet_fit(quiet_trainer(max_epochs=1), resumed, Places(UNEVEN), ckpt_path=path)
        check_weights(resumed, train_alone(UNEVEN, 1, 1, by_samples=False))


class Towers(Ours):
    """A batch goes through one of its blocks."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        block = self.blocks[int(x.abs().sum().item()) % len(self.blocks)]
        return nn.functional.mse_loss(self.head(block(self.inlet(x)) * self.scale), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@on_ranks(2)
def test_ranks_use_different_modules_in_uneven_runs() -> None:
    found = []
    for level in (FULL, "no_shard"):
        torch.manual_seed(0)
        model = Towers().double()
        trainer = make_trainer(
            by_engine(level, different_modules=True),
            precision="64-true",
            accumulate_grad_batches=2,
        )
        quiet_fit(trainer, model, loader(UNEVEN), loader(UNEVEN, True))
        engine = fe.engine.engine_of(model)
        assert engine is not None
        found.append((engine.full_state_dict(), trainer.callback_metrics["val_loss"].item()))
    (ours, loss), (theirs, right) = found
    assert loss == pytest.approx(right, rel=1e-9)
    for name, value in theirs.items():
        assert reference.relative_error(ours[name], value) < 1e-11, name


@pytest.mark.parametrize("level", ["no_shard", FULL])
@on_ranks(2)
def test_a_loop_of_fabrics_iterates_over_even_batches(level: str) -> None:
    from fsdp_engine.integrations.lightning import FSDPEngineFabricStrategy

    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=FSDPEngineFabricStrategy(level, min_unit_size=0),
        plugins=[ThereAlready()],
    )
    fabric.launch()
    module = made()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=1e-2))
    model.mark_forward_method("loss")
    engine = fe.engine.engine_of(model.module)
    assert engine is not None
    batches = fabric.setup_dataloaders(loader(UNEVEN), use_distributed_sampler=False)
    for each, weight in engine.even_batches(batches):
        optimizer.zero_grad()
        count = weight * len(each[0])
        fabric.backward(engine.mean_loss(count * model.loss(each), count))
        optimizer.step()
    check_weights(module, train_alone(UNEVEN, 1, 1, by_samples=True))
