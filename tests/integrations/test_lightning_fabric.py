"""``Fabric(strategy="fsdp_engine")`` beside Lightning's own DDPStrategy."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checkpoint.scene import raises_each
from tests.integrations.lightning_scene import Layers, make_fabric
from tests.integrations.trainer_scene import shared_folder
from tests.pool import on_ranks


class Model(Layers, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.build()

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


def build(fabric: Any, *, apart: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    if not apart:
        return fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-2))


def train(
    fabric: Any, model: Any, optimizer: Any, first: int = 0, every: int = 1, **clip: Any
) -> list[float]:
    losses = []
    for index in range(first, first + 4):
        generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
        x, y = torch.randn(4, 6, generator=generator).split([4, 2], dim=1)
        steps = index % every == every - 1
        with fabric.no_backward_sync(model, enabled=not steps):
            loss = nn.functional.mse_loss(model(x), y) / every
            fabric.backward(loss)
        if steps:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


WAYS: list[dict[str, Any]] = [{"max_norm": 0.1}, {"clip_val": 0.01}, {"every": 2}]


@pytest.mark.parametrize("ways", [WAYS, pytest.param([{}], marks=pytest.mark.thorough)])
@on_ranks(2)
def test_training_is_that_of_ddp_also_in_other_precisions(ways: list[dict[str, Any]]) -> None:
    for options in ways:
        ddp, together = make_fabric(strategy="ddp"), make_fabric(strategy="fsdp_engine")
        apart = make_fabric("optim_grads")
        expected = pytest.approx(train(ddp, *build(ddp), **options), rel=1e-5)
        assert train(together, *build(together), **options) == expected
        assert train(apart, *build(apart, apart=True), **options) == expected
    for precision, rtol in (("64-true", 1e-9), ("bf16-true", 1e-2), ("bf16-mixed", 5e-2)):
        ddp, ours = (
            make_fabric(strategy="ddp", precision=precision),
            make_fabric(precision=precision),
        )
        expected = pytest.approx(train(ddp, *build(ddp)), rel=rtol)
        assert train(ours, *build(ours)) == expected, precision


@on_ranks(2)
def test_a_saved_run_goes_on_at_another_level() -> None:
    folder = shared_folder()
    fabric = make_fabric()
    model, optimizer = build(fabric)
    train(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 4, "notes": {"a": 1, "b": 2}}
    fabric.save(folder / "x", state, filter={"notes": lambda name, _: name == "a"})
    expected = train(fabric, model, optimizer, first=4)

    other = make_fabric("optim")
    model, optimizer = build(other)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert other.load(folder / "x", state) == {"notes": {"a": 1}}
    assert state["step"] == 4
    assert train(other, model, optimizer, first=4) == pytest.approx(expected, rel=1e-6)

    with pytest.raises(KeyError, match="found \\['nothing'\\]"):
        other.load(folder / "x", {"model": model, "nothing": 1})
    other.load_raw(folder / "x", model)  # its weights alone
    state = {"model": model, "optimizer": optimizer}
    only_head = {"model": lambda name, _: "head" in name}
    fabric.save(folder / "y", {"model": model}, filter=only_head)
    with pytest.raises(ValueError, match=r"missing model\.inlet\.weight"):
        other.load(folder / "y", {"model": model})
    other.load(folder / "y", {"model": model}, strict=False)
    with pytest.raises(ValueError, match="filter: expected names of modules and dicts"):
        fabric.save(folder / "z", state, filter={"optimizer": lambda name, _: True})
    assert sorted(os.listdir(folder)) == ["x", "y"]


class FailsOnOneRank:
    """An object whose state cannot be saved on the second rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise ValueError("no state here")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@on_ranks(2)
