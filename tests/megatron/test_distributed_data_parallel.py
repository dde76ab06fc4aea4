"""The wrapper trains as one process does, by SGD, because Adam hides a wrong factor. Each of its
methods keeps its contract, at every level, with and without overlap, and no schedule has a race."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.comm.trace_lanes import Tracer
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.messages import Messages
from tests.models import (
    LateModel,
    Small,
    Stack,
    Transformer,
    late_modules,
    mixed_model,
    token_batch,
    vector_batch,
)
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.reference import full, full_weights, held, relative_error, sgd, slice_like
from tests.training import mesh_of

STEPS = 2
# Overlap, microbatches, elements of a bucket.
WAYS = [(False, 1, None), (True, 1, 700), (False, 3, 700), (True, 3, None)]


@functools.cache
def trained_alone(world: int, num_micro: int) -> tuple[Transformer, list[reference.Step]]:
    """The model as it starts, and its steps in one process."""
    torch.manual_seed(1)
    model = Transformer(num_blocks=2, tied=True)
    data = reference.make_data(token_batch, STEPS, num_micro, world)
    return model, reference.train(copy.deepcopy(model), data)


def compare(level: str, world_size: int) -> None:
    for overlap, num_micro, bucket_size in WAYS:
        start, expected = trained_alone(world_size, num_micro)
        data = reference.make_data(token_batch, STEPS, num_micro, world_size)
        config = config_of(level, overlap=overlap, bucket_size=bucket_size)
        ddp = fe.DistributedDataParallel(copy.deepcopy(start), config)
        steps = train_wrapped(ddp, data, zero_buffer=num_micro == 1)
        lines = reference.differences(steps, expected, 2e-5)
        assert not lines, (overlap, num_micro, bucket_size, *lines[:8])


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_wrapped_model_on_one_axis_trains_as_one_process(
    ranks: Ranks, level: str, world_size: int
) -> None:
    ranks.run(compare, level, world_size, world_size=world_size)


NUM_CHUNKS, DIM = 24, 6


def forward(chunks: nn.ModuleList, x: Tensor) -> Tensor:
    for chunk in chunks:
        x = x + torch.tanh(chunk(x))
    return x.square().mean()


def train_chunks(level: str) -> None:
    """One optimizer steps several chunks, so all ranks must gather their weights in the same
    order."""
    torch.manual_seed(0)
    alone = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(NUM_CHUNKS)])
    config = config_of(level, bucket_size=10)
    chunks = nn.ModuleList([fe.DistributedDataParallel(copy.deepcopy(m), config) for m in alone])
    optimizers = [reference.sgd(each.parameters()) for each in (chunks, alone)]
    for step in range(2):
        torch.manual_seed(step)
        parts = torch.randn(dist.get_world_size(), 3, DIM)
        losses = [forward(alone, part) for part in parts]
        torch.stack(losses).mean().backward()
        loss = forward(chunks, parts[dist.get_rank()])
        assert torch.allclose(loss, losses[dist.get_rank()], rtol=1e-5), step
        loss.backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for chunk in chunks:
            chunk.zero_grad_buffer()
    for chunk, single in zip(chunks, alone, strict=True):
        reference.assert_same_weights(chunk.module, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_all_chunks_step_as_one_process(ranks: Ranks, level: str, world_size: int) -> None:
    ranks.run(train_chunks, level, world_size=world_size)


class CachesWeights(nn.Linear):
    """Quantises its weights in a step's first microbatch, as Megatron-Core's TELinear does."""

    is_first_microbatch, num_quantised = True, 0

    def forward(self, batch: Tensor) -> Tensor:
        self.num_quantised += self.is_first_microbatch
        self.is_first_microbatch = False
        return super().forward(batch)


@on_ranks(2)
def test_schedules_refresh_cached_weights_once_a_step() -> None:
    layers = [CachesWeights(4, 4), CachesWeights(4, 4)]
    config = fe.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = fe.DistributedDataParallel(nn.Sequential(layers[0], nn.ReLU(), layers[1]), config)
    for step in range(3):
        model.set_is_first_microbatch()  # Megatron-Core's schedules call this
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        assert [layer.num_quantised for layer in layers] == [step + 1] * 2


WHOLE_GRADS = LEVEL_NAMES[:2]


def make() -> Transformer:
    torch.manual_seed(5)
    return Transformer(num_blocks=1)


def wrapped(level: str, overlap: bool = False, **fields: Any) -> fe.DistributedDataParallel:
    return fe.DistributedDataParallel(make(), config_of(level, overlap=overlap, **fields))


def backward(ddp: fe.DistributedDataParallel, seed: int = 0, finish: bool = False) -> None:
    ddp(*token_batch(2, 10 * seed + dist.get_rank())).backward()
    if finish:
        ddp.finish_grad_sync()


def mean_gradients(*seeds: int, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Tensor]:
    """Gradients of one process: the mean over the batches of two ranks, summed over seeds."""
    alone = make()
    for seed in seeds or (0,):
        for rank in ranks:
            (alone(*token_batch(2, 10 * seed + rank)) / 2).backward()
    return {name: param.grad for name, param in alone.named_parameters()}


def assert_gradients(ddp: Any, expected: dict[str, Tensor], factor: float = 1.0) -> None:
    for name, param in ddp.module.named_parameters():
        assert param.grad is not None, name
        assert relative_error(full(param.grad), factor * expected[name]) < 2e-5, name


@on_ranks(4)
@pytest.mark.parametrize(("inner", "outer"), [*FEW_PAIRS, ("optim", "no_shard")])
def test_a_wrapped_model_starts_from_the_values_of_rank_0(inner: str, outer: str) -> None:
    expected = {name: param.detach() for name, param in make().named_parameters()}
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    ddp = fe.DistributedDataParallel(model, config_of(inner, outer), mesh_of(2, 2))
    for name, value in full_weights(ddp.module).items():
        assert torch.equal(value, expected[name]), name
    # The first of the ranks that hold the same values gives them to the others.
    before = [held(param).clone() for param in ddp.module.parameters()]
    num_replicas = 4 if inner == "no_shard" else 2 if outer == "no_shard" else 1
    with torch.no_grad():
        for param in ddp.module.parameters():
            param.add_(dist.get_rank() // (4 // num_replicas))
    ddp.broadcast_params()
    assert all(map(torch.equal, map(held, ddp.module.parameters()), before))


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_keys_are_the_modules_own_and_values_sharded_where_the_strategy_shards(level: str) -> None:
    ddp, batch = wrapped(level, overlap=True), token_batch(2, 3)
    keys = list(make().state_dict())
    state = ddp.state_dict()
    assert list(state) == list(ddp.state_dict_for_save_checkpoint()) == keys
    assert list(ddp.state_dict(prefix="a.")) == [f"a.{key}" for key in keys]
    assert list(nn.ModuleDict({"inside": ddp}).state_dict()) == [f"inside.{key}" for key in keys]
    for value in ddp.state_dict_for_save_checkpoint().values():
        assert isinstance(value, fe.FlatDTensor) is (level != "no_shard")
    del state["norm.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
        ddp.load_state_dict(state)
    ddp.load_state_dict(state, strict=False)
    # The next forward uses loaded values.
    values = {name: value.clone() for name, value in ddp.engine.full_state_dict().items()}
    expected = ddp(*batch)
    expected.backward()
    ddp.finish_grad_sync()
    sgd(ddp.parameters()).step()
    ddp.start_param_sync()  # gathers values that the load then replaces
    ddp.load_state_dict(values)
    assert torch.allclose(ddp(*batch), expected, rtol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_scale_gradients_scales_all_gradients(level: str) -> None:
    expected = mean_gradients()
    for overlap, factor in ((False, 0.5), (True, 0.5), (True, torch.tensor(0.5))):
        ddp = wrapped(level, overlap)
        with ddp.no_sync():
            backward(ddp)
        ddp.scale_gradients(factor)  # halves the gradients of the first microbatch
        backward(ddp)
        ddp.finish_grad_sync()
        assert_gradients(ddp, expected, 1.5)
        ddp.scale_gradients(factor)
        assert_gradients(ddp, expected, 0.75)


@on_ranks(2)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_zero_grad_buffer_begins_an_iteration(level: str, overlap: bool, zero: bool) -> None:
    ddp = wrapped(level, overlap)
    for _ in range(2):
        backward(ddp, 1, finish=True)
        ddp.zero_grad_buffer(zero)
        assert all(param.grad is None for param in ddp.parameters())
        grads = [b.grads.optim_grads for b in ddp.engine.buffers if b.grads is not None]
        assert all(flat is not None and not flat.any() if zero else flat is None for flat in grads)
        params = [param for buffer in ddp.engine.buffers for param in buffer.full_params]
        mains = [param.main_grad for param in params if hasattr(param, "main_grad")]
        assert bool(mains) == (level in WHOLE_GRADS)
        assert zero != any(bool(main.any()) for main in mains) or not mains
    backward(ddp, finish=True)
    assert_gradients(ddp, mean_gradients())


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_gradients_of_no_sync_stay_in_main_grad_until_they_are_reduced(
    level: str, overlap: bool
) -> None:
    ddp = wrapped(level, overlap)
    own = mean_gradients(ranks=(dist.get_rank(),))
    with ddp.no_sync():
        with suppress(KeyError), ddp.no_sync():  # nested; an exception restores no_sync()
            raise KeyError
        backward(ddp)
    for buffer in ddp.engine.buffers:
        for record, param, sharded in zip(
            buffer.records, buffer.full_params, buffer.sharded_params, strict=True
        ):
            assert [param.grad, sharded.grad] == [None, None]
            assert hasattr(param, "main_grad") == (level in WHOLE_GRADS)
            if level in WHOLE_GRADS:
                assert relative_error(param.main_grad, own[record.name]) < 1e-6, record.name
            if sharded is not param:  # main_grad of a sharded parameter is this rank's slice
                found = sharded.main_grad
                assert found.flat_placement == sharded.flat_placement
                if level in WHOLE_GRADS:
                    part = slice_like(own[record.name], sharded)
                    assert torch.allclose(held(found), part, rtol=1e-6, atol=1e-9)
    messages, again = Messages(), Messages()
    with messages.counting():
        ddp.start_grad_sync()
    # If gradients are sharded, backward has reduced them already.
    assert any("reduc" in label for label in messages.operations) is (level in WHOLE_GRADS)
    with again.counting():
        ddp.start_grad_sync()
        ddp.finish_grad_sync()
        ddp.finish_grad_sync()
    assert not again.operations
    assert_gradients(ddp, mean_gradients())
    if overlap:
        ddp.zero_grad_buffer()
        backward(ddp, 1)
        with pytest.raises(RuntimeError, match="expected finish_grad_sync"):
            backward(ddp)
        ddp.finish_grad_sync()
        assert_gradients(ddp, mean_gradients(1))


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_main_grad_of_sharded_parameters_is_their_gradient(level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.ModuleDict({"used": nn.Linear(6, 5), "unused": nn.Linear(3, 3)}).to(dtype)
        model.forward = lambda x, model=model: model["used"](x).sum()
        ddp = fe.DistributedDataParallel(model, config_of(level))
        params = dict(ddp.module.named_parameters())
        for _ in range(2):
            ddp.zero_grad_buffer()
            assert not any(full(param.main_grad).any() for param in params.values())
            ddp(torch.full((2, 6), dist.get_rank() + 1.0, dtype=dtype)).backward()
            ddp.finish_grad_sync()
            for name, param in params.items():
                grad = param.grad
                param.grad = param.main_grad
                assert param.grad.shape == param.shape
                if name.startswith("unused"):
                    assert not full(param.grad).any()
                else:
                    assert torch.equal(full(param.grad), full(grad))
                    assert full(grad).unique().item() == (3.0 if "weight" in name else 2.0)
    param = next(fe.shard(nn.Linear(4, 4)).model.parameters())
    values = fe.FlatDTensor.from_flat_local(param.local.detach().clone(), param.flat_placement)
    assert not hasattr(values, "main_grad")


def fails_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError("on the way back")

    output.register_hook(fail)


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_finishing_after_a_failed_backward_names_the_missing_parameters(level: str) -> None:
    for overlap in (False, True):
        model = Stack()
        ddp = fe.DistributedDataParallel(model, config_of(level, overlap=overlap))
        batch = vector_batch(2, dist.get_rank())
        hook = model.blocks[1].register_forward_hook(fails_in_backward)
        with pytest.raises(KeyError, match="on the way back"):
            ddp(*batch).backward()
        hook.remove()
        with pytest.raises(RuntimeError, match=r"finish_grad_sync: expected .* blocks\.1"):
            ddp.finish_grad_sync()
        with pytest.raises(RuntimeError, match=r"zero_grad_buffer: .* engine\.reset\(\)"):
            ddp.zero_grad_buffer()
        ddp.engine.reset()
        ddp(*batch).backward()
        ddp.finish_grad_sync()
        assert all(param.grad is not None for param in ddp.parameters())


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_ranks_without_a_batch_contribute_zeros(level: str) -> None:
    # Gradients that are sharded need a backward on all ranks, or on none.
    some = [(1, False), (1, True)] if level in WHOLE_GRADS else []
    for num_having, forwards in [(0, False), *some]:
        ddp = wrapped(level, bucket_size=300)
        for _ in range(2):
            ddp.zero_grad_buffer(zero_buffer=False)
            if dist.get_rank() < num_having:
                backward(ddp)
            elif forwards:
                ddp(*token_batch(2, 1))
            ddp.finish_grad_sync()
            ddp.finish_grad_sync()  # nothing is left to do
            if num_having:
                assert_gradients(ddp, mean_gradients(ranks=(0,)))
            else:
                assert ddp.engine.clip_grad_norm_(float("inf")).item() == 0.0
                assert all(param.grad is None for param in ddp.parameters())


@on_ranks(2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_start_param_sync_within_a_forward_or_a_backward_sends_nothing(level: str) -> None:
    ddp = wrapped(level, overlap=True)
    block = ddp.module.blocks[0]
    counts = []
    for seed, calls in enumerate((0, 0, 2)):
        called: list[object] = []

        def start(*args: object, called: list[object] = called) -> None:
            called.append(args)
            ddp.start_param_sync()

        hooks = [block.register_forward_hook(start), block.register_full_backward_hook(start)]
        for hook in hooks if not calls else ():
            hook.remove()
        messages = Messages()
        ddp.zero_grad_buffer()
        with messages.counting():
            backward(ddp, seed, finish=True)
        counts.append(messages.operations)
        assert len(called) == calls
        assert_gradients(ddp, mean_gradients(seed))
    assert counts[2] == counts[1]


def train_with_everything(ddp: fe.DistributedDataParallel, starts_gathers: bool) -> None:
    """A loop with all calls that a program may make between forwards and backwards."""
    optimizer = reference.adamw(ddp.parameters())
    for step in range(3):
        ddp.zero_grad_buffer(zero_buffer=step == 1)
        for micro in range(2):
            needs_no_sync = ddp.ddp_config.overlap_grad_reduce and micro == 0
            with ddp.no_sync() if needs_no_sync else nullcontext():
                ddp(*vector_batch(2, 10 * step + 2 * micro + dist.get_rank())).backward()
            for module in late_modules(ddp.module):
                module.backward_dw()
        if step == 2:
            ddp.start_grad_sync()
        ddp.finish_grad_sync()
        ddp.scale_gradients(0.5)
        ddp.engine.clip_grad_norm_(1.0)
        optimizer.step()
        if starts_gathers:
            ddp.start_param_sync()


# Races, judged by ``trace_lanes.py``.


def traced(model: Any, config: fe.DistributedDataParallelConfig, **options: Any) -> None:
    tracer = Tracer(lambda waiter, awaited: False)
    with tracer:
        ddp = fe.DistributedDataParallel(model(), config, mesh_of(2, 2), **options)
        tracer.watch(ddp.engine)
        train_with_everything(ddp, starts_gathers=config.overlap_param_gather)
    assert all(order.num_checks for order in tracer.orders)


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", [*LEVEL_NAMES, "hfsdp"])
def test_a_wrapped_model_has_no_race(level: str, overlap: bool) -> None:
    levels = ("optim_grads_params", "optim") if level == "hfsdp" else (level, "no_shard")
    for fields in (
        {},
        {"bucket_size": 100, "check_for_nan_in_grad": True, "check_for_large_grads": True},
        {"bucket_size": 100, "gradient_reduce_div_fusion": False, "fp8_param_gather": True},
        {"bucket_size": 100, "align_param_gather": overlap, "fsdp_double_buffer": True},
    ):
        traced(Small, config_of(*levels, overlap=overlap, **fields))


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_delayed_and_converted_gradients_have_no_race(level: str, overlap: bool) -> None:
    for planned in (False, True):
        fields = {"delay_wgrad_compute": True, "fsdp_double_buffer": planned, "bucket_size": 200}
        traced(LateModel, config_of(level, overlap=overlap, **fields), units="blocks.*")
    config = config_of(level, overlap=overlap, bucket_size=100)
    traced(mixed_model, config)
