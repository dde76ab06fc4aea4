"""Simulated steps of pipelines: times by hand, memory and order of real ranks, messages."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_engine as fe
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.simulation import pipeline_job
from fsdp_engine.simulation import simulate as simulations
from fsdp_engine.simulation.machine import Link, Machine, Processor
from fsdp_engine.simulation.memory_tracker import KINDS
from fsdp_engine.simulation.pipeline import takes_microbatches
from fsdp_engine.simulation.pipeline_job import Action, PipelineJob
from fsdp_engine.simulation.stage_messages import is_stage_lane
from fsdp_engine.simulation.tape import RecordingClock, Replay
from tests.extensions.pipelines import scene
from tests.pool import Ranks
from tests.simulation.live_storages import LiveStorages
from tests.simulation.memory_runs import HOST

WIDTH, ROWS, FLOPS = 64, 32, 1e9
PRODUCT = 2 * ROWS * WIDTH * WIDTH / FLOPS
FREE = Link(math.inf, 0.0)


class Linears(nn.Module):
    """A gain, so that the first linear has a gradient of its input in all stages; linears."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for linear in self.linears:
            x = linear(x)
        return x


def machine(within: Link = FREE, between: Link = FREE, ranks_per_node: int = 8) -> Machine:
    """Matrix products take time, and messages; everything else none."""
    return Machine(
        "a machine without surprises",
        Processor({torch.float32: FLOPS}, math.inf, 1e12),
        within,
        between,
        ranks_per_node,
        host_seconds=0.0,
    )


def product_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def simulated(
    schedule: str = "1F1B", *, pipeline: int = 2, microbatches: int = 4, **options: Any
) -> fe.PipelineSimulation:
    """A step of stages of two linears."""
    x = torch.zeros(ROWS, WIDTH)
    options = {"stages": lambda index, num_stages: Linears(2), "machine": machine()} | options
    return fe.simulate_pipeline(
        options.pop("stages"),
        options.pop("world_size", 2 * pipeline),
        pipeline=pipeline,
        microbatches=microbatches,
        batch=x,
        target=x,
        schedule=schedule,
        loss=options.pop("loss", product_loss),
        optimizer=sgd,
        min_unit_size=0,
        **options,
    )


@pytest.mark.parametrize("pipeline", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_is_that_of_the_formula(schedule: str, pipeline: int) -> None:
    """p - 1 microbatches' forward and backward; the step (m + p - 1) of them."""
    microbatches = 2 * pipeline
    found = simulated(schedule, pipeline=pipeline, microbatches=microbatches)
    turn = 6 * PRODUCT  # two linears: one product in forward each, two in backward
    assert found.seconds == pytest.approx((microbatches + pipeline - 1) * turn)
    assert found.bubble_seconds == pytest.approx([(pipeline - 1) * turn] * pipeline)
    assert found.exposed_seconds == (0.0,) * pipeline
    assert [rank.compute_seconds for rank in found.ranks] == pytest.approx(
        [microbatches * turn] * pipeline
    )
    assert found.mfu == pytest.approx(microbatches / (microbatches + pipeline - 1))
    assert found.num_targets == 2 * microbatches * ROWS * WIDTH


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_the_bubble_of_stages_that_share_a_rank(schedule: str, quick: bool) -> None:
    """Of v stages of a rank, p - 1 of the v-th part of its turn; none if backwards are split."""
    found = simulated(schedule, quick=quick)
    turn = 2 * 6 * PRODUCT
    bubble = turn / 2 if schedule == "Interleaved1F1B" else 0.0
    assert found.seconds == pytest.approx(4 * turn + bubble)
    assert found.bubble_seconds == pytest.approx([bubble, bubble])
    assert found.stages == (((0, 2), (1, 3)) if bubble else ((0, 3), (1, 2)))


def test_the_slowest_stage_determines_the_step() -> None:
    """Of two stages, the second of which has twice the linears."""
    found = simulated(
        stages=lambda index, num_stages: Linears(2 + 2 * index), microbatches=6, schedule="1F1B"
    )
    turn = 6 * PRODUCT
    assert found.seconds == pytest.approx(6 * 2 * turn + turn)
    assert found.bubble_seconds == pytest.approx([7 * turn, turn])


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("GPipe", marks=pytest.mark.thorough)])
def test_a_third_step_is_like_the_second(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1e9, 1e-5)
    options = {"strategy": "optim_grads_params", "machine": machine(link, link)}
    stages = {"stages": lambda index, num_stages: Linears(1 + index)}
    second = simulated(schedule, **options, **stages)
    monkeypatch.setattr(pipeline_job, "STEPS", pipeline_job.STEPS + 1)
    third = simulated(schedule, **options, **stages)
    assert third.seconds == pytest.approx(second.seconds)
    assert third.bubble_seconds == pytest.approx(second.bubble_seconds)
    for one, other in zip(second.ranks, third.ranks, strict=True):
        assert one.seconds == pytest.approx(second.seconds)
        assert other.memory == one.memory


