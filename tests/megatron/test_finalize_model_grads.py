"""finalize_model_grads: each part compared with one process, its collectives, and its errors."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.megatron.finalize_model_grads import finalize_model_grads
from fsdp_engine.megatron.process_groups import ModelParallelGroups, spanned_group
from fsdp_engine.strategies import LEVELS
from tests.megatron.model_parallel import (
    DIM,
    TOKENS,
    VOCAB,
    Chunk,
    ConditionalModel,
    Expert,
    Gate,
    TensorModel,
    TiedModel,
    grid,
    groups_of,
    mark,
    mixture_loss,
    run_stage,
)
from tests.messages import Messages
from tests.pool import on_ranks
from tests.reference import full_weights, relative_error

QK = SimpleNamespace(qk_layernorm=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Weight decay detects gradients that should be None; SGD detects factors that Adam would hide.
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], label: object) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = relative_error(value, expected[name])
        assert error < 2e-5, f"{label}: {name} is off by {error:.1e}"


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, fe.FlatDTensor) else tensor.view(-1)


# --- against one process ---


def token_batches(num_ranks: int, seed: int) -> list[list[Tensor]]:
    """(input, target, weight) by rank, with uneven numbers of tokens that count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rank in range(num_ranks):
        x, target = torch.randn(2, TOKENS, DIM, generator=generator)
        batches.append([x, target, (torch.arange(TOKENS) < 7 - 4 * rank - seed % 2).float()])
    return batches


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_tensor_2_x_data_2_trains_as_one_process(strategy: str, frozen: bool) -> None:
    mesh = grid(tensor=2, data=2)
    groups = groups_of(mesh)
    alone = TensorModel()
    if frozen:
        alone.blocks[0].norm.requires_grad_(False)
        alone.blocks[1].up.requires_grad_(False)
        alone.blocks[1].q_layernorm.weight.requires_grad_(False)
    part = alone.part(mesh.get_group("tensor"))
    chunk = Chunk(part, mesh["data"], strategy)
    ours, theirs = sgd(part), sgd(alone)
    place = mesh.get_local_rank("data")
    for step in range(3):
        micros = [token_batches(2, 2 * step + micro) for micro in range(2)]
        total = sum(batch[2].sum() for micro in micros for batch in micro)
        (sum(alone(*batch) for micro in micros for batch in micro) / total).backward()
        theirs.step()
        theirs.zero_grad()
        with chunk.engine.no_sync():
            part(*micros[0][place]).backward()
        part(*micros[1][place]).backward()
        tokens = sum(micro[place][2].sum() for micro in micros)
        finalize_model_grads([chunk], tokens, groups=groups, config=QK)
        ours.step()
        ours.zero_grad()
        expected = weights_of(alone.part(mesh.get_group("tensor")))
        assert_weights(full_weights(part), expected, f"step {step}")
    assert chunk.num_finished == 3


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_pipeline_2_x_data_2_with_a_tied_embedding_trains_as_one_process(
    strategy: str, frozen: bool
) -> None:
    mesh = grid(pipeline=2, data=2)
    ends = [dist.new_group([rank, rank + 2]) for rank in range(2)]
    places = [dist.new_group([rank, rank + 2]) for rank in range(2)]
    place, stage = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    groups = groups_of(mesh, embedding=ends[place], position_embedding=places[place])
    alone = TiedModel()
    if frozen:
        alone.first.word.requires_grad_(False)
    part = alone.part(stage)
    chunk = Chunk(part, mesh["data"], strategy, units=["word", "position"])
    ours, theirs = sgd(part), sgd(alone)
    for step in range(3):
        lengths = (TOKENS, 3 + step)
        batches = [torch.arange(n * 7, n * 8) * (step + 3) % VOCAB for n in lengths]
        (sum(alone(batch) for batch in batches) / sum(lengths)).backward()
        theirs.step()
        theirs.zero_grad()
        run_stage(part, mesh.get_group("pipeline"), (lengths[place], DIM), batches[place])
        # The values of stages other than the last are ignored.
        finalize_model_grads([chunk], lengths[place] if stage else 10**6, groups=groups)
        ours.step()
        ours.zero_grad()
        expected = weights_of(alone.part(stage))
        assert_weights(full_weights(part), expected, f"step {step}")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_pipeline_4_with_a_conditional_embedder_trains_as_one_process(
    strategy: str, frozen: bool
) -> None:
    mesh = grid(pipeline=4, data=1)
    stage = mesh.get_local_rank("pipeline")
    alone = ConditionalModel(4)
    if frozen:
        alone.stages[0].embedder.weight.requires_grad_(False)
    part = alone.part(stage)
    chunk = Chunk(part, mesh["data"], strategy)
    ours, theirs = sgd(part), sgd(alone)
    for step in range(3):
        x, condition = torch.randn(5, DIM), torch.randn(5, 3)
        alone(x, condition).backward()
        theirs.step()
        theirs.zero_grad()
        if stage == 3:
            module: nn.Module = WithLoss(part)
        else:
            module = part
        extra = (x, condition) if stage == 0 else (condition,)
        run_stage(module, mesh.get_group("pipeline"), (5, DIM), *extra)
        finalize_model_grads([chunk], groups=groups_of(mesh))
        ours.step()
        ours.zero_grad()
        expected = weights_of(alone.part(stage))
        assert_weights(full_weights(part), expected, f"step {step}")


