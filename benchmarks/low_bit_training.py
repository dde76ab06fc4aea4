"""Held-out loss with optimizer state in 8 and 4 bits: the example's GPT on two gloo ranks.

    python benchmarks/low_bit_training.py [--steps 400] [--seeds 2]

Needs torchao, bitsandbytes and pytorch_optimizer (``pip install --no-deps``). Model, text, order of
the data and schedule are those of ``examples/train_gpt.py``, at level ``optim_grads_params`` on
gloo. All optimizers are AdamW with the same hyperparameters, and are trained alternately, step by
step on the same batches, from the same weights, for each seed. The final held-out loss is compared
with that of state in 32 bits with the same seed. Main weights are fp32, except with two optimizers:
FlashAdamW has bf16 weights and 8 more bits of each; one of torchao's has bf16 weights that are
rounded stochastically. These two are compared with AdamW with fp32 main weights and bf16 compute.

Bytes of an element are those of one rank's state after the last step, with scales, maps of codes
and state of vectors, which is kept in 32 bits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from _curves import compare, shown, train_alternately, verdict

import fsdp_engine as fe

# The example's files import each other as scripts do.
from corpus import BatchPlan, read_corpus
from curve import Curve
from settings import Settings
from train_gpt import Job, build_model, build_optimizers

NAME = "low_bit_training"
NUM_RANKS = 2
FP32, BF16 = "AdamW, 32 bits", "AdamW, 32 bits, bf16 compute"
MOST_LOSS = 1.005


def _torchao(name: str, **options: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def make(groups: list[dict[str, Any]]) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(groups, lr=1e-3, betas=(0.9, 0.98), **options)

    return make


def _bitsandbytes(groups: list[dict[str, Any]]) -> Any:
    import bitsandbytes.optim

    return bitsandbytes.optim.AdamW8bit(groups, lr=1e-3, betas=(0.9, 0.98))


def _flash(groups: list[dict[str, Any]]) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.FlashAdamW(groups, lr=1e-3, betas=(0.9, 0.98), master_weight_bits=24)


# The optimizer (None: the example's), the compute dtype, whether main weights have this dtype.
KINDS: dict[str, tuple[Any, str, bool]] = {
    FP32: (None, "fp32", False),
    "torchao AdamW8bit": (_torchao("AdamW8bit"), "fp32", False),
    "torchao AdamW4bit": (_torchao("AdamW4bit"), "fp32", False),
    "torchao AdamWFp8": (_torchao("AdamWFp8"), "fp32", False),
    "bitsandbytes AdamW8bit": (_bitsandbytes, "fp32", False),
    BF16: (None, "bf16", False),
    "FlashAdamW, bf16 + 8 bits": (_flash, "bf16", True),
    "torchao AdamW8bit, bf16 rounded stochastically": (
        _torchao("AdamW8bit", bf16_stochastic_round=True),
        "bf16",
        True,
    ),
}


def base_of(name: str) -> str:
    """The optimizer with state in 32 bits that another one is compared with."""
    return FP32 if KINDS[name][1] == "fp32" else BF16


def make_job(name: str, out: Path, settings: Settings) -> Job:
    """The example's job with another optimizer."""
    make, dtype, is_main = KINDS[name]
    corpus = read_corpus(settings.data)
    device = torch.device("cpu")
    model = build_model(settings, device)
    policy = None
    if dtype == "bf16":
        main = torch.bfloat16 if is_main else torch.float32
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=main)
    engine = fe.shard(model, strategy=settings.strategy, mp_policy=policy)
    if make is None:
        (optimizer,) = build_optimizers(settings, model)
    else:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = fe.shard_optimizer(make(groups), elementwise=True)
        if name.startswith("torchao"):
            optimizer.register_step_pre_hook(_with_tensors)
    plan = BatchPlan(
        batch_size=settings.batch_size,
        num_microbatches=1,
        num_ranks=dist.get_world_size(),
        sequence_length=settings.sequence_length,
        seed=settings.seed,
    )
    checkpointer = fe.Checkpointer(out, engine, optimizer)
    rank, curve = dist.get_rank(), Curve()
    common = (settings, corpus, plan, model, engine, [optimizer], device, rank, curve)
    return Job(*common, checkpointer, None)


def _with_tensors(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torchao takes learning rates in tensors only; the example sets numbers."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


def bytes_of_element(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of this rank's state, over the elements of its slices."""
    held: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            local = value._local_tensor if isinstance(value, fe.FlatDTensor) else value
            if not isinstance(local, torch.Tensor):
                continue
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
            inner = [getattr(local, name) for name in names] if names else [local]
            held.update((each.data_ptr(), each.nbytes) for each in inner if each.numel())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    num_elements: int = sum(param.to_local().numel() for param in params)
    return sum(held.values()) / num_elements


def train(steps: int, seed: int) -> dict[str, Any]:
    """(step, held-out loss) of all kinds, trained alternately, and bytes of state."""
    settings = Settings(steps=steps, seed=seed)
    # torchao compiles its step for each shape, which would take longer than the training.
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        jobs = {
            name: make_job(name, Path(folder) / str(number), settings)
            for number, name in enumerate(KINDS)
        }
        curves = train_alternately(jobs)
        num_bytes = {name: bytes_of_element(job.optimizers[0]) for name, job in jobs.items()}
    return {"curves": curves, "bytes": num_bytes}


def report(title: str, record: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{found['bytes']:.2f}",
            *shown(found),
            "" if name == base_of(name) else verdict(found["most"], MOST_LOSS),
        ]
        for name, found in record.items()
    ]
    columns = ["optimizer", "bytes an element", "held-out loss by seed", "x 32 bits"]
    harness.print_table(title, [*columns, f"at most {MOST_LOSS}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        runs.append(harness.run_ranks(train, NUM_RANKS, args.steps, seed))
        curves = [run["curves"] for run in runs]
        record = compare(curves, {name: base_of(name) for name in KINDS})
        for name, found in record.items():
            found["bytes"] = runs[0]["bytes"][name]
        report(f"{args.steps} steps, {len(runs)} seeds", record)
        # After each seed, which takes minutes.
        results = {"steps": args.steps, "held_out": record, "curves": curves}
        harness.write_results(NAME, results)


if __name__ == "__main__":
    main()
