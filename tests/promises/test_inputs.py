"""What a module does to its inputs is seen outside: containers, and tensors changed in place."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests.promises.everywhere import Place, assert_as_alone, everywhere

DIM = 6
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass
class State:
    """What a user hands from block to block."""

    hidden: Tensor
    seen: list[Tensor] = field(default_factory=list)
    count: int = 0


class Block(nn.Module):
    """Calls ``use(block, ...)`` as its forward."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.first.weight.requires_grad_(False)  # still read after the last gradient has come
        self.second = nn.Linear(DIM, DIM)
        self.use = use

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(torch.tanh(self.second(x))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


class Model(nn.Module):
    """Three blocks; ``drive(blocks, x)`` calls them."""

    def __init__(self, use: Callable[..., Any], drive: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Block(use) for _ in range(3)])
        self.drive = drive

    def forward(self, x: Tensor) -> Tensor:
        return self.drive(self.blocks, self.before(x))


# --- what a block does, and how blocks are called ---


def fill_a_list(block: Block, x: Tensor, seen: list[Tensor]) -> None:
    seen.append(block.run(x) * seen[-1])


def through_a_list_alone(blocks: Any, x: Tensor) -> Tensor:
    seen = [x]
    for block in blocks:
        block(x, seen=seen)
    assert len(seen) == 4
    return seen[1] + seen[-1].exp()


def fill_containers(block: Block, cache: Any, state: State, *, more: tuple[Any, ...]) -> Tensor:
    state.count += 1
    state.seen.append(block.run(cache["k"] + state.hidden))
    state.hidden = state.seen[-1]
    cache["k"] = cache["k"] * 0.5
    cache[str(state.count)] = state.hidden
    more[0].append(more[1] + state.hidden)
    return state.hidden


def through_containers(make: Any, blocks: Any, x: Tensor) -> Any:
    cache, state, listed = make(k=x), State(x), []
    first = cache
    for block in blocks:
        block(cache, state, more=(listed, x))
    assert cache is first
    assert state.count == 3
    assert list(cache) == ["k", "1", "2", "3"]
    return cache["1"] + cache["k"] + sum(state.seen) + sum(listed)


def change_two(block: Block, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2).add_(block.run(x.detach().clone()))
    y.add_(block.run(x * 1))
    return block.run(y * 1)


def two_inputs(blocks: Any, x: Tensor) -> Tensor:
    y = x * 3
    for block in blocks:
        z = block(x, y)
    return x + y * z


def add_to_columns(block: Block, x: Tensor, out: Tensor) -> None:
    out[:, :3] += block.run(x)[:, :3]


def one_that_needed_no_gradient(blocks: Any, x: Tensor) -> Tensor:
    out = torch.zeros(4, DIM)
    for block in blocks:
        block(x, out)
        x = x + out
    return x


def change_a_view(block: Block, whole: Tensor, part: Tensor) -> Tensor:
    part.mul_(2)
    return block.run(whole) + whole


def a_view_of_another(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x * 1
        x = block(x, x[:, 1:3])
    return x


def tag_and_replace(block: Block, tagged: Any, new_data: Tensor, *, more: list[Tensor]) -> Any:
    out: Any = block.run(tagged * tagged.scale + new_data)
    out.scale = tagged.scale * 0.5
    tagged.seen = out.detach().sum()
    new_data.mul_(2)
    new_data.data = new_data.data.clamp(-0.2, 0.2)
    with torch.no_grad():
        more[0].set_(more[0].detach().clamp(-0.2, 0.2))
    return out


def tags_and_new_memory(blocks: Any, x: Any) -> Tensor:
    x.scale = 2.0
    for block in blocks:
        y, z = x * 3, x * 2
        before, x = x, block(x, y, more=[z])
        out = x * x.scale + before * before.seen + y * z
        out.scale, x = x.scale, out
    return out


class Marked(tuple[Tensor, Tensor]):
    """A tuple of a user's own class, whose constructor has parameters of its own."""

    name: str

    def __new__(cls, first: Tensor, second: Tensor, *, name: str) -> Marked:
        made = super().__new__(cls, (first, second))
        made.name = name
        return made


class Two(NamedTuple):
    first: Tensor
    second: Tensor


def exchange_tuples(block: Block, marked: Marked, two: Two, largest: Any) -> tuple[Marked, Two]:
    assert type(largest) is torch.return_types.max
    marked = Marked(marked[1], block.run(marked[0]) + largest.values, name=marked.name + "i")
    return marked, Two(two.second, block.run(two.first))


def tuples_of_all_kinds(blocks: Any, x: Tensor) -> Tensor:
    marked, two = Marked(x, x * 2, name=""), Two(x, x * 3)
    for block in blocks:
        marked, two = block(marked, two, torch.max(two.first, 0))
    assert marked.name == "iii"
    return marked[0] * marked[1] + two.first * two.second


HABITS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (fill_a_list, through_a_list_alone),
    (fill_containers, partial(through_containers, dict)),
    (fill_containers, partial(through_containers, UserDict)),
    (fill_containers, partial(through_containers, lambda **k: defaultdict(list, k))),
    (change_two, two_inputs),
    (add_to_columns, one_that_needed_no_gradient),
    (change_a_view, a_view_of_another),
    (tag_and_replace, tags_and_new_memory),
    (exchange_tuples, tuples_of_all_kinds),
]


@everywhere
def test_inputs_that_units_fill_and_change_have_the_gradients_of_one_process(place: Place) -> None:
    for use, drive in HABITS:
        assert_as_alone(place, Model(use, drive))


