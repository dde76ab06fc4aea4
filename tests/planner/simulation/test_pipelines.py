"""Simulated steps of pipelines: times by hand, memory and order of real ranks, messages, quick
simulations from the costs of stages."""

from __future__ import annotations

import functools
import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_engine as fe
from fsdp_engine import extension_list
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.planner.simulation import pipeline as pipelines
from fsdp_engine.planner.simulation import pipeline_job
from fsdp_engine.planner.simulation.machine import Link
from fsdp_engine.planner.simulation.pipeline_job import Action, PipelineJob
from fsdp_engine.planner.simulation.stage_costs import StageCosts, stage_costs
from fsdp_engine.planner.simulation.stage_messages import is_stage_lane
from tests.extensions.pipelines import scene
from tests.models import Mlp
from tests.planner.simulation.live_storages import LiveStorages
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.scene import (
    FLOPS,
    ROWS,
    WIDTH,
    pipelined,
    plain_machine,
    product_loss,
)
from tests.planner.simulation.small_llama import llama
from tests.pool import Ranks

thorough = partial(pytest.param, marks=pytest.mark.thorough)
PRODUCT = 2 * ROWS * WIDTH * WIDTH / FLOPS
TURN = 6 * PRODUCT  # two linears: one product in forward each, two in backward


class Linears(nn.Sequential):
    """Linears after a gain, by which the first one has a gradient of its input in all stages."""

    def __init__(self, count: int = 2) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


def linears(index: int, num_stages: int) -> nn.Module:
    return Linears()


def wider(index: int, num_stages: int) -> nn.Module:
    """The second of two stages has twice the linears."""
    return Linears(2 + 2 * index)


def simulated(schedule: Any = "1F1B", **options: Any) -> fe.PipelineSimulation:
    """A step of stages of two linears."""
    given = {
        "machine": plain_machine(),
        "optimizer": torch.optim.SGD,
        "min_unit_size": 0,
        **options,
    }
    return pipelined(given.pop("stages", linears), torch.zeros(ROWS, WIDTH), schedule, **given)


FOUR = {"pipeline": 4, "microbatches": 8}
INTERLEAVED, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("schedule", "options", "turns", "bubble", "stages"),
    [
        # A bubble of p - 1 microbatches' forward and backward.
        ("GPipe", {}, 4, [1, 1], ((0,), (1,))),
        thorough("1F1B", {}, 4, [1, 1], ((0,), (1,))),
        # With v stages per rank, the bubble is (p - 1) / v microbatches; with split backwards there
        # is none.
        ("Interleaved1F1B", {}, 8, [1, 1], INTERLEAVED),
        thorough("Interleaved1F1B", {"quick": True}, 8, [1, 1], INTERLEAVED),
        ("ZBVZeroBubble", {}, 8, [0, 0], V),
        ("ZBVZeroBubble", {"quick": True}, 8, [0, 0], V),
        # The slowest stage determines the step.
        ("1F1B", {"stages": wider, "microbatches": 6}, 12, [7, 1], ((0,), (1,))),
        thorough("1F1B", FOUR, 8, [3] * 4, ((0,), (1,), (2,), (3,))),
    ],
)
def test_the_bubble_is_that_of_the_formula(
    schedule: str, options: dict[str, Any], turns: int, bubble: list[int], stages: Any
) -> None:
    """``turns``: compute of the slowest rank; a turn is a microbatch through two linears."""
    found = simulated(schedule, **options)
    num_ranks = len(bubble)
    seconds = (turns + min(bubble)) * TURN
    assert found.seconds == pytest.approx(seconds)
    assert found.bubble_seconds == pytest.approx([each * TURN for each in bubble])
    assert found.exposed_seconds == (0.0,) * num_ranks
    assert found.stages == stages
    computing = [rank.compute_seconds for rank in found.ranks]
    assert computing == pytest.approx([seconds - each * TURN for each in bubble])
    assert found.mfu == pytest.approx(sum(computing) / num_ranks / seconds)
    assert found.num_targets == 2 * options.get("microbatches", 4) * ROWS * WIDTH


def stage_messages(found: fe.PipelineSimulation, rank: int) -> list[float]:
    """Seconds of messages between stages that a rank sends or receives."""
    spans = found.ranks[rank].spans
    return [span.end - span.start for span in spans if is_stage_lane(span.lane)]


