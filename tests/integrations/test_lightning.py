"""``Trainer(strategy="fsdp_engine")``, compared with Lightning's own DDPStrategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torchmetrics import MeanMetric

import fsdp_engine as fe
from fsdp_engine.integrations import checkpoint_folder
from fsdp_engine.integrations.lightning import consolidate
from tests.integrations.lightning_scene import (
    Block,
    Net,
    by_engine,
    check_equal,
    data,
    fit,
    is_checkpoint,
    make,
    make_trainer,
    weights,
)
from tests.integrations.trainer_scene import LEVELS, shared_folder
from tests.matrices import thorough_but
from tests.pool import Ranks, on_ranks


class Trained(NamedTuple):
    found: Any
    expected: Any
    ours: Trainer
    theirs: Trainer


def train_both(strategy: Any, made: type[Net] = Net, rel: float = 1e-5, **options: Any) -> Trained:
    """Trains over the strategy and over DDP; losses and metrics are equal."""
    arguments = {"calls_forward": True} if options.pop("calls_forward", False) else {}
    expected, found = make(made, **arguments), make(made, **arguments)
    theirs, ours = fit(expected, "ddp", **options), fit(found, strategy, **options)
    assert found.losses == pytest.approx(expected.losses, rel=rel)
    for name, value in theirs.callback_metrics.items():
        assert float(ours.callback_metrics[name]) == pytest.approx(float(value), rel=rel), name
    return Trained(found, expected, ours, theirs)


def check_both(*arguments: Any, **options: Any) -> Trained:
    """As :func:`train_both`; weights are equal, too."""
    both = train_both(*arguments, **options)
    check_equal(both.found, both.expected)
    return both


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_each_level_trains_as_ddp(level: str) -> None:
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "val": data()}
    both = check_both(by_engine(level), calls_forward=level == LEVELS[1], **options)
    assert {"loss", "val_loss"} <= both.ours.callback_metrics.keys()


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(self.loss(batch))
        self.log("mean", self.mean)


@on_ranks(2)
def test_arguments_of_shard_and_a_metric() -> None:
    policy = fe.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    given = {"mesh": (2, 1), "policy": policy, "units": [Block], "checkpointing": True}
    both = check_both(by_engine(LEVELS[3], "optim", **given), Counting, val=data())
    assert "mean" in both.ours.callback_metrics
    engine = both.ours.strategy.engine
    assert engine.policy is policy
    assert engine.mesh.outer.size == 2


class Watching(Net):
    """Notes whether each backward is the last microbatch of its step."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.syncs = [*getattr(self, "syncs", []), self.trainer.strategy.engine.reductions.sync]


@on_ranks(2)
def test_by_name_and_all_but_the_last_microbatch_do_not_sync() -> None:
    module = make(Watching)
    fit(module, "fsdp_engine", accumulate_grad_batches=3, max_epochs=1)
    assert module.syncs == [False, False, True] * 2


class Seeing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[0].register_forward_pre_hook(self._see)
        self.targets = batch[1].dtype
        return super().training_step(batch, batch_idx)

    def _see(self, module: nn.Module, args: Any) -> None:
        self.seen = (module.up.weight.dtype, args[0].dtype)


@on_ranks(2)
def test_clipping_by_value_and_precisions_are_those_of_ddp() -> None:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    for options in (by_value, {"gradient_clip_val": 0.1, "precision": "64-true"}):
        check_both(by_engine(), rel=1e-6, **options)
    once = {"max_epochs": 1, "gradient_clip_val": 10.0}
    both = train_both(by_engine(), rel=1e-2, precision="bf16-true", **once)
    assert {param.dtype for param in both.found.parameters()} == {torch.bfloat16}
    both = train_both(by_engine(), Seeing, rel=5e-2, precision="bf16-mixed", **once)
    assert both.found.seen == (torch.bfloat16, torch.bfloat16)
    assert both.found.targets == torch.float32  # a step's batch is not cast
    assert {param.dtype for param in both.found.parameters()} == {torch.float32}
    losses = []
    for strategy in ("ddp", by_engine()):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        module = make()
        trainer = fit(module, strategy, max_epochs=1, gradient_clip_val=0.3, more=[plugin])
        assert trainer.precision_plugin.state_dict()["_growth_tracker"] == 6
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@on_ranks(2)
def test_evaluation_by_itself_has_the_numbers_of_ddp() -> None:
    expected, found = make(), make()
    ours, theirs = make_trainer(by_engine()), make_trainer("ddp")
    for run in ("validate", "test"):
        (metrics,) = getattr(ours, run)(found, data(), verbose=False)
        (others,) = getattr(theirs, run)(expected, data(), verbose=False)
        assert metrics == pytest.approx(others)
    predicted = ours.predict(found, data())
    torch.testing.assert_close(predicted, theirs.predict(expected, data()))
    fit(found, by_engine())  # another Trainer continues with the sharded model
    fit(expected, "ddp")
    check_equal(found, expected)