class WithLoss(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.stage(*inputs).square().mean()


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_experts_2_x_expert_data_2_train_as_one_process(strategy: str) -> None:
    mesh = grid(copies=2, expert=2)
    rank, expert_group = dist.get_rank(), mesh.get_group("expert")
    groups = ModelParallelGroups(data=dist.group.WORLD, expert=expert_group)
    gate, experts = Gate(2), {0: Expert(), 1: Expert()}
    gate_part = copy.deepcopy(gate)
    number = expert_group.rank()
    expert_part = copy.deepcopy(experts[number])
    for param in expert_part.parameters():
        param.allreduce = False  # two experts see the tokens of four ranks on two
    everybody = init_device_mesh("cpu", (4,))
    chunks = [
        Chunk(gate_part, everybody, strategy),
        Chunk(expert_part, everybody, strategy, expert_mesh=mesh["copies"]),
    ]
    ours, theirs = (
        [sgd(model) for model in models]
        for models in ((gate_part, expert_part), (gate, experts[0], experts[1]))
    )
    config = SimpleNamespace(moe_router_bias_update_rate=0.05)
    moved = False
    for step in range(4):
        # One shift for all tokens: without the bias, most would go to one expert.
        lengths = [2 + (rank + step) % 2 * 2 for rank in range(0, 4, 2)]
        batches = [torch.randn(lengths[rank // 2], DIM) + 0.5 for rank in range(4)]
        total = sum(map(len, batches))
        (sum(mixture_loss(gate, experts, x, None) for x in batches) / total).backward()
        counts = gate.local_tokens_per_expert
        gate.expert_bias += 0.05 * torch.sign(counts.mean() - counts)
        moved = moved or bool(counts[0] != counts[1])
        counts.zero_()
        mixture_loss(gate_part, {number: expert_part}, batches[rank], expert_group).backward()
        finalize_model_grads(chunks, len(batches[rank]), groups=groups, config=config)
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_weights(full_weights(gate_part), weights_of(gate), f"step {step}")
        expected = weights_of(experts[number])
        assert_weights(full_weights(expert_part), expected, f"step {step}")
        assert torch.equal(gate_part.expert_bias, gate.expert_bias)
        assert not gate_part.local_tokens_per_expert.any()
    assert moved


# --- by values: whose gradients were summed ---


class Bag(nn.Module):
    """Parameters of these names; forward is the sum of some, or all, times a factor."""

    def __init__(self, *names: str, shape: tuple[int, ...] = (3, 5)) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, *names: str, factor: float = 1.0) -> Tensor:
        used = [self.get_parameter(name) for name in names] or list(self.parameters())
        return factor * torch.stack([param.sum() for param in used]).sum()


class BagWithRouters(nn.Module):
    """A bag, and two routers that see three tokens."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.bag = Bag(*names)
        self.gates = nn.ModuleList([Gate(3), Gate(2)])

    def forward(self) -> Tensor:
        x = torch.ones(3, DIM)
        return self.bag() + sum(gate(x)[1].sum() for gate in self.gates)


def filled(model: nn.Module, value: float, mesh: Any, strategy: str, **options: Any) -> Chunk:
    """The model sharded, with gradients that are ``value`` everywhere."""
    chunk = Chunk(model, mesh, strategy, **options)
    model().backward()
    chunk.finish_grad_sync()
    chunk.num_finished = 0
    for param in model.parameters():
        local(param.grad).fill_(value)
    return chunk


def values(model: nn.Module) -> dict[str, float | None]:
    """The one value of each gradient; nan where there are several. Of an empty slice, None."""
    found: dict[str, float | None] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            unique = local(param.grad).unique().tolist()
            found[name] = (unique[0] if len(unique) == 1 else float("nan")) if unique else None
    return found


def assert_values(model: nn.Module, **expected: float) -> None:
    for name, value in values(model).items():
        assert value in (expected[name], None), (name, value, expected[name])


@pytest.mark.parametrize("axes", [("tensor", "data"), ("data", "tensor")])
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_the_tensor_group_and_no_other_is_summed_over(strategy: str, axes: tuple[str, str]) -> None:
    mesh = grid(**dict.fromkeys(axes, 2))
    model = Bag("sequence", "average", "q_layernorm", "k_layernorm_bias", "own")
    model.sequence.sequence_parallel = True
    model.average.average_gradients_across_tp_domain = True
    own = 2.0 ** dist.get_rank()
    chunk = filled(model, own, mesh["data"], strategy)
    total = sum(2.0**rank for rank in dist.get_process_group_ranks(mesh.get_group("tensor")))
    finalize_model_grads([chunk], groups=groups_of(mesh), config=QK)
    norms = {"q_layernorm": total, "k_layernorm_bias": total}
    assert_values(model, sequence=total, average=total / 2, own=own, **norms)
    # Without the option, norms of queries and keys are like all others.
    for param in model.parameters():
        local(param.grad).fill_(own)
    finalize_model_grads([chunk], groups=groups_of(mesh))
    norms = {"q_layernorm": own, "k_layernorm_bias": own}
    assert_values(model, sequence=total, average=total / 2, own=own, **norms)


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_pipeline_and_embedding_groups_are_each_summed_over(strategy: str) -> None:
    mesh = grid(pipeline=4, data=1)
    rank = dist.get_rank()
    ends, starts = dist.new_group([0, 3]), dist.new_group([0, 1])
    model = Bag("embedder", "word", "position", "own")
    model.embedder.pipeline_parallel = True
    if rank in (0, 3):
        model.word.shared_embedding = True
    if rank in (0, 1):
        model.position.position_embedding = True
    own = 2.0**rank
    chunk = filled(model, own, mesh["data"], strategy)
    groups = groups_of(mesh, embedding=ends, position_embedding=starts)
    finalize_model_grads([chunk], groups=groups)
    word = 9.0 if rank in (0, 3) else own
    position = 3.0 if rank in (0, 1) else own
    assert_values(model, embedder=15.0, word=word, position=position, own=own)


@pytest.mark.parametrize(
    "axes",
    [("pipeline", "data"), ("data", "pipeline"), ("context", "data"), ("pipeline", "context")],
)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks()
def test_tokens_are_those_of_the_last_stage_summed_over_data_and_context(
    strategy: str, axes: tuple[str, str]
) -> None:
    mesh = grid(**dict.fromkeys(axes, 2))
    rank = dist.get_rank()
    same_weights = [axis for axis in axes if axis != "pipeline"]
    data_mesh = mesh[same_weights[0]] if len(same_weights) == 1 else init_device_mesh("cpu", (4,))
    model = Bag("weight")
    chunk = filled(model, 3.0, data_mesh, strategy)
    counted = mesh.mesh
    if "pipeline" in axes:
        counted = counted.select(axes.index("pipeline"), 1)
    total = sum(2.0**each for each in counted.flatten().tolist())
    factor = torch.tensor(data_mesh.size() / total)
    for number, tokens in enumerate(
        (2**rank, 2.0**rank, torch.tensor(2**rank), torch.tensor([2.0**rank]))
    ):
        for param in model.parameters():
            local(param.grad).fill_(3.0)
        before = tokens.clone() if isinstance(tokens, Tensor) else tokens
        finalize_model_grads([chunk], tokens, groups=groups_of(mesh))
        assert_values(model, weight=(3.0 * factor).item())
        assert bool(before == tokens), f"case {number} was changed"


@on_ranks(world_size=2)
def test_no_tokens_at_all_count_as_one() -> None:
    model = Bag("weight")
    chunk = filled(model, 3.0, None, "optim")
    finalize_model_grads([chunk], 0, groups=ModelParallelGroups(data=dist.group.WORLD))
    assert_values(model, weight=6.0)


@pytest.mark.parametrize(
    "axes", [("tensor", "data"), ("context", "data"), ("expert", "data"), ("tensor", "expert")]
)
@on_ranks()
def test_token_counts_of_routers_are_summed_over_all_these_groups(axes: tuple[str, str]) -> None:
    mesh = grid(**dict.fromkeys(axes, 2))
    data_mesh = init_device_mesh("cpu", (4,)) if axes[0] == "context" else mesh[axes[1]]
    models = [nn.ModuleDict({"gate": Gate(4)}), nn.ModuleDict({"gate": Gate(3)})]
    models[1].gate.expert_bias = models[1].gate.local_tokens_per_expert = None
    chunks = [Chunk(model, data_mesh, "optim") for model in models]
    gate = models[0].gate
    gate.local_tokens_per_expert[dist.get_rank()] = 2.0 ** dist.get_rank()
    groups = groups_of(mesh)
    if axes[1] == "expert":  # experts are spread over data ranks
        groups = groups_of(mesh, data=mesh.get_group("expert"))
    finalize_model_grads(chunks, groups=groups)
    # 1, 2, 4, 8 against 3.75; every smaller set of ranks would move some other way.
    assert torch.equal(gate.expert_bias, 1e-3 * torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert not gate.local_tokens_per_expert.any()
    # Integers, and a rate of one's own; equal counts move nothing.
    gate.local_tokens_per_expert = torch.zeros(4, dtype=torch.int64)
    gate.local_tokens_per_expert += 2**30
    gate.local_tokens_per_expert[3] += dist.get_rank() == 2
    config = SimpleNamespace(moe_router_bias_update_rate=0.5)
    finalize_model_grads(chunks, groups=groups, config=config)
    moved = 1e-3 * torch.tensor([1.0, 1.0, -1.0, -1.0]) + torch.tensor([0.5, 0.5, 0.5, -0.5])
    assert torch.equal(gate.expert_bias, moved)
    finalize_model_grads(chunks, groups=groups, config=config)
    assert torch.equal(gate.expert_bias, moved)


class TwoBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bag("weight"), Bag("weight")

    def forward(self) -> Tensor:
        return self.first() + self.second()


@on_ranks(world_size=2)
def test_parameters_meet_in_the_order_of_registration_whatever_the_units() -> None:
    mesh = grid(pipeline=2, data=1)
    model = TwoBags()
    mark(model, pipeline_parallel=True)
    unit = ("first", "second")[dist.get_rank()]
    chunk = filled(model, 1.0, mesh["data"], "no_shard", units=unit)
    # Buffers are in another order on the other rank: the root's come first.
    assert chunk.engine.units[1].name == unit
    local(model.second.weight.grad).fill_(10.0)
    finalize_model_grads([chunk], groups=groups_of(mesh))
    assert values(model) == {"first.weight": 2.0, "second.weight": 20.0}


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(world_size=2)
def test_replicas_in_the_chunks_of_a_virtual_pipeline_are_one_parameter(strategy: str) -> None:
    mesh = grid(pipeline=2, data=1)
    rank = dist.get_rank()
    models = [Bag("own", "embedder"), Bag("embedder", "own", "word")]
    for model in models:
        model.embedder.pipeline_parallel = True
    chunks = [
        filled(model, 2.0 ** (2 * number + rank), mesh["data"], strategy)
        for number, model in enumerate(models)
    ]
    finalize_model_grads(chunks, groups=groups_of(mesh))
    for number, model in enumerate(models):
        own = 2.0 ** (2 * number + rank)
        assert_values(model, embedder=15.0, own=own, word=own)


@on_ranks(world_size=2)
def test_the_all_reduce_has_the_widest_gradient_dtype_and_at_least_fp32() -> None:
    mesh = grid(tensor=2, data=1)
    for dtypes, itemsize in (
        ((torch.bfloat16, torch.bfloat16), 4),
        ((torch.bfloat16, torch.float32), 4),
        ((torch.float32, torch.float64), 8),
    ):
        model = Bag("first", "second")
        for param, dtype in zip(model.parameters(), dtypes, strict=True):
            param.data = param.data.to(dtype)
        mark(model, sequence_parallel=True)
        policy = fe.MixedPrecisionPolicy(preserve_fp32_weights=False)
        chunk = filled(model, 2.0 ** dist.get_rank(), mesh["data"], "optim", mp_policy=policy)
        assert tuple(param.grad.dtype for param in model.parameters()) == dtypes
        finalize_model_grads([chunk], groups=groups_of(mesh))
        assert_values(model, first=3.0, second=3.0)
        messages = Messages()
        with messages.counting():
            finalize_model_grads([chunk], groups=groups_of(mesh))
        assert list(messages.calls.values()) == [1]
        assert list(messages.sent.values()) == [(2 * 15 + 2) * itemsize]


# --- missing gradients ---


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_a_gradient_that_one_rank_of_a_group_has_all_of_them_get(strategy: str) -> None:
    mesh = grid(tensor=2, data=2)
    groups = groups_of(mesh)
    names = ("everywhere", "here", "nowhere")
    model = Bag(*names)
    mark(model, sequence_parallel=True)
    chunk = Chunk(model, mesh["data"], strategy)
    optimizer = sgd(model)
    place = mesh.get_local_rank("tensor")
    expected = dict.fromkeys(names, torch.ones(3, 5))
    for step in range(3):
        # Ranks use it alternately; in the second step no rank uses it.
        used = [name for name in names if name == "everywhere" or (name == "here" and step != 1)]
        if place != step // 2:
            used = ["everywhere"]
        model(*used, factor=2.0**place).backward()
        finalize_model_grads([chunk], groups=groups)
        found = {name for name, param in model.named_parameters() if param.grad is not None}
        assert found == ({"everywhere", "here"} if step != 1 else {"everywhere"}), step
        grads = {"everywhere": 3.0, "here": 2.0 ** (step // 2)}
        assert_values(model, **grads)
        optimizer.step()
        optimizer.zero_grad()
        for name in found:
            expected[name] = expected[name] * (1 - 0.05 * 0.1) - 0.05 * grads[name]
        assert_weights(full_weights(model), expected, f"step {step}")


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(world_size=2)
def test_a_gradient_from_another_source_is_accumulated_and_cleared(
    strategy: str,
) -> None:
    mesh = grid(tensor=2, data=1)
    model = Bag("weight")
    mark(model, sequence_parallel=True)
    chunk = Chunk(model, mesh["data"], strategy)
    if dist.get_rank() == 0:
        with chunk.engine.no_sync():
            model().backward()
    finalize_model_grads([chunk], groups=groups_of(mesh))
    assert_values(model, weight=1.0)
    model().backward()
    chunk.finish_grad_sync()
    assert_values(model, weight=2.0)
    model.zero_grad()
    model().backward()
    chunk.finish_grad_sync()
    assert_values(model, weight=1.0)


# --- collectives ---


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks()
def test_each_part_is_one_all_reduce_after_the_first_call(strategy: str) -> None:
    mesh = grid(tensor=2, data=2)
    place = mesh.get_local_rank("data")
    # With four ranks, the same two play all parts of model parallelism; the groups differ.
    others = {
        field: [dist.new_group([each, each + 2]) for each in range(2)][place]
        for field in ("pipeline", "embedding", "position_embedding")
    }
    groups = groups_of(mesh, **others)
    model = BagWithRouters(*"abcdefgh")
    bag = model.bag
    for name, marks in {
        "a": {"pipeline_parallel": True},
        "b": {"pipeline_parallel": True},
        "c": {"sequence_parallel": True},
        "d": {"average_gradients_across_tp_domain": True},
        "e": {"shared_embedding": True},
        "f": {"position_embedding": True},
    }.items():
        vars(bag.get_parameter(name)).update(marks)
    bag.q_layernorm = nn.LayerNorm(3)
    chunk = Chunk(model, mesh["data"], strategy)
    model().backward()
    finalize_model_grads([chunk], 3, groups=groups, config=QK)
    messages, waits = Messages(), Waits()
    tokens = torch.tensor(3)
    with waits, messages.counting():
        finalize_model_grads([chunk], tokens, groups=groups, config=QK)
    spanned = spanned_group(torch.device("cpu"), groups.pipeline, groups.data, groups.context)
    assert spanned is not None
    assert spanned.size() == 4
    expected = [
        groups.pipeline,  # part 2
        groups.tensor,  # part 3: sums, averages and norms of queries
        groups.embedding,  # part 4
        groups.position_embedding,
        spanned,  # part 5, and part 6: here the same ranks
        spanned,
    ]
    names = Counter((group.group_name, "allreduce_") for group in expected)  # type: ignore[union-attr]
    assert messages.calls == names
    assert not messages.operations
    assert waits.names == []


class Waits(TorchDispatchMode):
    """Within it, notes the operations for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@on_ranks(world_size=2)
def test_without_marks_routers_and_tokens_nothing_is_sent() -> None:
    mesh = grid(tensor=2, data=1)
    model = Bag("weight", "frozen")
    vars(model.frozen).update(sequence_parallel=True)
    model.frozen.requires_grad_(False)
    chunk = filled_trainable(model, mesh["data"])
    finalize_model_grads([chunk], groups=groups_of(mesh))
    messages = Messages()
    with messages.counting():
        finalize_model_grads([chunk], groups=groups_of(mesh))
        finalize_model_grads([], groups=groups_of(mesh))
    assert not messages.calls
    assert chunk.num_finished == 2
    assert model.frozen.grad is None


def filled_trainable(model: nn.Module, mesh: Any) -> Chunk:
    chunk = Chunk(model, mesh, "optim")
    model().backward()
    return chunk


@on_ranks()
def test_the_spanned_group_is_created_once_and_only_if_it_is_new() -> None:
    mesh = grid(pipeline=2, data=2)
    cpu = torch.device("cpu")
    pipeline, data = mesh.get_group("pipeline"), mesh.get_group("data")
    assert spanned_group(cpu, None) is None
    assert spanned_group(cpu, None, data) is data
    both = spanned_group(cpu, pipeline, data)
    assert both is not None
    assert dist.get_process_group_ranks(both) == [0, 1, 2, 3]
    assert spanned_group(cpu, pipeline, None, data) is both
    assert spanned_group(cpu, data, pipeline) is both
    assert spanned_group(cpu, data, dist.group.WORLD) is dist.group.WORLD


# --- errors ---


@pytest.mark.parametrize(
    ("parameter_mark", "field"),
    [
        ("pipeline_parallel", "pipeline"),
        ("sequence_parallel", "tensor"),
        ("average_gradients_across_tp_domain", "tensor"),
        ("shared_embedding", "embedding"),
        ("position_embedding", "position_embedding"),
    ],
)
@on_ranks(world_size=2)
def test_a_missing_group_raises_before_any_communication(parameter_mark: str, field: str) -> None:
    model = Bag("weight", "other")
    setattr(model.other, parameter_mark, True)
    chunk = filled(model, 1.0, None, "optim")
    given = {"pipeline", "tensor", "embedding", "position_embedding", "data"} - {field}
    groups = ModelParallelGroups(**dict.fromkeys(given, dist.group.WORLD))
    messages = Messages()
    expected = rf"other: .* groups\.{field}, .* marked {parameter_mark}; found None"
    with messages.counting(), pytest.raises(ValueError, match=expected):
        finalize_model_grads([chunk], 5, groups=groups)
    assert not messages.calls
    assert not chunk.num_finished
    assert_values(model, weight=1.0, other=1.0)
    # One that is frozen, before or after, needs none; nor does a mark that says False.
    model.other.requires_grad_(False)
    model.zero_grad()
    finalize_model_grads([chunk], groups=groups)
    model.other.requires_grad_(True)
    setattr(model.other, parameter_mark, False)
    finalize_model_grads([chunk], groups=groups)


@on_ranks(world_size=2)
def test_frozen_biases_and_those_in_evaluation_mode_do_not_change() -> None:
    model = nn.ModuleDict({name: Gate(2) for name in ("free", "frozen", "teacher")})
    model.frozen.frozen_expert_bias = True
    model.teacher.eval()
    chunk = Chunk(model, None, "optim")
    for gate in model.values():
        gate.local_tokens_per_expert[0] = 1.0
    finalize_model_grads([chunk], groups=ModelParallelGroups(data=dist.group.WORLD))
    assert torch.equal(model.free.expert_bias, 1e-3 * torch.tensor([-1.0, 1.0]))
    assert not any(model[name].expert_bias.any() for name in ("frozen", "teacher"))
    assert not any(gate.local_tokens_per_expert.any() for gate in model.values())


class QuantileGate(nn.Module):
    """A layer with the buffers of Megatron-Core's quantile balancing."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, 3)
        self.register_buffer("qb_beta", torch.tensor([3.0, 0.0, -3.0]))
        self.register_buffer("qb_beta_accum", torch.zeros(3), persistent=False)
        self.register_buffer("qb_beta_count", torch.zeros((), dtype=torch.long), persistent=False)


@on_ranks(world_size=2)
def test_biases_of_quantile_balancing_are_averaged_over_microbatches_and_ranks() -> None:
    model = nn.ModuleDict({"gate": QuantileGate(), "teacher": QuantileGate()})
    model.teacher.eval()
    chunk = Chunk(model, None, "optim_grads_params")
    for gate in model.values():
        gate.qb_beta_accum += torch.tensor([4.0, 0.0, 2.0]) if dist.get_rank() else 0.0
        gate.qb_beta_count += 2 * dist.get_rank()
    groups = ModelParallelGroups(data=dist.group.WORLD)
    finalize_model_grads([chunk], groups=groups, config=SimpleNamespace())
    assert model.gate.qb_beta_count.item() == 2 * dist.get_rank()  # another balancing
    config = SimpleNamespace(
        moe_router_load_balancing_type="quantile_balancing", moe_router_quantile_balancing_ema=0.5
    )
    finalize_model_grads([chunk], groups=groups, config=config)
    # 0.5 * [3, 0, -3] + 0.5 * [1, 0, 0.5], minus its mean
    expected = torch.tensor([2.0, 0.0, -1.25]) - 0.25
    assert torch.equal(model.gate.qb_beta, expected)
    assert model.teacher.qb_beta.tolist() == [3.0, 0.0, -3.0]
    for gate in model.values():
        assert not gate.qb_beta_accum.any()
        assert not gate.qb_beta_count
    with pytest.raises(ValueError, match="qb_beta of chunk 0: gate"):
        finalize_model_grads([chunk], groups=ModelParallelGroups(), config=config)


@on_ranks(world_size=2)
def test_token_counts_need_the_ranks_of_the_mesh() -> None:
    model = nn.ModuleDict({"bag": Bag("weight")})
    chunk = Chunk(model, None, "optim")
    groups = ModelParallelGroups(tensor=dist.group.WORLD)
    messages = Messages()
    with (
        messages.counting(),
        pytest.raises(ValueError, match=r"groups\.data, groups\.context: .* num_tokens"),
    ):
        finalize_model_grads([chunk], 5, groups=groups)
    assert not messages.calls
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"all ranks of the chunk's mesh, \[0, 1\]; found"):
        finalize_model_grads([chunk], 5, groups=ModelParallelGroups(data=alone))
    gated = Chunk(nn.ModuleDict({"gate": Gate(2)}), None, "optim")
    with pytest.raises(ValueError, match="expert_bias of gate"):
        finalize_model_grads([gated], groups=groups)
    assert not chunk.num_finished
    assert not gated.num_finished


@on_ranks(world_size=1)
def test_one_rank_alone_needs_no_groups() -> None:
    model = BagWithRouters("q_layernorm")
    chunk = Chunk(model, None, "optim_grads_params")
    model().backward()
    finalize_model_grads([chunk], 4, groups=ModelParallelGroups(), config=QK)
    assert values(model)["bag.q_layernorm"] == 0.25
    assert model.gates[1].expert_bias.abs().tolist() == [pytest.approx(1e-3)] * 2


DIFFERENCES = {  # on rank 0 of the group, on rank 1
    "shape": (r"shape \(50, 5\), .*", r"weight: shape \(50, 4\), .*"),
    "slices": (r".*elements \[0, 250\), .*", r"weight: .*elements \[(0, 128|128, 250)\), .*"),
    "marks": (r".*", "nothing"),
    "average": (r".*, sum", r"weight: .*, average"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@on_ranks()
def test_unequal_slices_raise_on_every_rank_of_the_group(what: str) -> None:
    mesh = grid(tensor=2, data=2)
    second = mesh.get_local_rank("tensor") == 1
    model = Bag("weight", shape=(50, 4) if second and what == "shape" else (50, 5))
    if not (second and what == "marks"):
        average = second and what == "average"
        name = "average_gradients_across_tp_domain" if average else "sequence_parallel"
        setattr(model.weight, name, True)
    strategy = "optim" if second and what == "slices" else "no_shard"
    chunk = filled(model, 1.0, mesh["data"], strategy)
    first, other = DIFFERENCES[what]
    expected = rf"groups\.tensor: .*\[weight: {first}\] on its rank 0 and \[{other}\] on its rank 1"
    with pytest.raises(ValueError, match=expected):
        finalize_model_grads([chunk], groups=groups_of(mesh))
    assert not chunk.num_finished
    assert_values(model, weight=1.0)


@on_ranks(world_size=1)
def test_wrong_arguments_raise() -> None:
    model = Bag("weight")
    chunk = filled(model, 1.0, None, "optim")
    groups = ModelParallelGroups()
    with pytest.raises(TypeError, match="groups: expected ModelParallelGroups; found dict"):
        finalize_model_grads([chunk], groups={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model_chunks: expected .*; found Bag"):
        finalize_model_grads([model], groups=groups)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="num_tokens: expected a number or a tensor; found True"):
        finalize_model_grads([chunk], True, groups=groups)
    with pytest.raises(ValueError, match=r"num_tokens: expected one element; found shape \(2,\)"):
        finalize_model_grads([chunk], torch.ones(2), groups=groups)
    with pytest.raises(TypeError, match="data: expected a ProcessGroup or None; found 3"):
        ModelParallelGroups(data=3)  # type: ignore[arg-type]
    assert not chunk.num_finished
    finalize_model_grads(chunk, 2, groups=groups)  # type: ignore[arg-type]  # one chunk will do
    assert_values(model, weight=0.5)


@on_ranks(world_size=1)
def test_contradicting_marks_raise() -> None:
    model = Bag("weight")
    mark(model, sequence_parallel=True, average_gradients_across_tp_domain=True)
    chunk = filled(model, 1.0, None, "optim")
    with pytest.raises(ValueError, match=r"weight: expected one of the marks .*; found both"):
        finalize_model_grads([chunk], groups=ModelParallelGroups(tensor=dist.group.WORLD))


@on_ranks(world_size=1)
def test_a_bias_and_counts_of_different_shapes_raise() -> None:
    model = nn.ModuleDict({"gate": Gate(2)})
    chunk = Chunk(model, None, "optim")
    for wrong in (torch.zeros(3), torch.zeros(2, 1), None):
        model.gate.local_tokens_per_expert = wrong
        with pytest.raises(
            ValueError, match=r"gate: expected expert_bias and .*; found \(2,\) and"
        ):
            finalize_model_grads([chunk], groups=ModelParallelGroups())
