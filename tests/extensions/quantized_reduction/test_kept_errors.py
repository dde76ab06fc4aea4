"""Errors of quantized reductions are kept, also in checkpoints. Only their rounding is lost."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.extensions.quantized_reduction.block_codes import LARGEST
from tests import reference
from tests.models import Dot
from tests.pairs import FEW_PAIRS, PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

SIZES = (33, 640, 1000)


class Factors(nn.Module):
    """The gradient of each weight is its input, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Dot, SIZES))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return sum((part(x) for part, x in zip(self.parts, inputs, strict=True)), torch.zeros(()))


def inputs_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def mean_inputs() -> Tensor:
    size = dist.get_world_size()
    return torch.stack([torch.cat(inputs_of(rank)) for rank in range(size)]).mean(0)


class Job:
    """A sharded model, with its gradients and errors concatenated over all parameters."""

    def __init__(self, sizes: tuple[int, int], pair: tuple[str, str], **given: Any) -> None:
        options = given.pop("options", fe.Options(min_unit_size=0))
        extra = given.pop("extensions", [])
        reduction = fe.QuantizedReduction(**{"axis": "both", "block": 32, **given})
        self.model = Factors()
        self.engine = fe.shard(
            self.model,
            mesh_of(*sizes),
            *pair,
            options=options,
            extensions=[reduction, *extra],
        )
        self.errors = reduction.errors(self.engine)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradient(self) -> Tensor:
        """Returns the gradient of a step of two microbatches."""
        # Part of the errors is lost if the next values are much smaller ([Note: Bounded errors]).
        # So each reduction sends at least 0.4 of the gradient. At no_shard the second reduction
        # sends the sum of both.
        for share in (0.6, 0.4):
            (share * self.model(inputs_of(dist.get_rank()))).backward()
        found = torch.cat([reference.full(p.grad) for p in self.model.parameters()])
        self.model.zero_grad()
        return found

    def lost(self) -> Tensor:
        return torch.cat([reference.full(each) for each in self.errors.state_dict().values()])


def assert_conserved(job: Job, steps: int, before: Tensor | float = 0.0) -> None:
    """Check that received gradients and errors add up to the gradients of ``steps`` steps."""
    gradient = mean_inputs()
    received = sum((job.gradient() for _ in range(steps)), torch.zeros(()))
    lost = job.lost()
    assert lost.abs().max() > 1e-3
    # Each encoding rounds errors to 1/254 of a scale, which is at most 1/7 of the largest element.
    torch.testing.assert_close(
        received + lost, steps * gradient + before, rtol=0, atol=8e-3 * steps
    )


# All pairs, axes and ways to average in ``make test-all``.
CASES = [
    pytest.param(
        pair,
        axis,
        average,
        marks=() if pair in FEW_PAIRS and average == (axis == "inner") else pytest.mark.thorough,
    )
    for pair in PAIRS
    for axis in ("inner", "outer", "both")
    for average in (False, True)
]


@pytest.mark.parametrize(("pair", "axis", "average"), CASES)
@on_ranks(4)
def test_what_is_received_and_what_is_kept_are_the_gradients(
    pair: tuple[str, str], axis: str, average: bool
) -> None:
    options = fe.Options(min_unit_size=0, average_in_collective=average)
    job = Job((2, 2), pair, bits=4, axis=axis, options=options)
    assert_conserved(job, 3)
    # Loaded errors are added once.
    before = job.lost()
    job.errors.load_state_dict(job.errors.state_dict())
    torch.testing.assert_close(job.lost(), before, rtol=0, atol=1e-6)
    assert_conserved(job, 3, before)


def saved(folder: str, sizes: tuple[int, int], pair: tuple[str, str]) -> Tensor:
    job = Job(sizes, pair, bits=4)
    assert_conserved(job, 3)
    fe.Checkpointer(folder, job.engine, job.optimizer, extra={"errors": job.errors}).save(1)
    return job.lost()


def resumed(folder: str, sizes: tuple[int, int], pair: tuple[str, str], bits: int) -> Tensor:
    job = Job(sizes, pair, bits=bits)
    fe.Checkpointer(folder, job.engine, job.optimizer, extra={"errors": job.errors}).load()
    loaded = job.lost()
    assert_conserved(job, 2, loaded)
    return loaded