class Adversaries(Net):
    """Two optimizers by hand, each over its own network; one clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        making, judging = self.optimizers()
        made = self.maker(x[:, :3])
        softplus = nn.functional.softplus

        self.toggle_optimizer(making)
        loss = softplus(-self.judge(self.maker(x[:, :3]))).mean()
        making.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(making, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        making.step()
        self.untoggle_optimizer(making)

        self.toggle_optimizer(judging)
        other = softplus(-self.judge(x)).mean() + softplus(self.judge(made.detach())).mean()
        other = other + self.loss(batch) * self.scale.mean()
        judging.zero_grad()
        self.manual_backward(other)
        judging.step()
        self.untoggle_optimizer(judging)
        self.losses += [float(loss.detach()), float(other.detach())]

    def configure_optimizers(self) -> Any:
        maker = list(self.maker.parameters())
        rest = [param for name, param in self.named_parameters() if not name.startswith("maker.")]
        return [torch.optim.Adam(maker, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


def consolidated(folder: Path, name: str) -> Path:
    if dist.get_rank() == 0:
        consolidate(folder / name, folder / "file.ckpt")
    dist.barrier()
    return folder / "file.ckpt"


@on_ranks(2)
def test_two_optimizers_by_hand_train_as_ddp_and_come_back() -> None:
    ddp = "ddp_find_unused_parameters_true"
    folder = shared_folder()
    expected, first = make(Adversaries), make(Adversaries)
    fit(expected, ddp)
    fit(first, by_engine(), max_epochs=1).save_checkpoint(folder / "half.ckpt")
    second = make(Adversaries)
    fit(second, by_engine("optim"), ckpt_path=folder / "half.ckpt")
    assert first.losses + second.losses == pytest.approx(expected.losses, rel=1e-5)
    check_equal(second, expected)
    plain = make(Adversaries)
    fit(plain, ddp, ckpt_path=consolidated(folder, "half.ckpt"))
    check_equal(plain, expected)


class Scheduled(Net):
    def __init__(self, kind: str = "step") -> None:
        super().__init__()
        self.kind = kind
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.weight = self.blocks[2].up.weight

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        schedules = torch.optim.lr_scheduler
        if self.kind == "plateau":
            plateau = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            schedule = {"scheduler": plateau, "monitor": "val_loss"}
        else:
            schedule = {"scheduler": schedules.StepLR(optimizer, 2, 0.7), "interval": self.kind}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize("kind", thorough_but(["plateau"], ["step", "epoch", "plateau"]))
@on_ranks(2)
def test_schedules_frozen_and_tied_weights_continue_from_a_checkpoint(kind: str) -> None:
    options: dict[str, Any] = {"val": data(), "gradient_clip_val": 0.5}
    expected, begun, found = (make(Scheduled, kind=kind) for _ in range(3))
    folder = shared_folder()
    theirs = fit(expected, "ddp", max_epochs=3, **options)
    fit(begun, by_engine(), max_epochs=2, **options).save_checkpoint(folder / "x")
    ours = fit(found, by_engine("optim"), max_epochs=3, ckpt_path=folder / "x", **options)
    check_equal(found, expected)
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (ours, theirs)]
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0] < 1e-2


class Later(Net):
    """Builds its blocks in ``configure_model``, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device("meta"):
                self.blocks = nn.ModuleList([Block() for _ in range(3)])


def empty_net() -> Net:
    with make_trainer(by_engine()).init_module(empty_init=True):
        made = Net()
    assert made.head.weight.is_meta
    return made


@on_ranks(2)
def test_models_without_memory_get_values_shard_by_shard() -> None:
    module = make(Later)
    trainer = fit(module, by_engine())
    assert module.losses[-1] < 100
    assert not any(param.is_meta for param in module.parameters())
    other = empty_net()
    fit(other, by_engine(), max_epochs=1)
    assert float(weights(other)["blocks.0.up.weight"].std()) > 0.1
    folder = shared_folder()
    trainer.save_checkpoint(folder / "x")
    empty, loading = empty_net(), make_trainer(by_engine(initial_values="empty"))
    loading.validate(empty, data(), ckpt_path=folder / "x", verbose=False)
    check_equal(empty, module)


