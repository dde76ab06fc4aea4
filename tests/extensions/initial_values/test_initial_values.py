"""All ranks start from the same values, or an error names the values that differ."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

import fsdp_engine as fe
from fsdp_engine.buffers import param_and_grad_buffer as pgb
from fsdp_engine.extensions.initial_values.comparison import checksum
from fsdp_engine.units import build
from tests import reference
from tests.models import Transformer, token_batch
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS, Place, everywhere


class WithStatistics(nn.Module):
    """Blocks with buffers of many kinds, saved and not, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2)
        )
        self.register_buffer("frequencies", torch.rand(7), persistent=False)
        self.register_buffer("mask", torch.rand(3, 3) > 0.5)
        self.register_buffer("wide", torch.rand(2, 1).expand(2, 3), persistent=False)
        self.register_buffer("narrow", torch.rand(3).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale[0] + self.narrow.float().sum()


def everything(model: nn.Module) -> dict[str, Tensor]:
    return reference.full_weights(model) | {n: b.clone() for n, b in model.named_buffers()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def without_reset() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    model.register_parameter("bare", nn.Parameter(torch.randn(3)))
    return model


@everywhere
def test_ranks_on_the_meta_device_get_the_values_of_the_first_rank(place: Place) -> None:
    for model, width in ((WithStatistics(), 5), (without_reset(), 3)):
        expected = everything(model)
        if dist.get_rank():
            model = copy.deepcopy(model).to("meta")
        place.shard(model)
        check_equal(everything(model), expected)
        model(torch.randn(4, width)).sum().backward()


class Rotated(nn.Module):
    """Has a table that other modules have, too, and a buffer of its own."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("own", torch.rand(3))

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0).expand(2, 4))
        self.own.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table[0] + self.own.sum()


class SharedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(4.0).expand(2, 4).clone()
        self.blocks = nn.ModuleList(Rotated(table) for _ in range(3))
        self.holder = nn.Module()
        self.holder.register_buffer("again", table)
        self.register_buffer("last", torch.rand(5))

    def reset_parameters(self) -> None:
        self.last.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.last.sum()


class Untouched(Rotated):
    def reset_parameters(self) -> None:
        self.own.fill_(2.0)


def all_buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


@everywhere
def test_a_buffer_of_several_modules_stays_one(place: Place) -> None:
    with torch.device("meta"):
        model = SharedTable()
    place.shard(model)
    assert model.holder.again is model.blocks[0].table
    assert len(set(map(id, all_buffers(model).values()))) == 5
    assert torch.equal(model.holder.again, torch.arange(4.0).expand(2, 4))
    assert torch.equal(model.last, torch.full((5,), 3.0))
    assert all(block.own.eq(2).all() for block in model.blocks)
    for how in ("built on meta", "moved to meta", "other values", "separate"):
        torch.manual_seed(0)
        model = SharedTable()
        expected = {name: buffer.clone() for name, buffer in all_buffers(model).items()}
        if dist.get_rank():
            torch.manual_seed(5)
            with torch.device("meta" if how == "built on meta" else "cpu"):
                model = SharedTable()
            if how == "moved to meta":
                model = model.to("meta")  # torch makes a tensor for each module
            for block in model.blocks if how == "separate" else ():
                block.table = block.table + 1
        options = {} if "meta" in how else {"initial_values": "rank0"}
        place.shard(model, **options)
        found = all_buffers(model)
        check_equal(found, expected)
        assert len(set(map(id, found.values()))) == 5
        assert model.holder.again is model.blocks[2].table
        model(torch.randn(4, 4)).sum().backward()


class PlainTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tables = {"cos": [torch.ones(4)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.tables["cos"][0]


class ResetTable(PlainTable):
    def reset_parameters(self) -> None:
        self.tables = {"cos": [torch.ones(4)]}


@everywhere
def test_ranks_that_built_other_values_raise_unless_rank_0_decides(place: Place) -> None:
    expected = everything(WithStatistics())
    if place.num_ranks > 1:
        for name in ("blocks.1.0.weight", "blocks.0.1.running_mean"):
            torch.manual_seed(0)
            model = WithStatistics()
            model.frequencies += dist.get_rank()  # not persistent, so not compared
            with torch.no_grad():
                model.state_dict()[name].flatten()[0] += dist.get_rank() == 1
            before = dict(model.named_parameters())
            message = f"{name}: expected the same.*ranks 0 and 1.*rank0"
            with pytest.raises(ValueError, match=message):
                place.shard(model)
            assert all(p is before[name] for name, p in model.named_parameters())
    torch.manual_seed(dist.get_rank())
    model = WithStatistics()
    place.shard(model, initial_values="rank0")
    check_equal(everything(model), expected)


def first_on_meta() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if not dist.get_rank():
        model[1].to("meta")
    return model


def nowhere() -> nn.Module:
    model = without_reset()
    model.bare = nn.Parameter(torch.empty(3, device="meta"))
    return model.to("meta") if dist.get_rank() else model


def more_buffers() -> nn.Module:
    model = SharedTable()
    if dist.get_rank():
        model.register_buffer("more", torch.ones(2))
    return model


class Late(nn.Module):
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


def untouched() -> nn.Module:
    table = torch.empty(2, 4)
    return nn.Sequential(*(Untouched(table) for _ in range(2)))


def weight_normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 3))


def on_meta(make: Callable[[], nn.Module], first: str = "meta") -> nn.Module:
    """Builds a model on the meta device, and on rank 0 on device ``first``."""
    with torch.device("meta" if dist.get_rank() else first):
        return nn.Sequential(make())


TABLES = r"0\.tables: expected tensors on the meta device to be parameters and buffers"
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (first_on_meta, {}, r"1.weight: expected values on data-parallel rank 0.*"),
    (nowhere, {}, r"the root module .*bare.*found none"),
    (more_buffers, {"initial_values": "rank0"}, "more: expected the same buffers on all ranks"),
    (SharedTable, {"initial_values": "rank1"}, "initial_values: expected one of .*found 'rank1'"),
    (partial(on_meta, untouched), {}, r"0\.table: expected one of its modules to give it"),
    (partial(on_meta, PlainTable), {}, TABLES),
    (partial(on_meta, PlainTable, "cpu"), {}, TABLES),
    (partial(on_meta, weight_normed), {}, r"Linear\.weight_g: expected its reset_"),
    (partial(on_meta, Late), {}, r"Late\.second: expected its reset_parameters\(\) to"),
    (
        partial(on_meta, tripled),
        {},
        r"Linear\.weight: expected a parametrization with right_inverse",
    ),
]


@on_ranks(2)
def test_what_has_no_values_or_cannot_be_made_alike_raises_on_all_ranks() -> None:
    for make, options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            fe.shard(make(), **options)
    fe.shard(on_meta(untouched), initial_values="empty")
    model = on_meta(ResetTable)
    fe.shard(model)
    model(torch.randn(2, 4)).sum().backward()


@on_ranks(2)
def test_the_wrapper_takes_values_from_rank_0_too() -> None:
    model = WithStatistics()
    expected = everything(model)
    if dist.get_rank():
        model.to("meta")
    ddp = fe.DistributedDataParallel(model)
    check_equal(everything(ddp.module), expected)


@on_ranks(2)
def test_values_travel_one_unit_at_a_time() -> None:
    model = Transformer(num_blocks=6, dim=32)
    if dist.get_rank():
        model.to("meta")
    with patch.object(pgb, "broadcast_", wraps=pgb.broadcast_) as broadcast:
        engine = fe.shard(model)
    sizes = [call.args[0].numel() for call in broadcast.call_args_list]
    assert sizes == [buffer.layout.numel for buffer in engine.buffers]
    assert max(sizes) < sum(sizes) / 4


@on_ranks(4)
def test_experts_are_compared_among_the_ranks_that_share_them() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    rank = dist.get_rank()
    for case in ("own", "differs", "meta"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch.manual_seed(10 + rank // 2)
        expert = nn.Linear(4, 4)
        expected = expert.weight.detach().clone()
        model.append(expert)
        if case == "differs" and rank == 3:
            expert.bias.data += 1
        if case == "meta" and rank in (1, 3):
            model.to("meta")
        if case == "meta" and rank == 2:
            model[0].to("meta")
        for parameter in model[2].parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
        if case == "differs":
            with pytest.raises(ValueError, match=r"2.bias: .* ranks 2 and 3"):
                fe.shard(model, expert_mesh=grid["data"])
            continue
        fe.shard(model, expert_mesh=grid["data"])
        assert torch.equal(model[2].weight.full_tensor(), expected)


@on_ranks(4)
def test_buffers_of_experts_are_those_of_the_first_rank_that_shares_them() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    for parameter in model[1].parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    for norm in model:
        norm.running_mean.fill_(dist.get_rank())
    fe.shard(model, expert_mesh=grid["data"], initial_values="rank0")
    assert model[0].running_mean.unique().tolist() == [0.0]
    assert model[1].running_mean.unique().tolist() == [float(dist.get_rank() // 2 * 2)]


def test_a_checksum_tells_values_and_their_order_apart() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64):
        for shape in ((), (0,), (7,), (3, 5), (130, 65), (4099, 3)):
            noise = torch.randn(shape).mul(100)
            value = noise > 0 if dtype is torch.bool else noise.to(dtype)
            spaced = value.new_zeros((value.numel() + 1,))
            spaced[1:] = value.flatten()
            same = [value.clone(), spaced[1:].view(shape)]
            same += [value.t().contiguous().t()] if value.ndim == 2 else []
            assert {int(checksum(each)) for each in same} == {int(checksum(value))}
            if value.numel() > 10:
                other = value.clone().flatten()
                place = int((other != other[0]).nonzero()[-1])
                other[[0, place]] = other[[place, 0]]
                assert int(checksum(other)) != int(checksum(value)), (dtype, shape)


def test_a_checksum_tells_any_two_exchanged_words_apart() -> None:
    value = torch.arange(1, 12 * 1024 + 1, dtype=torch.float64)
    for place in (1, 1024, 5 * 1024 - 7, 7 * 1024 - 5, 10 * 1024 - 14):
        other = value.clone()
        other[[1000, 1000 + place]] = value[[1000 + place, 1000]]
        assert int(checksum(other)) != int(checksum(value)), place


class Positions(nn.Module):
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


@everywhere
def test_children_and_normalised_weights_get_the_values_that_modules_give(place: Place) -> None:
    torch.manual_seed(0)
    alone = Model()
    with torch.device("meta"):
        model = Model()
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
        found.append(fe.shard(on_meta(Model), strategy=level).full_state_dict())
    return found


def test_values_are_the_same_whatever_the_number_of_ranks_and_the_level(ranks: Any) -> None:
    ((expected, *others),) = ranks.run(states, world_size=1)
    for world_size in (2, 4):
        others += [each for found in ranks.run(states, world_size=world_size) for each in found]
    for found in others:
        check_equal(found, expected)


class FailsOnOneRank(nn.Linear):
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
    """A module with a bias in one unit and a weight in another is initialized with both units."""
    states = []
    for level in ("no_shard", "optim_grads_params"):
        torch.manual_seed(3)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            model[2].weight = model[0].weight
        engine = fe.shard(model, strategy=level, units="*", min_unit_size=0)
        model(torch.ones(2, 4)).sum().backward()
        states.append(engine.full_state_dict())
    check_equal(*states)
    assert all(value.any() for value in states[0].values())
