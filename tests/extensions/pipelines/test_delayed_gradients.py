"""Weight gradients that modules compute after backward: reductions wait for them, no more and no
less, and the results are those of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.messages import Messages
from tests.models import (
    DIM,
    LateModel,
    late_modules,
    vector_batch,
)
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of, report


def prompt_copy(model: nn.Module) -> nn.Module:
    """The same model, which computes weight gradients in backward."""
    alone = copy.deepcopy(model)
    for module in late_modules(alone):
        linear = nn.Linear(DIM, DIM)
        linear.weight, linear.bias = module.weight, module.bias
        module.forward = linear.forward  # type: ignore[method-assign]
    return alone


def compare(inner: str, outer: str) -> list[str]:
    """Differences from one process, as text, over overlap and the order of late gradients."""
    found = []
    for overlap, backwards, bucket_size in itertools.product(
        (False, True), (False, True), (None, 300)
    ):
        torch.manual_seed(1)
        model = LateModel()
        alone = prompt_copy(model)
        data = reference.make_data(vector_batch, 3, 2, 4)
        expected = reference.train(alone, data)
        config = config_of(
            inner, outer, overlap=overlap, delay_wgrad_compute=True, bucket_size=bucket_size
        )
        ddp = fe.DistributedDataParallel(model, config, mesh_of(2, 2))
        optimizer = reference.sgd(ddp.parameters())
        steps = []
        for microbatches in data:
            ddp.zero_grad_buffer()
            loss = torch.zeros(())
            for index, parts in enumerate(microbatches):
                with ddp.no_sync() if overlap and index == 0 else torch.enable_grad():
                    part = ddp(*parts[dist.get_rank()]) / len(microbatches)
                    part.backward()
                loss = loss + part.detach()
                order = late_modules(model)
                for module in reversed(order) if backwards else order:
                    module.backward_dw()
            ddp.finish_grad_sync()
            gradients = reference.full_gradients(model)
            norm = ddp.engine.clip_grad_norm_(float("inf"))
            optimizer.step()
            weights = ddp.engine.full_state_dict()
            steps.append(
                reference.Step(
                    reference.mean_over_ranks(loss),
                    gradients,
                    norm.item(),
                    {name: weights[name] for name in gradients},
                )
            )
        case = f"overlap={overlap}, backwards={backwards}, bucket_size={bucket_size}"
        found += [f"{case}: {line}" for line in reference.differences(steps, expected, 2e-5)]
    return found


PAIRS = [(level, "no_shard") for level in LEVEL_NAMES] + [("optim_grads_params", "optim")]


@pytest.mark.thorough
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_weight_gradients_that_come_late_train_as_one_process(
    ranks: Ranks, inner: str, outer: str
) -> None:
    results = ranks.run(compare, inner, outer)
    assert not any(results), report(results)


def reduced(messages: Messages) -> set[str]:
    """Labels of units whose reductions were submitted."""
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
    assert reduced(messages) == set()  # the last block comes first in the order, and is late
    late = late_modules(model)
    for place in (3, 2):
        with messages.counting():
            late[place].backward_dw()
        assert reduced(messages) == {f"blocks.{i}" for i in range(place - 1, 3)}
    names = r"blocks\.0\.late\.weight.*first\.weight"
    with pytest.raises(RuntimeError, match=rf"finish_grad_sync.*backward_dw.*{names}"):
        ddp.finish_grad_sync()
    with pytest.raises(RuntimeError, match=rf"{names}.*put off"):
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
        gradients = reference.full_gradients(model)
        for name, param in alone.named_parameters():
            found = gradients[name]
            assert found is not None
            assert param.grad is not None
            assert reference.relative_error(found, param.grad) < 2e-5, name


@on_ranks(2)
def test_modules_that_put_off_gradients_are_refused_without_the_field() -> None:
    with pytest.raises(ValueError, match=r"first\.weight: expected delay_wgrad_compute=True"):
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
