"""Simulated step time at level 3 where ranks leave out different blocks.

    python benchmarks/modules_left_out_clock.py [--steps 4] [--latency 100] [--only h100 | cpu]

``h100``: an 8B Llama on 64 ranks, 8 nodes of 8 H100, 4,096 tokens a rank, gathers and reductions
in bf16. ``cpu``: the two gloo ranks and the GPT of 10M of ``modules_left_out.py``, on this machine
as calibrated, beside the measured ratios.

The engine of every rank runs, in a thread of one process (``_clock_of_ranks.py``): forwards,
backwards, gathers and host messages are those of training. Only times are simulated. Operations and
collectives take the times of ``fe.simulate`` (docs/internals/simulation.md), a collective begins
when all of its ranks have reached it, and a host message is answered ``latency`` after the last
rank has sent it. At the end of a step the host waits for its device, as a loop that logs the loss
does.

"all blocks" is a step without ``engine.together()``; it is also the step of ranks that run the
blocks that they could leave out ("dummy passes"). Within "10 % left out" each rank leaves out each
block with probability 0.1, drawn anew by each rank in each step. In "at once", a unit is gathered
as soon as one rank needs it; else the engine also waits for ranks that will need the unit soon.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import harness
import torch
from _clock_of_ranks import (
    RankClock,
    StepCosts,
    Team,
    clock_of,
    messages_between_threads,
    set_rank,
)
from modules_left_out import LEFT_OUT, LEVEL
from simulated import Llama, LlamaShape
from step_time import SIZES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.planner.simulation.calibrate import calibrate
from fsdp_engine.planner.simulation.operations import (
    OperationCache,
    Operations,
    message_seconds,
)
from fsdp_engine.planner.simulation.ranks import SimulatedBackend, simulated_ranks
from fsdp_engine.planner.simulation.simulate import build_fake_model, to_fake
from gpt import GPT

MICRO = 1e-6


class SomeBlocks(nn.ModuleList):
    """A list of blocks. Iterating over it skips each block with probability ``left_out``."""

    def __init__(self, blocks: nn.ModuleList, draw: random.Random) -> None:
        super().__init__(blocks)
        self.left_out = 0.0
        self._draw = draw

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for block in super().__iter__() if self._draw.random() >= self.left_out)


@dataclass(frozen=True)
class Way:
    """A kind of step.

    Attributes:
        name: The name in tables.
        together: Whether the step runs within ``engine.together()``.
        left_out: The fraction of blocks that each rank leaves out.
        holds_back: See :class:`Team`.
        host_waits: Whether the host waits for the end of the step. False, as in ``fe.simulate``: it
            runs ahead.
        num_warmup: Number of steps that are not counted, until orders are recorded.
    """

    name: str
    together: bool = False
    left_out: float = 0.0
    holds_back: bool = True
    host_waits: bool = True
    num_warmup: int = 1


BASE = "all blocks"
LEFT = "10 % left out, together"
CHECK = Way("as fe.simulate", host_waits=False)
WAYS = (
    CHECK,
    Way(BASE),
    Way("all blocks, together", together=True, num_warmup=2),
    Way(LEFT, together=True, left_out=LEFT_OUT),
    Way(f"{LEFT}, at once", together=True, left_out=LEFT_OUT, holds_back=False),
)


@dataclass(frozen=True)
class Job:
    """What ranks train.

    Attributes:
        sizes: Sizes of the mesh.
        machine: The machine of the ranks.
        build: Builds the model, whose attribute ``blocks`` is a list.
        make_batch: Makes the model's inputs.
        policy: The policy of dtypes.
        arguments: Other arguments of ``fe.shard``.
    """

    sizes: tuple[int, ...]
    machine: fe.Machine
    build: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    policy: fe.MixedPrecisionPolicy | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Ranks:
    """Runs the steps of all ranks.

    Args:
        job: The job that the ranks train.
        latency: Seconds of a host message.
        num_steps: Number of measured steps of each way with random modules.
        ways: Kinds of steps.
    """

    def __init__(
        self, job: Job, latency: float, num_steps: int, ways: Sequence[Way] = WAYS
    ) -> None:
        self._job = job
        self._ways = ways
        self._team = Team(job.sizes, job.machine, latency)
        self._steps = [
            way for way in ways for _ in range(way.num_warmup + (num_steps if way.left_out else 1))
        ]
        self._clocks = [clock_of(self._team, rank) for rank in range(self._team.num_ranks)]
        self._found: dict[str, list[dict[str, float]]] = {}
        self._known = OperationCache()
        self._end = 0.0

    def run(self) -> dict[str, list[dict[str, float]]]:
        """Costs of the steps of each way."""
        on_host = not self._job.machine.host_runs_ahead
        with simulated_ranks(self._job.sizes, on_host=on_host) as mesh, messages_between_threads():
            threads = [
                threading.Thread(target=self._run_rank, args=(clock, mesh), daemon=True)
                for clock in self._clocks
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._team.error is not None:
            raise self._team.error
        warmups = {way.name: way.num_warmup for way in self._ways}
        return {name: steps[warmups[name] :] for name, steps in self._found.items()}

    def _run_rank(self, clock: RankClock, mesh: DeviceMesh) -> None:
        set_rank(clock)
        with self._team.running:
            try:
                self._train(clock, mesh)
            except BaseException as error:
                self._team.error = self._team.error or error
            self._team.running.notify_all()

    def _train(self, clock: RankClock, mesh: DeviceMesh) -> None:
        job, team = self._job, self._team
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        operations = Operations(clock, _Nothing(), fake, self._known)  # type: ignore[arg-type]
        with fake, operations:
            on_host = not job.machine.host_runs_ahead
            with SimulatedBackend(on_host, clock).used():  # type: ignore[arg-type]
                model = build_fake_model(job.build)
                engine = fe.shard(
                    model,
                    mesh,
                    strategy=LEVEL,
                    mp_policy=job.policy,
                    initial_values="rank0",
                    **job.arguments,
                )
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            fe.shard_optimizer(optimizer)
            prepare = self.prepare(model, engine, clock.rank)
            batch = to_fake(job.make_batch(), fake)
            for way in self._steps:
                clock.costs = StepCosts()
                prepare(way)
                team.holds_back = way.holds_back
                around: AbstractContextManager[None] = nullcontext()
                if way.together:
                    around = engine.together()
                with around:
                    clock.phase = "forward"
                    output = model(*batch)
                    loss = output if isinstance(output, Tensor) else output.loss
                    clock.phase = "backward"
                    loss.backward()
                    del output, loss
                clock.phase = "step"
                optimizer.step()
                optimizer.zero_grad()
                clock.end_step()
                team.barrier(lambda way=way: self._end_step(way))  # type: ignore[misc]

    def prepare(self, model: Any, engine: fe.Engine, rank: int) -> Callable[[Way], None]:
        """Prepare the model of a rank; returns a function that is called before each step."""
        model.blocks = blocks = SomeBlocks(model.blocks, random.Random(rank))

        def set_left_out(way: Way) -> None:
            blocks.left_out = way.left_out

        return set_left_out

    def _end_step(self, way: Way) -> None:
        """Record the costs of a step that all ranks have issued."""
        end = max(clock.step_end(host_waits=way.host_waits) for clock in self._clocks)
        self._team.end_step()
        costs = [clock.costs for clock in self._clocks]
        found = {
            "seconds": end - self._end,
            "most compute": max(each.compute for each in costs),
            "exposed gathers": statistics.mean(each.exposed_by("gather") for each in costs),
            "exposed reductions": statistics.mean(each.exposed_by("reduce") for each in costs),
            "gathers": statistics.mean(each.num_gathers for each in costs),
            "rounds": statistics.mean(each.num_rounds for each in costs),
        }
        self._end = end
        self._found.setdefault(way.name, []).append(found)
        print(way.name, {name: round(value, 4) for name, value in found.items()}, flush=True)


class _Nothing:
    """A tracker that tracks no memory."""

    has_places = False

    def made(self, tensors: Sequence[Tensor]) -> None:
        """See ``MemoryTracker``."""

    def sample(self, num_bytes: float) -> None:
        """See ``MemoryTracker``."""

    def place_of(self, tensor: Tensor) -> None:
        """See ``MemoryTracker``; all is on the device."""


def check_clock(job: Job, found: dict[str, list[dict[str, float]]]) -> None:
    """Check that ranks that use the same modules take the time of ``fe.simulate``.

    Raises:
        AssertionError: The times differ.
    """
    expected = fe.simulate(
        job.build,
        torch.Size(job.sizes).numel(),
        mesh=job.sizes,
        batch=job.make_batch(),
        machine=job.machine,
        strategy=LEVEL,
        mp_policy=job.policy,
    )
    seconds = found.pop(CHECK.name)[0]["seconds"]
    # fe.simulate does not include host messages.
    assert abs(seconds / expected.seconds - 1) < 1e-3, (seconds, expected.seconds)


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Spreads over steps, by way."""
    base = found[BASE][0]["seconds"]
    return {
        way: {
            "over all blocks": harness.spread([each["seconds"] / base for each in steps]),
            **{name: harness.spread([each[name] for each in steps]) for name in steps[0]},
        }
        for way, steps in found.items()
    }


