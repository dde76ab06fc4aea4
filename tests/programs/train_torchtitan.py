r"""torchtitan's trainer on a CPU: its debug model of Llama 3 in fp32, under FSDP2 or this engine.

::

    torchrun --nproc-per-node 1 tests/programs/train_torchtitan.py --out SEED_DIR
    torchrun --nproc-per-node 2 tests/programs/train_torchtitan.py --seed SEED_DIR --out DIR \
        --engine fsdp2 fsdp_engine

torchtitan trains on accelerators. Three changes make it run on a CPU, with either engine: a device
module; torch's attention in place of compiled FlexAttention (which has no backward on a CPU); and a
tokenizer and texts made here, since those of its debug configuration are not in its wheel. One
assignment in :func:`choose` selects the engine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.programs.packages import TORCHTITAN

sys.path.append(str(TORCHTITAN))

import torch
import torch.distributed as dist

from tests.programs.words import sentences, tokenizer

LAYERS = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    engines = ["fsdp2", "fsdp_engine"]  # one training each, in DIR/ENGINE
    add("--engine", choices=engines, nargs="+", default=[], help="if none: save a seed in DIR/seed")
    add("--out", type=Path, required=True, help="DIR")
    add("--seed", type=Path, help="the DIR of a seed checkpoint, to start from")
    add("--steps", type=int, default=6)
    add("--replicate", type=int, default=1, help="ranks with equal shards")
    add("--tensor-parallel", type=int, default=1)
    add("--accumulate", type=int, default=1, help="microbatches of a step")
    add("--recompute", choices=["none", "full", "selective"], default="none")
    add("--reshard", choices=["default", "always", "never"], default="default")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--save", choices=["disabled", "async"], help="torchtitan's async_mode")
    add("--save-every", type=int, default=3)
    add("--load-step", type=int, default=-1)
    return parser.parse_args()


def use_the_cpu() -> None:
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("set_device", "synchronize", "Stream")},
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )


def run_on_this_torch() -> None:
    """Provide ``dist.set_timeout``, which torchtitan calls and torch 2.13 has under a private
    name."""
    from torch.distributed import distributed_c10d

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


def choose(engine: str) -> None:
    import torchtitan.distributed.fsdp as titan

    if engine == "fsdp_engine":
        from fsdp_engine.fsdp2 import fully_shard

        titan.fully_shard = fully_shard
    else:
        titan.fully_shard = _fully_shard_on_gloo


def _fully_shard_on_gloo(module: Any, **arguments: Any) -> Any:
    """FSDP2's ``fully_shard``, which on gloo must divide gradients itself."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    fully_shard(module, **arguments)
    for each in module if isinstance(module, list) else [module]:
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)
    return module


def make_assets(folder: Path) -> None:
    (folder / "texts").mkdir(parents=True)
    tokenizer().save_pretrained(str(folder / "tokenizer"))
    lengths = random.Random(1)
    rows = [sentences(1, lengths.randint(20, 60), seed)[0] for seed in range(200)]
    with open(folder / "texts" / "train.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in rows)


def configure(given: argparse.Namespace, folder: Path) -> Any:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = str(given.out / "assets" / "tokenizer")
    config.dataloader.dataset_path = str(given.out / "assets" / "texts")
    config.dump_folder = str(folder)
    config.debug.seed = 1
    config.validator.enable = False
    training, parallelism = config.training, config.parallelism
    training.steps, training.seq_len, training.local_batch_size = given.steps, 64, 2
    training.mixed_precision_param = given.dtype
    training.disable_cuda_graphs = True
    data_parallel = dist.get_world_size() // given.tensor_parallel
    training.global_batch_size = training.local_batch_size * data_parallel * given.accumulate
    parallelism.spmd_backend = "partial_dtensor"
    parallelism.data_parallel_replicate_degree = given.replicate
    parallelism.tensor_parallel_degree = given.tensor_parallel
    parallelism.fsdp_reshard_after_forward = given.reshard
    start = None if given.seed is None else str(given.seed / "seed/checkpoint/step-0")
    kinds = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    config.activation_checkpoint = kinds[given.recompute]
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=given.save_every,
        last_save_model_only=False,
        load_only=bool(given.engine) and given.save is None,
        async_mode=given.save or "disabled",
        load_step=given.load_step,
        create_seed_checkpoint=not given.engine,
        initial_load_path=start,
    )
    return config


def train(given: argparse.Namespace, engine: str) -> None:
    folder = given.out / engine
    choose(engine)
    trainer = configure(given, folder).build()
    logged: list[dict[str, Any]] = []

    def log(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        logged.append({"step": step, "loss": loss, "largest": largest, "norm": norm})

    trainer.metrics_processor.log = log
    try:
        trainer.train()
    finally:
        trainer.close()
    if dist.get_rank() == 0:
        classes = {each.__module__ for each in type(trainer.model_parts[0]).__mro__}
        found = {"logged": logged, "engine": "fsdp_engine.fsdp2.fsdp_module" in classes}
        (given.out / f"{engine}.json").write_text(json.dumps(found))


def main() -> None:
    given = parse()
    use_the_cpu()
    run_on_this_torch()
    import datasets

    datasets.disable_progress_bars()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_assets(given.out / "assets")
    dist.barrier()
    for engine in given.engine:
        train(given, engine)
    if not given.engine:
        trainer = configure(given, given.out / "seed").build()
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