@on_ranks(2)
def test_ranks_start_from_what_the_first_one_built() -> None:
    torch.manual_seed(dist.get_rank())
    module = Net()
    make_trainer(by_engine(), limit_val_batches=1).validate(module, data(), verbose=False)
    torch.manual_seed(0)
    check_equal(module, Net())


@on_ranks(2)
def test_summary_early_stopping_and_what_a_strategy_sends() -> None:
    module = make()
    total = ModelSummary(module).total_parameters
    stopping = EarlyStopping("val_loss", patience=0, min_delta=10.0)
    trainer = fit(module, by_engine(), val=data(), max_epochs=5, callbacks=[stopping])
    assert trainer.current_epoch == 2
    assert ModelSummary(module).total_parameters == total
    rank = torch.tensor(float(dist.get_rank()))
    assert float(trainer.strategy.reduce(rank, reduce_op="sum")) == 1.0
    assert trainer.strategy.broadcast(dist.get_rank()) == 0
    trainer.strategy.barrier()
    assert trainer.strategy.engine.model is module


def _train(folder: str, num_epochs: int, level: str, resumes: bool) -> list[float]:
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=2, monitor="val_loss")
    module, last = make(), f"{folder}/last.ckpt" if resumes else None
    options = {"val": data(), "max_epochs": num_epochs, "callbacks": [saver], "ckpt_path": last}
    trainer = fit(module, by_engine(level), **options)
    names = sorted(os.listdir(folder))
    dist.barrier()
    assert "last.ckpt" in names
    assert len(names) == 3, names  # checkpoints with worse metrics were removed
    assert is_checkpoint(saver.best_model_path)
    (metrics,) = trainer.validate(module, data(), ckpt_path="best", verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(saver.best_model_score), rel=1e-6)
    losses = torch.tensor(module.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def test_a_run_continues_along_its_curve_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(_train, str(tmp_path / "a"), 4, LEVELS[3], False, world_size=2)[0]
    begun = ranks.run(_train, str(tmp_path / "b"), 2, LEVELS[3], False, world_size=2)[0]
    third = ranks.run(_train, str(tmp_path / "b"), 3, LEVELS[2], True, world_size=1)[0]
    fourth = ranks.run(_train, str(tmp_path / "b"), 4, LEVELS[1], True, world_size=2)[0]
    assert begun + third + fourth == pytest.approx(whole, rel=1e-5)


@on_ranks(2)
def test_files_of_other_strategies_come_in_and_out() -> None:
    folder = shared_folder()
    expected, found, last = make(), make(), make()
    fit(expected, "ddp", max_epochs=3)
    fit(make(), "ddp", max_epochs=1).save_checkpoint(folder / "ddp.ckpt")
    ours = fit(found, by_engine(), max_epochs=2, ckpt_path=folder / "ddp.ckpt")
    ours.save_checkpoint(folder / "ours.ckpt")
    file = consolidated(folder, "ours.ckpt")
    loaded = Net.load_from_checkpoint(file)
    assert loaded.hparams["lr"] == 1e-2
    check_equal(loaded, found)
    fit(last, "ddp", max_epochs=3, ckpt_path=file)
    check_equal(last, expected)


class Picky(Net):
    puts_in: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["head.bias"]
        checkpoint["mine"] = [1, 2]
        if self.puts_in is not None:
            checkpoint["state_dict"]["head.weight"] = self.puts_in

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == [1, 2]


@on_ranks(2)
def test_hooks_leave_out_weights_and_add_to_all_else() -> None:
    folder = shared_folder()
    module, other, trainer = make(Picky), make(Picky), make_trainer(by_engine())
    saving = fit(module, by_engine(), max_epochs=1)
    saving.save_checkpoint(folder / "x", weights_only=True)
    with pytest.raises(ValueError, match=r"missing model\.head\.bias"):
        make_trainer(by_engine()).validate(make(Picky), data(), ckpt_path=folder / "x")
    other.strict_loading = False
    bias = weights(other)["head.bias"]
    trainer.validate(other, data(), ckpt_path=folder / "x", verbose=False)
    torch.testing.assert_close(weights(other)["head.weight"], weights(module)["head.weight"])
    assert torch.equal(weights(other)["head.bias"], bias)
    with pytest.raises(ValueError, match=r"optimizer: expected entries"):
        fit(other, by_engine(), ckpt_path=folder / "x")
    module.puts_in = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"found others in head\.weight"):
        saving.save_checkpoint(folder / "y")
    assert os.listdir(folder) == ["x"]


