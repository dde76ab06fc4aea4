"""Weight gradients that modules compute after backward: only their reductions wait for them, and
the results are those of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.messages import Messages
from tests.models import DIM, LateModel, Small, late_modules, vector_batch
from tests.pool import on_ranks
from tests.training import mesh_of


def prompt_copy(model: nn.Module) -> nn.Module:
    """The same model, which computes weight gradients in backward."""
    alone = copy.deepcopy(model)
    for module in late_modules(alone):
        linear = nn.Linear(DIM, DIM)
        linear.weight, linear.bias = module.weight, module.bias
        module.forward = linear.forward  # type: ignore[method-assign]
    return alone


PAIRS = [(level, "no_shard") for level in LEVEL_NAMES] + [("optim_grads_params", "optim")]


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS)
@on_ranks(4)
def test_weight_gradients_that_come_late_train_as_one_process(pair: tuple[str, str]) -> None:
    for overlap, backwards, bucket_size in itertools.product(
        (False, True), (False, True), (None, 300)
    ):
        torch.manual_seed(1)
        model = LateModel()
        data = reference.make_data(vector_batch, 3, 2, 4)
        expected = reference.train(prompt_copy(model), data)
        config = config_of(
            *pair, overlap=overlap, delay_wgrad_compute=True, bucket_size=bucket_size
        )
        ddp = fe.DistributedDataParallel(model, config, mesh_of(2, 2))
        order = late_modules(model)[:: -1 if backwards else 1]
        steps = train_wrapped(
            ddp, data, after_backward=lambda order=order: [each.backward_dw() for each in order]
        )
        lines = reference.differences(steps, expected, 2e-5)
        assert not lines, (overlap, backwards, bucket_size, lines[:8])


def reduced(messages: Messages) -> set[str]:
    return {
        label.split(" of ")[1].split(" over ")[0]
        for label in messages.operations
        if label.startswith(("reduce-scatter", "all-reduce"))
    }


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_delay_wgrad_compute_holds_back_the_reductions_of_what_is_late(level: str) -> None:
    model = LateModel()
    config = config_of(level, overlap=True, delay_wgrad_compute=True, bucket_size=1)
    ddp = fe.DistributedDataParallel(model, config, units="blocks.*")
    batch = vector_batch(2, dist.get_rank())
    messages = Messages()
    with messages.counting():
        ddp(*batch).backward()
    assert reduced(messages) == set()  # the last block, which is reduced first, is late
    late = late_modules(model)
    for place in (3, 2):
        with messages.counting():
            late[place].backward_dw()
        assert reduced(messages) == {f"blocks.{i}" for i in range(place - 1, 3)}
    names = r"blocks\.0\.late\.weight.*first\.weight"
    with pytest.raises(RuntimeError, match=rf"finish_grad_sync.*{names}.*backward_dw"):
        ddp.finish_grad_sync()
    with pytest.raises(RuntimeError, match=rf"{names}.*postponed"):
        ddp(*batch).backward()
    ddp.engine.reset()
    assert [module.weight.grad for module in late] == [None] * 4


@on_ranks(2)
def test_a_sharded_model_has_its_gradients_when_the_last_late_one_has_come() -> None:
    config = fe.DistributedDataParallelConfig(delay_wgrad_compute=True)
    batches = [vector_batch(2, rank) for rank in range(2)]
    for level in LEVEL_NAMES:
        model = LateModel()
        alone = prompt_copy(model)
        fe.shard(model, strategy=level, config=config)
        model(*batches[dist.get_rank()]).backward()
        alone(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
        for module in late_modules(model):
            assert all(param.grad is None for param in model.parameters())
            module.backward_dw()
        gradients, expected = map(reference.full_gradients, (model, alone))
        torch.testing.assert_close(gradients, expected, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_modules_that_put_off_gradients_are_refused_without_the_field() -> None:
    with pytest.raises(
        ValueError, match=r"first\.weight: expected an engine that awaits.*fe\.LateGradients"
    ):
        fe.DistributedDataParallel(LateModel())


@on_ranks(2)
def test_a_module_that_autograd_did_not_reach_is_not_waited_for() -> None:
    class Skipping(LateModel):
        def predict(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.first(x))

    model = Skipping()
    config = config_of("optim", overlap=True, delay_wgrad_compute=True)
    ddp = fe.DistributedDataParallel(model, config, units="blocks.*")
    ddp(*vector_batch(2, dist.get_rank())).backward()
    for module in late_modules(model):
        module.backward_dw()
    ddp.finish_grad_sync()
    has = {name: param.grad is not None for name, param in model.named_parameters()}
    assert {name for name, there in has.items() if not there} == {
        name for name in has if name.startswith(("blocks.1", "blocks.2"))
    }


def train_step(ddp: fe.DistributedDataParallel, batches: list[reference.Batch]) -> None:
    """1F1B with one forward ahead: F0 F1 B0 F2 B1 F3 B2 B3."""
    loss = ddp(*batches[0])
    for batch in batches[1:]:
        ahead = ddp(*batch)
        with ddp.no_sync():
            loss.backward()
        loss = ahead
    loss.backward()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_gradients_of_recomputed_forwards_come_in_time(level: str, evaluates: bool) -> None:
    model = Small(6, checkpoints=True)
    alone = copy.deepcopy(model)
    config = config_of(level, overlap=True, bucket_size=3 * DIM * DIM)
    ddp = fe.DistributedDataParallel(model, config, units=())
    for step, microbatches in enumerate(reference.make_data(vector_batch, 3, 4, 2)):
        if evaluates and step == 1:
            with torch.no_grad():
                ddp(*microbatches[0][0])
        ddp.zero_grad_buffer()
        alone.zero_grad()
        train_step(ddp, [batches[dist.get_rank()] for batches in microbatches])
        ddp.finish_grad_sync()
        for batch in itertools.chain(*microbatches):
            (alone(*batch) / 2).backward()
        torch.testing.assert_close(*map(reference.full_gradients, (model, alone)))
