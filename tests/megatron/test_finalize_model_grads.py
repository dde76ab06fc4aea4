"""finalize_model_grads: which gradients it sums, its collectives, and its errors.

``test_megatron_core.py`` trains with it beside Megatron-Core's own.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.megatron.finalize_model_grads import AVERAGE_MARK, FIELDS, MARKS
from fsdp_engine.megatron.finalize_model_grads import finalize_model_grads as finalize
from fsdp_engine.megatron.process_groups import ModelParallelGroups, spanned_group
from fsdp_engine.strategies import LEVELS
from tests.megatron.configs import Chunk
from tests.messages import Messages
from tests.pool import on_ranks
from tests.reference import full_weights, held

DIM = 6
QK = SimpleNamespace(qk_layernorm=True)


def grid(**sizes: int) -> DeviceMesh:
    """All ranks, by axis: the last axis is the fastest."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def groups_of(mesh: DeviceMesh, **more: Any) -> ModelParallelGroups:
    """Each axis of the mesh as the group of its name."""
    axes = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    return ModelParallelGroups(**axes, **more)


def mark(module: nn.Module, *marks: str) -> None:
    for param in module.parameters():
        vars(param).update(dict.fromkeys(marks, True))


class Gate(nn.Module):
    """A router with an expert bias, which only affects the choice of experts, and counts of
    tokens."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, num_experts)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("local_tokens_per_expert", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        chosen = (scores + self.expert_bias).argmax(1)
        self.local_tokens_per_expert += torch.bincount(chosen, minlength=len(self.expert_bias))
        return scores.gather(1, chosen[:, None]).sigmoid()


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
        return self.bag() + sum(gate(x).sum() for gate in self.gates)


def fill(model: nn.Module, value: float) -> None:
    for param in model.parameters():
        held(param.grad).fill_(value)


def filled(model: nn.Module, value: float, mesh: Any, strategy: str, **options: Any) -> Chunk:
    """The model sharded, with gradients that are ``value`` everywhere."""
    chunk = Chunk(model, mesh, strategy, **options)
    model().backward()
    chunk.finish_grad_sync()
    chunk.num_finished = 0
    fill(model, value)
    return chunk


def assert_values(model: nn.Module, **expected: float) -> None:
    """Every element of each gradient has the value."""
    for name, param in model.named_parameters():
        if param.grad is not None:
            found = held(param.grad).unique().tolist()
            assert found in ([expected[name]], []), (name, found, expected[name])


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
    same_weights = [axis for axis in axes if axis != "pipeline"]
    data_mesh = mesh[same_weights[0]] if len(same_weights) == 1 else init_device_mesh("cpu", (4,))
    model = Bag("weight")
    chunk = filled(model, 3.0, data_mesh, strategy)
    has_stages = "pipeline" in axes
    counted = mesh.mesh.select(axes.index("pipeline"), 1) if has_stages else mesh.mesh
    factor = torch.tensor(data_mesh.size() / sum(2.0**each for each in counted.flatten().tolist()))
    power = 2 ** dist.get_rank()
    for tokens in (power, float(power), torch.tensor(power), torch.tensor([float(power)])):
        fill(model, 3.0)
        finalize([chunk], tokens, groups=groups_of(mesh))
        assert_values(model, weight=(3.0 * factor).item())
        assert bool(tokens == power)
    fill(model, 3.0)
    finalize([chunk], 0, groups=groups_of(mesh))  # no tokens at all count as one
    assert_values(model, weight=3.0 * data_mesh.size())


@pytest.mark.parametrize(
    "axes", [("tensor", "data"), ("context", "data"), ("expert", "data"), ("tensor", "expert")]
)
@on_ranks()
def test_token_counts_of_routers_are_summed_over_all_these_groups(axes: tuple[str, str]) -> None:
    mesh = grid(**dict.fromkeys(axes, 2))
    data_mesh = init_device_mesh("cpu", (4,)) if axes[0] == "context" else mesh[axes[1]]
    models = [nn.ModuleDict({name: Gate(4) for name in ("gate", "frozen", "teacher")})]
    gate, frozen, teacher = gates = models[0].values()
    frozen.frozen_expert_bias = True
    teacher.eval()
    models.append(nn.ModuleDict({"gate": Gate(3)}))
    models[1].gate.expert_bias = models[1].gate.local_tokens_per_expert = None
    chunks = [Chunk(model, data_mesh, "optim") for model in models]
    groups = groups_of(mesh)
    if axes[1] == "expert":  # experts are spread over data ranks
        groups = groups_of(mesh, data=mesh.get_group("expert"))
    for each in gates:
        each.local_tokens_per_expert[dist.get_rank()] = 2.0 ** dist.get_rank()
    finalize(chunks, groups=groups)
    # The counts 1, 2, 4, 8 are compared with their mean, 3.75. A sum over fewer ranks would give
    # other signs.
    moved = 1e-3 * torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert torch.equal(gate.expert_bias, moved)
    assert not frozen.expert_bias.any()
    assert not teacher.expert_bias.any()
    assert not any(each.local_tokens_per_expert.any() for each in gates)
    # Integer counts, and another update rate; experts with the mean count do not change.
    gate.local_tokens_per_expert = torch.full((4,), 2**30, dtype=torch.int64)
    gate.local_tokens_per_expert[3] += dist.get_rank() == 2
    config = SimpleNamespace(moe_router_bias_update_rate=0.5)
    for _ in range(2):
        finalize(chunks, groups=groups, config=config)
        assert torch.equal(gate.expert_bias, moved + torch.tensor([0.5, 0.5, 0.5, -0.5]))


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_marks_say_whether_gradients_of_a_group_are_summed_or_averaged(strategy: str) -> None:
    mesh = grid(model=2, data=2)
    groups = ModelParallelGroups(**dict.fromkeys(FIELDS, mesh.get_group("model")))
    norms = ["q_layernorm", "k_layernorm_bias"]
    model = Bag("own", *MARKS, *norms)
    for name in MARKS:
        setattr(model.get_parameter(name), name, True)
    own = 2.0 ** mesh.get_local_rank("model")
    chunk = filled(model, own, mesh["data"], strategy)
    names = [name for name, _ in model.named_parameters()]
    for config in (None, QK):
        for number, param in enumerate(model.parameters(), start=1):
            held(param.grad).fill_(number * own)
        finalize([chunk], groups=groups, config=config)
        sums = {*MARKS, *(norms if config is QK else ())}
        totals = {name: 3.0 if name in sums else own for name in names} | {AVERAGE_MARK: 1.5}
        assert_values(model, **{name: totals[name] * (names.index(name) + 1) for name in names})


@on_ranks(world_size=2)
def test_parameters_meet_in_the_order_of_registration_whatever_the_units() -> None:
    mesh = grid(pipeline=2, data=1)
    model = nn.ModuleDict({"first": Bag("weight"), "second": Bag("weight")})
    model.forward = lambda: model.first() + model.second()
    mark(model, "pipeline_parallel")
    unit = ("first", "second")[dist.get_rank()]
    chunk = filled(model, 1.0, mesh["data"], "no_shard", units=unit)
    # Buffers are in another order on the other rank: the root's come first.
    assert chunk.engine.units[1].name == unit
    fill(model.second, 10.0)
    finalize([chunk], groups=groups_of(mesh))
    assert_values(model, **{"first.weight": 2.0, "second.weight": 20.0})


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(world_size=2)
def test_replicas_in_the_chunks_of_a_virtual_pipeline_are_one_parameter(strategy: str) -> None:
    mesh = grid(pipeline=2, data=1)
    owns = [2.0 ** (2 * number + dist.get_rank()) for number in range(2)]
    models = [Bag("own", "embedder"), Bag("embedder", "own", "word")]
    for model in models:
        model.embedder.pipeline_parallel = True
    chunks = [
        filled(model, own, mesh["data"], strategy) for model, own in zip(models, owns, strict=True)
    ]
    finalize(chunks, groups=groups_of(mesh))
    for model, own in zip(models, owns, strict=True):
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
        mark(model, "sequence_parallel")
        policy = fe.MixedPrecisionPolicy(preserve_fp32_weights=False)
        chunk = filled(model, 2.0 ** dist.get_rank(), mesh["data"], "optim", mp_policy=policy)
        assert tuple(param.grad.dtype for param in model.parameters()) == dtypes
        finalize([chunk], groups=groups_of(mesh))
        assert_values(model, first=3.0, second=3.0)
        messages = Messages()
        with messages.counting():
            finalize([chunk], groups=groups_of(mesh))
        assert list(messages.calls.values()) == [1]
        assert list(messages.sent.values()) == [(2 * 15 + 2) * itemsize]


@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks()
def test_a_gradient_that_one_rank_of_a_group_has_all_of_them_get(strategy: str) -> None:
    mesh = grid(tensor=2, data=2)
    names = ("everywhere", "here", "nowhere")
    model = Bag(*names)
    mark(model, "sequence_parallel")
    chunk = Chunk(model, mesh["data"], strategy)
    # With weight decay, a zero gradient in the place of None would change the weight.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    place = mesh.get_local_rank("tensor")
    expected = dict.fromkeys(names, torch.ones(3, 5))
    for step in range(3):
        # Ranks use it alternately; in the second step no rank uses it.
        used = ["everywhere", "here"] if step != 1 and place == step // 2 else ["everywhere"]
        model(*used, factor=2.0**place).backward()
        finalize([chunk], groups=groups_of(mesh))
        found = {name for name, param in model.named_parameters() if param.grad is not None}
        assert found == ({"everywhere", "here"} if step != 1 else {"everywhere"}), step
        grads = {"everywhere": 3.0, "here": 2.0 ** (step // 2)}
        assert_values(model, **grads)
        optimizer.step()
        for name in found:
            expected[name] = expected[name] * (1 - 0.05 * 0.1) - 0.05 * grads[name]
        torch.testing.assert_close(full_weights(model), expected)
        # Another backward adds to the gradients that come from other ranks.
        model("everywhere", "here").backward()
        chunk.finish_grad_sync()
        assert_values(model, everywhere=4.0, here=1.0 + (step != 1) * grads["here"])
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks()
def test_each_part_is_one_all_reduce_after_the_first_call(strategy: str) -> None:
    mesh = grid(tensor=2, data=2)
    place = mesh.get_local_rank("data")
    # The two ranks of each of these groups stand for all model-parallel ranks; each field has its
    # own group.
    others = {
        field: [dist.new_group([each, each + 2]) for each in range(2)][place]
        for field in ("pipeline", "embedding", "position_embedding")
    }
    groups = groups_of(mesh, **others)
    model = BagWithRouters(*"abcdefgh")
    for name, each in zip("bcdef", MARKS, strict=True):
        setattr(model.bag.get_parameter(name), each, True)
    model.bag.a.pipeline_parallel = True
    model.bag.q_layernorm = nn.LayerNorm(3)
    chunk = Chunk(model, mesh["data"], strategy)
    model().backward()
    finalize([chunk], 3, groups=groups, config=QK)
    messages, waits = Messages(), Waits()
    tokens = torch.tensor(3)
    with waits, messages.counting():
        finalize([chunk], tokens, groups=groups, config=QK)
    spanned = spanned_group(torch.device("cpu"), groups.pipeline, groups.data, groups.context)
    assert spanned is not None
    assert spanned.size() == 4
    # In the tensor group, one call sums, averages and reduces norms of queries. The last two calls
    # are over the same ranks here.
    both_ends = (groups.embedding, groups.position_embedding)
    expected = (groups.pipeline, groups.tensor, *both_ends, spanned, spanned)
    assert messages.calls == Counter((group.group_name, "allreduce_") for group in expected)
    assert not messages.operations
    assert waits.names == []


class Waits(TorchDispatchMode):
    """Records the operations for which the host waits."""

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
    model.frozen.sequence_parallel = True
    model.frozen.requires_grad_(False)
    chunk = Chunk(model, mesh["data"], "optim")
    model().backward()
    finalize([chunk], groups=groups_of(mesh))
    messages = Messages()
    with messages.counting():
        finalize([chunk], groups=groups_of(mesh))
        finalize([], groups=groups_of(mesh))
    assert not messages.calls
    assert chunk.num_finished == 2
    assert model.frozen.grad is None


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
    finalize([chunk], groups=groups, config=SimpleNamespace())
    none = SimpleNamespace(moe_router_load_balancing_type=None)
    finalize([chunk], groups=groups, config=none)
    # This type of balancing does not use qb_beta.
    assert model.gate.qb_beta_count.item() == 2 * dist.get_rank()
    config = SimpleNamespace(
        moe_router_load_balancing_type="quantile_balancing", moe_router_quantile_balancing_ema=0.5
    )
    finalize([chunk], groups=groups, config=config)
    # 0.5 * [3, 0, -3] + 0.5 * [1, 0, 0.5], minus its mean
    expected = torch.tensor([2.0, 0.0, -1.25]) - 0.25
    assert torch.equal(model.gate.qb_beta, expected)
    assert model.teacher.qb_beta.tolist() == [3.0, 0.0, -3.0]
    for gate in model.values():
        assert not gate.qb_beta_accum.any()
        assert not gate.qb_beta_count
    with pytest.raises(ValueError, match="qb_beta of chunk 0: gate"):
        finalize([chunk], groups=ModelParallelGroups(), config=config)


@on_ranks(world_size=1)
def test_one_rank_alone_needs_no_groups() -> None:
    model = BagWithRouters("q_layernorm")
    chunk = Chunk(model, None, "optim_grads_params")
    model().backward()
    finalize(chunk, 4, groups=ModelParallelGroups(), config=QK)  # one chunk will do
    assert held(model.bag.q_layernorm.grad).unique().tolist() == [0.25]
    assert model.gates[1].expert_bias.abs().tolist() == [pytest.approx(1e-3)] * 2


def refused(words: str, kind: type[Exception], chunk: Any, *args: Any, **kwargs: Any) -> None:
    """An error on all ranks, before anything is sent or changed."""
    messages = Messages()
    with messages.counting(), pytest.raises(kind, match=words):
        finalize([chunk], *args, **kwargs)
    assert not messages.calls


@on_ranks(world_size=2)
def test_wrong_arguments_raise_before_any_communication() -> None:
    world = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    chunk = filled(Bag("weight", "other"), 1.0, None, "optim")
    gated = Chunk(nn.ModuleDict({"gate": Gate(2)}), None, "optim")
    some, none = ModelParallelGroups(tensor=world), ModelParallelGroups()
    gate, weight = gated.module.gate, chunk.module.weight
    data = ModelParallelGroups(data=alone)
    pair = torch.ones(2)
    rows: list[tuple[str, type[Exception], Any, Any, Any]] = [
        ("groups: expected ModelParallelGroups; found dict", TypeError, chunk, None, {}),
        (r"model_chunks: expected .*; found Bag", TypeError, chunk.module, None, none),
        ("num_tokens: expected a number or a tensor; found True", TypeError, chunk, True, none),
        (r"num_tokens: expected one element; found shape \(2,\)", ValueError, chunk, pair, none),
        (r"groups\.data, groups\.context: .* num_tokens", ValueError, chunk, 5, some),
        (r"all ranks of the chunk's mesh, \[0, 1\]; found", ValueError, chunk, 5, data),
        ("expert_bias of gate", ValueError, gated, None, some),
    ]
    for words, kind, given, tokens, groups in rows:
        refused(words, kind, given, tokens, groups=groups)
    for wrong in (torch.zeros(3), torch.zeros(2, 1), None):
        gate.local_tokens_per_expert = wrong
        words = r"gate: expected expert_bias and .*; found \(2,\) and"
        refused(words, ValueError, gated, groups=none)
    for each in ("sequence_parallel", "average_gradients_across_tp_domain"):
        setattr(weight, each, True)
    refused(r"weight: expected one of the marks .*; found both", ValueError, chunk, groups=some)
    with pytest.raises(TypeError, match="data: expected a ProcessGroup or None; found 3"):
        ModelParallelGroups(data=3)
    assert chunk.num_finished + gated.num_finished == 0
    assert_values(chunk.module, weight=1.0, other=1.0)


@on_ranks(world_size=2)
def test_a_missing_group_raises_before_any_communication() -> None:
    for each, field in MARKS.items():
        model = Bag("weight", "other")
        setattr(model.other, each, True)
        chunk = filled(model, 1.0, None, "optim")
        given = {"pipeline", "tensor", "embedding", "position_embedding", "data"} - {field}
        groups = ModelParallelGroups(**dict.fromkeys(given, dist.group.WORLD))
        words = rf"other: .* groups\.{field}, .* marked {each}; found None"
        refused(words, ValueError, chunk, 5, groups=groups)
        assert not chunk.num_finished
        assert_values(model, weight=1.0, other=1.0)
        # A frozen parameter needs no group, before or after the first call; nor does one whose mark
        # is False.
        model.other.requires_grad_(False)
        model.zero_grad()
        finalize([chunk], groups=groups)
        model.other.requires_grad_(True)
        setattr(model.other, each, False)
        finalize([chunk], groups=groups)


DIFFERENCES = {  # on rank 0 of the group, on rank 1
    "shape": (r"shape \(50, 5\), .*", r"weight: shape \(50, 4\), .*"),
    "slices": (r".*elements \[0, 250\), .*", r"weight: .*elements \[(0, 128|128, 250)\), .*"),
    "marks": (r".*", "nothing"),
    "average": (r".*, sum", r"weight: .*, average"),
}


@on_ranks()
def test_unequal_slices_raise_on_every_rank_of_the_group() -> None:
    mesh = grid(tensor=2, data=2)
    for what, (first, other) in DIFFERENCES.items():
        differs = what if mesh.get_local_rank("tensor") == 1 else None
        model = Bag("weight", shape=(50, 4) if differs == "shape" else (50, 5))
        if differs != "marks":
            mark(model, list(MARKS)[2 if differs == "average" else 1])
        strategy = "optim" if differs == "slices" else "no_shard"
        chunk = filled(model, 1.0, mesh["data"], strategy)
        words = (
            rf"groups\.tensor: .*\[weight: {first}\] on its rank 0 and \[{other}\] on its rank 1"
        )
        with pytest.raises(ValueError, match=words):
            finalize([chunk], groups=groups_of(mesh))
        assert not chunk.num_finished
        assert_values(model, weight=1.0)
