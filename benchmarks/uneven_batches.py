"""Gradients and step time where ranks and microbatches have different numbers of tokens.

    python benchmarks/uneven_batches.py [--steps 40] [--rounds 20] [--ranks 2]

Sequences have log-normal lengths and are padded, as in fine-tuning. Gradients are compared with
those of one process that has all sequences of the step in one batch and takes the mean over its
tokens; the error is the norm of the difference over the norm of that gradient. DDP and FSDP2 run
``backward`` of each microbatch's mean, divided by the number of microbatches, as in their
tutorials. "mean of means" is the same with this engine. "mean_loss" is ``engine.mean_loss``.

The times are those of the 10M GPT at level 3 with equal batches: a step with ``mean_loss`` over
that with a mean; a forward without gradients within ``engine.together()`` over that without it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import harness
import torch
import torch.distributed as dist
from step_time import SIZES
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fsdp_engine as fe
from gpt import GPT

LEVEL = "optim_grads_params"
WIDTH, VOCABULARY, SEQUENCES, LONGEST = 32, 64, 2, 512
MICROBATCHES = (1, 4)
PADDING = -100


class TokenModel(nn.Module):
    """(batch, length) of tokens to (batch, length, vocabulary) of logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.blocks(self.embed(tokens))))
        return result


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels that are ``PADDING`` behind the end of each sequence."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [min(LONGEST, int(draw.lognormvariate(4, 1)) + 1) for _ in range(SEQUENCES)]
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LONGEST), generator=generator)
    labels = torch.randint(VOCABULARY, (SEQUENCES, LONGEST), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = PADDING
    return tokens, labels


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    """The loss over the tokens that are no padding."""
    tokens, labels = batch
    logits = model(tokens).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction=reduction)


def full(param: nn.Parameter) -> Tensor:
    """The gradient of a parameter, on every rank."""
    assert param.grad is not None
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


def mean_of_means(model: nn.Module, micro: list[tuple[Tensor, Tensor]]) -> None:
    """Run backward of each microbatch's mean, divided by the number of microbatches."""
    for batch in micro:
        (loss_of(model, batch, "mean") / len(micro)).backward()


def measure_errors(num_steps: int) -> dict[str, dict[str, list[float]]]:
    """Relative errors of the gradients of each step, by number of microbatches and way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[str, list[float]]] = {}
    alone, ddp, fsdp2 = TokenModel(), DistributedDataParallel(TokenModel()), TokenModel()
    for module in (*fsdp2.blocks, fsdp2):
        fully_shard(module)
    means, sums = TokenModel(), TokenModel()
    fe.shard(means, strategy=LEVEL)
    engine = fe.shard(sums, strategy=LEVEL)

    def exact(model: nn.Module, micro: list[tuple[Tensor, Tensor]]) -> None:
        for number, batch in enumerate(micro):
            count = (batch[1] != PADDING).sum()
            loss = engine.mean_loss(loss_of(model, batch, "sum"), count)
            if number < len(micro) - 1:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()

    ways: dict[str, tuple[nn.Module, Callable[..., None]]] = {
        "DDP": (ddp, mean_of_means),
        "FSDP2": (fsdp2, mean_of_means),
        "mean of means": (means, mean_of_means),
        "mean_loss": (sums, exact),
    }
    for num_micro in MICROBATCHES:
        errors: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(num_steps):
            seeds = [
                [1000 * step + 10 * micro + each for micro in range(num_micro)]
                for each in range(size)
            ]
            every = [make_batch(seed) for row in seeds for seed in row]
            alone.zero_grad()
            whole = (torch.cat([each[part] for each in every]) for part in (0, 1))
            loss_of(alone, tuple(whole), "mean").backward()  # type: ignore[arg-type]
            right = torch.cat([full(param).flatten() for param in alone.parameters()])
            micro = [make_batch(seed) for seed in seeds[rank]]
            for name, (model, run) in ways.items():
                model.zero_grad()
                run(model, micro)
                grads = torch.cat([full(param).flatten() for param in model.parameters()])
                errors[name].append(float((grads - right).norm() / right.norm()))
        found[str(num_micro)] = errors
    return found


def measure_steps(rounds: int) -> dict[str, list[float]]:
    """Seconds of steps."""
    config, num_sequences = SIZES["10M"]
    steps: dict[str, Callable[[], None]] = {}
    for name in ("mean", "mean_loss"):
        torch.manual_seed(0)
        model = GPT(config)
        engine = fe.shard(model, strategy=LEVEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        fe.shard_optimizer(optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (num_sequences, config.sequence_length)
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)

        def step(
            model: nn.Module = model,
            engine: fe.Engine = engine,
            optimizer: torch.optim.Optimizer = optimizer,
            tokens: Tensor = tokens,
            exact: bool = name == "mean_loss",
        ) -> None:
            loss = model(tokens, tokens.roll(-1, 1)).loss
            if exact:
                loss = engine.mean_loss(loss * tokens.numel(), tokens.numel())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    return harness.interleave(steps, rounds)


def measure_forwards(rounds: int) -> dict[str, list[float]]:
    """Seconds of forwards, four at a time."""
    config, num_sequences = SIZES["10M"]
    torch.manual_seed(0)
    model = GPT(config)
    engine = fe.shard(model, strategy=LEVEL)
    tokens = torch.randint(0, config.vocab_size, (num_sequences, config.sequence_length))

    @torch.no_grad()
    def forwards() -> None:
        for _ in range(4):
            model(tokens)

    def together() -> None:
        with engine.together():
            forwards()

    return harness.interleave({"alone": forwards, "together": together}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    found = harness.run_ranks(measure_errors, args.ranks, args.steps)
    errors = {
        num_micro: {name: harness.spread(values) for name, values in ways.items()}
        for num_micro, ways in found.items()
    }
    rows = [
        [name, *(f"{errors[num][name]['median']:.1e}" for num in errors)]
        for name in next(iter(errors.values()))
    ]
    columns = ["engine", *(f"{num} microbatches" for num in errors)]
    harness.print_table("relative error of the gradient, median of the steps", columns, rows)
    times = harness.run_ranks(measure_steps, args.ranks, args.rounds)
    ratio = harness.ratios(times, "mean_loss", "mean")
    print(f"step with mean_loss over step with a mean: {harness.show_ratio(ratio)}")
    times = harness.run_ranks(measure_forwards, args.ranks, args.rounds)
    together = harness.ratios(times, "together", "alone")
    print(f"forward within together() over one without: {harness.show_ratio(together)}")
    record = {"ranks": args.ranks, "errors": errors, "step": ratio, "together": together}
    harness.write_results("uneven_batches", record)


if __name__ == "__main__":
    main()