def test_messages_take_the_time_of_the_link_between_their_ranks() -> None:
    """In one node, or with a node for each stage of two data-parallel ranks."""
    near, far = Link(1e9, 1e-6), Link(1e8, 1e-5)
    free = simulated()
    for ranks_per_node, link in ((4, near), (2, far)):
        found = simulated(machine=plain_machine(near, far, ranks_per_node))
        expected = link.seconds(4 * ROWS * WIDTH, 1)
        for rank in range(2):
            assert stage_messages(found, rank) == pytest.approx([expected] * 8)
        labels = {span.label for span in found.ranks[0].spans if is_stage_lane(span.lane)}
        assert "activations of stage 0, microbatch 3" in labels
        assert "gradients of stage 0, microbatch 0" in labels
        # The last microbatch's way to the second stage and back is on the critical path.
        assert found.seconds > free.seconds + 2 * expected


def test_collectives_run_beside_the_wait_for_another_stage() -> None:
    """The first stage reduces gradients while the second one, which takes longer, computes."""
    num_bytes = 4 * WIDTH * WIDTH / 2
    found = simulated(
        machine=plain_machine(Link(num_bytes / PRODUCT, 0.0), ranks_per_node=2),
        strategy="optim_grads",
        stages=wider,
    )
    rank = found.ranks[0]
    waits = [
        (each.start, each.start + each.seconds) for each in rank.exposed if is_stage_lane(each.lane)
    ]
    beside = [
        min(span.end, end) - max(span.start, start)
        for span in rank.spans
        for start, end in waits
        if span.lane == "inner reduce"
    ]
    assert sum(seconds for seconds in beside if seconds > 0) >= PRODUCT
    # The first gather of a step starts when the activations arrive.
    by_lane = [each.exposed_by_lane["inner gather"] for each in found.ranks]
    assert by_lane[1] == pytest.approx(by_lane[0])


