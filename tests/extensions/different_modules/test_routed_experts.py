"""``engine.will_use()``: mixtures of experts whose ranks gather the experts that they route to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.extensions.different_modules.gather_rounds import GatherRounds
from fsdp_engine.runtime.unit import Unit
from gpt import GPT, GPTConfig
from routed_experts import MODELS, UNITS, Experts, MoE, name_routed_experts
from tests import reference
from tests.extensions.different_modules import maze
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks
from tests.scenario import Scenario

NUM_EXPERTS, NUM_TOKENS = 8, 2


class CheckpointedMoE(MoE):
    """A mixture of experts whose forward is repeated in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return result


class ReentrantMoE(CheckpointedMoE):
    use_reentrant = True


class Matrix(nn.Module):
    """An expert that returns its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self) -> Tensor:
        return self.up.weight


class GroupedExperts(Experts):
    """Stacks the weights of the chosen experts, for one product of all tokens."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        used, place = chosen.unique(return_inverse=True)
        stack = torch.stack([self.items[index]() for index in used.tolist()])
        return torch.einsum("tk,tkoi,ti->to", weights, stack[place], x)


class GroupedMoE(MoE):
    def __init__(self, config: GPTConfig, num_experts: int) -> None:
        super().__init__(config, num_experts)
        self.experts = GroupedExperts([Matrix(config.width) for _ in range(num_experts)])


def make_model(kind: type[MoE] = MoE) -> nn.Module:
    config = GPTConfig(sequence_length=8, num_layers=2, width=16, num_heads=2, mlp_ratio=1)
    model = GPT(config)
    for block in model.blocks:
        block.mlp = kind(config, NUM_EXPERTS)
    return model.double()  # AdamW turns rounding errors of zero gradients into large steps


def tokens_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Few tokens, which leave some experts unused."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (1, NUM_TOKENS), generator=generator)
    return tokens, tokens.roll(-1, 1)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())


def shard_and_name(model: nn.Module, *args: Any, **kwargs: Any) -> fe.Engine:
    engine = fe.shard(model, *args, **kwargs)
    name_routed_experts(model, engine)
    return engine


OPTIONS = {"units": UNITS["gpt"], "options": fe.Options(min_unit_size=0)}
SCENARIO = Scenario(
    model=make_model,
    batch=tokens_of,
    shard=shard_and_name,
    options=OPTIONS,
    optimizer=reference.adamw,  # weights of unused experts must not decay
    loss_of=loss_of,
    around=lambda engine: engine.together(),
    steps=3,
    compute_dtype=torch.float64,  # if set, the one process runs ranks' batches one by one
)


@pytest.mark.parametrize("kind", [MoE, CheckpointedMoE, ReentrantMoE, GroupedMoE])
@on_ranks(2)
def test_experts_that_are_gathered_by_routing_train_as_in_one_process(kind: type[MoE]) -> None:
    run = SCENARIO.but(model=lambda: make_model(kind)).check()
    unused = [name for name, grad in run.steps[0].gradients.items() if grad is None]
    assert any(".items." in name for name in unused)


@pytest.mark.parametrize("outer", ["no_shard", "optim_grads_params"])
@on_ranks(4)
def test_experts_on_two_axes_train_as_in_one_process(outer: str) -> None:
    SCENARIO.but(mesh=(2, 2), pair=("optim_grads_params", outer), steps=2).check()


@on_ranks(4)
def test_experts_on_four_ranks_train_as_in_one_process() -> None:
    SCENARIO.but(microbatches=1).check()


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
@on_ranks(2)
def test_stacked_experts_of_transformers_that_are_split_train_as_in_one_process(name: str) -> None:
    pytest.importorskip("transformers")
    options = {"units": UNITS[name]}
    make = MODELS[name]
    SCENARIO.but(model=lambda: make(NUM_EXPERTS).double(), options=options, steps=2).check()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_split_experts_compute_what_the_stack_computes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import routed_experts

    split = MODELS[name.lower().removesuffix("3moe")]
    with mock.patch.object(routed_experts, "split_experts", return_value=None):
        model = split(NUM_EXPERTS)
    assert isinstance(model, getattr(transformers, f"{name}ForCausalLM"))
    tokens, _ = tokens_of(1, 0)
    expected = model(tokens).logits
    routed_experts.split_experts(model)
    torch.testing.assert_close(model(tokens).logits, expected)


