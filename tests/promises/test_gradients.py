"""What torch promises of gradients: when they come, from where, and what users do to them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.promises.everywhere import Place, everywhere

Loss = Callable[[Any, Tensor], Tensor]
Between = Callable[[Any], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        self.penalty = self.lin(y).square().mean()
        return x + y


class Net(nn.Module):
    """Blocks that keep a loss of their own, a parameter of the root, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(3, 3)

    def encoder(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x * self.scale))
        return result


class EncoderAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x))
        return result


class Hidden:
    """A user's own class, in which tensors are not found."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class HidingBlock(Block):
    def forward(self, x: Any) -> Any:
        return Hidden(super().forward(x.tensor))


class HidingNet(Net):
    """Each of its units, and it itself, returns an unknown class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HidingBlock(), HidingBlock()])

    def forward(self, x: Tensor) -> Any:
        hidden: Any = Hidden(x * self.scale)
        return Hidden(self.head(self.encoder(hidden).tensor))


def plain(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return (out.tensor if isinstance(out, Hidden) else out).square().mean()


def penalty_of(model: Any) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 0.1


def compare(
    place: Place,
    model: nn.Module,
    losses: Sequence[tuple[Loss, bool] | Between],
    *,
    clear: Sequence[bool] = (True, True),
    **options: Any,
) -> None:
    """Trains one step for each element of ``clear``, and compares gradients after each.

    Args:
        losses: what to run backward of, and whether it is reduced; or what to do in between.
        clear: whether ``zero_grad`` sets to None.
    """
    alone = copy.deepcopy(model)
    engine = place.shard(model, **options)
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step, to_none in enumerate(clear):
        for number, each in enumerate(losses):
            if not isinstance(each, tuple):
                for one in (model, alone):
                    each(one)
                continue
            loss, sync = each
            seeds = [1000 * step + 10 * number + r for r in range(world)]
            xs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in seeds]
            with contextlib.nullcontext() if sync else engine.no_sync():
                loss(model, xs[rank]).backward()
            for x in xs:
                (loss(alone, x) / world).backward()
        assert_same_gradients(model, alone, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    for module in model.modules():
        if isinstance(module, Block):
            module.penalty = None  # its graph would keep the engine and its groups


def assert_same_gradients(model: nn.Module, alone: nn.Module, label: object) -> None:
    expected = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        wanted = expected[name].grad
        assert (param.grad is None) == (wanted is None), f"{label}: {name}: {param.grad}"
        if param.grad is not None and wanted is not None:
            found, wanted = reference.held(param.grad), reference.slice_like(wanted, param.grad)
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6, msg=f"{label}: {name}")


@everywhere
def test_a_gradient_that_was_zeroed_stays_zeros_where_nothing_comes(place: Place) -> None:
    class Both(Net):
        def forward(self, x: Tensor, everything: bool = False) -> Tensor:
            out = super().forward(x)
            return out + self.unused(out) if everything else out

    model = Both()
    alone = copy.deepcopy(model)
    place.shard(model)
    x = torch.ones(2, 6)
    for each in (model, alone):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for everything in (True, False, False):
            each(x, everything).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        each(x).sum().backward()
    assert_same_gradients(model, alone, place)
    reference.assert_same_weights(model, alone)


@everywhere
def test_a_gradient_that_is_truly_zero_is_added_to(place: Place) -> None:
    compare(place, Net(), [(lambda m, x: plain(m, x) * 0.0, True), (plain, True)])


@everywhere
def test_a_module_called_outside_the_roots_forward_has_its_gradient_once(place: Place) -> None:
    def first(model: Any, x: Tensor) -> Tensor:
        return model.blocks[0](x).square().mean()

    compare(place, Net(), [(first, False), (first, False), (plain, True)], clear=(True, False))


@everywhere
def test_after_zeroing_a_module_may_be_called_outside_the_roots_forward(place: Place) -> None:
    def first(model: Any, x: Tensor) -> Tensor:
        return model.blocks[0](x).square().mean()

    compare(place, Net(), [(plain, True)], clear=(False,))
    compare(place, Net(), [(first, True)], clear=(False, False, True, True))


@everywhere
def test_a_child_may_be_called_in_place_of_the_model(place: Place) -> None:
    def encode(model: Any, x: Tensor) -> Tensor:
        return model.encoder(x).square().mean()

    losses = [(encode, False), (plain, False), (encode, False), (encode, True)]
    compare(place, EncoderAndHead(), losses, clear=(True, False, True))