def blocks(index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(*(Mlp(WIDTH, 9 * WIDTH) for _ in range(2)))


def measured(schedule: str, level: str) -> tuple[int, list[Action]]:
    """Peak bytes of this rank in a step, and its actions. The peak is the smaller of two steps',
    since a thread of gloo's sometimes holds a tensor after its work has ended."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    indices = scene.stage_indices(schedule, mesh.get_local_rank("pp"), 2)
    num_stages = 2 * len(indices)
    actions: list[Action] = []
    gc.collect()
    with LiveStorages() as watch:
        modules = [blocks(index, num_stages) for index in indices]
        for module in modules:
            fe.shard(module, mesh["dp"], level, options=fe.Options(min_unit_size=0))
        params = [param for module in modules for param in module.parameters()]
        optimizer = fe.shard_optimizer(torch.optim.AdamW(params, fused=True))
        group = mesh.get_group("pp")
        stages = [
            NotedStage(module, index, num_stages, torch.device("cpu"), group=group)
            for module, index in zip(modules, indices, strict=True)
        ]
        for stage in stages:
            stage.actions = actions
        make = getattr(pipelining, f"Schedule{schedule}")
        run = make(stages if len(stages) > 1 else stages[0], 4, loss_fn=product_loss)
        inputs = [torch.ones(4 * ROWS, WIDTH)] if 0 in indices else []
        target = torch.ones(4 * ROWS, WIDTH) if num_stages - 1 in indices else None
        peaks = []
        for _ in range(pipeline_job.STEPS + 1):
            watch.restart()
            actions.clear()
            run.step(*inputs, target=target, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(watch.peak)
    dist.barrier()
    return min(peaks[-2:]), actions


class NotedStage(PipelineStage):
    """A stage that notes what it runs."""

    actions: list[Action]

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        self.actions.append(Action("forward", self.stage_index, chunk))
        return super().forward_one_chunk(chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        kind = "backward" if kwargs.get("full_backward", True) else "backward of inputs"
        self.actions.append(Action(kind, self.stage_index, chunk))
        super().backward_one_chunk(chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.actions.append(Action("backward of weights", self.stage_index, chunk))
        super().backward_weight_one_chunk(chunk, *args, **kwargs)


@pytest.mark.parametrize(
    ("schedule", "level"),
    [
        ("1F1B", "optim_grads_params"),
        thorough("GPipe", "optim"),
        thorough("Interleaved1F1B", "optim"),
        pytest.param(
            *("ZBVZeroBubble", "optim_grads_params"),
            marks=[pytest.mark.thorough, scene.passes_on_to_itself],
        ),
    ],
)
def test_order_and_memory_are_those_of_four_gloo_ranks(
    ranks: Ranks, schedule: str, level: str
) -> None:
    """Two pipeline ranks, each with two data-parallel ranks. With two stages per rank that gather
    parameters, gloo's ranks hold more than planned, and different amounts in each run. With one
    stage they hold a few hundred bytes more."""
    least = 0.95 if len(scene.stage_indices(schedule, 0, 2)) > 1 else 0.999
    found = ranks.run(measured, schedule, level, world_size=4)
    options = {"machine": HOST, "strategy": level, "min_unit_size": 0}
    planned = pipelined(blocks, torch.ones(ROWS, WIDTH), schedule, **options)
    for number, (rank, actions) in enumerate(zip(planned.ranks, planned.actions, strict=True)):
        peaks = [peak for peak, _ in found[2 * number : 2 * number + 2]]
        assert list(actions) == found[2 * number][1]
        assert least * max(peaks) <= rank.peak_bytes <= 1.03 * max(peaks)


TOKENS = torch.zeros(2, 32, dtype=torch.long)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"world_size": 5}, "pipeline: expected a divisor of the 5 ranks, at least 2"),
    ({"pipeline": 1}, "pipeline: expected a divisor of the 2 ranks, at least 2"),
    ({"microbatches": 0}, "microbatches: expected at least 1; found 0"),
    ({"schedule": "2F2B"}, "schedule: expected the name or class of a schedule"),
    ({"schedule": nn.Linear}, "schedule: expected the name or class"),
    ({"stages_per_rank": 2}, "stages_per_rank: expected 1 for Schedule1F1B"),
    ({"schedule": "ZBVZeroBubble", "stages_per_rank": 3}, "expected 2 for ScheduleZBVZeroBubble"),
    ({"mesh": (3,)}, "mesh: expected one or two sizes of 2 ranks"),
    ({"stages": 3}, "stages: expected a function"),
    ({"tensor_parallel": 2}, "or `parallelize`; found Linears"),
    ({"tensor_parallel": 3}, "tensor_parallel: expected a divisor of the 2 ranks"),
    ({"context_parallel": 3}, "context_parallel: expected a divisor of the 2 ranks"),
    (
        {"context_parallel": 2, "machine": HOST, "batch": TOKENS},
        "context_parallel: expected 1 on a machine whose host",
    ),
    (
        {"context_parallel": 2, "batch": torch.zeros(1, 6), "target": TOKENS},
        "context_parallel: expected sequences divisible by 4",
    ),
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        simulated(**options)
    assert not dist.is_initialized()


class Raising(Linears):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return super().forward(x)


def test_a_stage_that_reads_values_is_an_error_with_its_line() -> None:
    with pytest.raises(fe.SimulationError, match=r"stage 1 failed at .*`if x.sum\(\) > 0:`"):
        simulated(stages=lambda index, num_stages: (Raising if index else Linears)())
    assert not dist.is_initialized()


causal_lm = partial(llama, depth=3, head_dim=16, tie_word_embeddings=False)


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
}
MODELS = {"Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen2": SLIDING, "Qwen3": SLIDING}


@pytest.mark.parametrize("kind", list(MODELS))
def test_stages_of_a_causal_lm_compute_what_the_model_does(kind: str) -> None:
    build = partial(causal_lm, kind=kind, **MODELS[kind])
    x = tokens = torch.arange(2 * 16).view(2, 16) % 256
    stages = fe.CausalLMStages(build)
    modules = [stages(index, 2) for index in range(2)]
    for module in modules:
        x = module(x)
    torch.testing.assert_close(x, build()(input_ids=tokens, use_cache=False).logits)
    count = sum(param.numel() for module in modules for param in module.parameters())
    assert count == sum(param.numel() for param in build().parameters())


def test_a_causal_lm_without_stages_is_an_error() -> None:
    for build, num_stages, text in (
        (lambda: Linears(1), 2, "expected a causal language model of .*; found Linears"),
        (lambda: causal_lm(kind="Gemma"), 2, "expected a causal language model .*; found gemma"),
        (lambda: causal_lm(tie_word_embeddings=True), 2, "expected a model whose head is not tied"),
        (causal_lm, 4, "expected at most 3, the number of layers of LlamaForCausalLM; found 4"),
    ):
        with pytest.raises(ValueError, match=f"stages: {text}"):
            fe.CausalLMStages(build)(0, num_stages)


@pytest.mark.thorough
def test_a_llama_is_simulated_in_stages_of_tensor_parallel_ranks() -> None:
    """Each half of a layer has an all-reduce in forward and in backward; stages send activations
    in full, to another node."""
    options: dict[str, Any] = {"strategy": "optim", "microbatches": 2, "loss": None}
    simulate = partial(pipelined, fe.CausalLMStages(causal_lm), TOKENS, "1F1B", **options)
    one = simulate(world_size=16, mesh=(2, 4), min_unit_size=0)
    two = simulate(world_size=32, tensor_parallel=2, min_unit_size=0)
    assert one.num_targets == 8 * 2 * TOKENS.numel()
    assert "2 pipeline x 2 x 4 data-parallel ranks" in one.title
    assert "2 pipeline x 8 data-parallel ranks, tensor parallelism over 2 ranks" in two.title
    assert {span.module.split(".")[0] for span in one.ranks[1].spans} >= {"stage 1"}
    assert len(stage_messages(one, 1)) == 4
    assert stage_messages(one, 1) == pytest.approx(stage_messages(two, 1))
    for alone, rank, num_layers in zip(one.ranks, two.ranks, (1, 2), strict=True):
        assert rank.sent_bytes["tensor"] >= 2 * 4 * num_layers * 4 * TOKENS.numel() * WIDTH
        assert rank.memory["weights"] < 0.6 * alone.memory["weights"]


def test_tensor_parallelism_of_a_function() -> None:
    """The last stage may return a DTensor, as logits for ``loss_parallel``."""

    def stages(index: int, num_stages: int) -> nn.Module:
        module: Any = Linears()
        module.is_last = index == num_stages - 1
        return module

    def cut(module: Any, mesh: DeviceMesh) -> None:
        rowwise = RowwiseParallel(use_local_output=not module.is_last)
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "1": rowwise})

    def loss(output: Any, target: Tensor) -> Tensor:
        return product_loss(output.to_local(), target)

    found = simulated(tensor_parallel=2, parallelize=cut, stages=stages, loss=loss)
    assert found.seconds == pytest.approx(5 * TURN / 2)
    assert found.bubble_seconds == pytest.approx([TURN / 2, TURN / 2])


def test_a_package_without_the_extension_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in extension_list.EXTENSIONS if each.folder != "pipelines"]
    monkeypatch.setattr(extension_list, "EXTENSIONS", others)
    message = "pipeline: expected the extension 'pipelines' to be installed"
    with pytest.raises(ValueError, match=message):
        fe.plan(lambda: nn.Linear(2, 2), torch.zeros(1, 2), world_size=2, pipeline=2)
    with pytest.raises(ValueError, match=message):
        simulated()


WIDE, MANY = 1024, 512
ON_GPUS = {"machine": fe.H100, "mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def wide_blocks(index: int, num_stages: int) -> nn.Module:
    """A stage of two blocks; the last one has a head."""
    made: list[Any] = [Mlp(WIDE, 4 * WIDE) for _ in range(2)]
    for number, block in enumerate(made):
        block.block_number = 2 * index + number
    head = [nn.Linear(WIDE, WIDE)] * (index == num_stages - 1)
    return nn.Sequential(*made, *head)


def of_blocks(quick: bool, schedule: str, **options: Any) -> fe.PipelineSimulation:
    options = {"stages": wide_blocks, "microbatches": 6, "pipeline": 2, **options}
    options |= {"world_size": 4 * options["pipeline"], "quick": quick}
    return pipelined(options.pop("stages"), torch.zeros(MANY, WIDE), schedule, **options)


LEVELS = ["no_shard", "optim", "optim_grads_params"]
LEVEL_3, HOST_STATE = "optim_grads_params", fe.Offload(optimizer_state="host")
UNSPLIT = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
FEW: list[tuple[str, str, dict[str, Any]]] = [("Interleaved1F1B", LEVEL_3, ON_GPUS)]
EVERY = [
    ("ZBVZeroBubble", "optim", {**ON_GPUS, "checkpointing": True}),
    *itertools.product([*UNSPLIT, *SPLIT], LEVELS, [ON_GPUS, {"machine": HOST}]),
    ("1F1B", "optim", {**ON_GPUS, "offload": HOST_STATE}),
    # With four pipeline ranks, a V schedule also has stages between its ends and its turn.
    *itertools.product(SPLIT, LEVELS[1:], [{**ON_GPUS, "pipeline": 4, "microbatches": 12}]),
]


@pytest.mark.parametrize(
    ("schedule", "level", "options"),
    [*FEW, *(thorough(*each) for each in EVERY if each not in FEW)],
)
def test_a_quick_simulation_is_like_a_full_one(
    schedule: str, level: str, options: dict[str, Any]
) -> None:
    """Steps, memory, bytes and flops."""
    within = 0.02 if "pipeline" in options else 0.03 if "checkpointing" in options else 0.04
    quick, full = (of_blocks(each, schedule, strategy=level, **options) for each in (True, False))
    assert quick.actions == full.actions
    assert quick.stages == full.stages
    assert quick.seconds == pytest.approx(full.seconds, rel=within)
    assert quick.mfu * quick.seconds == pytest.approx(full.mfu * full.seconds)
    assert quick.tokens_per_second * quick.seconds == pytest.approx(
        full.tokens_per_second * full.seconds
    )
    for one, other in zip(quick.ranks, full.ranks, strict=True):
        assert 0.99 * other.peak_bytes <= one.peak_bytes <= 1.02 * other.peak_bytes
        assert one.sent_bytes == pytest.approx(other.sent_bytes, rel=0.01)
        assert one.compute_seconds == pytest.approx(other.compute_seconds, rel=0.02)
        assert one.copied_bytes == pytest.approx(other.copied_bytes)
        assert one.elsewhere == other.elsewhere
        assert one.checkpoint_bytes == other.checkpoint_bytes
        assert one.title == other.title


def test_stages_that_are_alike_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(job: PipelineJob, index: int, *args: Any) -> StageCosts:
        tried.append(index)
        return stage_costs(job, index, *args)

    monkeypatch.setattr(pipelines, "stage_costs", noted)
    # Stages that differ are simulated: the first has no gradient of its input, and receives
    # nothing; the last has a head.
    x = torch.zeros(MANY, WIDE, requires_grad=True)
    of_blocks(True, "1F1B", pipeline=4, microbatches=8, batch=x, **ON_GPUS)
    assert tried == [0, 1, 3]


@pytest.mark.parametrize("num_blocks", [1, thorough(2)])
def test_blocks_of_stages_are_compiled(num_blocks: int) -> None:
    def stages(index: int, num_stages: int) -> nn.Module:
        return nn.Sequential(*(Mlp(WIDE, 4 * WIDE) for _ in range(num_blocks)))

    def compiled(index: int, num_stages: int) -> nn.Module:
        stage = stages(index, num_stages)
        for block in stage.children():
            block.compile()
        return stage

    simulate = partial(of_blocks, True, "1F1B", strategy="optim", microbatches=4, **ON_GPUS)
    by_hand, found = simulate(stages=compiled), simulate(stages=stages, compile=True)
    assert found.seconds == by_hand.seconds
    assert found.peak_bytes == by_hand.peak_bytes
    assert found.seconds < simulate(stages=stages).seconds


@pytest.mark.parametrize(("sent", "expected"), [([0, 1, 2, None], 3), ([0, 0, 0, 0], 1)])
def test_messages_without_another_side_are_errors(sent: list[int | None], expected: int) -> None:
    """The second rank does not send its last gradient, or sends that of microbatch 0 again."""

    class Schedule(pipelining.Schedule1F1B):
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
            send = functools.cache(self._stage.get_bwd_send_ops)
            self._stage.get_bwd_send_ops = lambda chunk: (
                [] if sent[chunk] is None else send(sent[chunk])
            )
            super()._step_microbatches(*args, **kwargs)

    with pytest.raises(
        ValueError,
        match="expected pipeline rank 1 to send the message that rank 0 receives next, gradients "
        f"of stage 0, microbatch {expected} of 8192 bytes; found gradients of stage 0, microbatch "
        "0 of 8192",
    ):
        simulated(Schedule)


def test_shapes_of_compiled_stages_are_inferred_without_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stages(index: int, num_stages: int) -> nn.Module:
        block = Linears(1)
        block.compile()
        return nn.Sequential(block)

    counters.clear()
    # The patch stops the simulation before the first step, when shapes have been inferred.
    monkeypatch.setattr(PipelineJob, "record", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        simulated(stages=stages)
    assert not counters["frames"]