@everywhere
def test_an_input_that_a_unit_ignores_or_hands_back_gets_no_gradient_from_it(place: Place) -> None:
    ignored = torch.zeros(3, requires_grad=True)

    def use(block: Block, x: Tensor, y: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
        return block.run(x), y

    def drive(blocks: Any, x: Tensor) -> Tensor:
        handed = x * 2
        for block in blocks:
            x, handed = block(x, handed, ignored)
        return x + handed

    assert_as_alone(place, Model(use, drive))
    assert ignored.grad is None


@everywhere
def test_after_a_call_a_container_holds_the_users_own_tensors(place: Place) -> None:
    def use(block: Block, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        if given["x"].shape[0] == 1:
            raise KeyError("on purpose")
        return block.run(given["x"])

    model = Model(use, lambda blocks, x: x)
    engine = place.shard(model)
    for rows in (2, 1):
        x = torch.randn(rows, DIM, requires_grad=True)
        given = {"x": x}
        if rows == 2:
            model.blocks[0](x, given).sum().backward()
        else:
            with pytest.raises(KeyError, match="on purpose"):
                model.blocks[0](x, given)
            engine.reset()
        assert given["x"] is x


@everywhere
def test_inputs_that_a_policy_casts_are_the_users_where_a_unit_changes_them(place: Place) -> None:
    def use(block: Block, x: Tensor, seen: list[Tensor], total: Tensor) -> Tensor:
        assert {x.dtype, seen[0].dtype, total.dtype} == {torch.bfloat16}
        assert x is seen[0]
        total.add_(1)
        seen.append(block.run(x))
        return seen[-1].float()

    model = Model(use, lambda blocks, x: x)
    place.shard(model, mp_policy=BF16)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for made_in_mode in (False, True):
            x, total = torch.randn(2, DIM), torch.zeros(3)
            with mode():
                if made_in_mode:
                    x, total = x * 1, total * 1
                seen = [x]
                model.blocks[0](x, seen, total)
            assert seen[0] is x
            assert len(seen) == 2
            assert total.tolist() == [1, 1, 1], (mode, made_in_mode)


@everywhere
def test_parameters_that_share_memory_are_refused_unless_they_share_no_element(
    place: Place,
) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    first, second = model[0], model[1]
    for shared in (first.weight.data, first.weight.data[1:].t()[1:]):
        second.weight = nn.Parameter(shared)
        with pytest.raises(ValueError, match=r"0\.weight: expected.*the parameter 1\.weight over"):
            place.shard(model)
    second.weight = nn.Parameter(torch.randn(DIM, DIM))
    first.register_buffer("copy", first.weight.data)
    with pytest.raises(ValueError, match=r"0\.weight: expected.*the buffer 0\.copy over"):
        place.shard(model)
    del first.copy
    fused = torch.randn(DIM, 2 * DIM)
    first.weight, second.weight = (nn.Parameter(each) for each in fused.chunk(2, 1))
    assert_as_alone(place, model)


@everywhere
def test_a_batch_norm_trains_under_a_policy_wherever_it_is(place: Place) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(DIM, DIM), norm=nn.BatchNorm1d(DIM)))
    place.shard(model, units=lambda name, module: name == "first", mp_policy=BF16)
    x = torch.randn(4, DIM)
    model(x).sum().backward()
    assert model.norm.weight.grad.dtype == torch.float32
    assert model(x).dtype == torch.bfloat16
    model.eval()
    assert model(x).dtype == torch.bfloat16


def free(block: Block, x: Tensor) -> Tensor:
    out = block.run(x * 1)
    x.untyped_storage().resize_(0)
    return out


@everywhere
def test_a_unit_that_frees_an_input_of_the_user_is_refused(place: Place) -> None:
    if place.inner == "no_shard":
        return
    block = nn.Sequential(Block(free))
    engine = place.shard(block, options=fe.Options(min_unit_size=0))
    for _ in range(2):
        x = torch.ones(6, DIM, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"forward of unit .*expected.*found .*freed"):
            block(x * 1)
    block[0].use = Block.run
    block(x * 1).sum().backward()
    assert x.grad is not None
    engine.reset()


@everywhere
def test_a_unit_takes_inputs_with_any_strides_and_may_reshape_its_own_view(place: Place) -> None:
    block = nn.Sequential(Block(lambda block, x: block.run(x.squeeze_(0))))
    place.shard(block, options=fe.Options(min_unit_size=0))
    for num in (1, 3):  # torch computes the strides of a dim of size 1 anew for views
        base = torch.ones(num, 1, DIM, requires_grad=True)
        x = (base * 1).transpose(0, 1)
        block(x).sum().backward()
        assert base.grad is not None


@everywhere
def test_a_cast_of_an_input_has_its_attributes_and_hands_on_new_memory(place: Place) -> None:
    def use(block: Block, x: Any, y: Any) -> Tensor:
        assert x.dtype == y.dtype == torch.bfloat16
        x.tag, y.tag = x.tag + 1, y.tag + 1
        for each in (x, y):
            each.data = each.data * 0 + 2
        return block.run(x) + y

    def drive(blocks: Any, x: Any) -> Any:
        x.tag = 5
        return x

    model = Model(use, drive)
    policy = fe.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    place.shard(model, mp_policy=policy)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        x, y = (torch.randn(2, DIM, requires_grad=grad) for grad in (True, False))
        with mode():
            given: Any = (x * 1, y * 1)
            for each in given:
                each.tag = 0
            out = model.blocks[0](*given)
            whole: Any = model(x)
            assert (whole.dtype, whole.tag) == (torch.float32, 5)
            for each in given:
                assert (each.dtype, each.tag) == (torch.float32, 1)
                assert torch.equal(each, torch.full((2, DIM), 2.0))
        if out.requires_grad:
            (out.sum() + given[0].sum()).backward()
            assert x.grad is not None
            assert (x.grad != 0).any()