# How much is gathered.


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts gathers by the name of their unit, and messages with votes."""
    found: Counter[str] = Counter()
    gather, send = Unit.gather, GatherRounds._send

    def gathering(unit: Unit, *args: Any, **kwargs: Any) -> None:
        found[unit.name] += 1
        gather(unit, *args, **kwargs)

    def sending(rounds: GatherRounds, units: Any = (), **kwargs: Any) -> None:
        found["votes"] += bool(units)
        send(rounds, units, **kwargs)

    with (
        mock.patch.object(Unit, "gather", gathering),
        mock.patch.object(GatherRounds, "_send", sending),
    ):
        yield found


@on_ranks(2)
def test_each_expert_that_a_rank_routes_to_is_gathered_once_in_forward_and_backward() -> None:
    model, engine = SCENARIO.sharded_model()
    for step in range(4):
        with counting() as found, engine.together():
            loss_of(model, tokens_of(1, 10 * step + dist.get_rank())).backward()
        gathered = {name for name in found if ".items." in name}
        used = {
            unit.name
            for unit in engine.units
            if ".items." in unit.name and next(iter(unit.modules)).up.weight.grad is not None
        }
        model.zero_grad()
        if step:  # the recorded order of the first step is a guess
            assert gathered == used
            assert max(found[name] for name in used) == 2  # the last one is kept for backward
            # Votes in forward: the root; block 0; experts of block 0, and block 1; experts of block
            # 1. In backward block 1 and the root are still full.
            assert found["votes"] == 4 + 2, found


@pytest.mark.parametrize("backward", [False, True])
@on_ranks(4)
def test_named_units_are_gathered_up_to_a_number_of_elements(backward: bool) -> None:
    layers = nn.ModuleList(
        nn.Linear(maze.WIDTH, maze.WIDTH, bias=False).double() for _ in range(24)
    )
    model = nn.ModuleDict({"layers": layers})
    model.forward = forward_of(layers)  # type: ignore[method-assign]
    engine = fe.shard(model, units=list(layers), options=fe.Options(min_unit_size=0))
    size = engine.units[1].num_elements
    routes = random.Random(dist.get_rank())
    for at_once in (1, 4, 24):
        for _ in range(2):
            engine.peak_memory_bytes(reset=True)
            route = routes.sample(range(24), 16)
            named = [layers[index] for index in route]
            with engine.together(), torch.set_grad_enabled(backward):
                found = model(
                    maze.inputs(0),
                    route,
                    lambda named=named, n=at_once: engine.will_use(named, max_elements=n * size),
                )
                if backward:
                    found.sum().backward()
            for_others, in_use = 3, 2
            num_full = engine.peak_memory_bytes()["full"] // (8 * size)
            assert num_full <= 2 * at_once + in_use + for_others + 1, (at_once, num_full)


def forward_of(layers: nn.ModuleList) -> Callable[..., Tensor]:
    def forward(x: Tensor, route: list[int], name: Callable[[], None]) -> Tensor:
        name()
        for index in route:
            x = layers[index](x)
        return x

    return forward


# Calls of will_use without effect, and wrong arguments.


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_few_ranks
def test_naming_modules_changes_nothing_outside_of_the_context(level: str) -> None:
    model, route = maze.Maze(), maze.plain(0, 2)
    engine = fe.shard(model, strategy=level, units=maze.UNITS)
    engine.will_use(model.blocks)
    model.before_block = lambda: engine.will_use(model.blocks)
    alone = maze.Maze()
    for each in (model, alone):
        maze.loss_of(each, 0, route).backward()
    maze.assert_same_gradients(model, alone)


@on_ranks(2)
def test_modules_that_are_no_units_are_left_to_the_units_around_them() -> None:
    model = maze.Maze()
    engine = fe.shard(model, units="blocks.*")
    model.before_block = lambda: engine.will_use([model.blocks[0].up, model.blocks[3].down])
    with engine.together(), torch.no_grad():
        maze.assert_same_results(model, maze.Maze(), 0, maze.plain(0, 2))


WRONG: dict[str, tuple[Callable[[fe.Engine], Any], type[Exception], str]] = {
    "a module": (
        lambda engine: engine.will_use(engine.model.head),
        TypeError,
        r"expected an iterable of modules; found Linear. Put a single module into a list",
    ),
    "an index": (
        lambda engine: engine.will_use([3]),
        TypeError,
        r"expected modules; found int at position 0",
    ),
    "another module": (
        lambda engine: engine.will_use([engine.model.head, nn.Linear(1, 1)]),
        ValueError,
        r"expected modules of the model given to shard\(\); found a Linear at position 1, which "
        "belongs to no engine",
    ),
    "a size": (
        lambda engine: engine.will_use([], max_elements=0),
        ValueError,
        r"expected a positive number, or None; found 0",
    ),
    "a fraction": (
        lambda engine: engine.will_use([], max_elements=0.5),
        TypeError,
        r"expected a number of elements, or None; found float",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(2)
def test_wrong_arguments_on_one_rank_are_errors_on_all(case: str) -> None:
    call, kind, text = WRONG[case]
    model = maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    for failing in (0, 1):
        fails = dist.get_rank() == failing
        expected = kind if fails else RuntimeError
        model.before_block = lambda fails=fails: call(engine) if fails else None
        text_here = text if fails else "found one on another rank"
        with pytest.raises(expected, match=text_here), engine.together():
            maze.loss_of(model, 0, maze.plain(1, 3)).backward()
        engine.reset()
        engine.zero_grad_buffer()
    model.before_block = None
    with engine.together():
        maze.loss_of(model, 0, maze.plain(1, 3)).backward()


@on_ranks(2)
def test_naming_modules_while_no_forward_runs_is_an_error_within_the_context() -> None:
    model = maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    with pytest.raises(RuntimeError, match="expected a call within a forward"), engine.together():
        engine.will_use(model.blocks)
    with engine.together() if dist.get_rank() < 2 else nullcontext():
        maze.loss_of(model, 0, maze.plain(1, 3)).backward()
