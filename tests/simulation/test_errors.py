"""Errors of models and arguments that cannot be simulated: line and reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.models import Transformer, token_batch

WIDTH = 8


class Body(nn.Module):
    """A linear, and then whatever ``then`` does."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x)).sum()


def reads_item(x: Tensor) -> Tensor:
    return x * x.max().item()  # here


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x
    return -x


def loops(x: Tensor) -> Tensor:
    for index in (x > 0).nonzero():  # here
        x = x + index.sum()
    return x


def selects(x: Tensor) -> Tensor:
    return x[x > 0]  # here


def raises(x: Tensor) -> Tensor:
    return x @ torch.zeros(3, 3)  # here


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.max().item()  # here


def in_backward(x: Tensor) -> Tensor:
    return Reading.apply(x)


@pytest.mark.parametrize(
    ("then", "phase", "reason"),
    [
        (reads_item, "forward", "it reads a value"),
        (branches, "forward", "it reads a value"),
        (loops, "forward", "depends on values"),
        (selects, "forward", "depends on values"),
        (raises, "forward", "RuntimeError: "),
        (in_backward, "backward", "it reads a value"),
    ],
)
@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_the_error_names_the_line_and_the_reason(
    then: Callable[[Tensor], Tensor], phase: str, reason: str, level: str
) -> None:
    with pytest.raises(fe.SimulationError) as caught:
        fe.simulate(lambda: Body(then), 2, batch=torch.zeros(2, WIDTH), strategy=level)
    error = caught.value
    assert error.phase == phase
    assert error.file == __file__
    assert error.code is not None
    assert error.code.endswith("# here")
    assert reason in error.reason
    assert error.needs_values == (then is not raises)
    assert f"{__file__}:{error.line}" in str(error)
    # And nothing is left of it.
    assert not dist.is_initialized()
    assert fe.simulate(lambda: Transformer(2), 2, batch=token_batch(2, 0)).seconds > 0


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def test_torch_does_not_log_a_traceback() -> None:
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), Listening()
    log.addHandler(handler)
    try:
        with pytest.raises(fe.SimulationError):
            fe.simulate(lambda: Body(raises), 2, batch=torch.zeros(2, WIDTH))
    finally:
        log.removeHandler(handler)
    assert handler.heard == []
    assert not log.disabled


def test_errors_of_loss_build_batch_and_optimizer_are_converted() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    def model() -> nn.Module:
        return Body(lambda x: x)

    batch = torch.zeros(2, WIDTH)
    for phase, build, options in (
        ("the loss", model, {"batch": batch, "loss": fails}),
        ("building the model", fails, {"batch": batch}),
        ("making the batch", model, {"batch": fails}),
        ("making the optimizer", model, {"batch": batch, "optimizer": fails}),
    ):
        with pytest.raises(fe.SimulationError, match="KeyError: 'mine'") as caught:
            fe.simulate(build, 2, **options)
        assert caught.value.phase == phase
        assert caught.value.code == 'raise KeyError("mine")'
        assert not dist.is_initialized()


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach().sum()


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "batch", "error", "message"),
    [
        (
            lambda: Transformer(2),
            {"words": torch.zeros(2, 3)},
            TypeError,
            r"batch: expected arguments of Transformer.forward\(tokens, targets\); found words: ",
        ),
        (
            lambda: Transformer(2),
            (torch.zeros(2), torch.zeros(2), 3),
            TypeError,
            "found 3 positional ones: too many positional arguments",
        ),
        (Constant, torch.zeros(2, WIDTH), ValueError, "loss: expected one that requires grad"),
        (nn.Identity, torch.zeros(2), ValueError, "that require grad; found none among 0 of Ident"),
        (frozen, torch.zeros(2, WIDTH), ValueError, "found none among 2 of Linear"),
        (
            lambda: 3,
            torch.zeros(2),
            TypeError,
            "build: expected a function that returns a torch.nn",
        ),
    ],
)
def test_arguments_that_do_not_fit(
    build: Any, batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fe.simulate(build, 2, batch=batch)
    assert not dist.is_initialized()


def test_a_loss_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"of one element; found a tensor of shape \(2, 8\)"):
        fe.simulate(
            lambda: nn.Linear(WIDTH, WIDTH), 2, batch=torch.zeros(2, WIDTH), loss=lambda out: out
        )


@pytest.mark.parametrize("made_by", ["caller", "function"])
def test_a_batch_on_the_meta_device(made_by: str) -> None:
    def batch() -> tuple[Tensor, ...]:
        return tuple(each.to("meta") for each in token_batch(4, 0))

    expected = fe.simulate(lambda: Transformer(2), 2, batch=token_batch(4, 0))
    found = fe.simulate(
        lambda: Transformer(2), 2, batch=batch if made_by == "function" else batch()
    )
    assert found.memory == expected.memory
    assert found.seconds == pytest.approx(expected.seconds)


class Initialised(nn.Module):
    """Reads values while it is built, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        self.depths = torch.arange(4)[1:].tolist()

    def forward(self, x: Tensor) -> Tensor:
        assert self.rates == pytest.approx([0.0, 0.1, 0.2])
        assert self.depths == [1, 2, 3]
        return self.linear(x).sum()


def test_a_model_may_read_rows_of_numbers_and_draw_its_weights_while_it_is_built() -> None:
    assert fe.simulate(Initialised, 2, batch=torch.zeros(2, WIDTH)).seconds > 0


def test_a_model_that_reads_drawn_values_while_it_is_built() -> None:
    def build() -> nn.Module:
        width = int(torch.rand(()) * 8) + 1  # here
        return nn.Linear(width, width)

    with pytest.raises(fe.SimulationError, match=r"building the model failed at .*# here`"):
        fe.simulate(build, 2, batch=torch.zeros(2, 2))


def test_a_row_that_was_written_to_is_not_read_as_it_was() -> None:
    def build() -> nn.Module:
        row = torch.linspace(0, 1, 4)
        row.uniform_()
        row[0].item()
        return nn.Linear(2, 2)

    with pytest.raises(fe.SimulationError, match="building the model"):
        fe.simulate(build, 2, batch=torch.zeros(2, 2))
