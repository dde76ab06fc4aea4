"""``to(dtype)``, ``double()`` etc. convert sharded models as in torch; training continues."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.comm import rendezvous
from fsdp_engine.fsdp2 import fully_shard
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.checkpoint.scene import shared_folder, update
from tests.models import Chain, Mlp, Transformer, vector_batch
from tests.pool import Ranks, on_ranks
from tests.reference import held
from tests.scenario import Run, Scenario


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y + self.shift.to(y.dtype)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return self.head(self.norm(y))


def net() -> Net:
    torch.manual_seed(5)
    model = Net()
    model.norm.eval()  # statistics of a part of the batch would differ
    return model


def data(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def mine(x: Tensor) -> Tensor:
    rank, size = reference.rank_and_size()
    return x.chunk(size)[rank]


def loss_in_its_dtype(model: nn.Module, batch: reference.Batch) -> Tensor:
    x = batch[0].to(next(model.parameters()).dtype)
    return F.mse_loss(model(x).float(), x.float())


def steps(model: nn.Module, optimizer: Any, which: range, part: Any = mine) -> list[float]:
    losses = []
    for step in which:
        loss = loss_in_its_dtype(model, (part(data(step, torch.float32)),))
        losses.append(reference.mean_over_ranks(update(loss, optimizer)))
    return losses


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return reference.sgd(model.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 6)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[None])[0][0])


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent()


def freeze_and_double(model: Any) -> None:
    model.blocks[1].requires_grad_(False)
    model.double()


def thaw_and_float(model: Any) -> None:
    model.blocks[1].requires_grad_(True)
    model.to(torch.float32)


def to_double(model: Any) -> None:
    params = [id(param) for param in model.parameters()]
    assert model.double() is model
    assert [id(param) for param in model.parameters()] == params


leave, to_float = reference.nothing, nn.Module.float
# By name: the model, options of shard, the conversion before every two steps, levels.
CUT = "optim_grads_params"
PLANNED = {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)}
PROGRAMS: dict[str, tuple[Any, dict[str, Any], list[Any], Any]] = {
    "another dtype and back": (net, {}, [leave, to_double, to_float], LEVELS),
    "frozen meanwhile": (net, {}, [leave, freeze_and_double, thaw_and_float], LEVELS),
    "recurrent and partly frozen": (recurrent, {}, [leave, to_double], ["optim", CUT]),
    "planned addresses": (net, PLANNED, [leave, leave, to_double, leave], [CUT]),
}


def dtypes_of(run: Run) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor in the state of the model and of the optimizer."""
    state = {**run.model.state_dict(), **run.state()}
    return {name: value.dtype for name, value in state.items()}


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_training_goes_on_in_another_dtype(name: str) -> None:
    make, options, changes, levels = PROGRAMS[name]
    scenario = Scenario(
        model=make,
        batch=partial(vector_batch, width=6),
        options=options,
        steps=2 * len(changes),
        rows=4,
        before_step=lambda model, step: None if step % 2 else changes[step // 2](model),
        loss_of=loss_in_its_dtype,
    )
    expected = dtypes_of(scenario.alone())
    for level in levels:
        run = scenario.but(pair=(level, "no_shard")).check()
        assert dtypes_of(run) == expected
        assert not hasattr(run.model, "first") or run.model.head.weight is run.model.first.weight


@on_ranks(1)
def test_one_rank_has_the_bits_of_plain_torch() -> None:
    for level in LEVELS:
        for name in ("half", "bfloat16"):
            alone, model = net(), net()
            fe.shard(model, strategy=level)
            alone_sgd, sgd = momentum(alone), momentum(model)
            steps(alone, alone_sgd, range(2))
            steps(model, sgd, range(2))
            getattr(alone, name)()
            getattr(model, name)()
            assert steps(alone, alone_sgd, range(2, 5)) == steps(model, sgd, range(2, 5))
            reference.assert_same_weights(model, alone, rtol=0, atol=0)


@on_ranks(2)
def test_gradients_are_converted_with_their_parameters() -> None:
    for level in LEVELS:
        alone, model = net(), net()
        engine = fe.shard(model, strategy=level)
        # The second backward adds to the gradients of the first.
        for number, dtype in enumerate((torch.float32, torch.float64)):
            x = data(number, dtype)
            F.mse_loss(alone(x), x).backward()
            F.mse_loss(model(mine(x)), mine(x)).backward()
            alone.double()
            model.double()
            grads = map(reference.full_gradients, (model, alone))
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        torch.testing.assert_close(engine.clip_grad_norm_(0.1), expected, check_dtype=False)


@on_ranks(2)
def test_the_policy_follows() -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: list[torch.dtype] = []
    for level in LEVELS:
        model = net()
        del model.norm
        model.norm = nn.LayerNorm(6)
        model.blocks[1].register_forward_hook(lambda m, args, y: seen.append(m.weight.dtype))
        engine = fe.shard(model, strategy=level, mp_policy=policy)
        before = engine.memory_bytes()
        sgd = momentum(model)
        steps(model, sgd, range(1))
        values = [reference.full(p) for p in model.parameters()]
        model.double()
        steps(model, sgd, range(1, 2))
        model.float()
        for p, value in zip(model.parameters(), values, strict=True):
            assert p.dtype == torch.float32
            assert not torch.equal(reference.full(p), value)
        steps(model, sgd, range(2, 3))
        assert set(seen) == {torch.bfloat16}
        if level != "no_shard":  # no_shard keeps the memory of gradients
            assert engine.memory_bytes() == before
        model.bfloat16()
        steps(model, sgd, range(3, 4))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@on_ranks(2)
def test_a_checkpoint_after_a_conversion() -> None:
    folder, model, other = shared_folder(), net(), net().double()
    engine, again = fe.shard(model), fe.shard(other)
    sgd, other_sgd = momentum(model), momentum(other)
    steps(model, sgd, range(1))
    model.double()
    steps(model, sgd, range(1, 2))
    fe.save_checkpoint(folder, engine, sgd)
    fe.load_checkpoint(folder, again, other_sgd)
    assert steps(other, other_sgd, range(2, 4)) == steps(model, sgd, range(2, 4))


@on_ranks(2)
def test_fp8_on_the_wire_follows() -> None:
    model = net()
    fe.shard(model, codec_rules=[fe.Float8()])
    sgd = momentum(model)
    first = steps(model, sgd, range(2))
    model.bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert steps(model, sgd, range(2, 6))[-1] < first[0]


@on_ranks(2)
def test_hooks_of_users_and_of_their_gradients_stay() -> None:
    model = net()
    fe.shard(model)
    seen: list[torch.dtype] = []
    param = model.blocks[0].weight
    param.register_hook(lambda grad: seen.append(grad.dtype))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    sgd = momentum(model)
    steps(model, sgd, range(1))
    model.double()
    steps(model, sgd, range(1))
    assert seen == [torch.float32] * 2 + [torch.float64] * 2


@on_ranks(2)
def test_what_cannot_be_converted_raises_and_changes_nothing() -> None:
    for level in LEVELS:
        model = net()
        engine = fe.shard(model, strategy=level)
        x = mine(data(0, torch.float32))
        with pytest.raises(ValueError, match="expected parameters to stay on cpu"):
            model.to("meta")
        if level == "optim_grads_params":  # buckets of other levels do not follow modules
            with pytest.raises(ValueError, match=r"not converted\. Convert the whole unit"):
                model.norm.double()
        model.float()
        output = model(x)
        with pytest.raises(RuntimeError, match="whose backward is pending"):
            model.double()
        del output
        if level != "no_shard":
            with engine.no_sync():
                model(x).sum().backward()
            with pytest.raises(RuntimeError, match="expected gradients to be reduced or cleared"):
                model.double()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model.shift.dtype == torch.float32
        model(x).sum().backward()
        model.double()
        steps(model, momentum(model), range(1))
    model = net().bfloat16()  # main weights are compute weights
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, preserve_fp32_weights=False)
    fe.shard(model, strategy="no_shard", mp_policy=policy)
    with pytest.raises(ValueError, match=r"expected main weights in torch\.bfloat16"):
        model.float()


