"""Loading a pretrained model into shards: memory of each rank and time, compared with alternatives.

    python benchmarks/pretrained.py              # a 1 GB Llama on 2 and 4 gloo ranks, some minutes
    python benchmarks/pretrained.py --layers 4   # a smaller one

Level 3, fp32. Every variant runs in its own processes, alternately. Reported are the growth of a
rank's resident memory from after imports to its peak (including mapped pages of files), and the
wall time from a folder to a sharded model. Files are in the page cache, which a first run fills.

    load_pretrained     built on meta, sharded, each rank reads the bytes of its slices
    from_pretrained     every rank reads all of it, then shards
    FSDP2               built on meta, sharded, rank 0 reads all of it and broadcasts
                        (set_model_state_dict with broadcast_from_rank0)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_engine as fe

MIB = 2**20
WAYS = ("load_pretrained", "from_pretrained", "FSDP2")


def config(layers: int) -> LlamaConfig:
    """The config of a Llama; 18 layers are about 1 GB in fp32."""
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=16384,
    )


def on_meta(folder: str) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    return model


def load_pretrained(folder: str) -> nn.Module:
    model = on_meta(folder)
    fe.shard(model, initial_values="empty")
    fe.load_pretrained(model, folder)
    return model


def from_pretrained(folder: str) -> nn.Module:
    model: nn.Module = LlamaForCausalLM.from_pretrained(folder)
    fe.shard(model)
    return model


def fsdp2(folder: str) -> nn.Module:
    model = on_meta(folder)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    whole = {}
    if dist.get_rank() == 0:
        whole = LlamaForCausalLM.from_pretrained(folder).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


FUNCTIONS = dict(zip(WAYS, (load_pretrained, from_pretrained, fsdp2), strict=True))


def _most_resident() -> float:
    """Peak of resident memory since :func:`_begin`, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _begin() -> float:
    """Reset the peak. Returns the resident memory. (``ru_maxrss`` would include the parent's.)"""
    Path("/proc/self/clear_refs").write_text("5")
    return _most_resident()


def _rank(rank: int, world_size: int, way: str, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(out, f"store-{way}-{world_size}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    fe.shard(nn.Linear(2, 2), initial_values="rank0")  # run lazy imports
    before = _begin()
    dist.barrier()
    begin = time.perf_counter()
    model = FUNCTIONS[way](folder)
    dist.barrier()
    seconds = time.perf_counter() - begin
    held = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[attr-defined]
    found = {"seconds": seconds, "MiB": _most_resident() - before, "shard MiB": held / MIB}
    (Path(out) / f"result-{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(way: str, world_size: int, folder: str) -> dict[str, float]:
    """Run one variant. Returns seconds, and memory of the rank with the largest peak."""
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_rank, (world_size, way, folder, out), world_size)
        found = [
            json.loads((Path(out) / f"result-{rank}").read_text()) for rank in range(world_size)
        ]
    return {name: max(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=18, help="of the Llama")
    parser.add_argument("--rounds", type=int, default=3, help="of all ways, in turns")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config(options.layers)).save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / MIB
        run("load_pretrained", 2, folder)  # fills the page cache
        rows = []
        for world_size in (2, 4):
            rounds = [
                {way: run(way, world_size, folder) for way in WAYS} for _ in range(options.rounds)
            ]
            for way in WAYS:
                seconds = [each[way]["seconds"] for each in rounds]
                ratios = [
                    each[way]["seconds"]
                    / min(each["from_pretrained"]["seconds"], each["FSDP2"]["seconds"])
                    for each in rounds
                ]
                memory = max(each[way]["MiB"] for each in rounds)
                shard = rounds[0][way]["shard MiB"]
                results[f"{way} on {world_size}"] = {
                    "seconds": seconds,
                    "over the better of the others": ratios,
                    "MiB": memory,
                    "shard MiB": shard,
                }
                rows.append(
                    [
                        f"{way} on {world_size}",
                        f"{memory:,.0f}",
                        f"{memory - shard:,.0f}",
                        f"{statistics.median(seconds):.2f}",
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                    ]
                )
    columns = ["way", "MiB at most", "beyond its shard", "seconds", "over the better other"]
    harness.print_table(f"a Llama of {size:,.0f} MiB", columns, rows)
    harness.write_results("pretrained", {"size MiB": size, "ways": results})


if __name__ == "__main__":
    main()