@everywhere
def test_a_penalty_on_all_parameters_counts_once(place: Place) -> None:
    def before(model: Any, x: Tensor) -> Tensor:
        return penalty_of(model) + plain(model, x)

    def after(model: Any, x: Tensor) -> Tensor:
        return plain(model, x) + penalty_of(model)

    compare(place, Net(), [(before, True)], clear=(True, False, True))
    compare(place, Net(), [(after, True)], clear=(True, False, True))
    compare(place, Net(), [(after, False), (before, False), (after, True)], clear=(False, True))
    compare(place, Net(), [(before, True), (after, True)], clear=(False, True))
    compare(place, Net(), [(lambda m, x: penalty_of(m), True)], clear=(True, False))


@everywhere
def test_a_loss_that_a_module_keeps_counts(place: Place) -> None:
    def auxiliary(model: Any, x: Tensor) -> Tensor:
        return plain(model, x) + torch.stack([b.penalty for b in model.blocks]).sum()

    compare(place, Net(), [(auxiliary, True)], clear=(True, False, True))


@everywhere
def test_an_output_in_a_class_of_the_users_has_its_gradients(place: Place) -> None:
    def with_evaluation_between(model: Any, x: Tensor) -> Tensor:
        loss = plain(model, x)
        with torch.no_grad():
            model(x)
        return loss

    def of_two_calls(model: Any, x: Tensor) -> Tensor:
        return plain(model, x) + plain(model, x.square())

    losses = [(plain, True), (with_evaluation_between, False), (of_two_calls, True)]
    if place.inner != "optim_grads_params":
        compare(place, HidingNet(), losses)
        return
    for planned in (False, True):
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=planned)
        with pytest.warns(UserWarning, match=r"unit blocks\.0: expected .* found a Hidden"):
            compare(place, HidingNet(), losses, clear=(True, False, True), config=config)


@everywhere
def test_several_backwards_before_a_step_add_up(place: Place) -> None:
    compare(place, Net(), [(plain, True)] * 3, clear=(True, False, True))
    compare(place, Net(), [(plain, True), (plain, False), (plain, True)], clear=(False, True))


@everywhere
def test_gradients_edited_after_a_backward_are_added_to_as_they_are(place: Place) -> None:
    def halve(model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def drop_some(model: nn.Module) -> None:
        for number, param in enumerate(model.parameters()):
            if number % 2:
                param.grad = None

    def zero_and_add(model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()
                param.grad.add_(0.25)

    for edit in (halve, clip, drop_some, zero_and_add):
        compare(place, Net(), [(plain, True), edit, (plain, True)])
    compare(place, Net(), [(plain, True), halve, (plain, False), (plain, True), drop_some])


@everywhere
def test_a_gradient_that_users_set_is_added_to(place: Place) -> None:
    def set_some(model: nn.Module) -> None:
        for number, param in enumerate(model.parameters()):
            if number % 3 == 0:
                param.grad = torch.full_like(param, 0.5, requires_grad=False)

    compare(place, Net(), [set_some, (plain, True)])
    compare(place, Net(), [(plain, True), set_some, (plain, False), (plain, True)])


@everywhere
def test_cleared_between_microbatches_only_what_comes_later_counts(place: Place) -> None:
    def clear(model: nn.Module) -> None:
        model.zero_grad()

    def zero(model: nn.Module) -> None:
        model.zero_grad(set_to_none=False)

    def encode(model: Any, x: Tensor) -> Tensor:
        return model.encoder(x).square().mean()

    for between in (clear, zero):
        compare(place, EncoderAndHead(), [(plain, False), between, (plain, True)])
    compare(place, EncoderAndHead(), [(plain, False), zero, (encode, False), (encode, True)])


@everywhere
def test_what_is_reduced_is_not_rounded_again_by_a_narrow_wire(place: Place) -> None:
    import fsdp_engine as fe

    policy = fe.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = nn.Linear(6, 50, bias=False)
    place.shard(model, mp_policy=policy)
    x = torch.full((1, 6), 256.0)
    model(x).sum().backward()
    for _ in range(4):
        # Added in bf16, each of these would be lost.
        model(torch.full((1, 6), 0.5)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    assert torch.equal(reference.full(gradient), torch.full((50, 6), 258.0))


@everywhere
def test_an_input_that_is_ignored_gives_its_parameters_no_gradient(place: Place) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
            return torch.tanh(self.lin(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.blocks = nn.ModuleList([First(), First()])

        def forward(self, x: Tensor) -> Tensor:
            y, ignored = self.one(x), self.other(x)
            for block in self.blocks:
                y = block(y, ignored)
            return y

    compare(place, Model(), [(plain, True)])


@everywhere
def test_gradients_edited_between_microbatches_are_refused_by_name(place: Place) -> None:
    model = EncoderAndHead()
    engine = place.shard(model)
    x = torch.ones(2, 6)
    with engine.no_sync():
        plain(model, x).backward()
    assert model.head.weight.grad is not None
    model.head.weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"\.grad of head\.weight .* between microbatches"):
        plain(model, x).backward()
    engine.reset()
    plain(model, x).backward()
