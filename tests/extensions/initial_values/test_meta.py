"""Models on the meta device: what modules give their children, and parametrised tensors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fsdp_engine as fe
from fsdp_engine.units import build
from tests import reference
from tests.models import Transformer, token_batch
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS, Place, everywhere


class Positions(nn.Module):
    """Gives its child other values than that would give itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.weight[:, 0::2] = torch.arange(6.0)[:, None]
            self.table.weight[:, 1::2] = -1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.table.weight
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.blocks = nn.ModuleList([nn.Sequential(Positions(), nn.Linear(4, 4)) for _ in range(2)])
        self.conv = parametrizations.weight_norm(nn.Conv1d(6, 6, 3, padding=1), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.conv(x)
        return result


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


@everywhere
def test_children_and_normalised_weights_get_the_values_that_modules_give(place: Place) -> None:
    torch.manual_seed(0)
    alone, model = Model(), on_meta()
    engine = place.shard(model)
    state = engine.full_state_dict()
    for name, value in alone.state_dict().items():
        if name.endswith("table.weight"):
            assert torch.equal(state[name], value), name
    lengths, directions = (state[f"conv.parametrizations.weight.original{i}"] for i in range(2))
    torch.testing.assert_close(directions.norm(dim=(0, 1), keepdim=True), lengths)
    assert 0.1 < directions.abs().max() < 1 / (6 * 3) ** 0.5  # kaiming_uniform_(a=sqrt(5))
    alone.load_state_dict(state)
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(model(x), alone(x))


def states() -> list[Any]:
    found = []
    for level in LEVELS:
        torch.manual_seed(0)
        found.append(fe.shard(on_meta(), strategy=level).full_state_dict())
    return found


def test_values_are_the_same_whatever_the_number_of_ranks_and_the_level(ranks: Any) -> None:
    ((expected, *others),) = ranks.run(states, world_size=1)
    for world_size in (2, 4):
        others += [each for found in ranks.run(states, world_size=world_size) for each in found]
    for found in others:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class Late(nn.Module):
    """Forgets one of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(3)) for _ in range(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.first)


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def tripled() -> nn.Module:
    linear = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(linear, "weight", Tripled())
    return linear


@on_ranks(2)
def test_what_stays_without_values_is_an_error_on_all_ranks() -> None:
    for make, message in (
        (lambda: nn.utils.weight_norm(nn.Linear(3, 3)), r"Linear\.weight_g: expected its reset_"),
        (Late, r"Late\.second: expected its reset_parameters\(\) to"),
        (tripled, r"Linear\.weight: expected a parametrisation that turns"),
    ):
        with torch.device("meta"):
            model = nn.Sequential(make())
        with pytest.raises(ValueError, match=message):
            fe.shard(model)


class FailsOnOneRank(nn.Linear):
    """Its file of values is not there on rank 1, say."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight.device.type != "meta" and dist.get_rank() == 1:
            raise FileNotFoundError("values.bin")


@everywhere
def test_a_module_that_fails_on_one_rank_is_an_error_on_all(place: Place) -> None:
    with torch.device("meta"):
        model = nn.Sequential(FailsOnOneRank(3, 3), nn.Linear(3, 3))
    if place.num_ranks == 1:
        place.shard(model)
        return
    kind = FileNotFoundError if dist.get_rank() == 1 else (FileNotFoundError, RuntimeError)
    with pytest.raises(kind, match=r"values\.bin") as caught:
        place.shard(model)
    if dist.get_rank() != 1:
        assert "failed on data-parallel rank 1: FileNotFoundError" in str(caught.value)
    again = place.shard(nn.Sequential(nn.Linear(3, 3)), initial_values="rank0")
    again.model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("device", ["meta", "cpu"])
@on_ranks(1)
def test_full_values_of_units_are_gone_when_the_next_unit_is_built(device: str) -> None:
    with torch.device(device):
        model = Transformer(4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    built: list[weakref.ref[Tensor]] = []
    build_unit = build.build_unit

    def watched(planned: Any, *args: Any) -> Any:
        assert not any(param() is not None for param in built)
        records = [record for part in planned.buffers for record in part.records]
        built.extend(weakref.ref(record.param) for record in records)
        return build_unit(planned, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_unit", watched)
        fe.shard(model, min_unit_size=0)
    assert len(built) > 8
    for name, param in model.named_parameters():
        assert device == "meta" or torch.equal(reference.full(param), expected[name])
    model(*token_batch(4, 0)).backward()


@on_ranks(1)
def test_a_module_with_parameters_of_two_units_has_the_values_of_one_process() -> None:
    """A bias beside a weight that another unit has is drawn with both units."""
    states = []
    for level in ("no_shard", "optim_grads_params"):
        torch.manual_seed(3)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            model[2].weight = model[0].weight
        engine = fe.shard(model, strategy=level, units="*", min_unit_size=0)
        model(torch.ones(2, 4)).sum().backward()
        states.append(engine.full_state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert all(value.any() for value in states[0].values())
