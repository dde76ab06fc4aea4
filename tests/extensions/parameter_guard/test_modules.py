"""Tensors and modules that users put into a sharded model are copied, or refused by name."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import fsdp_engine as fe
from tests import reference
from tests.checkpoint.scene import update
from tests.models import LstmLanguage
from tests.promises.everywhere import Place, everywhere


class Model(LstmLanguage):
    """A language model with other methods than forward."""

    def logits(self, tokens: Tensor) -> Tensor:
        return self(tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding.weight)


def assert_as_alone(model: nn.Module, engine: fe.Engine, alone: nn.Module) -> None:
    """A step of training and full state dicts equal those of one process."""
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for each in (model, alone):
        loss = each(tokens).square().mean()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        update(loss, optimizer)
    reference.assert_same_weights(model, alone)
    state = engine.full_state_dict()
    assert list(state) == list(alone.state_dict())
    torch.testing.assert_close(state, dict(alone.state_dict()))


@everywhere
def test_values_that_are_assigned_to_parameters_are_taken(place: Place) -> None:
    model, values = Model(), Model().state_dict()
    alone = copy.deepcopy(model)
    engine = place.shard(model)
    params = list(model.parameters())
    # A dictionary of tensors, a parameter, one in an LSTM, and a dictionary that the engine made.
    own = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (model, alone):
        each.load_state_dict(values, assign=True)
        each.blocks[0].weight = nn.Parameter(torch.eye(4))
        each.lstm.weight_hh_l0 = nn.Parameter(torch.ones(16, 4))
        each.embedding._parameters["weight"] = nn.Parameter(torch.ones(7, 4))  # past all hooks
    assert_as_alone(model, engine, alone)
    assert all(map(operator.is_, model.parameters(), params))
    model.load_state_dict(own, assign=True)
    alone.load_state_dict({name: reference.full(value) for name, value in own.items()}, assign=True)
    assert_as_alone(model, engine, alone)
    for each in (model, alone):
        each.load_state_dict(values)
    with engine.unsharded(), torch.no_grad():
        model.head.weight = nn.Parameter(torch.ones(7, 4))
        model.head.weight.mul_(2)
    with torch.no_grad():
        alone.head.weight.fill_(2)
    assert_as_alone(model, engine, alone)


def adapt(model: Model) -> None:
    adapter = nn.Module()
    adapter.base_layer = model.head
    adapter.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
    model.head = adapter


def add_to_new_list(model: Model) -> None:
    model.more = nn.ModuleList()
    model.more.append(nn.Linear(2, 2))


def embeds(*shape: int, **options: Any) -> Callable[[Model], None]:
    return lambda m: setattr(m.embedding, "weight", nn.Parameter(torch.zeros(*shape, **options)))


def tie(model: Model) -> None:
    model.head.weight = model.embedding.weight


CHANGES: dict[Callable[[Model], object], str] = {
    tie: r"head\.weight: expected.*embedding\.weight.*before shard",
    lambda m: setattr(m.head, "weight", nn.Parameter(m.embedding.weight.data)): (
        r"head\.weight: expected.*(memory of another|another slice)"
    ),
    lambda m: setattr(m.head, "bias", nn.Parameter(torch.zeros(7))): (
        r"head\.bias: expected.*before shard"
    ),
    lambda m: setattr(m, "new", nn.Sequential(nn.ReLU(), nn.Linear(2, 2))): (
        r"new\.1\.weight: expected.*before shard"
    ),
    lambda m: m.blocks.append(nn.Linear(2, 2)): r"blocks\.2\.weight: expected.*before shard",
    add_to_new_list: r"0\.weight: expected.*before shard",
    lambda m: setattr(m, "head", nn.Linear(4, 9)): r"head\.weight: expected.*before shard",
    adapt: r"head\.lora_A\.default\.weight: expected.*before shard",
    embeds(9, 4): r"embedding\.weight: expected.*\(9, 4\)",
    embeds(7, 4, dtype=torch.float64): r"embedding\.weight: expected.*float64",
    embeds(7, 4, device="meta"): r"embedding\.weight: expected.*meta",
    lambda m: setattr(
        m.embedding, "weight", nn.Parameter(torch.full((7, 4), 2**24 + 1), requires_grad=False)
    ): r"embedding\.weight: expected.*int64",
}


@everywhere
def test_whatever_else_is_put_into_a_module_is_refused_at_once(place: Place) -> None:
    model = Model()
    engine = place.shard(model)
    for change, message in CHANGES.items():
        with pytest.raises(ValueError, match=f"(?s){message}"):
            change(model)
    model.dropout = nn.Dropout()  # nothing of it is trained
    before = engine.full_tensor("embedding.weight")
    del model.blocks[0].weight
    with pytest.raises(ValueError, match=r"blocks\.0\.weight: expected.*found none"):
        model(torch.tensor([[1]]))
    assert torch.equal(before, engine.full_tensor("embedding.weight"))


@everywhere
def test_what_went_past_the_hooks_of_modules_is_refused_by_forward_and_saves(place: Place) -> None:
    model = Model()
    engine = place.shard(model)
    folder, own = Path("unused"), model.head.weight
    model.head._parameters["weight"] = model.embedding.weight
    saves: list[Callable[[], object]] = [
        engine.full_state_dict,
        lambda: fe.save_checkpoint(folder, engine),
        lambda: fe.export_safetensors(engine, folder),
        lambda: model(torch.tensor([[1]])),
    ]
    for save in saves:
        with pytest.raises(ValueError, match=r"head\.weight: expected.*embedding\.weight"):
            save()
    model.head._modules["new"] = nn.Linear(1, 1)
    model.head._parameters["weight"] = own
    for save in saves[:-1]:
        with pytest.raises(ValueError, match=r"head\.new\.weight: expected.*before shard"):
            save()
    assert not folder.exists()


@everywhere
def test_an_assignment_to_one_of_two_tied_names_is_refused(place: Place) -> None:
    model = Model()
    tie(model)
    place.shard(model)
    model.head.weight = model.embedding.weight  # nothing changes
    with pytest.raises(ValueError, match=r"embedding\.weight: expected.*tied \(head\.weight\)"):
        model.embedding.weight = nn.Parameter(torch.ones(7, 4))


@everywhere
def test_an_optimizer_of_an_assigned_tensor_is_refused(place: Place) -> None:
    model = Model()
    place.shard(model)
    assigned = nn.Parameter(torch.ones(7, 4))
    model.head.weight = assigned
    model(torch.tensor([[1]])).sum().backward()
    with pytest.raises(RuntimeError, match=r"head\.weight: expected an optimizer of the model's"):
        torch.optim.SGD([assigned], lr=0.1).step()
    del assigned
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@everywhere
def test_a_sharded_model_is_not_copied_or_pickled(place: Place) -> None:
    model = Model()
    place.shard(model)
    copies: dict[str, Callable[[], object]] = {
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy:": lambda: torch.optim.swa_utils.AveragedModel(model),
        "pickle": lambda: pickle.dumps(model),
        "copy": lambda: copy.copy(model),
        "pickle:": lambda: torch.save(model, io.BytesIO()),
    }
    for name, make in copies.items():
        with pytest.raises(RuntimeError, match=f"{name}.*expected a model that is not sharded"):
            make()
    torch.save(model.state_dict(), io.BytesIO())


class Scaled(Tensor):
    """A tensor with a scale beside its elements."""


@everywhere
def test_parameters_of_other_classes_are_refused_by_name(place: Place) -> None:
    model = Model()
    model.head.weight = nn.Parameter(torch.ones(7, 4).as_subclass(Scaled))
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=r"head\.weight: expected a plain.*a Scaled"):
            place.shard(model.to(device))


@everywhere
def test_a_dtensor_is_taken_if_each_rank_holds_all_of_it_else_refused(place: Place) -> None:
    model = Model()
    engine = place.shard(model)
    mesh = engine.mesh.device_mesh
    values = torch.arange(28.0).view(7, 4)
    replicated = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim)
    model.head.weight = nn.Parameter(replicated)
    assert torch.equal(engine.full_tensor("head.weight"), values)
    cut = distribute_tensor(values, mesh, [Shard(0)] * mesh.ndim)
    with pytest.raises(ValueError, match=r"head\.weight: expected.*a DTensor.*full_tensor"):
        model.head.weight = nn.Parameter(cut)
    assert torch.equal(engine.full_tensor("head.weight"), values)


@everywhere
def test_a_method_that_does_not_gather_names_the_parameter_and_the_remedy(place: Place) -> None:
    model = Model()
    engine = place.shard(model)
    tokens = torch.tensor([[1, 2]])
    model.logits(tokens)  # through forward
    if isinstance(model.embedding.weight, fe.FlatDTensor):
        message = r"(?s)^embedding: .*found embedding\.weight.*register_forward_method.*unsharded"
        with pytest.raises(ValueError, match=message):
            model.embed(tokens)
        with pytest.raises(ValueError, match=r"numpy: .*embedding\.weight.*to_local"):
            model.embedding.weight.numpy()
    expected = engine.full_tensor("embedding.weight")[tokens]
    fe.register_forward_method(model, "embed")
    torch.testing.assert_close(model.embed(tokens), expected)


@everywhere
def test_it_is_sharded_within_inference_mode(place: Place) -> None:
    model = Model()
    alone = copy.deepcopy(model)
    with torch.inference_mode():
        engine = place.shard(model)
        model(torch.tensor([[1, 2]]))
    assert_as_alone(model, engine, alone)


@everywhere
def test_ddp_around_it_is_refused_or_right(place: Place) -> None:
    model = Model()
    alone = copy.deepcopy(model)
    engine = place.shard(model)
    if all(buffer.is_plain for buffer in engine.buffers):
        tokens = torch.tensor([[1, 2, 3]])
        nn.parallel.DistributedDataParallel(model)(tokens).square().mean().backward()
        alone(tokens).square().mean().backward()
        torch.testing.assert_close(*map(reference.full_gradients, (model, alone)))
        return
    text = "DistributedDataParallel: expected a model that is not"
    with pytest.raises(RuntimeError, match=text):
        nn.parallel.DistributedDataParallel(model)
    assert_as_alone(model, engine, alone)
