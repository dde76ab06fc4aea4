"""Errors of models and arguments that cannot be simulated: line and reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.composition.tensor_parallel import Model
from tests.models import Transformer, token_batch
from tests.planner.simulation.scene import on_meta
from tests.planner.simulation.small_llama import llama

WIDTH = 8


class Body(nn.Module):
    """A linear layer, and then the function ``then``."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x)).sum()


def loops(x: Tensor) -> Tensor:
    for index in (x > 0).nonzero():  # here
        x = x + index.sum()
    return x


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.max().item()  # here


READS, DEPENDS = "it reads a value", "depends on values"


@pytest.mark.parametrize(
    ("then", "phase", "reason"),
    [
        (lambda x: x * x.max().item(), "forward", READS),  # here
        (loops, "forward", DEPENDS),
        (lambda x: x[x > 0], "forward", DEPENDS),  # here
        (lambda x: x @ torch.zeros(3, 3), "forward", "RuntimeError: "),  # here
        (Reading.apply, "backward", READS),
    ],
)
@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_the_error_names_the_line_and_the_reason(
    then: Callable[[Tensor], Tensor],
    phase: str,
    reason: str,
    level: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    with pytest.raises(fe.SimulationError) as caught:
        fe.simulate(lambda: Body(then), 2, batch=torch.zeros(2, WIDTH), strategy=level)
    log.removeHandler(caplog.handler)
    assert not caplog.records  # torch does not log a traceback
    assert not log.disabled
    error = caught.value
    assert error.phase == phase
    assert error.file == __file__
    assert error.code is not None
    assert error.code.endswith("# here")
    assert reason in error.reason
    assert error.needs_values == (reason in (READS, DEPENDS))
    assert f"{__file__}:{error.line}" in str(error)
    # The failed simulation leaves no process group.
    assert not dist.is_initialized()
    assert fe.simulate(lambda: Body(torch.relu), 2, batch=torch.zeros(2, WIDTH)).seconds > 0


def test_errors_of_loss_build_batch_and_optimizer_are_converted() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    for phase, argument in (
        ("the loss", "loss"),
        ("building the model", "build"),
        ("making the batch", "batch"),
        ("making the optimizer", "optimizer"),
    ):
        options = {"build": lambda: Body(torch.relu), "batch": torch.zeros(2, WIDTH)}
        with pytest.raises(fe.SimulationError, match="KeyError: 'mine'") as caught:
            fe.simulate(world_size=2, **{**options, argument: fails})
        assert caught.value.phase == phase
        assert caught.value.code == 'raise KeyError("mine")'
        assert not dist.is_initialized()


transformer = partial(Transformer, 2)
linear = partial(nn.Linear, WIDTH, WIDTH)
X, TOKENS = torch.zeros(2, WIDTH), {"batch": token_batch(4, 0), "mesh": (2, 4)}
NO_WORDS = r"batch: expected arguments of Transformer.forward\(tokens, targets\); found words: "
CUT = {"batch": torch.zeros(2, 8, dtype=torch.long), "tensor_parallel": 2}
CHECKED = fe.DistributedDataParallelConfig(check_for_nan_in_grad=True)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (transformer, {"batch": {"words": torch.zeros(2, 3)}}, NO_WORDS),
    (transformer, {"batch": (X, X, 3)}, "found 3 positional arguments: too many positional"),
    (transformer, {"batch": {}}, "found no arguments: missing a required argument"),
    (
        linear,
        {"batch": X, "loss": lambda out: out.detach().sum()},
        "loss: expected a loss that re",
    ),
    (nn.Identity, {"batch": X}, "require grad; found none among 0 of Ident"),
    (lambda: linear().requires_grad_(False), {"batch": X}, "found none among 2 of Linear"),
    (lambda: 3, {"batch": X}, "build: expected a function that returns a torch.nn"),
    (lambda: nn.LSTM(WIDTH, WIDTH), {"batch": X}, "loss: expected a function that returns the los"),
    (linear, {"batch": X, "loss": lambda out: out}, r"one element; found a tensor of shape \(2, 8"),
    (transformer, {**TOKENS, "mesh": (3, 4)}, "one or two sizes of 8 ranks"),
    (transformer, {**TOKENS, "config": CHECKED}, "no checks of"),
    (linear, {"batch": X, "compile": True}, r"compile: expected a model with blocks.*Linear"),
    (Model, {**CUT, "tensor_parallel": 3}, "expected a divisor of the 8 ranks"),
    (Model, CUT, "or `parallelize`; found Model"),
    (
        Model,
        {**CUT, "parallelize": lambda *_: None},
        "parallelize: expected a function that re",
    ),
    (Model, {**CUT, "parallelize": lambda *_: 1 / 0}, "parallelizing the model failed"),
    (llama, {**CUT, "tensor_parallel": 4}, "expected a divisor of the 2 num_key"),
]


@pytest.mark.parametrize(("build", "options", "message"), WRONG)
def test_arguments_that_do_not_fit(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, fe.SimulationError), match=message):
        fe.simulate(build, 8, **options)
    assert not dist.is_initialized()


def test_a_batch_on_the_meta_device() -> None:
    def batch() -> tuple[Tensor, ...]:
        return tuple(each.to("meta") for each in token_batch(4, 0))

    expected, *others = (
        fe.simulate(transformer, 2, batch=each) for each in (token_batch(4, 0), batch, batch())
    )
    for found in others:
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


def width_from_drawn_values() -> nn.Module:
    return nn.Linear(2, int(torch.rand(()) * 8) + 1)  # here


def row_that_was_written_to() -> nn.Module:
    row = torch.linspace(0, 1, 4)
    row.uniform_()
    row[0].item()  # here
    return nn.Linear(2, 2)


@pytest.mark.parametrize("build", [width_from_drawn_values, row_that_was_written_to])
def test_a_model_that_reads_drawn_values_while_it_is_built(build: Any) -> None:
    for where in (build, on_meta(build)):
        with pytest.raises(fe.SimulationError, match=r"building the model failed at .*# here`"):
            fe.simulate(where, 2, batch=torch.zeros(2, 2))