def show(title: str, ways: dict[str, Any], ratio: str = "over all blocks") -> None:
    """Print a table."""
    columns = [
        "way",
        "step ms",
        ratio,
        "exposed gathers ms",
        "reductions ms",
        "gathers",
    ]
    rows = [
        [
            way,
            f"{row['seconds']['median'] * 1e3:.1f}",
            harness.show_ratio(row[ratio]),
            f"{row['exposed gathers']['median'] * 1e3:.1f}",
            f"{row['exposed reductions']['median'] * 1e3:.1f}",
            f"{row['gathers']['median']:.0f}",
        ]
        for way, row in ways.items()
    ]
    harness.print_table(title, columns, rows)


def run_h100(
    latency: float, sizes: tuple[int, ...], num_blocks: int, num_steps: int
) -> dict[str, Any]:
    """Returns the spreads of each way on simulated H100s."""
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    shape = replace(LlamaShape(), num_blocks=num_blocks)
    job = Job(sizes, fe.H100, lambda: Llama(shape), lambda: (tokens, tokens), policy)
    found = Ranks(job, latency, num_steps).run()
    check_clock(job, found)
    return summary(found)


def run_cpu(num_steps: int) -> dict[str, Any]:
    """Returns the spreads predicted for this machine, and the measured ratios."""
    machine = calibrate()
    config, num_sequences = SIZES["10M"]
    shape = (num_sequences, config.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.long)
    job = Job((2,), machine, lambda: GPT(config), lambda: (tokens, tokens))
    found = Ranks(job, message_seconds(machine.within_node, 0, 2, 2), num_steps).run()
    check_clock(job, found)
    predicted = summary(found)
    show("two gloo ranks, predicted", predicted)
    measured = json.loads((harness.RESULTS / "modules_left_out.json").read_text())["results"]
    return {"predicted": predicted, "measured": measured["ratios"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mesh", type=int, nargs="+", default=[64])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--latency", type=int, default=100, help="of a host message, microseconds")
    parser.add_argument("--only", choices=("h100", "cpu"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only in (None, "cpu"):
        harness.write_results("modules_left_out_clock_cpu", run_cpu(4 * args.steps))
    if args.only in (None, "h100"):
        sizes = tuple(args.mesh)
        ways = run_h100(args.latency * MICRO, sizes, args.blocks, args.steps)
        show(f"{sizes} x H100, host messages of {args.latency} us", ways)
        record = {"ranks": sizes, "latency us": args.latency, "ways": ways}
        harness.write_results(f"modules_left_out_clock_{args.latency}us", record)


if __name__ == "__main__":
    main()