@pytest.mark.parametrize("pair", [FEW_PAIRS[0], FEW_PAIRS[-1]])
def test_a_checkpoint_has_the_errors_for_other_ranks_levels_and_bits(
    ranks: Ranks, pair: tuple[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks.run(saved, folder, (2, 2), pair, world_size=4)[0]
        found = ranks.run(
            resumed, folder, (1, 3), ("optim_grads_params", "no_shard"), 4, world_size=3
        )[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        found = ranks.run(resumed, folder, (2, 1), ("no_shard", "no_shard"), 4, world_size=2)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@on_ranks(2)
def test_without_the_errors_training_goes_on_from_a_checkpoint_that_has_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        job = Job((1, 2), ("optim", "no_shard"), bits=4)
        job.gradient()
        fe.Checkpointer(shared[0], job.engine, job.optimizer, extra={"errors": job.errors}).save(1)
        fe.Checkpointer(shared[0], job.engine, job.optimizer).load()
        dist.barrier()


@on_ranks(2)
def test_errors_of_other_parameters_begin_at_zero_and_other_shapes_are_refused() -> None:
    job = Job((1, 2), ("optim_grads", "no_shard"), bits=4)
    job.gradient()
    state = job.errors.state_dict()
    name, *names = state
    with pytest.raises(ValueError, match=rf"expected {name} with shape \(33,\); found \(640,\)"):
        job.errors.load_state_dict({**state, name: state[names[0]]})
    given = {key: state[key] for key in names} | {"other": state[name]}
    with pytest.warns(UserWarning, match=f"of 3 parameters; found errors of 3: other, {name} are"):
        job.errors.load_state_dict(given)
    found = job.errors.state_dict()
    assert not reference.full(found[name]).any()
    for key in names:
        torch.testing.assert_close(reference.full(found[key]), reference.full(state[key]))


@on_ranks(2)
def test_errors_within_a_backward_are_refused() -> None:
    job = Job((1, 2), ("optim_grads", "no_shard"))
    state = job.errors.state_dict()
    inputs = [each.requires_grad_() for each in inputs_of(0)]
    refused = 0

    def refuse(gradient: Tensor) -> None:
        nonlocal refused
        for call in (job.errors.state_dict, lambda: job.errors.load_state_dict(state)):
            with pytest.raises(RuntimeError, match="expected no forward or backward in progress"):
                call()
            refused += 1

    inputs[0].register_hook(refuse)
    job.model(inputs).backward()
    assert refused == 2


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(2)
def test_errors_of_a_gradient_that_is_dropped_are_bounded_by_the_next_one(bits: int) -> None:
    """A step of gradients that are 1,000 times as large, one element of them Inf."""
    job = Job((1, 2), ("optim_grads_params", "no_shard"), bits=bits)
    large = [1000 * each for each in inputs_of(dist.get_rank())]
    large[1][7] = float("inf")
    job.model(large).backward()
    job.model.zero_grad()
    gradient = mean_inputs()
    error = (job.gradient() - gradient).abs().max() / gradient.abs().max()
    # One summand is exact. The other has an old error of up to 1 scale, and a new one of up to 0.5.
    assert error < 1.5 / LARGEST[bits]


@on_ranks(2)
def test_parameters_without_a_gradient_keep_their_errors() -> None:
    job = Job((1, 2), ("optim_grads", "no_shard"), bits=4)
    inputs = inputs_of(dist.get_rank())
    received = torch.zeros(SIZES[-1])
    for number in range(8):
        part = job.model.parts[number % 2]
        part(inputs[number % 2]).backward() if number % 2 else job.model(inputs).backward()
        norm = job.engine.clip_grad_norm_(float("inf"))
        every = [p.grad for p in job.model.parameters() if p.grad is not None]
        expected = torch.cat([reference.full(grad) for grad in every]).norm()
        torch.testing.assert_close(torch.as_tensor(norm), expected)
        if number % 2 == 0:
            received += reference.full(job.model.parts[2].weight.grad)
        job.model.zero_grad()
    expected = mean_inputs()[-SIZES[-1] :]
    lost = reference.full(job.errors.state_dict()["parts.2.weight"])
    torch.testing.assert_close(received + lost, 4 * expected, rtol=0, atol=2e-2)
    assert lost.abs().max() > 1e-3


@on_ranks(2)
def test_errors_of_gradients_in_fp16_are_refused() -> None:
    policy = fe.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    reduction = fe.QuantizedReduction(axis="inner")
    engine = fe.shard(Factors(), mp_policy=policy, extensions=[reduction])
    with pytest.raises(ValueError, match=r"parts\.0\.weight: expected gradients that are sent in"):
        reduction.errors(engine)


@on_ranks(2)
def test_memory_of_errors_is_reported_where_gradients_are_stored() -> None:
    sent = 2 * sum(-(-size // 64) * 64 for size in SIZES) // 2
    for gradients, place in (("device", "device"), ("disk", "host")):
        with tempfile.TemporaryDirectory() as folder:
            offload = fe.Offload("disk", folder, main_weights=gradients, gradients=gradients)
            job = Job((1, 2), ("optim_grads", "no_shard"), bits=4, extensions=[offload])
            assert_conserved(job, 2)
            found = job.engine.memory_bytes(place)["reduction errors"]
            assert sent / 2 <= found <= sent
            other = {"host": "device", "device": "host"}[place]
            assert "reduction errors" not in job.engine.memory_bytes(other)


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(4)
def test_experts_have_errors_of_their_own(level: str) -> None:
    def job(extensions: list[Any]) -> tuple[Any, nn.Module]:
        model = Factors()
        model.parts[1].weight.allreduce = False  # type: ignore[union-attr, assignment]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
        engine = fe.shard(model, strategy=level, expert_mesh=mesh["copies"], extensions=extensions)
        return engine, model

    def gradient(model: nn.Module) -> Tensor:
        model(inputs_of(dist.get_rank())).backward()
        found = torch.cat([reference.full(p.grad) for p in model.parameters()])
        model.zero_grad()
        return found

    expected = gradient(job([])[1])
    reduction = fe.QuantizedReduction(4, axis="inner", block=32)
    engine, model = job([reduction])
    received = sum((gradient(model) for _ in range(3)), torch.zeros(()))
    state = reduction.errors(engine).state_dict()
    lost = torch.cat([reference.full(each) for each in state.values()])
    assert min(reference.full(each).abs().max() for each in state.values()) > 1e-3
    torch.testing.assert_close(received + lost, 3 * expected, rtol=0, atol=1e-2)


@on_ranks(2)
def test_a_gradient_scaler_skips_a_step_with_inf_and_goes_on() -> None:
    def weights(extensions: list[Any]) -> list[Tensor]:
        model = Factors()
        fe.shard(model, extensions=extensions)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = []
        for number in range(3):
            factor = float("inf") if number == 1 and dist.get_rank() == 1 else 1.0
            scaler.scale(model(inputs_of(dist.get_rank())) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(torch.cat([reference.full(p) for p in model.parameters()]))
            assert scaler.get_scale() == (1024.0 if number == 0 else 512.0)
        return found

    found = weights([fe.QuantizedReduction(axis="inner", block=32)])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], weights([])[2], rtol=0, atol=5e-3)
