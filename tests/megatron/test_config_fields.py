"""Fields of the config: a test for each, named after it, in which changing the field changes the
observation."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, LEVELS, Axis, Role, Strategy
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Config, Layers, config_of
from tests.messages import Messages, expected_collectives, watched
from tests.models import Dot, Stack, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.reference import full, sgd
from tests.training import mesh_of

ROOT = "the root module"
DIM, NUM_LAYERS = 8, 3
NUMEL = NUM_LAYERS * 128  # of the flat buffer: in each layer 64 weights, then 8 biases padded to 64


class Passes(TorchDispatchMode):
    """Counts in-place multiplications and divisions of ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(("mul", "div", "_foreach_mul", "_foreach_div")):
            sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]
            self.count += self._numel in sizes
        return func(*args, **(kwargs or {}))


def layers(dtype: torch.dtype = torch.float32) -> Layers:
    torch.manual_seed(0)
    return Layers(DIM, NUM_LAYERS).to(dtype)


def batch(dtype: torch.dtype = torch.float32, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(2, DIM, generator=generator).to(dtype)


def backward(ddp: fe.DistributedDataParallel, x: torch.Tensor) -> None:
    ddp.zero_grad_buffer()
    ddp(x).backward()
    ddp.finish_grad_sync()


def trained(ddp: fe.DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Weights after some steps on :func:`batch`."""
    optimizer = sgd(ddp.parameters())
    for number in range(3):
        backward(ddp, batch(number=number))
        optimizer.step()
    return ddp.engine.full_state_dict()


def gradient(ddp: fe.DistributedDataParallel) -> torch.Tensor:
    """The full gradient of the only parameter."""
    (param,) = ddp.parameters()
    assert param.grad is not None
    return full(param.grad)


def sent_by(ddp: fe.DistributedDataParallel, x: torch.Tensor) -> int:
    """Bytes of gradients that this rank sends in a step."""
    messages = Messages()
    ddp.zero_grad_buffer()
    loss = ddp(x)
    with messages.counting():
        loss.backward()
        ddp.finish_grad_sync()
    axis = ddp.engine.mesh.inner
    assert axis.reduce_group is not None
    # On one axis the same group sends the message about used parameters: a byte for each parameter
    # and 16 about the order of units, in an all-reduce.
    usage = 2 * (len(list(ddp.parameters())) + 16) * (axis.size - 1) // axis.size
    return messages.sent[axis.reduce_group.group_name] - usage


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_grad_reduce_in_fp32_widens_what_is_kept_and_what_travels(level: str) -> None:
    for in_fp32, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        ddp = fe.DistributedDataParallel(
            layers(torch.bfloat16), config_of(level, grad_reduce_in_fp32=in_fp32)
        )
        # A rank sends half of the elements; an all-reduce sends twice as much.
        times = 2 if level == "no_shard" else 1
        found = sent_by(ddp, batch(torch.bfloat16))
        assert found == times * NUMEL // 2 * dtype.itemsize, in_fp32
        for buffer in ddp.engine.buffers:
            assert buffer.kind.dtypes.main_grad == dtype
            assert buffer.grads is not None
            assert buffer.grads.main_grads().tensor.dtype == dtype
            for param, sharded in zip(buffer.full_params, buffer.sharded_params, strict=True):
                if level in ("no_shard", "optim"):
                    assert param.main_grad.dtype == dtype
                assert sharded.main_grad.dtype == torch.float32  # for the optimizer
        # The optimizer gets gradients in its weights' dtype, in whatever dtype they were summed.
        assert {param.grad.dtype for param in ddp.parameters()} == {torch.float32}


@on_ranks(world_size=2)
def test_use_distributed_optimizer_halves_optimizer_state_on_two_ranks() -> None:
    for distributed, most in ((False, NUM_LAYERS * 72), (True, NUMEL // 2)):
        ddp = fe.DistributedDataParallel(layers(), Config(use_distributed_optimizer=distributed))
        optimizer = torch.optim.AdamW(ddp.parameters())
        backward(ddp, batch())
        optimizer.step()
        states = [state["exp_avg"] for state in optimizer.state.values()]
        held = sum((s.to_local() if distributed else s).numel() for s in states)
        assert held <= most
        total = torch.tensor(held)
        dist.all_reduce(total)
        assert total.item() == NUM_LAYERS * 72 * (1 if distributed else 2)


@on_ranks(world_size=4)
def test_num_distributed_optimizer_instances_cuts_the_state_within_each_instance() -> None:
    rank = dist.get_rank()
    weights = []
    for instances in (1, 2, 4):
        inner = 4 // instances
        config = Config(
            use_distributed_optimizer=True, num_distributed_optimizer_instances=instances
        )
        ddp = fe.DistributedDataParallel(layers(), config)
        mesh = ddp.engine.mesh
        first = rank // inner * inner
        rows = list(range(first, first + inner))
        for axis, expected in (
            (mesh.inner, rows),
            (mesh.outer, list(range(rank % inner, 4, inner))),
        ):
            assert axis.size == len(expected)
            for group in (axis.gather_group, axis.reduce_group):
                found = None if group is None else dist.get_process_group_ranks(group)
                assert found == (expected if len(expected) > 1 else None)
        (buffer,) = ddp.engine.buffers
        whole = buffer.layout.numel
        assert whole == 512 if inner == 4 else NUMEL  # shards are multiples of 64
        assert buffer.weights.main.tensor.numel() == whole // inner
        messages = Messages()
        with messages.counting():
            backward(ddp, batch())
        over = " over the inner axis" if instances > 1 else ""
        labels = [f"reduce-scatter of {ROOT}{over}"] * (inner > 1)
        labels += [f"all-reduce of {ROOT} over the outer axis"] * (instances > 1)
        operations = messages.operations.items()
        assert {k: v for k, v in operations if "all-gather" not in k} == Counter(labels)
        weights.append(trained(ddp))
    for each in weights:
        torch.testing.assert_close(each, weights[0], rtol=1e-6, atol=1e-6)


@on_ranks(world_size=2)
def test_pad_buckets_for_high_nccl_busbw_makes_every_ranks_part_a_multiple_of_65536() -> None:
    weights = []
    for level in LEVEL_NAMES:
        for padded in (False, True):
            config = config_of(level, pad_buckets_for_high_nccl_busbw=padded)
            ddp = fe.DistributedDataParallel(layers(), config)
            for buffer in ddp.engine.buffers:
                bare = 128 if level == "optim_grads_params" else NUMEL
                assert buffer.layout.numel == (2 * 2**16 if padded else bare)
                start, stop = buffer.layout.range(1, ddp.engine.mesh.coordinate)
                assert (stop - start) % (2**16 if padded else 64) == 0
            num_buffers = len(ddp.engine.buffers)
            each = 2**16 if padded else NUMEL // 2 // num_buffers
            times = 2 if level == "no_shard" else 1
            assert sent_by(ddp, batch()) == times * num_buffers * each * 4
            weights.append(trained(ddp))
    for each in weights:
        torch.testing.assert_close(each, weights[0], rtol=1e-6, atol=1e-6)


@on_ranks(world_size=4)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_reduce_scatter_with_fp32_accumulation_rounds_the_sum_once(level: str) -> None:
    # In bf16 256 + 1 is 256, so adding 1 three times gives 256. (In another order 256 + 2 is 258,
    # and 256 + 3 is 260.) In fp32 the sum is 259, which rounds to 260.
    value = 256.0 if dist.get_rank() == 0 else 1.0
    # The first element is this sum over ranks; the others are random.
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4, 64, generator=generator).to(torch.bfloat16)
    wide = (random * 0.25).float().sum(0).to(torch.bfloat16)
    rows: list[tuple[float | None, torch.dtype, dict[str, Any]]] = [
        (None, torch.bfloat16, {}),
        (65.0, torch.bfloat16, {"reduce_scatter_with_fp32_accumulation": True}),
        (64.75, torch.float32, {"grad_reduce_in_fp32": True}),
    ]
    for mean, dtype, fields in rows:
        ddp = fe.DistributedDataParallel(Dot(1024).to(torch.bfloat16), config_of(level, **fields))
        backward(ddp, torch.full((1024,), value, dtype=torch.bfloat16))
        if mean is not None:
            assert torch.equal(gradient(ddp), torch.full((1024,), mean)), fields
        times = 2 if level == "no_shard" else 1
        found = sent_by(ddp, random[dist.get_rank()].repeat(16))
        assert found == times * 1024 * 3 // 4 * dtype.itemsize, fields
        if dtype == torch.bfloat16:
            is_right = torch.equal(gradient(ddp)[:64], wide.float())
            assert is_right == bool(fields), fields


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_average_in_collective_sends_gradients_as_they_are(level: str) -> None:
    x = torch.arange(128.0) + 1000.0 * dist.get_rank()
    for average in (False, True):
        ddp = fe.DistributedDataParallel(Dot(128), config_of(level, average_in_collective=average))
        ddp.zero_grad_buffer()
        loss = ddp(x)
        found: list[tuple[Any, torch.Tensor]] = []

        def sent(
            group: Any, message: torch.Tensor, options: Any = None, found: Any = found
        ) -> None:
            if message.dtype != torch.uint8:  # uint8 is the message about used parameters
                found.append((options and options.reduceOp, message.clone()))

        with watched(sent, sent):
            loss.backward()
            ddp.finish_grad_sync()
        ((operation, message),) = found
        if level == "no_shard":
            assert (operation == dist.ReduceOp.SUM) is not average
            own = x
        else:
            assert operation is None
            own = x.chunk(2)[1 - dist.get_rank()]
        assert torch.equal(message, own / (1 if average else 2))
        assert torch.equal(gradient(ddp), torch.arange(128.0) + 500.0)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_gradient_reduce_div_fusion_saves_a_pass_over_gradients(level: str) -> None:
    for fused in (True, False):
        config = config_of(level, gradient_reduce_div_fusion=fused)
        ddp = fe.DistributedDataParallel(layers(), config)
        (numel,) = {buffer.layout.numel for buffer in ddp.engine.buffers}
        for num_micro in (1, 2):
            ddp.zero_grad_buffer()
            passes = Passes(numel)
            for _ in range(num_micro):
                loss = ddp(batch())
                with passes:
                    loss.backward()
            with passes:
                ddp.finish_grad_sync()
            # Sharded gradients are reduced in each microbatch.
            cut = level in ("optim_grads", "optim_grads_params")
            times = num_micro if cut else 1
            expected = 0 if fused else times * len(ddp.engine.buffers)
            assert passes.count == expected, (fused, num_micro)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_preserve_fp32_weights_decides_which_weights_are_held(level: str) -> None:
    for preserve in (True, False):
        config = config_of(level, preserve_fp32_weights=preserve)
        ddp = fe.DistributedDataParallel(layers(torch.bfloat16), config)
        dtype = torch.float32 if preserve else torch.bfloat16
        assert {param.dtype for param in ddp.parameters()} == {dtype}
        held = ddp.engine.memory_bytes()
        cut = level == "optim_grads_params"
        share = 1 if level == "no_shard" else 2
        expected = {"main": NUMEL * 4 // share} if preserve else {}
        if not (cut and preserve):  # else main weights are cast directly into the full weights
            expected["model"] = NUMEL * 2 // (2 if cut else 1)
        assert {role: held.get(role, 0) for role in expected} == expected
        assert held.keys() - {"grad"} == expected.keys()


def assert_bytes_at_rest(inner: str, outer: str, *shape: int) -> None:
    """Main weights are this rank's part of the compute weights, and need no memory of their own."""
    ddp = fe.DistributedDataParallel(layers(), config_of(inner, outer), mesh_of(*shape))
    trained(ddp)

    def share(level: int) -> int:
        axes = zip((inner, outer), reversed(shape), strict=False)
        return math.prod(size for name, size in axes if LEVELS[name].value >= level)

    numel = sum(buffer.layout.numel for buffer in ddp.engine.buffers)
    expected = {"model": numel * 4 // share(3), "grad": numel * 4 // share(2)}
    assert ddp.engine.memory_bytes() == expected
    assert sum(b.weights.main.tensor.numel() for b in ddp.engine.buffers) == numel // share(1)


@on_ranks(world_size=2)
def test_data_parallel_sharding_strategy_says_what_is_cut() -> None:
    for level in LEVEL_NAMES:
        assert_bytes_at_rest(level, "no_shard", 2)


@on_ranks(world_size=4)
def test_outer_dp_sharding_strategy_says_what_is_cut_along_the_outer_axis() -> None:
    for outer in LEVEL_NAMES:
        assert_bytes_at_rest("optim_grads_params", outer, 2, 2)


# Fields that change when collectives are issued, but not their number or bytes.

SIZE = 128  # elements of a layer: 64 weights, and biases padded to 64
CALLS = [f"call layers.{number}" for number in range(NUM_LAYERS)]


class Run:
    """Steps of a wrapped model; the first one records the order of units. Each layer is a
    bucket."""

    def __init__(self, level: str, **fields: Any) -> None:
        torch.manual_seed(0)
        model = Layers(DIM, NUM_LAYERS)
        self.timeline = Timeline(model)
        fields = {"overlap": True, "bucket_size": 65, **fields}
        self.ddp = fe.DistributedDataParallel(model, config_of(level, **fields))
        self.engine = self.ddp.engine
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.step(0)

    def step(self, number: int, **options: Any) -> None:
        batch = vector_batch(2, 10 * number + dist.get_rank(), DIM)[:1]
        timed_step(self.ddp, self.optimizer, self.timeline, batch, **options)


def gathers(level: str) -> list[str]:
    """Returns the labels of units if parameters are sharded, else of buckets, in forward order."""
    cut = level == "optim_grads_params"
    labels = [f"layers.{n}" if cut else f"(bucket {2 - n})" for n in range(NUM_LAYERS)]
    return [f"all-gather of {label}" for label in labels]


def one_by_one(everything: list[str]) -> list[str]:
    return [each for pair in zip(everything, CALLS, strict=True) for each in pair]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_align_param_gather_leaves_gathers_to_start_param_sync(level: str) -> None:
    everything = gathers(level)
    for align in (False, True):
        run = Run(level, align_param_gather=align, suggested_communication_unit_size=10_000)
        run.step(1)
        # Each bucket is gathered when its first module needs it; sharded parameters are gathered as
        # usual.
        aligned = align and level != "optim_grads_params"
        expected = one_by_one(everything) if aligned else [*everything, *CALLS]
        assert run.timeline.in_phase("forward") == expected
        run.step(2, param_sync=True)
        assert run.timeline.in_phase("sync") == everything
        assert run.timeline.in_phase("forward") == CALLS


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_suggested_communication_unit_size_says_how_much_is_gathered_ahead(level: str) -> None:
    everything = gathers(level)
    ahead = [*everything, *CALLS]
    one_ahead = [*everything[:2], CALLS[0], everything[2], *CALLS[1:]]
    # Unsharded weights are gathered into memory that is allocated anyway: a budget above 0 gathers
    # all at once.
    cut = level == "optim_grads_params"
    expected = {0: one_by_one(everything), 1: one_ahead if cut else ahead, 100 * SIZE: ahead}
    for budget, events in expected.items():
        run = Run(level, suggested_communication_unit_size=budget)
        run.step(1)
        assert run.engine.budget == budget
        assert run.timeline.in_phase("forward") == events, budget
    engine = Run(level).engine
    # The budget is the mean size of a unit, and twice it for gradients. The root has no parameters
    # and is not counted.
    assert (engine.budget, engine.staging_budget) == (SIZE, (2 * SIZE, 1))


@on_ranks(world_size=2)
def test_suggested_communication_unit_size_bounds_gradient_buffers_in_use() -> None:
    for budget, most in ((0, 1), (2 * SIZE, 2), (10_000, 3)):
        run = Run("optim_grads", overlap=False, suggested_communication_unit_size=budget)
        run.engine.peak_memory_bytes(reset=True)
        run.step(1)
        assert run.engine.peak_memory_bytes()["staging"] == most * SIZE * 4


CUT_MODEL = {"bucket_size": 300}  # three buckets where parameters are not sharded


def expected_phases(
    levels: Strategy, reduces: bool, is_ahead: bool, num_axes: int
) -> set[tuple[str, str]]:
    """(phase, collective) of a step of several microbatches, after earlier steps."""
    optim, grad, param = (levels.depth(role) for role in (Role.OPTIM, Role.GRAD, Role.PARAM))
    found: set[tuple[str, str]] = set()
    for depth, axis in enumerate(AXIS_BELOW_DEPTH[:num_axes]):
        suffix = "+outer" if axis is Axis.OUTER else ""
        gather, reduction = f"all-gather{suffix}", f"reduce-scatter{suffix}"
        if depth >= optim:
            reduction = f"all-reduce{suffix}"
        found.add(("backward" if reduces or depth < grad else "finish", reduction))
        if depth < param:
            found |= {("forward", gather), ("backward", gather)}
        elif depth < optim:
            # Unsharded weights are gathered right after the step.
            found.add(("forward" if is_ahead or param else "optimizer", gather))
    return found


def batches_of(num_micro: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [vector_batch(2, 10 * number + dist.get_rank()) for number in range(num_micro)]


def count_wrapped(inner: str, outer: str, shape: tuple[int, ...]) -> None:
    """Number and bytes of collectives, and weights, do not depend on the overlap options;
    ``test_counts.py`` compares bytes with the levels."""
    levels, num_axes = Strategy.from_names(inner, outer), len(shape)
    weights, traffic = [], []
    for reduces, is_ahead in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        fields = {"overlap_grad_reduce": reduces, "overlap_param_gather": is_ahead, **CUT_MODEL}
        config = config_of(inner, outer, **fields)
        ddp = fe.DistributedDataParallel(Stack(), config, mesh_of(*shape))
        optimizer, timeline = torch.optim.SGD(ddp.parameters(), lr=0.1), Timeline()
        timed_step(ddp, optimizer, timeline, *batches_of(1))
        messages = Messages()
        for num_micro in (1, 3):
            messages.operations.clear()
            with messages.counting():
                timed_step(ddp, optimizer, timeline, *batches_of(num_micro))
                before = messages.operations.copy(), messages.calls.copy()
                ddp.finish_grad_sync()  # gradients are final
            assert (messages.operations, messages.calls) == before
            counts, _ = expected_collectives(ddp.engine, levels, num_micro)
            kinds = ("all-gather", "reduce-scatter", "all-reduce")
            found = {k: v for k, v in messages.operations.items() if k.startswith(kinds)}
            # With one axis there are no outer collectives.
            one_axis = {k: v for k, v in counts.items() if "outer" not in k}
            assert found == (counts if num_axes == 2 else one_axis), (reduces, num_micro)
        phases = {
            (phase, what.partition(" ")[0] + ("+outer" if what.endswith("+outer") else ""))
            for phase, what in timeline.events
        }
        assert phases == expected_phases(levels, reduces, is_ahead, num_axes), reduces
        traffic.append([sorted(messages.sent.values()), sorted(messages.calls.values())])
        weights.append(ddp.engine.full_state_dict())
    assert traffic[1:] == traffic[:1] * 2
    torch.testing.assert_close(weights[1:], weights[:1] * 2, rtol=0, atol=0)


TWO_PAIRS = [("optim", "optim"), ("optim_grads_params", "optim_grads")]
TWO_AXES = [
    pytest.param(pair, (2, 2), id=name, marks=() if pair in TWO_PAIRS else pytest.mark.thorough)
    for pair, name in zip(FEW_PAIRS, FEW_PAIR_NAMES, strict=True)
]
ONE_AXIS = [pytest.param((level, "no_shard"), (2,), id=level) for level in LEVEL_NAMES]


@pytest.mark.parametrize(("levels", "shape"), TWO_AXES + ONE_AXIS)
def test_overlap_grad_reduce_and_overlap_param_gather_change_the_phases_of_collectives(
    ranks: Ranks, levels: tuple[str, str], shape: tuple[int, ...]
) -> None:
    ranks.run(count_wrapped, *levels, shape, world_size=math.prod(shape))


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_calls_that_have_nothing_to_do_send_nothing(level: str) -> None:
    for overlap in (False, True):
        ddp = fe.DistributedDataParallel(Stack(), config_of(level, overlap=overlap, **CUT_MODEL))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, Timeline(), *batches_of(1))
        messages = Messages()
        with messages.counting():
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
            ddp.scale_gradients(0.5)
            ddp.zero_grad_buffer()
            ddp.zero_grad_buffer()
        assert not messages.calls
        assert not messages.operations
        ddp.engine.weights_changed()
        with messages.counting():
            ddp.start_param_sync(force_sync=True)
        assert bool(messages.operations) is (level != "no_shard")
        # Gathered weights are not gathered again until they change.
        messages.operations.clear()
        with messages.counting(), torch.no_grad():
            ddp.start_param_sync()
            ddp.start_param_sync(force_sync=True)
            if level != "optim_grads_params":
                ddp(*batches_of(1)[0])
        assert not messages.operations