@on_ranks(2)
def test_an_optimizer_of_slices_follows() -> None:
    found = []
    for wrap in (lambda optimizer: optimizer, fe.shard_optimizer):
        model = net()
        fe.shard(model)
        optimizer = wrap(momentum(model))
        losses = steps(model, optimizer, range(2))
        model.double()
        found.append(losses + steps(model, optimizer, range(2, 4)))
    assert found[0] == found[1]


@on_ranks(1)
def test_copies_of_parts_leave_the_model_alone() -> None:
    model = Transformer()
    fe.shard(model)
    inner = model.blocks[0].qkv
    for part in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert "_apply" in vars(part)
        with pytest.raises(TypeError, match="belongs to a flat buffer"):
            part.double()
        assert part.float() is part
    assert inner.weight.dtype == torch.float32
    assert model.double().blocks[0].qkv.weight.dtype == torch.float64


class Metric(nn.Module):
    """Converts its state itself, as torchmetrics does: ``_apply`` has other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def _apply(self, fn: Any, exclude: str = "") -> Any:
        super()._apply(fn)
        if "total" not in exclude:
            self.total = fn(self.total)
        return self


@on_ranks(1)
def test_modules_that_convert_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Metric())
    fe.shard(model)
    model.double()
    assert model[1].total.dtype == torch.float64
    model[1]._apply(lambda tensor: tensor.float(), "total")
    assert model[1].total.dtype == torch.float64
    assert model[1].float().total.dtype == torch.float32


# Longest time until an error. With `early_checks`, a rendezvous asks missing ranks after 0.3 s
# which operation they wait in. Their threads answer within half a second.
MOST_SECONDS = 30.0


@contextmanager
def early_checks() -> Iterator[None]:
    usual, rendezvous.FIRST_CHECK_SECONDS = rendezvous.FIRST_CHECK_SECONDS, 0.3
    try:
        yield
    finally:
        rendezvous.FIRST_CHECK_SECONDS = usual


def made(level: str) -> Any:
    torch.manual_seed(0)
    model = Chain(Mlp(), Mlp())
    if level != "fully_shard":
        fe.shard(model, strategy=level)
        return model
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def step(model: nn.Module, optimizer: Any) -> None:
    x, y = vector_batch(4, 0)
    update(model(x.to(next(model.parameters()).dtype), y), optimizer)


# Level, number of steps before, dtypes that ranks convert the model to, number of ranks.
BEFORE, BETWEEN = (0, {1: "float64"}, 2), (2, {0: "bfloat16"}, 2)
WAYS: list[Any] = [
    *((level, *(BETWEEN if number % 2 else BEFORE)) for number, level in enumerate(LEVELS)),
    ("fully_shard", *BEFORE),
    ("fully_shard", *BETWEEN),
    ("optim_grads_params", 1, {0: "float64", 1: "bfloat16"}, 2),
    ("optim_grads_params", 1, {2: "float64"}, 4),
]


@pytest.mark.parametrize(("level", "num_before", "dtypes", "world_size"), WAYS)
def test_a_conversion_that_other_ranks_do_not_make_is_an_error_on_all(
    ranks: Ranks, level: str, num_before: int, dtypes: dict[int, str], world_size: int
) -> None:
    for rank, text in enumerate(
        ranks.run(error_of, level, num_before, dtypes, world_size=world_size)
    ):
        assert text.startswith("ValueError: "), (rank, text)
        for dtype in dtypes.values():
            assert f"torch.{dtype}, before torch.float32" in text, (rank, text)
        assert "all ranks must run, or none" in text
        assert "weight" in text
        assert any(f"on rank {converted} [" in text for converted in dtypes), (rank, text)


def error_of(level: str, num_before: int, dtypes: dict[int, str]) -> str:
    """Ranks in ``dtypes`` convert the model after ``num_before`` steps; others do not."""
    model = made(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_before):
        step(model, optimizer)
    began = time.monotonic()
    error: Exception | None = None
    before = [held(param).clone() for param in model.parameters()]
    try:
        with early_checks():
            if dist.get_rank() in dtypes:
                model.to(getattr(torch, dtypes[dist.get_rank()]))
            step(model, optimizer)
    except (RuntimeError, ValueError) as caught:
        error = caught
    assert time.monotonic() - began < MOST_SECONDS
    if dist.get_rank() in dtypes:  # the conversion has changed nothing
        for param, value in zip(model.parameters(), before, strict=True):
            assert param.dtype == torch.float32
            assert torch.equal(held(param), value)
    return f"{type(error).__name__}: {error}"


@on_ranks(2)
def test_a_conversion_of_all_ranks_costs_one_rendezvous() -> None:
    found: list[str] = []
    usual = rendezvous._Place.wait_for_all

    def counted(self: Any, *args: Any) -> Any:
        found.append(self._what)
        return usual(self, *args)

    for level in LEVELS:
        model = made(level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous._Place, "wait_for_all", counted)
            found.clear()
            model.double()
            if dist.get_rank() == 1:
                time.sleep(0.2)  # a rank that is late is waited for
            step(model, optimizer)
            step(model, optimizer)
            assert len(found) == 1, found
            if dist.get_rank() == 1:
                model.double()  # parameters are float64 already
            step(model, optimizer)
            assert len(found) == 1, found


@on_ranks(2)
@pytest.mark.parametrize("what", ["norm", "read"])
def test_the_others_may_wait_in_the_norm_or_in_a_read(what: str) -> None:
    model = made("optim_grads_params")
    model(*vector_batch(4, 0)).backward()
    read = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    if what == "read":
        read = model.blocks[0].up.weight.full_tensor
    if dist.get_rank() == 1:
        read = model.double
    with early_checks(), pytest.raises(ValueError, match=r"torch\.float64, before torch\.float32"):
        read()
    dist.barrier()


@on_ranks(2)
def test_two_models_of_one_shape_are_told_apart() -> None:
    first, second = made("optim"), made("optim")
    with pytest.raises(ValueError, match="expected the same on all ranks"):
        (first if dist.get_rank() == 0 else second).double()
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_is_slow_is_not_taken_for_one_that_does_not_convert() -> None:
    model, other = made("optim_grads_params"), made("optim_grads_params")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with early_checks():
        if dist.get_rank() == 0:
            time.sleep(1.5)
        model.double()
        step(model, optimizer)
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert {param.dtype for param in model.parameters()} == {torch.float64}