@pytest.mark.parametrize(("ranks_per_node", "is_far"), [(4, False), (2, True)])
def test_messages_take_the_time_of_the_link_between_their_ranks(
    ranks_per_node: int, is_far: bool
) -> None:
    """In one node, or with a node for each stage of two data-parallel ranks."""
    near, far = Link(1e9, 1e-6), Link(1e8, 1e-5)
    found = simulated(machine=machine(near, far, ranks_per_node))
    num_bytes = 4 * ROWS * WIDTH
    expected = (far if is_far else near).seconds(num_bytes, 1)
    for rank in found.ranks:
        spans = [span for span in rank.spans if is_stage_lane(span.lane)]
        assert [span.end - span.start for span in spans] == pytest.approx([expected] * 8)
    labels = {span.label for span in found.ranks[0].spans if is_stage_lane(span.lane)}
    assert "activations of stage 0, microbatch 3" in labels
    assert "gradients of stage 0, microbatch 0" in labels
    # The last microbatch's way to the second stage and back is on the critical path.
    assert found.seconds > simulated().seconds + 2 * expected


def test_collectives_run_beside_the_wait_for_another_stage() -> None:
    """The first stage reduces gradients while the second one, which takes longer, computes."""
    num_bytes = 4 * WIDTH * WIDTH / 2
    found = simulated(
        machine=machine(Link(num_bytes / PRODUCT, 0.0), FREE, 2),
        strategy="optim_grads",
        stages=lambda index, num_stages: Linears(2 + 2 * index),
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("device", {"strategy": "optim_grads_params"}),
        ("offload", {"offload": fe.Offload("host", main_weights="host", gradients="host")}),
        ("beside", {"offload": fe.Offload(optimizer_state="host", overlap_forward=True)}),
        ("activations", {"checkpointing": "offload", "units": [nn.Linear]}),
        ("host", {"machine": HOST, "strategy": "optim_grads_params"}),
    ],
)
def test_a_replay_has_the_times_of_its_tape(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tapes: list[RecordingClock] = []

    def recording(*args: Any) -> RecordingClock:
        tapes.append(RecordingClock(*args))
        return tapes[-1]

    monkeypatch.setattr(simulations, "Clock", recording)
    found = fe.simulate(
        lambda: nn.Sequential(Linears(3), nn.Flatten(0)),
        2,
        batch=torch.zeros(ROWS, WIDTH),
        loss=lambda output: output.sum(),
        min_unit_size=0,
        microbatches=2,
        **options,
    )
    replay = Replay(tapes[0], 2, lambda message, time: None)
    replay.run()
    start, end = replay.finishes[-2:]
    assert end - start == pytest.approx(found.seconds)
    assert replay.clock.spans == tapes[0].spans
    assert replay.clock.exposed == tapes[0].exposed
    assert replay.clock.sent_bytes == found.sent_bytes


class Block(nn.Module):
    """A residual block with activations to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(Block(), Block())


def activations(found: fe.PipelineSimulation) -> list[int]:
    """Most bytes of activations on each rank."""
    kind = KINDS.index("activations")
    return [max(sizes[kind] for _, sizes in rank.memory_series) for rank in found.ranks]


def test_stages_of_1f1b_keep_fewer_microbatches_than_those_of_gpipe() -> None:
    """Stage i of p keeps p - i of them, with GPipe all."""
    options = {"stages": blocks, "pipeline": 3, "strategy": "optim"}
    one_microbatch = 4 * 2 * ROWS * 10 * WIDTH
    few = activations(simulated("1F1B", microbatches=6, **options))
    steps = [first - second for first, second in itertools.pairwise(few)]
    gpipe = activations(simulated("GPipe", microbatches=6, **options))
    more = [all_of_them - kept for all_of_them, kept in zip(gpipe, few, strict=True)]
    # The first and the last stage have inputs, targets and messages of one side only.
    assert steps == pytest.approx([one_microbatch] * 2, rel=0.25)
    assert more == pytest.approx(
        [3 * one_microbatch, 4 * one_microbatch, 5 * one_microbatch], rel=0.1
    )


LEVELS = ["optim", "optim_grads_params"]


def measured(schedule: str, level: str, num_data: int) -> tuple[int, list[Action]]:
    """Most bytes that this rank held in the last step, and what it ran."""
    num_ranks = dist.get_world_size() // num_data
    mesh = init_device_mesh("cpu", (num_ranks, num_data), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    indices = scene.stage_indices(schedule, rank, num_ranks)
    num_stages = num_ranks * len(indices)
    actions: list[Action] = []
    gc.collect()
    with LiveStorages() as watch:
        modules = [blocks(index, num_stages) for index in indices]
        for module in modules:
            fe.shard(module, mesh["dp"], level, min_unit_size=0)
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
        for step in range(pipeline_job.STEPS):
            if step == pipeline_job.STEPS - 1:
                watch.restart()
            actions.clear()
            run.step(*inputs, target=target, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return watch.peak, actions


class NotedStage(PipelineStage):
    """A stage that notes what it runs."""

    actions: list[Action]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.actions.append(Action("forward", self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        kind = "backward" if kwargs.get("full_backward", True) else "backward of inputs"
        self.actions.append(Action(kind, self.stage_index, bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.actions.append(Action("backward of weights", self.stage_index, bwd_chunk_id))
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "schedule",
    [
        "GPipe",
        "1F1B",
        pytest.param("Interleaved1F1B", marks=pytest.mark.thorough),
        pytest.param("ZBVZeroBubble", marks=[pytest.mark.thorough, scene.passes_on_to_itself]),
    ],
)
def test_order_and_memory_are_those_of_four_gloo_ranks(
    ranks: Ranks, schedule: str, level: str
) -> None:
    """Two pipeline ranks of two data-parallel ranks. Two stages of a rank that gather parameters
    hold more on gloo, and not the same each time."""
    least = 0.95 if len(scene.stage_indices(schedule, 0, 2)) > 1 else 0.9999
    found = ranks.run(measured, schedule, level, 2, world_size=4)
    planned = fe.simulate_pipeline(
        blocks,
        4,
        pipeline=2,
        microbatches=4,
        batch=torch.ones(ROWS, WIDTH),
        target=torch.ones(ROWS, WIDTH),
        schedule=schedule,
        loss=product_loss,
        machine=HOST,
        strategy=level,
        min_unit_size=0,
    )
    for number, (rank, actions) in enumerate(zip(planned.ranks, planned.actions, strict=True)):
        peaks = [peak for peak, _ in found[2 * number : 2 * number + 2]]
        print(schedule, level, number, rank.peak_bytes / max(peaks))
        assert list(actions) == found[2 * number][1]
        assert least * max(peaks) <= rank.peak_bytes <= 1.03 * max(peaks)


class WithoutLastSend(pipelining.Schedule1F1B):
    """The second rank does not send its last gradient."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        stage = self._stage
        send = stage.get_bwd_send_ops
        stage.get_bwd_send_ops = lambda chunk: [] if chunk == 3 else send(chunk)
        super()._step_microbatches(*args, **kwargs)


class Swapped(pipelining.Schedule1F1B):
    """The second rank sends the gradient of microbatch 0 twice."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        stage = self._stage
        send, kept = stage.get_bwd_send_ops, []

        def sent(chunk: int) -> list[Any]:
            kept.append(send(chunk))
            return kept[0]

        stage.get_bwd_send_ops = sent
        super()._step_microbatches(*args, **kwargs)


def test_messages_without_another_side_are_errors() -> None:
    with pytest.raises(
        ValueError,
        match="expected pipeline rank 1 to send next what rank 0 receives from it, gradients of "
        "stage 0, microbatch 3 of 8192 bytes; found gradients of stage 0, microbatch 0 of 8192",
    ):
        simulated(WithoutLastSend)
    with pytest.raises(
        ValueError,
        match="expected pipeline rank 1 to send next what rank 0 receives from it, gradients of "
        "stage 0, microbatch 1 of 8192 bytes; found gradients of stage 0, microbatch 0 of 8192",
    ):
        simulated(Swapped)


def test_schedules_take_some_numbers_of_microbatches() -> None:
    taken = {
        schedule: [count for count in range(1, 9) if takes_microbatches(schedule, 2, count)]
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    }
    assert taken["1F1B"] == [*range(2, 9)]
    assert taken["DualPipeV"] == [*range(4, 9)]
    for schedule, counts in taken.items():
        for count in (count for count in range(1, 9) if count not in counts):
            with pytest.raises(ValueError, match="microbatches: expected a number"):
                simulated(schedule, microbatches=count)


def test_wrong_arguments() -> None:
    for options, error, text in (
        ({"world_size": 5}, ValueError, "pipeline: expected a divisor of the 5 ranks, at least 2"),
        ({"pipeline": 1}, ValueError, "pipeline: expected a divisor of the 2 ranks, at least 2"),
        ({"microbatches": 1}, ValueError, "microbatches: expected a number that Schedule1F1B"),
        ({"microbatches": 0}, ValueError, "microbatches: expected at least 1; found 0"),
        ({"schedule": "2F2B"}, ValueError, "schedule: expected the name or class of a schedule"),
        ({"schedule": nn.Linear}, TypeError, "schedule: expected the name or class"),
        ({"stages_per_rank": 2}, ValueError, "stages_per_rank: expected 1 for Schedule1F1B"),
        ({"mesh": (3,)}, ValueError, "mesh: expected one or two sizes of 2 ranks"),
        ({"stages": 3}, TypeError, "stages: expected a function"),
        (
            {"schedule": "ZBVZeroBubble", "stages_per_rank": 3},
            ValueError,
            "stages_per_rank: expected 2 for ScheduleZBVZeroBubble; found 3",
        ),
    ):
        with pytest.raises(error, match=text):
            simulated(**options)
    assert not dist.is_initialized()


class Raising(Linears):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return super().forward(x)


def test_a_stage_that_reads_values_is_an_error_with_its_line() -> None:
    with pytest.raises(fe.SimulationError, match=r"stage 1 failed at .*`if x.sum\(\) > 0:`"):
        simulated(stages=lambda index, num_stages: (Raising if index else Linears)(2))
    assert not dist.is_initialized()


def test_a_trace_has_a_process_for_each_rank() -> None:
    found = simulated(machine=machine(Link(1e9, 0.0)))
    events = found.trace()["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {"compute", "send to stages of rank 1", "receive from stages of rank 0"} <= names
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    assert "rank   stages" in str(found)


def causal_lm(kind: str = "Llama", **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        tie_word_embeddings=options.pop("tie_word_embeddings", False),
        **options,
    )
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
}
MODELS = {"Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen2": SLIDING, "Qwen3": SLIDING}


@pytest.mark.parametrize("kind", list(MODELS))
def test_stages_of_a_causal_lm_compute_what_the_model_does(kind: str) -> None:
    def build() -> nn.Module:
        return causal_lm(kind, **MODELS[kind])

    tokens = torch.arange(2 * 16).view(2, 16) % 256
    expected = build()(input_ids=tokens, use_cache=False).logits
    stages, x = fe.CausalLMStages(build), tokens
    modules = [stages(index, 2) for index in range(2)]
    for module in modules:
        x = module(x)
    torch.testing.assert_close(x, expected)
    count = sum(param.numel() for module in modules for param in module.parameters())
    assert count == sum(param.numel() for param in build().parameters())


def test_a_causal_lm_without_stages_is_an_error() -> None:
    for build, num_stages, text in (
        (lambda: Linears(1), 2, "expected a causal language model of .*; found Linears"),
        (lambda: causal_lm("Gemma"), 2, "expected a causal language model .*; found gemma"),
        (lambda: causal_lm(tie_word_embeddings=True), 2, "expected a head of its own"),
        (causal_lm, 4, "expected at most 3, the layers of LlamaForCausalLM; found 4"),
    ):
        with pytest.raises(ValueError, match=f"stages: {text}"):
            fe.CausalLMStages(build)(0, num_stages)


def test_a_llama_is_simulated_in_stages() -> None:
    tokens = torch.zeros(2, 32, dtype=torch.long)
    found = fe.simulate_pipeline(
        fe.CausalLMStages(causal_lm),
        16,
        pipeline=2,
        microbatches=2,
        batch=tokens,
        target=tokens,
        mesh=(2, 4),
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        min_unit_size=0,
    )
    assert found.num_targets == 8 * 2 * tokens.numel()
    assert "2 pipeline x 2 x 4 data-parallel ranks" in found.title
    spans = [span for span in found.ranks[1].spans if is_stage_lane(span.lane)]
    assert len(spans) == 4
    assert {span.module.split(".")[0] for span in found.ranks[1].spans} >= {"stage 1"}


def test_a_llama_is_simulated_in_stages_of_tensor_parallel_ranks() -> None:
    """Each half of a layer has an all-reduce in forward and in backward; stages send activations
    in full, to another node."""
    tokens = torch.zeros(2, 32, dtype=torch.long)
    options = {"pipeline": 2, "microbatches": 2, "batch": tokens, "target": tokens}
    one, two = (
        fe.simulate_pipeline(
            fe.CausalLMStages(causal_lm),
            16 * size,
            tensor_parallel=size,
            strategy="optim",
            min_unit_size=0,
            **options,
        )
        for size in (1, 2)
    )
    assert "2 pipeline x 8 data-parallel ranks of 2 tensor-parallel ranks each" in two.title
    messages = [
        [span.end - span.start for span in each.ranks[1].spans if is_stage_lane(span.lane)]
        for each in (one, two)
    ]
    assert messages[0] == pytest.approx(messages[1])
    num_bytes = 4 * tokens.numel() * WIDTH
    for rank, num_layers in zip(two.ranks, (1, 2), strict=True):
        assert rank.sent_bytes["tensor"] >= 2 * 4 * num_layers * num_bytes
    for alone, rank in zip(one.ranks, two.ranks, strict=True):
        assert rank.memory["weights"] < 0.6 * alone.memory["weights"]


def test_stages_without_a_tensor_parallel_plan_are_an_error() -> None:
    with pytest.raises(ValueError, match="or `parallelize`; found Linears"):
        simulated(tensor_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel: expected a divisor of the 2 ranks"):
        simulated(tensor_parallel=3)


def test_tensor_parallelism_of_a_function() -> None:
    def cut(module: nn.Module, mesh: DeviceMesh) -> None:
        plan = {"linears.0": ColwiseParallel(), "linears.1": RowwiseParallel()}
        parallelize_module(module, mesh, plan)

    found = simulated(tensor_parallel=2, parallelize=cut)
    turn = 6 * PRODUCT / 2
    assert found.seconds == pytest.approx(5 * turn)
    assert found.bubble_seconds == pytest.approx([turn, turn])


def test_the_last_stage_may_return_a_dtensor() -> None:
    """As logits for ``loss_parallel``."""

    def cut(module: nn.Module, mesh: DeviceMesh) -> None:
        plan: dict[str, Any] = {"linears.0": ColwiseParallel(), "linears.1": RowwiseParallel()}
        if module.is_last:
            plan["linears.1"] = RowwiseParallel(use_local_output=False)
        parallelize_module(module, mesh, plan)

    def stages(index: int, num_stages: int) -> nn.Module:
        module = Linears(2)
        module.is_last = index == num_stages - 1  # type: ignore[assignment]
        return module

    def loss(output: DTensor, target: Tensor) -> Tensor:
        return product_loss(output.to_local(), target)

    options = {"tensor_parallel": 2, "parallelize": cut, "stages": stages}
    found = simulated(loss=loss, **options)
    assert found.seconds == pytest.approx(5 * 6 * PRODUCT / 2)


def test_shapes_of_compiled_stages_are_inferred_without_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    def stages(index: int, num_stages: int) -> nn.Module:
        block = Linears(1)
        block.compile()
        return nn.Sequential(block)

    counters.clear()
    monkeypatch.setattr(PipelineJob, "record", _stop)
    with pytest.raises(_Stopped):
        simulated(stages=stages)
    assert not counters["frames"]


class _Stopped(Exception):
    """Shapes have been inferred."""


def _stop(*args: Any, **kwargs: Any) -> None:
    raise _Stopped