@on_ranks(2)
def test_a_save_that_fails_leaves_nothing_and_is_an_error_on_all_ranks() -> None:
    folder = shared_folder()
    trainer = fit(make(), by_engine(), max_epochs=1)
    fails = mock.patch.object(checkpoint_folder, "sync_folder", side_effect=OSError("planted"))
    with fails, pytest.raises(OSError, match="planted"):
        trainer.save_checkpoint(folder / "x")
    dist.barrier()
    assert os.listdir(folder) == []
    trainer.save_checkpoint(folder / "x")
    (folder / "broken").write_bytes(b"no checkpoint")
    with pytest.raises(RuntimeError, match=r"torch\.save"):
        fit(make(), by_engine(), ckpt_path=folder / "broken")


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 3:
            raise ZeroDivisionError("planted")
        return loss


@on_ranks(2)
def test_a_checkpoint_on_an_exception_has_the_weights_of_the_last_step() -> None:
    folder = shared_folder()
    module, expected, found = make(Failing), make(), make()
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit(module, by_engine(), callbacks=[OnExceptionCheckpoint(folder)])
    fit(expected, by_engine(), max_steps=3)
    check_equal(module, expected)
    path = folder / "on_exception.ckpt"
    make_trainer(by_engine()).test(found, data(), ckpt_path=path, verbose=False)
    check_equal(found, expected)


class Foreign(Net):
    def configure_optimizers(self) -> Any:
        if dist.get_rank() == 1:
            return torch.optim.Adam([nn.Parameter(torch.ones(2))])
        return super().configure_optimizers()


class OtherPrecision(Precision):
    precision = "transformer-engine"


REFUSED: dict[type[Exception], dict[str, Callable[[], object]]] = {
    TypeError: {
        r"expected arguments of fsdp_engine\.shard.*found unitz": lambda: by_engine(unitz=1),
        "not compiled as a whole": lambda: fit(torch.compile(make(), backend="eager"), by_engine()),
        "units: expected module": lambda: fit(make(), by_engine(units=dist.get_rank() or None)),
        "checkpoint_io: expected none": lambda: by_engine_with(TorchCheckpointIO()),
        "callbacks: expected none that averages": lambda: fit(
            make(), by_engine(), callbacks=[EMAWeightAveraging()]
        ),
    },
    ValueError: {
        "strategy: expected one of no_shard": lambda: fit(make(), by_engine("everything")),
        "optimizer: expected parameters of the sharded": lambda: fit(make(Foreign), by_engine()),
        "precision: expected one of 32-true": lambda: by_engine_with(OtherPrecision()),
    },
    RuntimeError: {
        "engine: expected a model that the Trainer has set up": lambda: by_engine().engine,
    },
    FileNotFoundError: {
        "expected a checkpoint at": lambda: fit(make(), by_engine(), ckpt_path="/nowhere/x.ckpt"),
    },
}


def by_engine_with(plugin: Any) -> Trainer:
    return make_trainer(by_engine(), more=[plugin])


@on_ranks(2)
def test_errors_are_raised_on_all_ranks() -> None:
    for error, calls in REFUSED.items():
        for words, call in calls.items():
            with pytest.raises(error, match=words):
                call()


@on_ranks(1)
def test_one_device_and_a_job_that_died_while_it_saved() -> None:
    folder = shared_folder()
    trainer = train_both(by_engine(), rel=1e-6, max_epochs=1).ours
    left = folder / ".saving-x.ckpt"
    left.mkdir()
    (left / "__shards_0_0_0.distcp").write_bytes(b"half")
    trainer.save_checkpoint(folder / "x.ckpt")
    assert os.listdir(folder) == ["x.ckpt"]
    trainer.save_checkpoint(folder / "x.ckpt")  # replaces the first one
    assert len(list((folder / "x.ckpt").glob("*.distcp"))) == 1
    (folder / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="found the file"):
        trainer.save_checkpoint(folder / "file")
    trainer.strategy.remove_checkpoint(folder / "x.ckpt")
    assert os.listdir(folder) == ["file"]