def test_an_error_in_a_state_or_a_filter_of_one_rank_is_raised_on_all() -> None:
    folder = shared_folder()
    fabric = make_fabric()
    model, _ = build(fabric)
    fails = FailsOnOneRank()
    with pytest.raises(ValueError, match="no state here"):
        fabric.save(folder / "x", {"model": model, "position": fails})
    state = {"model": model, "notes": {"a": 1}}
    with pytest.raises(ValueError, match="no state here"):
        fabric.save(folder / "x", state, filter={"notes": lambda name, _: not fails.state_dict()})
    assert not list(folder.iterdir())
    fabric.save(folder / "x", state)


@on_ranks(2)
def test_files_of_other_strategies_come_in() -> None:
    folder = shared_folder()
    ddp = make_fabric(strategy="ddp")
    theirs, optimizer = build(ddp)
    train(ddp, theirs, optimizer)
    ddp.save(folder / "x.ckpt", {"model": theirs, "optimizer": optimizer, "step": 4})
    ddp.save(folder / "raw.ckpt", theirs.state_dict())
    raw = theirs(torch.ones(2, 4)).detach()
    expected = train(ddp, theirs, optimizer, first=4)
    fabric = make_fabric()
    model, optimizer = build(fabric)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(folder / "x.ckpt", state) == {}
    assert state["step"] == 4
    assert train(fabric, model, optimizer, first=4) == pytest.approx(expected, rel=1e-5)
    fabric.load_raw(folder / "raw.ckpt", model)
    torch.testing.assert_close(model(torch.ones(2, 4)).detach(), raw)
    ddp.save(folder / "y.ckpt", {"step": 7})
    state = {"model": model, "step": 0}
    with pytest.raises(KeyError, match="found \\['model'\\]"):
        fabric.load(folder / "y.ckpt", state)
    assert fabric.load(folder / "y.ckpt", state, strict=False) == {}
    assert state["step"] == 7
    torch.testing.assert_close(model(torch.ones(2, 4)).detach(), raw)


@on_ranks(2)
def test_two_models_in_one_checkpoint() -> None:
    folder = shared_folder()
    fabric = make_fabric()
    maker, making = build(fabric)
    judge, judging = build(fabric, apart=True)
    train(fabric, maker, making)
    state = {"maker": maker, "judge": judge, "making": making, "judging": judging}
    fabric.save(folder / "x", state)
    expected = [train(fabric, *pair) for pair in ((maker, making), (judge, judging))]
    assert expected[0] != expected[1]
    fabric.load(folder / "x", state)
    found = [train(fabric, *pair) for pair in ((maker, making), (judge, judging))]
    assert found == expected


@on_ranks(2)
def test_other_methods_and_what_fabric_sends() -> None:
    fabric = make_fabric()
    with fabric.init_module(empty_init=True):
        model = Model()
    assert model.head.weight.is_meta
    model = fabric.setup(model)
    model.mark_forward_method("twice")
    x = torch.ones(2, 4)
    assert torch.equal(model.twice(x), 2 * model(x))
    rank = torch.tensor(float(dist.get_rank()))
    assert float(fabric.all_reduce(rank, reduce_op="sum")) == 1.0
    assert fabric.broadcast(dist.get_rank()) == 0


@on_ranks(2)
def test_errors_are_raised_on_all_ranks_before_anything_is_changed() -> None:
    fabric = make_fabric()
    model, other = Model(), Model()
    used = torch.optim.Adam(model.parameters())
    other_on_one_rank = (other if dist.get_rank() else model).parameters()
    stranger = torch.optim.SGD(other_on_one_rank, 0.1)
    model(torch.ones(2, 4)).sum().backward()
    used.step()
    unknown, saved = "expected parameters of the module", r"a module that fabric\.setup"
    raises_each(
        (ValueError, "expected a Adam that has no state", partial(fabric.setup, model, used)),
        (ValueError, unknown, partial(fabric.setup, model, stranger)),
        (ValueError, saved, partial(fabric.save, "/nowhere", {"step": 3})),
        (TypeError, "expected arguments of fsdp_engine", partial(type(fabric.strategy), unitz=1)),
    )
    assert type(model.head.weight) is nn.Parameter
